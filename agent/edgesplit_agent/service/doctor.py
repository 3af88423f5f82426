"""`edgesplit-agent doctor`: runs every check of the agent's environment, one by one.

Only reads, changes nothing, and needs no running agent. Run it as the agent's user or as root.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from edgesplit.errors import EdgeError
from edgesplit.observability.doctor_findings import Finding, bad
from edgesplit_agent.power.sensors import ROOT as SYSFS
from edgesplit_agent.service import doctor_certificates, doctor_device
from edgesplit_agent.service.doctor_network import check_servers
from edgesplit_agent.state.data_folder import DataFolder


def examine(data: Path, *, online: bool = True, sysfs: Path = SYSFS, now: float | None = None) -> list[Finding]:
    """The findings of all checks for the agent on that data folder. `online`: contact the servers too."""
    folder, now = DataFolder(data), time.time() if now is None else now
    checks: list[Callable[[], Iterator[Finding]]] = [partial(doctor_device.check_data_folder, folder)]
    identity = doctor_certificates.known_identity(folder)
    if identity is None:
        checks.append(partial(doctor_certificates.check_claim, folder, now, online=online))
    else:
        checks.append(partial(doctor_certificates.check_certificates, folder, identity, now))
        checks.append(partial(doctor_certificates.check_trust_chain, folder, identity, now))
        if online:
            checks.append(partial(check_servers, folder, identity, now))
    checks += [
        partial(doctor_device.check_disk, folder), doctor_device.check_memory,
        partial(doctor_device.check_power, sysfs), doctor_device.check_runtimes, doctor_device.check_confinement,
        doctor_device.check_service,
        partial(doctor_device.check_versions, folder), partial(doctor_device.check_agent, folder),
    ]  # fmt: skip
    return [finding for check in checks for finding in _run_check(check)]


def _run_check(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """The findings of one check; a check that fails is a finding of its own, and the others go on."""
    findings: list[Finding] = []
    try:
        findings.extend(check())
    except (EdgeError, OSError, ValueError) as error:
        findings.append(bad("doctor", f"the check failed: {error}", "run it as root or as the agent's user"))
    return findings
