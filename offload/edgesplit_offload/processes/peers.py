"""The serving processes of one offload server, as each of them sees the others: a question goes to all, itself too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

Answerers = Mapping[str, Callable[[Any], Any]]
"""By question: what this process answers to an argument. Both are of what MessagePack holds."""


class Siblings(Protocol):
    """How a process asks all of them."""

    def listen(self, answerers: Answerers) -> None:
        """From now on questions are answered by these."""
        ...

    def ask(self, question: str, argument: Any = None) -> list[Any]:
        """Every process's answer; one that does not answer in time is left out."""
        ...


class Alone:
    """The one process there is."""

    def __init__(self) -> None:
        self._answerers: Answerers = {}

    def listen(self, answerers: Answerers) -> None:
        """From now on questions are answered by these."""
        self._answerers = answerers

    def ask(self, question: str, argument: Any = None) -> list[Any]:
        """Its own answer."""
        return [self._answerers[question](argument)]
