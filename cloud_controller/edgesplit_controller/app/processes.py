"""Several processes of one controller: each with a number of its own, on this machine behind one listening socket.

A process takes the lowest number that is free, as a lease: its name at the broker follows from it. Further processes of
this machine are supervised children that inherit the listening socket, so that a connection waits for whoever accepts
it, also when one of them is killed. Further machines run `edgectl up --join`.

    python -m edgesplit_controller.app.processes --settings FILE --listener FD --die-with-parent PID
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edgesplit.atomic_files import write_durably
from edgesplit.errors import EdgeError, UsageError
from edgesplit.process.lifecycle import add_die_with_parent, end_with_parent
from edgesplit.process.supervised import Child
from edgesplit_controller.messaging.broker import CONTROLLERS
from edgesplit_controller.settings import PROCESSES, Settings
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.leases import Lease

READY = "process: ready"


@dataclass(frozen=True, slots=True)
class Place:
    """One of the numbers that the processes of a controller have."""

    number: int
    lease: Lease

    @property
    def broker_name(self) -> str:
        """Certificate name and client id at the broker."""
        return CONTROLLERS[self.number - 1]

    def file_name(self, kind: str) -> str:
        """Of credentials of that kind which this process alone uses."""
        return kind if self.number == 1 else f"{kind}.{self.number}"


def take_place(database: Database) -> Place:
    """The lowest number that is free, kept from now on."""
    for number in range(1, PROCESSES + 1):
        lease = Lease(database, f"process {number}")
        if lease.held():
            lease.keep()
            return Place(number, lease)
    raise UsageError(f"{PROCESSES} processes of this controller run already: stop one first")


def start_further(settings: Settings, listener: socket.socket, stack: ExitStack) -> None:
    """Start the further processes of this machine, and wait until they are ready. `settings` are theirs."""
    children = [_child(settings, number, listener.fileno()) for number in range(2, settings.processes + 1)]
    for child in children:
        stack.callback(child.stop)
    with ThreadPoolExecutor(len(children) or 1) as starting:
        list(starting.map(Child.start, children))


def _child(settings: Settings, number: int, listener: int) -> Child:
    metrics = settings.metrics and (settings.metrics[0], settings.metrics[1] + number - 1)
    folder = settings.data / "processes"
    file = folder / f"{number}.json"
    # Not among its words, which everybody may read: the database's URL may have a password.
    write_durably(file, encode_settings(replace(settings, processes=1, metrics=metrics)), mode=0o600)
    words = ["--settings", str(file), "--listener", str(listener), "--die-with-parent", str(os.getpid())]
    return Child(
        f"controller process {number}",
        [sys.executable, "-m", "edgesplit_controller.app.processes", *words],
        announces=READY,
        log_file=folder / f"{number}.log",
        pid_file=folder / f"{number}.pid",
        inherits=(listener,),
    )


def main(run: Callable[..., None], arguments: Sequence[str] | None = None) -> int:
    """A further process of this machine; `run` is `up.run`."""
    parser = argparse.ArgumentParser(prog="edgesplit_controller.app.processes")
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--listener", type=int, required=True)
    add_die_with_parent(parser)
    given = parser.parse_args(arguments)
    if given.die_with_parent is not None:
        end_with_parent(given.die_with_parent)
    try:
        settings = decode_settings(given.settings.read_bytes())
        run(settings, ready=lambda _: print(READY, flush=True), listener=socket.socket(fileno=given.listener))
    except EdgeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def encode_settings(settings: Settings) -> bytes:
    """For a further process."""
    return json.dumps(asdict(settings), default=str, indent=1).encode()


def decode_settings(raw: bytes) -> Settings:
    """What `encode_settings` wrote."""
    given: dict[str, Any] = json.loads(raw)
    values: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in given.items()}
    values["data"] = Path(given["data"])
    return Settings(**values)


if __name__ == "__main__":
    from edgesplit_controller.app.main import run as run_controller

    sys.exit(main(run_controller))
