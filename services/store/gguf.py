"""Checks GGUF files."""

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import UnusableModel
from services.errors import ChecksumMismatch
from services.store.cache import cache_directory, write_json

if TYPE_CHECKING:
    from gguf.gguf_reader import GGUFReader

# The exit status of a conversion that fails because the file ends too early.
CUT_STATUS = 3
_MAGIC = b"GGUF"
# A file that was written so recently may be written again without a change of its time, which has steps of up to 2 s.
_RECENT_SECONDS = 2.0


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


def remembered_sha256(path: Path) -> str:
    """Returns the SHA-256 of a GGUF file, which each process of a start needs, but which only the first one computes.

    The cache remembers it until the file's size or times change. Raises `OSError`, and `UnusableModel` for other files.
    """
    found = path.stat()
    # The second time changes even where a copy or an archive sets the first one to that of its original.
    facts = [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
    name = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:24]
    file = cache_directory().parent / "gguf" / f"{name}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):  # another program may have written it
        known = json.loads(file.read_text())
        if known["facts"] == facts:
            return str(known["sha256"])
    steady = time.time() - max(found.st_mtime, found.st_ctime) > _RECENT_SECONDS
    digest = check_gguf(path)
    if steady:
        with suppress(OSError):
            write_json(file, {"facts": facts, "sha256": digest})
    return digest
