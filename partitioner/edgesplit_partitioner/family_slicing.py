"""Slices and release plan of a family: each variant is cut by itself, and its slices get its name before theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from edgesplit.plan import Plan, Row, variant_name
from edgesplit.release.manifest import VARIANT_SLICE_MARK
from edgesplit_partitioner.slicing import CutSlice, to_release_plan

MAX_SLICE_NAME = 64


def own_table(table: Plan, variant: str) -> Plan:
    """A variant's rows of a family's table under their own names, as a table of that model alone."""
    prefix = variant_name(variant, "")

    def own(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name.removeprefix(prefix) for name in names)

    rows = tuple(
        msgspec.structs.replace(
            row, name=row.name.removeprefix(prefix), device=own(row.device), remote=own(row.remote),
            layers=own(row.layers),
            hops=tuple(msgspec.structs.replace(hop, remote=own(hop.remote)) for hop in row.hops),
        )
        for row in table.rows if row.variant == variant
    )  # fmt: skip
    return msgspec.structs.replace(table, rows=rows)


def variant_slices(variant: str, cut: Sequence[CutSlice]) -> list[CutSlice]:
    """A variant's slices as the family's manifest lists them."""
    return [
        replace(
            one, slice=msgspec.structs.replace(
                one.slice, name=_slice_name(variant, one.slice.name),
                layers=tuple(variant_name(variant, layer) for layer in one.slice.layers),
            ),
        )
        for one in cut
    ]  # fmt: skip


def to_family_plan(
    table: Plan, cuts: Mapping[str, Sequence[CutSlice]], layer_s: Mapping[str, Mapping[str, float]]
) -> Plan:
    """The family's table in slices instead of layers. `cuts` are each variant's slices under their own names, `layer_s`
    the seconds of its layers on this device class."""
    rows: dict[str, Row] = {}
    slice_s: dict[str, float] = {}
    for variant, cut in cuts.items():
        seconds = {one.slice.name: sum(layer_s[variant][layer] for layer in one.slice.layers) for one in cut}
        plan = to_release_plan(own_table(table, variant), cut, seconds)
        slice_s |= {_slice_name(variant, name): value for name, value in seconds.items()}
        rows |= {variant_name(variant, row.name): _in_family(row, variant) for row in plan.rows}
    return msgspec.structs.replace(table, rows=tuple(rows[row.name] for row in table.rows), slice_s=slice_s)


def _in_family(row: Row, variant: str) -> Row:
    """A row in slices, under the family's names."""

    def named(slices: Iterable[str]) -> tuple[str, ...]:
        return tuple(_slice_name(variant, name) for name in slices)

    hops = tuple(msgspec.structs.replace(hop, remote=named(hop.remote)) for hop in row.hops)
    return msgspec.structs.replace(
        row, name=variant_name(variant, row.name), device=named(row.device), remote=named(row.remote), hops=hops
    )


def _slice_name(variant: str, name: str) -> str:
    """The name of a variant's slice: its number makes it unique, so that the end may be left out."""
    return f"{variant}{VARIANT_SLICE_MARK}{name}"[:MAX_SLICE_NAME].rstrip("-._")
