"""The rounds of the benchmark of translation are played as the loop plays them."""

from benchmarks.translation import ours, script
from tests.support import tiny


def test_the_draft_s_context_spells_the_text_after_each_round() -> None:
    draft, target = tiny.model("byte_level"), tiny.model("sentencepiece")
    text = "The quick brown fox jumps over the lazy dog. " * 200
    played = script(text, 1000, draft.vocabulary, target.vocabulary, 12, 5)
    way = ours(text[:1000], played, draft, target)
    assert len(way.seconds) == 12 and way.wrong == 0
