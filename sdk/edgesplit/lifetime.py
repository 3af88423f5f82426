"""Processes that end with the one that started them, so that killing a parent leaves nothing behind (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Final

from edgesplit.errors import UsageError

_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def end_with_parent(signum: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send `signum` to this process when its parent ends; UsageError if it has ended already."""
    parent = os.getppid()
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0 or os.getppid() != parent:
        raise UsageError("cannot end with the parent process: it has ended already, or this is not Linux")


def ending_with_us(signum: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """What a child runs between fork and exec (`preexec_fn`) to end when the *thread* that started it ends."""
    parent = os.getpid()

    def ask() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
        if os.getppid() != parent:  # it died before we could ask
            os._exit(1)

    return ask
