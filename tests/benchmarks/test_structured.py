"""Tests the tasks and the arithmetic of `benchmarks.structured`."""

import json

import jsonschema
import pytest

from benchmarks.structured import Sample, check, speeds, table, tasks
from bridge.sampling.grammar import Grammar, GrammarKind
from services.grammars.trial import try_grammar


def test_there_are_forty_tasks_over_ten_schemas_that_can_be_demanded() -> None:
    found = tasks()
    assert len(found) == 40 and len({task.prompt for task in found}) == 40
    assert [task.name for task in tasks(10)] == list(dict.fromkeys(task.name for task in found))
    for task in tasks(10):
        jsonschema.Draft202012Validator.check_schema(task.schema)
        try_grammar(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(task.schema)))


def test_an_answer_that_is_not_valid_is_an_error() -> None:
    task = tasks(10)[3]
    good = {
        "category": "billing", "priority": "low", "customer_sentiment": "neutral", "requires_human_agent": False,
        "short_summary": "a",
    }  # fmt: skip
    check(task, json.dumps(good))
    for bad in ("{", json.dumps(good | {"priority": "none"})):
        with pytest.raises((ValueError, jsonschema.ValidationError)):
            check(task, bad)


def test_speed_counts_the_tokens_after_the_first() -> None:
    samples = [Sample("a", "alone", "", 11, 1.0, 11), Sample("a", "grammar", "", 11, 0.5, 4, 8, 6)]
    samples += [Sample("b", "alone", "", 21, 2.0, 21), Sample("b", "grammar", "", 21, 0.5, 8, 12, 12)]
    assert speeds(samples) == {"alone": 10.0, "grammar": 30.0}
    assert table(samples, "alone").splitlines()[-1] == "| grammar | 30.0 | 3.00 | 2.67 | 90% |"
