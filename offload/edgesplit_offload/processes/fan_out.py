"""Sends a question to all serving processes and collects the answers until all have answered or the time is up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from time import monotonic
from typing import Any, Protocol

from edgesplit_offload.processes.ipc import Message, Question, Reply

TIMEOUT_S = 5.0
"""Timeout of one round in seconds, unless the question has its own."""
Done = Callable[[list[Any], int], None]
"""Called with the answers that arrived in time, and the number of living processes that gave none."""


class Recipient(Protocol):
    """A process that can be asked."""

    def send(self, message: Message) -> bool:
        """Send `message`; False if it could not be sent."""
        ...


@dataclass(eq=False)
class _Round:
    pending: set[Recipient]
    until: float
    done: Done
    answers: list[Any] = field(default_factory=list)
    failed: int = 0


class FanOut:
    """All rounds in progress. Thread-safe; `done` is called once per round, by the thread that completes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._rounds: dict[int, _Round] = {}

    def begin(
        self, question: str, argument: Any, recipients: Iterable[Recipient], done: Done, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Send the question to all `recipients`, and call `done` when all have answered or the time is up."""
        processes = set(recipients)
        with self._lock:
            number = next(self._numbers)
            self._rounds[number] = _Round(set(processes), monotonic() + timeout_s, done)
        unreachable = [process for process in processes if not process.send(Question(number, question, argument))]
        self._settle(number, unreachable)

    def on_answer(self, recipient: Recipient, message: Reply) -> None:
        """Store the answer of `recipient`."""
        self._settle(message.number, [recipient], message)

    def remove(self, recipient: Recipient) -> None:
        """`recipient` has ended: its answers are no longer awaited."""
        with self._lock:
            numbers = [number for number, round_ in self._rounds.items() if recipient in round_.pending]
        for number in numbers:
            self._settle(number, [recipient])

    def expire(self, now: float) -> None:
        """Complete the rounds whose time is up."""
        with self._lock:
            numbers = [number for number, round_ in self._rounds.items() if now > round_.until]
            expired = [self._rounds.pop(number) for number in numbers]
        for round_ in expired:
            round_.done(round_.answers, round_.failed + len(round_.pending))

    def _settle(self, number: int, recipients: Iterable[Recipient], reply: Reply | None = None) -> None:
        with self._lock:
            round_ = self._rounds.get(number)
            if round_ is None:
                return
            round_.pending.difference_update(recipients)
            if reply is not None and reply.known:
                round_.answers.append(reply.answer)
            elif reply is not None:
                round_.failed += 1
            if round_.pending:
                return
            del self._rounds[number]
        round_.done(round_.answers, round_.failed)
