"""Cascades of a simulated device: the agent's own audits, thresholds and counts, over scores that are drawn.

As many scores lie below the planned threshold as the plan says, the others evenly above it. An audited answer differs
as often as on the samples of the promise, or as often as the release's answers drift where that is more. What audits
have found does not survive a restart here.
"""

from __future__ import annotations

import math
import random

from edgesplit.cascade import Cascade
from edgesplit.mqtt.messages import CascadeCounts
from edgesplit.plan import Plan
from edgesplit_agent.policy.audit_budget import AUDIT_LIMITS
from edgesplit_agent.policy.cascade_audit import CascadeAudit, CascadeTotals
from edgesplit_agent.policy.escalation import CascadeRows, cascade_rows, may_answer_first
from edgesplit_agent.releases.loaded_release import LoadedRelease
from edgesplit_agent.serving.cascade import ALARM_S


class SimulatedCascade:
    """One release's cascade on one device."""

    def __init__(self, cascade: Cascade, exit_slices: tuple[str, ...] = ()) -> None:
        self.audit = CascadeAudit(cascade, None, CascadeTotals(), AUDIT_LIMITS)
        self.reported = CascadeTotals()
        """What was counted until the last telemetry window."""
        self.alarmed_at = -math.inf
        """When audits last raised an alarm, in seconds of the hub's clock."""
        self._exit_slices = exit_slices

    def rows(self, plan: Plan) -> CascadeRows | None:
        """The rows by which requests are answered; None where the plan's floor is above the cascade."""
        rows = cascade_rows(plan, self._exit_slices)
        return rows if rows is not None and may_answer_first(rows, 0.0) else None

    def on_audited(self, differs: bool, moved_bytes: int, now: float) -> None:
        """The second variant answered a frame that was answered surely."""
        if self.audit.on_outcome(differs, moved_bytes):
            self.alarmed_at = now

    def score(self, rng: random.Random) -> float:
        """A score that is below the planned threshold as often as the plan says."""
        cascade = self.audit.cascade
        return cascade.threshold + rng.random() - cascade.escalated

    def differs(self, rng: random.Random, drift: float) -> bool:
        """Whether the second variant answers a sure frame differently; `drift` is the release's own."""
        cascade = self.audit.cascade
        share = cascade.changed.differing / max(1, cascade.changed.samples)
        of_sure = share / (1.0 - cascade.escalated) if cascade.escalated < 1.0 else 0.0
        return rng.random() < max(drift, of_sure)


class SimulatedCascades:
    """The cascades of one device, by model."""

    def __init__(self) -> None:
        self._by_model: dict[str, SimulatedCascade] = {}

    def serve(self, model: str, release: LoadedRelease) -> None:
        """Serve a model by this release from now on."""
        self.drop(model)
        if release.plan.cascade is not None:
            self._by_model[model] = SimulatedCascade(release.plan.cascade, release.exit_slices)

    def drop(self, model: str) -> None:
        """Serve a model no longer."""
        self._by_model.pop(model, None)

    def of(self, model: str) -> SimulatedCascade | None:
        """The model's cascade; None where it has none."""
        return self._by_model.get(model)

    def alarms(self, now: float) -> tuple[str, ...]:
        """The last alarm of each cascade that had one within `ALARM_S`, in words."""
        recent = ((model, one) for model, one in self._by_model.items() if now - one.alarmed_at < ALARM_S)
        return tuple(f"{model}: {one.audit.alarm}" for model, one in recent)

    def close_windows(self) -> dict[str, CascadeCounts]:
        """What was counted since the last call, by model."""
        counts = {}
        for model, cascade in self._by_model.items():
            counts[model] = cascade.audit.counts_since(cascade.reported)
            cascade.reported = cascade.audit.totals.copy()
        return counts
