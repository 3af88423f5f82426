"""`edgesplit-agent launch`: replaces this process with the version of the agent that is to run.

Stable and small, because it belongs to the installed version, which no update changes. It counts the start on disk
before anything of another version is loaded, compares that version's files with what was installed, and becomes the
agent by `exec`, so that a supervisor (systemd, `supervise`, a shell) sees one process throughout. An agent that wants
to run another version becomes this launcher again. A version on trial gets an alarm that survives the `exec`: one that
hangs, so that it neither commits nor rolls back, is ended by the kernel, and its start counts as unhealthy.
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
from edgesplit_agent.host.sd_notify import SOCKET, WATCHDOG_PID, WATCHDOG_US, ServiceManager
from edgesplit_agent.self_update import version_slots
from edgesplit_agent.self_update.trial import TRIAL_S
from edgesplit_agent.self_update.version_slots import Versions
from edgesplit_agent.self_update.version_store import VersionStore
from edgesplit_agent.state.data_folder import DataFolder

log = logging.getLogger(__name__)

CONTRACT = 1
"""Version of the interface between the launcher and the versions that it starts; raised when a later version needs
something new from the launcher."""
STARTING_S = 180
"""Seconds that a version on trial may take to load on a slow card; added to the alarm, before the time of the trial
itself."""
MODULE = "edgesplit_agent.self_update.launcher"
"""Module that is started again to select a version: this one."""
RELEASE, TRIAL = "EDGESPLIT_AGENT_RELEASE", "EDGESPLIT_AGENT_TRIAL"
LAUNCHER, LAUNCHER_CONTRACT = "EDGESPLIT_AGENT_LAUNCHER", "EDGESPLIT_AGENT_CONTRACT"
"""Environment variables for the started version: its release, whether it is on trial, the launcher's command line
(JSON), and `CONTRACT`."""
_LAUNCHER_VARIABLES = (RELEASE, TRIAL, LAUNCHER, LAUNCHER_CONTRACT)
_PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """What the launcher passed to this process by the environment."""

    release: str
    """Release of this version; empty for the installed version."""
    on_trial: bool
    """This version has not been found healthy yet."""
    launcher: tuple[str, ...]
    """Command line that starts the launcher again."""
    contract: int
    """`CONTRACT` of the launcher."""
    manager: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the service manager's notification socket, which the agent removes from its own
    environment."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> LaunchContext | None:
        """Parse the environment; None for an agent that no launcher started, which cannot change its version."""
        try:
            launcher = msgspec.json.decode(environment[LAUNCHER], type=tuple[str, ...])
            contract = int(environment[LAUNCHER_CONTRACT])
        except (KeyError, ValueError, msgspec.MsgspecError):
            return None
        manager = {name: environment[name] for name in (SOCKET, WATCHDOG_US, WATCHDOG_PID) if name in environment}
        return cls(environment.get(RELEASE, ""), environment.get(TRIAL) == "1", launcher, contract, manager)

    def relaunch(self) -> NoReturn:
        """Replace this process with the launcher. Everything must be closed and released before."""
        os.execve(self.launcher[0], self.launcher, {**without_launcher_variables(os.environ), **self.manager})


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Become the agent; the options are those of `edgesplit-agent run`."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    options = list(sys.argv[1:] if argv is None else argv)
    known_options = _parser().parse_known_args(options)[0]
    launcher = [sys.executable, "-m", MODULE, *options]
    versions, store = Versions(), VersionStore(Path())
    if known_options.data is not None:  # otherwise the agent reports the missing option
        store = VersionStore(known_options.data)
        versions = _select_version(DataFolder(known_options.data), store)
    # Checking the files took time: restart the watchdog for the agent.
    ServiceManager.from_environment(dict(os.environ)).alive()
    while True:
        command, environment = start_command(versions, store, options, launcher, os.environ)
        # An alarm survives exec: the kernel ends a version on trial that hangs (SIGALRM), unless it commits and
        # cancels the alarm first.
        signal.alarm(math.ceil(known_options.trial_seconds) + STARTING_S if versions.trial else 0)
        try:
            os.execve(command[0], command, environment)
        except OSError as error:  # a file system mounted noexec, or an interpreter of another machine
            if not versions.running:
                raise
            log.error("agent release %s does not start: %s", versions.running[:12], error)
            versions = _persisted(store, version_slots.with_damage(versions, f"it cannot be started: {error.strerror}"))


def _select_version(folder: DataFolder, store: VersionStore) -> Versions:
    """Count the start and return what to start. Where another agent holds the folder nothing is counted or tried; the
    agent that starts then reports that."""
    try:
        folder.lock()
    except UsageError:
        return msgspec.structs.replace(store.read(), trial=version_slots.INSTALLED)
    try:
        return prepare_start(store, __version__)
    finally:
        folder.release()


def prepare_start(store: VersionStore, installed: str) -> Versions:
    """Count this start and check the files of the version that is to start, falling back until one is undamaged; the
    state to start from."""
    versions = _persisted(store, version_slots.with_start_counted(store.read(), installed))
    # Each round removes the damaged version from the state, so the loop ends at the installed version at the latest.
    # `with_start_counted` again: the start is one of the version that will actually run.
    while versions.running and (trouble := store.damage(versions.running)):
        log.error("agent release %s does not start: %s", versions.running[:12], trouble)
        versions = _persisted(
            store, version_slots.with_start_counted(version_slots.with_damage(versions, trouble), installed)
        )
    return versions


def _persisted(store: VersionStore, versions: Versions) -> Versions:
    """Write `versions` where it differs from the state on disk. Where the disk refuses, no start can be counted, so the
    version on trial is left out of the result and only a version that was found healthy starts."""
    if versions == store.read():
        return versions
    try:
        store.write(versions)
    except OSError as error:
        log.error("cannot write versions.json, so no version is put on trial: %s", error.strerror)
        return msgspec.structs.replace(versions, trial=version_slots.INSTALLED)
    return versions


def start_command(
    versions: Versions,
    store: VersionStore,
    options: Sequence[str],
    launcher: Sequence[str],
    environment: Mapping[str, str],
) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of the agent that is to start."""
    context = {
        RELEASE: versions.running, TRIAL: "1" if versions.trial else "0", LAUNCHER: json.dumps(list(launcher)),
        LAUNCHER_CONTRACT: str(CONTRACT),
    }  # fmt: skip
    # A version that came as a release imports only its own modules: -I ignores PYTHON* variables and the user's
    # site-packages. -B: bytecode files beside its modules would count as damage (`VersionStore.damage`).
    python = [str(store.python(versions.running)), "-I", "-B"] if versions.running else [sys.executable]
    inherited = without_launcher_variables(environment)
    if versions.running:
        inherited = {name: value for name, value in inherited.items() if name not in _PYTHON_VARIABLES}
        inherited |= {"PYTHONDONTWRITEBYTECODE": "1"}  # -B for the processes that the agent starts
    return [*python, "-m", "edgesplit_agent.main", "run", *options], {**inherited, **context}


def without_launcher_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without the variables that a launcher sets."""
    dropped = (*_LAUNCHER_VARIABLES, "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in environment.items() if name not in dropped}


def _parser() -> argparse.ArgumentParser:
    """Parser of the two options that the launcher itself needs; the agent validates all of them."""
    parser = argparse.ArgumentParser(prog="edgesplit-agent launch", add_help=False, allow_abbrev=False)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--trial-seconds", type=_seconds, default=TRIAL_S)
    return parser


def _seconds(text: str) -> float:
    """Seconds of the trial, or the default where `text` is invalid, which the agent then refuses."""
    try:
        seconds = float(text)
    except ValueError:
        return TRIAL_S
    return seconds if 0 < seconds < 1e6 else TRIAL_S


if __name__ == "__main__":
    main()
