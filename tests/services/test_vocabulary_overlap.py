"""The overlap of vocabularies: its value, and that a large zoo is compared once."""

from types import SimpleNamespace
from typing import Any

import pytest

from bridge.text.vocabulary import Vocabulary
from services.bridge import pairing
from services.bridge.pairing import Pairing
from tests.support import families


def zoo_of(vocabularies: list[Any]) -> Any:
    models = [SimpleNamespace(model=SimpleNamespace(vocabulary=one)) for one in vocabularies]
    return SimpleNamespace(connections=[SimpleNamespace(known=one) for one in (None, *models)])


async def test_an_overlap_is_the_share_of_the_drafts_tokens_that_the_target_has() -> None:
    vocabularies: list[Vocabulary] = [families.vocabulary(name) for name in ("gpt-2", "llama-3", "unigram", "llama-2")]
    pairs = Pairing(zoo_of(vocabularies))
    await pairs.compare_vocabularies()
    for target in vocabularies:
        for draft in vocabularies:
            known, proposed = ({data for data in one.tokens if data} for one in (target, draft))
            expected = len([data for data in proposed if data in known]) / len(proposed)
            assert pairs._overlaps[target.sha256, draft.sha256] == pytest.approx(expected)


async def test_a_large_zoo_is_compared_once_and_again_for_a_new_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabularies: list[Any] = [
        SimpleNamespace(sha256=f"{one}", tokens=[b"a", b"", None, b"%d" % one]) for one in range(40)
    ]
    calls = []

    def compared(found: list[Any]) -> dict[tuple[str, str], float]:
        calls.append(len(found))
        return original(found)

    original = pairing._overlaps_of
    monkeypatch.setattr(pairing, "_overlaps_of", compared)
    pairs = Pairing(zoo_of(vocabularies[:39]))
    for _ in range(3):
        await pairs.compare_vocabularies()
    assert calls == [39] and pairs._overlaps["0", "38"] == 0.5 and pairs._overlaps["7", "7"] == 1.0
    pairs.zoo = zoo_of(vocabularies)
    await pairs.compare_vocabularies()
    assert calls == [39, 40] and pairs._overlaps["39", "0"] == 0.5
