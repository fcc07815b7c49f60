"""A zoo in this process: small trained models of several tokenizer families, each with its own gRPC server."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from bridge.generation import Delta, Finished
from bridge.planning.planner import Mode, SpeculationParameters
from bridge.request import Request
from bridge.sampling.sampler import Logits, SamplingParameters
from bridge.text.models import Model, SpecialIds
from draftbridge import Credentials
from draftbridge.v1 import draft_pb2, model_pb2
from services.bridge import connection, endpoint
from services.bridge.gateway import Gateway
from services.bridge.pairing import Wish
from services.bridge.zoo import Zoo
from services.config import Role, ServerConfig
from services.engines.engine import Row
from services.model.draft.servicer import DraftServicer
from services.model.draft.suffix import SuffixModel, SuffixSession
from services.model.host import LoadedModel
from services.model.server import _register, register
from services.model.servicer import ModelServicer
from services.model.target.servicer import TargetServicer
from services.rpc import codec
from services.rpc.server import Server
from services.sandbox.jinja import run_template
from services.store.files import ModelFiles
from tests.support import families, tiny

SAMPLING = SamplingParameters(temperature=0.8)
FAMILIES = ("gpt-2", "llama-3", "gemma", "unigram", "t5", "llama-2", "bytes")


class NgramEngine(tiny.HashEngine):
    """A model trained on the corpus of `tiny`: how often a token followed the last one and the last two.

    `pass_seconds`: a forward takes at least so long, as that of a large model does.
    """

    def __init__(self, of: Model, slot_count: int = 4, pass_seconds: float = 0.0) -> None:
        super().__init__(of, slot_count=slot_count, sharpness=0.3)
        self._pass_seconds = pass_seconds
        self._counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for text in tiny.CORPUS:
            ids = of.vocabulary.pieces(text.encode()).ids
            for place, id_ in enumerate(ids):
                for length in (1, 2):
                    self._counts[tuple(ids[max(place - length, 0) : place])][id_] += 1

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """See `Engine.forward`."""
        time.sleep(self._pass_seconds)  # instead of computing
        return super().forward(rows)

    def logits(self, ids: Sequence[int]) -> Logits:
        """See `HashEngine.logits`."""
        scores = np.array(super().logits(ids))
        for length in (1, 2):
            for id_, number in self._counts[tuple(ids[-length:])].items():
                scores[id_] += length * np.log1p(5 * number)
        return scores


def trained(
    family: str, name: str = "", revision: str = "1", pass_seconds: float = 0.0, **options: object
) -> LoadedModel:
    """Returns a trained model with the tokenizer of a family, ready to be served."""
    words = families.vocabulary(family)
    of = Model(
        name=name or family,
        context_length=512,
        vocabulary_size=words.size + 3,
        vocabulary=words,
        special_ids=SpecialIds(bos=1, eos=(2,), pad=0),
        run_template=run_template,
        forward_costs=((1, 1_000_000), (8, 1_200_000)),
        **options,  # type: ignore[arg-type]
    )
    engine = NgramEngine(of, pass_seconds=pass_seconds)
    files = ModelFiles(families.tokenizer_json(family), words, of.special_ids, "", revision)
    return LoadedModel(files, engine, of, tiny.scheduler(engine))


@asynccontextmanager
async def serving(
    model: LoadedModel | str, address: str = "127.0.0.1:0", role: Role = Role.BOTH, keys: Path | None = None
) -> AsyncIterator[str]:
    """Serves a model, or prompt lookup for "suffix", and yields the address."""
    server = Server(address, ServerConfig(grace=1.0, keys=keys))
    if isinstance(model, str):
        suffix = SuffixModel(model, 8)
        described = codec.write_model(suffix.model, role=model_pb2.ROLE_DRAFT, engine="suffix")

        async def open_session(sampling: SamplingParameters, seed: int) -> SuffixSession:
            return suffix.open()

        draft = DraftServicer(suffix.model, open_session)
        _register(server, ModelServicer(described, suffix.tokenizer_json), draft, TargetServicer(suffix.model, None))
    else:
        register(server, model, role)
    stop, started = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(server.run_until(stop, lambda _: started.set()))
    try:
        await started.wait()
        yield server.address
    finally:
        stop.set()
        await task
        if not isinstance(model, str):
            model.scheduler.close()


def renamed(model: LoadedModel, name: str) -> LoadedModel:
    """Returns the model under another name."""
    return replace(model, model=replace(model.model, name=name))


class LyingDraft(DraftServicer):
    """Proposes ids outside the vocabulary of its model."""

    async def Draft(  # noqa: N802
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: object
    ) -> AsyncIterator[draft_pb2.DraftResponse]:
        async for request in request_iterator:
            if request.WhichOneof("kind") == "sync":
                yield draft_pb2.DraftResponse(epoch=request.sync.epoch, token_ids=[10_000_000], done=True)


class HangingDraft(DraftServicer):
    """Accepts streams and never answers. `stream_count`: how many it has got."""

    stream_count = 0

    async def Draft(  # noqa: N802
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: object
    ) -> AsyncIterator[draft_pb2.DraftResponse]:
        HangingDraft.stream_count += 1
        await asyncio.Event().wait()
        yield draft_pb2.DraftResponse()


@asynccontextmanager
async def misbehaving(model: LoadedModel, draft: type[DraftServicer]) -> AsyncIterator[str]:
    """Serves a model as a draft that behaves as a class does."""
    server = Server("127.0.0.1:0")
    described = codec.write_model(model.model, role=model_pb2.ROLE_DRAFT, engine="none", revision=model.files.revision)
    _register(
        server,
        ModelServicer(described, model.files.tokenizer_json),
        draft(model.model, lambda sampling, seed: None),  # type: ignore[arg-type, return-value]
        TargetServicer(model.model, None),
    )
    stop, started = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(server.run_until(stop, lambda _: started.set()))
    try:
        await started.wait()
        yield server.address
    finally:
        stop.set()
        await task
        model.scheduler.close()


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes bridges retry services that went away at once, and skip the self-tests of the tokenizers of `families`."""

    monkeypatch.setattr(connection, "_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(endpoint, "find_flaw", _find_no_flaw)


def trusted() -> AbstractContextManager[object]:
    """Returns a context in which bridges skip the self-tests of tokenizers, each of which is a process of its own."""
    return patch.object(endpoint, "find_flaw", _find_no_flaw)


async def _find_no_flaw(data: bytes) -> str:
    return ""


@asynccontextmanager
async def bridge(
    targets: list[str], drafts: list[str], credentials: Credentials | None = None
) -> AsyncIterator[Gateway]:
    """Yields a gateway that is connected to these addresses."""
    zoo = Zoo(targets, drafts, credentials=credentials)
    try:
        yield Gateway(await zoo.connect())
    finally:
        await zoo.close()


def cheap(model: LoadedModel) -> LoadedModel:
    """Returns a model that reports short times, so that the bridge uses it as a draft."""
    return replace(model, model=replace(model.model, forward_costs=((1, 10_000), (8, 10_000))))


async def text_of(
    gateway: Gateway, target: str, wish: Wish, mode: Mode = Mode.LOCKSTEP, max_tokens: int = 24, prompt: str = "The "
) -> tuple[str, Finished]:
    """Returns the text of a request, and its last event."""
    speculation = SpeculationParameters(mode=mode, num_assistant_tokens=None if mode is Mode.AUTO else 3)
    request = Request(prompt, sampling=SAMPLING, seed=1, max_tokens=max_tokens, speculation=speculation)
    text = ""
    async with aclosing(gateway.generate(request, target, wish=wish)) as events:
        async for event in events:
            if isinstance(event, Delta):
                text += event.text
    assert isinstance(event, Finished)
    return text, event
