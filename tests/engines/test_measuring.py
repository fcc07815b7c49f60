"""Tests measurements in processes of their own: their output, their end, and the library that they measured."""

import os
import select
import signal
import subprocess
from pathlib import Path

import pytest

from services.engines import measuring


def test_another_build_of_a_library_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = tmp_path / "libllama.so"
    built.write_bytes(b"one")
    monkeypatch.setenv("JSON_LIB_PATH", str(built))
    before = measuring.library_facts("json")
    built.write_bytes(b"another")
    assert measuring.library_facts("json") != before


def test_a_trial_that_takes_too_long_ends_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipe, which the started process keeps open, closes only when that process has ended too."""
    end, write = os.pipe()
    # Both sleep until the trial ends them.
    code = (
        "import subprocess, sys, time; subprocess.Popen(['sleep', '60'], pass_fds=[int(sys.argv[1])]); time.sleep(60)"
    )
    (tmp_path / "starts_another.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **more: real(*given, pass_fds=[write], **more))
    with pytest.raises(subprocess.TimeoutExpired):
        measuring.run("starts_another", str(write), seconds=1)
    os.close(write)
    assert select.select([end], [], [], 50)[0] and os.read(end, 1) == b""
    os.close(end)


def test_what_a_crashing_library_prints_may_be_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "crashes.py").write_text("import os; os.write(2, b'\\xff'); os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = measuring.run("crashes", seconds=60)
    assert (done.returncode, done.stderr) == (-signal.SIGABRT, "\N{REPLACEMENT CHARACTER}")
