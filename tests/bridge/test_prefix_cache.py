"""A text that was encoded once is not encoded again by any request, as long as it stays in the cache."""

import gc
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.text.chat import Chat, Message, render_chat
from bridge.text.prefix_cache import PrefixCache
from bridge.text.seams import Tokens
from bridge.text.vocabulary import Marks, Vocabulary
from tests.support import tiny
from tests.support.families import library, vocabulary
from tests.support.memory import in_own_process
from tests.support.texts import MARKED_TEXTS
from tests.support.tiny import CORPUS, tokenizer_json

SYSTEM = " ".join(CORPUS) * 20


def encoded(words: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that receives the length of each text that is encoded from now on."""
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
    words.prompt(SYSTEM, framed=True)
    lengths = encoded(words, monkeypatch)
    asked = [f"{SYSTEM} What is {number} plus {number}?" for number in range(100)]
    for text in asked:
        words.prompt(text, framed=True)
    # Only a little of the common text, next to where the texts differ, is encoded again.
    assert sum(lengths) < 100 * 120 * 2 + len(SYSTEM)
    cache = words.prefixes
    assert cache.query_byte_count == len(SYSTEM.encode()) + sum(len(text.encode()) for text in asked)
    assert cache.hit_byte_count > 0.95 * 100 * len(SYSTEM.encode())


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_conversations_next_turn_encodes_what_is_new(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ bos_token }}{% for m in messages %}<turn>{{ m.content }}<eos>\n{% endfor %}<turn>"
    of = tiny.model(kind, context_length=1 << 16, chat_template=template)
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
    words = vocabulary(family)
    words.prefixes = PrefixCache(limit_bytes=limit)
    text = ""
    for more, share in texts:
        text = text[: len(text) * share // 700] + more * 3
        expected = [*words.frame, *library(family).encode(text, add_special_tokens=False).ids]
        assert list(words.prompt(text, framed=True).ids) == expected
        assert words.prefixes.held_byte_count <= limit


def test_the_beginning_is_the_last_to_go() -> None:
    words = Vocabulary(tokenizer_json("byte_level"))
    words.prefixes = PrefixCache(limit_bytes=30_000)
    words.prompt(SYSTEM[:4000], framed=True)
    for number in range(100):  # more than the cache has room for
        words.prompt(SYSTEM[:2000] + f"{number} " * 300, framed=True)
    before = words.prefixes.hit_byte_count
    words.prompt(SYSTEM[:2000] + "?", framed=True)
    assert words.prefixes.hit_byte_count - before > 1600


def test_threads_share_it() -> None:
    words = Vocabulary(tokenizer_json("byte_level"))
    words.prefixes = PrefixCache(limit_bytes=50_000)
    texts = [SYSTEM[: 100 * number] + f"{number}" for number in range(60)] * 4
    expected = [library("gpt-2").encode(text).ids for text in texts]
    barrier = threading.Barrier(4)

    def work(part: int) -> bool:
        barrier.wait()
        return all(list(words.prompt(texts[i], framed=True).ids) == expected[i] for i in range(part, len(texts), 4))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    cache = words.prefixes
    assert cache.query_byte_count == sum(len(text.encode()) for text in texts)
    assert 0 < cache.hit_byte_count < cache.query_byte_count


@settings(max_examples=200)
@given(texts=st.lists(st.tuples(st.integers(0, 9), st.binary(max_size=6), st.sampled_from([b"", b"x"])), max_size=30))
def test_a_text_finds_the_prompt_that_begins_most_like_it(texts: list[tuple[int, bytes, bytes]]) -> None:
    """Compares the cache with a search among all prompts."""
    cache, text = PrefixCache(), b""
    kept: list[tuple[bytes, bytes]] = []
    for keep, more, salt in texts:
        text = text[:keep] + more
        known, common = cache.find(text, salt + b":")
        alike = [zip(text, other, strict=False) for other_salt, other in kept if other_salt == salt]
        assert common == max(
            (sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], one)) for one in alike), default=0
        )
        assert bytes(list(known.ids))[:common] == text[:common]
        ends = list(range(1, len(text) + 1))
        cache.keep(text, salt + b":", known, 0, Tokens(list(text), ends, [1] * len(text), len(text)))
        kept.append((salt, text))


def _held_after(texts: list[str]) -> tuple[int, int, int]:
    """Returns the number of prompts in the cache, the memory that it reports, and what was allocated."""
    words = Vocabulary(tokenizer_json("byte_level"))
    for warm in texts[:20]:
        words.prompt(warm, framed=True)
    words.prefixes = PrefixCache()
    gc.collect()
    tracemalloc.start()
    for text in texts:
        words.prompt(text, framed=True)
    gc.collect()
    return words.prefixes.prompt_count, words.prefixes.held_byte_count, tracemalloc.get_traced_memory()[0]


def test_it_holds_no_more_memory_than_it_says() -> None:
    texts = [f"{number} {SYSTEM[: number * 7]}" for number in range(400)]
    count, reported, held = in_own_process(_held_after, texts)
    assert count == len(texts)
    assert 0.5 * reported < held <= reported


def test_a_conversation_that_goes_on_is_held_once() -> None:
    words = Vocabulary(tokenizer_json("byte_level"))
    for other in ("! comes before it", "~ comes after it"):
        words.prompt(other, framed=True)
    for number in range(1, 20):
        words.prompt(SYSTEM[: 100 * number], framed=True)
    assert words.prefixes.prompt_count == 3


def test_texts_that_are_read_in_different_ways_are_told_apart() -> None:
    words = Vocabulary(tokenizer_json("byte_level"))
    text = "<turn>" + SYSTEM
    marked = text.replace("<", "<\ufdd0")
    for _ in range(2):
        assert words.prompt(text, framed=False).ids[0] == 3
        assert words.prompt(marked, Marks("\ufdd0", "\ufdd1"), framed=False).ids[0] != 3
