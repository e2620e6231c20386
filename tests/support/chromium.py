"""A headless Chromium, driven by its devtools protocol through a pipe: nothing listens on a port, no package is needed.

with Chromium() as browser:
    page = browser.open(Path("report.html"), width=1200, height=900)
    page.evaluate("document.title")
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

LIMIT_S = 60
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
)
CTRL = 2
"""The modifier of input events."""


def chromium() -> str | None:
    """The path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """One browser process. Messages are JSON that ends in a zero byte, on its file descriptors 3 and 4."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        words = [
            str(chromium()),
            *OPTIONS,
            "--remote-debugging-pipe",
            f"--user-data-dir={self._folder.name}",
            "about:blank",
        ]
        shell = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *words]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(shell, pass_fds=(theirs_in, theirs_out), **quiet)
        os.close(theirs_in)
        os.close(theirs_out)
        self._numbers, self._messages = itertools.count(1), queue.Queue()
        self.events: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        held = b""
        while part := os.read(self._in, 1 << 20):
            *whole, held = (held + part).split(b"\0")
            for message in whole:
                self._messages.put(json.loads(message))

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come meanwhile are kept."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + LIMIT_S
        while True:
            answer = self._messages.get(timeout=max(end - time.monotonic(), 0.01))
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def open(
        self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False, phone: bool = False
    ) -> Page:
        """Open a file in a page of its own, of a width, light or dark, and wait until it is loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target, path.absolute().as_uri())
        for domain in ("Page", "Runtime", "Log", "Network", "Performance"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        page.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=page.url)
        page.wait("document.readyState === 'complete' && location.href !== 'about:blank'")
        return page

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self._process.terminate()
        self._process.wait(LIMIT_S)
        os.close(self._out)
        self._folder.cleanup()


class Page:
    """A page: its script, the mouse, and what has gone wrong in it."""

    def __init__(self, browser: Chromium, session: str, target: str, url: str) -> None:
        self.browser, self.session, self.target, self.url = browser, session, target, url

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command to this page."""
        return self.browser.call(method, self.session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, f"{expression}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + LIMIT_S
        while not self.evaluate(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.02)

    def box(self, selector: str) -> dict[str, float]:
        """Where an element is in the window, after scrolling to it."""
        place = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{place}.scrollIntoView({{ block: 'center', behavior: 'instant' }})")
        return self.evaluate(
            f"(({{ x, y, width, height }}) => ({{ x, y, width, height }}))({place}.getBoundingClientRect())"
        )

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event at a place of the window: mouseMoved, mousePressed, mouseReleased, mouseWheel."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, selector: str) -> None:
        """Click the middle of an element."""
        box = self.box(selector)
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def screenshot(self, path: Path, height: float = 8000) -> None:
        """Write the page, from its head so far down, as a PNG."""
        self.call("Page.bringToFront")  # a page behind another one is not painted
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], height), "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def problems(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and requests for anything but the page itself."""
        found = []
        for event in (each for each in self.browser.events if each.get("sessionId") == self.session):
            method, told = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(f"exception: {told['exceptionDetails'].get('exception', {}).get('description')}")
            elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
                found.append(f"console: {told['args']}")
            elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
                found.append(f"log: {told['entry']['text']}")
            elif method == "Network.requestWillBeSent" and not told["request"]["url"].startswith((self.url, "data:")):
                found.append(f"request: {told['request']['url']}")
        return found

    def close(self) -> None:
        """Close the page."""
        self.browser.call("Target.closeTarget", targetId=self.target)
