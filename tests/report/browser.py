"""A headless Chromium over the DevTools protocol's pipe: only what the tests of the page need."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import struct
import subprocess
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]


def find_browser() -> str | None:
    """Path of a Chromium, None where there is none."""
    return next((p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None)


class Browser:
    """One tab. ``events`` collects what the browser reported: console messages, exceptions, requests."""

    def __init__(self, executable: str) -> None:
        self.profile = tempfile.mkdtemp(prefix="browser-")
        self.ids = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        self.buffer = b""
        child_read, self.write_end = os.pipe()
        self.read_end, child_write = os.pipe()

        def wire() -> None:
            # The browser reads commands from descriptor 3 and writes to 4; first out of the way of each other.
            a, b = os.dup(child_read), os.dup(child_write)
            os.dup2(a, 3)
            os.dup2(b, 4)

        command = [executable, *FLAGS, f"--user-data-dir={self.profile}", "about:blank"]
        self.process = subprocess.Popen(
            command,
            preexec_fn=wire,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(child_read)
        os.close(child_write)
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = None
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    session: str | None = None

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; returns its result."""
        number = next(self.ids)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": self.session} if self.session else {})
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive(30)
            if reply.get("id") == number:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]
            self.events.append(reply)

    def _receive(self, seconds: float) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read_end], [], [], max(0.0, until - time.monotonic()))
            part = os.read(self.read_end, 1 << 16) if ready else b""
            if not part:
                raise TimeoutError("the browser does not answer")
            self.buffer += part
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file and wait until it has been loaded."""
        self.events.clear()
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive(30))

    def evaluate(self, script: str) -> Any:
        """Value of a script in the page."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"])
        return result["result"].get("value")

    def said(self, *methods: str) -> list[dict[str, Any]]:
        """Parameters of the events of these kinds since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") in methods]

    def screenshot(self, selector: str | None = None) -> bytes:
        """PNG of the whole page or of one element."""
        box = self.evaluate(
            f"(() => {{ const b = ({f'document.querySelector({selector!r})' if selector else 'document.documentElement'})"
            ".getBoundingClientRect(); return [b.x + scrollX, b.y + scrollY, b.width, b.height] })()"
        )
        clip = dict(zip(("x", "y", "width", "height"), box, strict=True)) | {"scale": 1}
        return base64.b64decode(self.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"])

    def close(self) -> None:
        """End the browser and remove its profile."""
        for end in (self.write_end, self.read_end):
            os.close(end)
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.profile, ignore_errors=True)


def png_colours(data: bytes) -> set[bytes]:
    """The different pixels of an 8-bit RGB or RGBA PNG without interlacing."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, packed, header = 8, b"", ()
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            header = struct.unpack(">IIBBBBB", body)
        elif kind == b"IDAT":
            packed += body
        at += 12 + length
    width, height, depth, colour = header[:4]
    assert (depth, header[6]) == (8, 0)
    size = {2: 3, 6: 4}[colour]
    raw, stride = zlib.decompress(packed), width * size
    before, found = bytearray(stride), set()
    for row in range(height):
        line = bytearray(raw[row * (stride + 1) + 1 : (row + 1) * (stride + 1)])
        _unfilter(raw[row * (stride + 1)], line, before, size)
        found.update(bytes(line[i : i + size]) for i in range(0, stride, size))
        before = line
    return found


def _unfilter(kind: int, line: bytearray, above: bytearray, size: int) -> None:
    """Undo one scan line's filter in place (PNG specification, section 9)."""
    for i in range(len(line)):
        left, up, corner = (line[i - size], above[i], above[i - size]) if i >= size else (0, above[i], 0)
        if kind == 4:
            guess = left + up - corner
            add = min((left, up, corner), key=lambda v, g=guess: abs(g - v))
        else:
            add = (0, left, up, (left + up) // 2)[kind]
        line[i] = (line[i] + add) & 255
