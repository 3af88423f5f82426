"""The console script: exits quietly on Ctrl-C while the commands are still being imported, and says what to install
where a dependency is missing."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from edgesplit.missing_packages import EXIT_CODE, missing_package_text, unsupported_python_text

INTERRUPTED = 130
LEAST_PYTHON = (3, 11)
EXTRA = "cli"


def main() -> None:
    """Import the commands and run one."""
    if text := unsupported_python_text("edgectl", LEAST_PYTHON, sys.version_info[:2]):
        _fail(text)
    try:
        _run()
    except ModuleNotFoundError as error:
        text = missing_package_text(error, "edgectl", EXTRA)
        if not text:
            raise
        _fail(text)


def _run() -> None:
    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _on_interrupt)
    from edgesplit_cli.main import main as run

    if previous is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _fail(text: str) -> None:
    print(text, file=sys.stderr)
    sys.exit(EXIT_CODE)


def _on_interrupt(_signal: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)  # nothing has started yet, so there is nothing to clean up
