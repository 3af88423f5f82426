"""Several processes of one controller: each has a number, and those on one machine share one listening socket.

A process takes the lowest free number as a lease; its client name at the broker follows from it. Additional processes
on this machine are supervised children that inherit the listening socket, so that a connection waits in the kernel's
queue for any process that accepts it, also when one is killed. On other machines run `edgectl up --join`.

    python -m edgesplit_controller.app.child --settings FILE --listener FD --die-with-parent PID
"""

from __future__ import annotations

import json
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edgesplit.atomic_files import write_durably
from edgesplit.errors import UsageError
from edgesplit.process.supervised import SupervisedProcess
from edgesplit_controller.messaging.broker import CONTROLLERS
from edgesplit_controller.settings import MAX_PROCESSES, Settings
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.leases import Lease

READY = "process: ready"
"""Line that a child process prints once it is ready."""


@dataclass(frozen=True, slots=True)
class ProcessSlot:
    """The number of a controller process, held by a lease."""

    number: int
    lease: Lease

    @property
    def broker_name(self) -> str:
        """Certificate name and client id of this process at the broker."""
        return CONTROLLERS[self.number - 1]

    def file_name(self, kind: str) -> str:
        """File name of credentials of this kind that only this process uses."""
        return kind if self.number == 1 else f"{kind}.{self.number}"


def acquire_slot(database: Database) -> ProcessSlot:
    """Lease the lowest free number. UsageError if all `MAX_PROCESSES` are taken."""
    for number in range(1, MAX_PROCESSES + 1):
        lease = Lease(database, f"process {number}")
        if lease.held():
            lease.keep_renewed()
            return ProcessSlot(number, lease)
    raise UsageError(f"{MAX_PROCESSES} processes of this controller run already: stop one first")


def start_children(settings: Settings, listener: socket.socket, stack: ExitStack) -> None:
    """Start this machine's additional processes with `settings`, and wait until they are ready; `stack` stops them."""
    children = [_child(settings, number, listener.fileno()) for number in range(2, settings.processes + 1)]
    for child in children:
        stack.callback(child.stop)
    with ThreadPoolExecutor(len(children) or 1) as starting:
        list(starting.map(SupervisedProcess.start, children))


def _child(settings: Settings, number: int, listener: int) -> SupervisedProcess:
    metrics = settings.metrics and (settings.metrics[0], settings.metrics[1] + number - 1)
    folder = settings.data / "processes"
    file = folder / f"{number}.json"
    # In a file with mode 0600, not in the arguments, which every user can list: the database's URL may have a password.
    write_durably(file, encode_settings(replace(settings, processes=1, metrics=metrics)), mode=0o600)
    arguments = ["--settings", str(file), "--listener", str(listener), "--die-with-parent", str(os.getpid())]
    return SupervisedProcess(
        f"controller process {number}", [sys.executable, "-m", "edgesplit_controller.app.child", *arguments],
        ready_line=READY, log_file=folder / f"{number}.log", pid_file=folder / f"{number}.pid",
        inherited_fds=(listener,),
    )  # fmt: skip


def encode_settings(settings: Settings) -> bytes:
    """Settings as JSON for a child process."""
    return json.dumps(asdict(settings), default=str, indent=1).encode()


def decode_settings(raw: bytes) -> Settings:
    """Parse the output of `encode_settings`."""
    content: dict[str, Any] = json.loads(raw)
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
    }
    values["data"] = Path(content["data"])
    return Settings(**values)
