"""Remembers large tokenizers that passed their test in a process of its own, so that no later start tests them again.

They stand in one file of the cache, whose owner a bridge trusts, by the checksum of their content.
"""

import hashlib
import json
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bridge.text
import services.sandbox
from services.store.cache import cache_directory, write_json

# The test of a smaller tokenizer takes less than a second.
LARGE_BYTES = 1 << 20
# The number that are kept, the latest ones, and the most bytes of the file and characters of a flaw.
_MAX_KEPT, _MAX_BYTES, _MAX_CHARACTERS = 64, 1 << 20, 2000


def known_flaw(sha256: str) -> str | None:
    """Returns why a target cannot use the tokenizer with this checksum, "" if it can; None if it was not tested."""
    return _flaws().get(sha256)


def remember(sha256: str, flaw: str) -> None:
    """Remembers what the test of a tokenizer has found, if the cache is writable."""
    flaws = _flaws() | {sha256: flaw}
    kept = dict(list(flaws.items())[-_MAX_KEPT:])
    with suppress(OSError):  # it is tested again at the next start
        write_json(_file(), {"tested_by": _tested_by(), "flaws": kept})


def _flaws() -> dict[str, str]:
    """Returns the remembered flaws by checksum: none of another version's test, or if the file is damaged."""
    try:
        if _file().stat().st_size > _MAX_BYTES:
            return {}
        content: Any = json.loads(_file().read_text())
        found = content["flaws"] if content["tested_by"] == _tested_by() else {}
        return {str(key): flaw for key, flaw in found.items() if _is_flaw(flaw)}
    except Exception:  # a file that another program wrote may raise anything
        return {}


def _is_flaw(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_CHARACTERS and value.isprintable()


def _file() -> Path:
    return cache_directory().parent / "tokenizers.json"


@cache
def _tested_by() -> str:
    """Identifies the test, and all code that reads tokenizers: another version may find another flaw."""
    packages = (Path(one.__file__ or "").parent for one in (bridge.text, services.sandbox))
    files = [file for package in packages for file in sorted(package.glob("*.py"))]
    content = b"".join(file.read_bytes() for file in files) + version("tokenizers").encode()
    return hashlib.sha256(content).hexdigest()
