"""A variant's part of a family's release that devices run (pure): its rows, and its slices by the layers of its own
model, so that what devices measured of them counts for that model."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from edgesplit.plan import Plan, variant_name
from edgesplit.release.manifest import Manifest


@dataclass(frozen=True, slots=True)
class PlanInUse:
    """A plan that devices run, and the layers of each slice of its rows."""

    plan: Plan
    layers: dict[str, tuple[str, ...]]


def variant_of(manifest: Manifest, model: str) -> str | None:
    """Name of the variant of a release that is the model `name@version`; empty for a release of that model alone, None
    where it has nothing of it."""
    if not manifest.family:
        return "" if manifest.model == model else None
    return next((variant.name for variant in manifest.family if variant.model == model), None)


def plan_in_use(manifest: Manifest, device_class: str, variant: str) -> PlanInUse | None:
    """The plan for the class, of a variant only its rows and slices, with its layers under their own names; None where
    the release has no plan for the class."""
    plan = manifest.plans.get(device_class)
    if plan is None:
        return None
    if not variant:
        return PlanInUse(plan, {piece.name: piece.layers for piece in manifest.slices})
    prefix = variant_name(variant, "")
    layers = {
        piece.name: tuple(layer.removeprefix(prefix) for layer in piece.layers)
        for piece in manifest.slices_of(variant)
    }  # fmt: skip
    rows = tuple(row for row in plan.rows if row.variant == variant)
    seconds = {name: value for name, value in plan.slice_s.items() if name in layers}
    return PlanInUse(msgspec.structs.replace(plan, rows=rows, slice_s=seconds), layers)
