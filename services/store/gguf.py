"""Checks GGUF files."""

import hashlib
from pathlib import Path

from bridge.errors import UnusableModel
from services.errors import ChecksumMismatch


def check_gguf(path: Path, sha256: str | None = None) -> str:
    """Returns the SHA-256 of a GGUF file. Raises `UnusableModel` for other files, `ChecksumMismatch` if it differs."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UnusableModel(
                f"{path} is not a GGUF file: give a GGUF file, or a directory that save_pretrained wrote", model=path
            )
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 is not None and digest != sha256:
        raise ChecksumMismatch(
            f"{path.name} has SHA-256 {digest}, expected {sha256}: the download is damaged or was changed; "
            "run the same command again",
            expected=sha256,
            got=digest,
        )
    return digest
