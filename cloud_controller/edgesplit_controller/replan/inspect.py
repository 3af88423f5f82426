"""What is in use, what its devices say of it, and what that asks for. Reads and plans; changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import msgspec
from sqlalchemy import select

from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit.plan import Plan
from edgesplit_controller.fleet.gateways import Gateways, through_by_class
from edgesplit_controller.planning.planner_service import Planning, Through, Wish
from edgesplit_controller.releases.build import Releasing
from edgesplit_controller.replan.decide import LEAST_MOMENTS, judge, lacking
from edgesplit_controller.replan.evidence import Voice, believed, voice, voices_of_best_kind
from edgesplit_controller.replan.finding import Finding, Target, Unit
from edgesplit_controller.replan.history import History
from edgesplit_controller.replan.policy import Policies, Policy, effective
from edgesplit_controller.replan.pricing import fresh, in_use
from edgesplit_controller.storage.database import Database, Desired, Device, Model, Release

MOST_DEVICES = 48
"""Of a unit, drawn anew each time, that are asked what they measured."""
MEASURED_S = 86_400.0
"""What one device measured longer ago is not asked for."""


class Looking:
    """The releases of one installation, as its devices find them."""

    def __init__(
        self,
        database: Database,
        planning: Planning,
        releasing: Releasing,
        gateways: Gateways,
        policies: Policies,
        *,
        now: Callable[[], float],
    ) -> None:
        self._database = database
        self._planning = planning
        self._releasing = releasing
        self._gateways = gateways
        self._policies = policies
        self._history = History(database)
        self._now = now

    def units(self, *, forced: bool = False) -> list[Unit]:
        """Every release that devices shall run, by class and policy; forced cuts are the operator's, and left out
        unless they are asked for."""
        policies = self._policies.all()
        grouped: dict[tuple[str, str, Policy], list[Target]] = {}
        columns = (Desired.release, Desired.model, Device.name, Device.device_class, Device.group)
        with self._database.read() as session:
            there = select(*columns).join(Device, Device.name == Desired.device).where(Device.revoked.is_(None))
            for release, model, name, device_class, group in session.execute(there.order_by(Device.name)):
                key = release, device_class, effective(policies, model, group)
                grouped.setdefault(key, []).append(Target(name, group))
            models = {row.digest: session.get_one(Model, row.model_id) for row in session.scalars(select(Release))}
        found = [
            Unit(models[release], release, device_class, policy, tuple(targets))
            for (release, device_class, policy), targets in grouped.items()
        ]
        return [unit for unit in found if (plan := self.plan(unit)) is not None and (forced or not plan.forced)]

    def hear(self, unit: Unit) -> Finding:
        """What its devices say, before anything is planned."""
        plan = self.plan(unit)
        if plan is None:
            raise UsageError(f"release {unit.release[:12]} has no plan for {unit.device_class}")
        heard = tuple(self._voices(unit, plan))
        if not heard:
            return Finding(unit, plan, None, "no device has told enough of it")
        short = lacking(heard, unit.policy.doubt)
        return Finding(unit, plan, believed(heard, plan, self.layers(unit)), short, heard)

    def weigh(self, found: Finding) -> Finding:
        """Heavy. The same with another table, and what it is worth, where enough was heard."""
        seen, unit = found.measured, found.unit
        if found.note or seen is None:
            return found
        try:
            wish, through = self.wish(unit), self.through(unit).get(unit.device_class)
            made = self._planning.plan(unit.model, unit.device_class, seen.planned_link, wish, through, seen)
            table = made.table
        except (UsageError, InfeasibleLimits) as error:
            return replace(found, note=f"no other table can be made: {error}")
        old = in_use(found.plan, self.layers(unit), made.costs)
        verdict = judge(found.voices, old, fresh(table), seen.fixed_s, unit.policy.doubt)
        return replace(found, verdict=verdict, table=table)

    def heard_of(self, unit: Unit, device: str, plan: Plan) -> Voice | None:
        """What one device said of its release in the last day."""
        told = self._history.of(device, self._now() - MEASURED_S)
        simulated = device in self._simulated([device])
        return voice(device, told, unit.model.name, unit.release, plan, simulated=simulated)

    def _voices(self, unit: Unit, plan: Plan) -> list[Voice]:
        """What a sample of the unit's devices told of its release lately, of those that told enough."""
        drawn = random.sample(unit.targets, min(MOST_DEVICES, len(unit.targets)))
        since = self._now() - 2 * unit.policy.doubt.observe_s
        told = {target.name: self._history.of(target.name, since) for target in drawn}
        made_up = self._simulated(told)
        spoken = [
            voice(name, told[name], unit.model.name, unit.release, plan, simulated=name in made_up)
            for name in sorted(told)
        ]
        enough = [one for one in spoken if one is not None and len(one.moments) >= LEAST_MOMENTS]
        return voices_of_best_kind(enough)

    def _simulated(self, names: Collection[str]) -> frozenset[str]:
        """Those of them that said so at their birth."""
        with self._database.read() as session:
            born = session.execute(select(Device.name, Device.birth).where(Device.name.in_(names)))
            return frozenset(name for name, birth in born if (birth or {}).get("simulated"))

    def plan(self, unit: Unit) -> Plan | None:
        """The plan in use; None where the release has none for that class."""
        manifest = self._releasing.find(unit.release)
        return None if manifest is None else manifest.plans.get(unit.device_class)

    def layers(self, unit: Unit) -> dict[str, tuple[str, ...]]:
        """By slice of the release, its layers."""
        return {one.name: one.layers for one in self._releasing.manifest(unit.release).slices}

    def wish(self, unit: Unit) -> Wish:
        """What the operator asked for when the release was made."""
        with self._database.read() as session:
            options = session.get_one(Release, unit.release).options
        fields = set(Wish.__struct_fields__)
        return msgspec.convert({name: value for name, value in options.items() if name in fields}, Wish)

    def through(self, unit: Unit) -> Mapping[str, Through]:
        """The gateway by which the class reaches the cloud, where it does so."""
        gateways = self._gateways.of(frozenset(unit.names))
        return through_by_class(self.devices(unit), gateways) if gateways else {}

    def devices(self, unit: Unit) -> list[Device]:
        """Its devices, whole."""
        with self._database.read() as session:
            every = session.scalars(select(Device).where(Device.revoked.is_(None)).order_by(Device.name))
            names = frozenset(unit.names)
            return [device for device in every if device.name in names]
