"""Enrolment of a service, which nobody watches: it waits for network and claim instead of ending, and a claim that was
put into the agent's own folder is erased once it served.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from edgesplit.atomic_files import sync_folder
from edgesplit.errors import MalformedMessage, TrustError, UsageError
from edgesplit_agent.control.enrolment import enrol_patiently, read_claim
from edgesplit_agent.host.sd_notify import Manager
from edgesplit_agent.state.data_folder import DataFolder, Identity

log = logging.getLogger(__name__)

LOOK_S = 5.0
Wait = Callable[[float], bool]
"""Waits so many seconds; True: we shall stop."""


def enrol_as_service(
    folder: DataFolder, claim_file: Path, controller_url: str | None, wait: Wait, manager: Manager
) -> Identity | None:
    """Become the device that the claim names. Where there is no claim, or it is refused, another is waited for; None
    when we shall stop."""
    refused: tuple[int, int] | None = None
    manager.ready(f"enrolling with {claim_file}")
    while True:
        seen = _stamp(claim_file)
        if seen is None:
            manager.status(f"waiting for a claim at {claim_file}")
        elif seen != refused:
            try:
                return enrol_patiently(folder, read_claim(claim_file), controller_url, wait)
            except (TrustError, MalformedMessage, UsageError) as error:
                refused = seen
                log.error("cannot enrol: %s; put a new claim at %s (edgectl device claim)", error, claim_file)
                manager.status(f"waiting for a new claim at {claim_file}: {error}")
        manager.alive()
        if wait(LOOK_S):
            return None


def discard_claim(claim_file: Path, folder: DataFolder, identity: Identity) -> None:
    """Erase a claim that lies in the agent's own folder: whoever is enrolled needs none, not even another's."""
    if not is_own(claim_file, folder) or not claim_file.exists():
        return
    try:
        named = read_claim(claim_file).device
    except (MalformedMessage, UsageError):
        named = ""
    if named not in ("", identity.device):
        log.warning("this is %s and stays it: the claim for %s is erased", identity.device, named)
    try:
        _erase(claim_file)
    except OSError as error:
        log.warning("cannot erase the claim %s, which is used up: %s", claim_file, error.strerror)


def is_own(claim_file: Path, folder: DataFolder) -> bool:
    """Whether it lies in the agent's own folder."""
    return claim_file.absolute().parent == folder.path.absolute()


def _erase(file: Path) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.write(descriptor, b"\0" * os.fstat(descriptor).st_size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    file.unlink()
    sync_folder(file.parent)


def _stamp(file: Path) -> tuple[int, int] | None:
    """Changes where the file does; None where there is none."""
    try:
        seen = file.stat()
    except OSError:
        return None
    return seen.st_mtime_ns, seen.st_ino
