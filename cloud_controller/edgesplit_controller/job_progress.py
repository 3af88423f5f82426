"""What a long call of the controller is doing now: set by the code that does it, read by `GET /v1/jobs`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import time
from typing import Any

from edgesplit_controller.caller import current_operator


@dataclass(eq=False, slots=True)
class Job:
    """One long call, queued or running. Written by the thread that works on it, read by others."""

    path: str
    """The call's path below the API's address."""
    operator: str = field(default_factory=current_operator)
    since: float = field(default_factory=time)
    step: str = ""
    """What is being done; empty while the call is queued."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which `report_step` reports for this call."""
        self.step = "begun"
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def to_dict(self) -> dict[str, Any]:
        """The call for the API."""
        state = "running" if self.step else "queued"
        return {"path": self.path, "state": state, "step": self.step, "since": self.since}


_current: ContextVar[Job | None] = ContextVar("job", default=None)


def report_step(text: str) -> None:
    """Report what the current long call does from now on; without effect outside of one."""
    if (job := _current.get()) is not None:
        job.step = text
