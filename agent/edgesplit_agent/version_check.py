"""Reports whether this version can run with the launcher and the data folder of a device, before it is ever started
there.

The version that runs at present executes it with this version's interpreter. Loading every module is half of the check,
and compiles them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

NEEDS_LAUNCHER = 1
"""Lowest `launcher.CONTRACT` of the installed version with which this version can run."""


def incompatibility(launcher: int, folder_format: int) -> str:
    """Why this version cannot run with a launcher of that contract on a data folder of that format; empty where it
    can."""
    from edgesplit_agent.state.data_folder import FORMAT, OLDEST_FORMAT

    if launcher < NEEDS_LAUNCHER:
        return (
            f"it needs a newer installed version (launcher {NEEDS_LAUNCHER}, here is {launcher}): install it again from"
            " a newer kit"
        )
    if not OLDEST_FORMAT <= folder_format <= FORMAT:
        return f"it reads data folders of format {OLDEST_FORMAT} to {FORMAT}, and this one is of format {folder_format}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Load everything, and print this version and its incompatibility as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--launcher", type=int, default=0)
    parser.add_argument("--format", type=int, default=0)
    options = parser.parse_known_args(argv)[0]
    import edgesplit
    import edgesplit_agent.main  # noqa: F401 - as it is started
    from edgesplit_agent.host.preload import preload

    preload()
    print(json.dumps({"version": edgesplit.__version__, "problem": incompatibility(options.launcher, options.format)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
