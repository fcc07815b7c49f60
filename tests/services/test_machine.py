"""Tests the names of accelerators, by which a bridge sees which models compete."""

import pytest

from draftbridge.machine import compute_units


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({}, ["hpu"]),
        ({"HABANA_VISIBLE_DEVICES": "all"}, ["hpu"]),
        ({"HABANA_VISIBLE_DEVICES": "3"}, ["hpu3"]),
        ({"HABANA_VISIBLE_DEVICES": "all", "HABANA_VISIBLE_MODULES": "0,1"}, ["hpu0", "hpu1"]),
    ],
    ids=str,
)
def test_gaudis_of_one_host_have_different_names(variables: dict, names: list, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HABANA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    units, count = compute_units("hpu", None)
    assert sorted(unit.split("/")[1] for unit in units) == names
    assert count == 1
