"""The page of the HTTP door in a headless browser. Skipped where the system has no Chromium."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx2 as httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from services.cli.processes import Fleet, launched
from tests.support.browser import chromium
from tests.support.waiting import eventually

WAIT_MS = 30_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, tiny_fleet: Fleet) -> Iterator[Page]:
    """Opens the page, and fails if it logs an error or fetches anything from elsewhere."""
    page = browser.new_page(viewport={"width": 1000, "height": 1100})
    page.set_default_timeout(WAIT_MS)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda one: None if one.url.startswith(tiny_fleet.http) else problems.append(one.url))
    page.goto(tiny_fleet.http)
    expect(page.locator("#model")).to_have_value("tiny-target")
    yield page
    page.close()
    # A refused request is logged by the browser, too.
    assert [one for one in problems if "the server responded with a status of 4" not in one] == []


def fill(page: Page, **values: str) -> None:
    for name, value in values.items():
        field = page.locator(f"#{name}")
        if field.evaluate("one => one.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)


def run(page: Page, number: int, **values: str) -> str:
    """Generates, waits for the row of that number, and returns the text."""
    fill(page, **values)
    page.click("#run")
    expect(page.locator("#runs tr")).to_have_count(number, timeout=WAIT_MS)
    expect(page.locator("#status")).to_contain_text("Finished")
    return str(page.locator("#text").text_content())


def test_the_text_is_the_server_s_and_its_colours_add_up(page: Page, tiny_fleet: Fleet) -> None:
    values = {"kind": "text", "prompt": "The quick brown", "max_tokens": "150", "temperature": "1", "seed": "3"}
    with page.expect_response("**/v1/completions") as response:
        text = run(page, 1, mode="lockstep", draft="tiny-draft", **values)
    lines = response.value.text().split("\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    (sources,) = [one["usage"]["draftbridge"][0]["sources"] for one in events if one.get("usage")]
    accepted = {one["name"]: one["accepted_byte_count"] for one in sources}
    assert sum(accepted.values()) > 0, "the page shows candidates of a draft"
    proposed = Counter[str]()  # of the text, in which three bytes stand for each that is not UTF-8
    for part in (part for one in events for part in one["choices"]):
        for span in part.get("draftbridge", {}).get("spans", ()):
            proposed[span["source"]] += span["byte_count"]
    assert all(accepted[name] <= proposed[name] <= 3 * accepted[name] for name in accepted)
    body = {"prompt": "The quick brown", "max_tokens": 150, "temperature": 1, "seed": 3}
    answer = httpx.post(f"{tiny_fleet.http}/v1/completions", json=body).json()
    assert text == answer["choices"][0]["text"]
    legend = page.locator("#legend li")
    counts = {one.get_attribute("data-source"): int(one.get_attribute("data-bytes") or 0) for one in legend.all()}
    assert sum(counts.values()) == len(text.encode())
    assert {name: count for name, count in counts.items() if count} == proposed
    pieces = page.locator("#text .piece")
    assert "".join(pieces.all_text_contents()) == text
    assert {one.get_attribute("data-source") for one in pieces.all()} <= set(counts)
    strip = page.locator("#strip").inner_text()
    for name in ("Tokens per second", "Target alone", "Accepted", "Plan", "Verifying", "Network and queues"):
        assert name in strip
    assert re.search(r"predicted; this is \d+\.\d\dx", strip) and "draft in turns" in strip


def test_the_strip_is_live(page: Page) -> None:
    """Holds the stream back after its first report, and looks at the strip meanwhile."""
    page.evaluate(
        """() => {
            const original = window.fetch;
            window.fetch = async (...given) => {
                const response = await original(...given);
                if (!String(given[0]).endsWith("/completions")) return response;
                const text = await response.text();
                const cut = text.indexOf("\\n", text.indexOf('"progress"')) + 2;
                const held = new Promise((go) => { window.go = go; });
                const body = new ReadableStream({
                    async start(controller) {
                        controller.enqueue(new TextEncoder().encode(text.slice(0, cut)));
                        await held;
                        controller.enqueue(new TextEncoder().encode(text.slice(cut)));
                        controller.close();
                    },
                });
                return new Response(body, { headers: response.headers });
            };
        }"""
    )
    fill(page, kind="text", prompt="The quick brown", max_tokens="60", temperature="1", seed="3", mode="lockstep")
    page.click("#run")
    expect(page.locator("#strip")).to_contain_text("Accepted", timeout=WAIT_MS)
    expect(page.locator("#status")).to_have_text("Generating…")
    expect(page.locator("#runs tr")).to_have_count(0)
    page.evaluate("window.go()")
    expect(page.locator("#runs tr")).to_have_count(1)


def test_the_tokens_of_both_models_stand_above_each_other(page: Page, tiny_fleet: Fleet) -> None:
    values = {"kind": "text", "prompt": "The quick brown", "max_tokens": "60", "temperature": "1", "seed": "3"}
    text = run(page, 1, mode="lockstep", **values)
    models = ["tiny-target", "tiny-draft"]
    answer = httpx.post(f"{tiny_fleet.http}/v1/segmentations", json={"text": text, "models": models}).json()
    expected = [[one["byte_count"] for one in row["tokens"]] for row in answer["data"]]
    hint = page.locator("#tokens-hint")
    expect(hint).to_contain_text(f"tiny-target: {len(expected[0])} tokens, tiny-draft: {len(expected[1])} tokens")
    piece = page.locator("#text .piece").first
    piece.hover(position={"x": 3, "y": 8})
    expect(page.locator("#tokens .model")).to_have_text(models)
    assert page.locator("#tokens .here").count() == 2
    edges = page.evaluate(
        """() => ["1", "2"].map((row) => {
            const cells = [...document.querySelectorAll("#tokens .token")]
                .filter((one) => one.style.gridRowStart === row);
            return [cells[0].getBoundingClientRect().left, cells.at(-1).getBoundingClientRect().right];
        })"""
    )
    assert edges[0] == pytest.approx(edges[1], abs=1)
    page.locator("#text").focus()
    seen = set()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
        seen.add(page.locator("#tokens .here").first.get_attribute("style"))
        seen.add(page.locator("#tokens .here").first.text_content())
    assert len(seen) > 2
    spoken = page.locator("#tokens-spoken")
    expect(spoken).to_have_attribute("role", "status")
    expect(spoken).to_have_text(re.compile(r"^tiny-target: .+; tiny-draft: .+; proposed by: .+$"))
    assert page.locator("#tokens [role]").count() == 0
    page.set_viewport_size({"width": 340, "height": 700})
    for _ in range(12):
        page.keyboard.press("ArrowRight")
    name = page.locator("#tokens .model").first
    assert name.evaluate("one => one.closest('.scroll').scrollLeft") > 0
    assert name.evaluate("one => one.getBoundingClientRect().left") >= 0, "the name stays where tokens scroll"
    run(page, 1, **(values | {"seed": "4"}))
    assert page.locator("#tokens .token").count() == 0


def test_a_server_with_keys_asks_for_one(browser: Browser, tiny_fleet: Fleet, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[ann]\ntoken = "{"a" * 32}"\n')
    options = ("--bridge", tiny_fleet.bridge, "--listen", "127.0.0.1:0", "--keys", str(keys), "--until-stdin-closes")
    with launched("http", "http", *options) as (url, _):
        page, old = browser.new_page(), {"Authorization": f"Bearer {'a' * 32}"}
        page.goto(url)
        expect(page.get_by_role("alert")).to_contain_text("no token")
        page.fill("#key", "a" * 32)
        page.keyboard.press("Tab")
        expect(page.locator("#key-field")).to_be_hidden()
        keys.write_text(f'[ann]\ntoken = "{"b" * 32}"\n')
        eventually(lambda: httpx.get(f"{url}/v1/models", headers=old).status_code == 401)
        page.click("#run")
        expect(page.locator("#key-field")).to_be_visible()
        page.fill("#key", "b" * 32)
        page.keyboard.press("Tab")
        expect(page.get_by_role("alert")).to_be_hidden()
        expect(page.locator("#model option")).to_have_text(["tiny-target"])
        expect(page.locator("#draft option")).to_have_text(["chosen by the bridge", "tiny-draft"])
        fill(page, kind="text", prompt="The quick", max_tokens="5")
        page.click("#run")
        expect(page.locator("#status")).to_contain_text("Finished", timeout=WAIT_MS)
        page.close()


def test_another_mode_or_draft_keeps_the_text(page: Page) -> None:
    values = {"kind": "chat", "prompt": "Say something.", "max_tokens": "40", "temperature": "0.8", "seed": "7"}
    texts = {
        run(page, number, mode=mode, draft=draft, **values)
        for number, (mode, draft) in enumerate((("auto", ""), ("lockstep", "tiny-draft"), ("off", "")), start=1)
    }
    assert len(texts) == 1
    expect(page.locator("#runs td:last-child")).to_have_text(["first run", "identical", "identical"])
    run(page, 1, mode="auto", seed="8")  # another request begins a new comparison


def test_comparing_runs_both_ways(page: Page) -> None:
    fill(page, kind="text", prompt="She sells", max_tokens="20")
    page.click("#compare")
    expect(page.locator("#runs td:first-child")).to_have_text(["off", "auto"], timeout=WAIT_MS)
    expect(page.locator("#runs td:last-child")).to_have_text(["first run", "identical"])


def test_a_newer_run_keeps_its_status(page: Page) -> None:
    page.route("**/v1/completions", lambda route: None)
    fill(page, kind="text", max_tokens="5")
    page.click("#run")
    page.click("#run")
    settle(page)
    expect(page.locator("#status")).to_have_text("Generating…")
    page.click("#stop")
    expect(page.locator("#status")).to_have_text("Stopped.")


def test_stopping_while_the_text_is_split_ends_the_comparison(page: Page) -> None:
    page.route("**/v1/segmentations", lambda route: None)
    fill(page, kind="text", max_tokens="5")
    page.click("#compare")
    expect(page.locator("#runs tr")).to_have_count(1, timeout=WAIT_MS)
    expect(page.locator("#tokens-hint")).to_contain_text("Splitting")
    page.click("#stop")
    settle(page)
    expect(page.locator("#stop")).to_be_disabled()
    expect(page.locator("#status")).to_contain_text("Finished")
    expect(page.locator("#tokens-hint")).not_to_contain_text("Splitting")


def test_a_pointer_that_rests_on_the_text_gets_its_tokens_once_they_are_there(page: Page) -> None:
    held: list[Route] = []
    page.route("**/v1/segmentations", lambda route: held.append(route))
    run(page, 1, kind="text", prompt="The quick brown", max_tokens="30", mode="lockstep")
    page.locator("#text .piece").first.hover(position={"x": 3, "y": 8})
    expect(page.locator("#tokens .here")).to_have_count(0)
    held[0].continue_()
    expect(page.locator("#tokens .here")).to_have_count(2)


def settle(page: Page) -> None:
    """Lets everything run that the last action has started."""
    page.evaluate("new Promise((go) => setTimeout(go, 50))")


def test_errors_are_shown(page: Page) -> None:
    fill(page, kind="text", max_tokens="9999")
    page.click("#run")
    expect(page.get_by_role("alert")).to_contain_text("max_tokens 9999 does not fit")
    fill(page, max_tokens="5")
    page.click("#run")
    expect(page.get_by_role("alert")).to_be_hidden()


def answer_with(page: Page, text: str, draft: str = "") -> None:
    """Makes the page receive this text, in place of a generated one."""
    spans = {"spans": [{"source": "<b>", "byte_count": len(text)}]}
    statistics: dict[str, Any] = {
        "draft": draft, "plan_summary": text, "note": "", "sources": [], "num_draft_tokens": 0,
        "measured_tokens_per_second": 1, "predicted_tokens_per_second": 1, "first_token_ns": 1, "verify_ns": 1,
        "network_ns": 1, "target_pass_count": 1, "plain_tokens_per_second": 1, "waited_ns": 0, "current_plan": text,
        "draft_choice": None,
    }  # fmt: skip
    events = [
        {"choices": [{"text": text, "draftbridge": spans}]},
        {"choices": [], "usage": {"completion_tokens": 1, "draftbridge": [statistics]}},
    ]
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.route("**/v1/completions", lambda route: route.fulfill(body=lines, content_type="text/event-stream"))


def test_markup_in_a_text_stays_text(page: Page) -> None:
    hostile = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>&amp;"
    answer_with(page, hostile, draft=hostile)
    assert run(page, 1, kind="text", prompt="a") == hostile
    assert page.locator("#text img, #text script, #runs img").count() == 0 and page.title() == "DraftBridge"


def test_an_answer_without_text(page: Page) -> None:
    answer_with(page, "")
    assert run(page, 1, kind="text", prompt="a") == ""
    expect(page.locator("#status")).to_contain_text("0 bytes, in 0.00 s")
    expect(page.locator("#tokens-hint")).to_contain_text("tiny-target: 0 tokens")
    page.locator("#text").focus()
    page.keyboard.press("ArrowRight")  # the fixture fails if this is an error
    expect(page.locator("#tokens-spoken")).to_have_text("")


def test_a_key_that_expires_while_the_text_is_split(page: Page) -> None:
    refusal = {"error": {"message": "the token is unknown", "type": "authentication_error", "param": None}}
    page.route("**/v1/segmentations", lambda route: route.fulfill(status=401, json=refusal))
    fill(page, kind="text", max_tokens="5")
    page.click("#run")
    expect(page.locator("#key-field")).to_be_visible(timeout=WAIT_MS)
    expect(page.get_by_role("alert")).to_contain_text("the token is unknown")


# The contrast of each text that is shown with what is behind it, as WCAG 2 defines it. Disabled buttons are exempt.
CONTRASTS = """() => {
    const parts = (color) => color.match(/[\\d.]+/g).map(Number);
    const light = (color) => {
        const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
        const [r, g, b] = parts(color).map((one) => linear(one / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const backs = (one) => {
        const color = getComputedStyle(one).backgroundColor;
        return parts(color)[3] === 0 && one.parentElement ? backs(one.parentElement) : color;
    };
    const found = {};
    for (const one of document.querySelectorAll("body *")) {
        const texts = [...one.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
        if (!(texts || one.value) || one.disabled || !one.checkVisibility()) continue;
        const [ink, back] = [light(getComputedStyle(one).color), light(backs(one))];
        const name = `${one.tagName} ${one.id} ${one.className} ${one.dataset.source ?? ""}`;
        found[name] = (Math.max(ink, back) + 0.05) / (Math.min(ink, back) + 0.05);
    }
    return { found, back: light(getComputedStyle(document.body).backgroundColor) };
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read_in_both_schemes(page: Page, scheme: Literal["light", "dark"]) -> None:
    page.emulate_media(color_scheme=scheme)
    values = {"kind": "text", "prompt": "The quick brown", "max_tokens": "60", "temperature": "1", "seed": "3"}
    run(page, 1, mode="lockstep", draft="tiny-draft", **values)
    page.locator("#text .piece").first.hover(position={"x": 3, "y": 8})
    expect(page.locator("#tokens .here")).to_have_count(2)
    page.evaluate(
        "() => { const one = document.querySelector('[role=alert]'); one.hidden = false; one.textContent = 'a'; }"
    )
    shown = page.evaluate(CONTRASTS)
    assert (shown["back"] < 0.1) == (scheme == "dark")
    assert any("piece" in name and "draft" in name for name in shown["found"])
    assert {name: ratio for name, ratio in shown["found"].items() if ratio < 4.5} == {}


def test_keyboard_and_a_small_screen(page: Page) -> None:
    page.set_viewport_size({"width": 340, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    fill(page, kind="text", max_tokens="5")
    page.locator("#prompt").press("Control+Enter")
    expect(page.locator("#runs tr")).to_have_count(1, timeout=WAIT_MS)
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select, textarea, button')]"
        ".filter(one => !(one.labels?.length || one.textContent.trim())).length"
    )
    assert unnamed == 0
    sizes = "[...document.querySelectorAll('input, select, textarea')].map(one => getComputedStyle(one).fontSize)"
    assert set(page.evaluate(sizes)) == {"16px"}, "smaller fields make phones zoom in"


def test_the_policy_forbids_everything_else(tiny_fleet: Fleet) -> None:
    answer = httpx.get(tiny_fleet.http)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    static = Path(__file__).parents[2] / "services" / "http" / "static"
    for file in static.iterdir():
        content = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in content and "https:" not in content and "innerHTML" not in content
        assert httpx.get(f"{tiny_fleet.http}/static/{file.name}").headers["content-security-policy"] == policy
