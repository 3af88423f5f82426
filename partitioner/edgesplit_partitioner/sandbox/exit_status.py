"""What the end of a child process says that a model was tried in: of the model, or of who ended it."""

from __future__ import annotations

import signal

from edgesplit.errors import Interrupted

FROM_OUTSIDE = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
"""No runtime ends itself by these, and neither do we: it is an operator's Ctrl-C, or a service that stops."""


def check_not_interrupted(status: int) -> None:
    """Interrupted where somebody ended the child before it was done: that is no fault of the model's."""
    if -status in FROM_OUTSIDE:
        name = signal.Signals(-status).name
        raise Interrupted(f"the process that tried the model was ended ({name}) before it was done: ask again")
