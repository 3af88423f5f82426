"""The embedded MQTT broker: mosquitto as a supervised child process, with a generated configuration.

Promises: only TLS 1.3 with client certificates is accepted; the certificate's name is both user name and client id;
everything that `access_rules` does not allow is denied. mosquitto ends with the controller, a process left over from a
killed controller does not block the next start, and mosquitto is restarted when it dies. Retained messages survive a
clean restart; after a SIGKILL of the broker those of the last `SAVE_EVERY_S` seconds may be lost, so a controller
publishes its own again in `on_connect`.
"""

from __future__ import annotations

import logging
import os
import pwd
import queue
import re
import select
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Final

from edgesplit.atomic_files import write_durably
from edgesplit.backoff import Backoff
from edgesplit.errors import UsageError
from edgesplit.limits import LIMITS
from edgesplit.mqtt.messages import INFER_REPLY, ROOT
from edgesplit.mqtt.session import MAX_PACKET_BYTES
from edgesplit.process.lifecycle import die_with_starting_thread
from edgesplit.trust.identity import Credentials
from edgesplit_controller.messaging.broker_traffic import Peer, parse_peer
from edgesplit_controller.messaging.child_socket import shut_down_socket
from edgesplit_controller.settings import MAX_PROCESSES, listen_problem

CONTROLLER: Final = "controller"
"""Certificate name that may read and write every topic of this installation."""
CONTROLLERS: Final = (CONTROLLER, *(f"{CONTROLLER}.{number}" for number in range(2, MAX_PROCESSES + 1)))
"""Certificate names of the processes of one controller. No device can have such a name, because device names contain no
dot."""
DEVICE_WRITES: Final = ("birth", "reported", "telemetry", "fetch", "backlog", "log", f"{INFER_REPLY}/+")
DEVICE_READS: Final = ("desired", "fetch_reply", "ack", "job", "infer")
SAVE_EVERY_S: Final = 30
"""Interval at which mosquitto saves its database."""
RESTART: Final = Backoff(first_s=0.1, longest_s=5.0)
"""Back-off before a restart."""
STEADY_S: Final = 10.0
"""A broker that ran for longer than this did not fail at its start: the back-off begins anew."""
MEMORY_BYTES: Final = 2**30
"""Memory that mosquitto may allocate, where nothing else was chosen."""
STOP_S: Final = 5.0
"""How long mosquitto is given to end before it is killed."""
_ERROR_LOG: Final = re.compile(r"(\d+: )?(OpenSSL )?Error\b")
_READY_LOG: Final = " running"
"""Log text of mosquitto when it listens."""
_CLIENT_LOG: Final = re.compile(
    r"New (?:client|bridge) connected from (?P<address>\S+):(?P<port>\d{1,5}) as (?P<name>\S{1,128}) \(", re.ASCII
)
"""Log line of mosquitto for an accepted client. The client id is the name in its certificate; any client may declare
itself a bridge (by a bit of its protocol version)."""
_log = logging.getLogger("edgesplit.broker")


def parse_accepted_client(line: str) -> tuple[str, Peer | None] | None:
    """Name and peer of the client that mosquitto accepted by this line of its log; None for any other line."""
    client = _CLIENT_LOG.match(line)
    return (client["name"], parse_peer(client["address"], client["port"])) if client else None


def access_rules() -> str:
    """mosquitto's acl_file: a device writes and reads topics under its own name, and reads chunks."""
    lines = [line for name in CONTROLLERS for line in (f"user {name}", f"topic readwrite {ROOT}/#", "")]
    lines += [f"pattern write {ROOT}/%u/{kind}" for kind in DEVICE_WRITES]
    lines += [f"pattern read {ROOT}/%u/{kind}" for kind in DEVICE_READS]
    lines += [f"pattern read {ROOT}/chunk/+"]
    return "\n".join(lines) + "\n"


def configuration(
    folder: Path, credentials: Credentials, host: str, port: int, user: str, memory_bytes: int,
    revoked_file: Path | None = None,
) -> str:  # fmt: skip
    """mosquitto.conf for one TLS listener; `folder` holds the access rules and mosquitto's database."""
    settings: dict[str, object] = {
        "per_listener_settings": "false", "listener": f"{port} {host}".strip(),
        "cafile": credentials.ca_file, "certfile": credentials.certificate_file, "keyfile": credentials.key_file,
        "tls_version": "tlsv1.3", "require_certificate": "true",
        "use_identity_as_username": "true", "use_username_as_clientid": "true",
        "allow_anonymous": "false", "acl_file": folder / "acl",
        "set_tcp_nodelay": "true", "message_size_limit": LIMITS.message_bytes, "max_packet_size": MAX_PACKET_BYTES,
        "memory_limit": memory_bytes, "max_inflight_messages": 20,
        # From 2.0.16 on the number bounds a client's unread acknowledgements too.
        "max_queued_messages": 256, "max_queued_bytes": 16 * 2**20,
        "max_keepalive": 120, "persistent_client_expiration": "1h",
        "persistence": "true", "persistence_location": f"{folder}/", "persistence_file": "mosquitto.db",
        "autosave_interval": SAVE_EVERY_S, "sys_interval": 0,
        "log_dest": "stderr", "log_timestamp": "false", "user": user,
    }  # fmt: skip
    if revoked_file is not None:
        settings["crlfile"] = revoked_file
    return "".join(f"{name} {value}\n" for name, value in settings.items())


