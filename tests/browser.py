"""A headless Chromium behind chromedriver, spoken to in the W3C WebDriver protocol by the standard library alone."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

DRIVER = shutil.which("chromedriver")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004"} | {
    f"Arrow{way}": chr(0xE012 + at) for at, way in enumerate(("Left", "Up", "Right", "Down"))
}


class Browser:
    """One window."""

    def __init__(self, port: int, profile: Path) -> None:
        self._root = f"http://127.0.0.1:{port}"
        # Never by a proxy: the driver is on this machine.
        self._ask = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        options = {"args": [*FLAGS, f"--user-data-dir={profile}", "about:blank"], "binary": BROWSER}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        started = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._root += f"/session/{started['sessionId']}"
        # What the browser shows before a page is opened is none of ours.
        self._call("POST", "/url", {"url": "about:blank"})
        self.log("performance")

    def _call(self, method: str, path: str, body: dict | None = None):
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._root + path, content, {"Content-Type": "application/json"}, method=method
        )
        try:
            with self._ask.open(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def open(self, page: Path) -> None:
        self._call("POST", "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments):
        """What the script returns; a promise is waited for."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, seconds: float = 20) -> None:
        """Until the expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"return Boolean({script})"):
            assert time.monotonic() < end, f"still not true: {script}"
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", found)
        self._call("POST", f"/element/{found[ELEMENT]}/click", {})

    def press(self, *keys: str) -> None:
        signs = [KEYS.get(key, key) for key in keys]
        steps = [{"type": kind, "value": sign} for sign in signs for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": steps}]})

    def resize(self, width: int, height: int) -> None:
        """The size of the page itself, which may be narrower than any window."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, **features: str) -> None:
        """Media features, such as prefers_color_scheme="dark"."""
        told = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.devtools("Emulation.setEmulatedMedia", {"features": told})

    def devtools(self, command: str, parameters: dict):
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def log(self, kind: str) -> list[dict]:
        """What came since the last call: "browser" for the console, "performance" for events of the network."""
        return self._call("POST", "/se/log", {"type": kind})

    def requested(self) -> list[str]:
        """Addresses asked for since the last call, those that hold their own data left out."""
        events = (json.loads(entry["message"])["message"] for entry in self.log("performance"))
        asked = (e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent")
        return [address for address in asked if not address.startswith(("data:", "blob:"))]

    def screenshot(self) -> bytes:
        return base64.b64decode(self._call("GET", "/screenshot"))

    def pdf(self) -> bytes:
        return base64.b64decode(self._call("POST", "/print", {"shrinkToFit": False}))

    def quit(self) -> None:
        self._call("DELETE", "")


@contextmanager
def browser(folder: Path):
    """Starts a driver and a browser with a new profile in this folder, and ends both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        opened = Browser(port, folder / "profile")
        try:
            yield opened
        finally:
            opened.quit()
    finally:
        driver.terminate()
        driver.wait(10)
