"""Tests a byte table by the tokenizer's own encode and decode, over fixed texts and the vocabulary's ids.

A target needs a tokenizer whose decoding is concatenation, because the user receives what it commits token by token.
A draft needs less: it is enough that what it proposes can be read.

    python -m services.sandbox.tokenizer_selftest SECONDS < tokenizer.json

reads a tokenizer, makes its byte table, tests it, and prints one line of JSON.
"""

import json
import signal
import sys
from typing import Any

from bridge.errors import TokenizerNotUnderstood
from bridge.text.vocabulary import Vocabulary
from services.sandbox.process import confine

# The largest tokenizers in use take 1.2 GB.
_MEMORY_LIMIT_BYTES = 6 << 30
TEXTS = (
    "Hello, world! It's 12:34 (or 1234567.89?) in the U.S.A. -- isn't it?",
    "  two  spaces,\ttabs\n\nblank lines\r\n   indented, and a , b .  c 's",
    "naïve café Ã© e\u0301 Å \u212b ﬁ ½ ß İ",
    "東京へようこそ 한국어 שלום مرحبا हिन्दी ไทย Ελλάδα Привет",
    "🎉 👩‍👩‍👧 👍🏽 🇩🇪 \u200b\ufeff\x00\x1b\x7f",
    "def f(x):\n    return {'a': [x, 0]}  # <b>&amp;</b>",
    "0, 0, 0, 0 |---|---| aaaaaaaaaaaaaaaa ................",
)
# Ids tried one by one; spread over the vocabulary where it has more.
_MOST_IDS = 4096


def self_test(vocabulary: Vocabulary) -> str:
    """Returns what makes a text of this tokenizer differ from its tokens' bytes in a row; empty if nothing does.

    Raises `TokenizerNotUnderstood` if the byte table is wrong.
    """
    _check_tokens(vocabulary)
    for text in TEXTS:
        ids = vocabulary.pieces(text.encode(), whole=True).ids
        said = vocabulary.decode(ids)
        spelled = vocabulary.spell(ids).decode(errors="replace")
        if not _alike(said, spelled):
            if _alike(said.replace(" ", ""), spelled.replace(" ", "")):
                return f"its decoder moves spaces: it says {said!r} where its tokens spell {spelled!r}"
            raise _wrong(f"the text {text!r}", said, spelled)
    return vocabulary.whole_text_step


def _check_tokens(vocabulary: Vocabulary) -> None:
    """Each id between two others, where nothing is trimmed."""
    anchor = vocabulary.pieces(b"x", whole=True).ids
    known = [id_ for id_, data in enumerate(vocabulary.tokens) if data]
    for id_ in known[:: max(1, len(known) // _MOST_IDS)]:
        ids = [*anchor, id_, *anchor]
        said, spelled = vocabulary.decode(ids), vocabulary.spell(ids).decode(errors="replace")
        if not _alike(said.replace(" ", ""), spelled.replace(" ", "")) and id_ not in vocabulary.added:
            raise _wrong(f"the id {id_} ({vocabulary.name(id_)!r})", said, spelled)


def _alike(said: str, spelled: str) -> bool:
    """Equal, but for a space in front and for how many marks stand for bytes that are no text."""
    if "\ufffd" not in said and "\ufffd" not in spelled:
        return spelled in (said, " " + said)
    # Byte fallback marks every byte of a run that has one wrong, so no more can be told than what stands around.
    left, right = said.strip(" "), spelled.strip(" ")
    return "\ufffd" in left and left[0] == right[0] and left[-1] == right[-1]


def _wrong(what: str, said: str, spelled: str) -> TokenizerNotUnderstood:
    return TokenizerNotUnderstood(
        f"the byte table made of this tokenizer is wrong: for {what} its decoder says {said!r} and the table "
        f"{spelled!r}; save the model's fast tokenizer again with save_pretrained, and report it if that does not help",
        component="decoder",
    )


def _main() -> None:
    confine(_MEMORY_LIMIT_BYTES)
    # The bridge keeps the time. This is for when the bridge has ended.
    signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
    try:
        answer: dict[str, Any] = {"flaw": self_test(Vocabulary(sys.stdin.buffer.read()))}
    except TokenizerNotUnderstood as error:
        answer = {"error": str(error), "metadata": error.metadata}
    except BaseException as error:  # whatever it is, the tokenizer caused it; the library's panics are not Exceptions
        said = f"the library fails over this tokenizer ({type(error).__name__}: {error})"
        remedy = "save the model's fast tokenizer again with save_pretrained"
        answer = {"error": f"{said}: {remedy}", "metadata": {"component": "file"}}
    print(json.dumps(answer))


if __name__ == "__main__":
    _main()
