"""`edgesplit-agent doctor`: runs every check of the agent's environment, one by one.

Only reads, changes nothing, and needs no running agent. Run it as the agent's user or as root.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from edgesplit.errors import EdgeError
from edgesplit.observability.doctor_findings import Finding, bad
from edgesplit_agent.power.sensors import ROOT as SYSFS
from edgesplit_agent.service.doctor_certificates import (
    check_certificates,
    check_claim,
    check_trust_chain,
    known_identity,
)
from edgesplit_agent.service.doctor_device import (
    check_agent,
    check_data_folder,
    check_disk,
    check_memory,
    check_power,
    check_runtimes,
    check_service,
)
from edgesplit_agent.service.doctor_network import check_servers
from edgesplit_agent.service.doctor_version import check_versions
from edgesplit_agent.state.data_folder import DataFolder


def examine(data: Path, *, online: bool = True, sysfs: Path = SYSFS, now: float | None = None) -> list[Finding]:
    """The findings of all checks for the agent on that data folder. `online`: contact the servers too."""
    folder, now = DataFolder(data), time.time() if now is None else now
    checks: list[Callable[[], Iterator[Finding]]] = [lambda: check_data_folder(folder)]
    identity = known_identity(folder)
    if identity is None:
        checks.append(lambda: check_claim(folder, now, online=online))
    else:
        enrolled = identity
        checks += [lambda: check_certificates(folder, enrolled, now), lambda: check_trust_chain(folder, enrolled, now)]
        if online:
            checks.append(lambda: check_servers(folder, enrolled, now))
    checks += [
        lambda: check_disk(folder),
        check_memory,
        lambda: check_power(sysfs),
        check_runtimes,
        check_service,
        lambda: check_versions(folder),
    ]
    checks.append(lambda: check_agent(folder))
    return [finding for check in checks for finding in _run_check(check)]


def _run_check(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """The findings of one check; a check that fails is a finding of its own, and the others go on."""
    findings: list[Finding] = []
    try:
        findings.extend(check())
    except (EdgeError, OSError, ValueError) as error:
        findings.append(bad("doctor", f"could not look further: {error}", "run it as root or as the agent's user"))
    return findings
