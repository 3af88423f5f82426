"""Enrolment of a service, which runs unattended: waits for network and claim instead of ending, and erases a used claim
from the agent's data folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from edgesplit.atomic_files import sync_folder
from edgesplit.errors import MalformedMessage, TrustError, UsageError
from edgesplit.trust.identity import Claim
from edgesplit_agent.control.enrolment import enrol_with_retries, read_claim
from edgesplit_agent.host.sd_notify import ServiceManager
from edgesplit_agent.state.data_folder import DataFolder, Identity

log = logging.getLogger(__name__)

POLL_S = 5.0
"""Seconds between two looks for a claim."""
Wait = Callable[[float], bool]
"""Waits that many seconds; returns True when the agent is to stop."""


def enrol_as_service(
    folder: DataFolder,
    claim_file: Path,
    controller_url: str | None,
    wait: Wait,
    manager: ServiceManager,
    enrol: Callable[[DataFolder, Claim, str | None, Wait], Identity | None] = enrol_with_retries,
) -> Identity | None:
    """Become the device that the claim names. Where there is no claim, or it is refused, wait for another; None when
    the agent is to stop."""
    refused: tuple[int, int] | None = None
    manager.ready(f"enrolling with {claim_file}")
    while True:
        stamp = _stamp(claim_file)
        if stamp is None:
            manager.status(f"waiting for a claim at {claim_file}")
        elif stamp != refused:
            try:
                return enrol(folder, read_claim(claim_file), controller_url, wait)
            except (TrustError, MalformedMessage, UsageError) as error:
                refused = stamp
                log.error("cannot enrol: %s; put a new claim at %s (edgectl device claim)", error, claim_file)
                manager.status(f"waiting for a new claim at {claim_file}: {error}")
        manager.alive()
        if wait(POLL_S):
            return None


def discard_claim(claim_file: Path, folder: DataFolder, identity: Identity) -> None:
    """Erase a claim that lies in the data folder of an enrolled agent, also one for another device: it is not
    needed."""
    if not is_in_data_folder(claim_file, folder) or not claim_file.exists():
        return
    try:
        claimed_device = read_claim(claim_file).device
    except (MalformedMessage, UsageError):
        claimed_device = ""
    if claimed_device not in ("", identity.device):
        log.warning("already enrolled as %s: the claim for %s is deleted", identity.device, claimed_device)
    try:
        _overwrite_and_remove(claim_file)
    except OSError as error:
        log.warning("cannot delete the used claim %s: %s", claim_file, error.strerror)


def is_in_data_folder(claim_file: Path, folder: DataFolder) -> bool:
    """Whether the claim lies in the agent's data folder."""
    return claim_file.absolute().parent == folder.path.absolute()


def _overwrite_and_remove(file: Path) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.write(descriptor, b"\0" * os.fstat(descriptor).st_size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    file.unlink()
    sync_folder(file.parent)


def _stamp(file: Path) -> tuple[int, int] | None:
    """Modification time and inode, which change with the file; None where there is none."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
