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
"""Timeout of one round in seconds."""


class Recipient(Protocol):
    """A process that can be asked."""

    def send(self, message: Message) -> bool:
        """Send `message`; False if it could not be sent."""
        ...


@dataclass(eq=False)
class _Round:
    pending: set[Recipient]
    until: float
    done: Callable[[list[Any]], None]
    answers: list[Any] = field(default_factory=list)


class FanOut:
    """All rounds in progress. Thread-safe; `done` is called once per round, by the thread that completes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._rounds: dict[int, _Round] = {}

    def begin(
        self, question: str, argument: Any, recipients: Iterable[Recipient], done: Callable[[list[Any]], None]
    ) -> None:
        """Send the question to all `recipients`; `done` is called with the answers that arrive in time."""
        processes = set(recipients)
        with self._lock:
            number = next(self._numbers)
            self._rounds[number] = _Round(set(processes), monotonic() + TIMEOUT_S, done)
        unreachable = [process for process in processes if not process.send(Question(number, question, argument))]
        self._settle(number, unreachable)

    def on_answer(self, recipient: Recipient, message: Reply) -> None:
        """Store the answer of `recipient`."""
        self._settle(message.number, [recipient], [message.answer] if message.known else [])

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
            round_.done(round_.answers)

    def _settle(self, number: int, recipients: Iterable[Recipient], answers: Iterable[Any] = ()) -> None:
        with self._lock:
            round_ = self._rounds.get(number)
            if round_ is None:
                return
            round_.pending.difference_update(recipients)
            round_.answers.extend(answers)
            if round_.pending:
                return
            del self._rounds[number]
        round_.done(round_.answers)
