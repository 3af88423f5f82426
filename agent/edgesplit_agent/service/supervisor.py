"""`edgesplit-agent supervise`: keeps an agent running where there is no systemd.

Promises: an agent that ends is started again, later each time it does not last; one that hangs is killed within its
watchdog time, with all that it started; what is told to us is passed on; a supervisor that is killed leaves no agent
behind, because the kernel ends it with us. What it decides is in `watching`.
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

from edgesplit.process.lifecycle import adopt_orphans, ending_with_us
from edgesplit_agent.host.sd_notify import SOCKET, WATCHDOG_PID, WATCHDOG_US
from edgesplit_agent.service.restart_policy import Run, failures_after, pause_after

log = logging.getLogger(__name__)

ENDS = (signal.SIGTERM, signal.SIGINT)
RESTARTS = (signal.SIGHUP,)
_CREDENTIALS = struct.Struct("3i")
_MOST_MESSAGE = 4_096


class Supervisor:
    """Runs `command` until it is told to stop."""

    def __init__(self, command: Sequence[str], watchdog_s: float) -> None:
        self._command = list(command)
        self._watchdog_s = watchdog_s
        self._address = f"@edgesplit-{os.getpid()}-{secrets.token_hex(8)}"
        self._heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._heard.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._heard.bind("\0" + self._address[1:])
        self._signals, self._signalled = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._child: subprocess.Popen[bytes] | None = None
        self._run = Run(0.0, watchdog_s)
        self._stopping = False
        self._failures = 0
        self._start_at = 0.0

    def serve(self) -> int:
        """The loop; the exit code that the agent ends with when it is told to, 0 where none runs then."""
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
                code = self._ended(ended)
            elif self._child is not None and monotonic() >= self._run.deadline:
                log.error("the agent %s: killed", self._run.why())
                self._run = self._run.killed()
                self._kill()

    def _catch_signals(self) -> None:
        signal.set_wakeup_fd(self._signalled, warn_on_full_buffer=False)
        for number in (*ENDS, *RESTARTS, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)

    def _start(self) -> None:
        environment = {
            name: value for name, value in os.environ.items() if name not in (SOCKET, WATCHDOG_US, WATCHDOG_PID)
        }
        environment[SOCKET] = self._address
        if self._watchdog_s:
            environment[WATCHDOG_US] = str(int(self._watchdog_s * 1e6))
        self._run = Run(monotonic(), self._watchdog_s)
        try:
            self._child = subprocess.Popen(
                self._command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True,
                preexec_fn=ending_with_us(signal.SIGKILL),
            )  # fmt: skip
        except OSError as error:  # a disk that is being repaired, an installation that is being replaced
            log.error("cannot start %s: %s", self._command[0], error)
            self._later(0.0)
            return
        log.info("started the agent: process %d", self._child.pid)

    def _wait(self) -> None:
        """For a signal, for the agent to speak, or for a deadline."""
        until = self._run.deadline if self._child is not None else self._start_at
        left_s = None if until == math.inf else max(0.0, min(until - monotonic(), 3600.0))
        ready, _, _ = select.select([self._signals, self._heard.fileno()], [], [], left_s)
        if self._heard.fileno() in ready:
            self._listen()
        if self._signals in ready:
            for number in os.read(self._signals, 256):
                self._obey(number)

    def _listen(self) -> None:
        """To the agent and nobody else: the kernel says who sent each message."""
        with contextlib.suppress(BlockingIOError):
            while True:
                message, extra, _, _ = self._heard.recvmsg(_MOST_MESSAGE, socket.CMSG_SPACE(_CREDENTIALS.size))
                senders = [_CREDENTIALS.unpack(raw)[0] for _, kind, raw in extra if kind == socket.SCM_CREDENTIALS]
                if self._child is not None and senders == [self._child.pid]:
                    self._run = self._run.hears(message, monotonic())

    def _obey(self, number: int) -> None:
        if number in ENDS:
            self._stopping = True
        if number in (*ENDS, *RESTARTS) and self._child is not None:
            log.info("%s: ending the agent", signal.Signals(number).name)
            self._child.terminate()
            self._run = self._run.stops(monotonic())

    def _reap(self) -> int | None:
        """Collect whoever ended, orphans that became ours too; the agent's status where it was among them."""
        found = None
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if self._child is not None and pid == self._child.pid:
                    found = os.waitstatus_to_exitcode(status)
                    self._child.returncode = found
        return found

    def _ended(self, code: int) -> int:
        self._kill()  # what it had started
        ran_s = monotonic() - self._run.since
        asked = self._run.told_to_stop < math.inf
        self._child = None
        if self._stopping:
            return max(0, code)
        self._later(math.inf if asked else ran_s)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with {code}"
        log.warning("the agent ended %s after %.0f s; starting it again", how, ran_s)
        return 0

    def _later(self, ran_s: float) -> None:
        """Start again after a run of so many seconds."""
        self._failures = failures_after(self._failures, ran_s)
        pause_s = 0.0 if ran_s == math.inf else pause_after(max(0, self._failures - 1), random.random())
        self._start_at = monotonic() + pause_s

    def _kill(self) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)
