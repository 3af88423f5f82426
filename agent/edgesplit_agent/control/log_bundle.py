"""Answers a job: the agent's recent log, versions and state, bounded and without secrets.

A job is no way to run anything here: its kinds are a closed list, it names no file and carries no code, and what it may
have at most is a number. What is told goes to the controller alone (the broker lets nobody else read it). It is not
signed, because whoever could forge one, the broker's owner, would get what passes through the broker in clear anyway,
and no more often than once in `PAUSE_S`.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import logging
import platform
import queue
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from edgesplit.errors import EdgeError, LinkError
from edgesplit.mqtt.messages import BundlePiece, Job, JobRefused
from edgesplit.observability.redaction import redacted, without
from edgesplit_agent.host.clock import moment
from edgesplit_agent.host.log_buffer import Logbook
from edgesplit_agent.host.machine import board
from edgesplit_agent.state.data_folder import DataFolder

log = logging.getLogger(__name__)

FORMAT = "edgesplit.bundle/1"
PIECE_BYTES = 49_152
PAUSE_S = 20.0
"""Between two answers."""
SEND_S = 20.0
PACKAGES = ("edgesplit", "numpy", "onnxruntime", "ai-edge-litert", "paho-mqtt", "tuf", "cryptography", "msgspec")
MOST_FILES = 2_000
Answer = Callable[[Iterator[BundlePiece | JobRefused], float], None]


class Diagnosis:
    """Answers jobs on a thread of its own. `status` is what the agent says of itself."""

    def __init__(
        self, folder: DataFolder, device: str, book: Logbook, status: Callable[[], Mapping[str, Any]], answer: Answer
    ) -> None:
        self._folder = folder
        self._device = device
        self._book = book
        self._status = status
        self._answer = answer
        self._jobs: queue.Queue[Job | None] = queue.Queue(maxsize=4)
        self._answered_at = float("-inf")
        self._thread = threading.Thread(target=self._work, name="diagnosis", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Answer no more; what is on its way is not waited for."""
        try:
            self._jobs.put_nowait(None)
        except queue.Full:
            return

    def asked(self, job: Job) -> None:
        """A job came. Any thread; returns at once."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            log.warning("job %s is one too many", job.id)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._answer(self.pieces(job, monotonic()), SEND_S)
            except LinkError as error:
                log.info("job %s could not be answered: %s", job.id, error)
            except Exception:
                log.exception("job %s could not be answered", job.id)

    def pieces(self, job: Job, now: float) -> Iterator[BundlePiece | JobRefused]:
        """The answer to a job that came at `now` (monotonic)."""
        if now - self._answered_at < PAUSE_S:
            yield JobRefused(id=job.id, why=f"another was answered less than {PAUSE_S:g} s ago")
            return
        self._answered_at = now
        whole = self.bundle(job.most_bytes)
        if len(whole) > job.most_bytes:
            yield JobRefused(id=job.id, why=f"the least there is to tell takes {len(whole)} bytes")
            return
        digest = hashlib.sha256(whole).hexdigest()
        for offset in range(0, len(whole), PIECE_BYTES):
            data = whole[offset : offset + PIECE_BYTES]
            yield BundlePiece(id=job.id, offset=offset, total=len(whole), sha256=digest, data=data)

    def bundle(self, most_bytes: int) -> bytes:
        """The compressed answer; the oldest lines are left away until it is no longer than that, as far as they do."""
        lines, secrets = self._book.lines(), known_secrets(self._folder)
        facts = _redacted_values(self._facts())
        left_away = self._book.dropped
        while True:
            whole = {**facts, "lines_left_away": left_away, "log": lines}
            packed = gzip.compress(without(json.dumps(whole), secrets).encode(), 6, mtime=0)
            if len(packed) <= most_bytes or not lines:
                return packed
            gone = max(1, len(lines) // 2)
            lines, left_away = lines[gone:], left_away + gone

    def _facts(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "device": self._device,
            "moment": msgspec.to_builtins(moment()),
            "versions": _versions(),
            "machine": {"platform": platform.platform(), "board": msgspec.to_builtins(board(self._folder.path))},
            "files": _files(self._folder.path),
            "status": _safely(self._status),
        }


def known_secrets(folder: DataFolder) -> frozenset[str]:
    """The lines of private keys that lie here, as text: none of them may be in what is told."""
    found: set[str] = set()
    for path in (folder.key_file, folder.encryption_key_file, folder.renewed_file):
        text = _text(path)
        for private in re.findall(r"-----BEGIN [A-Z ]*PRIVATE KEY-----(.*?)-----END", text, re.DOTALL):
            found.update(line.strip() for line in private.splitlines())
    for path in folder.releases.glob("*/keys.json") if folder.releases.is_dir() else ():
        try:
            keys = json.loads(_text(path) or "{}")
            for value in keys.values() if isinstance(keys, dict) else ():
                found.update((str(value), base64.b64decode(str(value)).hex()))
        except ValueError:
            continue
    return frozenset(word for word in found if len(word) >= 8)


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _files(root: Path) -> list[dict[str, Any]]:
    """What lies in the data folder, by name and size; nothing of what is in it."""
    found: list[dict[str, Any]] = []
    for path in sorted(root.rglob("*")):
        if len(found) == MOST_FILES:
            break
        try:
            seen = path.lstat()
        except OSError:
            continue
        name = "/".join(part[:24] for part in path.relative_to(root).parts)
        found.append({"name": name, "bytes": seen.st_size, "mode": oct(seen.st_mode & 0o777)})
    return found


def _safely(status: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    try:
        return status()
    except (EdgeError, OSError, RuntimeError) as error:
        return {"problem": f"{type(error).__name__}: {error}"}


def _redacted_values(value: Any) -> Any:
    """Every text in it, redacted; keys are ours."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {str(key): _redacted_values(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted_values(one) for one in value]
    return value if value is None or isinstance(value, bool | int | float) else redacted(str(value))
