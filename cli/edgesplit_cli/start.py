"""The console script: exits quietly on Ctrl-C while the commands are still being imported."""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Import the commands and run one."""
    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _on_interrupt)
    from edgesplit_cli.main import main as run

    if previous is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _on_interrupt(_signal: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)  # nothing has started yet, so there is nothing to clean up
