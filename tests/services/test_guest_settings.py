"""Tests how the settings of an adapter are read from an engine's configuration and the environment."""

import pytest

from draftbridge.guests.settings import GuestSettings, InvalidSettings


def test_settings() -> None:
    environment = {"DRAFTBRIDGE_GUEST_BRIDGE": "a:1", "DRAFTBRIDGE_GUEST_SOURCES": "draft, suffix", "OTHER": "x"}
    settings = GuestSettings.read({"bridge": "b:2", "deadline_ms": 5, "tls": True}, environment)
    assert (settings.bridge, settings.sources, settings.deadline_ms) == ("b:2", ("draft", "suffix"), 5.0)
    assert settings.credentials.encrypted
    for wrong, remedy in (
        ({"brigde": "a:1"}, "did you mean bridge"),
        ({"deadline_ms": "soon"}, "from 0 to 10000"),
        ({"tls": "perhaps"}, "true or false"),
        ({"sources": 5}, "a list of names"),
    ):
        with pytest.raises(InvalidSettings, match=remedy):
            GuestSettings.read(wrong, {})
    with pytest.raises(InvalidSettings, match="no setting 'deadline': did you mean deadline_ms"):
        GuestSettings.read({}, {"DRAFTBRIDGE_GUEST_DEADLINE": "5"})


def test_null_is_not_a_value() -> None:
    environment = {"DRAFTBRIDGE_GUEST_BRIDGE": "a:1"}
    settings = GuestSettings.read({"bridge": None, "draft": None, "deadline_ms": None, "sources": None}, environment)
    assert settings == GuestSettings(bridge="a:1")
    with pytest.raises(InvalidSettings, match="did you mean bridge"):
        GuestSettings.read({"brigde": None}, {})
