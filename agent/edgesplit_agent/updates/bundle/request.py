"""How a running agent is asked to apply a release bundle: a small file in its data folder, `bundle.json`.

Only a user who may write to the folder can request it: an application that reaches the local endpoint cannot make the
agent read files. The file remains until the bundle is applied or refused, so that a restarted agent resumes it.
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
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit_agent.updates.reconciler import BundleStatus

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Seconds between two looks for the file."""
_MOST_BYTES = 8_192


class BundleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `bundle.json`."""

    number: str
    """Identifies the request."""
    path: str
    """Absolute path of the bundle."""


class BundleTarget(Protocol):
    """The part of the reconciler that is needed here."""

    @property
    def bundle_status(self) -> BundleStatus: ...
    def on_bundle(self, number: str, path: str) -> None: ...


def submit(file: Path, bundle: Path) -> BundleRequest:
    """Write a request for that bundle. UsageError where the folder cannot be written."""
    bundle_request = BundleRequest(number=secrets.token_hex(8), path=str(bundle.absolute()))
    write(file, bundle_request)
    return bundle_request


def write(file: Path, bundle_request: BundleRequest) -> None:
    """Write the request, also again: the agent may have removed the file together with an earlier request."""
    try:
        write_durably(file, msgspec.json.encode(bundle_request))
    except OSError as error:
        raise UsageError(f"cannot write the request into the agent's folder as this user: {error.strerror}") from error


def withdraw(file: Path, number: str) -> None:
    """Remove the request with that number; a later one stays."""
    bundle_request = read(file)
    if bundle_request is not None and bundle_request.number == number:
        file.unlink(missing_ok=True)


def read(file: Path) -> BundleRequest | None:
    """The request in the file; None where there is none, or the content is invalid."""
    try:
        with file.open("rb") as opened:
            bundle_request = msgspec.json.decode(opened.read(_MOST_BYTES), type=BundleRequest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return bundle_request if os.path.isabs(bundle_request.path) and "\0" not in bundle_request.path else None


class BundleWatch:
    """Polls for requests, passes each to the reconciler once, and removes those that were applied or refused."""

    def __init__(self, file: Path, reconciler: BundleTarget) -> None:
        self._file = file
        self._reconciler = reconciler
        self._progress = (0, 0)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="bundles", daemon=True)

    def start(self) -> None:
        """Start the polling thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the polling thread."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=10)

    def poll(self) -> None:
        """Poll once."""
        status = self._reconciler.bundle_status
        bundle_request = read(self._file) if self._file.exists() else None
        if bundle_request is None:
            return
        if bundle_request.number != status.number:
            log.info("applying the bundle at %s", bundle_request.path)
            self._reconciler.on_bundle(bundle_request.number, bundle_request.path)
        elif status.state in ("taken", "refused"):
            detail = f": {status.detail}" if status.detail else ""
            level = logging.INFO if status.state == "taken" else logging.ERROR
            log.log(level, "the bundle is %s%s", status.state, detail)
            withdraw(self._file, bundle_request.number)

    def on_progress(self, done: int, total: int) -> None:
        """Record the progress of copying a release, in bytes."""
        self._progress = (done, total)

    def status(self) -> dict[str, Any]:
        """Status for people and tools, as JSON values."""
        status, (done, total) = self._reconciler.bundle_status, self._progress
        return {"number": status.number, "state": status.state, "detail": status.detail, "bytes": done, "of": total}

    def _loop(self) -> None:
        while not self._stopping.wait(POLL_S):
            try:
                self.poll()
            except OSError as error:
                log.warning("cannot remove %s: %s", self._file, error)


warm_up_structs(__name__)
