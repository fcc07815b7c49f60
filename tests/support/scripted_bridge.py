"""A bridge for guests that follows a script, and counts what it receives."""

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from threading import Event
from typing import Any

import pytest

from draftbridge.guests.client import Client
from draftbridge.guests.settings import GuestSettings
from draftbridge.v1 import candidate_pb2
from tests.support.candidate_bridge import CandidateBridge

VOCABULARY = 50


def next_token(tokens: list[int]) -> int:
    """The engine's model: greedy, and a function of the last three tokens."""
    return (7 * tokens[-1] + 3 * sum(tokens[-3:]) + 1) % VOCABULARY


def continued(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class ScriptedBridge(CandidateBridge):
    """Proposes what the engine's model will generate, with a wrong token now and then."""

    def __init__(self, wrong: float = 0.3) -> None:
        """`wrong`: how often a token is wrong."""
        super().__init__()
        self._wrong = wrong
        self.hangs = Event()
        self._random = Random(0)

    def _answer(self, step: candidate_pb2.ProposeStep) -> candidate_pb2.ProposeCandidates | None:
        answer = candidate_pb2.ProposeCandidates(step=step.step)
        for ended in step.ended_sequence_ids:
            del self.held[ended]
        for one in step.sequences:
            held = self.held.setdefault(one.sequence_id, [])
            assert len(held) >= one.kept_token_count
            held[one.kept_token_count :] = one.token_ids
            if one.max_candidate_count:
                ids = continued(held, 4)
                if self._random.random() < self._wrong:
                    ids[2] = (ids[2] + 1) % VOCABULARY
                answer.sequences.append(
                    candidate_pb2.SequenceCandidates(
                        sequence_id=one.sequence_id,
                        base_token_count=len(held),
                        token_ids=ids,
                        width=4,
                        runs=[candidate_pb2.CandidateRun(source="suffix", token_count=4)],
                    )
                )
        return None if self.hangs.is_set() else answer


@contextmanager
def closed_clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Closes, at the end, the clients that adapters have opened: engines never close them."""
    opened: list[Client] = []
    open_client = GuestSettings.open_client

    def open_(settings: GuestSettings, *arguments: Any) -> Client:
        opened.append(open_client(settings, *arguments))
        return opened[-1]

    monkeypatch.setattr(GuestSettings, "open_client", open_)
    yield
    for client in opened:
        client.close()
