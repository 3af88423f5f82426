"""Several serving processes behind one port: it accepts, and hands each connection to the process that has fewest.

Accepting in one place spreads connections evenly, which the kernel's hash over SO_REUSEPORT does not for a handful of
devices that stay connected, and the port outlives whatever happens to a process (docs/decisions/0019). A process that
ends is started again, at growing intervals where it does not live; one that gives no sign of life is killed. No model
is loaded and nothing a client says is read in here.
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
from edgesplit_offload.processes.fan_out import Rounds
from edgesplit_offload.processes.ipc import (
    FRESH,
    GATHER,
    LINK,
    LONGEST_KIND,
    Alive,
    Answers,
    Ask,
    Closed,
    Drain,
    Message,
    Notice,
    Ready,
    Seek,
    Talk,
    Told,
    Yours,
)

log = logging.getLogger(__name__)

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
STEADY_S = 10.0
"""A process that lived so long did not die of its start."""
START_S = 60.0
HOPELESS = 3
"""So many ended before any was ready: none will be."""
LOOK_S = 0.1
KINDS = 1_024
"""That are remembered, and who gathers them."""
KILL_S = 3.0
"""What a process gets beyond its time to drain."""


@dataclass(eq=False)
class Serving:
    """One serving process."""

    process: subprocess.Popen[bytes]
    talk: Talk
    connections: socket.socket
    began: float = field(default_factory=monotonic)
    heard: float = field(default_factory=monotonic)
    is_ready: bool = False
    open: int = 0
    """Connections that it has."""

    def take(self, sock: socket.socket) -> bool:
        """Whether the connection is its now: it may have gone, or not be reading."""
        taken = self.hand(sock, FRESH)
        self.open += taken
        return taken

    def hand(self, sock: socket.socket, what: bytes) -> bool:
        """Whether it has that socket now."""
        try:
            socket.send_fds(self.connections, [what], [sock.fileno()], socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def say(self, message: Message) -> bool:
        """Whether it went out."""
        return self.talk.send(message)

    def end(self) -> None:
        """Not ours any more."""
        self.talk.close()
        self.connections.close()


class Supervisor:
    """Keeps `count` processes of `command` serving the connections of `listener`."""

    def __init__(self, listener: socket.socket, command: Sequence[str], count: int, *, stuck_after_s: float) -> None:
        self.restarts = 0
        self._listener = listener
        self._command = list(command)
        self._count = count
        self._stuck_after_s = stuck_after_s
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._serving: list[Serving] = []
        self._rounds = Rounds()
        self._gathering: OrderedDict[str, Serving] = OrderedDict()
        self._stopping = threading.Event()
        self._accepting = threading.Thread(target=self._accept, name="accepting", daemon=True)
        self._keeping = threading.Thread(target=self._keep, name="keeping", daemon=True)
        self._delay_s = FIRST_DELAY_S
        self._again_at = 0.0

    def start(self) -> None:
        """Start them and accept; UsageError if none becomes ready."""
        for _ in range(self._count):
            self._spawn()
        self._keeping.start()
        with self._changed:
            came = self._changed.wait_for(lambda: self._is_up() or self.restarts >= HOPELESS, START_S)
            ready = any(one.is_ready for one in self._serving)
        if not ready:
            self.stop(0.0)
            raise UsageError("no serving process could be started" if came else "no serving process became ready")
        self._accepting.start()

    def notice(self) -> None:
        """Have the processes say that they are not ready any more, while they still serve."""
        for one in self._now():
            one.say(Notice())

    def stop(self, drain_s: float) -> None:
        """Accept no more, let the processes finish what runs, and see them end."""
        self._stopping.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for one in self._now():
            one.say(Drain(drain_s))
        for thread in (self._accepting, self._keeping):
            if thread.is_alive():
                thread.join()
        self._listener.close()
        serving = self._now()
        for one in serving:  # one may have been started meanwhile
            one.say(Drain(drain_s))
        deadline = monotonic() + drain_s + KILL_S
        for one in serving:
            try:
                one.process.wait(max(0.1, deadline - monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("serving process %d did not end: killing it", one.process.pid)
                one.process.kill()
                one.process.wait()
            one.end()

    def ask(self, question: str, argument: Any = None) -> list[Any]:
        """Every ready process's answer, as far as it comes in time."""
        done, answers = threading.Event(), list[Any]()

        def told(found: list[Any]) -> None:
            answers.extend(found)
            done.set()

        self._rounds.begin(question, argument, self._ready(), told)
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
                if selector.select(LOOK_S) and not self._stopping.is_set():
                    self._accept_waiting()

    def _accept_waiting(self) -> None:
        """All connections that wait; each to a process, or, while there is none, it waits with us."""
        with self._changed:
            if not self._changed.wait_for(lambda: any(one.is_ready for one in self._serving), LOOK_S):
                return
        while not self._stopping.is_set():
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if not self._stopping.wait(LOOK_S):  # out of file descriptors: in a moment again
                    log.warning("cannot accept: %s", error)
                return
            with sock:
                self._hand_over(sock)

    def _hand_over(self, sock: socket.socket) -> None:
        """To the process with fewest connections that takes it; where none does it is closed."""
        with self._lock:
            for one in sorted((one for one in self._serving if one.is_ready), key=lambda one: one.open):
                if one.take(sock):
                    return
        log.warning("no serving process took a connection")

    def _gather(self, kind: str, one: Serving) -> None:
        """Tell a process who gathers requests of this kind: itself, if it is the first that asks, or give it a link to
        the one that was."""
        with self._lock:
            found = self._gathering.get(kind)
            gathering = found if found in self._serving else one
            self._gathering[kind] = gathering
            self._gathering.move_to_end(kind)
            while len(self._gathering) > KINDS:
                self._gathering.popitem(last=False)
            if gathering is not one:
                ours, theirs = socket.socketpair()
                with ours, theirs:
                    if gathering.hand(theirs, GATHER):
                        one.hand(ours, LINK + kind.encode())
        if gathering is one:
            one.say(Yours(kind))

    # Keeping them alive

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        giving, taking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, taking:  # the other two are closed with what they are part of, or by the collector
            descriptors = (theirs.fileno(), taking.fileno())
            process = subprocess.Popen(
                [*self._command, "--worker", ",".join(map(str, descriptors))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # a Ctrl-C at our terminal is for us to handle
            )
        one = Serving(process, Talk(ours), giving)
        with self._lock:
            self._serving.append(one)
        threading.Thread(target=self._listen, args=(one,), name="listening", daemon=True).start()

    def _keep(self) -> None:
        """See that there are as many as there should be, and that each of them lives."""
        while not self._stopping.wait(LOOK_S):
            now = monotonic()
            self._rounds.expire(now)
            for one in self._now():
                if one.process.poll() is not None:
                    self._lost(one, now)
                elif now - one.heard > max(self._stuck_after_s, 0.0 if one.is_ready else START_S):
                    log.error("serving process %d gives no sign of life: killing it", one.process.pid)
                    one.process.kill()
                    one.process.wait()
                    self._lost(one, now)
            if now >= self._again_at:
                self._complete(now)

    def _complete(self, now: float) -> None:
        """Start as many as are missing."""
        try:
            for _ in range(self._count - len(self._now())):
                self._spawn()
        except OSError as error:  # no memory, no descriptors: what serves goes on, and this is tried again
            log.error("cannot start a serving process: %s", error)
            self._again_at = now + LONGEST_DELAY_S

    def _lost(self, one: Serving, now: float) -> None:
        log.warning("serving process %d ended (status %s)", one.process.pid, one.process.returncode)
        one.end()
        lived = now - one.began > STEADY_S
        self._delay_s = FIRST_DELAY_S if lived else min(2 * self._delay_s, LONGEST_DELAY_S)
        self._again_at = now + self._delay_s
        with self._changed:
            self._serving.remove(one)
            self.restarts += 1
            self._changed.notify_all()
        self._rounds.gone(one)

    def _listen(self, one: Serving) -> None:
        """What one process says, as long as it lives."""
        for message in one.talk.messages():
            one.heard = monotonic()
            self._heard(one, message)

    def _heard(self, one: Serving, message: Message) -> None:
        if isinstance(message, Ready):
            with self._changed:
                one.is_ready = True
                self._changed.notify_all()
        elif isinstance(message, Closed):
            with self._lock:
                one.open -= 1
        elif isinstance(message, Ask):
            number = message.number

            def told(answers: list[Any]) -> None:
                one.say(Answers(number, answers))

            self._rounds.begin(message.question, message.argument, self._ready(), told)
        elif isinstance(message, Told):
            self._rounds.told(one, message)
        elif isinstance(message, Seek):
            self._gather(message.kind[:LONGEST_KIND], one)
        elif not isinstance(message, Alive):
            log.error("serving process %d said what only we say", one.process.pid)

    def _is_up(self) -> bool:
        return len(self._serving) == self._count and all(one.is_ready for one in self._serving)

    def _now(self) -> list[Serving]:
        with self._lock:
            return list(self._serving)

    def _ready(self) -> list[Serving]:
        return [one for one in self._now() if one.is_ready]
