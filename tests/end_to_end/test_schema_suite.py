"""Runs the JSON Schema Test Suite, as far as a package of npm ships it (draft 4): nothing invalid is allowed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import InvalidGrammar
from bridge.sampling.grammar import Grammar, GrammarKind
from services.grammars.byte_matcher import ByteMatcher, byte_tokenizer
from services.grammars.compiler import compile_grammar

PACKAGE = "json-schema-test-suite@0.0.10"
# Files of which some or all schemas are refused, for the keyword or a part that cannot be expressed.
REFUSED = {
    "bignum", "definitions", "dependencies", "not", "oneOf", "patternProperties", "ref", "refRemote", "uniqueItems",
}  # fmt: skip
# Valid data that the grammar does not generate: properties in another order than the schema's, and a URI reference.
NOT_GENERATED = {"allOf", "allOf with base schema", "validation of URIs"}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, dict[str, Any]]]:
    """Returns the groups of the suite with the names of their files."""
    place = tmp_path_factory.mktemp("suite")
    npm = Path(sys.executable).parent / "npm"
    command = [npm, "install", "--no-save", "--ignore-scripts", "--no-audit", "--no-fund", "--silent", PACKAGE]
    subprocess.run(command, cwd=place, timeout=200, check=True)
    files = sorted(place.glob("node_modules/json-schema-test-suite/tests/draft4/**/*.json"))
    return [(file.stem, group) for file in files for group in json.loads(file.read_text())]


def outcomes(suite: list[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, str, dict[str, Any], bool | None]]:
    """Yields each test with its file and group, and whether its data may be generated; None if it is refused."""
    tokenizer = byte_tokenizer()
    for name, group in suite:
        try:
            matcher = compile_grammar(tokenizer, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(group["schema"])))
        except InvalidGrammar:
            matcher = None
        for test in group["tests"]:
            data = json.dumps(test["data"], ensure_ascii=False).encode()
            allowed = ByteMatcher(matcher).accepted(b"", data) == (len(data), True) if matcher else None
            yield name, group["description"], test, allowed


def test_what_is_supported_is_right_and_the_rest_is_refused(suite: list[tuple[str, dict[str, Any]]]) -> None:
    found = list(outcomes(suite))
    assert not [one for one in found if one[3] and not one[2]["valid"]]
    assert {one[1] for one in found if one[3] is False and one[2]["valid"]} <= NOT_GENERATED
    assert {one[0] for one in found if one[3] is None} == REFUSED
    assert sum(one[3] is not None for one in found) > 200
