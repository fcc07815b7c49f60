"""Tests the zoo's report: its arithmetic, resuming, and the page in headless Chromium (skipped without it)."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page

from services.cli.pieces import pieces
from services.cli.zoo import figures
from services.cli.zoo.command import as_json
from services.cli.zoo.predict import Prediction, Times, chances, predict
from services.cli.zoo.report import Report, comparisons, write
from services.cli.zoo.samples import ALONE, AUTO, TURNS, Key, Sample
from tests.support.browser import chromium

# CSS pixels between the default margins of Chromium on A4.
A4_WIDTH = 718
TARGETS = ("large", "<b>hostile</b>")
DRAFTS = ("small", "tiny", "suffix")
SPEEDS = {"small": 1.6, "tiny": 0.8, "suffix": 1.1}
MODEL: dict[str, Any] = {
    "engine": "torch",
    "dtype": "float32",
    "device": "cpu",
    "context_length": 512,
    "vocabulary_size": 1000,
    "costs": [[1, 10_000_000], [8, 12_000_000]],
}


def sample(target: str, draft: str, way: str, prompt: int, temperature: float = 0.0) -> Sample:
    """Returns a sample of 40 tokens whose speed follows `SPEEDS` with a little variation for each prompt."""
    gain = SPEEDS.get(draft, 1.0) * (1 + 0.02 * (prompt % 3) if draft else 1)
    taken, passes = (0, 0) if way == ALONE else (30, 20)
    proposed, compute_ns = (80, 20_000_000) if draft else (0, 0)
    text = "Grüße <script>alert(1)</script> from the target"
    spans = [(4, ""), (1, "draft"), (len(text.encode()) - 5, "draft")] if draft else [(len(text.encode()), "")]
    return Sample(
        target, draft, way, f"{prompt}", temperature, 48, "code" if prompt % 2 else "chat", 40, int(4e8 / gain),
        20 if draft else 40, passes, 60 if draft else 0, taken, 3 * taken, proposed, compute_ns,
        0, 0, text, [15, 10, 5] if draft else [], spans,
    )  # fmt: skip


def samples() -> list[Sample]:
    found = []
    for target in TARGETS:
        for temperature in (0.0, 1.0):
            for prompt in range(4):
                found.append(sample(target, "", ALONE, prompt, temperature))
                found += [sample(target, one, way, prompt, temperature) for one in DRAFTS for way in (AUTO, TURNS)]
    return found


def models(targets: Sequence[str], drafts: Sequence[str]) -> dict[tuple[str, str], dict[str, Any]]:
    return {**{("target", name): MODEL for name in targets}, **{("draft", name): MODEL for name in drafts}}


def many() -> Report:
    """Returns a report of 8 targets and 12 drafts with long names that differ only at their ends."""
    targets = [f"a-long-name-of-a-large-model-1.5b-instruct-q{number}" for number in range(8)]
    drafts = [f"a-long-name-of-a-small-model-0.5b-instruct-q{number}" for number in range(12)]
    some = []
    for target in targets:
        some.append(sample(target, "", ALONE, 0))
        some += [sample(target, draft, way, 0) for draft in drafts for way in (AUTO, TURNS)]
    pairs = [(target, draft) for target in targets for draft in drafts]
    times = Times(((1, 10_000_000), (8, 12_000_000)))
    return Report(
        "A zoo", "somewhere", models(targets, drafts), targets, drafts, some,
        [figures.pair_figures(some, *pair) for pair in pairs],
        [found for pair in pairs if (found := predict(*pair, 0.0, some, times, times))],
        dict.fromkeys(pairs, 0.4), {},
    )  # fmt: skip


def report() -> Report:
    refused = {(TARGETS[1], "tiny"): "the draft is the target's only replica"}
    some = [one for one in samples() if (one.target, one.draft) not in refused]
    pairs = [(target, draft) for target in TARGETS for draft in DRAFTS if (target, draft) not in refused]
    times = Times(((1, 10_000_000), (8, 12_000_000)))
    draft = Times(((1, 500_000),))
    predictions = [
        found for pair in pairs for value in (0.0, 1.0) if (found := predict(*pair, value, some, times, draft))
    ]
    return Report(
        "A zoo", "somewhere", models(TARGETS, DRAFTS), TARGETS, DRAFTS, some,
        [figures.pair_figures(some, *pair) for pair in pairs], predictions, dict.fromkeys(pairs, 0.4), refused,
    )  # fmt: skip


def test_gains_are_geometric_means_over_prompts_with_intervals() -> None:
    pair = figures.pair_figures(samples(), "large", "small")
    assert pair.gain.mean == pytest.approx(1.6 * (1 * 1.02 * 1.04 * 1) ** 0.25, rel=1e-3)
    assert pair.gain.low and pair.gain.high and pair.gain.low < pair.gain.mean < pair.gain.high
    assert (pair.gain.count, pair.acceptance, pair.tokens_per_pass) == (4, 0.5, 2.0), "temperatures are averaged"
    assert pair.by_position == [0.75, 0.5, 0.25]
    assert set(pair.by_category) == {"code", "chat"} and set(pair.by_temperature) == {0.0, 1.0}
    alone = [sample("t", "", ALONE, 0)]
    single = figures.gain_of([sample("t", "small", AUTO, 0)], alone)
    assert single.mean == pytest.approx(1.6, rel=1e-6) and single.interval == "unknown"
    assert figures.gain_of([], alone).count == 0


def test_a_pair_whose_texts_differ_without_a_near_tie_is_not_recommended() -> None:
    alone = [sample("t", "", ALONE, prompt) for prompt in range(4)]
    fast, slow = ([sample("t", draft, AUTO, prompt) for prompt in range(4)] for draft in ("small", "suffix"))
    fast[1] = replace(fast[1], text="another", near_ties=1)
    rounded = figures.pair_figures([*alone, *fast], "t", "small")
    assert (rounded.texts, rounded.texts.unexplained) == (figures.Texts(4, 3, 1), 0)
    assert figures.advice("t", [rounded]).startswith("Put small beside t")
    fast[2] = replace(fast[2], text="another")
    lossy = figures.pair_figures([*alone, *fast], "t", "small")
    assert lossy.texts.unexplained == 1
    found = figures.advice("t", [lossy, figures.pair_figures([*alone, *slow], "t", "suffix")])
    assert found.startswith("Put suffix beside t") and "Do not use small beside t: 1 of 4" in found
    assert figures.advice("t", [lossy]).startswith("Do not use small")


def test_a_prediction_is_compared_with_the_measurement_at_its_temperature() -> None:
    hot = [one for one in samples() if one.temperature or not one.draft]
    cold = [replace(one, elapsed_ns=one.elapsed_ns // 2) for one in samples() if one.draft and not one.temperature]
    predictions = [Prediction("large", "small", value, 1.6, "turns", 10.0, 40) for value in (0.0, 1.0, 2.0)]
    found = figures.pair_figures([*hot, *cold], "large", "small")
    one = replace(report(), samples=[*hot, *cold], figures=[found], predictions=predictions)
    at = {one.prediction.temperature: one for one in comparisons(one)}
    assert at[0.0].error == pytest.approx(-0.5, abs=0.03) and at[1.0].error == pytest.approx(0.0, abs=0.03)
    assert at[2.0].error is None and as_json(one)["predictions"][2]["error"] is None
    assert predict("large", "small", 0.5, samples(), Times(((1, 10),)), Times(((1, 5),))) is None


def test_the_advice_names_the_best_draft_or_none() -> None:
    found = report().figures
    assert figures.advice("large", found).startswith("Put small beside large: expect 1.6")
    without = [one for one in found if one.draft == "tiny"]
    assert figures.advice("large", without).startswith("Use large alone: the best draft, tiny, reaches 0.8")
    wide = [replace(one, gain=replace(one.gain, low=0.9)) for one in found if one.draft == "small"]
    assert "measure more texts" in figures.advice("large", wide)
    assert "no pair" in figures.advice("nobody", found)
    ranked = [one.draft for one in figures.ranking(found) if one.target == "large"]
    assert ranked == ["small", "suffix", "tiny"]


def test_predictions_follow_acceptance_and_costs() -> None:
    some = samples()
    assert chances([one for one in some if one.way == TURNS])[:3] == pytest.approx([0.75, 2 / 3, 0.5], abs=0.02)
    times = Times(((1, 10_000_000), (8, 12_000_000)))
    slow = [replace(one, compute_ns=80 * 50_000_000) for one in some]
    fast, lost = (predict("large", "small", 0.0, one, times, times) for one in (some, slow))
    assert fast and lost
    assert (1.2 < fast.gain < 2.0 and "turns" in fast.plan) or "ahead" in fast.plan
    assert (lost.gain, lost.plan) == (1.0, "the target alone")
    assert predict("large", "nobody", 0.0, some, times, times) is None
    few = [
        replace(
            one, proposed_count=one.proposed_count // 20, candidate_count=one.candidate_count // 20, draft_pass_count=1
        )
        if one.draft
        else one
        for one in (replace(one, compute_ns=one.compute_ns // 20, accepted_per_position=[1, 1, 1]) for one in some)
    ]
    rare = predict("large", "small", 0.0, few, times, times)
    assert rare and rare.gain < 1.1, "a draft that seldom proposes"
    untimed = predict("large", "small", 0.0, [replace(one, compute_ns=0) for one in some], times, times)
    assert untimed and untimed.gain > 1.0, "a service that reports no times of its forwards"
    far = predict("large", "small", 0.0, [replace(one, waited_ns=300_000_000) for one in some], times, times)
    assert far and 1.0 < far.gain < fast.gain, "a turn that takes longer than its forwards"


def test_a_prediction_corrects_what_further_tokens_cost() -> None:
    """Reported times may be off, but a pass with candidates never costs less than one without."""
    found = []
    for four_ns in (12_500_000, 20_000_000, 11_000_000):
        one = predict("large", "small", 0.0, samples(), Times(((1, 10_000_000), (4, four_ns))), Times(((1, 1), (4, 1))))
        assert one
        found.append(one.gain)
    assert found == pytest.approx([found[0]] * 3, rel=0.03)
    dear = [replace(one, elapsed_ns=20 * 80_000_000) if one.way == TURNS else one for one in samples()]
    lost = predict("large", "small", 0.0, dear, Times(((1, 10_000_000), (4, 11_000_000))), Times(((1, 1), (4, 1))))
    assert lost and lost.gain < found[0]


def test_a_character_of_several_tokens_belongs_to_the_piece_that_completes_it() -> None:
    text = "Grüße 🎉!"
    assert list(pieces(text, [(4, ""), (2, "draft"), (1, "suffix"), (2, "draft"), (3, ""), (1, "draft")])) == [
        ("Grü", ""), ("ß", "draft"), ("e", "suffix"), (" ", "draft"), ("🎉", ""), ("!", "draft")
    ]  # fmt: skip
    assert list(pieces(text, [(3, "draft"), (4, "suffix")])) == [("Gr", "draft"), ("üße", "suffix"), (" 🎉!", "")]
    assert list(pieces(text, [])) == [(text, "")]


def test_the_json_has_every_pair_and_no_sample() -> None:
    found = json.loads(json.dumps(as_json(report())))
    assert len(found["pairs"]) == 5 and len(found["refused"]) == 1 and len(found["advice"]) == 2
    assert found["predictions"] and found["pairs"][0]["vocabulary_overlap"] == 0.4
    assert "alert" not in json.dumps(found)


def test_a_model_is_shown_by_role_only_if_target_and_draft_of_a_name_differ() -> None:
    slow = MODEL | {"device": "cpu:1"}
    found = replace(report(), models={("target", "a"): MODEL, ("draft", "a"): slow, **models("b", "b")}).by_label
    assert found == {"a (target)": MODEL, "a (draft)": slow, "b": MODEL}


def test_what_failed_or_cannot_run_is_shown_with_its_reason(tmp_path: Path) -> None:
    failed = {Key("large", "lost", AUTO, "0", 0.0, 48): "the draft was lost"}
    failed[Key("large", "small", AUTO, "9", 0.0, 48)] = "the context is full"
    away = {(TARGETS[1], ""): "it is away", (TARGETS[1], "lost"): "it is away"}
    one = replace(report(), drafts=(*DRAFTS, "lost"), failures=failed, refused=away)
    write(one, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "–</strong>failed<" in text and "1 of 1 samples failed: the draft was lost" in text
    assert "1 of 17 samples failed: the context is full" in text
    found = as_json(one)
    assert {"target": TARGETS[1], "draft": "", "refusal": "it is away"} in found["refused"]
    assert found["failures"][0]["error"] == "the draft was lost" and found["advice"][1].endswith("it is away.")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """Opens the report, and fails if it logs an error or requests anything but itself."""
    path = tmp_path / "report.html"
    write(report(), path)
    page = browser.new_page(viewport={"width": 1100, "height": 900})
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request",
        lambda one: None if one.url == path.as_uri() or one.url.startswith("data:") else problems.append(one.url),
    )
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    page.goto(path.as_uri())
    yield page
    page.close()
    assert problems == []


def test_the_map_shows_every_pair_and_its_tooltip_the_figures(page: Page) -> None:
    cells = page.locator(".pair")
    assert cells.count() == len(TARGETS) * len(DRAFTS)
    tips = page.locator(".tip")
    assert not tips.first.is_visible()
    shown = report()
    pairs = [(target, draft) for target in TARGETS for draft in DRAFTS]
    for pair, cell, tip in zip(pairs, cells.all(), tips.all(), strict=True):
        cell.hover()
        assert tip.is_visible()
        text = tip.inner_text()
        assert f"{pair[1]} beside {pair[0]}" in text
        if reason := shown.refused.get(pair):
            assert reason in text and cell.locator("strong").inner_text() == "–"
            continue
        one = figures.pair_figures(shown.samples, *pair)
        gain = f"{one.gain.mean:.2f}x"
        assert f"{gain} the target alone (95% interval {one.gain.low:.2f} to {one.gain.high:.2f})" in text
        assert f"{one.acceptance:.0%} of candidates" in text and f"always in turns {one.turns.mean:.2f}x" in text
        assert f"{one.tokens_per_second:.1f} tokens/s" in text and "16 of 16 texts" in text
        assert "predicted at T=0: " in text and "predicted at T=1: " in text
        assert cell.locator("strong").inner_text() == gain and f"{gain}\n{one.acceptance:.0%}" in cell.inner_text()
    assert page.locator("#advice li").count() == len(TARGETS)
    assert page.locator("svg").count() >= 6


def test_the_map_is_read_with_the_keyboard(page: Page) -> None:
    page.keyboard.press("Tab")
    tips = page.locator(".tip")
    assert tips.nth(0).is_visible(), "the first cell is the first thing that Tab reaches"
    page.keyboard.press("ArrowRight")
    assert tips.nth(1).is_visible() and not tips.nth(0).is_visible()
    page.keyboard.press("ArrowDown")
    assert tips.nth(len(DRAFTS) + 1).is_visible()
    page.keyboard.press("Escape")
    assert not tips.nth(len(DRAFTS) + 1).is_visible()
    page.keyboard.press("ArrowLeft")
    assert tips.nth(len(DRAFTS)).is_visible()


def test_nothing_depends_on_colour_alone_and_names_are_text(page: Page) -> None:
    labels = [str(one.text_content()) for one in page.locator(".pair strong").all()]
    assert all(label.endswith("x") or label == "–" for label in labels)
    contrasts = page.evaluate(
        """() => [...document.querySelectorAll('.pair')].map(cell => {
            const light = text => { const [r, g, b] = text.match(/\\d+/g).map(Number).map(one => {
                one /= 255; return one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4; });
                return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
            const style = getComputedStyle(cell);
            const [a, b] = [light(style.color), light(style.backgroundColor)].sort();
            return (b + 0.05) / (a + 0.05); })"""
    )
    assert min(contrasts) >= 4.5
    assert page.locator("th b").count() == 0, "a hostile name is not markup"
    assert page.locator("th", has_text="<b>hostile</b>").count() > 0
    assert page.locator(".example script").count() == 0


def test_twelve_series_differ_without_colours_and_their_names_are_whole(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, many(), tmp_path, 1100)
    for position, lines in ((2, 12), (1, 0)):  # acceptance by position of the first target; overlap
        figure = page.locator(".charts figure").nth(position)
        legend = figure.locator(".legend")
        marks = [one.get_attribute("d") + str(one.get_attribute("fill") == "none") for one in _all(legend, ".mark")]
        names = [one.text_content() for one in _all(legend, "text")]
        assert len(set(marks)) == len(set(names)) == len(names) == (lines or 8)
        dashes = [one.get_attribute("stroke-dasharray") for one in _all(figure, "polyline")]
        assert len(set(dashes)) == lines
    titles = [one.text_content() for one in _all(page.locator(".charts figure").nth(1), "title")]
    assert len(set(titles)) == 8 * 12, "each mark names its pair"
    assert page.locator(".figures tbody tr").count() == 8 * 12
    outside = page.evaluate(
        """() => [...document.querySelectorAll('svg text')].filter(one => {
            const [inner, outer] = [one, one.ownerSVGElement].map(any => any.getBoundingClientRect());
            return inner.left < outer.left - 1 || inner.right > outer.right + 1; }).map(one => one.textContent)"""
    )
    assert outside == [], "no label is cut off"
    page.close()


@pytest.mark.parametrize("of", [report, many])
def test_it_prints_on_paper(browser: Browser, tmp_path: Path, of: Callable[[], Report]) -> None:
    page = opened(browser, of(), tmp_path, A4_WIDTH)
    page.emulate_media(media="print")
    page.locator(".pair").first.focus()
    assert not page.locator(".tip").first.is_visible()
    assert page.pdf(format="A4").startswith(b"%PDF")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= A4_WIDTH, "nothing is cut off"
    page.close()


def opened(browser: Browser, one: Report, directory: Path, width: int) -> Page:
    path = directory / "report.html"
    write(one, path)
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(path.as_uri())
    return page


def _all(within: Locator, selector: str) -> list[Locator]:
    return within.locator(selector).all()


def test_a_report_without_samples_is_a_page_too(tmp_path: Path) -> None:
    empty = Report("A zoo", "", {}, TARGETS, DRAFTS, [], [], [], {}, {})
    write(empty, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "no pair was measured" in text and Prediction.__name__ not in text
