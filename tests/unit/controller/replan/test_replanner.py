"""The replanning loop over a real registry, planner and repository: proposals, automatic rollouts, and what it
leaves alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import delete, select

from edgesplit.errors import InfeasibleLimits, NotFound, UsageError
from edgesplit.links import parse_link
from edgesplit.mqtt.messages import SliceSeconds, Telemetry, TelemetryWindow
from edgesplit.release.manifest import Manifest
from edgesplit_controller.caller import set_current_operator
from edgesplit_controller.errors import Conflict
from edgesplit_controller.fleet.gateways import Gateways
from edgesplit_controller.planning.planner_service import PlanOptions
from edgesplit_controller.replan.policy import Policy, effective_policy, with_changes
from edgesplit_controller.replan.replanner import Replanner
from edgesplit_controller.rollout.engine import CreatedRollout, RolloutSpec
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Deployment, Desired, Device, Event, ReleaseRow, TelemetryRow
from edgesplit_controller.storage.tables.replan import PolicyRow, ProposalRow
from edgesplit_partitioner import load_costs
from support.release_maker import CLASS, ReleaseMaker

NAMES = ("one", "two", "three")
LINK = "1gbit/0.1ms"
QUICK = {"mode": "propose", "observe_s": 10.0, "cool_down_s": 100.0}


class PreparedReleases:
    """Slow set-up shared by all tests: a pushed model, keys, and a first release for each set of options."""

    def __init__(self, folder: Path) -> None:
        self.maker = ReleaseMaker(folder)
        self.database: Database = self.maker.database
        self._firsts: dict[str, tuple[str, Manifest]] = {}

    def first(self, **wish: Any) -> tuple[str, Manifest]:
        """The one release that there is."""
        with self.database.write() as session:
            for table in (ProposalRow, PolicyRow, Desired, Deployment, TelemetryRow, Device, Event, ReleaseRow):
                session.execute(delete(table))
        asked, key = msgspec.convert(wish, PlanOptions), str(wish)
        if key not in self._firsts:
            made = self.maker.releasing.prepare(self.maker.model, {CLASS: parse_link(LINK)}, asked)
            self._firsts[key] = made
        self.maker.releasing.publish(self.maker.model, self._firsts[key][0], asked)
        return self._firsts[key]


class ReplanHarness:
    """Three devices that run a small model alone, as planned; how slow they are is for each test to say."""

    def __init__(self, shelf: PreparedReleases, **wish: Any) -> None:
        self.maker, self.database = shelf.maker, shelf.database
        self.now = 10_000.0
        self.model = self.maker.model
        self.rolled_out: list[RolloutSpec] = []
        self.told = 0
        self.replanner = Replanner(
            self.database,
            self.maker.registry,
            self.maker.planning,
            self.maker.releasing,
            Gateways(self.database, now=self.clock, model_if_split=self.maker.releasing.split_by_gateway),
            roll_out=self.roll_out,
            now=self.clock,
        )
        self.first, _ = shelf.first(**wish)
        with self.database.write() as session:
            for name in NAMES:
                session.add(
                    Device(
                        name=name, device_class=CLASS, group="roof" if name == "three" else "", labels={}, link=LINK,
                        certificate_serial="1", public_key_sha256="", enrolled=1.0, counter=0,
                    )
                )  # fmt: skip
        self.roll_out(RolloutSpec(self.first, self.model.ref, self.devices, NAMES))
        self.rolled_out.clear()
        self.replanner.set_policy("small", [], QUICK)

    def clock(self) -> float:
        return self.now

    @property
    def devices(self) -> list[Device]:
        with self.database.read() as session:
            return list(session.scalars(select(Device).order_by(Device.name)))

    def roll_out(self, wanted: RolloutSpec) -> CreatedRollout:
        names = [device.name for device in wanted.devices]
        model, release = wanted.model, wanted.release
        with self.database.write() as session:
            made = Deployment(release=release, model=model, targets=names, devices=names, options={}, created=0.0)
            session.add(made)
            session.flush()
            for name in names:
                session.merge(Desired(device=name, model=model.partition("@")[0], release=release, deployment=made.id))
        self.rolled_out.append(wanted)
        return CreatedRollout(len(self.rolled_out), {})

    @property
    def release(self) -> str:
        """That device one shall run."""
        with self.database.read() as session:
            return session.scalars(select(Desired.release).where(Desired.device == "one")).one()

    def send_telemetry(
        self, slowdown: float, *, names: Sequence[str] = NAMES, seconds: int = 20, emulated: bool = False
    ) -> None:
        """Devices work for so long, so many times slower than first predicted."""
        planned = self.maker.releasing.manifest(self.first).plans[CLASS].slice_s
        total_s = sum(planned.values()) * slowdown
        manifest = self.maker.releasing.manifest(self.release)
        share = {slice_.name: len(slice_.layers) for slice_ in manifest.slices}
        plan = manifest.plans[CLASS]
        row = (plan.local or plan.rows[0]).name
        slices = [
            SliceSeconds(name, total_s * count / sum(share.values()), 50) for name, count in sorted(share.items())
        ]
        with self.database.write() as session:
            for _ in range(0, seconds, 2):
                self.now += 2.0
                for name in names:
                    window = TelemetryWindow(
                        model="small", release=self.release, row=row, requests=9, slices=tuple(slices)
                    )
                    link = parse_link(LINK)
                    told = Telemetry(
                        session=1, sequence=1, emulated=emulated, up_bytes_per_s=link.up_bytes_per_s,
                        rtt_s=link.rtt_s, remote_usable=True, models=(window,),
                    )  # fmt: skip
                    self.told += 1
                    session.add(
                        TelemetryRow(
                            device=name, at=self.now, stored=self.now, session=1, sequence=self.told,
                            content=msgspec.to_builtins(told),
                        )
                    )  # fmt: skip

    def open(self) -> list[dict[str, Any]]:
        return self.replanner.list_proposals(open_only=True)

    def events(self) -> list[tuple[str, str]]:
        with self.database.read() as session:
            rows = session.scalars(select(Event).where(Event.what.startswith("replan.")).order_by(Event.id))
            return [(row.what, row.who) for row in rows]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> PreparedReleases:
    return PreparedReleases(tmp_path_factory.mktemp("shelf"))


@pytest.fixture
def world(shelf: PreparedReleases) -> ReplanHarness:
    return ReplanHarness(shelf)


def test_a_class_that_has_worked_for_a_minute_is_planned_by_its_own_seconds(world: ReplanHarness) -> None:
    """For the next plan of the model, without anyone's accepting it; not after a few seconds, nor by emulated times."""
    at_work = world.replanner.inspector.times_at_work
    assert at_work(world.model, CLASS) is None
    world.send_telemetry(3.0, seconds=20)
    assert at_work(world.model, CLASS) is None
    world.send_telemetry(3.0, seconds=60)
    found = at_work(world.model, CLASS)
    planned_s = sum(world.maker.releasing.manifest(world.first).plans[CLASS].slice_s.values())

    assert found is not None and found.devices == 3 and not found.remote
    assert sum(group.seconds for group in found.device) == pytest.approx(3.0 * planned_s)
    assert at_work(world.model, "raspberrypi3b+") is None


