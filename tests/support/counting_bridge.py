"""For tests of the engine's side of CandidateService: a bridge that proposes numbers, and keeps what it received."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from draftbridge.candidates import CandidateClient, SequenceStep
from draftbridge.v1 import candidate_pb2, model_pb2
from tests.support.candidate_bridge import CandidateBridge, served

MODEL = model_pb2.Model(name="engine", context_length=64, vocabulary_size=1000)


class Counting(CandidateBridge):
    """Proposes the next four numbers after a sequence's last token."""

    wants_tokenizer = False

    def __init__(self) -> None:
        super().__init__()
        self.answering = threading.Event()
        self.answering.set()

    def _answer(self, step: candidate_pb2.ProposeStep) -> candidate_pb2.ProposeCandidates:
        answer = candidate_pb2.ProposeCandidates(step=step.step)
        for one in step.sequences:
            held = self.held.setdefault(one.sequence_id, [])
            if len(held) < one.kept_token_count:
                answer.unknown_sequence_ids.append(one.sequence_id)
                continue
            held[one.kept_token_count :] = one.token_ids
            ids = [held[-1] + place for place in range(1, 5)]
            run = candidate_pb2.CandidateRun(source="suffix", token_count=4)
            answer.sequences.add(
                sequence_id=one.sequence_id, base_token_count=len(held), token_ids=ids, width=2, runs=[run]
            )
        assert self.answering.wait(30)
        return answer


@contextmanager
def serving(bridge: CandidateBridge, address: str = "127.0.0.1:0") -> Iterator[str]:
    """Serves a bridge, which answers what it has kept waiting in the end, and yields its address."""
    with served(bridge, address) as found:
        try:
            yield found
        finally:
            if isinstance(bridge, Counting):
                bridge.answering.set()


def ask(client: CandidateClient, ids: list[int], deadline: float = 10.0, **more: object) -> tuple[int, ...]:
    found = client.step([SequenceStep(7, ids, **more)], deadline=deadline)  # type: ignore[arg-type]
    return found[7].token_ids if 7 in found else ()
