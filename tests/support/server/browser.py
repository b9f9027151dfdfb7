"""A headless Chromium, driven over its own protocol: what a person sees and does, without a further
library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
PATIENCE = 60
# Contrast of what every element with text of its own shows, by WCAG's formula; what lies behind is
# the nearest opaque ground.
CONTRASTS = """(() => {
  const rgb = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = (c) => { const [r, g, b] = rgb(c).map((v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b; };
  const ground = (e) => { for (; e; e = e.parentElement) {
      const c = getComputedStyle(e).backgroundColor; if ((rgb(c)[3] ?? 1) === 1) return c; }
    return 'rgb(255, 255, 255)'; };
  const low = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) || e.matches('input, textarea, select');
    if (!own || !e.checkVisibility()) continue;
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < 4.5) low.push([e.tagName, e.className, e.textContent.slice(0, 20), ratio]);
  }
  return low;
})()"""  # noqa: E501


def find_browser() -> str | None:
    """DRAFTWELL_CHROMIUM, or the first that PATH has."""
    return os.environ.get("DRAFTWELL_CHROMIUM") or next(
        filter(None, map(shutil.which, NAMES)), None
    )


class Page:
    """One tab. `requests` are the addresses that it asked for, `complaints` its console errors,
    exceptions and refusals."""

    def __init__(self, socket: ClientConnection):
        self._socket, self._number = socket, 0
        self.requests: list[str] = []
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol; events that arrive meanwhile are noted."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=PATIENCE))
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message["method"], message["params"]
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(
                params["exceptionDetails"]["exception"].get("description", "an exception")
            )
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.complaints.append(
                str([a.get("value", a.get("description")) for a in params["args"]])
            )

    def run(self, script: str) -> Any:
        """The value of an expression, under the page's own policy; a promise is awaited."""
        result = self.call(
            "Runtime.evaluate",
            expression=script,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
            allowUnsafeEvalBlockedByCSP=False,
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression is true."""
        until = time.monotonic() + PATIENCE
        while not self.run(condition):
            assert time.monotonic() < until, (
                f"never true: {condition}; the page says {self.run('document.body.innerText')!r}"
            )
            time.sleep(0.02)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({json.dumps(selector)}).textContent")

    def fill(self, selector: str, value: str) -> None:
        """Set a field's value as typing does."""
        self.run(
            f"{{const f = document.querySelector({json.dumps(selector)}); f.value = "
            f"{json.dumps(value)};"
            "f.dispatchEvent(new Event('input', {bubbles: true})); f.dispatchEvent(new "
            "Event('change', {bubbles: true}));}"
        )

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def press(self, key: str, modifiers: int = 0) -> None:
        """A key, as the keyboard sends it. Modifiers: 1 Alt, 2 Ctrl, 8 Shift."""
        params = {
            "key": key,
            "code": "Space" if key == " " else key,
            "windowsVirtualKeyCode": KEYS[key],
            "modifiers": modifiers,
        }
        self.call("Input.dispatchKeyEvent", type="rawKeyDown", **params)
        self.call("Input.dispatchKeyEvent", type="keyUp", **params)

    def resize(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def scheme(self, name: str) -> None:
        """ "light" or "dark"."""
        self.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}]
        )

    def screenshot(self, file: Path) -> None:
        file.write_bytes(
            base64.b64decode(
                self.call("Page.captureScreenshot", format="png", captureBeyondViewport=False)[
                    "data"
                ]
            )
        )


@contextmanager
def browsing(program: str, folder: Path) -> Iterator[Page]:
    """A browser with a fresh profile in `folder`, and its first tab."""
    command = [
        program,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--hide-scrollbars",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "about:blank",
    ]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)},
    )
    try:
        with connect(first_tab(folder, process), max_size=None, proxy=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(20)


def first_tab(folder: Path, process: subprocess.Popen[bytes]) -> str:
    """The address at which the first tab takes commands, once the browser listens."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        assert process.poll() is None, f"the browser ended with {process.returncode}"
        try:
            port = (folder / "DevToolsActivePort").read_text().split()[0]
            tabs = httpx.get(f"http://127.0.0.1:{port}/json/list", trust_env=False).json()
            return next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        except (OSError, IndexError, StopIteration, httpx.TransportError):
            time.sleep(0.05)
    raise AssertionError("the browser never listened")
