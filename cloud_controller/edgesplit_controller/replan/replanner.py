"""The loop: look at every release in use, find out what its devices measured, and do what the operator allows.

Plans are made and releases signed here as `deploy` makes them; another cut is signed with the delegated planner role,
so it is held to the limits and the privacy of the release that it is a cut of. Callers run `look`, `accept` and `drift`
where heavy work runs, one at a time, and `look` in one process of an installation.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import select

from edgesplit.errors import EdgeError, InfeasibleLimits, ModelRefused, UsageError
from edgesplit_controller.caller import who_asks
from edgesplit_controller.errors import Conflict, unknown
from edgesplit_controller.fleet.gateways import Gateways
from edgesplit_controller.model_registry.registry import Registry
from edgesplit_controller.planning.planner_service import Planning
from edgesplit_controller.releases.build import Releasing
from edgesplit_controller.replan import finding as findings
from edgesplit_controller.replan import proposals as kept
from edgesplit_controller.replan.decide import Doubt, wait_s
from edgesplit_controller.replan.evidence import believed
from edgesplit_controller.replan.finding import Key, Unit
from edgesplit_controller.replan.inspect import Looking
from edgesplit_controller.replan.policy import Policies, Policy
from edgesplit_controller.replan.policy import shown as shown_policy
from edgesplit_controller.replan.proposals import Proposals
from edgesplit_controller.rollout.engine import Made, Wanted
from edgesplit_controller.rollout.request import Asked
from edgesplit_controller.storage.database import Database, Device, Model
from edgesplit_controller.storage.tables.replan import ProposalRow
from edgesplit_partitioner.costs.from_telemetry import Measured, alike, as_measured

STALE_S = 600.0
"""After so long a plan is weighed again, whatever was measured."""
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
        self._roll_out = roll_out
        self._now = now
        self._groups: frozenset[str] | None = None
        self._weighed: dict[Key, tuple[float, Measured]] = {}
        self.policies = Policies(database)
        self.proposals = Proposals(database)
        self.looking = Looking(database, planning, releasing, gateways, self.policies, now=now)

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
        units = [unit for unit in self.looking.units() if wanted in ("", unit.model.ref) and self._sees(unit)]
        found = [self.looking.weigh(self.looking.hear(unit)) for unit in units]
        return [findings.shown(one, self.looking.layers(one.unit)) for one in found]

    def measured_on(self, reference: str, device: Device) -> dict[str, Any]:
        """Heavy. A costs file of a model, the device's seconds as this one measured them at work in the last day, and
        the server's as it met them; UsageError where it told too little."""
        model = self._registry.get(reference)
        unit = next((one for one in self.looking.units(forced=True) if _is_run_by(one, model, device)), None)
        plan = self.looking.plan(unit) if unit is not None else None
        if unit is None or plan is None:
            raise UsageError(
                f"{device.name} is not to run {model.ref}: `edgectl deploy {model.name} --to {device.name}`"
            )
        heard, layers = self.looking.heard_of(unit, device.name, plan), self.looking.layers(unit)
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
        unit = next((one for one in self.looking.units() if _is_of(row, one)), None)
        if unit is None:
            raise Conflict(f"proposal {number} is for devices that run another release by now")
        return self._apply(unit, row.id, msgspec.convert(row.measured, Measured), who_asks())

    def set_policy(self, model: str, groups: Sequence[str], changes: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Change the policy of a model (empty: of all), for some groups or for all devices."""
        if self._groups is not None and not groups:
            raise UsageError(f"name groups of yours: {', '.join(sorted(self._groups))}")
        if self._groups is not None and (others := [name for name in groups if name not in self._groups]):
            raise unknown("group", others[0], self._groups)
        name = self._registry.get(model).name if model else ""
        self._weighed.clear()
        return self.policies.set(name, groups, changes, self._now(), who_asks())

    def shown_policies(self) -> list[dict[str, Any]]:
        """Every policy that was set, and the one that counts elsewhere."""
        found = {
            key: policy
            for key, policy in self.policies.all().items()
            if self._groups is None or key[1] in self._groups or not key[1]
        }
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

    def _sees(self, unit: Unit) -> bool:
        return self._groups is None or all(target.group in self._groups for target in unit.targets)

    def _names(self) -> frozenset[str] | None:
        """Of the devices that exist for the caller; None: all."""
        if self._groups is None:
            return None
        with self._database.read() as session:
            return frozenset(session.scalars(select(Device.name).where(Device.group.in_(self._groups))))

    # ---- what the controller does ------------------------------------------------------------------------------

    def look(self) -> None:
        """Heavy. Once over everything; one model's trouble is not all's."""
        units = self.looking.units()
        self.proposals.supersede(units, self._now())
        for gone in self._weighed.keys() - {unit.key for unit in units}:
            del self._weighed[gone]
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
        found, now = self.looking.hear(unit), self._now()
        if found.note or found.measured is None or self._is_known(unit, found.measured, now):
            return
        found = self.looking.weigh(found)
        verdict, seen = found.verdict, found.measured
        if verdict is None or seen is None:
            return
        mine = self.proposals.of(unit)
        waiting = next((row for row in mine if row.state == kept.OPEN), None)
        if not verdict.moves:
            self._weighed[unit.key] = now, seen
            if waiting is not None and verdict.gain < unit.policy.doubt.least_gain / 2 and not verdict.broken_before:
                self.proposals.decide(waiting.id, kept.WITHDRAWN, kept.ITSELF, now, why=verdict.why)
            return
        doubt = unit.policy.doubt
        if any(now - (row.decided or now) < quiet_s(row.state, doubt) for row in mine):
            return
        told = findings.proposal_told(found, self.looking.layers(unit))
        row = self.proposals.propose(unit, told, msgspec.to_builtins(seen), now)
        changes = self.proposals.changes(unit.model.name, unit.device_class)
        if unit.policy.mode == "auto" and not wait_s(changes, now, doubt):
            self._apply(unit, row.id, seen, kept.ITSELF)

    def _is_known(self, unit: Unit, seen: Measured, now: float) -> bool:
        """It was weighed a while ago, with much the same measured, and nothing came of it: planning is dear."""
        at, before = self._weighed.get(unit.key, (-STALE_S, None))
        return before is not None and now - at < STALE_S and alike(before, seen)

    def _apply(self, unit: Unit, number: int, seen: Measured, who: str) -> dict[str, Any]:
        """Another table goes out; what the planner's key may not sign fails for good, and says so."""
        wish, of_class = self.looking.wish(unit), unit.device_class
        try:
            through = self.looking.through(unit)
            digest, _ = self._releasing.prepare(
                unit.model, {of_class: seen.planned_link}, wish, recut=True, through=through, measured={of_class: seen}
            )
        except (UsageError, InfeasibleLimits, ModelRefused) as error:
            self.proposals.decide(number, kept.FAILED, who, self._now(), why=str(error))
            raise
        if digest != unit.release:
            self._releasing.publish(unit.model, digest, wish)
            options, devices = {**wish.as_options(), "proposal": number}, self.looking.devices(unit)
            self._roll_out(Wanted(digest, unit.model.ref, devices, unit.names, options, CAREFULLY, who))
        row = self.proposals.decide(number, kept.APPLIED, who, self._now(), result=digest)
        return kept.shown(row)


def quiet_s(state: str, doubt: Doubt) -> float:
    """How long nothing is proposed after a proposal for the same devices ended so."""
    quiet = {kept.DISMISSED: DISMISSED_FOR, kept.FAILED: DISMISSED_FOR, kept.APPLIED: 1.0}
    return quiet.get(state, 0.0) * doubt.cool_down_s


def _is_run_by(unit: Unit, model: Model, device: Device) -> bool:
    return unit.model.ref == model.ref and device.name in unit.names


def _is_of(row: ProposalRow, unit: Unit) -> bool:
    return (row.release, row.device_class, row.group) == (unit.release, unit.device_class, unit.policy.group)
