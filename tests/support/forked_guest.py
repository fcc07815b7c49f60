"""Forks a process with candidates of its own, after which both must have some. Fails by an exit code other than 0."""

import gc
import os

from draftbridge.candidates import SequenceStep
from services.guests import local
from services.guests.local import LocalCandidates
from tests.support import tiny
from tests.support.guests import description
from tests.support.waiting import eventually

KIND = "sentencepiece"


def main() -> None:
    """Runs both processes."""
    local._MAX_TOKENS_AT_ONCE = 79  # texts are opened in a thread, which wakes the event loop
    ids = list(tiny.vocabulary(KIND).pieces(b"She sells sea shells by the sea shore! " * 12).ids)
    guest = LocalCandidates(description(KIND), tiny.tokenizer_json(KIND))

    def proposes(number: int) -> bool:
        return bool(guest.step([SequenceStep(number, ids)], deadline=10.0))

    eventually(lambda: proposes(1))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            eventually(lambda: proposes(2))
            guest.close()
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    eventually(lambda: proposes(3))
    guest.close()


if __name__ == "__main__":
    main()
