"""`edgesplit-agent supervise`: keeps an agent running where there is no systemd.

Guarantees: an agent that ends is restarted, with a growing back-off while its runs are short; one that hangs is killed
within its watchdog time, with all processes that it started; stop signals are passed on; a supervisor that is killed
leaves no agent behind, because the kernel ends it too. `restart_policy` decides.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import secrets
import select
import signal
import socket
import struct
import subprocess
from collections.abc import Sequence
from time import monotonic

from edgesplit.process.lifecycle import adopt_orphans, die_with_starting_thread
from edgesplit_agent.host.sd_notify import SOCKET, WATCHDOG_PID, WATCHDOG_US
from edgesplit_agent.service.restart_policy import RESTART, ProgramRun, failures_after

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
RESTART_SIGNALS = (signal.SIGHUP,)
_CREDENTIALS = struct.Struct("3i")
_MAX_MESSAGE_BYTES = 4_096


class Supervisor:
    """Runs `command`, with restarts, until it receives a stop signal."""

    def __init__(self, command: Sequence[str], watchdog_s: float) -> None:
        self._command = list(command)
        self._watchdog_s = watchdog_s
        self._address = f"@edgesplit-{os.getpid()}-{secrets.token_hex(8)}"
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._notify_socket = socket.socket(socket.AF_UNIX, kind)
        self._notify_socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._notify_socket.bind("\0" + self._address[1:])
        self._signal_read_fd, self._signal_write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._child: subprocess.Popen[bytes] | None = None
        self._run = ProgramRun(0.0, watchdog_s)
        self._stopping = False
        self._failures = 0
        self._start_at = 0.0

    def serve(self) -> int:
        """The loop; returns the exit code of the agent that was asked to end, 0 where none was running."""
        adopt_orphans()
        self._catch_signals()
        code = 0
        while True:
            if self._child is None:
                if self._stopping:
                    return code
                if monotonic() >= self._start_at:
                    self._start()
            self._wait()
            ended = self._reap()
            if ended is not None:
                code = self._on_agent_ended(ended)
            elif self._child is not None and monotonic() >= self._run.deadline:
                log.error("the agent %s: killed", self._run.missed_deadline())
                self._run = self._run.after_kill()
                self._kill_group()

    def _catch_signals(self) -> None:
        signal.set_wakeup_fd(self._signal_write_fd, warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, *RESTART_SIGNALS, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)

    def _start(self) -> None:
        not_inherited = (SOCKET, WATCHDOG_US, WATCHDOG_PID)
        environment = {name: value for name, value in os.environ.items() if name not in not_inherited}
        environment[SOCKET] = self._address
        if self._watchdog_s:
            environment[WATCHDOG_US] = str(int(self._watchdog_s * 1e6))
        self._run = ProgramRun(monotonic(), self._watchdog_s)
        try:
            self._child = subprocess.Popen(
                self._command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True,
                preexec_fn=die_with_starting_thread(signal.SIGKILL),
            )  # fmt: skip
        except OSError as error:  # as during a repair of the disk or an upgrade of the installation: retried
            log.error("cannot start %s: %s", self._command[0], error)
            self._schedule_start(0.0)
            return
        log.info("started the agent: process %d", self._child.pid)

    def _wait(self) -> None:
        """Wait for a signal, a notification of the agent, or a deadline."""
        until = self._run.deadline if self._child is not None else self._start_at
        left_s = None if until == math.inf else max(0.0, min(until - monotonic(), 3600.0))
        ready, _, _ = select.select([self._signal_read_fd, self._notify_socket.fileno()], [], [], left_s)
        if self._notify_socket.fileno() in ready:
            self._read_notifications()
        if self._signal_read_fd in ready:
            for number in os.read(self._signal_read_fd, 256):
                self._on_signal(number)

    def _read_notifications(self) -> None:
        """Read notifications; only the agent's count, by the sender's process id, which the kernel supplies."""
        with contextlib.suppress(BlockingIOError):
            while True:
                ancillary_bytes = socket.CMSG_SPACE(_CREDENTIALS.size)
                message, extra, _, _ = self._notify_socket.recvmsg(_MAX_MESSAGE_BYTES, ancillary_bytes)
                senders = [_CREDENTIALS.unpack(raw)[0] for _, kind, raw in extra if kind == socket.SCM_CREDENTIALS]
                if self._child is not None and senders == [self._child.pid]:
                    self._run = self._run.after_notification(message, monotonic())

    def _on_signal(self, number: int) -> None:
        if number in STOP_SIGNALS:
            self._stopping = True
        if number in (*STOP_SIGNALS, *RESTART_SIGNALS) and self._child is not None:
            log.info("%s: ending the agent", signal.Signals(number).name)
            self._child.terminate()
            self._run = self._run.after_stop_request(monotonic())

    def _reap(self) -> int | None:
        """Reap all ended child processes, adopted orphans included; the agent's exit code where it was among them."""
        exit_code = None
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if self._child is not None and pid == self._child.pid:
                    exit_code = os.waitstatus_to_exitcode(status)
                    self._child.returncode = exit_code
        return exit_code

    def _on_agent_ended(self, code: int) -> int:
        """Kill what the agent left running, and schedule its restart; the supervisor's exit code."""
        self._kill_group()  # processes that the agent started and left running, in its process group
        ran_s = monotonic() - self._run.since
        was_requested = self._run.stop_requested_at < math.inf
        self._child = None
        if self._stopping:
            return max(0, code)
        self._schedule_start(math.inf if was_requested else ran_s)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with {code}"
        log.warning("the agent ended %s after %.0f s; restarting it", how, ran_s)
        return 0

    def _schedule_start(self, ran_s: float) -> None:
        """Schedule the next start, after a run of that many seconds (infinity: without back-off)."""
        self._failures = failures_after(self._failures, ran_s)
        pause_s = 0.0 if ran_s == math.inf else RESTART.pause_s(max(0, self._failures - 1), random.random())
        self._start_at = monotonic() + pause_s

    def _kill_group(self) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)
