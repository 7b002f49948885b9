"""A real Chromium that tests drive: open a page, click, press keys, read what is shown, take a picture.

One browser serves a test session; each test gets a tab of its own. Speaks the DevTools protocol over aiohttp.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

BINARY = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
)
WAIT_S = 60.0
PICTURES = os.environ.get("HERMES_RL_PICTURES")
"""A folder that keeps every picture the tests take."""


@contextmanager
def chromium() -> Iterator[str]:
    """Start one; its DevTools address."""
    assert BINARY is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = [BINARY, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            said = (re.search(r"DevTools listening on (ws://\S+)", line) for line in process.stderr)
            yield next(found[1] for found in said if found)
        finally:
            process.terminate()
            process.wait(timeout=30)
            process.stderr.close()


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session: str) -> None:
        self._socket, self._session = socket, session
        self._numbers = itertools.count(1)
        self.requests: list[str] = []
        self.errors: list[str] = []

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json(
            {"id": number, "method": method, "params": params, "sessionId": self._session or None}
            if self._session
            else {"id": number, "method": method, "params": params}
        )
        async for message in self._socket:
            answer = json.loads(message.data)
            self._note(answer)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
        raise AssertionError("Chromium went away")

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            details = event["params"]["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.errors.append(event["params"]["entry"]["text"])

    async def js(self, expression: str) -> Any:
        """The value of an expression, awaited when it is a promise."""
        answer = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait in the page until an expression is true; what it then is."""
        looked = f"""new Promise((done, fail) => {{
          const end = performance.now() + {WAIT_S * 1000};
          const now = () => {{ try {{ return ({expression}); }} catch {{ return false; }} }};
          const look = () => {{ const value = now();
            if (value) done(value); else if (performance.now() > end) fail(new Error("never: " + document.title));
            else setTimeout(look, 15); }};
          look(); }})"""
        answer = await self._evaluated(looked)
        assert "exceptionDetails" not in answer, f"never true: {expression}; the page's errors: {self.errors}"
        return answer["result"].get("value")

    async def _evaluated(self, expression: str) -> dict[str, Any]:
        """Asked again where the page was left for another while it waited."""
        while True:
            try:
                return await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
            except AssertionError as error:
                if "navigated or closed" not in str(error):
                    raise

    async def text(self, selector: str) -> str:
        """What people read in the first element that fits."""
        return await self.until(f"document.querySelector({json.dumps(selector)})?.innerText")

    async def texts(self, selector: str) -> list[str]:
        return await self.js(f"[...document.querySelectorAll({json.dumps(selector)})].map((n) => n.innerText)")

    async def click(self, selector: str, text: str = "") -> None:
        """A real click in the middle of the first visible element that fits and holds the text."""
        found = (
            f"[...document.querySelectorAll({json.dumps(selector)})].find((n) => "
            f"n.getClientRects().length && n.innerText.includes({json.dumps(text)}))"
        )
        await self.until(f"!!{found}")
        place = await self.js(
            f"(() => {{ const n = {found}; n.scrollIntoView({{ block: 'center', behavior: 'instant' }}); "
            "const r = n.getClientRects()[0]; return [r.left + r.width / 2, r.top + r.height / 2]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            await self.send(
                "Input.dispatchMouseEvent",
                type=kind,
                x=place[0],
                y=place[1],
                button="none" if kind == "mouseMoved" else "left",
                clickCount=0 if kind == "mouseMoved" else 1,
            )

    async def press(self, key: str, *, shift: bool = False) -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowDown": 40, "ArrowRight": 39, "End": 35, " ": 32}
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        for kind in ("keyDown", "keyUp"):
            await self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                text=text if kind == "keyDown" else "",
                modifiers=8 if shift else 0,
                windowsVirtualKeyCode=codes.get(key, ord(key.upper()[0])),
            )

    async def picture(self, path: Path) -> bytes:
        """A PNG of what is in view; kept when HERMES_RL_PICTURES names a folder."""
        data = base64.b64decode((await self.send("Page.captureScreenshot", format="png"))["data"])
        _keep(path, data)
        return data


def _keep(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    if PICTURES:
        kept = Path(PICTURES)
        kept.mkdir(parents=True, exist_ok=True)
        (kept / path.name).write_bytes(data)


@asynccontextmanager
async def opened(browser: str, address: str, *, width: int = 1400, height: int = 900) -> AsyncIterator[Page]:
    """A tab of this width at an address; closed however the test ends. Any error of the page's scripts fails it."""
    async with aiohttp.ClientSession() as http, http.ws_connect(browser, max_msg_size=0) as socket:
        root = Page(socket, "")
        target = (await root.send("Target.createTarget", url="about:blank"))["targetId"]
        session = (await root.send("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = Page(socket, session)
        try:
            for domain in ("Page", "Runtime", "Network", "Log"):
                await page.send(f"{domain}.enable")
            await page.send(
                "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
            )
            await page.send("Page.navigate", url=address)
            await page.until("document.readyState === 'complete' && location.href !== 'about:blank'")
            yield page
            assert page.errors == []
        finally:
            await root.send("Target.closeTarget", targetId=target)


async def shown(browser: str, page: Path, state: str = "", width: int = 1400) -> str:
    """The document once it is drawn, as markup."""
    async with opened(browser, f"{page.as_uri()}#{state}", width=width) as tab:
        await tab.until("document.body.dataset.ready")
        return await tab.js("document.documentElement.outerHTML")
