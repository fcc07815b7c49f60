"""Reads tokenizers: that of a model's directory, and that of a reference."""

import contextlib
from pathlib import Path

from bridge.errors import TokenizerNotUnderstood
from bridge.text.vocabulary import Vocabulary
from services.store.cache import Report, reading, remedy_for
from services.store.resolve import resolve


def read_tokenizer(path: Path) -> tuple[bytes, Vocabulary]:
    """Returns the content of a `tokenizer.json`, and its tokenizer.

    Raises `TokenizerNotUnderstood` with its path, and `UnusableModel` if it cannot be read.
    """
    with reading(path):
        content = path.read_bytes()
    try:
        return content, Vocabulary(content)
    except TokenizerNotUnderstood as error:
        text = str(error)
        if error.metadata.get("component") == "file" and (remedy := remedy_for(path.parent)):
            text = f"it is damaged: {remedy}"
        raise TokenizerNotUnderstood(f"{path}: {text}", **error.metadata) from error


def read_vocabulary(reference: str, report: Report = lambda text: None) -> Vocabulary:
    """Returns the tokenizer of a reference that `resolve` takes, or of a `tokenizer.json` file.

    Raises what `resolve` raises, or `TokenizerNotUnderstood`.
    """
    path = Path(reference)
    with contextlib.suppress(OSError, ValueError):  # such as a name too long for a file
        file = path / "tokenizer.json" if path.is_dir() else path
        if file.suffix == ".json" and file.is_file():
            return read_tokenizer(file)[1]
    return read_tokenizer(resolve(reference, report, weights="", only_tokenizer=True) / "tokenizer.json")[1]
