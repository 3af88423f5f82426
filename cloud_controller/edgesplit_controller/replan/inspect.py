"""Inspects the plans in use: groups devices into units, estimates what they measured, and evaluates another table.
Reads and plans; changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import msgspec
from sqlalchemy import select

from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit.plan import Plan
from edgesplit_controller.fleet.gateways import Gateways, gateway_tier_by_class
from edgesplit_controller.model_registry.families import families_with, family_of
from edgesplit_controller.planning.planner_service import GatewayHop, PlanningService, PlanOptions
from edgesplit_controller.releases.build import ReleaseBuilder
from edgesplit_controller.replan.decide import LEAST_OBSERVATIONS, compare_tables, missing_evidence
from edgesplit_controller.replan.evidence import DeviceMeasurements, best_kind, estimate, measurements_of
from edgesplit_controller.replan.finding import Finding, Unit, UnitDevice
from edgesplit_controller.replan.history import TelemetryHistory
from edgesplit_controller.replan.policy import Policies, Policy, effective_policy
from edgesplit_controller.replan.pricing import price_in_use, price_new
from edgesplit_controller.replan.variant_in_use import PlanInUse, plan_in_use, variant_of
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Desired, Device, Model, ReleaseRow
from edgesplit_partitioner.costs.from_telemetry import FieldMeasurements

MOST_DEVICES = 48
"""Devices of a unit whose telemetry is read, sampled at random each time."""
MOST_DEVICES_AT_WORK = 12
"""Devices of a class whose measured seconds are read for a plan, sampled at random each time."""
FIRST_WORK_S = 60.0
"""Seconds of work after which a device's measured times replace predicted ones."""
MEASURED_S = 86_400.0
"""Age in seconds up to which a device's measurements are used by `costs_measured_on` and `times_at_work`."""
FAMILY_NOTE = "a family: its table, signed with the release key, is made by these times by `edgectl deploy {}`"
"""Why no other table is proposed for a family."""
EXIT_NOTE = "a model with an early exit: its table, signed with the release key, is made anew by `edgectl deploy {}`"
"""Why no other table is proposed for a model with an early exit."""


