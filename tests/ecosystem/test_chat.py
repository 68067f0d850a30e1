"""The page of examples/chat.py in a headless browser. `python -m tests.ecosystem.test_chat FILE
[OPTIONS]` takes the screenshot for the documentation, with options of the example."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")
selenium = pytest.importorskip("selenium")
from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

import hf_paged  # noqa: E402

from .conftest import TIME_LIMIT, free_port, wait_for  # noqa: E402

ROOT = Path(hf_paged.__file__).parents[1]
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
DRIVER = shutil.which("chromedriver")
NO_BROWSER = "needs Chromium and its driver, on Debian: apt-get install chromium chromium-driver"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run"
    " --disable-background-networking --disable-component-update --disable-sync"
    " --window-size=1280,700"
).split()
QUESTION = "The with statement"
TRAIN_STEPS = 120  # enough for words, not for sentences
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "min_new_tokens": 300}


class Page:
    """A server process of the example, and a browser on its page."""

    def __init__(self, folder: Path, *options: str) -> None:
        port = free_port()
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
                "const all = document.querySelectorAll('[data-testid=bot]');return all.length ?"
                " all[all.length - 1].innerText.replace('Loading content', '') : ''"
            )
        )

    def requests(self) -> tuple[int, int, int]:
        """Running, waiting and ended requests, as the page shows them."""
        script = "return document.getElementById('engine')?.innerText ?? ''"
        pattern = r"requests running, waiting, ended\s+(\d+), (\d+), (\d+)"
        # it may be drawn later
        found = wait_for(lambda: re.search(pattern, self.browser.execute_script(script)))
        return int(found[1]), int(found[2]), int(found[3])

    def lengths(self) -> list[int]:
        """Lengths of the latest answer each time that the page drew it, since `watch`."""
        return list(self.browser.execute_script("return window.lengths"))

    def watch(self) -> None:
        """Has the page note each change of the latest answer. The page does it, since a busy
        machine may draw a whole answer between two looks from here."""
        self.browser.execute_script(
            "window.lengths = [];const note = () => {  const all ="
            " document.querySelectorAll('[data-testid=bot]');  const length = all.length ?"
            " all[all.length - 1].innerText.length : 0;  if (length !== window.lengths.at(-1))"
            " window.lengths.push(length);};new MutationObserver(note).observe(document.body,"
            " {childList: true, subtree: true, characterData: true});"
        )

    def ask(self, question: str) -> None:
        self.box.send_keys(question, Keys.ENTER)

    def close(self) -> None:
        self.browser.quit()
        self.process.terminate()
        self.process.wait(TIME_LIMIT)


def save_tuned_model(folder: Path) -> set[str]:
    """Trains the examples' model, saves it to a folder, and returns the words that it was trained
    on."""
    tiny_model, chat = (importlib.import_module(name) for name in ("tiny_model", "chat"))
    model, tokenizer = tiny_model.trained_model(steps=TRAIN_STEPS)
    tokenizer.chat_template = chat.TEMPLATE
    tokenizer.save_pretrained(folder)
    model.generation_config.update(**SAMPLING)
    model.save_pretrained(folder)
    return set(words_of(" ".join(tiny_model.MANUAL.values())))


def words_of(text: str) -> list[str]:
    """Words of at least five letters; shorter ones would often be words by chance."""
    return re.findall(r"[a-z]{5,}", text.lower())


@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=NO_BROWSER)
def test_a_chat_in_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuned model answers in words, as they come; closing the page ends its request."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    manual = save_tuned_model(tmp_path / "model")
    page = Page(tmp_path / "browser", str(tmp_path / "model"), "--max-new-tokens", "600")
    try:
        assert page.requests() == (0, 0, 0)
        page.watch()
        page.ask(QUESTION)
        wait_for(lambda: page.requests() == (0, 0, 1))
        assert len(page.lengths()) > 5, page.lengths()  # it came in parts
        words = words_of(page.answer())
        strange = [word for word in words if word not in manual]
        assert len(words) > 30 and len(strange) < len(words) / 5, page.answer()
        page.ask("And once more")
        wait_for(lambda: page.requests()[0] == 1)
        page.browser.refresh()
        wait_for(lambda: page.requests() == (0, 0, 2))
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
