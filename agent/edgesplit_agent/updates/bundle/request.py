"""How an agent that runs is asked to take a bundle: a small file in its own folder, `bundle.json`.

Who may write there is who may be the agent, and nobody else: no application that reaches the local endpoint can make
the agent read files. The file stays until the bundle is taken or refused, so that a restart goes on with it.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from pathlib import Path
from typing import Any, Protocol

import msgspec

from edgesplit.atomic_files import write_durably
from edgesplit.errors import UsageError
from edgesplit.msgspec_warmup import settle
from edgesplit_agent.updates.reconciler import Taking

log = logging.getLogger(__name__)

LOOK_S = 1.0
_BYTES = 8_192


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file."""

    number: str
    """Tells it from others."""
    path: str
    """Of the bundle, absolute."""


class Takes(Protocol):
    """What is needed of the updater."""

    @property
    def taking(self) -> Taking: ...
    def take_bundle(self, number: str, path: str) -> None: ...


def ask(file: Path, bundle: Path) -> Wish:
    """Ask for that bundle. UsageError where the folder cannot be written."""
    wish = Wish(number=secrets.token_hex(8), path=str(bundle.absolute()))
    put(file, wish)
    return wish


def put(file: Path, wish: Wish) -> None:
    """Ask, or ask again: the agent may have cleared this one away with the one before it."""
    try:
        write_durably(file, msgspec.json.encode(wish))
    except OSError as error:
        raise UsageError(f"cannot ask the agent, whose folder this user may not write: {error.strerror}") from error


def withdraw(file: Path, number: str) -> None:
    """Ask no more, unless something else was asked for meanwhile."""
    wish = read(file)
    if wish is not None and wish.number == number:
        file.unlink(missing_ok=True)


def read(file: Path) -> Wish | None:
    """What is asked for; None where nothing is, or what is there is no wish."""
    try:
        with file.open("rb") as opened:
            wish = msgspec.json.decode(opened.read(_BYTES), type=Wish)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return wish if os.path.isabs(wish.path) and "\0" not in wish.path else None


class BundleWatch:
    """Looks for wishes, hands them to the updater, and clears away those that came true or never will."""

    def __init__(self, file: Path, updater: Takes) -> None:
        self._file = file
        self._updater = updater
        self._progress = (0, 0)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="bundles", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=10)

    def look(self) -> None:
        """Once."""
        now = self._updater.taking
        wish = read(self._file) if self._file.exists() else None
        if wish is None:
            return
        if wish.number != now.number:
            log.info("taking the bundle at %s", wish.path)
            self._updater.take_bundle(wish.number, wish.path)
        elif now.state in ("taken", "refused"):
            said = f": {now.detail}" if now.detail else ""
            log.log(logging.INFO if now.state == "taken" else logging.ERROR, "the bundle is %s%s", now.state, said)
            withdraw(self._file, wish.number)

    def copied(self, done: int, of: int) -> None:
        """How far the copying of a release is."""
        self._progress = (done, of)

    def status(self) -> dict[str, Any]:
        """For people and tools."""
        now, (done, of) = self._updater.taking, self._progress
        return {"number": now.number, "state": now.state, "detail": now.detail, "bytes": done, "of": of}

    def _loop(self) -> None:
        while not self._stopping.wait(LOOK_S):
            try:
                self.look()
            except OSError as error:
                log.warning("cannot clear away %s: %s", self._file, error)


settle(__name__)