class PlanInspector:
    """Inspection of the releases in use by one installation."""

    def __init__(
        self, database: Database, planning: PlanningService, releasing: ReleaseBuilder, gateways: Gateways,
        policies: Policies, *, now: Callable[[], float],
    ) -> None:  # fmt: skip
        self._database = database
        self._planning = planning
        self._releasing = releasing
        self._gateways = gateways
        self._policies = policies
        self._history = TelemetryHistory(database)
        self._now = now

    def units(self, *, forced: bool = False) -> list[Unit]:
        """Units for every release that devices shall run, by class and policy. Plans with a cut forced by the operator
        are left out unless `forced`."""
        policies = self._policies.all()
        grouped: dict[tuple[str, str, Policy], list[UnitDevice]] = {}
        columns = (Desired.release, Desired.model, Device.name, Device.device_class, Device.group)
        with self._database.read() as session:
            query = select(*columns).join(Device, Device.name == Desired.device).where(Device.revoked.is_(None))
            for release, model, name, device_class, group in session.execute(query.order_by(Device.name)):
                key = release, device_class, effective_policy(policies, model, group)
                grouped.setdefault(key, []).append(UnitDevice(name, group))
            models = {row.digest: session.get_one(Model, row.model_id) for row in session.scalars(select(ReleaseRow))}
        units = [
            Unit(models[release], release, device_class, policy, tuple(targets))
            for (release, device_class, policy), targets in grouped.items()
        ]
        return [unit for unit in units if (plan := self.plan(unit)) is not None and (forced or not plan.forced_row)]

    def measure(self, unit: Unit) -> Finding:
        """What the unit's devices measured, before anything is planned. UsageError if the release has no plan for the
        class."""
        plan = self.plan(unit)
        if plan is None:
            raise UsageError(f"release {unit.release[:12]} has no plan for {unit.device_class}")
        devices = tuple(self._sampled_measurements(unit, plan))
        if not devices:
            return Finding(unit, plan, None, "no device has reported enough of it")
        missing = missing_evidence(devices, unit.policy.doubt)
        return Finding(unit, plan, estimate(devices, plan, self.layers(unit)), missing, devices)

    def evaluate(self, finding: Finding) -> Finding:
        """Heavy (run in the job queue). The finding with another table and a verdict, if there is enough evidence."""
        measured, unit = finding.measured, finding.unit
        if finding.note or measured is None:
            return finding
        if family_of(unit.model) is not None:
            return replace(finding, note=FAMILY_NOTE.format(unit.model.name))
        if finding.plan.cascade is not None:
            return replace(finding, note=EXIT_NOTE.format(unit.model.name))
        try:
            options, gateway = self.plan_options(unit), self.gateways_by_class(unit).get(unit.device_class)
            result = self._planning.plan(
                unit.model, unit.device_class, measured.planned_link, options, gateway, measured
            )
            table = result.table
        except (UsageError, InfeasibleLimits) as error:
            return replace(finding, note=f"no other table can be made: {error}")
        old = price_in_use(finding.plan, self.layers(unit), result.costs)
        verdict = compare_tables(finding.devices, old, price_new(table), measured.fixed_s, unit.policy.doubt)
        return replace(finding, verdict=verdict, table=table)

    def times_at_work(self, model: Model, device_class: str) -> FieldMeasurements | None:
        """What devices of the class measured in the last day of the release that most of them run, of the model or of a
        family with it; None before one of them has worked for a minute. Emulated and simulated devices do not count."""
        query = (
            select(Desired.release, Device.name)
            .join(Device, Device.name == Desired.device)
            .join(ReleaseRow, ReleaseRow.digest == Desired.release)
            .where(Device.device_class == device_class, Device.revoked.is_(None))
        )
        with self._database.read() as session:
            ids = [model.id, *(family.id for family in families_with(session, [model]))]
            names_by_release: dict[str, list[str]] = {}
            for release, name in session.execute(query.where(ReleaseRow.model_id.in_(ids))):
                names_by_release.setdefault(release, []).append(name)
            models = {
                release: session.get_one(Model, session.get_one(ReleaseRow, release).model_id)
                for release in names_by_release
            }
        names_by_release = {
            release: names for release, names in names_by_release.items()
            if self._in_use(release, device_class, model) is not None
        }  # fmt: skip
        if not names_by_release:
            return None
        release, names = max(names_by_release.items(), key=lambda entry: len(entry[1]))
        sample = random.sample(sorted(names), min(MOST_DEVICES_AT_WORK, len(names)))
        unit = Unit(models[release], release, device_class, Policy(), tuple(UnitDevice(name, "") for name in sample))
        in_use = self._in_use(release, device_class, model)
        assert in_use is not None
        found = [self.measurements_of_device(unit, name, in_use.plan) for name in sample]
        worked = [
            device
            for device in found
            if device is not None and device.kind == "measured" and device.span_s >= FIRST_WORK_S
            and in_use.plan.slice_s.keys() & device.slice_s.keys()
        ]  # fmt: skip
        if not worked:
            return None
        # The device's seconds alone: link, server and sizes of a plan are what the operator asks to plan for.
        measured = estimate(worked, in_use.plan, in_use.layers).device
        return FieldMeasurements(link=in_use.plan.link, device=measured, devices=len(worked))

    def plan_of(self, unit: Unit, model: Model) -> PlanInUse | None:
        """The part of the unit's plan that is the model's: all of it, or of a family that of one variant. None where
        the model is no part of it."""
        return self._in_use(unit.release, unit.device_class, model)

    def _in_use(self, release: str, device_class: str, model: Model) -> PlanInUse | None:
        manifest = self._releasing.find(release)
        variant = None if manifest is None else variant_of(manifest, model.ref)
        return None if manifest is None or variant is None else plan_in_use(manifest, device_class, variant)

    def measurements_of_device(self, unit: Unit, device: str, plan: Plan) -> DeviceMeasurements | None:
        """What one device measured of its release in the last day; None if there is nothing."""
        messages = self._history.messages_of(device, self._now() - MEASURED_S)
        simulated = device in self._simulated([device])
        return measurements_of(device, messages, unit.model.name, unit.release, plan, simulated=simulated)

    def _sampled_measurements(self, unit: Unit, plan: Plan) -> list[DeviceMeasurements]:
        """Measurements of a random sample of the unit's devices, those with enough observations."""
        sample = random.sample(unit.devices, min(MOST_DEVICES, len(unit.devices)))
        since = self._now() - 2 * unit.policy.doubt.observe_s
        messages = {target.name: self._history.messages_of(target.name, since) for target in sample}
        simulated = self._simulated(messages)
        measured = [
            measurements_of(name, messages[name], unit.model.name, unit.release, plan, simulated=name in simulated)
            for name in sorted(messages)
        ]
        enough = [
            device for device in measured if device is not None and len(device.observations) >= LEAST_OBSERVATIONS
        ]
        return best_kind(enough)

    def _simulated(self, names: Collection[str]) -> frozenset[str]:
        """Those of the devices that declared themselves simulated in their birth message."""
        with self._database.read() as session:
            rows = session.execute(select(Device.name, Device.birth).where(Device.name.in_(names)))
            return frozenset(name for name, birth in rows if (birth or {}).get("simulated"))

    def plan(self, unit: Unit) -> Plan | None:
        """The plan in use; None if the release has none for that class."""
        manifest = self._releasing.find(unit.release)
        return None if manifest is None else manifest.plans.get(unit.device_class)

    def layers(self, unit: Unit) -> dict[str, tuple[str, ...]]:
        """Layers by slice of the unit's release."""
        return {piece.name: piece.layers for piece in self._releasing.manifest(unit.release).slices}

    def plan_options(self, unit: Unit) -> PlanOptions:
        """The plan options with which the release was made."""
        with self._database.read() as session:
            options = session.get_one(ReleaseRow, unit.release).options
        fields = set(PlanOptions.__struct_fields__)
        return msgspec.convert({name: value for name, value in options.items() if name in fields}, PlanOptions)

    def gateways_by_class(self, unit: Unit) -> Mapping[str, GatewayHop]:
        """The gateway by which the class reaches the cloud, by class; empty where there is none."""
        gateways = self._gateways.by_device(frozenset(unit.names))
        return gateway_tier_by_class(self.devices(unit), gateways) if gateways else {}

    def devices(self, unit: Unit) -> list[Device]:
        """The unit's devices, as rows."""
        with self._database.read() as session:
            every = session.scalars(select(Device).where(Device.revoked.is_(None)).order_by(Device.name))
            names = frozenset(unit.names)
            return [device for device in every if device.name in names]
