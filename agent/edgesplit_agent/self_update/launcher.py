"""`edgesplit-agent launch`: start the version of the agent that is to run, in place of this process.

Stable and small: it is of the installed version, which no update changes. It counts the start, on disk, before anything
of another version is loaded; compares that version's files with what was installed; and becomes the agent by `exec`, so
that whoever supervises it (systemd, `supervise`, a shell) sees one process throughout. Each way out of an agent that
wants another version is this launcher again. A version on trial gets an alarm that survives the `exec`: one that hangs,
so that it neither commits nor gives up, is ended by the kernel, and that start counts as an unhealthy one.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec

from edgesplit import __version__
from edgesplit.errors import UsageError
from edgesplit_agent.host.sd_notify import SOCKET, WATCHDOG_PID, WATCHDOG_US, Manager
from edgesplit_agent.self_update import slots
from edgesplit_agent.self_update.slots import Versions
from edgesplit_agent.self_update.trial import TRIAL_S
from edgesplit_agent.self_update.version_store import Shelf
from edgesplit_agent.state.data_folder import DataFolder

log = logging.getLogger(__name__)

CONTRACT = 1
"""What a version may expect of the launcher; it grows when a later version needs something new of it."""
STARTING_S = 180
"""So long a version may take to load, on a slow card, before the time of its trial begins to count."""
MODULE = "edgesplit_agent.self_update.launcher"
RELEASE, TRIAL, LAUNCHER, CONTRACT_IS = (
    "EDGESPLIT_AGENT_RELEASE",
    "EDGESPLIT_AGENT_TRIAL",
    "EDGESPLIT_AGENT_LAUNCHER",
    "EDGESPLIT_AGENT_CONTRACT",
)
"""What the started version is told: its release, whether it is on trial, how to come back here, and `CONTRACT`."""
_OURS = (RELEASE, TRIAL, LAUNCHER, CONTRACT_IS)
_PYTHON = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")


@dataclass(frozen=True, slots=True)
class Launched:
    """What this process was told by the launcher that it was."""

    release: str
    """Empty: the installed version."""
    on_trial: bool
    launcher: tuple[str, ...]
    contract: int
    manager: Mapping[str, str] = field(default_factory=dict)
    """How to reach who supervises us: the agent takes that out of its environment."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Launched | None:
        """None for an agent that no launcher started: it cannot change its version."""
        try:
            launcher = msgspec.json.decode(environment[LAUNCHER], type=tuple[str, ...])
            contract = int(environment[CONTRACT_IS])
        except (KeyError, ValueError, msgspec.MsgspecError):
            return None
        manager = {name: environment[name] for name in (SOCKET, WATCHDOG_US, WATCHDOG_PID) if name in environment}
        return cls(environment.get(RELEASE, ""), environment.get(TRIAL) == "1", launcher, contract, manager)

    def again(self) -> NoReturn:
        """Become the launcher once more. Everything is to be closed and given back before."""
        os.execve(self.launcher[0], self.launcher, {**plain_environment(os.environ), **self.manager})


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Become the agent; the options are those of `edgesplit-agent run`."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    options = list(sys.argv[1:] if argv is None else argv)
    known = _parser().parse_known_args(options)[0]
    launcher = [sys.executable, "-m", MODULE, *options]
    versions, shelf = Versions(), Shelf(Path())
    if known.data is not None:  # else the agent says what is missing
        shelf = Shelf(known.data)
        versions = _begin(DataFolder(known.data), shelf)
    Manager.of(dict(os.environ)).alive()  # hundreds of files were read: the agent has its whole time to begin
    while True:
        command, environment = start_of(versions, shelf, options, launcher, os.environ)
        signal.alarm(math.ceil(known.trial_seconds) + STARTING_S if versions.trial else 0)
        try:
            os.execve(command[0], command, environment)
        except OSError as error:  # a file system that nothing may be started from, another machine's interpreter
            if not versions.running:
                raise
            log.error("agent release %s does not start: %s", versions.running[:12], error)
            versions = _kept(shelf, slots.damaged(versions, f"it cannot be started: {error.strerror}"))


def _begin(folder: DataFolder, shelf: Shelf) -> Versions:
    """What is to start, counted; where another agent holds the folder nothing is, and the one that starts says so."""
    try:
        folder.lock()
    except UsageError:
        return msgspec.structs.replace(shelf.read(), trial=slots.INSTALLED)
    try:
        return ready(shelf, __version__)
    finally:
        folder.release()


def ready(shelf: Shelf, installed: str) -> Versions:
    """Count this start, and see that what is to start is whole; what will start then."""
    versions = _kept(shelf, slots.begun(shelf.read(), installed))
    while versions.running and (trouble := shelf.damage(versions.running)):
        log.error("agent release %s does not start: %s", versions.running[:12], trouble)
        versions = _kept(shelf, slots.begun(slots.damaged(versions, trouble), installed))
    return versions


def _kept(shelf: Shelf, versions: Versions) -> Versions:
    """On disk. On one that cannot be written no start can be counted, so only what was found healthy is started."""
    if versions == shelf.read():
        return versions
    try:
        shelf.write(versions)
    except OSError as error:
        log.error("cannot write versions.json, so nothing is tried: %s", error.strerror)
        return msgspec.structs.replace(versions, trial=slots.INSTALLED)
    return versions


def start_of(
    versions: Versions, shelf: Shelf, options: Sequence[str], launcher: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The command that is the agent, and its environment."""
    told = {
        RELEASE: versions.running, TRIAL: "1" if versions.trial else "0", LAUNCHER: json.dumps(list(launcher)),
        CONTRACT_IS: str(CONTRACT),
    }  # fmt: skip
    # A version that came as a release sees nothing but itself: no folder of the user's, no module beside it.
    # And it writes nothing beside its modules, for `damage` to find.
    python = [str(shelf.python(versions.running)), "-I", "-B"] if versions.running else [sys.executable]
    inherited = plain_environment(environment)
    if versions.running:
        inherited = {name: value for name, value in inherited.items() if name not in _PYTHON}
        inherited |= {"PYTHONDONTWRITEBYTECODE": "1"}  # of the processes that it starts
    return [*python, "-m", "edgesplit_agent.main", "run", *options], {**inherited, **told}


def plain_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what a launcher has told."""
    return {name: value for name, value in environment.items() if name not in (*_OURS, "PYTHONDONTWRITEBYTECODE")}


def _parser() -> argparse.ArgumentParser:
    """The two options that the launcher itself goes by; all are the agent's to judge."""
    parser = argparse.ArgumentParser(prog="edgesplit-agent launch", add_help=False, allow_abbrev=False)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--trial-seconds", type=_seconds, default=TRIAL_S)
    return parser


def _seconds(text: str) -> float:
    """What is none is the agent's to refuse."""
    try:
        seconds = float(text)
    except ValueError:
        return TRIAL_S
    return seconds if 0 < seconds < 1e6 else TRIAL_S


if __name__ == "__main__":
    main()
