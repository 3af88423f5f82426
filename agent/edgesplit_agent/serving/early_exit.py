"""Tensors at an early exit: the early answer under the release's output, and what the rest needs of a request that goes
on behind it. See docs/decisions/0070-early-exits.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgesplit.errors import InferenceFailed
from edgesplit.lazy_import import np
from edgesplit.runtime import Tensor
from edgesplit_agent.releases.loaded_release import LoadedRelease
from edgesplit_agent.serving.request import Computed


def exit_outputs(release: LoadedRelease, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The release's output with the values of the early exit, in the output's shape. InferenceFailed where the exit has
    not as many values as the output."""
    cascade, output = release.plan.cascade, release.outputs[0]
    assert cascade is not None
    try:
        return {output.name: np.reshape(live[cascade.exit_output], output.shape)}
    except (KeyError, ValueError) as error:
        raise InferenceFailed(f"the early exit {cascade.exit_output!r} gives no {output.name!r}: {error}") from error


def kept_boundary(release: LoadedRelease, computed: Computed) -> Computed:
    """What the slices behind the exit need of it, copied: an application and the worker may use the memory again."""
    behind = (slice_ for slice_ in release.manifest.slices if slice_.name not in computed.slices)
    needed = {spec.name for slice_ in behind for spec in slice_.inputs}
    kept = {name: np.array(tensor) for name, tensor in computed.live.items() if name in needed}
    return Computed(computed.slices, kept)
