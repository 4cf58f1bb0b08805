"""A headless Chromium that tells which dialogs a page opens and what it asks for, over the pipe of its DevTools."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["Browser", "Seen", "browser"]

OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
)  # fmt: skip
# what a user could do: the pointer on every element, the focus, a click; then what took part in scripts
TOUCH = """(() => {
  for (const each of document.querySelectorAll('*')) {
    for (const kind of ['mouseover', 'focus', 'click', 'load', 'error', 'toggle'])
      each.dispatchEvent(new Event(kind, {bubbles: true}));
  }
  const all = [...document.querySelectorAll('*')];
  return all.filter(each => [...each.attributes].some(a => a.name.startsWith('on'))).length
    + document.querySelectorAll('script,iframe,img,object,embed,link,a').length;
})()"""


@dataclass
class Seen:
    """What happened while a page was open."""

    dialogs: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    active: int = 0  # elements that could do something


class Browser:
    """One page of a running Chromium."""

    def __init__(self, commands: BinaryIO, events: BinaryIO) -> None:
        self.commands, self.events = commands, events
        self.last, self.session, self.seen = 0, "", Seen()
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its answer; events that come first are noted."""
        number = self._send(method, params)
        while (said := self._read()).get("id") != number:
            self._note(said)
        assert "error" not in said, said
        return said["result"]

    def open(self, page: Path) -> Seen:
        """Open a file, touch everything on it, and tell what happened."""
        self.seen = Seen()
        self.ask("Page.navigate", url=page.as_uri())
        while (said := self._read()).get("method") != "Page.loadEventFired":
            self._note(said)
        self.seen.active = self.ask("Runtime.evaluate", expression=TOUCH)["result"]["value"]
        self.ask("Runtime.evaluate", expression="new Promise(done => setTimeout(done, 100))", awaitPromise=True)
        self.seen.requests = [url for url in self.seen.requests if url != page.as_uri()]
        return self.seen

    def _send(self, method: str, params: dict[str, Any]) -> int:
        self.last += 1
        message = {"id": self.last, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        self.commands.write(json.dumps(message).encode() + b"\0")
        self.commands.flush()
        return self.last

    def _read(self) -> dict[str, Any]:
        message = bytearray()
        while (byte := self.events.read(1)) not in (b"\0", b""):
            message += byte
        assert message, "the browser has ended"
        return json.loads(message)

    def _note(self, said: dict[str, Any]) -> None:
        if said.get("method") == "Page.javascriptDialogOpening":
            self.seen.dialogs.append(said["params"]["message"])
            self._send("Page.handleJavaScriptDialog", {"accept": True})
        elif said.get("method") == "Network.requestWillBeSent":
            self.seen.requests.append(said["params"]["request"]["url"])


@contextmanager
def browser(program: str, profile: Path) -> Iterator[Browser]:
    """Run a Chromium with a profile of its own."""
    for_it, commands = os.pipe()
    events, of_it = os.pipe()
    start = f'exec "$@" 3<&{for_it} 4>&{of_it}'
    process = subprocess.Popen(
        ["bash", "-c", start, "bash", program, *OPTIONS, f"--user-data-dir={profile}"],
        pass_fds=(for_it, of_it),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(for_it)
    os.close(of_it)
    try:
        with os.fdopen(commands, "wb") as to, os.fdopen(events, "rb") as back:
            page = Browser(to, back)
            yield page
            with contextlib.suppress(OSError, AssertionError):
                page.session = ""
                page.ask("Browser.close")
    finally:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
