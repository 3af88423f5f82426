"""What a serving process gives up once it is set up, for good: new privileges, its place when memory is short, and the
network, but for connections that were accepted. Core dumps are forbidden in `main`."""

from __future__ import annotations

from edgesplit.process.confinement import cut_off_network, give_way_when_memory_is_short
from edgesplit.process.lifecycle import gain_no_privileges

OOM_SCORE_ADJUSTMENT = 500
"""It goes before the controller, the broker and the agent, and after processes that load unproven models (1000): it is
started again, and devices finish alone meanwhile."""
NO_SECCOMP = "this kernel has no seccomp filter (run on x86_64 or arm64)"


def confine_serving_process(network_needed_for: str = "") -> str:
    """Confine this process with all of its threads. Returns why it keeps its network, as `network_needed_for` or the
    kernel says; empty if it has given it up."""
    give_way_when_memory_is_short(OOM_SCORE_ADJUSTMENT)
    gain_no_privileges()
    return network_needed_for or ("" if cut_off_network() else NO_SECCOMP)
