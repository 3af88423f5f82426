"""The replanner: inspects every release in use, compares its plan with what devices measured, and proposes or applies
another table, as the policy allows.

Plans are made and releases signed as in a deployment. Another cut is signed with the delegated planner role, so it is
held to the limits and the privacy floor of the release that it recuts. Callers run `replan_all`, `accept` and
`drift_report` in the heavy job queue, one at a time, and `replan_all` in one process of an installation.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import select

from edgesplit.errors import EdgeError, InfeasibleLimits, ModelRefused, UsageError
from edgesplit_controller.caller import current_operator
from edgesplit_controller.errors import Conflict, not_found
from edgesplit_controller.fleet.gateways import Gateways
from edgesplit_controller.model_registry.registry import Registry, refuse_family
from edgesplit_controller.planning.planner_service import PlanningService
from edgesplit_controller.releases.build import ReleaseBuilder
from edgesplit_controller.replan import finding as findings
from edgesplit_controller.replan import proposals
from edgesplit_controller.replan.decide import ConfidencePolicy, remaining_cool_down_s
from edgesplit_controller.replan.evidence import estimate
from edgesplit_controller.replan.finding import Key, Unit
from edgesplit_controller.replan.inspect import PlanInspector
from edgesplit_controller.replan.policy import Policies, Policy
from edgesplit_controller.replan.policy import policy_view as shown_policy
from edgesplit_controller.replan.proposals import Proposals
from edgesplit_controller.rollout.engine import CreatedRollout, RolloutSpec
from edgesplit_controller.rollout.request import RolloutRequest
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Device
from edgesplit_controller.storage.tables.replan import ProposalRow
from edgesplit_partitioner.costs.from_telemetry import FieldMeasurements, is_within_noise, with_measurements

STALE_S = 600.0
"""After this many seconds a plan is evaluated again, even if the measurements are unchanged."""
DISMISSED_COOL_DOWNS = 4.0
"""After a dismissed proposal, none is made for the same devices for this multiple of the cool-down."""

log = logging.getLogger(__name__)


ROLLOUT_TERMS = RolloutRequest(stages=("10%", "100%"), unless_busy=True)
"""Terms under which another table is rolled out: a tenth of the devices first, and not while a rollout by the operator
is in progress."""


class Replanner:
    """Replanning for one installation."""

    def __init__(
        self, database: Database, registry: Registry, planning: PlanningService, releasing: ReleaseBuilder,
        gateways: Gateways, *, roll_out: Callable[[RolloutSpec], CreatedRollout], now: Callable[[], float],
    ) -> None:  # fmt: skip
        self._database = database
        self._registry = registry
        self._planning = planning
        self._releasing = releasing
        self._roll_out = roll_out
        self._now = now
        self._groups: frozenset[str] | None = None
        self._evaluated: dict[Key, tuple[float, FieldMeasurements]] = {}
        self.policies = Policies(database)
        self.proposals = Proposals(database)
        self.inspector = PlanInspector(database, planning, releasing, gateways, self.policies, now=now)

    def scoped_to(self, groups: frozenset[str] | None) -> Replanner:
        """A copy restricted to devices of these groups (None: all). Plans and proposals are visible only if all their
        devices are."""
        narrowed = copy.copy(self)
        narrowed._groups = groups
        return narrowed

    # ---- requests of operators ---------------------------------------------------------------------------------

    def drift_report(self, reference: str = "") -> list[dict[str, Any]]:
        """Heavy (run in the job queue). Assumed and measured values of every plan in use, and the effect of another
        table; of one model or all, as JSON."""
        model_ref = self._registry.get(reference).ref if reference else ""
        units = [
            unit for unit in self.inspector.units() if model_ref in ("", unit.model.ref) and self._is_visible(unit)
        ]
        findings_of_units = [self.inspector.evaluate(self.inspector.measure(unit)) for unit in units]
        return [findings.finding_view(finding, self.inspector.layers(finding.unit)) for finding in findings_of_units]

    def costs_measured_on(self, reference: str, device: Device) -> dict[str, Any]:
        """Heavy (run in the job queue). A costs file of a model with the seconds this device measured in use during the
        last day, and the server's; it may run the model as a variant of a family. UsageError if it has reported too
        little."""
        model = self._registry.get(reference)
        refuse_family(model)
        unit, in_use = next(
            (
                (unit, in_use) for unit in self.inspector.units(forced=True)
                if device.name in unit.names and (in_use := self.inspector.plan_of(unit, model)) is not None
            ), (None, None),
        )  # fmt: skip
        if unit is None or in_use is None:
            raise UsageError(
                f"{device.name} is not assigned {model.ref}: `edgectl deploy {model.name} --to {device.name}`"
            )
        plan, layers = in_use.plan, in_use.layers
        measurements = self.inspector.measurements_of_device(unit, device.name, plan)
        if measurements is None or not measurements.slice_s.keys() & layers.keys():
            raise UsageError(
                f"{device.name} has not reported yet how long {model.ref} takes there: it does once each slice"
                " has run five"
                " times for requests"
            )
        measured = estimate([measurements], plan, layers)
        costs = with_measurements(self._planning.costs(model, device.device_class, at_work=False), measured)
        slices = [
            {"layers": group.layers, "seconds": group.seconds, "predicted_s": plan.slice_s.get(name)}
            for group in measured.device
            for name in layers
            if layers[name] == group.layers
        ]
        source = {"where": device.name, "requests": measurements.requests, "link": msgspec.to_builtins(measured.link)}
        return {**msgspec.to_builtins(costs), **source, "slices": slices, "measured": measured.basis}

    def list_proposals(self, *, open_only: bool = False) -> list[dict[str, Any]]:
        """The newest proposals as JSON, oldest first."""
        visible = self._visible_names()
        rows = self.proposals.all(open_only=open_only)
        return [proposals.proposal_view(row) for row in rows if visible is None or visible.issuperset(row.devices)]

    def accept(self, number: int) -> dict[str, Any]:
        """Heavy (run in the job queue). Cut, sign and roll out a proposal, planned with the measurements stored with
        it. Conflict if it is closed, or its devices run another release."""
        row = self._visible_proposal(number)
        if row.state != proposals.OPEN:
            raise Conflict(f"proposal {number} is {row.state} already")
        unit = next((unit for unit in self.inspector.units() if _is_of(row, unit)), None)
        if unit is None:
            raise Conflict(f"proposal {number} is for devices that run another release by now")
        return self._apply(unit, row.id, msgspec.convert(row.measured, FieldMeasurements), current_operator())

    def set_policy(self, model: str, groups: Sequence[str], changes: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Change the policy of a model (empty: of all), for some groups or for all devices. UsageError or NotFound if
        the caller may not."""
        if self._groups is not None and not groups:
            raise UsageError(f"name groups of your own: {', '.join(sorted(self._groups))}")
        if self._groups is not None and (others := [name for name in groups if name not in self._groups]):
            raise not_found("group", others[0], self._groups)
        name = self._registry.get(model).name if model else ""
        self._evaluated.clear()
        return self.policies.set(name, groups, changes, self._now(), current_operator())

    def list_policies(self) -> list[dict[str, Any]]:
        """Every policy that was set, and the default, as JSON."""
        visible = {
            key: policy
            for key, policy in self.policies.all().items()
            if self._groups is None or key[1] in self._groups or not key[1]
        }
        default = [] if ("", "") in visible else [shown_policy(("", ""), Policy())]
        return [*default, *(shown_policy(key, policy) for key, policy in visible.items())]

    def dismiss(self, number: int) -> dict[str, Any]:
        """Reject a proposal: the table stays, and none is proposed for a while."""
        row = self._visible_proposal(number)
        dismissed = self.proposals.decide(row.id, proposals.DISMISSED, current_operator(), self._now())
        return proposals.proposal_view(dismissed)

    def _visible_proposal(self, number: int) -> ProposalRow:
        """The proposal of that number; NotFound if its devices are not visible to the caller."""
        row, visible = self.proposals.get(number), self._visible_names()
        if visible is not None and not visible.issuperset(row.devices):
            raise not_found("proposal", str(number), ())
        return row

    def _is_visible(self, unit: Unit) -> bool:
        return self._groups is None or all(target.group in self._groups for target in unit.devices)

    def _visible_names(self) -> frozenset[str] | None:
        """Names of devices visible to the caller; None: all."""
        if self._groups is None:
            return None
        with self._database.read() as session:
            return frozenset(session.scalars(select(Device.name).where(Device.group.in_(self._groups))))

    # ---- the controller's own loop -----------------------------------------------------------------------------

    def replan_all(self) -> None:
        """Heavy (run in the job queue). Replan every unit once; an error for one does not stop the others."""
        units = self.inspector.units()
        self.proposals.supersede(units, self._now())
        for gone in self._evaluated.keys() - {unit.key for unit in units}:
            del self._evaluated[gone]
        for unit in units:
            if unit.policy.mode == "off":
                continue
            try:
                self._replan(unit)
            except EdgeError as error:
                log.error("%s on %s cannot be replanned: %s", unit.model.ref, unit.device_class, error)
            except Exception:
                log.exception("%s on %s cannot be replanned", unit.model.ref, unit.device_class)

    def _replan(self, unit: Unit) -> None:
        """Evaluate one unit, and propose or apply another table if that is warranted."""
        finding, now = self.inspector.measure(unit), self._now()
        if finding.note or finding.measured is None or self._is_evaluated(unit, finding.measured, now):
            return
        finding = self.inspector.evaluate(finding)
        verdict, measured = finding.verdict, finding.measured
        if verdict is None or measured is None:
            return
        earlier = self.proposals.for_unit(unit)
        open_proposal = next((row for row in earlier if row.state == proposals.OPEN), None)
        if not verdict.moves:
            self._evaluated[unit.key] = now, measured
            # Hysteresis: an open proposal is withdrawn only when its gain has fallen to half the threshold.
            is_poor = verdict.gain < unit.policy.doubt.least_gain / 2 and not verdict.broken_before
            if open_proposal is not None and is_poor:
                number, state = open_proposal.id, proposals.WITHDRAWN
                self.proposals.decide(number, state, proposals.CONTROLLER, now, why=verdict.reason)
            return
        # Cool-down per earlier proposal of this unit, by how it ended (dismissed and failed ones count longest).
        doubt = unit.policy.doubt
        if any(now - (row.decided or now) < cool_down_after_s(row.state, doubt) for row in earlier):
            return
        view = findings.stored_view(finding, self.inspector.layers(unit))
        row = self.proposals.propose(unit, view, msgspec.to_builtins(measured), now)
        changes = self.proposals.change_times(unit.model.name, unit.device_class)
        if unit.policy.mode == "auto" and not remaining_cool_down_s(changes, now, doubt):
            self._apply(unit, row.id, measured, proposals.CONTROLLER)

    def _is_evaluated(self, unit: Unit, measured: FieldMeasurements, now: float) -> bool:
        """Whether the unit was evaluated recently on much the same measurements without result. Planning is
        expensive."""
        at, before = self._evaluated.get(unit.key, (-STALE_S, None))
        return before is not None and now - at < STALE_S and is_within_noise(before, measured)

    def _apply(self, unit: Unit, number: int, measured: FieldMeasurements, who: str) -> dict[str, Any]:
        """Roll out another table. What the planner key may not sign fails for good, and the proposal is closed with the
        reason."""
        plan_options, device_class = self.inspector.plan_options(unit), unit.device_class
        try:
            gateways = self.inspector.gateways_by_class(unit)
            digest, _ = self._releasing.prepare(
                unit.model, {device_class: measured.planned_link}, plan_options, recut=True, gateways=gateways,
                measured={device_class: measured},
            )  # fmt: skip
        except (UsageError, InfeasibleLimits, ModelRefused) as error:
            self.proposals.decide(number, proposals.FAILED, who, self._now(), why=str(error))
            raise
        if digest != unit.release:
            self._releasing.publish(unit.model, digest, plan_options)
            options, devices = {**plan_options.as_options(), "proposal": number}, self.inspector.devices(unit)
            self._roll_out(RolloutSpec(digest, unit.model.ref, devices, unit.names, options, ROLLOUT_TERMS, who))
        row = self.proposals.decide(number, proposals.APPLIED, who, self._now(), result=digest)
        return proposals.proposal_view(row)


def cool_down_after_s(state: str, doubt: ConfidencePolicy) -> float:
    """Seconds without new proposals for the same devices after a proposal that ended in this state."""
    cool_downs = {
        proposals.DISMISSED: DISMISSED_COOL_DOWNS,
        proposals.FAILED: DISMISSED_COOL_DOWNS,
        proposals.APPLIED: 1.0,
    }
    return cool_downs.get(state, 0.0) * doubt.cool_down_s


def _is_of(row: ProposalRow, unit: Unit) -> bool:
    return (row.release, row.device_class, row.group) == (unit.release, unit.device_class, unit.policy.group)
