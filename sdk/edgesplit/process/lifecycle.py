"""Process lifetime on Linux: child processes that end with their parent, signals, orphans, descriptor limits."""

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

    The parent should pass its process id when it starts the child: with 0 the id is looked up here, when the parent may
    have ended already.
    """
    parent = parent or os.getppid()
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0 or os.getppid() != parent:
        raise UsageError("cannot end with the parent process: it has ended already, or this is not Linux")


def raise_open_file_limit() -> int:
    """Raise the soft limit of open files to the hard one, for this process and its children; returns the limit.

    The usual soft limit of 1,024 is less than one connection for each of a fleet's devices.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def forbid_core_dumps() -> None:
    """Let this process and its children leave no core dump when they crash or are aborted: it would contain keys,
    weights and inputs. Neither of them can raise the limit again."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def add_die_with_parent_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--die-with-parent`, by which a parent requests `end_with_parent`."""
    parser.add_argument(
        "--die-with-parent", type=int, nargs="?", const=0, metavar="PID",
        help="stop when the parent (of that number) ends",
    )  # fmt: skip


def adopt_orphans() -> None:
    """Make this process the subreaper of its descendants: a process whose parent ends becomes its child, to be waited
    for."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def gain_no_privileges() -> None:
    """Set no_new_privs: programs started by this process cannot gain privileges (set-user-id bits are ignored)."""
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def on_stop_signals(stop: Callable[[], None]) -> None:
    """Call `stop` on SIGTERM and SIGINT, in a thread of its own.

    In the handler itself it could deadlock: the main thread may hold the very lock that setting an event takes.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=stop, name="stopping", daemon=True).start())


def wait_until(stop: threading.Event) -> None:
    """Wait for `stop` in the main thread, where signal handlers run.

    The wait is repeated with a short timeout: a signal received by another thread, or just before the wait began, does
    not wake an unbounded wait, and its handler runs only when the main thread wakes.
    """
    while not stop.wait(WAKE_S):
        pass


def die_with_starting_thread(signum: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """A `preexec_fn` that has the kernel send `signum` to the child when the *thread* that started it ends."""
    parent = os.getpid()

    def ask() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(1)

    return ask
