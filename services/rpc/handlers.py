"""Wraps the method of a gRPC handler, for interceptors."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from grpc import aio


def wrapped(
    handler: "grpc.RpcMethodHandler[Any, Any]",
    stream: Callable[[Any], Any],
    single: Callable[[Any], Any],
    parse: Callable[[bytes], Any] | None = None,
) -> "grpc.RpcMethodHandler[Any, Any]":
    """Returns a handler of the same kind, whose method is what `stream` or `single` makes of the handler's.

    `stream`: for methods that answer with a stream, `single`: for the others. `parse` replaces the parser of requests.
    """
    options = {
        "request_deserializer": parse or handler.request_deserializer,
        "response_serializer": handler.response_serializer,
    }
    if handler.stream_stream is not None:
        return grpc.stream_stream_rpc_method_handler(stream(handler.stream_stream), **options)
    if handler.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler(stream(handler.unary_stream), **options)
    if handler.stream_unary is not None:
        return grpc.stream_unary_rpc_method_handler(single(handler.stream_unary), **options)
    assert handler.unary_unary is not None
    return grpc.unary_unary_rpc_method_handler(single(handler.unary_unary), **options)


def called_early(
    handler: "grpc.RpcMethodHandler[Any, Any]", receive: "Callable[[aio.ServicerContext[Any, Any]], Awaitable[Any]]"
) -> "grpc.RpcMethodHandler[Any, Any]":
    """Returns a handler that gRPC calls once the headers of a call have arrived, also if its method takes one message.

    `receive` then returns that message. On the wire, a stream of one message is the same as a message.
    """
    if handler.request_streaming:
        return handler
    behavior: Any = handler.unary_unary or handler.unary_stream

    async def single(requests: Any, context: "aio.ServicerContext[Any, Any]") -> Any:
        return await behavior(await receive(context), context)

    async def stream(requests: Any, context: "aio.ServicerContext[Any, Any]") -> AsyncIterator[Any]:
        async with aclosing(behavior(await receive(context), context)) as responses:
            async for response in responses:
                yield response

    options: dict[str, Any] = {
        "request_deserializer": handler.request_deserializer,
        "response_serializer": handler.response_serializer,
    }
    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(stream, **options)
    return grpc.stream_unary_rpc_method_handler(single, **options)
