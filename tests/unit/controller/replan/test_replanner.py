"""The loop over a real registry, planner and repository: what it proposes, what it does by itself, what it leaves."""

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


class Shelf:
    """What takes long and is the same for all: a model that was pushed, keys, and a first release for each wish."""

    def __init__(self, folder: Path) -> None:
        self.maker = ReleaseMaker(folder)
        self.database: Database = self.maker.releasing._database
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

    def __init__(self, shelf: Shelf, **wish: Any) -> None:
        self.maker, self.database = shelf.maker, shelf.database
        self.now = 10_000.0
        self.model = self.maker.model
        self.rolled_out: list[RolloutSpec] = []
        self.told = 0
        self.replanner = Replanner(
            self.database,
            self.maker.releasing._registry,
            self.maker.releasing._planning,
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

    def tell(self, slowdown: float, *, names: Sequence[str] = NAMES, seconds: int = 20, emulated: bool = False) -> None:
        """Devices work for so long, so many times slower than first predicted."""
        planned = self.maker.releasing.manifest(self.first).plans[CLASS].slice_s
        total_s = sum(planned.values()) * slowdown
        manifest = self.maker.releasing.manifest(self.release)
        share = {one.name: len(one.layers) for one in manifest.slices}
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
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture
def world(shelf: Shelf) -> ReplanHarness:
    return ReplanHarness(shelf)


def test_slow_devices_get_a_proposal_and_no_other_table_until_somebody_accepts(world: ReplanHarness) -> None:
    """It says what it predicts, of what kind of devices, and why; looked at again it is the same one."""
    world.tell(40.0)
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


def test_accepted_it_is_signed_by_the_planner_and_rolled_out(world: ReplanHarness) -> None:
    """Another cut of the release that the release key signed; the new one's seconds are the measured ones."""
    world.tell(40.0)
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


def test_dismissed_it_is_not_proposed_again_for_a_while(world: ReplanHarness) -> None:
    """Four times the cool-down; then what is measured then is proposed."""
    world.tell(40.0)
    world.replanner.replan_all()
    world.replanner.dismiss(world.open()[0]["id"])
    world.tell(40.0)
    world.replanner.replan_all()
    assert not world.open()
    world.now += 4 * 100.0
    world.tell(40.0)
    world.replanner.replan_all()
    assert len(world.open()) == 1


def test_what_is_measured_no_more_is_withdrawn(world: ReplanHarness) -> None:
    """The devices recovered before anybody decided."""
    world.tell(40.0)
    world.replanner.replan_all()
    world.now += 100.0
    world.tell(1.0)
    world.replanner.replan_all()
    assert not world.open() and world.replanner.list_proposals()[0]["state"] == "withdrawn"


def test_auto_rolls_out_by_itself_and_back_and_forth_is_served_by_one_table(world: ReplanHarness) -> None:
    """Slow, quick, slow again: the second table holds rows for both, and nothing moves any more."""
    world.replanner.set_policy("small", [], {"mode": "auto", "cool_down_s": 0.0})
    world.tell(40.0)
    world.replanner.replan_all()
    assert [wanted.release for wanted in world.rolled_out] == [world.release] and world.release != world.first
    assert world.events()[-1] == ("replan.applied", "replan")

    for slowdown in (1.0, 40.0, 1.0, 40.0):
        world.tell(slowdown)
        world.replanner.replan_all()
    assert len(world.rolled_out) == 1 and not world.open()


def test_auto_waits_until_the_last_change_has_cooled_down(world: ReplanHarness) -> None:
    """Devices that wait for their stage are still on the old table meanwhile: nothing is proposed for them again."""
    world.tell(40.0)
    world.replanner.replan_all()
    number = world.open()[0]["id"]
    with world.database.write() as session:
        before = session.get_one(ProposalRow, number)
        before.state, before.decided = "applied", world.now
    world.replanner.set_policy("small", [], {"mode": "auto"})
    world.tell(40.0)
    world.replanner.replan_all()
    assert not world.open() and not world.rolled_out
    world.now += 100.0
    world.tell(40.0)
    world.replanner.replan_all()
    assert not world.open() and len(world.rolled_out) == 1


def test_off_does_nothing_and_still_shows_the_drift(world: ReplanHarness) -> None:
    """The operator sees what would be."""
    world.replanner.set_policy("small", [], {"mode": "off"})
    world.tell(40.0)
    world.replanner.replan_all()
    (found,) = world.replanner.drift_report("small")
    assert not world.open() and found["policy"] == "off" and found["moves"]
    assert {one["quantity"] for one in found["drift"]} >= {"uplink", "round trip"}


def test_two_of_three_devices_are_not_enough_until_the_operator_says_so(world: ReplanHarness) -> None:
    """Nor is one: `--devices` is the operator's word."""
    world.tell(40.0, names=NAMES[:2])
    world.replanner.replan_all()
    assert not world.open() and world.replanner.drift_report()[0]["note"] == "2 of 3 devices have reported enough"
    world.replanner.set_policy("small", [], {"least_devices": 2})
    world.replanner.replan_all()
    assert len(world.open()) == 1


def test_a_group_with_a_policy_of_its_own_is_looked_at_apart(world: ReplanHarness) -> None:
    """Its device alone is slow, and alone is moved."""
    world.replanner.set_policy("small", ["roof"], {"mode": "auto", "least_devices": 1})
    world.tell(1.0, names=("one", "two"))
    world.tell(40.0, names=("three",))
    world.replanner.replan_all()
    assert [wanted.targets for wanted in world.rolled_out] == [["three"]]
    assert world.release == world.first and {one["group"] for one in world.replanner.drift_report()} == {None, "roof"}


def test_a_forced_cut_is_the_operators(shelf: Shelf) -> None:
    """Whatever is measured of it."""
    world = ReplanHarness(shelf, partition="device")
    world.tell(40.0)
    world.replanner.replan_all()
    assert not world.replanner.inspector.units() and not world.open()


def test_what_a_newer_release_leaves_behind_is_superseded(world: ReplanHarness) -> None:
    """A proposal for a release that nobody shall run any more cannot be accepted."""
    world.tell(40.0)
    world.replanner.replan_all()
    number = world.open()[0]["id"]
    digest, _ = world.maker.release("pool", recut=True)
    world.roll_out(RolloutSpec(digest, world.model.ref, world.devices, NAMES))
    with pytest.raises(Conflict, match="another release"):
        world.replanner.accept(number)
    world.replanner.replan_all()
    assert world.replanner.list_proposals()[0]["state"] == "superseded"


def test_what_the_planner_may_not_sign_fails_and_says_why(world: ReplanHarness) -> None:
    """Limits that no cut keeps: nothing is signed, nothing goes out, and it is not tried again at once."""
    world.tell(40.0)
    world.replanner.replan_all()
    number = world.open()[0]["id"]
    with world.database.write() as session:
        release = session.get_one(ReleaseRow, world.first)
        release.options = {**release.options, "limits": {"keep_raw_input": True, "force": "cloud"}}
    with pytest.raises(InfeasibleLimits):
        world.replanner.accept(number)
    failed = world.replanner.list_proposals()[0]
    assert failed["state"] == "failed" and failed["ended"] and not world.rolled_out


def test_the_limits_of_the_release_hold_in_every_other_table(shelf: Shelf) -> None:
    """The first layer stays on the device in each row of the new table, as in the old."""
    world = ReplanHarness(shelf, limits={"keep_first": 1})
    world.tell(40.0)
    world.replanner.replan_all()
    world.replanner.accept(world.open()[0]["id"])
    plan = world.maker.releasing.manifest(world.rolled_out[0].release).plans[CLASS]
    assert plan.required_local_layers and len(plan.rows) > 1 and all(row.device for row in plan.rows)


def test_what_one_device_measured_is_a_costs_file(world: ReplanHarness) -> None:
    """Its seconds, as they were at work, by whom and over how many requests; and why there is none."""
    with pytest.raises(UsageError, match="has not reported yet"):
        world.replanner.costs_measured_on("small", world.devices[0])
    world.tell(40.0, names=("one",))
    found = world.replanner.costs_measured_on("small", world.devices[0])
    costs = load_costs(found)
    planned = world.maker.releasing.manifest(world.first).plans[CLASS].slice_s
    assert sum(layer.seconds["device"] for layer in costs.layers) == pytest.approx(40 * sum(planned.values()))
    assert costs.basis["device"] == f"measured: at work, on 1 of {CLASS}"
    assert (found["where"], found["measured"]) == ("one", "measured") and found["requests"] == 90
    assert sum(one["predicted_s"] for one in found["slices"]) == pytest.approx(sum(planned.values()))
    with world.database.write() as session:
        session.execute(delete(Desired).where(Desired.device == "two"))
    with pytest.raises(UsageError, match="is not assigned small@1"):
        world.replanner.costs_measured_on("small", next(one for one in world.devices if one.name == "two"))


def test_an_operator_of_some_groups_sees_and_decides_what_is_theirs(world: ReplanHarness) -> None:
    """Devices of other groups do not exist for them, nor do proposals that are about some."""
    world.replanner.set_policy("small", ["roof"], {"least_devices": 1})
    world.tell(40.0)
    world.replanner.replan_all()
    roof, cellar = (world.replanner.scoped_to(frozenset({name})) for name in ("roof", "cellar"))
    (mine,) = roof.list_proposals()
    assert mine["devices"] == ["three"] and [one["devices"] for one in roof.drift_report()] == [["three"]]
    assert not cellar.list_proposals() and not cellar.drift_report()
    with pytest.raises(NotFound):
        cellar.dismiss(mine["id"])
    with pytest.raises(UsageError, match="groups of your own: cellar"):
        cellar.set_policy("small", [], {"mode": "auto"})
    with pytest.raises(NotFound):
        cellar.set_policy("small", ["roof"], {"mode": "auto"})
    assert "roof" not in {one["group"] for one in cellar.list_policies()}
    assert roof.set_policy("small", ["roof"], {"mode": "off"})
    assert roof.dismiss(mine["id"])["state"] == "dismissed"


def test_emulated_devices_are_marked(world: ReplanHarness) -> None:
    """What comes of them says so."""
    world.tell(40.0, emulated=True)
    world.replanner.replan_all()
    assert world.open()[0]["basis"] == "emulated"


def test_simulated_devices_are_marked(world: ReplanHarness) -> None:
    """They say it at their birth."""
    with world.database.write() as session:
        for device in session.scalars(select(Device)):
            device.birth = {"simulated": True}
    world.tell(40.0)
    world.replanner.replan_all()
    assert world.open()[0]["basis"] == "simulated"


def test_a_policy_is_the_narrowest_that_was_set() -> None:
    """Model and group, model, group, all; and proposing where nothing was said."""
    auto, off = Policy(mode="auto"), Policy(mode="off")
    assert effective_policy({}, "m", "g").mode == "propose"
    assert effective_policy({("", ""): off}, "m", "g").mode == "off"
    assert effective_policy({("", "g"): off, ("m", ""): auto}, "m", "g").mode == "auto"
    assert effective_policy({("m", "g"): off, ("m", ""): auto}, "m", "g").mode == "off"
    assert effective_policy({("m", "g"): off}, "m", "h").mode == "propose"


@pytest.mark.parametrize("wrong", [{"mode": "perhaps"}, {"least_gain": 0.0}, {"least_devices": 0}, {"observe_s": -1.0}])
def test_what_is_no_policy_is_refused(wrong: dict[str, Any], world: ReplanHarness) -> None:
    """And a model that is not there, too."""
    with pytest.raises(UsageError, match="not a policy"):
        with_changes(Policy(), wrong)
    with pytest.raises(NotFound):
        world.replanner.set_policy("nobody", [], {"mode": "off"})


def test_policies_are_kept_and_shown(world: ReplanHarness) -> None:
    """What is left out stays as it was."""
    world.replanner.set_policy("small", [], {"least_gain": 0.3})
    world.replanner.set_policy("", [], {"mode": "off"})
    small = next(one for one in world.replanner.list_policies() if one["model"] == "small")
    assert (small["mode"], small["least_gain"], small["observe_s"]) == ("propose", 0.3, 10.0)
    assert {one["mode"] for one in world.replanner.list_policies() if one["model"] is None} == {"off"}
