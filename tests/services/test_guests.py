"""CandidateService over real streams: engines get candidates in their own ids, and cannot harm the bridge or others."""

from collections.abc import Iterator

import pytest

from services.bridge.guests import GuestLimits
from tests.support import tiny
from tests.support.guests import Bridge, Reciter, client, recite, running

REPETITIVE = ("The quick brown fox jumps over the lazy dog. She sells sea shells by the sea shore! " * 6).encode()
FRESH = ("Grüße aus Köln: naïve café, señor, 1234 of them, for $56.78 by the sea shore! He said hello, world.").encode()


def truth(data: bytes, kind: str = "sentencepiece") -> list[int]:
    return list(tiny.vocabulary(kind).pieces(data).ids)


@pytest.fixture(scope="module")
def bridge() -> Iterator[Bridge]:
    with running() as found:
        yield found


def test_what_repeats_is_proposed(bridge: Bridge) -> None:
    ids = truth(REPETITIVE)
    engine = Reciter(ids, len(ids) // 4)
    guest = client(bridge.address)
    recite(guest, engine)
    guest.close()
    assert engine.accepted["suffix"] > 0.6 * (len(ids) - engine.prompt_count)
    assert engine.forward_count < 0.5 * (len(ids) - engine.prompt_count)


def test_many_sequences_share_a_forward(bridge: Bridge) -> None:
    ids = truth(REPETITIVE)
    engines = [Reciter(ids[: 150 + 3 * number], 100, number) for number in range(1, 20)]
    guest = client(bridge.address)
    recite(guest, *engines)
    guest.close()
    plain = sum(len(one.truth) - one.prompt_count for one in engines)
    assert sum(one.forward_count for one in engines) < 0.8 * plain


def test_a_draft_of_another_tokenizer_runs_ahead() -> None:
    ids = truth(FRESH)
    with running(draft_text=FRESH) as found:
        guest = client(found.address)
        engine = Reciter(ids, 8)
        recite(guest, engine, forward_seconds=0.05)
        guest.close()
    assert engine.accepted.get("draft", 0) > 0.5 * (len(ids) - 8)
