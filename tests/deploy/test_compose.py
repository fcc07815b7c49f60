"""The Compose file is valid, and its processes find each other."""

import re
from typing import Any

import compose_spec
import pytest
import yaml

from tests.deploy.commands import ROOT, parse

TEXT = (ROOT / "deploy/compose.yaml").read_text()


def services(**environment: str) -> dict[str, Any]:
    """Returns the services of the file, with variables replaced as Compose does."""

    def value(match: re.Match[str]) -> str:
        return environment.get(match["name"], match["default"])

    text = re.sub(r"\$\{(?P<name>\w+):-(?P<default>[^}]*)\}", value, TEXT)
    assert "$" not in text
    found = yaml.safe_load(text)
    return dict(found["services"])


def checked(content: dict[str, Any]) -> None:
    """Raises `ValueError` if the content of a Compose file breaks the specification."""
    compose_spec.PyCompose.from_yaml(yaml.safe_dump(content)).validate()


def test_the_file_follows_the_specification() -> None:
    checked(yaml.safe_load(TEXT))
    for key, value, message in (("read_onli", True, "read_onli"), ("networks", ["nowhere"], "nowhere")):
        wrong = yaml.safe_load(TEXT)
        wrong["services"]["bridge"][key] = value
        with pytest.raises(ValueError, match=message):
            checked(wrong)


@pytest.mark.parametrize(
    "environment", [{}, {"TARGET": "gemma-3-270m", "TARGET_ENGINE": "openvino"}, {"DRAFT": "suffix"}]
)
def test_processes_find_each_other(environment: dict[str, str]) -> None:
    found = services(**environment)
    values = {name: parse(one["command"], one["environment"]) for name, one in found.items()}
    assert values["target"]["model"] == environment.get("TARGET", "qwen2.5-coder-1.5b-instruct")
    assert values["draft"]["model"] == environment.get("DRAFT", "smollm2-135m-instruct")
    for address in (*values["bridge"]["target"], *values["bridge"]["draft"]):
        name, _, port = address.partition(":")
        assert values[name]["listen"] == f"0.0.0.0:{port}"
        assert set(found[name]["networks"]) & set(found["bridge"]["networks"])
    for name, one in found.items():
        port = values[name]["listen"].partition(":")[2]
        assert one["environment"]["DRAFTBRIDGE_CLIENT_SERVER"] == f"127.0.0.1:{port}", "the health check's address"
        assert int(one["stop_grace_period"].removesuffix("s")) >= values[name]["grace"] + 10
        assert one["read_only"] is True and one["cap_drop"] == ["ALL"] and one["user"] == "10001:10001"
        # Plain connections, so nothing but the bridge's ports is published, and those on this machine only.
        assert values[name]["insecure"] is True
        assert all(one.startswith("127.0.0.1:") for one in one.get("ports", ()))
    assert {one.rpartition(":")[2] for one in found["bridge"]["ports"]} == {"50050", "8080"}
    assert values["bridge"]["http_host"] == ("localhost",), "web pages cannot use the port by DNS rebinding"
