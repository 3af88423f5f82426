"""Privacy floor: the tensors and layers that must stay on the device, by the plan and by the device's own
configuration.

A plan's floor is signed with it (`Plan.private_tensors`, `Plan.required_local_layers`),
and every reader of a manifest checks its
rows against it. A device can have a floor of its own, which no plan overrides: it protects against a stolen planner key
as well as against an operator's mistake. Both refer to tensors and layers by name: the holder of the release key, who
may sign a whole model, could also sign one that hides its input in another tensor.
"""

from __future__ import annotations

from itertools import chain, islice

import msgspec

from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.plan import Plan, Row
from edgesplit.release.manifest import Manifest


class PrivacyFloor(msgspec.Struct, frozen=True, kw_only=True):
    """A device's own privacy floor."""

    keep_raw_input: bool = False
    """The raw input, and the tensor that the input spec makes of it, do not leave the device."""
    keep_first: int = 0
    """Number of layers, in the release's order, of a family of each variant, that run on the device before any tensor
    leaves it."""

    def to_text(self) -> str:
        """The floor for display; empty where it requires nothing."""
        parts = ["raw input stays"] if self.keep_raw_input else []
        parts += [f"first {self.keep_first} layers stay"] if self.keep_first else []
        return ", ".join(parts)


def raw_input_tensors(manifest: Manifest) -> frozenset[str]:
    """Names of the model's inputs and of the tensors that the input slice decodes."""
    decoded = (spec.name for slice_ in manifest.slices if slice_.format == "input" for spec in slice_.outputs)
    return frozenset(chain((spec.name for spec in manifest.inputs), decoded))


def private_tensors(plan: Plan, manifest: Manifest, floor: PrivacyFloor) -> frozenset[str]:
    """Names of the tensors that may not leave the device, by the plan or by the device's own floor."""
    return frozenset(plan.private_tensors) | (raw_input_tensors(manifest) if floor.keep_raw_input else frozenset())


def floor_violation(row: Row, plan: Plan, manifest: Manifest, floor: PrivacyFloor) -> str:
    """Why this row violates the plan's or the device's privacy floor; empty where it does not."""
    if row.is_local:
        return ""
    if leaked := sorted(private_tensors(plan, manifest, floor) & set(row.sends)):
        return f"it sends {', '.join(leaked)}, which may never leave this device"
    on_device = set(row.device)
    local_layers = {layer for slice_ in manifest.slices if slice_.name in on_device for layer in slice_.layers}
    own = manifest.slices_of(row.variant)
    first = islice((layer for slice_ in own for layer in slice_.layers), floor.keep_first)
    missing = [layer for layer in chain(plan.required_layers(row), first) if layer not in local_layers]
    return f"layer {missing[0]!r} must run on this device before anything leaves" if missing else ""


warm_up_structs(__name__)
