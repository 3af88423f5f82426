"""Entry point of an additional controller process on this machine, which `app.processes` starts."""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from edgesplit.errors import EdgeError
from edgesplit.process.lifecycle import add_die_with_parent_option, end_with_parent
from edgesplit.process.start_up import imports_not_collected

with imports_not_collected():
    from edgesplit_controller.app.main import run
    from edgesplit_controller.app.processes import READY, decode_settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one process until it is stopped; returns its exit code."""
    parser = argparse.ArgumentParser(prog="edgesplit_controller.app.child")
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--listener", type=int, required=True)
    add_die_with_parent_option(parser)
    parsed = parser.parse_args(arguments)
    if parsed.die_with_parent is not None:
        end_with_parent(parsed.die_with_parent)
    try:
        settings = decode_settings(parsed.settings.read_bytes())
        run(settings, ready=lambda _: print(READY, flush=True), listener=socket.socket(fileno=parsed.listener))
    except EdgeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
