"""Implements ModelService, which describes a model and sends its tokenizer."""

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

from grpc import aio

from draftbridge.v1 import model_pb2, model_pb2_grpc
from services.model.host import LoadedModel
from services.rpc import codec
from services.version import VERSION

# A bridge refuses messages of more than 320 KiB.
_CHUNK_BYTES = 1 << 18


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Describes a model. gRPC prescribes the method names."""

    def __init__(self, description: model_pb2.Model, tokenizer_json: bytes) -> None:
        self._model = model_pb2.Model()
        self._model.CopyFrom(description)
        self._model.instance_id = uuid4().hex
        self._tokenizer_json = tokenizer_json

    async def GetModel(  # noqa: N802
        self, request: model_pb2.GetModelRequest, context: "aio.ServicerContext[Any, Any]"
    ) -> model_pb2.GetModelResponse:
        """See the contract."""
        return model_pb2.GetModelResponse(model=self._model)

    async def GetTokenizer(  # noqa: N802
        self, request: model_pb2.GetTokenizerRequest, context: "aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[model_pb2.GetTokenizerResponse]:
        """See the contract."""
        data = self._tokenizer_json
        for start in range(0, len(data), _CHUNK_BYTES):
            last = start + _CHUNK_BYTES >= len(data)
            yield model_pb2.GetTokenizerResponse(
                chunk=data[start : start + _CHUNK_BYTES], sha256=self._model.tokenizer_sha256 if last else None
            )


def describe(loaded: LoadedModel, role: model_pb2.Role.ValueType) -> model_pb2.Model:
    """Returns the description of a loaded model for the wire."""
    engine = loaded.engine
    return codec.write_model(
        loaded.model,
        revision=loaded.files.revision,
        role=role,
        engine=engine.name,
        device=engine.device,
        dtype=engine.dtype,
        slot_count=engine.slot_count,
        deterministic=engine.logit_tolerance == 0.0,
        server_version=VERSION,
        grammars=True,
    )
