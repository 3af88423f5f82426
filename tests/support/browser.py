"""A real Chromium for tests and pictures, driven by selenium; every request that it makes is written down."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException, TimeoutException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

PATIENCE_S = 60
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--ignore-certificate-errors",
    "--hide-scrollbars", "--force-color-profile=srgb",
)  # fmt: skip
DESKTOP, PHONE = (1440, 900), (390, 844)
T = TypeVar("T")


def needs_browser() -> tuple[str, str]:
    """Chromium and its driver; skips, with the reason, where one is missing or the dashboard was not built."""
    found = shutil.which("chromium"), shutil.which("chromedriver")
    if None in found:
        pytest.skip("no chromium with chromedriver here: `tools/setup dev` installs them on Debian")
    if not (files("edgesplit_controller") / "dashboard_assets" / "index.html").is_file():
        pytest.skip("the dashboard is not built: `make dashboard` builds it where npm's registry can be reached")
    return str(found[0]), str(found[1])


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own."""
    binary, driver = needs_browser()
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}", f"--window-size={DESKTOP[0]},{DESKTOP[1]}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield Browser(started)
    finally:
        started.quit()


class Browser:
    """What tests do with a page."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        self.asked: list[str] = []
        """Every URL that any page asked for."""

    def open(self, url: str) -> None:
        """Go there; a change of the fragment alone loads nothing."""
        self.driver.get(url)

    def size(self, width: int, height: int, *, scale: float = 1.0) -> None:
        """The page's size, as a phone's or a desktop's."""
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600},
        )

    def colours(self, scheme: str) -> None:
        """What the system prefers: `light` or `dark`."""
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )

    def all(self, selector: str) -> list[WebElement]:
        """Every element that matches."""
        found: list[WebElement] = self.driver.find_elements(By.CSS_SELECTOR, selector)
        return found

    def one(self, selector: str) -> WebElement:
        """The first that matches, as soon as there is one."""
        return self.wait(selector, lambda: next(iter(self.all(selector)), None))

    def button(self, text: str) -> WebElement:
        """The button that says so."""

        def found() -> WebElement | None:
            return next((one for one in self.all("button") if one.is_displayed() and one.text.strip() == text), None)

        return self.wait(f"a button {text!r}", found)

    def text(self, selector: str = "body") -> str:
        """What stands there now, as a reader sees it."""
        return str(self.driver.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def shows(self, text: str, selector: str = "body") -> None:
        """Wait until it stands there."""
        self.wait(f"{text!r} in {selector}", lambda: text in self.text(selector))

    def hides(self, text: str, selector: str = "body") -> None:
        """Wait until it stands there no more."""
        self.wait(f"no {text!r} in {selector}", lambda: text not in self.text(selector))

    def wait(self, what: str, holds: Callable[[], T | None]) -> T:
        """Ask until it is so."""

        def asked(_driver: Any) -> T | None:
            try:
                return holds()
            except StaleElementReferenceException:
                return None

        waiting: WebDriverWait[Any] = WebDriverWait(self.driver, PATIENCE_S, poll_frequency=0.05)
        try:
            found: T = waiting.until(asked)  # type: ignore[assignment]
        except TimeoutException:
            raise AssertionError(f"never came: {what}\n{self.text()[:2_000]}") from None
        return found

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a script on the page."""
        return self.driver.execute_script(script, *arguments)

    def requests(self) -> list[str]:
        """Every URL that was asked for so far, by whatever page."""
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.asked.append(message["params"]["request"]["url"])
        return self.asked

    def hosts(self) -> set[str]:
        """Whom the pages asked."""
        return {
            urlsplit(url).netloc for url in self.requests() if urlsplit(url).scheme in ("http", "https", "ws", "wss")
        }

    def problems(self) -> list[str]:
        """What the console complained of: errors of scripts, and what the content security policy refused. Answers
        that are no 200 are not a script's fault."""
        said = [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
        return [one for one in said if "Failed to load resource" not in one]

    def picture(self) -> bytes:
        """The page as it stands, PNG."""
        raw: bytes = self.driver.get_screenshot_as_png()
        return raw
