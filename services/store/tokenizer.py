"""Reads the tokenizer in a model's directory."""

from pathlib import Path

from bridge.errors import TokenizerNotUnderstood
from bridge.text.vocabulary import Vocabulary
from services.store.cache import remedy_for


def read_tokenizer(path: Path) -> tuple[bytes, Vocabulary]:
    """Returns the content of a `tokenizer.json`, and its tokenizer. Raises `TokenizerNotUnderstood` with its path."""
    content = path.read_bytes()
    try:
        return content, Vocabulary(content)
    except TokenizerNotUnderstood as error:
        text = str(error)
        if error.metadata.get("component") == "file" and (remedy := remedy_for(path.parent)):
            text = f"it is damaged: {remedy}"
        raise TokenizerNotUnderstood(f"{path}: {text}", **error.metadata) from error
