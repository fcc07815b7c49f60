"""Tests a tokenizer's byte table against its own encode and decode, on fixed texts and ids of the vocabulary.

The decoder of a target must concatenate the tokens' bytes, because the user receives the text token by token. For a
draft it is enough that the bytes of its tokens are known.

    python -m services.sandbox.tokenizer_selftest SECONDS < tokenizer.json

reads a tokenizer, builds and tests its byte table within that processor time, and prints one line of JSON.
"""

import json
import signal
import sys
from typing import Any

from bridge.errors import TokenizerNotUnderstood
from bridge.text.vocabulary import Vocabulary
from services.quoting import clipped, one_line
from services.sandbox.process import confine

# The largest published tokenizers take 1.2 GB. A container that exceeds its memory ends whole, so this is less.
MEMORY_LIMIT_BYTES = 3 << 30
TEXTS = (
    "Hello, world! It's 12:34 (or 1234567.89?) in the U.S.A. -- isn't it?",
    "  two  spaces,\ttabs\n\nblank lines\r\n   indented, and a , b .  c 's",
    "naïve café Ã© e\u0301 Å \u212b ﬁ ½ ß İ",
    "東京へようこそ 한국어 שלום مرحبا हिन्दी ไทย Ελλάδα Привет",
    "🎉 👩‍👩‍👧 👍🏽 🇩🇪 \u200b\ufeff\x00\x1b\x7f",
    "def f(x):\n    return {'a': [x, 0]}  # <b>&amp;</b>",
    "0, 0, 0, 0 |---|---| aaaaaaaaaaaaaaaa ................",
)
# About the number of ids that are tested one by one, spread evenly over a larger vocabulary.
_MAX_TESTED_IDS = 4096


def self_test(vocabulary: Vocabulary) -> str:
    """Returns why decoded texts differ from the concatenated bytes of their tokens; empty if they are equal.

    Raises `TokenizerNotUnderstood` if the byte table is wrong.
    """
    _check_tokens(vocabulary)
    for text in TEXTS:
        ids = vocabulary.pieces(text.encode(), whole=True).ids
        decoded = vocabulary.decode(ids)
        spelled = vocabulary.spell(ids).decode(errors="replace")
        if not _alike(decoded, spelled):
            if _alike(decoded.replace(" ", ""), spelled.replace(" ", "")):
                return f"its decoder moves spaces: it writes {decoded!r} where its tokens spell {spelled!r}"
            raise _wrong(f"the text {text!r}", decoded, spelled)
    return vocabulary.whole_text_step


def _check_tokens(vocabulary: Vocabulary) -> None:
    """Tests each id between two others, where decoders do not trim."""
    anchor = vocabulary.pieces(b"x", whole=True).ids
    known = [id_ for id_, data in enumerate(vocabulary.tokens) if data]
    for id_ in known[:: max(1, len(known) // _MAX_TESTED_IDS)]:
        ids = [*anchor, id_, *anchor]
        decoded, spelled = vocabulary.decode(ids), vocabulary.spell(ids).decode(errors="replace")
        if not _alike(decoded.replace(" ", ""), spelled.replace(" ", "")) and id_ not in vocabulary.added:
            raise _wrong(f"the id {id_} ({vocabulary.name(id_)!r})", decoded, spelled)


def _alike(decoded: str, spelled: str) -> bool:
    """Whether the two are equal, except for a leading space and the number of U+FFFD for bytes that are not UTF-8."""
    if "\ufffd" not in decoded and "\ufffd" not in spelled:
        return spelled in (decoded, " " + decoded)
    # Byte fallback replaces every byte of a run that has one invalid byte, so only the surroundings can be compared.
    left, right = decoded.strip(" "), spelled.strip(" ")
    return "\ufffd" in left and left[0] == right[0] and left[-1] == right[-1]


def _wrong(what: str, decoded: str, spelled: str) -> TokenizerNotUnderstood:
    return TokenizerNotUnderstood(
        f"the byte table of this tokenizer is wrong: for {what} its decoder writes {decoded!r}, but the table "
        f"{spelled!r}; save the model's fast tokenizer again with save_pretrained, and report it if that does not help",
        component="decoder",
    )


def _quotable(text: str) -> str:
    """Returns a text that may quote a tokenizer as one line that fits into a log and a status."""
    return one_line(clipped(text))


def _main() -> None:
    confine(MEMORY_LIMIT_BYTES)
    # The signal ends the process, also if the bridge has ended. It counts processor time, because reading a tokenizer
    # takes longer on a busy machine.
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
    try:
        answer: dict[str, Any] = {"flaw": _quotable(self_test(Vocabulary(sys.stdin.buffer.read())))}
    except TokenizerNotUnderstood as error:
        metadata = {key: _quotable(value) for key, value in error.metadata.items()}
        answer = {"error": _quotable(str(error)), "metadata": metadata}
    except BaseException as error:  # the library's panics are not Exceptions
        failure = f"the tokenizers library fails on this tokenizer ({type(error).__name__}: {error})"
        remedy = "save the model's fast tokenizer again with save_pretrained"
        answer = {"error": _quotable(f"{failure}: {remedy}"), "metadata": {"component": "file"}}
    print(json.dumps(answer))


if __name__ == "__main__":
    _main()
