"""A headless Chromium that asks nobody but the page's server, and the chat page as its user has it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from server.live import eventually

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = None if BROWSER and DRIVER else "no Chromium here: apt-get install chromium chromium-driver"
SWITCHES = (
    "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync", "disable-dev-shm-usage", "window-size=1100,900",
)  # fmt: skip


@contextmanager
def chromium(profile: Path) -> Iterator[webdriver.Chrome]:
    """profile: an empty folder."""
    assert BROWSER is not None
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for switch in (*SWITCHES, f"user-data-dir={profile}"):
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


class ChatPage:
    """The page at an address. Each server has a port of its own, hence a storage of its own."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        driver.get_log("performance")
        driver.get(url)

    def __getitem__(self, id: str) -> WebElement:
        return self.driver.find_element(By.ID, id)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """Of all that match, a line each; what is not shown has none."""
        while True:
            try:
                return "\n".join(element.text for element in self.all(selector))
            except StaleElementReferenceException:  # drawn anew meanwhile
                continue

    def shows(self, words: str, selector: str = "body") -> None:
        try:
            eventually(lambda: words in self.text(selector), "shown")
        except AssertionError:
            raise AssertionError(f"{words!r} is not in {selector}, which has {self.text(selector)!r}") from None

    def script(self, code: str, *arguments: object) -> Any:
        return self.driver.execute_script(code, *arguments)

    def click(self, words: str) -> None:
        """A button by its name."""
        found = [each for each in self.all("button") if each.is_displayed() and each.text == words]
        assert found, f"no button {words!r}: {self.text('button')!r}"
        found[-1].click()

    def send(self, text: str) -> None:
        self["prompt"].send_keys(text, Keys.ENTER)

    def settle(self) -> None:
        """Until no answer is being written."""
        eventually(lambda: self["send"].is_displayed(), "settled")

    @property
    def answer(self) -> str:
        return self.text("article.assistant:last-child .body")

    def requests(self) -> list[dict[str, Any]]:
        """Those sent since this was last asked."""
        logged = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [each["params"]["request"] for each in logged if each["method"] == "Network.requestWillBeSent"]

    def chats(self) -> list[dict[str, Any]]:
        """Bodies of those that asked for an answer."""
        return [json.loads(each["postData"]) for each in self.requests() if each["url"].endswith("/completions")]
