"""`draftbridge bench`: what it concludes from what it measured, and its tables."""

from dataclasses import replace

import pytest

from draftbridge.v1 import bridge_pb2
from services.cli import bench
from services.cli.bench import ALONE, AUTO, Sample, verdict


def nothing() -> bridge_pb2.SpeculationStatistics:
    return bridge_pb2.SpeculationStatistics()


def used(*sources: str) -> bridge_pb2.SpeculationStatistics:
    """Returns statistics of accepted candidates of these sources; by default of both."""
    found = bridge_pb2.SpeculationStatistics(num_draft_tokens=9, num_accepted_tokens=5, target_pass_count=10)
    for name in sources or ("draft", "suffix"):
        found.sources.add(name=name, num_draft_tokens=9, num_accepted_tokens=5)
    return found


def samples(*speeds: dict[str, float]) -> list[Sample]:
    """Samples of 100 tokens, by category and way, with these tokens per second."""
    return [
        Sample(number, category, way, 100, int(100e9 / speed), 0, "", used() if way != "target alone" else nothing())
        for number, one in enumerate(speeds)
        for category, way_speeds in [(chr(ord("a") + number), one)]
        for way, speed in way_speeds.items()
    ]


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        (
            [{ALONE: 10, "prompt lookup": 12, "draft model": 16, AUTO: 18}],
            "Use d as the draft: expect 1.80x (1.20x",
        ),
        (
            [{ALONE: 10, "prompt lookup": 16, "draft model": 9, AUTO: 16}],
            "Use no draft: expect 1.60x from prompt lookup",
        ),
        ([{ALONE: 10, "prompt lookup": 16, "draft model": 9, AUTO: 16}], "and d adds nothing"),
        ([{ALONE: 72, "prompt lookup": 60, "draft model": 60, AUTO: 71}], "speculation gains nothing here (0.99x)"),
        ([{ALONE: 10, "prompt lookup": 13, AUTO: 13}], "Use no draft: expect 1.30x from prompt lookup."),
        ([{ALONE: 10, "prompt lookup": 10, "draft model": 9, AUTO: 10}], "Use the target alone"),
        ([{ALONE: 10, "prompt lookup": 10.4, "draft model": 9, AUTO: 10.7}], "Use the target alone"),
        (
            [{ALONE: 10, "prompt lookup": 9, "draft model": 16, AUTO: 10}],
            'Use d as the draft with its candidates alone (sources "draft"): expect 1.60x (0.90x without a draft).',
        ),
        (
            [
                {ALONE: 10, "prompt lookup": 20, "draft model": 9, AUTO: 20},
                {ALONE: 10, "prompt lookup": 9, "draft model": 9, AUTO: 20},
            ],
            "Use d as the draft: expect 2.00x (1.24x without a draft).",
        ),
        (
            [
                {ALONE: 10, "prompt lookup": 10, "draft model": 20, AUTO: 20},
                {ALONE: 10, "prompt lookup": 10, "draft model": 9, AUTO: 10},
            ],
            "Use d as the draft: expect 1.33x (1.00x without a draft); it is not worth it for b.",
        ),
    ],
)
def test_the_verdict(speeds: list[dict[str, float]], words: str) -> None:
    assert words in verdict(samples(*speeds), "d")


@pytest.mark.parametrize(
    ("accepted", "words"),
    [
        ({}, "Use the target alone: no candidate was accepted, so the times differ by chance."),
        ({"prompt lookup": ["suffix"]}, "Use no draft: expect 1.60x from prompt lookup"),
        ({"draft model": ["draft"], AUTO: ["draft"]}, "Use d as the draft: expect 1.80x (1.00x without a draft)"),
    ],
)
def test_a_way_without_accepted_candidates_has_gained_nothing(accepted: dict[str, list[str]], words: str) -> None:
    some = samples({ALONE: 10, "prompt lookup": 16, "draft model": 17, AUTO: 18})
    found = [replace(one, speculation=used(*accepted[one.way]) if one.way in accepted else nothing()) for one in some]
    assert words in verdict(found, "d")


