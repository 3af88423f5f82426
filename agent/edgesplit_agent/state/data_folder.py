"""The agent's own data folder: what is in it, who holds it, and the few small files that must survive a power cut.

    identity/       key.pem, encryption.pem (0600), certificate.pem, ca.pem, enrolled.json and its copy; renewed.pem
                    (0600: key and certificate)
    trust/          metadata and counters of edgesplit.trust.store
    chunks/aa/…     chunks on their way into a release, by SHA-256
    releases/…      whole releases, as edgesplit.release_store lays them out
    current.json    per model what runs and what is on trial (`activation`): its one rename is the activation
    session.json    number of the newest MQTT session, only ever growing
    bundle.json     which bundle the agent shall take (`bundle.wish`)
    late/           telemetry that waits for a link (`ring`)
    versions.json   which version of the agent runs (`versions.slots`); versions/… those that came as releases
    format.json     the format of all this: only a version that was found healthy raises it
    agent.json      how to reach the agent while it runs
    agent.sock      where applications reach it without TCP, while it runs

A file that cannot be read is moved aside, never in the way: the agent always starts.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from pathlib import Path
from typing import TypeVar

import msgspec

from edgesplit.atomic_files import make_folders, sweep_parts, write_durably
from edgesplit.errors import UsageError
from edgesplit.msgspec_warmup import settle
from edgesplit_agent.state.slots import Current

log = logging.getLogger(__name__)
T = TypeVar("T")

FORMAT, OLDEST_FORMAT = 1, 1
"""What this version writes, and the oldest that it reads. A version on trial writes nothing that the one before could
not read: what takes a higher number is written once the trial is over (`settle_format`), and never before."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who this device is and whom it belongs to: `identity/enrolled.json`."""

    device: str
    device_class: str
    broker: str
    """HOST:PORT."""
    offload: str
    """URL."""
    controller: str
    """URL."""
    tuf_root: str
    """JSON text of the root that all trust starts from."""


class Here(msgspec.Struct, frozen=True, kw_only=True):
    """A running agent's address: `agent.json`."""

    device: str
    url: str
    pid: int
    emulated: bool
    socket: str = ""
    """`unix:///…`, empty where there is none."""


class _Session(msgspec.Struct, frozen=True):
    number: int = 0


class FolderHeld(UsageError):
    """Another agent runs on the folder."""


class _Format(msgspec.Struct, frozen=True):
    format: int = 1


class DataFolder:
    """One agent's folder. `hold` makes it exclusively ours for the life of the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity = path / "identity"
        self.key_file = self.identity / "key.pem"
        self.encryption_key_file = self.identity / "encryption.pem"
        self.certificate_file = self.identity / "certificate.pem"
        self.renewed_file = self.identity / "renewed.pem"
        self.tuning_file = path / "tuning.json"
        self.ca_file = self.identity / "ca.pem"
        self._enrolled_copy = self.identity / "enrolled.copy.json"
        self.trust = path / "trust"
        self.chunks = path / "chunks"
        self.releases = path / "releases"
        self.late = path / "late"
        self.bundle_wish = path / "bundle.json"
        self.socket = path / "agent.sock"
        self._lock_file: int | None = None
        self._session_lock = threading.Lock()
        self._session = 0

    def hold(self) -> None:
        """Take the folder for this process; UsageError where another agent has it, or it cannot be written or read."""
        self.lock()
        if self.format > FORMAT:
            self.release()
            raise UsageError(
                f"{self.path} was written by a newer edgesplit-agent (format {self.format}, this version reads up to"
                f" {FORMAT}): install that version again"
            )
        self.sweep()

    def lock(self) -> None:
        """Keep others out, whatever is in the folder; UsageError as for `hold`."""
        try:
            make_folders(self.path)
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(f"cannot write the data folder {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise FolderHeld(f"another edgesplit-agent runs on {self.path}") from error
        self._lock_file = descriptor

    @property
    def format(self) -> int:
        """Of what lies here; a folder that does not say it is of the first."""
        return (self._read(self.path / "format.json", _Format) or _Format()).format

    def settle_format(self) -> None:
        """From now on this version's format may be written here, which older ones do not read. OSError: it may not."""
        if self.format != FORMAT:
            write_durably(self.path / "format.json", msgspec.json.encode(_Format(FORMAT)))

    def sweep(self) -> None:
        """What a power cut left half written is nobody's, now that the folder is ours (`hold`, or whoever knows)."""
        for folder in (self.path, self.identity, self.trust):
            try:
                sweep_parts(folder)
            except OSError as error:
                log.warning("cannot tidy up %s: %s", folder, error.strerror)

    def release(self) -> None:
        """Give the folder back and forget the address."""
        (self.path / "agent.json").unlink(missing_ok=True)
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def enrolled(self) -> Identity | None:
        """Who we are, or None before enrolment."""
        whole = self.certificate_file.exists() and self.ca_file.exists() and self.key_file.exists()
        if not whole:
            return None
        return self._read(self.identity / "enrolled.json", Identity) or self._read(self._enrolled_copy, Identity)

    def write_enrolled(self, identity: Identity) -> None:
        """The last step of enrolment: from now on we are that device."""
        content = msgspec.json.format(msgspec.json.encode(identity))
        write_durably(self.identity / "enrolled.json", content)
        try:  # nobody else could tell it again, and the claim is used up
            write_durably(self._enrolled_copy, content)
        except OSError as error:
            log.warning("no copy of enrolled.json: %s", error.strerror)

    def current(self) -> Current | None:
        """What ran last; None where nothing ever did, or the file is lost or spoilt."""
        found = self._read(self.path / "current.json", Current)
        return None if found == Current() else found

    def write_current(self, current: Current) -> None:
        """Make `current` what runs: old or new after a power cut, never anything between."""
        write_durably(self.path / "current.json", msgspec.json.format(msgspec.json.encode(current)))

    def next_session(self, now: float) -> int:
        """A number higher than every one before, on disk before it is used. At least the Unix time `now`: a file that
        was lost, or a card that was copied back, does not make the controller take us for an older session. A full
        disk keeps nobody from connecting: the time still makes the number grow."""
        with self._session_lock:
            old = self._read(self.path / "session.json", _Session) or _Session()
            number = max(old.number, self._session) + 1
            self._session = max(number, int(now))
            self._note("session.json", _Session(self._session))
            return self._session

    def write_here(self, here: Here) -> None:
        """Tell people and tools on this machine where the agent is."""
        self._note("agent.json", here)

    def _note(self, name: str, content: msgspec.Struct) -> None:
        """Keep something that can be done without: a disk that is full does not stop a device that can answer."""
        try:
            write_durably(self.path / name, msgspec.json.encode(content))
        except OSError as error:
            log.warning("cannot write %s: %s", self.path / name, error.strerror)

    def here(self) -> Here | None:
        """Where the running agent is, as far as it said."""
        return self._read(self.path / "agent.json", Here)

    def _read(self, path: Path, kind: type[T]) -> T | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s cannot be read: %s", path, error.strerror)
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.warning("%s cannot be read and is moved aside: %s", path, error)
            try:
                os.replace(path, path.with_name(path.name + ".spoilt"))
            except OSError as stuck:
                log.warning("%s cannot be moved: %s", path, stuck.strerror)
            return None


settle(__name__)
