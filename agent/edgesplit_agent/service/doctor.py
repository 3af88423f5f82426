"""`edgesplit-agent doctor`: everything that an agent stands on, looked at one by one.

Reads; changes nothing and needs no running agent. Run it as the agent's user or as root.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from edgesplit.errors import EdgeError
from edgesplit_agent.power.sensors import ROOT as SYSFS
from edgesplit_agent.service.doctor_certificates import certificates, chain, claim, known_identity
from edgesplit_agent.service.doctor_device import agent_state, disk, files, memory, power, runtimes, system_service
from edgesplit_agent.service.doctor_findings import Finding, bad
from edgesplit_agent.service.doctor_network import way
from edgesplit_agent.service.doctor_version import versions
from edgesplit_agent.state.data_folder import DataFolder


def examine(data: Path, *, online: bool = True, sysfs: Path = SYSFS, now: float | None = None) -> list[Finding]:
    """All findings, in the order in which things depend on each other."""
    folder, now = DataFolder(data), time.time() if now is None else now
    looks: list[Callable[[], Iterator[Finding]]] = [lambda: files(folder)]
    identity = known_identity(folder)
    if identity is None:
        looks.append(lambda: claim(folder, now, online=online))
    else:
        known = identity
        looks += [lambda: certificates(folder, known, now), lambda: chain(folder, known, now)]
        if online:
            looks.append(lambda: way(folder, known, now))
    looks += [lambda: disk(folder), memory, lambda: power(sysfs), runtimes, system_service, lambda: versions(folder)]
    looks.append(lambda: agent_state(folder))
    return [finding for look in looks for finding in _safely(look)]


def _safely(look: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """A look that fails is a finding of its own: the others go on."""
    found: list[Finding] = []
    try:
        found.extend(look())
    except (EdgeError, OSError, ValueError) as error:
        found.append(bad("doctor", f"could not look further: {error}", "run it as root or as the agent's user"))
    return found
