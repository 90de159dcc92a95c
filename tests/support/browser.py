"""A real browser without a window, for pages; tests that need one skip where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def browser() -> str:
    """The browser's path; skips the test with the reason where none is installed. CQWEN_BROWSER names another."""
    named = os.environ.get("CQWEN_BROWSER")
    found = named or next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser to look with: none of {', '.join(NAMES)} is installed")
    return found


def look(
    page: Path, profile: Path, *options: str, width: int = 1280, height: int = 2400
) -> subprocess.CompletedProcess[str]:
    """Open a local page, let its scripts run, and give the options' output (--dump-dom, --screenshot=...).

    Names resolve to nothing: a page that asks the network for anything shows it among the console's errors on stderr.
    """
    return subprocess.run(
        [
            browser(),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            f"--user-data-dir={profile}",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--enable-logging=stderr",
            "--virtual-time-budget=4000",
            f"--window-size={width},{height}",
            *options,
            page.resolve().as_uri(),
        ],
        capture_output=True,
        text=True,
    )
