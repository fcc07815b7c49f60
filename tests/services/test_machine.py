"""Tests the names of accelerators, by which a bridge sees which models compete."""

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from draftbridge.machine import compute_units

LISTS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")


def names(device: str, gpus: Sequence[int] = ()) -> list[str]:
    units, count = compute_units(device, None, gpus)
    assert count == len(units)
    return sorted(unit.split("/")[1] for unit in units)


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="no two cores to bind threads to"
)
def test_the_cores_of_all_bound_threads_count() -> None:
    """As in vLLM, whose OpenMP binds the thread that describes the model. In a process of its own, which it binds."""
    code = """
import os, threading
from draftbridge.machine import compute_units
wait, bound, (first, second) = threading.Event(), threading.Event(), sorted(os.sched_getaffinity(0))[:2]
threading.Thread(target=wait.wait, daemon=True).start()
os.sched_setaffinity(0, {first})
assert [one.split("/")[1] for one in compute_units("cpu", None)[0]] == [f"cpu{first}"]
def bind():
    os.sched_setaffinity(0, {second})
    bound.set()
    wait.wait()
threading.Thread(target=bind, daemon=True).start()
bound.wait()
units, count = compute_units("cpu", None)
assert {one.split("/")[1] for one in units} == {f"cpu{first}", f"cpu{second}"} and count == 2
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("device", "listed", "name"),
    [
        ("cuda", ("", "", ""), "gpu0"),
        ("cuda:1", ("", "", "all"), "gpu1"),
        ("cuda", ("1", "", ""), "gpu1"),
        ("cuda:1", ("4, 6", "", ""), "gpu6"),
        ("cuda:1", ("", "4,6", ""), "gpu6"),
        ("cuda", ("", "", "3"), "gpu3"),
        ("cuda:0", ("1", "", "3,5"), "gpu5"),
        ("gpu", ("2", "", ""), "gpu2"),  # llama.cpp
        ("GPU.0", ("2", "", ""), "gpu.0"),  # OpenVINO
        ("xpu:0", ("2", "", ""), "xpu"),
    ],
    ids=str,
)
def test_gpus_of_one_host_have_different_names(
    device: str, listed: tuple[str, str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in zip(LISTS, listed, strict=True):
        monkeypatch.setenv(variable, value)
    assert names(device) == [name]


def test_gpus_that_are_named_by_their_uuids_or_used_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in LISTS:
        monkeypatch.delenv(variable, raising=False)
    assert names("cuda", range(2, 4)) == ["gpu2", "gpu3"]
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "GPU-8932f937,GPU-45cbf7b3")
    one, other = names("cuda"), names("cuda:1")
    assert one != other and names("cuda", range(2)) == sorted(one + other)
    assert "8932f937" not in one[0], "it reveals nothing of the machine"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-45cbf7b3")
    assert names("cuda") == other


@pytest.mark.parametrize(
    ("variables", "found", "used"),
    [
        ({}, ["hpu"], 1),
        ({"HABANA_VISIBLE_DEVICES": "all", "WORLD_SIZE": "2"}, ["hpu"], 1),
        ({"HABANA_VISIBLE_DEVICES": "3"}, ["hpu3"], 1),
        ({"HABANA_VISIBLE_DEVICES": "all", "HABANA_VISIBLE_MODULES": "0,1"}, ["hpu0", "hpu1"], 1),
        ({"HABANA_VISIBLE_MODULES": "0,1", "WORLD_SIZE": "2"}, ["hpu0", "hpu1"], 2),
    ],
    ids=str,
)
def test_gaudis_of_one_host_have_different_names(
    variables: dict, found: list, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HABANA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    units, count = compute_units("hpu", None)
    assert sorted(unit.split("/")[1] for unit in units) == found
    assert count == used
