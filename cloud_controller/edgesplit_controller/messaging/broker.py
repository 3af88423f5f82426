"""The message broker: mosquitto as a supervised child, its configuration written by us.

Promises: TLS 1.3 with client certificates only, the certificate's name is user and client id, everything not allowed
is denied (`access_rules`); it dies with us, a leftover of a killed controller does not block the next start, and one
that dies is started again. Retained messages survive a clean restart; after a SIGKILL of the broker those of the last
`SAVE_EVERY_S` seconds may be lost, so a controller publishes its own again in `on_connect`.
"""

from __future__ import annotations

import errno
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
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Final

from edgesplit.atomic_files import write_durably
from edgesplit.errors import UsageError
from edgesplit.limits import LIMITS
from edgesplit.mqtt.messages import ROOT
from edgesplit.mqtt.session import PACKET_BYTES
from edgesplit.process.lifecycle import ending_with_us
from edgesplit.trust.identity import Credentials
from edgesplit_controller.settings import PROCESSES

CONTROLLER: Final = "controller"
"""The certificate name that may read and write everything of ours."""
CONTROLLERS: Final = (CONTROLLER, *(f"{CONTROLLER}.{number}" for number in range(2, PROCESSES + 1)))
"""Of each process of one controller; no device can be called so, for their names have no dot."""
DEVICE_WRITES: Final = ("birth", "reported", "telemetry", "fetch", "late", "bundle")
DEVICE_READS: Final = ("desired", "fetched", "kept", "job")
SAVE_EVERY_S: Final = 30
FIRST_DELAY_S: Final = 0.1
LONGEST_DELAY_S: Final = 5.0
STEADY_S: Final = 10.0
"""A broker that ran so long did not die of its start."""
STOP_S: Final = 5.0
_READY: Final = b" running"
_CLIENT: Final = re.compile(rb"New client connected from \S+ as (\S{1,128}) \(")
"""What mosquitto says when it has let a client in. The client id is its certificate's name."""
_log = logging.getLogger("edgesplit.broker")


def access_rules() -> str:
    """Who may do what, as mosquitto's acl_file: a device writes and reads under its own name, and reads chunks."""
    lines = [line for name in CONTROLLERS for line in (f"user {name}", f"topic readwrite {ROOT}/#", "")]
    lines += [f"pattern write {ROOT}/%u/{kind}" for kind in DEVICE_WRITES]
    lines += [f"pattern read {ROOT}/%u/{kind}" for kind in DEVICE_READS]
    lines += [f"pattern read {ROOT}/chunk/+"]
    return "\n".join(lines) + "\n"


def configuration(
    folder: Path, credentials: Credentials, host: str, port: int, user: str, revoked_file: Path | None = None
) -> str:
    """mosquitto.conf for one TLS listener; `folder` holds the access rules and what mosquitto keeps."""
    settings: dict[str, object] = {
        "per_listener_settings": "false",
        "listener": f"{port} {host}".strip(),
        "cafile": credentials.ca_file,
        "certfile": credentials.certificate_file,
        "keyfile": credentials.key_file,
        "tls_version": "tlsv1.3",
        "require_certificate": "true",
        "use_identity_as_username": "true",
        "use_username_as_clientid": "true",
        "allow_anonymous": "false",
        "acl_file": folder / "acl",
        "set_tcp_nodelay": "true",
        "message_size_limit": LIMITS.message_bytes,
        "max_packet_size": PACKET_BYTES,
        "max_queued_messages": 256,
        "max_queued_bytes": 16 * 2**20,
        "max_keepalive": 120,
        "persistent_client_expiration": "1h",
        "persistence": "true",
        "persistence_location": f"{folder}/",
        "persistence_file": "mosquitto.db",
        "autosave_interval": SAVE_EVERY_S,
        "sys_interval": 0,
        "log_dest": "stderr",
        "log_timestamp": "false",
        "user": user,
    }
    if revoked_file is not None:
        settings["crlfile"] = revoked_file
    return "".join(f"{name} {value}\n" for name, value in settings.items())


