"""Interprets the exit status of a child process in which a model was tried: a fault of the model, or an
interruption."""

from __future__ import annotations

import signal

from edgesplit.errors import Interrupted

INTERRUPT_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
"""Signals that mean an interruption from outside (Ctrl-C, a service that stops): no runtime raises them on its own
process, and edgesplit does not either."""


def check_not_interrupted(status: int) -> None:
    """Raise Interrupted where the child was ended by a signal from outside before it was done, which is no fault of the
    model. `status` is the exit status as `subprocess` reports it: the negative signal number where a signal ended the
    child."""
    if -status in INTERRUPT_SIGNALS:
        name = signal.Signals(-status).name
        raise Interrupted(f"the process that tried the model was ended ({name}) before it was done: ask again")