def test_a_gain_of_auto_by_prompt_lookup_alone_counts() -> None:
    some = samples({ALONE: 100, "prompt lookup": 104, "draft model": 60, AUTO: 130})
    found = [replace(one, speculation=used("suffix")) if one.way == AUTO else one for one in some]
    assert verdict(found, "d") == "Use no draft: expect 1.30x from prompt lookup, and d adds nothing."


def test_nothing_gains_more_than_its_passes_have_tokens() -> None:
    some = samples({ALONE: 10, "prompt lookup": 17, AUTO: 17})
    for one in some[1:]:
        one.speculation.target_pass_count = 90
    assert verdict(some, "d") == "Use no draft: expect 1.12x from prompt lookup."


def test_candidates_that_are_all_wrong_cost_time() -> None:
    some = samples({ALONE: 10, "prompt lookup": 9.8, "draft model": 4, AUTO: 6.6})
    found = verdict([replace(one, speculation=nothing()) for one in some], "d")
    assert found == "Use the target alone: no candidate was accepted, and speculation costs time here (0.40x)."


def test_auto_has_a_row_for_each_source() -> None:
    """Sums over the prompts: 30 and 20 of 100 bytes each were from the draft, and 6 of 10 candidates were right."""
    some = samples({ALONE: 10, AUTO: 20}, {ALONE: 10, AUTO: 5})
    for one, (from_draft, from_text) in zip([s for s in some if s.way == AUTO], [(30, 0), (20, 5)], strict=True):
        did = one.speculation
        did.Clear()
        did.target_pass_count, did.generated_byte_count = 50, 100
        did.sources.add(name="draft", num_draft_tokens=5, num_accepted_tokens=3, accepted_byte_count=from_draft)
        did.sources.add(name="suffix", num_draft_tokens=from_text, accepted_byte_count=from_text)
    for one in some:
        one.speculation.target_pass_count = one.speculation.target_pass_count or 100
    columns = [list(column.cells) for column in bench.table(some).columns]
    assert columns[0] == [ALONE, AUTO, " draft model", " prompt lookup"]
    assert columns[-2] == ["", "", "25%", "2%"]
    assert columns[-1] == ["", "", "60% of 10", "0% of 5"]


def test_parts_of_the_time_add_up_to_the_whole() -> None:
    """The bridge's 22% were spent while the target computed."""
    some = samples({ALONE: 10})
    did = some[0].speculation
    did.elapsed_ns, did.verify_ns, did.waited_ns, did.network_ns, did.bridge_ns = 100, 72, 20, 6, 22
    columns = [list(column.cells) for column in bench.time_table(some).columns]
    assert columns == [[ALONE], ["72%"], ["20%"], ["8%"]]


def test_texts_that_differ_are_explained() -> None:
    """A near tie explains a difference; without one it is a bug."""
    some = samples({ALONE: 10, AUTO: 20}, {ALONE: 10, AUTO: 20})
    assert bench.differences(some) == ""
    alone, together = some[2:]
    other = [*some[:2], alone, replace(together, text="other")]
    assert "1 prompts have texts that differ without a near tie (the first is number 2)" in bench.differences(other)
    together.speculation.near_ties = 1
    assert "1 prompts have texts that differ after a near tie" in bench.differences(other)
    alone.speculation.near_ties, together.speculation.near_ties = 1, 0
    assert "where rounding decides" in bench.differences(other)


def test_speeds_are_of_all_tokens_in_all_times() -> None:
    some = samples({ALONE: 10, AUTO: 20}, {ALONE: 10, AUTO: 5})
    assert bench.speed(one for one in some if one.way == AUTO) == pytest.approx(200 / (5 + 20))
    assert bench.ratio(some, AUTO) == pytest.approx(0.8)
