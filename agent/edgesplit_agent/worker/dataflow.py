"""What goes into a run of slices and what must come out of it: tensors by name, from the manifest alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import Manifest, TensorSpec
from edgesplit_agent.worker.tensor_refs import aligned

GUESS_BYTES = 64 * 1024
"""Room for an output whose size only the run tells."""


@dataclass
class Flow:
    """Of one order of slices."""

    reads: tuple[str, ...]
    """Tensors that it needs from outside."""
    wants: tuple[str, ...]
    """Those of its outputs that somebody needs who is not in it."""
    room_bytes: int
    """That they take; grows where it proves too small."""
    decodes: bool
    """A frame is among what it reads."""


def flow_of(manifest: Manifest, order: Sequence[str]) -> Flow:
    """What these slices, in this order, take and give."""
    inside = [manifest.slice(name) for name in order]
    made: dict[str, TensorSpec] = {}
    reads: dict[str, None] = {}
    for one in inside:
        reads.update((spec.name, None) for spec in one.inputs if spec.name not in made)
        made.update((spec.name, spec) for spec in one.outputs)
    # What a row sends is what slices read that do not run here.
    needed = {spec.name for spec in manifest.outputs}
    needed |= {spec.name for one in manifest.slices if one.name not in order for spec in one.inputs}
    wants = tuple(name for name in made if name in needed)
    room = sum(_room_bytes(made[name]) for name in wants)
    return Flow(tuple(reads), wants, room, any(one.format == "input" for one in inside))


def _room_bytes(spec: TensorSpec) -> int:
    dtype = oip.DTYPES.get(spec.datatype)
    if dtype is None or dtype.hasobject or min(spec.shape, default=0) < 0:
        return GUESS_BYTES
    return aligned(math.prod(spec.shape) * dtype.itemsize)
