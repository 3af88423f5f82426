"""Answers a job with a log bundle: the agent's recent log, versions and state, bounded in size and without secrets.

A job cannot execute anything here: its kinds are a closed list, it names no file and carries no code; its only
parameter is the largest size. The bundle goes to the controller alone (the broker lets no other client read it). Jobs
are not signed: only the broker's operator could forge one, and would learn nothing that does not pass through the
broker in clear anyway, at most once per `PAUSE_S`.
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
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from edgesplit.errors import EdgeError, LinkError
from edgesplit.mqtt.messages import DeviceJob, JobRefused, LogPiece
from edgesplit.observability.redaction import redact, redact_known
from edgesplit_agent.host.clock import current_moment
from edgesplit_agent.host.log_buffer import LogBuffer
from edgesplit_agent.host.machine import installed_versions, machine_figures
from edgesplit_agent.state.data_folder import DataFolder

log = logging.getLogger(__name__)

FORMAT = "edgesplit.bundle/1"
"""Format tag of the bundle."""
PIECE_BYTES = 49_152
"""Size of one MQTT message's part of the bundle."""
PAUSE_S = 20.0
"""Least seconds between two log bundles."""
SEND_S = 20.0
"""Timeout of sending one piece."""
PACKAGES = ("edgesplit", "numpy", "onnxruntime", "ai-edge-litert", "paho-mqtt", "tuf", "cryptography", "msgspec")
"""Installed packages whose versions are included."""
MOST_FILES = 2_000
"""Maximum number of files listed."""
SendPieces = Callable[[Iterator[LogPiece | JobRefused], float], None]
"""Sends the pieces of an answer, each with this timeout in seconds."""


class LogBundleService:
    """Answers jobs on a thread of its own. `status` returns the agent's status; `answer` sends the pieces."""

    def __init__(
        self,
        folder: DataFolder,
        device: str,
        log_buffer: LogBuffer,
        status: Callable[[], Mapping[str, Any]],
        answer: SendPieces,
    ) -> None:
        self._folder = folder
        self._device = device
        self._log_buffer = log_buffer
        self._status = status
        self._answer = answer
        self._jobs: queue.Queue[DeviceJob | None] = queue.Queue(maxsize=4)
        self._answered_at = float("-inf")
        self._thread = threading.Thread(target=self._run, name="diagnosis", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the present job, without waiting for it."""
        try:
            self._jobs.put_nowait(None)
        except queue.Full:
            return

    def on_job(self, job: DeviceJob) -> None:
        """Queue a job; one beyond the queue's length is dropped. May be called from any thread and returns at once."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            log.warning("job %s is dropped: the queue is full", job.id)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._answer(self.pieces(job, monotonic()), SEND_S)
            except LinkError as error:
                log.info("job %s could not be answered: %s", job.id, error)
            except Exception:
                log.exception("job %s could not be answered", job.id)

    def pieces(self, job: DeviceJob, now: float) -> Iterator[LogPiece | JobRefused]:
        """The messages that answer a job received at `now` (monotonic): the pieces of a log bundle, or a refusal."""
        if now - self._answered_at < PAUSE_S:
            yield JobRefused(id=job.id, reason=f"another log bundle was sent less than {PAUSE_S:g} s ago")
            return
        self._answered_at = now
        content = self.log_bundle(job.max_bytes)
        if len(content) > job.max_bytes:
            yield JobRefused(id=job.id, reason=f"the smallest possible log bundle has {len(content)} bytes")
            return
        digest = hashlib.sha256(content).hexdigest()
        for offset in range(0, len(content), PIECE_BYTES):
            data = content[offset : offset + PIECE_BYTES]
            yield LogPiece(id=job.id, offset=offset, total=len(content), sha256=digest, data=data)

    def log_bundle(self, max_bytes: int) -> bytes:
        """The compressed log bundle. Halves of the log, oldest lines first, are dropped until it has at most
        `max_bytes`; without any lines it may still be larger."""
        lines, secrets = self._log_buffer.lines(), known_secrets(self._folder)
        facts = _redacted_values(self._facts())
        lines_dropped = self._log_buffer.dropped
        while True:
            document = {**facts, "lines_left_away": lines_dropped, "log": lines}
            packed = gzip.compress(redact_known(json.dumps(document), secrets).encode(), 6, mtime=0)
            if len(packed) <= max_bytes or not lines:
                return packed
            dropped_now = max(1, len(lines) // 2)
            lines, lines_dropped = lines[dropped_now:], lines_dropped + dropped_now

    def _facts(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "device": self._device,
            "created": msgspec.to_builtins(current_moment()),
            "versions": {"python": platform.python_version(), **installed_versions(PACKAGES)},
            "machine": {
                "platform": platform.platform(),
                "resources": msgspec.to_builtins(machine_figures(self._folder.path)),
            },
            "files": _files(self._folder.path),
            "status": _status_or_error(self._status),
        }


def known_secrets(folder: DataFolder) -> frozenset[str]:
    """The key material that lies here, as text (lines of private keys, content keys): none of it may appear in a
    bundle."""
    secrets: set[str] = set()
    for path in (folder.key_file, folder.encryption_key_file, folder.renewed_file):
        text = _text(path)
        for private in re.findall(r"-----BEGIN [A-Z ]*PRIVATE KEY-----(.*?)-----END", text, re.DOTALL):
            secrets.update(line.strip() for line in private.splitlines())
    for path in folder.releases.glob("*/keys.json") if folder.releases.is_dir() else ():
        try:
            keys = json.loads(_text(path) or "{}")
            for value in keys.values() if isinstance(keys, dict) else ():
                secrets.update((str(value), base64.b64decode(str(value)).hex()))
        except ValueError:
            continue
    return frozenset(secret for secret in secrets if len(secret) >= 8)


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""


def _files(root: Path) -> list[dict[str, Any]]:
    """Names, sizes and modes of the files in the data folder, without their content."""
    listed: list[dict[str, Any]] = []
    for path in sorted(root.rglob("*")):
        if len(listed) == MOST_FILES:
            break
        try:
            status = path.lstat()
        except OSError:
            continue
        name = "/".join(part[:24] for part in path.relative_to(root).parts)
        listed.append({"name": name, "bytes": status.st_size, "mode": oct(status.st_mode & 0o777)})
    return listed


def _status_or_error(status: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    """The agent's status, or the error that prevented it."""
    try:
        return status()
    except (EdgeError, OSError, RuntimeError) as error:
        return {"problem": f"{type(error).__name__}: {error}"}


def _redacted_values(value: Any) -> Any:
    """`value` with every text in it redacted; keys of mappings are ours and stay."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {str(key): _redacted_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted_values(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else redact(str(value))
