"""The console script: `launch` becomes another process at once, so it loads nothing of the agent for that."""

from __future__ import annotations

import sys


def main() -> int:
    """The command; its exit code."""
    if sys.argv[1:2] == ["launch"]:
        from edgesplit_agent.self_update.launcher import main as launch

        launch(sys.argv[2:])
    from edgesplit_agent.main import main as command

    return command()
