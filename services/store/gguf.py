"""Checks GGUF files."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import UnusableModel
from services.errors import ChecksumMismatch

if TYPE_CHECKING:
    from gguf.gguf_reader import GGUFReader

# The exit status of a conversion that fails because the file ends too early.
CUT_STATUS = 3
_MAGIC = b"GGUF"


def is_gguf(path: Path) -> bool:
    """Returns whether a file is a GGUF file by its first bytes, whatever its name is. Raises `OSError`."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def reader() -> "type[GGUFReader]":
    """Returns gguf's reader, three times as fast for a file with a large vocabulary, which it reads string by string.

    Parts of a file that numpy maps into memory are objects of a class written in Python, which take most of the time.
    """
    import numpy as np  # these take up to a second
    from gguf.gguf_reader import GGUFReader

    class Reader(GGUFReader):
        """Takes parts of a plain array over the same memory."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    return Reader


def is_cut(path: Path) -> bool:
    """Returns whether a GGUF file ends before its content does. Reads its metadata, which takes seconds."""
    import numpy as np  # takes a part of a second

    class Reader(reader()):  # type: ignore[misc]  # a class that is made when it is needed
        """Raises `EOFError` where the library would return less than it is asked for, and fail in various ways."""

        def _get(self, offset: int, dtype: Any, count: int = 1, *more: Any, **options: Any) -> Any:
            if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise EOFError
            return super()._get(offset, dtype, count, *more, **options)

    try:
        Reader(path)
    except EOFError:
        return True
    except Exception:  # the library does not know the format's version, or a type of tensors
        return False
    return False


def check_gguf(path: Path, sha256: str | None = None) -> str:
    """Returns the SHA-256 of a GGUF file. Raises `UnusableModel` for other files, `ChecksumMismatch` if it differs."""
    if not is_gguf(path):
        raise UnusableModel(
            f"{path} is not a GGUF file: give a GGUF file, or a directory that save_pretrained wrote", model=path
        )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 is not None and digest != sha256:
        raise ChecksumMismatch(
            f"{path.name} has SHA-256 {digest}, expected {sha256}: the download is damaged or was changed; "
            "run the same command again",
            expected=sha256,
            got=digest,
        )
    return digest