def test_emulated_devices_times_are_no_measurement_of_their_class(world: ReplanHarness) -> None:
    """However long they work."""
    world.send_telemetry(3.0, seconds=120, emulated=True)
    assert world.replanner.inspector.times_at_work(world.model, CLASS) is None


def test_slow_devices_yield_a_proposal_that_waits_for_acceptance(world: ReplanHarness) -> None:
    """It has its prediction, the kind of devices and the reason; the next run keeps the same proposal."""
    world.send_telemetry(40.0)
    world.replanner.replan_all()
    world.replanner.replan_all()

    (one,) = world.open()
    assert one["state"] == "open" and one["devices"] == ["one", "three", "two"]
    assert (
        one["gain"] > 0.1 and "saves" in one["reason"] and one["basis"] == "measured" and one["measured_devices"] == 3
    )
    assert [row["name"] for row in one["rows"]] == ["local"] and one["proposed_rows"][0]["name"] != "local"
    assert not world.rolled_out
    assert [what for what, _ in world.events()] == ["replan.policy", "replan.proposed"]


def test_an_accepted_proposal_is_signed_and_rolled_out(world: ReplanHarness) -> None:
    """Another cut of the release that the release key signed; its seconds are the measured ones."""
    world.send_telemetry(40.0)
    world.replanner.replan_all()
    set_current_operator("ada")
    try:
        done = world.replanner.accept(world.open()[0]["id"])
    finally:
        set_current_operator("operator")

    (wanted,) = world.rolled_out
    release, options = wanted.release, wanted.options
    manifest = world.maker.releasing.manifest(release)
    assert manifest.recut_of == world.first and release in world.maker.repository.recuts()
    assert (
        sorted(wanted.targets) == sorted(NAMES)
        and wanted.request.stages[0] == "10%"
        and options["proposal"] == done["id"]
    )
    assert (done["state"], done["decided_by"], done["result"]) == ("applied", "ada", release)
    planned = world.maker.releasing.manifest(world.first).plans[CLASS].slice_s
    assert sum(manifest.plans[CLASS].slice_s.values()) == pytest.approx(40.0 * sum(planned.values()), rel=0.01)
    assert manifest.plans[CLASS].basis == "measured:"
    with pytest.raises(Conflict, match="applied already"):
        world.replanner.accept(done["id"])


