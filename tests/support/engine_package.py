"""Installs an engine of another package, for processes that a test starts."""

import os
import sys
from pathlib import Path

import pytest


def install_engine(directory: Path, name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a module with an `EngineSpec` SPEC into a directory, and its entry point on the path of new processes."""
    (directory / f"{name}_engine.py").write_text(source)
    information = directory / f"{name}_engine-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-engine\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[draftbridge.engines]\n{name} = {name}_engine:SPEC\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory), *sys.path]))
