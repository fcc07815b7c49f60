"""Defines what a door needs of whatever runs its requests: a gateway in this process, or a bridge elsewhere."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from bridge.generation import Delta, Finished
from bridge.request import Request
from services.bridge.pairing import Wish
from services.metrics import HttpMetrics
from services.traces import Traces


@dataclass(frozen=True)
class Opened:
    """Reports that a request has started. `draft` is empty if it has none. The same `seed` repeats its sampling."""

    target: str
    draft: str
    seed: int
    prompt_token_count: int


@dataclass(frozen=True)
class ServiceState:
    """A configured service. `problem` is why it cannot be used now, or empty. `is_missed`: requests fail meanwhile."""

    address: str
    problem: str
    is_missed: bool


class Spelling(Protocol):
    """How tokens are spelled; `bridge.text.vocabulary.Vocabulary` is one."""

    def token_bytes(self, id_: int) -> bytes:
        """Returns the bytes of a token, none for a control token."""
        ...

    def name(self, id_: int) -> str:
        """Returns the name of a control token."""
        ...


@dataclass(frozen=True)
class ServedModel:
    """A target as doors describe it. `eos`: ids that end its text. `chats`: whether it has a chat template."""

    name: str
    context_length: int
    chats: bool
    eos: tuple[int, ...]
    spelling: Spelling


class Backend(Protocol):
    """Runs requests. Its methods raise `DraftBridgeError`s."""

    @property
    def metrics(self) -> HttpMetrics:
        """The metrics of this process."""
        ...

    @property
    def traces(self) -> Traces:
        """The traces of this process."""
        ...

    async def served(self) -> tuple[list[ServedModel], list[str]]:
        """Returns the targets and the names of the drafts that requests may name, the defaults first."""
        ...

    async def served_target(self, name: str) -> ServedModel:
        """Returns the target with this name, or the default if it is empty. Raises `ModelNotFound`."""
        ...

    async def check(self) -> list[ServiceState]:
        """Asks every service, for a few seconds."""
        ...

    async def segment(self, text: str, models: Sequence[str]) -> list[list[tuple[int, bytes]]]:
        """Returns the ids and bytes of the tokens that one or two models, targets or drafts, make of a text."""
        ...

    def generate(
        self, request: Request, target_name: str = "", wish: Wish | None = None
    ) -> AsyncGenerator[Opened | Delta | Finished, None]:
        """Yields `Opened`, then deltas, then `Finished`. An empty name, or no wish, lets the bridge choose."""
        ...
