"""Processes that end with the one that started them, so that killing a parent leaves nothing behind (Linux)."""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import signal
import threading
from collections.abc import Callable
from typing import Final

from edgesplit.errors import UsageError

WAKE_S: Final = 0.5
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_NO_NEW_PRIVS: Final = 38
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def end_with_parent(parent: int, signum: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send `signum` to this process when `parent` ends; UsageError if it has ended already.

    The parent gives its process number when it starts us: asked here (0), it could have ended before the question.
    """
    parent = parent or os.getppid()
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0 or os.getppid() != parent:
        raise UsageError("cannot end with the parent process: it has ended already, or this is not Linux")


def open_as_many_files_as_allowed() -> int:
    """Raise the soft limit of descriptors to the hard one, for this process and those that it starts; what it is now.

    The usual soft limit of 1,024 is less than one connection for each of a fleet's devices.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def add_die_with_parent(parser: argparse.ArgumentParser) -> None:
    """The option by which whoever starts a process asks for `end_with_parent`."""
    parser.add_argument(
        "--die-with-parent",
        type=int,
        nargs="?",
        const=0,
        metavar="PID",
        help="stop when the parent (of that number) ends",
    )


def adopt_orphans() -> None:
    """Processes below this one whose parent ends become its children, to be waited for."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def gain_no_privileges() -> None:
    """No program that this process starts can do more than it may itself (set-user-id and the like are void)."""
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def on_stop_signals(stop: Callable[[], None]) -> None:
    """Call `stop` on SIGTERM and SIGINT, from a thread of its own.

    Inside the handler it could deadlock: the main thread may hold the very lock that setting an event takes.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=stop, name="stopping", daemon=True).start())


def wait_until(stop: threading.Event) -> None:
    """Wait for `stop`, in the main thread, which runs the handlers of signals.

    Never for long at a time: a signal that another thread received, or that came just before the wait began, does not
    wake a wait without an end, and its handler runs only when the main thread wakes.
    """
    while not stop.wait(WAKE_S):
        pass


def ending_with_us(signum: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """What a child runs between fork and exec (`preexec_fn`) to end when the *thread* that started it ends."""
    parent = os.getpid()

    def ask() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
        if os.getppid() != parent:  # it died before we could ask
            os._exit(1)

    return ask
