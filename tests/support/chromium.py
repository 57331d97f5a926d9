"""A page in headless Chromium, driven over the pipe of its developer tools: no server, no further package."""

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --remote-debugging-pipe --hide-scrollbars"""
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine")


class Browser:
    """A context: one tab, `width` × `height` pixels. `errors` are what its scripts have thrown or refused."""

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        self.size, self.errors = (width, height), list[str]()
        self._number, self._session = 0, ""

    def __enter__(self) -> "Browser":
        assert PROGRAM is not None
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # a dying process may still write there
        reads, self._in = os.pipe()
        self._out, writes = os.pipe()

        def pipes() -> None:  # Chromium reads descriptor 3 and writes 4
            high = [os.dup(reads), os.dup(writes)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        words = [PROGRAM, *FLAGS.split(), f"--user-data-dir={self._folder.name}"]
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(words, preexec_fn=pipes, close_fds=False, start_new_session=True, **quiet)
        os.close(reads)
        os.close(writes)
        self._rest = b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for name in ("Page", "Runtime", "Log"):
            self.call(f"{name}.enable")
        self.resize(*self.size)
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def call(self, method: str, **how: Any) -> Any:
        """Return the result of one command; AssertionError if it failed."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        os.write(
            self._in, json.dumps({"id": self._number, "method": method, "params": how, **session}).encode() + b"\0"
        )
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _message(self) -> Any:
        while b"\0" not in self._rest:
            part = os.read(self._out, 1 << 20)
            assert part, "Chromium ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        answer = json.loads(message)
        if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.errors.append(json.dumps(answer["params"]))
        self._loaded = getattr(self, "_loaded", False) or answer.get("method") == "Page.loadEventFired"
        return answer

    def open(self, page: Path, *, scripts: bool = True) -> None:
        """Load a page, and wait until it is there."""
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self._loaded = False
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not self._loaded:
            self._message()

    def resize(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Take another size, and the system's theme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, script: str) -> Any:
        """Return the value of an expression; AssertionError if it throws."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key: str, text: str = "") -> None:
        """Press and release a key by its name in scripts: ArrowRight, " "."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, text=text if kind == "keyDown" else "")

    def click(self, selector: str, index: int = 0) -> None:
        """Click in the middle of an element."""
        found = f"document.querySelectorAll({json.dumps(selector)})[{index}]"
        self.run(f"{found}.scrollIntoView({{block: 'center'}})")
        x, y = self.run(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({found}.getClientRects()[0])")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, file: Path, *, whole: bool = False) -> None:
        """Write what is seen to a PNG file."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]))
