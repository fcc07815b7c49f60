"""Tests of how a fresh environment is made: by which Python, and with which versions of packages."""

import os
import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.commands import ROOT


def test_a_python_that_is_too_old_leaves_no_environment(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text('#!/bin/sh\n[ "$1" = -m ] && mkdir -p .venv/bin && touch .venv/bin/python\n')
    old.chmod(0o755)
    command = ["make", "--file", str(ROOT / "Makefile"), f"PYTHON={old}", ".venv/bin/python"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode and f"{old} is not Python 3.11 or newer" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_an_environment_whose_installation_was_interrupted_is_made_again(tmp_path: Path) -> None:
    (tmp_path / ".venv/clients").mkdir(parents=True)
    command = ["make", "--file", str(ROOT / "Makefile"), "--old-file", ".venv/dev", "--dry-run", "test-clients"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=True)
    assert "litellm" in done.stdout


@pytest.mark.parametrize(
    ("given", "environment", "arguments"),
    [
        ([], {}, []),
        (["PROMPT=Explain $HOME and $(PATH)"], {}, ["--", "Explain $HOME and $(PATH)"]),
        (["PROMPT=- a list, isn't it?"], {}, ["--", "- a list, isn't it?"]),
        (['PROMPT=Two\nlines of "$HOME"'], {"PROMPT": "%n@%m"}, ["--", 'Two\nlines of "$HOME"']),
        ([], {"PROMPT": "%n@%m", "SMALL": "1"}, []),
        (["SMALL=1"], {}, ["--small"]),
        (["SMALL=0", "DRAFT=none"], {}, ["--draft", "none"]),
        (["TARGET=a model"], {"TARGET": "x86_64", "DRAFT": "yes"}, ["--target", "a model"]),
    ],
)
def test_the_demo_gets_what_was_given_to_make(
    tmp_path: Path, given: list[str], environment: dict[str, str], arguments: list[str]
) -> None:
    """The program is a stand-in that prints its arguments."""
    (program := tmp_path / ".venv/bin/draftbridge").parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    program.chmod(0o755)
    command = ["make", "--file", str(ROOT / "Makefile"), "--old-file", ".venv/demo", "demo", *given]
    # The tests may themselves be started by make, which passes its options on.
    others = ("PROMPT", "TARGET", "DRAFT", "SMALL", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    own = {name: value for name, value in os.environ.items() if name not in others}
    done = subprocess.run(
        command, cwd=tmp_path, env=own | environment, capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.split("\0")[:-1] == ["demo", *arguments]


@pytest.mark.parametrize("reached", [True, False])
def test_where_no_library_of_ik_llama_is_prebuilt_the_demo_goes_on_and_says_so(tmp_path: Path, reached: bool) -> None:
    """The interpreter is a stand-in whose pip finds no wheel of ik_llama; `reached`: but all other packages."""
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    (python := tmp_path / ".venv/bin/python").parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\ncase "$*" in *ik-llama*) exit 1;; *pip*) exit {int(not reached)};; esac\n')
    python.chmod(0o755)
    command = ["make", "--file", str(ROOT / "Makefile"), ".venv/demo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert "ik_llama could not be installed" in done.stderr and "run make llamacpp" in done.stderr
    assert (done.returncode == 0) is (tmp_path / ".venv/demo").exists() is reached


# Of the environment of habana, only what is installed here in the same version can be checked.
@pytest.mark.parametrize(("file", "extra"), [("constraints.txt", "dev"), ("constraints-habana.txt", "")])
def test_each_package_has_a_version(file: str, extra: str) -> None:
    lines = (ROOT / file).read_text().splitlines()
    pins = [line.split("==") for line in lines if "==" in line]
    pinned = {canonicalize_name(name): version for name, version in pins}
    wanted, known = [("draftbridge", extra)], set()
    while wanted:
        name, extra = one = wanted.pop()
        if one in known:
            continue
        known.add(one)
        try:
            package = distribution(name)
        except PackageNotFoundError:  # a package of another platform, or of an extra that is not installed
            continue
        if name != "draftbridge" and package.version.partition("+")[0] != pinned.get(name):
            continue  # the other version has other requirements
        if name == "torch" and not package.version.endswith("+cpu"):
            continue  # the build for GPUs has requirements of its own
        for required in map(Requirement, package.requires or ()):
            if required.marker is None or required.marker.evaluate({"extra": extra}):
                wanted += [(canonicalize_name(required.name), extra) for extra in ("", *required.extras)]
    assert {name for name, _ in known} - set(pinned) == {"draftbridge"}
