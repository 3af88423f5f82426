"""The list of devices beside an encrypted release in an offload server's folder, `releases/<digest>/devices.txt`: who
was given content keys of it, and may use its remote half. One name a line; the controller appends to it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from edgesplit.atomic_files import write_durably

PERMITTED_FILE = "devices.txt"
_MODE = 0o644


def write_permitted(release_folder: Path, devices: Iterable[str]) -> None:
    """Replace the list."""
    write_durably(release_folder / PERMITTED_FILE, _lines(devices), _MODE)


def append_permitted(release_folder: Path, devices: Iterable[str]) -> None:
    """Append devices to the list, which is created where there is none. Not durable by itself: the controller completes
    the lists when it starts."""
    descriptor = os.open(release_folder / PERMITTED_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, _MODE)
    try:
        os.write(descriptor, _lines(devices))
    finally:
        os.close(descriptor)


def read_permitted(release_folder: Path) -> frozenset[str]:
    """The devices in the list, without a line that is incomplete. OSError if it cannot be read."""
    lines = (release_folder / PERMITTED_FILE).read_bytes().split(b"\n")[:-1]
    return frozenset(line.decode("ascii", errors="replace") for line in lines)


def _lines(devices: Iterable[str]) -> bytes:
    return "".join(f"{name}\n" for name in sorted(devices)).encode()