class Broker:
    """mosquitto on `host:port`, its files in `folder`. `credentials` are a server's; port 0 picks a free one."""

    def __init__(
        self,
        folder: Path,
        credentials: Credentials,
        port: int = 8883,
        *,
        host: str = "127.0.0.1",
        program: str | None = None,
        revoked_file: Path | None = None,
        on_client: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`revoked_file` is a revocation list (PEM), there before `start`; `reload` has it read again. `on_client` is
        told the name of each client that is let in, on the supervisor's thread, and must return at once."""
        self._on_client = on_client
        self._revoked_file = revoked_file
        self._folder = folder.resolve()
        self._credentials = credentials
        self._program = program
        self.host = host
        self.port = port
        self.restarts = 0
        """How often it died and was started again."""
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
        """Of the mosquitto that runs now."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self, timeout_s: float = 15.0) -> None:
        """Start mosquitto and wait until it listens. UsageError says what stands in the way."""
        program = _find(self._program)
        self._prepare_folder()
        _end_leftover(self._pid_file, self._config_file)
        if self.port == 0:
            self.port = _free_port(self.host)
        else:
            _check_port(self.host, self.port)
        user = pwd.getpwuid(os.getuid()).pw_name if os.getuid() == 0 else "mosquitto"
        write_durably(
            self._config_file,
            configuration(self._folder, self._credentials, self.host, self.port, user, self._revoked_file).encode(),
            mode=0o600,
        )
        self._command = [program, "-c", str(self._config_file)]
        self._supervisor.start()
        deadline = monotonic() + timeout_s
        try:
            problem = self._outcome.get(timeout=timeout_s)
            if problem is None:
                _knock(self.host, self.port, deadline)
        except (queue.Empty, TimeoutError):
            problem = UsageError(f"mosquitto did not listen on port {self.port} within {timeout_s:g} s{self._said()}")
        if problem is not None:
            self.stop()
            raise problem

    def stop(self) -> None:
        """End mosquitto, letting it save what it keeps. Idempotent."""
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
        """Have mosquitto read its revocation list again; sessions that exist stay."""
        with self._lock:
            process = self._process
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGHUP)

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
        delay = FIRST_DELAY_S
        while not self._stopping.is_set():
            began = monotonic()
            was_ready = self._run_once()
            if self._stopping.is_set():
                return
            if not was_ready:
                self._set_database_aside()
            if not self._ever_ready and self.restarts > 0:
                self._outcome.put(UsageError(f"mosquitto cannot start{self._said()}"))
                return
            self.restarts += 1
            code = self._process.returncode if self._process is not None else None
            _log.warning("mosquitto ended with status %s%s; starting it again", code, self._said())
            delay = FIRST_DELAY_S if monotonic() - began > STEADY_S else min(2 * delay, LONGEST_DELAY_S)
            self._stopping.wait(delay)

    def _run_once(self) -> bool:
        """One life of mosquitto; whether it ever listened."""
        try:
            process = self._spawn()
        except OSError as error:
            self._last_lines.append(str(error))
            return False
        if process is None or process.stderr is None:
            return False
        ready = False
        with process.stderr as lines:
            for line in lines:
                self._last_lines.append(line.decode(errors="replace").rstrip())
                _log.debug("%s", self._last_lines[-1])
                if client := _CLIENT.match(line):
                    self._on_client(client[1].decode(errors="replace"))
                if not ready and _READY in line:
                    ready = True
                    self._ever_ready = True
                    self._outcome.put(None)
        process.wait()
        return ready

    def _spawn(self) -> subprocess.Popen[bytes] | None:
        """A new mosquitto, or None where we were told to stop meanwhile."""
        with self._lock:
            if self._stopping.is_set():
                return None
            self._last_lines.clear()
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C at our terminal is for us to handle
                preexec_fn=ending_with_us(),
            )
            write_durably(self._pid_file, f"{self._process.pid}\n".encode())
            return self._process

    def _set_database_aside(self) -> None:
        """mosquitto refuses to start on a spoiled database; what was in it, the controller can publish again."""
        database = self._folder / "mosquitto.db"
        said = "\n".join(self._last_lines).lower()
        if database.exists() and ("persist" in said or "database" in said):
            _log.warning("mosquitto cannot read %s: setting it aside", database)
            os.replace(database, database.with_suffix(".db.spoiled"))

    def _said(self) -> str:
        """The reason it gave in its last life, if it gave one: its first error, which names the file or the port."""
        said = [line for line in self._last_lines if "rror" in line]
        return f": {said[0]}" if said else ""


def _find(program: str | None) -> str:
    wanted = program or "mosquitto"
    found = shutil.which(wanted, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/opt/homebrew/sbin")
    if found is None:
        raise UsageError(f"{wanted} is not installed; on Debian or Ubuntu: apt-get install mosquitto")
    return found


def _address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host or "0.0.0.0", port)


def _check_port(host: str, port: int) -> None:
    """UsageError if we could not listen there."""
    family, address = _address(host, port)
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"port {port} is taken by another program; choose another with --mqtt-port") from error
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another with --mqtt-port"
        ) from error


def _knock(host: str, port: int, deadline: float) -> None:
    """Return once a connection there is looked after; TimeoutError at the monotonic `deadline`.

    mosquitto forgets a SIGTERM that reaches it between saying that it runs and beginning its loop: whoever died in
    that moment would leave it behind. A connection that we end at once, it ends only from its loop.
    """
    address = _address(host, port)[1]
    try:
        with socket.create_connection(address, max(deadline - monotonic(), 0.01)) as link:
            link.shutdown(socket.SHUT_WR)
            while link.recv(1024):
                pass
    except TimeoutError:
        raise
    except OSError:  # reset, or mosquitto has died, which the supervisor sees to
        return


def _free_port(host: str) -> int:
    family, address = _address(host, 0)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind(address)
        return int(probe.getsockname()[1])


def _end_leftover(pid_file: Path, config_file: Path) -> None:
    """End the mosquitto of a controller that was killed: known by its pid and its command line."""
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
        for how in (signal.SIGTERM, signal.SIGKILL):
            signal.pidfd_send_signal(descriptor, how)
            if select.select([descriptor], [], [], STOP_S)[0]:
                return
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)
