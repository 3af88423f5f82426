"""The console script: ends quietly where Ctrl-C comes before the commands are loaded."""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Load the commands and run one."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)
    from edgesplit_cli.main import main as run

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _leave(_signal: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)  # nothing has been begun
