"""The page of examples/chat.py in a headless browser. `python -m tests.ecosystem.test_chat FILE [OPTIONS]` takes the
screenshot for the documentation, with options of the example."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")
selenium = pytest.importorskip("selenium")
from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

import hf_paged  # noqa: E402

ROOT = Path(hf_paged.__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1280,700"
).split()
TIME_LIMIT = 200  # seconds, for busy machines
QUESTION = "The with statement"


def wait_for(get: Callable[[], Any], seconds: float = TIME_LIMIT) -> Any:
    end = time.monotonic() + seconds
    while not (found := get()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.1)
    return found


class Page:
    """A server process of the example, and a browser on its page."""

    def __init__(self, folder: Path, *options: str) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        self.process = subprocess.Popen(
            [sys.executable, "examples/chat.py", "--port", str(port), *options],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "GRADIO_ANALYTICS_ENABLED": "False",
                "HF_HUB_OFFLINE": "1",
                "NO_PROXY": "127.0.0.1,localhost",
            },
        )
        try:
            self.open(folder, port)
        except BaseException:
            self.process.kill()
            raise

    def open(self, folder: Path, port: int) -> None:
        wait_for(lambda: self.process.poll() is not None or self.listens(port))
        assert self.process.poll() is None
        flags = webdriver.ChromeOptions()
        flags.binary_location = CHROMIUM
        # do not wait for remote fonts
        nowhere = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
        flags.page_load_strategy = "eager"
        for flag in (*FLAGS, nowhere, f"--user-data-dir={folder}"):
            flags.add_argument(flag)
        self.browser = webdriver.Chrome(options=flags, service=webdriver.ChromeService(DRIVER))
        self.browser.get(f"http://127.0.0.1:{port}")
        self.box = wait_for(lambda: self.all("textarea"))[0]

    def listens(self, port: int) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    def all(self, selector: str) -> list[Any]:
        return list(self.browser.find_elements(By.CSS_SELECTOR, selector))

    def answer(self) -> str:
        """The latest answer's text so far."""
        return str(
            self.browser.execute_script(
                "const all = document.querySelectorAll('[data-testid=bot]');"
                "return all.length ? all[all.length - 1].innerText.replace('Loading content', '') : ''"
            )
        )

    def requests(self) -> tuple[int, int, int]:
        """Running, waiting and ended requests, as the page shows them."""
        text = self.browser.execute_script("return document.getElementById('engine').innerText")
        found = re.search(r"requests running, waiting, ended\s+(\d+), (\d+), (\d+)", text)
        assert found is not None, text
        return int(found[1]), int(found[2]), int(found[3])

    def ask(self, question: str) -> None:
        self.box.send_keys(question, Keys.ENTER)

    def close(self) -> None:
        self.browser.quit()
        self.process.terminate()
        self.process.wait(TIME_LIMIT)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver")
def test_a_chat_in_a_browser(tmp_path: Path) -> None:
    page = Page(tmp_path, "--quick", "--max-new-tokens", "2000")
    try:
        assert page.requests() == (0, 0, 0)
        page.ask(QUESTION)
        first = wait_for(page.answer)
        wait_for(lambda: page.answer().startswith(first) and len(page.answer()) > len(first) + 20)  # while it streams
        wait_for(lambda: page.requests() == (0, 0, 1))
        page.ask("And once more")  # closing a page in the middle of an answer ends its request
        wait_for(lambda: page.requests()[0] == 1)
        page.browser.refresh()
        wait_for(lambda: page.all("#engine") and page.requests() == (0, 0, 2))
    finally:
        page.close()


def take_picture(path: str, *options: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Page(Path(folder), "--max-new-tokens", "150", *options)
        try:
            page.ask(QUESTION)
            wait_for(lambda: page.requests()[2] == 1)
            page.ask("An exception is raised")
            wait_for(lambda: page.requests()[2] == 2)
            page.browser.save_screenshot(path)
        finally:
            page.close()


if __name__ == "__main__":
    take_picture(*sys.argv[1:])
