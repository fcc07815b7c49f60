"""Tests the promises of translation for every family of tokenizers, as target and as draft, on any text at any cuts."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bridge.text.prefix_cache import PrefixCache
from bridge.text.translation import DraftContext, candidates
from tests.support.depth import examples
from tests.support.families import EXACT, NAMES, SPACED, library, vocabulary
from tests.support.texts import MARKED_TEXTS, PLACES, TEXTS, cut


def oracle(family: str, text: str) -> list[int]:
    """Returns the library's ids for a whole text, without an end of text."""
    words = vocabulary(family)
    return [*words.frame, *library(family).encode(text, add_special_tokens=False).ids]


def sayable(family: str, text: str) -> str:
    """Replaces what the family's tokenizers cannot spell, such as SentencePiece's mark for a space."""
    text = text.replace("<0x", "0x") if family == "unigram" else text  # the library finds byte tokens in texts
    return text.replace("▁", "_") if family in SPACED else text


def without_control(family: str, text: str) -> str:
    """Removes the spellings of control tokens from a text."""
    while spans := vocabulary(family).spans(text, vocabulary(family).controls):
        text = text[: spans[0][0]] + text[spans[0][1] :]
    return text


def is_text(data: bytes) -> bool:
    """Returns whether the data cuts no character."""
    return data.decode(errors="replace").encode() == data


@pytest.mark.parametrize("family", EXACT)
@settings(max_examples=examples(100))
@given(text=TEXTS)
def test_bytes_of_ids_equal_the_text(family: str, text: str) -> None:
    words, data = vocabulary(family), sayable(family, text).encode()
    pieces = words.pieces(data)
    assert words.spell(pieces.ids) == data
    assert pieces.consumed == len(data)
    assert pieces.ends == [len(words.spell(pieces.ids[: count + 1])) for count in range(len(pieces.ids))]
    assert words.control.isdisjoint(pieces.ids)


@pytest.mark.parametrize("family", NAMES)
@settings(max_examples=examples(100))
@given(text=TEXTS, places=PLACES)
def test_the_middle_of_a_text_spells_what_the_library_decodes(family: str, text: str, places: list[int]) -> None:
    if family.startswith("bert"):
        return  # its decoder removes spaces depending on their neighbours; see the self-test
    words = vocabulary(family)
    ids = library(family).encode("x" + without_control(family, text), add_special_tokens=False).ids
    start, end = sorted([*places, 0, 0][:2])
    part = ids[start % (len(ids) + 1) :][: end % 20]
    if not is_text(words.spell(part)):
        return  # byte fallback drops a whole run of bytes for one that is wrong
    anchor = library(family).encode("x", add_special_tokens=False).ids
    decoded = library(family).decode([*anchor, *part, *anchor]).lstrip(" ")
    assert words.spell([*anchor, *part, *anchor]).decode().lstrip(" ") == decoded


@pytest.mark.parametrize("family", NAMES)
@settings(max_examples=examples(150))
@given(prompt=TEXTS, text=TEXTS, places=PLACES)
@example(prompt="a", text="a" * 10_000, places=[3, 5_000, 9_990])
@example(prompt="|---", text="|---|---|\n" * 200, places=list(range(0, 2000, 7)))
@example(prompt=" ", text=" " * 2000 + "x", places=[1000])
@example(prompt="\x1b", text="0, ", places=[])
def test_the_draft_reads_what_a_whole_encoding_reads(family: str, prompt: str, text: str, places: list[int]) -> None:
    words = vocabulary(family)
    words.prefixes = PrefixCache()
    prompt, text = without_control(family, prompt) or "x", without_control(family, text)
    if without_control(family, prompt + text) != prompt + text:
        return
    context = DraftContext(words, words.prompt(prompt, framed=True))
    ids, data = list(context.ids), text.encode()
    for piece in cut(data, places):
        keep, new = context.append(piece)
        ids[keep:] = new
        assert ids == context.ids
    assert ids == oracle(family, prompt + text)
    assert context.byte_offset == len(data)


@pytest.mark.parametrize("family", EXACT)
@settings(max_examples=examples(60))
@given(prompt=TEXTS, text=TEXTS, places=PLACES, proposed=st.lists(st.integers(4, 90), max_size=5))
@example(prompt="", text="a <think> b<think>", places=[3], proposed=[5])
def test_after_every_round_the_draft_holds_the_committed_bytes(
    family: str, prompt: str, text: str, places: list[int], proposed: list[int]
) -> None:
    words = vocabulary(family)
    prompt, data = "x" + without_control(family, sayable(family, prompt)), sayable(family, text).encode()
    context = DraftContext(words, words.prompt(prompt, framed=True))
    held, committed = list(context.ids), prompt.encode()
    for piece in cut(data, places):
        held += proposed  # the draft may be right or wrong
        keep, new = context.append(piece, proposed)
        held[keep:] = new
        committed += piece
        spelled = words.spell(held).removeprefix(b" ")
        assert committed.startswith(spelled)
        # Only the beginning of a character may be missing.
        assert len(committed) - len(spelled) <= 3
        assert committed[len(spelled) :].decode(errors="ignore") == ""
    assert words.spell(held).removeprefix(b" ") == committed


@pytest.mark.parametrize("target", NAMES)
@settings(max_examples=examples(100))
@given(draft=st.sampled_from(NAMES), text=TEXTS, start=st.integers(0, 100), count=st.integers(1, 16))
def test_candidates_spell_what_the_draft_proposed(target: str, draft: str, text: str, start: int, count: int) -> None:
    """The draft determines only where the bytes are cut, so that every target with any draft covers all pairs."""
    draft_ids = vocabulary(draft).pieces(text.encode()).ids
    start %= len(draft_ids) + 1
    data = vocabulary(draft).spell(draft_ids[start : start + count])  # may begin and end inside a character
    words = vocabulary(target)
    ids = candidates(words, data)
    spelled = words.spell(ids)
    assert data.startswith(spelled)
    for id_ in ids:
        assert words.tokens[id_], "a candidate has bytes: it is no control token and no padding"
    if target in EXACT and sayable(target, text) == text:
        assert len(data) - len(spelled) <= 3
        assert len(spelled) == len(data) or data[len(spelled) :].decode(errors="ignore") == ""


@pytest.mark.parametrize("family", NAMES)
@settings(max_examples=examples(40))
@given(
    texts=st.lists(st.tuples(MARKED_TEXTS, st.integers(0, 1000)), min_size=1, max_size=6),
    times=st.integers(1, 40),
)
def test_a_prompt_that_goes_on_from_another_is_encoded_as_a_whole(
    family: str, texts: list[tuple[str, int]], times: int
) -> None:
    words = vocabulary(family)
    words.prefixes = PrefixCache()
    text = ""
    for more, share in texts:
        # The next text continues from the end or from an earlier point, as requests with one system prompt do.
        text = text[: len(text) * share // 500] + more * times
        # The second encoding uses what the first one left in the cache.
        for _ in range(2):
            assert list(words.prompt(text, framed=True).ids) == oracle(family, text)
        # Every continuation begins with the settled ids.
        assert list(words.prompt(text + "xyz", framed=True).ids) == oracle(family, text + "xyz")
