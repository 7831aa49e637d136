"""Debian's Chromium without a window, for the pages that the service shows."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

PROGRAMS: Final = ("chromium", "chromedriver")
OPTIONS: Final = (
    "--headless=new",
    "--no-sandbox",  # which root has none of
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-default-browser-check",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--window-size=1440,1120",
)


def require() -> None:
    """Skips the test where a program is not installed; in CI that is an error."""
    if names := [name for name in PROGRAMS if shutil.which(name) is None]:
        reply = f"{' and '.join(names)} not installed: apt-get install chromium chromium-driver"
        if os.environ.get("CI"):
            pytest.fail(reply)
        pytest.skip(reply)


@contextmanager
def browser() -> Iterator[Chrome]:
    """A browser of its own, without a profile; its logs have requests and the console."""
    require()
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for option in OPTIONS:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options, Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def prefers(driver: Chrome, **features: str) -> None:
    """Media features as a user may have set them: `prefers_color_scheme="dark"`."""
    media = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})


def network(driver: Chrome) -> Iterator[tuple[str, dict[str, Any]]]:
    """The page's network requests since the last call: (event, its fields)."""
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"].startswith("Network."):
            yield message["method"], message["params"]


def check_quiet(driver: Chrome, url: str) -> None:
    """No error on the console, no request to another host than that of `url`."""
    assert [one for one in driver.get_log("browser") if one["level"] not in ("INFO", "DEBUG")] == []
    requests = [
        fields["request"]["url"]
        for event, fields in network(driver)
        if event == "Network.requestWillBeSent"
    ]
    assert requests
    assert [one for one in requests if not one.startswith((f"{url}/", "data:", "blob:"))] == []
