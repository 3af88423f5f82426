"""Supervisor of several serving processes behind one port: it accepts connections and hands each to the least loaded
process.

Accepting in one place spreads connections evenly, which the kernel's hash over SO_REUSEPORT does not for a handful of
devices that stay connected, and the port outlives every process (docs/decisions/0019). A process that ends is restarted
with back-off; one that sends no heartbeat is killed. The supervisor loads no model and reads nothing that clients send.
"""

from __future__ import annotations

import logging
import selectors
import socket
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from edgesplit.errors import UsageError
from edgesplit_offload.processes import ipc
from edgesplit_offload.processes.fan_out import FanOut
from edgesplit_offload.processes.ipc import IpcConnection

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
STEADY_S = 10.0
"""A process that lived this long resets the back-off."""
START_S = 60.0
"""Seconds that a process may take to become ready."""
MAX_FAILED_STARTS = 3
"""Processes that may end before any is ready; then the start has failed."""
CHECK_INTERVAL_S = 0.1
"""Interval in seconds of the checks."""
MAX_KINDS = 1_024
"""Kinds of requests whose batcher is remembered."""
KILL_S = 3.0
"""Seconds beyond the drain time until a process is killed."""


@dataclass(eq=False)
class ChildProcess:
    """One serving process."""

    process: subprocess.Popen[bytes]
    connection: IpcConnection
    handover: socket.socket
    started_at: float = field(default_factory=monotonic)
    last_message_at: float = field(default_factory=monotonic)
    is_ready: bool = False
    open_connections: int = 0
    """Number of connections that it has."""

    def hand_connection(self, sock: socket.socket) -> bool:
        """Hand an accepted connection to the process; False if it has gone or does not read."""
        is_taken = self.hand_socket(sock, ipc.ACCEPTED_CONNECTION)
        self.open_connections += is_taken
        return is_taken

    def hand_socket(self, sock: socket.socket, announcement: bytes) -> bool:
        """Hand the socket to the process, announced by the bytes `announcement`; False if that fails."""
        try:
            socket.send_fds(self.handover, [announcement], [sock.fileno()], socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def send(self, message: ipc.Message) -> bool:
        """Send `message`; False if it could not be sent."""
        return self.connection.send(message)

    def close(self) -> None:
        """Close the supervisor's sockets to the process."""
        self.connection.close()
        self.handover.close()


class Supervisor:
    """Keeps `count` processes of `command` serving the connections of `listener`."""

    def __init__(self, listener: socket.socket, command: Sequence[str], count: int, *, hung_after_s: float) -> None:
        self.restarts = 0
        self._listener = listener
        self._command = list(command)
        self._count = count
        self._stuck_after_s = hung_after_s
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._serving: list[ChildProcess] = []
        self._fan_out = FanOut()
        self._batchers: OrderedDict[str, ChildProcess] = OrderedDict()
        self._stopping = threading.Event()
        self._accepting = threading.Thread(target=self._accept, name="accepting", daemon=True)
        self._watching = threading.Thread(target=self._watch, name="keeping", daemon=True)
        self._backoff_s = FIRST_BACKOFF_S
        self._restart_at = 0.0

    def start(self) -> None:
        """Start the processes and accept; UsageError if none becomes ready."""
        for _ in range(self._count):
            self._spawn()
        self._watching.start()
        with self._changed:
            settled = self._changed.wait_for(lambda: self._is_up() or self.restarts >= MAX_FAILED_STARTS, START_S)
            ready = any(process.is_ready for process in self._serving)
        if not ready:
            self.stop(0.0)
            raise UsageError("no serving process could be started" if settled else "no serving process became ready")
        self._accepting.start()

    def notice(self) -> None:
        """Have the processes report not ready, while they still serve."""
        for process in self._current():
            process.send(ipc.Notice())

    def stop(self, drain_s: float) -> None:
        """Stop accepting, let the processes finish running requests for `drain_s` seconds, and wait for them to end."""
        self._stopping.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for process in self._current():
            process.send(ipc.Drain(drain_s))
        for thread in (self._accepting, self._watching):
            if thread.is_alive():
                thread.join()
        self._listener.close()
        serving = self._current()
        for process in serving:  # a process may have been started meanwhile
            process.send(ipc.Drain(drain_s))
        deadline = monotonic() + drain_s + KILL_S
        for process in serving:
            try:
                process.process.wait(max(0.1, deadline - monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("serving process %d did not end: killing it", process.process.pid)
                process.process.kill()
                process.process.wait()
            process.close()

    def ask(self, question: str, argument: Any = None) -> list[Any]:
        """The answers of all ready processes that arrive in time."""
        done, answers = threading.Event(), list[Any]()

        def on_answers(collected: list[Any], _: int) -> None:
            answers.extend(collected)
            done.set()

        self._fan_out.begin(question, argument, self._ready(), on_answers)
        done.wait()
        return answers

    # Accepting

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            try:
                self._listener.setblocking(False)
                selector.register(self._listener, selectors.EVENT_READ)
            except (OSError, ValueError):
                return
            while not self._stopping.is_set():
                if selector.select(CHECK_INTERVAL_S) and not self._stopping.is_set():
                    self._accept_waiting()

    def _accept_waiting(self) -> None:
        """Accept all pending connections; while no process is ready they stay in the kernel's backlog."""
        with self._changed:
            if not self._changed.wait_for(lambda: any(process.is_ready for process in self._serving), CHECK_INTERVAL_S):
                return
        while not self._stopping.is_set():
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if not self._stopping.wait(CHECK_INTERVAL_S):  # out of file descriptors: try again soon
                    log.warning("cannot accept: %s", error)
                return
            with sock:
                self._hand_over(sock)

    def _hand_over(self, sock: socket.socket) -> None:
        """Hand the connection to the process with the fewest connections that takes it; it is dropped if none does."""
        with self._lock:
            for process in sorted(
                (process for process in self._serving if process.is_ready), key=lambda process: process.open_connections
            ):
                if process.hand_connection(sock):
                    return
        log.warning("no serving process took a connection")

    def _assign_batcher(self, kind: str, process: ChildProcess) -> None:
        """Answer a process that needs the batcher of this kind: the first process that asks becomes the batcher, the
        others get a link to it."""
        with self._lock:
            known = self._batchers.get(kind)
            batcher = known if known in self._serving else process
            self._batchers[kind] = batcher
            self._batchers.move_to_end(kind)
            while len(self._batchers) > MAX_KINDS:
                self._batchers.popitem(last=False)
            if batcher is not process:
                peer_end, batcher_end = socket.socketpair()
                with peer_end, batcher_end:
                    if batcher.hand_socket(batcher_end, ipc.PEER_LINK):
                        process.hand_socket(peer_end, ipc.BATCHER_LINK + kind.encode())
        if batcher is process:
            process.send(ipc.BatcherSocket(kind))

    # Processes

    def _spawn(self) -> None:
        ipc_socket, child_ipc_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        handover, child_handover = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with (
            child_ipc_socket,
            child_handover,
        ):  # the supervisor's ends are closed with the process, or by garbage collection
            descriptors = (child_ipc_socket.fileno(), child_handover.fileno())
            process = subprocess.Popen(
                [*self._command, "--worker", ",".join(map(str, descriptors))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C in the terminal goes to the supervisor only
            )
        serving = ChildProcess(process, IpcConnection(ipc_socket), handover)
        with self._lock:
            self._serving.append(serving)
        threading.Thread(target=self._listen, args=(serving,), name="listening", daemon=True).start()

    def _watch(self) -> None:
        """Restart processes that ended, and kill those without a heartbeat."""
        while not self._stopping.wait(CHECK_INTERVAL_S):
            now = monotonic()
            self._fan_out.expire(now)
            for process in self._current():
                if process.process.poll() is not None:
                    self._on_process_end(process, now)
                elif now - process.last_message_at > max(self._stuck_after_s, 0.0 if process.is_ready else START_S):
                    log.error("serving process %d sends no heartbeat: killing it", process.process.pid)
                    process.process.kill()
                    process.process.wait()
                    self._on_process_end(process, now)
            if now >= self._restart_at:
                self._start_missing(now)

    def _start_missing(self, now: float) -> None:
        """Start the missing processes."""
        try:
            for _ in range(self._count - len(self._current())):
                self._spawn()
        except OSError as error:  # no memory or descriptors: the others serve on, and this is tried again
            log.error("cannot start a serving process: %s", error)
            self._restart_at = now + MAX_BACKOFF_S

    def _on_process_end(self, process: ChildProcess, now: float) -> None:
        log.warning("serving process %d ended (status %s)", process.process.pid, process.process.returncode)
        process.close()
        lived = now - process.started_at > STEADY_S
        self._backoff_s = FIRST_BACKOFF_S if lived else min(2 * self._backoff_s, MAX_BACKOFF_S)
        self._restart_at = now + self._backoff_s
        with self._changed:
            self._serving.remove(process)
            self.restarts += 1
            self._changed.notify_all()
        self._fan_out.remove(process)

    def _listen(self, process: ChildProcess) -> None:
        """Receive the messages of one process, as long as it lives."""
        for message in process.connection.messages():
            process.last_message_at = monotonic()
            self._on_message(process, message)

    def _on_message(self, process: ChildProcess, message: ipc.Message) -> None:
        if isinstance(message, ipc.Ready):
            with self._changed:
                process.is_ready = True
                self._changed.notify_all()
        elif isinstance(message, ipc.Closed):
            with self._lock:
                process.open_connections -= 1
        elif isinstance(message, ipc.Ask):
            number = message.number

            def on_answers(answers: list[Any], missing: int) -> None:
                process.send(ipc.Answers(number, answers, missing))

            self._fan_out.begin(message.question, message.argument, self._ready(), on_answers, message.timeout_s)
        elif isinstance(message, ipc.Reply):
            self._fan_out.on_answer(process, message)
        elif isinstance(message, ipc.WantBatcher):
            self._assign_batcher(message.kind[: ipc.MAX_KIND_BYTES], process)
        elif not isinstance(message, ipc.Alive):
            log.error("serving process %d sent a message that only the supervisor may send", process.process.pid)

    def _is_up(self) -> bool:
        return len(self._serving) == self._count and all(process.is_ready for process in self._serving)

    def _current(self) -> list[ChildProcess]:
        with self._lock:
            return list(self._serving)

    def _ready(self) -> list[ChildProcess]:
        return [process for process in self._current() if process.is_ready]
