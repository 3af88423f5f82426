"""Console script `edgesplit-agent`. `launch` replaces this process at once, so nothing else of the agent is loaded for
it."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command; its exit code."""
    if sys.argv[1:2] == ["launch"]:
        from edgesplit_agent.self_update.launcher import main as launch

        launch(sys.argv[2:])
    from edgesplit_agent.main import main as command

    return command()
