"""Tests the names of accelerators, by which a bridge sees which models compete."""

import pytest

from draftbridge.machine import compute_units


@pytest.mark.parametrize(
    ("variables", "names", "used"),
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
    variables: dict, names: list, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HABANA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    units, count = compute_units("hpu", None)
    assert sorted(unit.split("/")[1] for unit in units) == names
    assert count == used
