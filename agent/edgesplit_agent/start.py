"""Console script `edgesplit-agent`. `launch` replaces this process at once, so nothing else of the agent is loaded for
it. Where a dependency is missing it says what to install."""

from __future__ import annotations

import sys

EXTRA = "agent"


def main() -> int:
    """Run the command; its exit code."""
    try:
        return _run()
    except ModuleNotFoundError as error:
        from edgesplit.missing_packages import EXIT_CODE, missing_package_text

        text = missing_package_text(error, "edgesplit-agent", EXTRA)
        if not text:
            raise
        print(text, file=sys.stderr)
        return EXIT_CODE


def _run() -> int:
    if sys.argv[1:2] == ["launch"]:
        from edgesplit_agent.self_update.launcher import main as launch

        launch(sys.argv[2:])
    from edgesplit_agent.main import main as command

    return command()
