"""Takes the picture of the page in docs/page.png: a run of real models in a headless browser.

    python -m benchmarks.screenshot [--target MODEL] [--draft MODEL] [--engine ENGINE] [--out docs/page.png] [--all DIR]

It starts the models, compares a chat with the target alone, points at the text, and reduces the picture to 128 colours.
`--all` also saves the page in the dark, and on a small screen. It needs Chromium and Playwright (extra `dev`).
"""

import argparse
import shutil
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from services.cli.demo import LARGE
from services.cli.processes import draft_threads, fleet

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_WAIT_MS = 120_000
# Width and height of the window, and whether it is dark.
_VIEWS = {"light": (1000, 1230, False), "dark": (1000, 1230, True), "small": (390, 844, True)}


def compared(browser: Browser, url: str, prompt: str, max_tokens: int) -> Page:
    """Returns the page after a comparison with the target alone."""
    page = browser.new_page()
    page.set_default_timeout(_WAIT_MS)
    page.goto(url)
    page.locator("#model option").first.wait_for(state="attached")
    page.fill("#prompt", prompt)
    page.fill("#max_tokens", str(max_tokens))
    page.click("#compare")
    page.locator("#runs tr").nth(1).wait_for()
    page.locator("#tokens-hint").filter(has_text="tokens,").wait_for()
    return page


def viewed(page: Page, view: str) -> bytes:
    """Returns a picture of the page in a view, with the pointer on a piece of the text that the draft proposed."""
    width, height, dark = _VIEWS[view]
    page.emulate_media(color_scheme="dark" if dark else "light")
    page.set_viewport_size({"width": width, "height": height})
    page.mouse.move(0, 0)
    # A piece on one line: the middle of one on several lines may be outside of it.
    x, y = page.evaluate(
        """() => {
            const pieces = [...document.querySelectorAll("#text .from-draft")].map((one) => one.getClientRects());
            const boxes = pieces.filter((one) => one.length === 1).map(([box]) => box);
            const box = boxes[Math.floor(boxes.length / 2)];
            return [box.left + box.width / 2, box.top + box.height / 2];
        }"""
    )
    page.mouse.move(x, y)
    page.locator("#tokens .token").first.wait_for()
    return page.screenshot(full_page=True)


def main() -> None:
    """Runs the models and saves the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=LARGE.target)
    parser.add_argument("--draft", default=LARGE.draft)
    parser.add_argument("--engine", default=LARGE.engine)
    parser.add_argument("--prompt", default=LARGE.prompt)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=Path("docs/page.png"))
    parser.add_argument("--all", type=Path)
    options = parser.parse_args()
    chromium = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if chromium is None:
        parser.error("Chromium was not found: install it with the system's package manager")
    with ExitStack() as stack:
        running = stack.enter_context(
            fleet(
                options.target,
                options.draft,
                target_options=("--engine", options.engine, "--deterministic"),
                draft_options=("--engine", "auto", "--threads", str(draft_threads())),
                bridge_options=("--http", "127.0.0.1:0"),
            )
        )
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        stack.callback(browser.close)
        page = compared(browser, running.http, options.prompt, options.max_tokens)
        picture = Image.open(BytesIO(viewed(page, "light")))
        picture.quantize(128).save(options.out, optimize=True)
        if options.all:
            options.all.mkdir(parents=True, exist_ok=True)
            for view in _VIEWS:
                (options.all / f"{view}.png").write_bytes(viewed(page, view))


if __name__ == "__main__":
    main()
