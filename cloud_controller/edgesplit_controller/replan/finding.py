"""Comparison of one plan's assumptions with the measurements of one device class, and the resulting verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from edgesplit.plan import Plan, Row
from edgesplit_controller.replan.decide import Verdict
from edgesplit_controller.replan.evidence import DeviceMeasurements
from edgesplit_controller.replan.policy import Policy
from edgesplit_controller.storage.tables.core import Model
from edgesplit_partitioner.costs.from_telemetry import FieldMeasurements

Key = tuple[str, str, str]
"""Release, device class and group of the policy."""


@dataclass(frozen=True, slots=True)
class UnitDevice:
    """Name and group of a device."""

    name: str
    group: str


@dataclass(frozen=True, slots=True)
class Unit:
    """Devices of one class that run one release under one policy. They are replanned together."""

    model: Model
    release: str
    device_class: str
    policy: Policy
    devices: tuple[UnitDevice, ...]

    @property
    def key(self) -> Key:
        """Release, device class, and group of the policy; unique among units."""
        return self.release, self.device_class, self.policy.group

    @property
    def names(self) -> list[str]:
        """Names of its devices, sorted."""
        return sorted(target.name for target in self.devices)


@dataclass(frozen=True, slots=True)
class Finding:
    """What is known of a unit now."""

    unit: Unit
    plan: Plan
    """The plan in use."""
    measured: FieldMeasurements | None
    """Estimates for the class; None if no device has reported measurements."""
    note: str
    """Why there is no verdict; empty where there is one."""
    devices: tuple[DeviceMeasurements, ...] = ()
    verdict: Verdict | None = None
    table: Plan | None = None
    """The other plan table."""


def drift(plan: Plan, measured: FieldMeasurements, layers: Mapping[str, tuple[str, ...]]) -> list[dict[str, Any]]:
    """Assumed and measured values of the plan, each with their ratio."""
    assumed, measured_link = plan.link, measured.link
    pairs = [
        ("uplink", "bytes/s", assumed.up_bytes_per_s, measured_link.up_bytes_per_s),
        ("downlink", "bytes/s", assumed.down_bytes_per_s, measured_link.down_bytes_per_s),
        ("round trip", "s", assumed.rtt_s, measured_link.rtt_s),
        *_device_pairs(plan, measured, layers),
        *_server_pairs(plan, measured, layers),
    ]
    return [
        {
            "quantity": quantity, "unit": unit, "assumed": assumed_value, "measured": measured_value,
            "factor": measured_value / assumed_value if assumed_value > 0 else None,
        }
        for quantity, unit, assumed_value, measured_value in pairs
    ]  # fmt: skip


def _device_pairs(
    plan: Plan, seen: FieldMeasurements, layers: Mapping[str, tuple[str, ...]]
) -> list[tuple[str, str, float, float]]:
    """Assumed and measured seconds of those slices on the device that were measured."""
    names = {tuple(slice_layers): name for name, slice_layers in layers.items()}
    timings = [(names[group.layers], group.seconds) for group in seen.device if group.layers in names]
    return [(f"device {name}", "s", plan.slice_s[name], seconds) for name, seconds in timings if name in plan.slice_s]


def _server_pairs(
    plan: Plan, seen: FieldMeasurements, layers: Mapping[str, tuple[str, ...]]
) -> list[tuple[str, str, float, float]]:
    """Assumed and measured values of the server's part of rows."""
    remote_layers = {
        row.name: tuple(layer for name in row.remote for layer in layers.get(name, ())) for row in plan.rows
    }
    pairs = []
    for group in seen.remote:
        row = next((row for row in plan.rows if remote_layers[row.name] == group.layers), None)
        if row is not None:
            pairs.append((f"server {row.name}", "s", row.remote_s, group.seconds))
    planned_bytes = {row.name: float(row.up_bytes) for row in plan.rows}
    pairs += [
        (f"sent by {sent.row}", "bytes", planned_bytes[sent.row], sent.bytes)
        for sent in seen.sent if sent.row in planned_bytes
    ]  # fmt: skip
    return [*pairs, ("server overhead beside the layers", "s", 0.0, seen.fixed_s)] if seen.remote else pairs


def row_views(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows as JSON: where they cut and their costs."""
    return [
        {
            "name": row.name, "split_after": row.split_after, "device_s": row.device_s, "remote_s": row.remote_s,
            "up_bytes": row.up_bytes, **({"codecs": row.codecs} if row.codecs else {}),
        }
        for row in rows
    ]  # fmt: skip


def finding_view(finding: Finding, layers: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """A finding as JSON."""
    unit, seen = finding.unit, finding.measured
    verdict = {} if finding.verdict is None else verdict_view(finding.verdict)
    return {
        "model": unit.model.ref, "release": unit.release, "device_class": unit.device_class,
        "group": unit.policy.group or None, "policy": unit.policy.mode, "devices": unit.names,
        "measured_devices": seen.devices if seen else 0, "basis": seen.basis if seen else None,
        "drift": drift(finding.plan, seen, layers) if seen else [], "note": finding.note,
        "moves": bool(finding.verdict and finding.verdict.moves), **verdict, "rows": row_views(finding.plan.rows),
        "proposed_rows": row_views(finding.table.rows) if finding.table else [],
    }  # fmt: skip


def verdict_view(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON; its figures are predictions from what was measured."""
    return {
        "reason": verdict.reason,
        "gain": verdict.gain,
        "gain_between": [verdict.gain_low, verdict.gain_high],
        "broken_limits": {"now": verdict.broken_before, "then": verdict.broken_after},
        "seconds": {"now": verdict.old_s, "then": verdict.new_s},
    }


def stored_view(finding: Finding, layers: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """The part of a finding that is stored with a proposal."""
    view = finding_view(finding, layers)
    fields = (
        "reason",
        "gain",
        "gain_between",
        "broken_limits",
        "seconds",
        "measured_devices",
        "basis",
        "drift",
        "rows",
    )
    return {**{name: view[name] for name in fields}, "proposed_rows": view["proposed_rows"]}
