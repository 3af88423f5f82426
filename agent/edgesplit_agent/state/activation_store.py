"""The activation state in memory and in `current.json`: a change is adopted once it is written, except where the caller
can go on without the write."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Concatenate, ParamSpec

from edgesplit_agent.state.data_folder import DataFolder
from edgesplit_agent.state.slots import Current

log = logging.getLogger(__name__)
P = ParamSpec("P")


class ActivationStore:
    """The activation state by which this process goes; every change is one atomic write."""

    def __init__(self, folder: DataFolder) -> None:
        self._folder = folder
        self.current = Current()

    def update(
        self, transition: Callable[Concatenate[Current, P], Current], *arguments: P.args, **options: P.kwargs
    ) -> None:
        """Write and adopt what `transition` (of `state.slots`) makes of the current state. OSError where the disk
        refuses; then nothing has changed."""
        changed = transition(self.current, *arguments, **options)
        if changed != self.current:
            self._folder.write_current(changed)
            self.current = changed

    def update_best_effort(self, changed: Current, consequence: str) -> None:
        """Adopt `changed` in memory and try to write it. A disk error is logged with its `consequence`, not raised."""
        try:
            self.update(lambda current: changed)
        except OSError as error:
            log.warning("cannot write current.json, %s: %s", consequence, error.strerror)
            self.current = changed
