"""What was found about one plan on one class of devices: what it assumed, what was measured, and what that asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from edgesplit.plan import Plan, Row
from edgesplit_controller.replan.decide import Verdict
from edgesplit_controller.replan.evidence import Voice
from edgesplit_controller.replan.policy import Policy
from edgesplit_controller.storage.database import Model
from edgesplit_partitioner.costs.from_telemetry import Measured

Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Target:
    """A device, as far as it matters here."""

    name: str
    group: str


@dataclass(frozen=True, slots=True)
class Unit:
    """Devices of one class that shall run one release, under one policy: they get another table together."""

    model: Model
    release: str
    device_class: str
    policy: Policy
    targets: tuple[Target, ...]

    @property
    def key(self) -> Key:
        """Release, class, and the group of its policy: no two units share it."""
        return self.release, self.device_class, self.policy.group

    @property
    def names(self) -> list[str]:
        """Of its devices."""
        return sorted(target.name for target in self.targets)


@dataclass(frozen=True, slots=True)
class Finding:
    """What is known of a unit now."""

    unit: Unit
    plan: Plan
    """In use."""
    measured: Measured | None
    """None: no device has told anything of it."""
    note: str
    """Why nothing can be said, or nothing can be done; empty where there is a verdict."""
    voices: tuple[Voice, ...] = ()
    verdict: Verdict | None = None
    table: Plan | None = None
    """The other one."""


def drift(plan: Plan, seen: Measured, layers: Mapping[str, tuple[str, ...]]) -> list[dict[str, Any]]:
    """What the plan assumed beside what was measured, each with its factor."""
    assumed, found = plan.link, seen.link
    pairs = [
        ("uplink", "bytes/s", assumed.up_bytes_per_s, found.up_bytes_per_s),
        ("downlink", "bytes/s", assumed.down_bytes_per_s, found.down_bytes_per_s),
        ("round trip", "s", assumed.rtt_s, found.rtt_s),
        *_device_pairs(plan, seen, layers),
        *_server_pairs(plan, seen, layers),
    ]
    return [
        {"what": what, "unit": unit, "assumed": one, "measured": other, "factor": other / one if one > 0 else None}
        for what, unit, one, other in pairs
    ]


def _device_pairs(
    plan: Plan, seen: Measured, layers: Mapping[str, tuple[str, ...]]
) -> list[tuple[str, str, float, float]]:
    """The device's slices, those of which something is known."""
    names = {tuple(held): name for name, held in layers.items()}
    told = [(names[group.layers], group.seconds) for group in seen.device if group.layers in names]
    return [(f"device {name}", "s", plan.slice_s[name], seconds) for name, seconds in told if name in plan.slice_s]


def _server_pairs(
    plan: Plan, seen: Measured, layers: Mapping[str, tuple[str, ...]]
) -> list[tuple[str, str, float, float]]:
    """The server's part of rows."""
    held = {row.name: tuple(layer for name in row.remote for layer in layers.get(name, ())) for row in plan.rows}
    found = []
    for group in seen.remote:
        row = next((row for row in plan.rows if held[row.name] == group.layers), None)
        if row is not None:
            found.append((f"server {row.name}", "s", row.remote_s, group.seconds))
    for one in seen.sent:
        crossing = (
            row for row in plan.rows if (row.sends, row.codecs, row.compress) == (one.tensors, one.codecs, one.compress)
        )
        found += [(f"sent by {row.name}", "bytes", float(row.up_bytes), one.bytes) for row in crossing]
    return [*found, ("server beside the layers", "s", 0.0, seen.fixed_s)] if seen.remote else found


def shown_rows(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows for people: where they cut and what they take."""
    return [
        {
            "name": row.name,
            "after": row.after,
            "device_s": row.device_s,
            "remote_s": row.remote_s,
            "up_bytes": row.up_bytes,
            **({"codecs": row.codecs} if row.codecs else {}),
        }
        for row in rows
    ]


def shown(finding: Finding, layers: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """For people and scripts."""
    unit, seen = finding.unit, finding.measured
    verdict = {} if finding.verdict is None else predicted(finding.verdict)
    return {
        "model": unit.model.ref,
        "release": unit.release,
        "device_class": unit.device_class,
        "group": unit.policy.group or None,
        "policy": unit.policy.mode,
        "devices": unit.names,
        "heard": seen.devices if seen else 0,
        "basis": seen.basis if seen else None,
        "drift": drift(finding.plan, seen, layers) if seen else [],
        "note": finding.note,
        "moves": bool(finding.verdict and finding.verdict.moves),
        **verdict,
        "rows": shown_rows(finding.plan.rows),
        "proposed_rows": shown_rows(finding.table.rows) if finding.table else [],
    }


def predicted(verdict: Verdict) -> dict[str, Any]:
    """A verdict for people and scripts: every figure in it is a prediction from what was measured."""
    return {
        "why": verdict.why,
        "gain": verdict.gain,
        "gain_between": [verdict.gain_low, verdict.gain_high],
        "broken_limits": {"now": verdict.broken_before, "then": verdict.broken_after},
        "seconds": {"now": verdict.old_s, "then": verdict.new_s},
    }


def proposal_told(finding: Finding, layers: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """What a proposal keeps to be read."""
    whole = shown(finding, layers)
    kept = ("why", "gain", "gain_between", "broken_limits", "seconds", "heard", "basis", "drift", "rows")
    return {**{name: whole[name] for name in kept}, "proposed_rows": whole["proposed_rows"]}
