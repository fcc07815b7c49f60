"""Tests the script of the checks before a change lands."""

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
# Stands in for make: lint fails once the models are being pulled.
MAKE = """#!/usr/bin/env bash
if [[ $1 == lint ]]; then
    until [[ -s pulling ]]; do sleep 0.05; done
    exit 3
fi
"""
PULL = """#!/usr/bin/env bash
echo $$ >> pulling
exec sleep 60
"""


def test_models_are_no_longer_pulled_when_a_check_has_failed(tmp_path: Path) -> None:
    script = tmp_path / ".ci" / "run"
    for path, text in (
        (script, (ROOT / ".ci" / "run").read_text()),
        (tmp_path / "bin" / "make", MAKE),
        (tmp_path / ".venv" / "bin" / "draftbridge", PULL),
    ):
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    bash = shutil.which("bash")
    assert bash
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run([bash, script], env={**os.environ, "PATH": path}, timeout=30, check=False)
    assert ended.returncode == 3
    (pid,) = map(int, (tmp_path / "pulling").read_text().split())

    def has_ended() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # nobody may wait for an orphan in a container
        except psutil.NoSuchProcess:
            return True

    try:
        eventually(has_ended)
        assert len((tmp_path / "pulling").read_text().split()) == 1, "the next model is not pulled either"
    finally:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()
