"""A headless Chromium for tests of pages, by the DevTools protocol over two pipes: no package is needed for it.

``with chromium() as browser: page = browser.open(path, 1280, 800)``. Commands are JSON ended by a zero byte; answers carry
the number of their command, events carry none and are kept.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", "--remote-debugging-pipe")


def chromium_path() -> str | None:
    """Return where Chromium is; None: nowhere (on Debian: ``apt-get install chromium``)."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@dataclass
class Browser:
    """A running Chromium."""

    to: IO[bytes]
    of: IO[bytes]
    events: list[dict[str, Any]] = field(default_factory=list)
    _sent: int = 0

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command, return its result; events that come meanwhile are kept. Errors: ``RuntimeError``."""
        self._sent += 1
        command = {"id": self._sent, "method": method, "params": parameters} | (
            {"sessionId": session} if session else {}
        )
        self.to.write(json.dumps(command).encode() + b"\0")
        self.to.flush()
        while (message := self._next()).get("id") != self._sent:
            self.events.append(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        result: dict[str, Any] = message["result"]
        return result

    def _next(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self.of.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("Chromium has ended")
            text += byte
        message: dict[str, Any] = json.loads(text)
        return message

    def open(self, path: Path, width: int, height: int, dark: bool = False) -> Page:
        """Open a file in a window of that size, of a phone if it is narrow; return when it has loaded."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.ask(f"{domain}.enable")
        page.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        page.ask("Emulation.setTouchEmulationEnabled", enabled=width < 600)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.ask("Emulation.setEmulatedMedia", features=[feature])
        page.ask("Page.navigate", url=path.resolve().as_uri())
        page.run("new Promise((done) => document.readyState === 'complete' ? done() : addEventListener('load', done))")
        return page


@dataclass
class Page:
    """One tab."""

    browser: Browser
    session: str

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command to this tab."""
        return self.browser.ask(method, self.session, **parameters)

    def run(self, script: str) -> Any:
        """Return the value of an expression of JavaScript, awaited. Errors: ``RuntimeError`` with what it threw."""
        found = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description", script))
        return found["result"].get("value")

    def middle_of(self, element: str) -> tuple[float, float]:
        """Scroll an element, an expression of JavaScript, into view and return the middle of it."""
        box = self.run(
            f"(async () => {{ const e = {element}; e.scrollIntoView({{ block: 'center', inline: 'center' }});"
            "for (const _ of [0, 1]) await new Promise(requestAnimationFrame);"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + Math.min(b.height / 2, 12)]; })()"
        )
        return box[0], box[1]

    def hover(self, element: str) -> None:
        """Move the pointer onto an element."""
        x, y = self.middle_of(element)
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, element: str) -> None:
        """Click an element."""
        x, y = self.middle_of(element)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.ask(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=int(kind != "mouseMoved")
            )

    def tap(self, element: str) -> None:
        """Touch an element with a finger."""
        x, y = self.middle_of(element)
        self.ask("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.ask("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def type(self, element: str, text: str) -> None:
        """Click an element and type into it."""
        self.click(element)
        self.ask("Input.insertText", text=text)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """Write what is seen, or the whole page, as PNG."""
        taken = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))

    def errors(self) -> list[str]:
        """Return what the page has thrown or written to the console as an error so far."""
        self.run("0")  # events before this answer have come
        found = []
        for event in self._events():
            parameters = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(parameters["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(parameters["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                found.append(str(parameters["args"]))
        return found

    def requests(self) -> list[str]:
        """Return the addresses that the page has asked for so far, itself included."""
        self.run("0")
        return [e["params"]["request"]["url"] for e in self._events() if e["method"] == "Network.requestWillBeSent"]

    def _events(self) -> Iterator[dict[str, Any]]:
        yield from (event for event in self.browser.events if event.get("sessionId") == self.session)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run Chromium on a profile of its own. Errors: ``FileNotFoundError`` where there is none."""
    path = chromium_path()
    if path is None:
        raise FileNotFoundError(f"none of {', '.join(NAMES)} is on the path")
    (chromium_reads, we_write), (we_read, chromium_writes) = os.pipe(), os.pipe()
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (chromium_reads, chromium_writes)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [*FLAGS, f"--user-data-dir={profile}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        process = subprocess.Popen(
            [path, *flags],
            stderr=subprocess.DEVNULL,
            pass_fds=(3, 4),  # where Chromium looks for the pipes
            preexec_fn=lambda: [os.dup2(fd, at) for fd, at in zip(theirs, (3, 4), strict=True)],
        )
        for fd in (chromium_reads, chromium_writes, *theirs):
            os.close(fd)
        with os.fdopen(we_write, "wb") as to, os.fdopen(we_read, "rb") as of:
            try:
                yield Browser(to, of)
            finally:
                process.terminate()
                process.wait()