def test_a_dismissed_proposal_is_not_repeated_during_the_cool_down(world: ReplanHarness) -> None:
    """For four cool-downs; then the measurements of that time are proposed."""
    world.send_telemetry(40.0)
    world.replanner.replan_all()
    world.replanner.dismiss(world.open()[0]["id"])
    world.send_telemetry(40.0)
    world.replanner.replan_all()
    assert not world.open()
    world.now += 4 * 100.0
    world.send_telemetry(40.0)
    world.replanner.replan_all()
    assert len(world.open()) == 1


def test_a_proposal_without_present_drift_is_withdrawn(world: ReplanHarness) -> None:
    """The devices recovered before an operator decided."""
    world.send_telemetry(40.0)
    world.replanner.replan_all()
    world.now += 100.0
    world.send_telemetry(1.0)
    world.replanner.replan_all()
    assert not world.open() and world.replanner.list_proposals()[0]["state"] == "withdrawn"


def test_auto_policy_rolls_out_and_converges_on_one_table(world: ReplanHarness) -> None:
    """Slow, quick, slow again: the second table holds rows for both, and nothing changes any more."""
    world.replanner.set_policy("small", [], {"mode": "auto", "cool_down_s": 0.0})
    world.send_telemetry(40.0)
    world.replanner.replan_all()
    assert [wanted.release for wanted in world.rolled_out] == [world.release] and world.release != world.first
    assert world.events()[-1] == ("replan.applied", "replan")

    for slowdown in (1.0, 40.0, 1.0, 40.0):
        world.send_telemetry(slowdown)
        world.replanner.replan_all()
    assert len(world.rolled_out) == 1 and not world.open()


def test_auto_policy_waits_for_the_cool_down(world: ReplanHarness) -> None:
    """Devices that wait for their stage still run the old table: nothing is proposed for them again."""
    world.send_telemetry(40.0)
    world.replanner.replan_all()
    number = world.open()[0]["id"]
    with world.database.write() as session:
        before = session.get_one(ProposalRow, number)
        before.state, before.decided = "applied", world.now
    world.replanner.set_policy("small", [], {"mode": "auto"})
    world.send_telemetry(40.0)
    world.replanner.replan_all()
    assert not world.open() and not world.rolled_out
    world.now += 100.0
    world.send_telemetry(40.0)
    world.replanner.replan_all()
    assert not world.open() and len(world.rolled_out) == 1


def test_off_policy_only_reports_the_drift(world: ReplanHarness) -> None:
    """Nothing is proposed."""
    world.replanner.set_policy("small", [], {"mode": "off"})
    world.send_telemetry(40.0)
    world.replanner.replan_all()
    (found,) = world.replanner.drift_report("small")
    assert not world.open() and found["policy"] == "off" and found["moves"]
    assert {drift["quantity"] for drift in found["drift"]} >= {"uplink", "round trip"}


