"""A serving process among several: the supervisor hands it accepted connections and relays questions and answers;
requests that batch with those of other processes are exchanged with them directly (`edgesplit_offload.batching`).

When the supervisor has gone, this process finishes its running requests and ends too.
"""

from __future__ import annotations

import logging
import socket
import threading
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

from edgesplit.errors import Busy
from edgesplit.process.lifecycle import on_stop_signals
from edgesplit_offload.batching.remote_batcher import RemoteBatcher
from edgesplit_offload.processes import ipc
from edgesplit_offload.processes.fan_out import TIMEOUT_S
from edgesplit_offload.processes.ipc import IpcConnection
from edgesplit_offload.processes.peers import CHANGE_S, PeerProcesses
from edgesplit_offload.server import OffloadServer

log = logging.getLogger(__name__)

ALIVE_EVERY_S = 0.5
SUPERVISOR_S = 5.0
"""Seconds that a question waits for the supervisor beyond the time that the processes have."""


class SupervisedPeers(PeerProcesses):
    """Asks all serving processes through the supervisor, and answers their questions."""

    def __init__(self, supervisor: IpcConnection) -> None:
        super().__init__()
        self._supervisor = supervisor
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._pending: dict[int, SimpleQueue[ipc.Answers]] = {}

    def ask(self, question: str, argument: Any = None) -> list[Any]:
        """The answers of all processes; only this one's if the supervisor does not answer."""
        answers = self._ask(question, argument, TIMEOUT_S)
        return [self._answerers[question](argument)] if answers is None else answers.answers

    def change(self, question: str, argument: Any) -> None:
        """Have every process do what the question asks for, this one first, whose errors are raised; Busy if another
        failed, or did not end in time. Errors of other processes are in their logs."""
        self._answerers[question](argument)
        answers = self._ask(question, argument, CHANGE_S)
        if answers is None or answers.missing:
            raise Busy(f"{answers.missing if answers else 'the other'} serving processes have not done it: try again")

    def _ask(self, question: str, argument: Any, timeout_s: float) -> ipc.Answers | None:
        """The answers of all processes within `timeout_s`; None if the supervisor does not answer."""
        answered = SimpleQueue[ipc.Answers]()
        with self._lock:
            number = next(self._numbers)
            self._pending[number] = answered
        self._supervisor.send(ipc.Ask(number, question, argument, timeout_s))
        try:
            return answered.get(timeout=timeout_s + SUPERVISOR_S)
        except Empty:
            return None
        finally:
            with self._lock:
                self._pending.pop(number)

    def on_message(self, message: ipc.Question | ipc.Answers) -> None:
        """Process a message of the supervisor."""
        if isinstance(message, ipc.Question):
            threading.Thread(target=self._answer, args=(message,), name="answering", daemon=True).start()
            return
        with self._lock:
            waiting = self._pending.get(message.number)
        if waiting is not None:
            waiting.put(message)

    def _answer(self, message: ipc.Question) -> None:
        try:
            reply = ipc.Reply(message.number, True, self._answerers[message.question](message.argument))
        except Exception as error:
            log.warning("a question of another serving process (%s) failed: %s", message.question, error)
            reply = ipc.Reply(message.number, False)
        self._supervisor.send(reply)


class ServingProcess:
    """Runs a server on the connections that the supervisor hands over. `connections` carries accepted sockets,
    `supervisor` messages."""

    def __init__(
        self, supervisor: IpcConnection, connections: socket.socket, *, longest_run_s: float, drain_s: float
    ) -> None:
        self.peers = SupervisedPeers(supervisor)
        self.remote_batcher = RemoteBatcher(lambda kind: supervisor.send(ipc.WantBatcher(kind)))
        self._supervisor = supervisor
        self._connections = connections
        self._longest_run_s = longest_run_s
        self._drain_s = drain_s
        self._ending = threading.Event()

    def on_connection_closed(self) -> None:
        """A connection has ended: report it to the supervisor, which counts them."""
        self._supervisor.send(ipc.Closed())

    def serve(self, server: OffloadServer) -> None:
        """Serve until the supervisor requests the end or has gone, or a stop signal arrives."""
        on_stop_signals(self._ending.set)
        threading.Thread(target=self._listen, args=(server,), name="listening", daemon=True).start()
        threading.Thread(target=self._receive_sockets, args=(server,), name="taking", daemon=True).start()
        server.start_serving()
        self._supervisor.send(ipc.Ready())
        while not self._ending.wait(ALIVE_EVERY_S):
            if server.longest_run_s() < self._longest_run_s:
                self._supervisor.send(ipc.Alive())
        server.stop(self._drain_s)

    def _listen(self, server: OffloadServer) -> None:
        for message in self._supervisor.messages():
            if isinstance(message, ipc.Question | ipc.Answers):
                self.peers.on_message(message)
            elif isinstance(message, ipc.BatcherSocket):
                self.remote_batcher.set_local(message.kind)
            elif isinstance(message, ipc.Notice):
                server.set_not_ready()
            elif isinstance(message, ipc.Drain):
                self._drain_s = message.seconds
                break
        server.set_not_ready()
        self._ending.set()

    def _receive_sockets(self, server: OffloadServer) -> None:
        while True:
            try:
                announcement, descriptors, _, _ = socket.recv_fds(self._connections, ipc.MAX_KIND_BYTES + 1, 8)
            except OSError as error:  # out of file descriptors: this connection is lost, later ones are not
                log.warning("cannot accept a connection: %s", error)
                self.on_connection_closed()
                continue
            if not announcement:
                return
            for descriptor in descriptors:
                self._on_socket(announcement, socket.socket(fileno=descriptor), server)

    def _on_socket(self, announcement: bytes, sock: socket.socket, server: OffloadServer) -> None:
        """Dispatch a socket that the supervisor handed over."""
        if announcement[:1] == ipc.BATCHER_LINK:
            self.remote_batcher.set_remote(announcement[1:].decode(), sock)
        elif announcement[:1] == ipc.PEER_LINK:
            server.serve_peer(sock)
        else:
            server.http.admit(sock)
