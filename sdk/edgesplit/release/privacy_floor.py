"""The privacy floor: what must stay on the device, as the plan states it and as the device itself demands.

A plan's floor is signed with it (`Plan.never_leaves`, `Plan.earliest_cut`) and every reader of a manifest checks its
rows against it. A device may be given one of its own, which no plan lowers: it holds against a planner that was robbed
of its key as well as against an operator's slip. Both go by the names of tensors and layers: whoever may sign a whole
model may also sign one that hides its input in another tensor.
"""

from __future__ import annotations

from itertools import chain, islice

import msgspec

from edgesplit.msgspec_warmup import settle
from edgesplit.plan import Plan, Row
from edgesplit.release.manifest import Manifest


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """What one device lets nobody have."""

    keep_raw_input: bool = False
    """What the application gives, and what the input spec makes of it, does not leave."""
    keep_first: int = 0
    """So many layers, in the order in which the release runs them, run on the device before anything leaves."""

    def as_text(self) -> str:
        """As a person reads it; empty where it demands nothing."""
        parts = ["raw input stays"] if self.keep_raw_input else []
        parts += [f"first {self.keep_first} layers stay"] if self.keep_first else []
        return ", ".join(parts)


def raw_tensors(manifest: Manifest) -> frozenset[str]:
    """What an application gives, and what decoding makes of it."""
    decoded = (spec.name for one in manifest.slices if one.format == "input" for spec in one.outputs)
    return frozenset(chain((spec.name for spec in manifest.inputs), decoded))


def breach(row: Row, plan: Plan, manifest: Manifest, floor: Floor) -> str:
    """Why this row goes below the plan's floor or the device's own; empty where it does not."""
    if row.is_local:
        return ""
    private = set(plan.never_leaves) | (raw_tensors(manifest) if floor.keep_raw_input else set())
    if sent := sorted(private & set(row.sends)):
        return f"it sends {', '.join(sent)}, which may never leave this device"
    on_device = set(row.device)
    here = {layer for one in manifest.slices if one.name in on_device for layer in one.layers}
    first = islice((layer for one in manifest.slices for layer in one.layers), floor.keep_first)
    missing = [layer for layer in chain(plan.earliest_cut, first) if layer not in here]
    return f"layer {missing[0]!r} must run on this device before anything leaves" if missing else ""


settle(__name__)
