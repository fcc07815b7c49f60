"""Wraps the method of a gRPC handler, for interceptors."""

from collections.abc import Callable
from typing import Any

import grpc


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
    assert handler.unary_unary is not None, "the contract has no client streams"
    return grpc.unary_unary_rpc_method_handler(single(handler.unary_unary), **options)
