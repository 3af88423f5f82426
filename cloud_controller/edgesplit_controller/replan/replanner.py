"""The loop: look at every release in use, find out what its devices measured, and do what the operator allows.

Plans are made and releases signed here as `deploy` makes them; another cut is signed with the delegated planner role,
so it is held to the limits and the privacy of the release that it is a cut of. Callers run `look`, `accept` and `drift`
where heavy work runs, one at a time, and `look` in one process of an installation.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import select

from edgesplit.errors import EdgeError, InfeasibleLimits, UsageError
from edgesplit.plan import Plan
from edgesplit_controller.callers import who_asks
from edgesplit_controller.database import Database, Desired, Device, Model, Release
from edgesplit_controller.gateways import Gateways, through_by_class
from edgesplit_controller.planning import Planning, Through, Wish
from edgesplit_controller.refusals import Conflict, NotAllowed, unknown
from edgesplit_controller.registry import Registry
from edgesplit_controller.releasing import Releasing
from edgesplit_controller.replan import finding as findings
from edgesplit_controller.replan import proposals as kept
from edgesplit_controller.replan.evidence import Voice, believed, voice, voices_of_best_kind
from edgesplit_controller.replan.finding import Finding, Unit
from edgesplit_controller.replan.history import History
from edgesplit_controller.replan.policy import Policies, Policy, effective
from edgesplit_controller.replan.policy import shown as shown_policy
from edgesplit_controller.replan.pricing import fresh, in_use
from edgesplit_controller.replan.proposals import Proposals
from edgesplit_controller.replan.verdict import LEAST_MOMENTS, Doubt, judge, lacking, wait_s
from edgesplit_controller.replan_tables import ProposalRow
from edgesplit_controller.rollout.asked import Asked
from edgesplit_controller.rollout.engine import Made, Wanted
from edgesplit_partitioner.measured_costs import Measured, as_measured

MOST_DEVICES = 48
"""Of a unit, drawn anew each time, that are asked what they measured."""
MEASURED_S = 86_400.0
"""What one device measured longer ago is not asked for."""
DISMISSED_FOR = 4.0
"""After a proposal was dismissed none is made for the same devices for so many times the cool-down."""

log = logging.getLogger(__name__)


CAREFULLY = Asked(stages=("10%", "100%"), unless_busy=True)
"""How another table goes out: a tenth first, and nothing while the operator's own rollout is on its way."""


