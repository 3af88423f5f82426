"""Several machines at once: each by a thread of its own, none of them held up by another's failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from edgesplit.errors import EdgeError
from edgesplit_provisioning.ssh.adopt import Adopted
from edgesplit_provisioning.ssh.inventory import Host

AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one machine: adopted, or why not."""

    host: Host
    adopted: Adopted | None = None
    error: EdgeError | None = None


def each(hosts: Sequence[Host], one: Callable[[Host], Adopted], finished: Callable[[Outcome], None]) -> list[Outcome]:
    """`one` for every machine; the outcomes in the machines' order, each told as it comes."""

    def outcome(host: Host) -> Outcome:
        try:
            result = Outcome(host, adopted=one(host))
        except EdgeError as error:
            result = Outcome(host, error=error)
        finished(result)
        return result

    with ThreadPoolExecutor(max_workers=min(AT_ONCE, len(hosts))) as pool:
        return list(pool.map(outcome, hosts))