class Broker:
    """mosquitto listening on `host:port`, its files in `folder`. `credentials` are those of a server; port 0 picks a
    free port."""

    def __init__(
        self, folder: Path, credentials: Credentials, port: int = 8883, *, host: str = "127.0.0.1",
        program: str | None = None, revoked_file: Path | None = None,
        on_client: Callable[[str, Peer | None], None] = lambda name, peer: None,
        restart_backoff: Backoff = RESTART, memory_bytes: int = MEMORY_BYTES,
    ) -> None:  # fmt: skip
        """`revoked_file` is the certificate revocation list (PEM), which must exist before `start`; `reload` makes
        mosquitto read it again. `on_client` receives the name of each accepted client and where it connects from, on
        the supervisor thread, and must return at once. mosquitto may allocate `memory_bytes`."""
        self._on_client = on_client
        self._restart_backoff = restart_backoff
        self._memory_bytes = memory_bytes
        self._revoked_file = revoked_file
        self._folder = folder.resolve()
        self._credentials = credentials
        self._program = program
        self.host = host
        self.port = port
        self.restarts = 0
        """Number of restarts after mosquitto died."""
        self._command: list[str] = []
        self._ever_ready = False
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._outcome: queue.Queue[UsageError | None] = queue.Queue()
        self._last_lines: deque[str] = deque(maxlen=20)
        # The kernel's "parent died" signal follows the thread that forked, so the one that lives longest forks.
        self._supervisor = threading.Thread(target=self._supervise, name="broker-supervisor", daemon=True)

    @property
    def pid(self) -> int | None:
        """Process id of the running mosquitto; None if it does not run."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self, timeout_s: float = 15.0) -> None:
        """Start mosquitto and wait until it accepts connections. Raises UsageError with the reason if it cannot."""
        program = _find_program(self._program)
        self._prepare_folder()
        _end_orphan(self._pid_file, self._config_file)
        if self.port == 0:
            self.port = _free_port(self.host)
        elif taken := listen_problem(self.host or "0.0.0.0", self.port):
            raise UsageError(f"{taken}; choose another with --mqtt-port")
        user = pwd.getpwuid(os.getuid()).pw_name if os.getuid() == 0 else "mosquitto"
        write_durably(
            self._config_file,
            configuration(
                self._folder, self._credentials, self.host, self.port, user, self._memory_bytes, self._revoked_file
            ).encode(),
            mode=0o600,
        )  # fmt: skip
        self._command = [program, "-c", str(self._config_file)]
        self._supervisor.start()
        deadline = monotonic() + timeout_s
        try:
            problem = self._outcome.get(timeout=timeout_s)
            if problem is None:
                _wait_until_serving(self.host, self.port, deadline)
        except (queue.Empty, TimeoutError):
            problem = UsageError(
                f"mosquitto did not listen on port {self.port} within {timeout_s:g} s{self._exit_reason()}"
            )
        if problem is not None:
            self.stop()
            raise problem

    def stop(self) -> None:
        """Stop mosquitto after letting it save its database. Idempotent."""
        self._stopping.set()
        with self._lock:
            process = self._process
            if process is not None and process.poll() is None:
                process.terminate()
        if self._supervisor.is_alive():
            self._supervisor.join(STOP_S)
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()

    def reload(self) -> None:
        """Make mosquitto read its revocation list again (SIGHUP); existing sessions stay."""
        with self._lock:
            process = self._process
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGHUP)

    def processor_s(self) -> float:
        """Seconds of processor that mosquitto has used since it started; 0 if it does not run."""
        pid = self.pid
        try:
            # The clock of another process, by its number (clock_getcpuclockid(3)).
            return time.clock_gettime(~pid << 3 | 2) if pid is not None else 0.0
        except OSError:  # it has just ended
            return 0.0

    def end_connection(self, inode: int) -> bool:
        """End the connection whose socket in mosquitto has this inode, at once; False if there is none. OSError where
        the kernel refuses."""
        pid = self.pid
        return pid is not None and shut_down_socket(pid, inode)

    @property
    def _config_file(self) -> Path:
        return self._folder / "mosquitto.conf"

    @property
    def _pid_file(self) -> Path:
        return self._folder / "mosquitto.pid"

    def _prepare_folder(self) -> None:
        if "\n" in str(self._folder):
            raise UsageError(f"mosquitto cannot use a folder whose name has a line break: {self._folder!s:.80}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_durably(self._folder / "acl", access_rules().encode(), mode=0o600)
        except OSError as error:
            raise UsageError(
                f"cannot write in {self._folder}: {error.strerror}; choose a folder of your own"
            ) from error

    # The supervisor's thread

    def _supervise(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            began = monotonic()
            was_ready = self._run_once()
            if self._stopping.is_set():
                return
            if not was_ready:
                self._set_database_aside()
            if not self._ever_ready and self.restarts > 0:
                self._outcome.put(UsageError(f"mosquitto cannot start{self._exit_reason()}"))
                return
            self.restarts += 1
            code = self._process.returncode if self._process is not None else None
            _log.warning("mosquitto ended with status %s%s; starting it again", code, self._exit_reason())
            failures = 0 if monotonic() - began > STEADY_S else failures + 1
            self._stopping.wait(self._restart_backoff.pause_s(failures))

    def _run_once(self) -> bool:
        """Run mosquitto until it exits; return whether it ever listened."""
        try:
            process = self._spawn()
        except OSError as error:
            self._last_lines.append(str(error))
            return False
        if process is None or process.stderr is None:
            return False
        ready = False
        with process.stderr as lines:
            for raw in lines:
                line = raw.decode(errors="replace").rstrip()
                self._last_lines.append(line)
                _log.debug("%s", line)
                if client := parse_accepted_client(line):
                    self._on_client(*client)
                if not ready and _READY_LOG in line:
                    ready = True
                    self._ever_ready = True
                    self._outcome.put(None)
        process.wait()
        return ready

    def _spawn(self) -> subprocess.Popen[bytes] | None:
        """Start a new mosquitto; None if `stop` was called meanwhile."""
        with self._lock:
            if self._stopping.is_set():
                return None
            self._last_lines.clear()
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C at the terminal is handled by the controller
                preexec_fn=die_with_starting_thread(),
            )
            write_durably(self._pid_file, f"{self._process.pid}\n".encode())
            return self._process

    def _set_database_aside(self) -> None:
        """Move a corrupt database away, because mosquitto refuses to start on it. The controller can publish its
        content again."""
        database = self._folder / "mosquitto.db"
        log_text = "\n".join(self._last_lines).lower()
        if database.exists() and ("persist" in log_text or "database" in log_text):
            _log.warning("mosquitto cannot read %s: setting it aside", database)
            os.replace(database, database.with_suffix(".db.spoiled"))

    def _exit_reason(self) -> str:
        """The reason mosquitto gave for its last exit, as a suffix for an error message: its first error line, which
        names the file or the port. Empty if there was none."""
        errors = [line for line in self._last_lines if _ERROR_LOG.match(line)]
        return f": {errors[0]}" if errors else ""


def _find_program(program: str | None) -> str:
    name = program or "mosquitto"
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/opt/homebrew/sbin")
    if path is None:
        raise UsageError(f"{name} is not installed; on Debian or Ubuntu: apt-get install mosquitto")
    return path


def _address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host or "0.0.0.0", port)


def _wait_until_serving(host: str, port: int, deadline: float) -> None:
    """Return once mosquitto serves a connection on that port; TimeoutError at the monotonic `deadline`.

    mosquitto loses a SIGTERM that arrives between its "running" log line and the start of its event loop, so a
    controller that died in that moment would leave it running. A connection that is half-closed at once is closed by
    mosquitto only from its loop.
    """
    address = _address(host, port)[1]
    try:
        with socket.create_connection(address, max(deadline - monotonic(), 0.01)) as link:
            link.shutdown(socket.SHUT_WR)
            while link.recv(1024):
                pass
    except TimeoutError:
        raise
    except OSError:  # reset, or mosquitto has died, which the supervisor handles
        return


def _free_port(host: str) -> int:
    family, address = _address(host, 0)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind(address)
        return int(probe.getsockname()[1])


def _end_orphan(pid_file: Path, config_file: Path) -> None:
    """End the mosquitto of a controller that was killed, identified by its pid and its command line."""
    try:
        pid = int(pid_file.read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return
    if os.fsencode(config_file) not in command:
        return
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    try:
        _log.warning("ending mosquitto %d, left over from a controller that was killed", pid)
        for number in (signal.SIGTERM, signal.SIGKILL):
            signal.pidfd_send_signal(descriptor, number)
            if select.select([descriptor], [], [], STOP_S)[0]:
                return
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)