class Replanner:
    """The plans of one installation, looked after."""

    def __init__(
        self,
        database: Database,
        registry: Registry,
        planning: Planning,
        releasing: Releasing,
        gateways: Gateways,
        *,
        roll_out: Callable[[Wanted], Made],
        now: Callable[[], float],
    ) -> None:
        self._database = database
        self._registry = registry
        self._planning = planning
        self._releasing = releasing
        self._gateways = gateways
        self._roll_out = roll_out
        self._now = now
        self._history = History(database)
        self._groups: frozenset[str] | None = None
        self.policies = Policies(database)
        self.proposals = Proposals(database)

    def within(self, groups: frozenset[str] | None) -> Replanner:
        """The same, for a caller for whom only devices of these groups exist; None: all do. Plans and proposals exist
        for whoever all their devices exist for."""
        narrowed = copy.copy(self)
        narrowed._groups = groups
        return narrowed

    # ---- what operators ask ------------------------------------------------------------------------------------

    def drift(self, reference: str = "") -> list[dict[str, Any]]:
        """Heavy. What every plan in use assumed, what was measured, and what another table would bring; of one model
        or of all."""
        wanted = self._registry.get(reference).ref if reference else ""
        units = [unit for unit in self.units() if wanted in ("", unit.model.ref)]
        return [findings.shown(self.examine(unit), self._layers(unit)) for unit in units]

    def measured_on(self, reference: str, device: Device) -> dict[str, Any]:
        """Heavy. A costs file of a model, the device's seconds as this one measured them at work in the last day, and
        the server's as it met them; UsageError where it told too little."""
        model = self._registry.get(reference)
        unit = next((one for one in self.within(None).units(forced=True) if _is_run_by(one, model, device)), None)
        plan = self._plan(unit) if unit is not None else None
        if unit is None or plan is None:
            raise UsageError(
                f"{device.name} is not to run {model.ref}: `edgectl deploy {model.name} --to {device.name}`"
            )
        told = self._history.of(device.name, self._now() - MEASURED_S)
        heard, layers = voice(device.name, told, model.name, unit.release, plan), self._layers(unit)
        if heard is None or not heard.slice_s:
            raise UsageError(
                f"{device.name} has not told yet what {model.ref} takes there: it does so once each slice has run five"
                " times for requests"
            )
        seen = believed([heard], plan, layers)
        costs = as_measured(self._planning.costs(model, device.device_class), seen)
        slices = [
            {"layers": group.layers, "seconds": group.seconds, "predicted_s": plan.slice_s.get(name)}
            for group in seen.device
            for name in layers
            if layers[name] == group.layers
        ]
        told_of = {"where": device.name, "requests": heard.requests, "link": msgspec.to_builtins(seen.link)}
        return {**msgspec.to_builtins(costs), **told_of, "slices": slices, "measured": seen.basis}

    def shown_proposals(self, *, open_only: bool = False) -> list[dict[str, Any]]:
        """The newest proposals, oldest first."""
        there = self._names()
        rows = self.proposals.all(open_only=open_only)
        return [kept.shown(row) for row in rows if there is None or there.issuperset(row.devices)]

    def accept(self, number: int) -> dict[str, Any]:
        """Heavy. Cut, sign and roll out what was proposed, planned with what was measured then."""
        row = self._proposal(number)
        if row.state != kept.OPEN:
            raise Conflict(f"proposal {number} is {row.state} already")
        unit = next((one for one in self.units() if _is_of(row, one)), None)
        if unit is None:
            raise Conflict(f"proposal {number} is for devices that run another release by now")
        return self._apply(unit, row.id, msgspec.convert(row.measured, Measured), who_asks())

    def set_policy(self, model: str, groups: Sequence[str], changes: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Change the policy of a model (empty: of all), for some groups or for all devices."""
        if self._groups is not None and not (groups and self._groups.issuperset(groups)):
            raise NotAllowed(f"name groups of yours: {', '.join(sorted(self._groups))}")
        name = self._registry.get(model).name if model else ""
        return self.policies.set(name, groups, changes, self._now(), who_asks())

    def shown_policies(self) -> list[dict[str, Any]]:
        """Every policy that was set, and the one that counts elsewhere."""
        found = self.policies.all()
        usual = [] if ("", "") in found else [shown_policy(("", ""), Policy())]
        return [*usual, *(shown_policy(key, policy) for key, policy in found.items())]

    def dismiss(self, number: int) -> dict[str, Any]:
        """Leave the table as it is, and do not ask again for a while."""
        row = self._proposal(number)
        return kept.shown(self.proposals.decide(row.id, kept.DISMISSED, who_asks(), self._now()))

    def _proposal(self, number: int) -> ProposalRow:
        """That one; NotFound for one of devices that do not exist for the caller."""
        row, there = self.proposals.get(number), self._names()
        if there is not None and not there.issuperset(row.devices):
            raise unknown("proposal", str(number), ())
        return row

    def _names(self) -> frozenset[str] | None:
        """Of the devices that exist for the caller; None: all."""
        if self._groups is None:
            return None
        with self._database.read() as session:
            return frozenset(session.scalars(select(Device.name).where(Device.group.in_(self._groups))))

    # ---- what the controller does ------------------------------------------------------------------------------

    def look(self) -> None:
        """Heavy. Once over everything; one model's trouble is not all's."""
        units = self.units()
        self.proposals.supersede(units, self._now())
        for unit in units:
            if unit.policy.mode == "off":
                continue
            try:
                self._see_to(unit)
            except EdgeError as error:
                log.error("%s on %s cannot be planned anew: %s", unit.model.ref, unit.device_class, error)
            except Exception:
                log.exception("%s on %s cannot be planned anew", unit.model.ref, unit.device_class)

    def _see_to(self, unit: Unit) -> None:
        found = self.examine(unit)
        verdict, seen, now = found.verdict, found.measured, self._now()
        if verdict is None or seen is None:
            return
        mine = self.proposals.of(unit)
        waiting = next((row for row in mine if row.state == kept.OPEN), None)
        if not verdict.moves:
            if waiting is not None and verdict.gain < unit.policy.doubt.least_gain / 2 and not verdict.broken_before:
                self.proposals.decide(waiting.id, kept.WITHDRAWN, kept.ITSELF, now, why=verdict.why)
            return
        doubt = unit.policy.doubt
        if any(now - (row.decided or now) < quiet_s(row.state, doubt) for row in mine):
            return
        told = findings.proposal_told(found, self._layers(unit))
        row = self.proposals.propose(unit, told, msgspec.to_builtins(seen), now)
        changes = self.proposals.changes(unit.model.name, unit.device_class)
        if unit.policy.mode == "auto" and not wait_s(changes, now, doubt):
            self._apply(unit, row.id, seen, kept.ITSELF)

    def _apply(self, unit: Unit, number: int, seen: Measured, who: str) -> dict[str, Any]:
        """Another table goes out; what the planner's key may not sign fails for good, and says so."""
        wish, links = self._wish(unit), {unit.device_class: seen.planned_link}
        through = self._through(unit)
        try:
            digest, _ = self._releasing.prepare(
                unit.model, links, wish, recut=True, through=through, measured={unit.device_class: seen}
            )
        except EdgeError as error:
            self.proposals.decide(number, kept.FAILED, who, self._now(), why=str(error))
            raise
        if digest != unit.release:
            self._releasing.publish(unit.model, digest, wish)
            options = {**wish.as_options(), "proposal": number}
            self._roll_out(Wanted(digest, unit.model.ref, unit.devices, unit.names, options, CAREFULLY, who))
        row = self.proposals.decide(number, kept.APPLIED, who, self._now(), result=digest)
        return kept.shown(row)

    # ---- what is found ------------------------------------------------------------------------------------------

    def units(self, *, forced: bool = False) -> list[Unit]:
        """Every release that devices shall run, by class and policy; forced cuts are the operator's, and left out
        unless they are asked for."""
        policies = self.policies.all()
        grouped: dict[tuple[str, str, Policy], list[Device]] = {}
        with self._database.read() as session:
            there = select(Desired, Device).join(Device, Device.name == Desired.device).where(Device.revoked.is_(None))
            for desired, device in session.execute(there.order_by(Device.name)):
                policy = effective(policies, desired.model, device.group)
                grouped.setdefault((desired.release, device.device_class, policy), []).append(device)
            models = {row.digest: session.get_one(Model, row.model_id) for row in session.scalars(select(Release))}
        found = [
            Unit(models[release], release, device_class, policy, tuple(devices))
            for (release, device_class, policy), devices in grouped.items()
        ]
        return [unit for unit in found if (forced or self._is_planned(unit)) and self._sees(unit)]

    def _sees(self, unit: Unit) -> bool:
        return self._groups is None or all(device.group in self._groups for device in unit.devices)

    def _is_planned(self, unit: Unit) -> bool:
        plan = self._plan(unit)
        return plan is not None and not plan.forced

    def examine(self, unit: Unit) -> Finding:
        """Heavy. What is known of a unit now."""
        plan, layers = self._plan(unit), self._layers(unit)
        if plan is None:
            raise UsageError(f"release {unit.release[:12]} has no plan for {unit.device_class}")
        heard = self._voices(unit, plan)
        if not heard:
            return Finding(unit, plan, None, "no device has told enough of it")
        seen, doubt = believed(heard, plan, layers), unit.policy.doubt
        if short := lacking(heard, doubt):
            return Finding(unit, plan, seen, short)
        wish, through = self._wish(unit), self._through(unit).get(unit.device_class)
        try:
            made = self._planning.plan(unit.model, unit.device_class, seen.planned_link, wish, through, seen)
            table = made.table
        except (UsageError, InfeasibleLimits) as error:
            return Finding(unit, plan, seen, f"no other table can be made: {error}")
        verdict = judge(heard, in_use(plan, layers, made.costs), fresh(table), seen.fixed_s, doubt)
        return Finding(unit, plan, seen, "", verdict, table)

    def _voices(self, unit: Unit, plan: Plan) -> list[Voice]:
        """What a sample of the unit's devices told of its release lately, of those that told enough."""
        drawn = random.sample(unit.devices, min(MOST_DEVICES, len(unit.devices)))
        since = self._now() - 2 * unit.policy.doubt.observe_s
        told = {device.name: self._history.of(device.name, since) for device in drawn}
        spoken = [voice(name, told[name], unit.model.name, unit.release, plan) for name in sorted(told)]
        enough = [one for one in spoken if one is not None and len(one.moments) >= LEAST_MOMENTS]
        return voices_of_best_kind(enough)

    def _plan(self, unit: Unit) -> Plan | None:
        manifest = self._releasing.find(unit.release)
        return None if manifest is None else manifest.plans.get(unit.device_class)

    def _layers(self, unit: Unit) -> dict[str, tuple[str, ...]]:
        """By slice of the release, its layers."""
        return {one.name: one.layers for one in self._releasing.manifest(unit.release).slices}

    def _wish(self, unit: Unit) -> Wish:
        """What the operator asked for when the release was made."""
        with self._database.read() as session:
            options = session.get_one(Release, unit.release).options
        fields = set(Wish.__struct_fields__)
        return msgspec.convert({name: value for name, value in options.items() if name in fields}, Wish)

    def _through(self, unit: Unit) -> Mapping[str, Through]:
        return through_by_class(unit.devices, self._gateways.of(unit.names))


def quiet_s(state: str, doubt: Doubt) -> float:
    """How long nothing is proposed after a proposal for the same devices ended so."""
    quiet = {kept.DISMISSED: DISMISSED_FOR, kept.FAILED: DISMISSED_FOR, kept.APPLIED: 1.0}
    return quiet.get(state, 0.0) * doubt.cool_down_s


def _is_run_by(unit: Unit, model: Model, device: Device) -> bool:
    return unit.model.ref == model.ref and any(one.name == device.name for one in unit.devices)


def _is_of(row: ProposalRow, unit: Unit) -> bool:
    return (row.release, row.device_class, row.group) == (unit.release, unit.device_class, unit.policy.group)
