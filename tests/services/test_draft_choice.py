"""The choice of a draft learns gains, explores within bounds, and keeps kinds of text apart."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bridge.draft_choice import Candidate, DraftChooser, PairRecord, RecordKey, predicted_gain

A, B, C = (Candidate(name, f"{name}-key", 1.2) for name in "abc")


def request(gain: float, tokens: float = 100.0) -> PairRecord:
    return PairRecord(1.0, tokens, tokens / gain, 40.0, 60.0, 30.0, 120.0)


def run(chooser: DraftChooser, gains: dict[str, float], count: int, workload: str = "") -> list[str]:
    """Serves requests whose drafts have these gains, and returns the drafts that were chosen."""
    drafts, chosen = [one for one in (A, B, C) if one.name in gains], []
    for _ in range(count):
        draft, _ = chooser.choose("t", drafts, workload, 100.0, explore=True)
        chooser.observe("t", draft.key, workload, request(gains[draft.name]))
        chosen.append(draft.name)
    return chosen


def test_the_fastest_is_found_and_used_and_the_others_are_tried_seldom() -> None:
    chosen = run(DraftChooser(), {"a": 1.1, "b": 1.9, "c": 0.9}, 200)
    counts = Counter(chosen[20:])
    assert counts["b"] >= 170, "at most one request in twenty explores"
    assert counts["a"] + counts["c"] <= 9
    assert Counter(chosen[:20])["b"] >= 8


@given(st.lists(st.floats(0.5, 3.0), min_size=2, max_size=3), st.integers(30, 120))
def test_exploration_is_bounded_whatever_the_gains(gains: list[float], count: int) -> None:
    chooser = DraftChooser()
    by_name = dict(zip("abc", gains, strict=False))
    drafts, explored = [one for one in (A, B, C) if one.name in by_name], 0
    for _ in range(count):
        draft, choice = chooser.choose("t", drafts, "", 100.0, explore=True)
        explored += choice.explores
        chooser.observe("t", draft.key, "", request(by_name[draft.name]))
    assert explored <= 2 * (len(drafts) - 1) + count / 20 + 1


def test_a_draft_without_reported_times_is_tried_beside_a_good_one() -> None:
    known, unknown = Candidate("known", "known-key", 2.0), Candidate("unknown", "unknown-key", 1.0)
    chooser, chosen, gains = DraftChooser(), [], {"known": 2.0, "unknown": 4.0}
    for _ in range(30):
        draft, _ = chooser.choose("t", [known, unknown], "", 100.0, explore=True)
        chooser.observe("t", draft.key, "", request(gains[draft.name]))
        chosen.append(draft.name)
    assert Counter(chosen)["unknown"] >= 20


def test_a_change_is_noticed() -> None:
    chooser = DraftChooser()
    run(chooser, {"a": 1.8, "b": 1.4}, 60)
    assert Counter(run(chooser, {"a": 0.8, "b": 1.4}, 200)[100:])["b"] > 90


def test_a_draft_that_becomes_better_while_another_is_used_is_noticed() -> None:
    """One request in twenty goes to a draft that may be the best, though never to one that is clearly worse."""
    chooser = DraftChooser()
    assert Counter(run(chooser, {"a": 1.8, "b": 1.7}, 60)[20:])["a"] >= 35
    assert Counter(run(chooser, {"a": 1.8, "b": 3.0}, 200)[100:])["b"] > 90


def test_a_record_gives_what_drafts_are_compared_by() -> None:
    record = PairRecord()
    assert (record.acceptance_rate, record.accepted_bytes_per_pass) == (0.0, 0.0)
    record.add(request(2.0))
    assert (record.acceptance_rate, record.accepted_bytes_per_pass) == (0.5, 3.0)


def test_kinds_of_text_have_their_own_best_draft_and_a_new_kind_starts_from_the_others() -> None:
    chooser = DraftChooser()
    code, chat = {"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 2.0}
    for _ in range(40):
        run(chooser, code, 1, "code")
        run(chooser, chat, 1, "chat")
    assert Counter(run(chooser, code, 20, "code"))["a"] >= 18
    assert Counter(run(chooser, chat, 20, "chat"))["b"] >= 18
    other = DraftChooser()
    run(other, {"a": 0.9, "b": 1.8}, 30, "code")
    assert other.choose("t", [A, B], "new", 100.0, explore=False)[0] is B


def test_the_choice_tells_the_second_best_in_bytes_per_second() -> None:
    chooser = DraftChooser()
    for _ in range(5):
        chooser.observe("t", A.key, "", request(2.0))
        chooser.observe("t", B.key, "", request(1.5))
    _, choice = chooser.choose("t", [B, A], "", 100.0, explore=False)
    assert (choice.draft, choice.second_best, choice.explores) == ("a", "b", False)
    assert choice.bytes_per_second == pytest.approx(200, rel=0.1)
    assert choice.second_best_bytes_per_second == pytest.approx(150, rel=0.1)
    _, alone = chooser.choose("t", [A], "", 100.0, explore=False)
    assert (alone.second_best, alone.second_best_bytes_per_second) == ("", 100.0)


def test_requests_that_run_at_once_do_not_all_explore() -> None:
    chooser = DraftChooser()
    chosen = [chooser.choose("t", [A, B, C], "", 100.0, explore=True)[0].name for _ in range(30)]
    assert Counter(chosen)["a"] >= 24


def test_without_records_the_reported_times_decide_and_among_equals_the_order() -> None:
    slow = Candidate("slow", "slow", 1.0)
    assert DraftChooser().choose("t", [slow, A, B], "", 0.0, explore=True)[0] is A


def test_what_was_learned_is_handed_out_and_taken_over() -> None:
    saved: dict[RecordKey, PairRecord] = {}
    first = DraftChooser(lambda key, request: saved.setdefault(key, PairRecord()).add(request))
    run(first, {"a": 1.0, "b": 1.7}, 20, "code")
    second = DraftChooser()
    second.restore(saved)
    for draft in (A, B):
        assert second.expect("t", draft, "code") == first.expect("t", draft, "code")


def test_predictions_follow_the_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    target, flat = [(1, 10_000_000), (8, 12_000_000)], [(1, 1_000_000), (8, 1_100_000)]
    good = predicted_gain(target, flat, competes=False)
    assert good > 1.3
    assert predicted_gain(target, [(1, 20_000_000), (8, 20_000_000)], competes=False) == 1.0
    steep = [(1, 10_000_000), (2, 20_000_000), (8, 80_000_000)]
    assert predicted_gain(steep, flat, competes=False) < good
    assert predicted_gain((), flat, competes=False) == predicted_gain(target, (), competes=False) == 1.0
    monkeypatch.setattr("services.bridge.draft_choice._PRIOR_CHANCE", 0.9)
    assert predicted_gain(target, flat, competes=False) > good
    monkeypatch.setattr("services.bridge.draft_choice._PRIOR_CHANCE", 0.05)
    assert predicted_gain(target, flat, competes=False) == 1.0
