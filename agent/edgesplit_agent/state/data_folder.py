"""The agent's data folder: its layout, the lock that makes one process its owner, and the small files that survive a
power cut.

    identity/       key.pem, encryption.pem (0600), certificate.pem, ca.pem, enrolled.json and its copy; renewed.pem
                    (0600: key and certificate)
    trust/          metadata and counters of edgesplit.trust.store
    chunks/aa/…     chunks that are being assembled into a release, by SHA-256
    releases/…      complete releases, as edgesplit.release_store lays them out
    current.json    per model the running release and the one on trial (`state.slots`): its one rename is the activation
    session.json    number of the newest MQTT session, which only ever grows
    bundle.json     request to apply a release bundle (`updates.bundle.request`)
    backlog/          telemetry that waits for a link (`telemetry.disk_ring`)
    tuning.json     measured engine options by release (`releases.tuning`)
    still_frames.json  calibrations of streams whose still frames repeat an answer (`serving.still_states`)
    versions.json   which version of the agent runs (`self_update.version_slots`)
    versions/…      the versions of the agent that came as releases
    format.json     the format of all this: only a version that was found healthy raises it
    agent.json      address of the agent while it runs
    agent.sock      Unix socket for applications while the agent runs
    lock            held with flock(2) by the agent that owns the folder

A file that cannot be parsed is renamed to `*.corrupt` and treated as missing, so that the agent always starts.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import threading
from pathlib import Path
from typing import TypeVar

import msgspec

from edgesplit.atomic_files import make_folders, remove_partial_files, write_durably
from edgesplit.errors import UsageError
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit_agent.state.slots import Current

log = logging.getLogger(__name__)
T = TypeVar("T")

FORMAT, OLDEST_FORMAT = 1, 1
"""Format that this version writes, and the oldest that it reads. A version on trial writes nothing that the version
before it could not read: what needs a higher format number is written only once the trial has succeeded
(`DataFolder.write_format`)."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The enrolled device's identity and its servers: `identity/enrolled.json`."""

    device: str
    device_class: str
    broker: str
    """HOST:PORT of the MQTT broker."""
    offload: str
    """URL of the offload server."""
    controller: str
    """URL of the controller."""
    tuf_root: str
    """JSON text of the TUF root metadata from which all trust is derived."""


class AgentAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Address of a running agent: `agent.json`."""

    device: str
    url: str
    pid: int
    emulated: bool
    socket: str = ""
    """`unix:///…`; empty where there is no Unix socket."""


class _Session(msgspec.Struct, frozen=True):
    number: int = 0


class FolderInUse(UsageError):
    """Another agent runs on the folder."""


class _Format(msgspec.Struct, frozen=True):
    format: int = 1


class DataFolder:
    """Paths and small files of one agent's data folder. `acquire` locks it for the life of the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity = path / "identity"
        self.key_file = self.identity / "key.pem"
        self.encryption_key_file = self.identity / "encryption.pem"
        self.certificate_file = self.identity / "certificate.pem"
        self.renewed_file = self.identity / "renewed.pem"
        self.tuning_file = path / "tuning.json"
        self.cascades_file = path / "cascades.json"
        self.still_frames_file = path / "still_frames.json"
        self.ca_file = self.identity / "ca.pem"
        self._enrolled_copy = self.identity / "enrolled.copy.json"
        self.trust = path / "trust"
        self.chunks = path / "chunks"
        self.releases = path / "releases"
        self.backlog = path / "backlog"
        self.bundle_request_file = path / "bundle.json"
        self.socket = path / "agent.sock"
        self._lock_descriptor: int | None = None
        self._session_lock = threading.Lock()
        self._last_session = 0
        self._is_new = False
        """This process made the folder, and nothing refers to what is in it."""

    def acquire(self) -> None:
        """Lock the folder, check its format and remove partial files. UsageError where another agent holds the lock,
        the folder cannot be written, or a newer version wrote it."""
        self.lock()
        if self.format > FORMAT:
            self.release()
            raise UsageError(
                f"{self.path} was written by a newer edgesplit-agent (format {self.format}, this version reads up to"
                f" {FORMAT}): install that version again"
            )
        self.remove_partial_files()

    def make_private(self, *, passable: bool = False) -> None:
        """Take from other users what they may do with the folder and its content, which a process with another umask
        may have made. `passable`: others may pass through it, to a socket that was given to them, and see nothing else.
        """
        for path in (*self.path.iterdir(), self.path):
            mode = path.stat(follow_symlinks=path == self.path).st_mode
            if stat.S_ISLNK(mode) or stat.S_ISSOCK(mode):
                continue
            private = stat.S_IMODE(mode) & 0o700 | (0o011 if passable and path == self.path else 0)
            if private != stat.S_IMODE(mode):
                try:
                    path.chmod(private)
                except OSError as error:  # it belongs to another user, who decides
                    log.warning("other users may read %s: %s", path, error.strerror)

    def lock(self) -> None:
        """Take the exclusive lock without looking at the content. FolderInUse where another agent has it, UsageError
        where the folder cannot be written."""
        try:
            self._is_new = not self.path.exists()
            make_folders(self.path)
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(f"cannot write the data folder {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise FolderInUse(f"another edgesplit-agent runs on {self.path}") from error
        self._lock_descriptor = descriptor

    @property
    def format(self) -> int:
        """Format number of the folder's content; 1 where `format.json` is missing."""
        return (self._read(self.path / "format.json", _Format) or _Format()).format

    def write_format(self) -> None:
        """Record this version's format, which permits writing it from now on and locks out versions that do not read
        it. OSError where the disk refuses."""
        if self.format != FORMAT:
            write_durably(self.path / "format.json", msgspec.json.encode(_Format(FORMAT)))

    def remove_partial_files(self) -> None:
        """Remove the partial files that a power cut left. Only for the holder of the lock: another process may be
        writing them."""
        for folder in (self.path, self.identity, self.trust):
            try:
                remove_partial_files(folder)
            except OSError as error:
                log.warning("cannot remove partial files from %s: %s", folder, error.strerror)

    def release(self) -> None:
        """Remove `agent.json` and give the lock back."""
        (self.path / "agent.json").unlink(missing_ok=True)
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

    def keep(self) -> None:
        """Keep the folder whatever becomes of the enrolment: the controller may know the key in it."""
        self._is_new = False

    def remove_if_new(self) -> None:
        """Remove the folder where this process made it and `keep` was not called."""
        if self._is_new:
            shutil.rmtree(self.path, ignore_errors=True)

    def read_identity(self) -> Identity | None:
        """The device's identity, or None before enrolment is complete. Falls back to the copy where `enrolled.json` is
        damaged."""
        complete = self.certificate_file.exists() and self.ca_file.exists() and self.key_file.exists()
        if not complete:
            return None
        return self._read(self.identity / "enrolled.json", Identity) or self._read(self._enrolled_copy, Identity)

    def write_identity(self, identity: Identity) -> None:
        """Record the identity: the last step of enrolment, which makes it take effect."""
        self.keep()
        content = msgspec.json.format(msgspec.json.encode(identity))
        write_durably(self.identity / "enrolled.json", content)
        try:  # the identity cannot be fetched again: the claim is valid for one enrolment
            write_durably(self._enrolled_copy, content)
        except OSError as error:
            log.warning("no copy of enrolled.json: %s", error.strerror)

    def read_current(self) -> Current | None:
        """The activation state of the last run; None where nothing ever ran, or the file is missing or damaged."""
        current = self._read(self.path / "current.json", Current)
        return None if current == Current() else current

    def write_current(self, current: Current) -> None:
        """Make `current` the activation state, atomically: after a power cut the file holds the old state or the new
        one."""
        write_durably(self.path / "current.json", msgspec.json.format(msgspec.json.encode(current)))

    def next_session(self, now: float) -> int:
        """A session number greater than every earlier one, written to disk before it is used. It is at least the Unix
        time `now`: where the file was lost, or an old image of the card was restored, the controller still does not
        mistake the connection for an older session. On a full disk the number is not persisted, and the clock alone
        makes it grow."""
        with self._session_lock:
            old = self._read(self.path / "session.json", _Session) or _Session()
            number = max(old.number, self._last_session) + 1
            self._last_session = max(number, int(now))
            self._write_best_effort("session.json", _Session(self._last_session))
            return self._last_session

    def write_address(self, address: AgentAddress) -> None:
        """Publish the running agent's address for people and tools on this machine."""
        self._write_best_effort("agent.json", address)

    def _write_best_effort(self, name: str, content: msgspec.Struct) -> None:
        """Write a file whose loss is tolerable: a disk error is logged, not raised, because a full disk must not stop a
        device that can answer."""
        try:
            write_durably(self.path / name, msgspec.json.encode(content))
        except OSError as error:
            log.warning("cannot write %s: %s", self.path / name, error.strerror)

    def read_address(self) -> AgentAddress | None:
        """Address of the running agent, or None where none has published one."""
        return self._read(self.path / "agent.json", AgentAddress)

    def _read(self, path: Path, kind: type[T]) -> T | None:
        """The parsed file; None where it is missing,
        unreadable or damaged. A damaged file is renamed to `*.corrupt`."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s cannot be read: %s", path, error.strerror)
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.warning("%s cannot be parsed and is renamed to *.corrupt: %s", path, error)
            try:
                os.replace(path, path.with_name(path.name + ".corrupt"))
            except OSError as stuck:
                log.warning("%s cannot be renamed: %s", path, stuck.strerror)
            return None


warm_up_structs(__name__)
