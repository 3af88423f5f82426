"""A serving process among several: connections come from the supervisor, which accepted them; questions go through it,
and so does the wish to have requests run beside others of their kind (`elsewhere`, `gathering`).

When the supervisor has gone, this process finishes what runs and goes too.
"""

from __future__ import annotations

import logging
import socket
import threading
from itertools import count
from typing import Any

from edgesplit.process.lifecycle import on_stop_signals
from edgesplit_offload.batching.remote_batcher import Elsewhere
from edgesplit_offload.processes.ipc import (
    GATHER,
    LINK,
    LONGEST_KIND,
    Alive,
    Answers,
    Ask,
    Closed,
    Drain,
    Notice,
    Question,
    Ready,
    Seek,
    Talk,
    Told,
    Yours,
)
from edgesplit_offload.processes.peers import Answerers
from edgesplit_offload.server import OffloadServer

log = logging.getLogger(__name__)

ALIVE_EVERY_S = 0.5
ANSWER_S = 10.0
"""How long one who asks waits for the supervisor."""


class ThroughSupervisor:
    """How this process asks all of them, and is asked."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._answerers: Answerers = {}
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._asked: dict[int, tuple[threading.Event, list[Any]]] = {}

    def listen(self, answerers: Answerers) -> None:
        """From now on questions are answered by these."""
        self._answerers = answerers

    def ask(self, question: str, argument: Any = None) -> list[Any]:
        """Every process's answer; only this one's where the supervisor does not answer."""
        answered, answers = threading.Event(), list[Any]()
        with self._lock:
            number = next(self._numbers)
            self._asked[number] = answered, answers
        self._talk.send(Ask(number, question, argument))
        came = answered.wait(ANSWER_S)
        with self._lock:
            self._asked.pop(number)
        return answers if came else [self._answerers[question](argument)]

    def heard(self, message: Question | Answers) -> None:
        """What the supervisor said."""
        if isinstance(message, Question):
            threading.Thread(target=self._answer, args=(message,), name="answering", daemon=True).start()
            return
        with self._lock:
            waiting = self._asked.get(message.number)
        if waiting is not None:
            waiting[1].extend(message.answers)
            waiting[0].set()

    def _answer(self, message: Question) -> None:
        try:
            told = Told(message.number, True, self._answerers[message.question](message.argument))
        except Exception as error:
            log.warning("a question of another serving process (%s) failed: %s", message.question, error)
            told = Told(message.number, False)
        self._talk.send(told)


class Worker:
    """Runs a server on what the supervisor hands over. `connections` brings accepted sockets, `talk` words."""

    def __init__(self, talk: Talk, connections: socket.socket, *, longest_run_s: float, drain_s: float) -> None:
        self.siblings = ThroughSupervisor(talk)
        self.elsewhere = Elsewhere(lambda kind: talk.send(Seek(kind)))
        self._talk = talk
        self._connections = connections
        self._longest_run_s = longest_run_s
        self._drain_s = drain_s
        self._ending = threading.Event()

    def closed(self) -> None:
        """A connection has ended: the supervisor counts them."""
        self._talk.send(Closed())

    def serve(self, server: OffloadServer) -> None:
        """Until the supervisor says so, or has gone, or a signal comes."""
        on_stop_signals(self._ending.set)
        threading.Thread(target=self._listen, args=(server,), name="listening", daemon=True).start()
        threading.Thread(target=self._take, args=(server,), name="taking", daemon=True).start()
        server.look_out()
        self._talk.send(Ready())
        while not self._ending.wait(ALIVE_EVERY_S):
            if server.longest_run_s() < self._longest_run_s:
                self._talk.send(Alive())
        server.stop(self._drain_s)

    def _listen(self, server: OffloadServer) -> None:
        for message in self._talk.messages():
            if isinstance(message, Question | Answers):
                self.siblings.heard(message)
            elif isinstance(message, Yours):
                self.elsewhere.here(message.kind)
            elif isinstance(message, Notice):
                server.not_ready()
            elif isinstance(message, Drain):
                self._drain_s = message.seconds
                break
        server.not_ready()
        self._ending.set()

    def _take(self, server: OffloadServer) -> None:
        while True:
            try:
                said, descriptors, _, _ = socket.recv_fds(self._connections, LONGEST_KIND + 1, 8)
            except OSError as error:  # too many open files: what was handed over is lost, what comes later is not
                log.warning("cannot take a connection: %s", error)
                self.closed()
                continue
            if not said:
                return
            for descriptor in descriptors:
                self._took(said, socket.socket(fileno=descriptor), server)

    def _took(self, said: bytes, sock: socket.socket, server: OffloadServer) -> None:
        """What the supervisor handed over."""
        if said[:1] == LINK:
            self.elsewhere.there(said[1:].decode(), sock)
        elif said[:1] == GATHER:
            server.gather(sock)
        else:
            server.http.admit(sock)
