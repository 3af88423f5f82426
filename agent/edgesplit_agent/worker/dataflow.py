"""Dataflow of a run of slices: the tensors it needs and the tensors it must return, from the manifest alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import Manifest, TensorSpec
from edgesplit_agent.worker.tensor_refs import aligned

GUESS_BYTES = 64 * 1024
"""Initial buffer for an output whose size is known only at run time."""


@dataclass
class Dataflow:
    """Dataflow of one order of slices."""

    reads: tuple[str, ...]
    """Tensors needed from outside."""
    returns: tuple[str, ...]
    """Outputs needed by a slice outside the order, or by the application."""
    room_bytes: int
    """Bytes of these outputs; increased when it proves too small."""
    decodes: bool
    """Whether an encoded frame is among the inputs."""


def dataflow_of(manifest: Manifest, order: Sequence[str]) -> Dataflow:
    """The dataflow of these slices in this order."""
    inside = [manifest.slice(name) for name in order]
    produced: dict[str, TensorSpec] = {}
    reads: dict[str, None] = {}
    for slice_ in inside:
        reads.update((spec.name, None) for spec in slice_.inputs if spec.name not in produced)
        produced.update((spec.name, spec) for spec in slice_.outputs)
    # Outputs that leave the run: the model's own, those of an early exit and scores, and the inputs of slices that run
    # elsewhere (the boundary tensors).
    needed = {spec.name for spec in manifest.outputs} | manifest.exit_outputs | manifest.score_outputs
    needed |= {name for variant in manifest.family for name in variant.outputs}
    needed |= {spec.name for slice_ in manifest.slices if slice_.name not in order for spec in slice_.inputs}
    wants = tuple(name for name in produced if name in needed)
    room = sum(_room_bytes(produced[name]) for name in wants)
    return Dataflow(tuple(reads), wants, room, any(slice_.format == "input" for slice_ in inside))


def _room_bytes(spec: TensorSpec) -> int:
    dtype = oip.DTYPES.get(spec.datatype)
    if dtype is None or dtype.hasobject or min(spec.shape, default=0) < 0:
        return GUESS_BYTES
    return aligned(math.prod(spec.shape) * dtype.itemsize)
