"""The serving processes of one offload server, as seen by each of them: a question is answered by all, the asker
included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Answerers = Mapping[str, Callable[[Any], Any]]
"""The function that answers each question in this process. Arguments and answers are values that MessagePack can hold.
"""
CHANGE_S = 60.0
"""Seconds that a process may take for a change, such as loading a model."""


class PeerProcesses:
    """The serving processes of one server. This one is the only process of a server without a supervisor."""

    def __init__(self) -> None:
        self._answerers: Answerers = {}

    def listen(self, answerers: Answerers) -> None:
        """Answer questions with these functions from now on."""
        self._answerers = answerers

    def ask(self, question: str, argument: Any = None) -> list[Any]:
        """The answers of all processes; one that does not answer in time is left out."""
        return [self._answerers[question](argument)]

    def change(self, question: str, argument: Any) -> None:
        """Have every process do what the question asks for; raises what fails here, Busy if another did not do it
        within CHANGE_S."""
        self._answerers[question](argument)