def test_the_required_number_of_devices_is_configurable(world: ReplanHarness) -> None:
    """Two devices are too few, and so is one, unless `--devices` lowers the number."""
    world.send_telemetry(40.0, names=NAMES[:2])
    world.replanner.replan_all()
    assert not world.open() and world.replanner.drift_report()[0]["note"] == "2 of 3 devices have reported enough"
    world.replanner.set_policy("small", [], {"least_devices": 2})
    world.replanner.replan_all()
    assert len(world.open()) == 1


def test_a_group_with_its_own_policy_is_replanned_separately(world: ReplanHarness) -> None:
    """Only its device is slow, and only its device gets another table."""
    world.replanner.set_policy("small", ["roof"], {"mode": "auto", "least_devices": 1})
    world.send_telemetry(1.0, names=("one", "two"))
    world.send_telemetry(40.0, names=("three",))
    world.replanner.replan_all()
    assert [wanted.targets for wanted in world.rolled_out] == [["three"]]
    assert world.release == world.first and {drift["group"] for drift in world.replanner.drift_report()} == {
        None,
        "roof",
    }


def test_a_forced_cut_is_never_replanned(shelf: PreparedReleases) -> None:
    """Whatever is measured for it."""
    world = ReplanHarness(shelf, partition="device")
    world.send_telemetry(40.0)
    world.replanner.replan_all()
    assert not world.replanner.inspector.units() and not world.open()


def test_a_proposal_for_an_old_release_is_superseded(world: ReplanHarness) -> None:
    """A proposal for a release that is no longer desired cannot be accepted."""
    world.send_telemetry(40.0)
    world.replanner.replan_all()
    number = world.open()[0]["id"]
    digest, _ = world.maker.release("pool", recut=True)
    world.roll_out(RolloutSpec(digest, world.model.ref, world.devices, NAMES))
    with pytest.raises(Conflict, match="another release"):
        world.replanner.accept(number)
    world.replanner.replan_all()
    assert world.replanner.list_proposals()[0]["state"] == "superseded"


def test_an_unsignable_proposal_fails_with_the_reason(world: ReplanHarness) -> None:
    """Limits that no cut satisfies: nothing is signed or published, and there is no immediate retry."""
    world.send_telemetry(40.0)
    world.replanner.replan_all()
    number = world.open()[0]["id"]
    with world.database.write() as session:
        release = session.get_one(ReleaseRow, world.first)
        release.options = {**release.options, "limits": {"keep_raw_input": True, "force": "cloud"}}
    with pytest.raises(InfeasibleLimits):
        world.replanner.accept(number)
    failed = world.replanner.list_proposals()[0]
    assert failed["state"] == "failed" and failed["ended"] and not world.rolled_out


def test_replanned_tables_keep_the_limits_of_the_release(shelf: PreparedReleases) -> None:
    """The first layer stays on the device in each row of the new table, as in the old."""
    world = ReplanHarness(shelf, limits={"keep_first": 1})
    world.send_telemetry(40.0)
    world.replanner.replan_all()
    world.replanner.accept(world.open()[0]["id"])
    plan = world.maker.releasing.manifest(world.rolled_out[0].release).plans[CLASS]
    assert plan.required_local_layers and len(plan.rows) > 1 and all(row.device for row in plan.rows)


def test_telemetry_of_one_device_exports_as_a_costs_file(world: ReplanHarness) -> None:
    """Its seconds at work, the device's name and the number of requests; or the reason why there is none."""
    with pytest.raises(UsageError, match="has not reported yet"):
        world.replanner.costs_measured_on("small", world.devices[0])
    world.send_telemetry(40.0, names=("one",))
    found = world.replanner.costs_measured_on("small", world.devices[0])
    costs = load_costs(found)
    planned = world.maker.releasing.manifest(world.first).plans[CLASS].slice_s
    assert sum(layer.seconds["device"] for layer in costs.layers) == pytest.approx(40 * sum(planned.values()))
    assert costs.basis["device"] == f"measured: at work, on 1 of {CLASS}"
    assert (found["where"], found["measured"]) == ("one", "measured") and found["requests"] == 90
    assert sum(slice_["predicted_s"] for slice_ in found["slices"]) == pytest.approx(sum(planned.values()))
    with world.database.write() as session:
        session.execute(delete(Desired).where(Desired.device == "two"))
    with pytest.raises(UsageError, match="is not assigned small@1"):
        world.replanner.costs_measured_on("small", next(device for device in world.devices if device.name == "two"))


