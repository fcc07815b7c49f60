"""Tests what `benchmarks.planner` measures and concludes."""

from dataclasses import replace
from pathlib import Path

from benchmarks.planner import Server, Setting, measure, ways
from benchmarks.planner_report import WAYS, Run, Statistics, fresh_verdicts, table, verdicts


def statistics(predicted: float = 0.0, measured: float = 0.0, near_ties: int = 0) -> Statistics:
    """Returns the statistics of a request whose predicted and measured speeds are given in tokens per second."""
    return Statistics(9, 4, 3, near_ties, predicted, measured, "", {})


def run(prompt: int, category: str, way: str, speed: float, did: Statistics | None = None) -> Run:
    """Returns a run of ten tokens; `speed` is in tokens per second."""
    return Run(prompt, category, way, 10, int(1e10 / speed), (1, 2, 3), did or statistics())


RUNS = [
    run(0, "chat", "off", 10), run(0, "chat", "turns 2", 20), run(0, "chat", "auto", 16, statistics(12, 16)),
    run(1, "qa", "off", 10), run(1, "qa", "turns 2", 5), run(1, "qa", "auto", 8, statistics(12, 8)),
]  # fmt: skip


def test_speeds_are_those_of_all_tokens_and_the_bars_compare_them() -> None:
    best, same, category, each, prediction, parted = verdicts(RUNS)
    # 20 tokens take 2 s with off, 2.5 s with turns and 0.625 + 1.25 s with auto.
    assert best.startswith("reached  auto / best fixed way over all prompts (off): 1.07")
    assert same.endswith("auto / off over the 2 prompts with the same text: 1.07")
    assert category.startswith("MISSED   least auto / off of a category (qa): 0.80")
    assert "chat 1.60, qa 0.80" in each
    # The predicted time is 1.67 s, the measured time 1.875 s.
    assert prediction.startswith("reached  prediction / measurement of auto: 1.12")
    assert "median error is 38%, 0 of 2 within 15%" in prediction
    assert parted.endswith("none")


def test_first_requests_are_compared_prompt_by_prompt() -> None:
    overall, each = fresh_verdicts(RUNS)
    # A token takes 62.5 and 125 ms with auto, and 50 and 100 ms with the best fixed way.
    assert overall.startswith("MISSED ")
    assert ": 0.80 (bar 0.90)" in overall
    assert "0.80 (chat, turns 2), 0.80 (qa, off)" in each


def test_texts_that_part_without_a_near_tie_are_counted() -> None:
    other = replace(RUNS[1], token_ids=(1, 2, 4))
    tied = replace(RUNS[4], token_ids=(1, 2, 4), statistics=statistics(near_ties=1))
    lines = verdicts([RUNS[0], other, *RUNS[2:4], tied, RUNS[5]])
    assert lines[-1].startswith("MISSED ")
    assert lines[-1].endswith(": turns 2 1")


def test_every_way_of_a_setting_is_measured_and_says_the_same(tiny_models: tuple[Path, Path]) -> None:
    """Runs real processes, in float32 so that all texts are the same."""
    target, draft = (
        Server(str(path), "torch", ("--dtype", "float32", "--threads", "1"), core=0) for path in tiny_models
    )
    setting = Setting(target, draft)
    given = [{"category": "one", "prompt": "The quick brown"}, {"category": "other", "prompt": "Hello, world"}]
    chosen = ways(setting, ["turns 2", "ahead 3", "auto"])
    runs = [run for some in measure(setting, given, chosen, 12, 1.0) for run in some]
    assert [run.way for run in runs[:4]] == ["off", "turns 2", "ahead 3", "auto"]
    assert [run.way for run in runs[4:]] == ["turns 2", "ahead 3", "auto", "off"]
    assert all(run.speed > 0 for run in runs)
    assert len({run.token_ids for run in runs}) == 2
    assert runs[1].statistics.candidate_count > 0
    assert table(runs, "").row_count == 4
    fresh = list(measure(setting, given[:1], chosen, 12, 1.0, fresh=True))
    assert [run.way for run in fresh[0]] == ["off", "turns 2", "ahead 3", "auto"]
    assert fresh[0][-1].token_ids == runs[0].token_ids


def test_a_setting_without_a_draft_has_no_way_of_drafting() -> None:
    setting = Setting(Server("nothing", "torch", ()), None)
    assert not [way for way in ways(setting) if way.drafts]
    assert ways(setting, ["auto", "turns 2"]) == [WAYS[0], WAYS[-1]]
