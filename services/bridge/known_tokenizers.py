"""Remembers tokenizers that a process of its own has read and tested without harm, for the next start of a bridge."""

import json
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from services.store.cache import cache_directory, write_json

# What takes less time to try is tried again each time.
MIN_SECONDS = 1.0
# To be increased when the self-test or the table of tokens changes. Another library may read a file differently.
_RULE = 1


def known_flaw(sha256: str) -> str | None:
    """Returns why a target cannot use the tokenizer with this checksum, "" if it can; None if that is not known."""
    with suppress(OSError, ValueError, AttributeError):
        content = json.loads(_file(sha256).read_text())
        if content.get("tried_with") == _tried_with() and isinstance(flaw := content.get("flaw"), str):
            return flaw
    return None


def remember_flaw(sha256: str, flaw: str) -> None:
    """Remembers what `find_flaw` has returned, if there is a place for it."""
    with suppress(OSError):
        write_json(_file(sha256), {"flaw": flaw, "tried_with": _tried_with()})


def _file(sha256: str) -> Path:
    return cache_directory().parent / "tokenizers" / f"{sha256}.json"


def _tried_with() -> list[object]:
    return [version("tokenizers"), _RULE]