def test_scoped_operators_see_and_decide_only_their_proposals(world: ReplanHarness) -> None:
    """Devices of other groups and proposals about them are not visible."""
    world.replanner.set_policy("small", ["roof"], {"least_devices": 1})
    world.send_telemetry(40.0)
    world.replanner.replan_all()
    roof, cellar = (world.replanner.scoped_to(frozenset({name})) for name in ("roof", "cellar"))
    (mine,) = roof.list_proposals()
    assert mine["devices"] == ["three"] and [drift["devices"] for drift in roof.drift_report()] == [["three"]]
    assert not cellar.list_proposals() and not cellar.drift_report()
    with pytest.raises(NotFound):
        cellar.dismiss(mine["id"])
    with pytest.raises(UsageError, match="groups of your own: cellar"):
        cellar.set_policy("small", [], {"mode": "auto"})
    with pytest.raises(NotFound):
        cellar.set_policy("small", ["roof"], {"mode": "auto"})
    assert "roof" not in {policy["group"] for policy in cellar.list_policies()}
    assert roof.set_policy("small", ["roof"], {"mode": "off"})
    assert roof.dismiss(mine["id"])["state"] == "dismissed"


def test_proposals_from_emulated_devices_are_marked(world: ReplanHarness) -> None:
    """The proposal carries the mark."""
    world.send_telemetry(40.0, emulated=True)
    world.replanner.replan_all()
    assert world.open()[0]["basis"] == "emulated"


def test_proposals_from_simulated_devices_are_marked(world: ReplanHarness) -> None:
    """Their birth message carries the mark."""
    with world.database.write() as session:
        for device in session.scalars(select(Device)):
            device.birth = {"simulated": True}
    world.send_telemetry(40.0)
    world.replanner.replan_all()
    assert world.open()[0]["basis"] == "simulated"


def test_the_narrowest_policy_applies() -> None:
    """Model and group, model, group, all; the default is to propose."""
    auto, off = Policy(mode="auto"), Policy(mode="off")
    assert effective_policy({}, "m", "g").mode == "propose"
    assert effective_policy({("", ""): off}, "m", "g").mode == "off"
    assert effective_policy({("", "g"): off, ("m", ""): auto}, "m", "g").mode == "auto"
    assert effective_policy({("m", "g"): off, ("m", ""): auto}, "m", "g").mode == "off"
    assert effective_policy({("m", "g"): off}, "m", "h").mode == "propose"


@pytest.mark.parametrize("wrong", [{"mode": "perhaps"}, {"least_gain": 0.0}, {"least_devices": 0}, {"observe_s": -1.0}])
def test_an_invalid_policy_is_refused(wrong: dict[str, Any], world: ReplanHarness) -> None:
    """Also one for an unknown model."""
    with pytest.raises(UsageError, match="not a policy"):
        with_changes(Policy(), wrong)
    with pytest.raises(NotFound):
        world.replanner.set_policy("nobody", [], {"mode": "off"})


def test_policies_are_stored_and_listed(world: ReplanHarness) -> None:
    """Fields that are left out keep their value."""
    world.replanner.set_policy("small", [], {"least_gain": 0.3})
    world.replanner.set_policy("", [], {"mode": "off"})
    small = next(policy for policy in world.replanner.list_policies() if policy["model"] == "small")
    assert (small["mode"], small["least_gain"], small["observe_s"]) == ("propose", 0.3, 10.0)
    assert {policy["mode"] for policy in world.replanner.list_policies() if policy["model"] is None} == {"off"}
