"""The cache of models. Files are made in a scratch directory and moved into the cache only when they are complete."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

from filelock import FileLock
from platformdirs import user_cache_path

from bridge.errors import NotReady, UnusableModel

# Receives a line of text at each step of a long operation.
Report = Callable[[str], None]
# Holds the SHA-256 of the GGUF file that a directory was converted from.
_SOURCE = "gguf.sha256"
# A scratch directory whose process has ended may be deleted after this time: it locks one that it has just made.
_LOCK, _STALE_SECONDS = "lock", 60
# File systems allow 255 bytes.
_MAX_NAME_BYTES = 200
# Errors of a disk, or of a user's part of it, that is full.
FULL = (errno.ENOSPC, errno.EDQUOT)
# A disk with fewer free bytes is full. A file that did not fit may have left a little room.
_FULL_BYTES = 1 << 24


class CacheUnusable(NotReady, reason="CACHE_UNUSABLE"):
    """The cache of models is not writable."""

    def __init__(self, directory: object, detail: object) -> None:
        super().__init__(
            f"models cannot be stored in {directory} ({detail}): set the environment variable DRAFTBRIDGE_CACHE "
            "(for models of the hub, HF_HOME) to a writable directory",
            directory=directory,
        )


class NoSpace(NotReady, reason="NO_SPACE"):
    """A disk has no room for a model."""

    def __init__(self, directory: Path, what: str, free: int, needed: int = 0) -> None:
        """`needed`: the free bytes that `what` needs, 0 if that is not known."""
        wants = f"{what} needs {needed / 1e9:.1f} GB" if needed else f"{what} needs more"
        super().__init__(
            f"{directory} has {free / 1e9:.1f} GB of free space, and {wants}: free some, or set the environment "
            "variable DRAFTBRIDGE_CACHE (for models of the hub, HF_HOME) to a directory on another disk",
            needed_bytes=needed,
            free_bytes=free,
        )


def check_space(directory: Path, what: str, needed: int = 0) -> None:
    """Raises `NoSpace` if the disk of a directory has fewer free bytes than `what` needs, or is full."""
    if (free := shutil.disk_usage(directory).free) < max(needed, _FULL_BYTES):
        raise NoSpace(directory, what, free, needed)


@contextlib.contextmanager
def writing(directory: Path, what: str) -> Iterator[None]:
    """Creates a directory and lets the caller write to it.

    Raises `CacheUnusable`, and `NoSpace` for a file of `what` that does not fit.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CacheUnusable(directory, error.strerror) from error
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise NoSpace(directory, what, shutil.disk_usage(directory).free) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):  # such as files of another user
            raise CacheUnusable(directory, error.strerror) from error
        raise


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises `UnusableModel` if the caller cannot read a model's files, such as those of another user."""
    try:
        yield
    except OSError as error:
        remedy = "let this user read it" if isinstance(error, PermissionError) else "check the file and its disk"
        text = f"{error.filename or path} cannot be read ({error.strerror}): {remedy}"
        raise UnusableModel(text, model=path) from error


def cache_directory() -> Path:
    """Returns the cache's directory: below DRAFTBRIDGE_CACHE if that is set, else in the user's cache directory."""
    chosen = os.environ.get("DRAFTBRIDGE_CACHE")
    return (Path(chosen).expanduser() if chosen else user_cache_path("draftbridge")) / "models"


def write_json(file: Path, value: object) -> None:
    """Writes a file of JSON, and the directory that it belongs in, in one step. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_name(f"{file.name}.{uuid4().hex}")  # processes of several containers may have the same id
    try:
        scratch.write_text(json.dumps(value))
        scratch.replace(file)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Yields a temporary directory in the cache, so that a finished model moves into place in one step.

    Deletes those of processes that were killed, which may have left gigabytes there.
    Raises `CacheUnusable` and `NoSpace`.
    """
    parent = cache_directory()
    with writing(parent, "the model"):
        for stale in parent.glob(".scratch-*"):
            with contextlib.suppress(OSError):  # its process still runs, or another one has just deleted it
                if time.time() - stale.stat().st_mtime > _STALE_SECONDS:
                    with FileLock(stale / _LOCK, timeout=0):
                        shutil.rmtree(stale, ignore_errors=True)
        scratch = tempfile.TemporaryDirectory(dir=parent, prefix=".scratch-", ignore_cleanup_errors=True)
        with scratch as path, FileLock(Path(path) / _LOCK):
            yield Path(path)


@contextlib.contextmanager
def making(final: Path) -> Iterator[Path]:
    """Yields a scratch directory in which to make a directory of the cache; `settle` moves that to its place.

    Only one process at a time makes it: look again whether it is there. Raises `CacheUnusable` and `NoSpace`.
    """
    locks = cache_directory() / ".partial"
    with writing(locks, "the model"), FileLock(locks / f"{final.name}.lock"), scratch_directory() as scratch:
        yield scratch


def shortened(name: str) -> str:
    """Returns the beginning of a model's name that leaves room for what the cache adds to it in names of files."""
    return name.encode()[:_MAX_NAME_BYTES].decode(errors="ignore")


def settle(finished: Path, final: Path) -> None:
    """Moves a finished directory to its place, instead of what is there: one that is damaged, or of another file."""
    if final.is_dir():
        shutil.rmtree(final)
    finished.rename(final)


def name_revision(directory: Path, gguf_sha256: str) -> None:
    """Records the file that a directory was converted from, which determines everything in it."""
    (directory / _SOURCE).write_text(gguf_sha256)


def source_of(directory: Path) -> str:
    """Returns the SHA-256 of the GGUF file that a directory was converted from, "" if it has no record of one."""
    file = directory / _SOURCE
    with reading(file):
        return file.read_text() if file.is_file() else ""


def remedy_for(directory: Path) -> str:
    """Returns how to replace a damaged directory of the cache, "" for one elsewhere, which the cache cannot replace."""
    return f"delete {directory} and run the same command again" if directory.parent == cache_directory() else ""


def fingerprint(directory: Path) -> str:
    """Returns a hash of a model directory's configuration and weights. Reads all of them, at 1 to 2 GB per second.

    Of a GGUF file converted in the cache it returns the file's, with and without the weights, and reads nothing.
    """
    # Elsewhere, a copy's weights may have been changed since.
    if directory.parent == cache_directory() and (source := source_of(directory)):
        return source[:16]
    with reading(directory):
        digest = hashlib.sha256((directory / "config.json").read_bytes())
        for path in sorted([one for kind in ("safetensors", "bin", "gguf") for one in directory.glob(f"*.{kind}")]):
            with path.open("rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
