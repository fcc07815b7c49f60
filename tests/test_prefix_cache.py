"""What was encoded once is not encoded again, within bounds, whoever asks."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.prefix_cache import PrefixCache, _block_ends
from bridge.templates import Chat, Message, render_chat, render_text
from bridge.vocabulary import Marks, Vocabulary
from tests import tiny
from tests.families import library, vocabulary
from tests.texts import MARKED_TEXTS
from tests.tiny import CORPUS, tokenizer_json

SYSTEM = " ".join(CORPUS) * 20


def encoded(words: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all texts that are encoded from now on."""
    lengths: list[int] = []
    encode = words._encode

    def counting(text: str, start: bool, *, plain: bool) -> object:
        lengths.append(len(text))
        return encode(text, start, plain=plain)

    monkeypatch.setattr(words, "_encode", counting)
    return lengths


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_thousand_requests_with_one_system_prompt_encode_what_is_new(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = Vocabulary(tokenizer_json(kind))
    render_text(words, SYSTEM)
    lengths = encoded(words, monkeypatch)
    asked = [f"{SYSTEM} What is {number} plus {number}?" for number in range(100)]
    for text in asked:
        render_text(words, text)
    # Less than an eighth of what is common may be encoded again where the texts part, and once only.
    assert sum(lengths) < 100 * 120 * 2 + len(SYSTEM)
    statistics = words.prefixes.statistics
    assert statistics.query_byte_count == len(SYSTEM.encode()) + sum(len(text.encode()) for text in asked)
    assert statistics.hit_byte_count > 0.95 * 100 * len(SYSTEM.encode())


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_conversations_next_turn_encodes_what_is_new(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ bos_token }}{% for m in messages %}<turn>{{ m.content }}<eos>\n{% endfor %}<turn>"
    of = tiny.model(kind, chat_template=template)
    of.vocabulary.prefixes = PrefixCache()
    messages = [Message("user", SYSTEM), Message("assistant", "It is 12, isn't it?")]
    render_chat(of, Chat(tuple(messages)))
    with monkeypatch.context() as patch:
        lengths = encoded(of.vocabulary, patch)
        for _ in range(5):
            messages += [Message("user", "The quick brown fox jumps."), Message("assistant", "Over the lazy dog!")]
            rendering = render_chat(of, Chat(tuple(messages)))
    assert sum(lengths) < 5 * 400
    of.vocabulary.prefixes = PrefixCache()
    assert rendering.ids == render_chat(of, Chat(tuple(messages))).ids


@pytest.mark.parametrize("family", ["gpt-2", "gemma", "llama-2", "unigram"])
@settings(max_examples=60)
@given(
    texts=st.lists(st.tuples(MARKED_TEXTS, st.integers(0, 1000)), min_size=2, max_size=12),
    limit=st.sampled_from([3_000, 8_000, 20_000]),
)
def test_it_is_bounded_in_bytes_and_right_when_it_is_full(
    family: str, texts: list[tuple[str, int]], limit: int
) -> None:
    """Blocks that were lost are made again, and need not end where the first ones did."""
    words = vocabulary(family)
    words.prefixes = PrefixCache(limit_bytes=limit)
    text = ""
    for more, share in texts:
        text = text[: len(text) * share // 700] + more * 3
        expected = [*words.frame, *library(family).encode(text, add_special_tokens=False).ids]
        assert list(render_text(words, text).ids) == expected
        assert words.prefixes.statistics.held_byte_count <= limit


def test_the_beginning_is_the_last_to_go() -> None:
    words = Vocabulary(tokenizer_json("byte_level"))
    words.prefixes = PrefixCache(limit_bytes=30_000)
    render_text(words, SYSTEM[:4000])
    for number in range(100):  # more than there is room for
        render_text(words, SYSTEM[:2000] + f"{number} " * 300)
    before = words.prefixes.statistics.hit_byte_count
    render_text(words, SYSTEM[:2000] + "?")
    assert words.prefixes.statistics.hit_byte_count - before > 1600


def test_threads_share_it() -> None:
    words = Vocabulary(tokenizer_json("byte_level"))
    words.prefixes = PrefixCache(limit_bytes=50_000)
    texts = [SYSTEM[: 100 * number] + f"{number}" for number in range(60)] * 4
    expected = [library("gpt-2").encode(text).ids for text in texts]
    barrier = threading.Barrier(4)

    def work(part: int) -> bool:
        barrier.wait()
        return all(list(render_text(words, texts[i]).ids) == expected[i] for i in range(part, len(texts), 4))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    statistics = words.prefixes.statistics
    assert statistics.query_byte_count == sum(len(text.encode()) for text in texts)
    assert 0 < statistics.hit_byte_count < statistics.query_byte_count


def test_a_block_is_no_longer_than_an_eighth_of_what_is_before_it() -> None:
    ends = list(_block_ends(1_000_000))
    sizes = [right - left for left, right in pairwise(ends)]
    assert all(size <= max(256, end / 8) for size, end in zip(sizes, ends, strict=False))
    assert len([end for end in ends if end <= 100_000]) < 60


def test_texts_that_are_read_in_different_ways_are_told_apart() -> None:
    words = Vocabulary(tokenizer_json("byte_level"))
    text = "<turn>" + SYSTEM
    marked = text.replace("<", "<\ufdd0")
    for _ in range(2):
        assert words.prompt(text, framed=False).ids[0] == 3
        assert words.prompt(marked, Marks("\ufdd0", "\ufdd1"), framed=False).ids[0] != 3


def test_a_block_that_was_made_again_and_ends_elsewhere_is_not_put_before_the_old_ones() -> None:
    words = Vocabulary(tokenizer_json("byte_level"))
    cache, text = words.prefixes, CORPUS[0] * 60
    render_text(words, text)
    data = text.encode()
    known = cache.find(data, b"None")
    assert known.position > len(data) - 100
    # The first block is lost and made again, and settles less this time.
    first = known.whole[0]
    last = len(words.token_bytes(int(first.ids[-1])))
    cache._blocks[known.digests[1]] = replace(first, ids=first.ids[:-1], settled=first.settled - last, after=())
    assert cache.find(data, b"None").whole == [cache._blocks[known.digests[1]]]
    assert list(render_text(words, text).ids) == words.library.encode(text).ids
