"""Processes several machines in parallel, each in a thread of its own; a failure of one does not affect the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from edgesplit.errors import EdgeError
from edgesplit_provisioning.ssh.adopt import AdoptionResult
from edgesplit_provisioning.ssh.inventory import Host

MAX_PARALLEL = 8
"""Number of machines processed in parallel."""


@dataclass(frozen=True, slots=True)
class HostOutcome:
    """Result of one machine: adopted, or the error."""

    host: Host
    result: AdoptionResult | None = None
    error: EdgeError | None = None


def run_parallel(
    hosts: Sequence[Host], process: Callable[[Host], AdoptionResult], on_finished: Callable[[HostOutcome], None]
) -> list[HostOutcome]:
    """Call `process` for every machine. The outcomes are returned in the machines' order; `on_finished` is called for
    each as it completes."""

    def outcome(host: Host) -> HostOutcome:
        try:
            result = HostOutcome(host, result=process(host))
        except EdgeError as error:
            result = HostOutcome(host, error=error)
        on_finished(result)
        return result

    with ThreadPoolExecutor(max_workers=min(MAX_PARALLEL, len(hosts))) as pool:
        return list(pool.map(outcome, hosts))
