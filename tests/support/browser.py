"""Starts the browser that tests of pages use."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_MAX_TEMPORARY = 60


@contextmanager
def chromium() -> Iterator[Browser]:
    """Starts the system's Chromium; skips the test if there is none."""
    path = next((path for name in _NAMES if (path := shutil.which(name))), "")
    if not path:
        pytest.skip("no Chromium: install it with the system's package manager")
    # It has a socket in a directory of its own there, whose path has to fit into 107 bytes.
    temporary = {"TMPDIR": "/tmp"} if len(tempfile.gettempdir()) > _MAX_TEMPORARY else {}
    environment: dict[str, str | float | bool] = {**os.environ, **temporary}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], env=environment)
        yield browser
        browser.close()
