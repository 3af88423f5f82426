"""What devices that run a family measured: shown against its plan, by slice of each variant, and used for the variants'
own costs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgesplit.errors import UsageError
from edgesplit.links import parse_link
from edgesplit.mqtt.messages import PhaseSeconds, SliceSeconds, Telemetry, TelemetryWindow
from edgesplit.plan import Link, Plan, Row
from edgesplit_controller.fleet.gateways import Gateways
from edgesplit_controller.planning.planner_service import PlanOptions
from edgesplit_controller.replan.evidence import TelemetryEvidence, estimate, measurements_of
from edgesplit_controller.replan.finding import drift
from edgesplit_controller.replan.replanner import Replanner
from edgesplit_controller.rollout.engine import CreatedRollout
from edgesplit_controller.storage.tables.core import Deployment, Desired, Device, TelemetryRow
from edgesplit_partitioner import load_costs
from support.family_maker import FamilyMaker
from support.release_maker import CLASS

LINK = "1gbit/0.1ms"
SLOWER: Mapping[str, float] = {"small": 3.0, "large": 5.0}
"""How many times slower each variant is at work than predicted."""


class FamilyAtWork:
    """One device that runs a family of two models."""

    def __init__(self, folder: Path) -> None:
        self.maker = FamilyMaker(folder)
        self.family = self.maker.create("small", "large")
        self.now = 10_000.0
        self.sent = 0
        self.replanner = Replanner(
            self.maker.database, self.maker.registry, self.maker.planning, self.maker.releasing,
            Gateways(self.maker.database, now=self.clock, model_if_split=self.maker.releasing.split_by_gateway),
            roll_out=lambda spec: CreatedRollout(1, {}), now=self.clock,
        )  # fmt: skip
        self.release, manifest = self.maker.releasing.prepare(self.family, {CLASS: parse_link(LINK)}, PlanOptions())
        self.maker.releasing.publish(self.family, self.release, PlanOptions())
        self.plan: Plan = manifest.plans[CLASS]
        self.device = Device(
            name="one", device_class=CLASS, group="", labels={}, link=LINK, certificate_serial="1",
            public_key_sha256="", enrolled=1.0, counter=0,
        )  # fmt: skip
        with self.maker.database.write() as session:
            session.add(self.device)
            deployment = Deployment(
                release=self.release, model=self.family.ref, targets=["one"], devices=["one"], options={}, created=0.0
            )
            session.add(deployment)
            session.flush()
            session.merge(Desired(device="one", model="birds", release=self.release, deployment=deployment.id))

    def clock(self) -> float:
        return self.now

    def work(self, *rows: str, seconds: int = 80) -> None:
        """Send telemetry of so many seconds, a window for each of these rows in turn."""
        slices = tuple(
            SliceSeconds(name, planned_s * SLOWER[name.partition(".")[0]], 50)
            for name, planned_s in self.plan.slice_s.items()
        )
        link = parse_link(LINK)
        with self.maker.database.write() as session:
            for number in range(seconds // 2):
                self.now += 2.0
                self.sent += 1
                row = rows[number % len(rows)]
                window = TelemetryWindow(model="birds", release=self.release, row=row, requests=9, slices=slices)
                message = Telemetry(
                    session=1, sequence=self.sent, emulated=False, up_bytes_per_s=link.up_bytes_per_s,
                    rtt_s=link.rtt_s, remote_usable=True, models=(window,),
                )  # fmt: skip
                session.add(TelemetryRow(
                    device="one", at=self.now, stored=self.now, session=1, sequence=self.sent,
                    content=msgspec.to_builtins(message),
                ))  # fmt: skip


@pytest.fixture
def world(tmp_path: Path) -> FamilyAtWork:
    return FamilyAtWork(tmp_path)


def test_drift_of_a_family_is_shown_by_slice_of_each_variant(world: FamilyAtWork) -> None:
    """Predicted beside measured; its table is not replanned, and the reason says what to do."""
    world.work("small:local", "large:local")
    world.replanner.set_policy("birds", [], {"mode": "auto", "least_devices": 1, "observe_s": 10.0})
    world.replanner.replan_all()
    (shown,) = world.replanner.drift_report()
    factors = {item["quantity"]: item["factor"] for item in shown["drift"]}
    for name in world.plan.slice_s:
        assert factors[f"device {name}"] == pytest.approx(SLOWER[name.partition(".")[0]])
    assert "edgectl deploy birds" in shown["note"] and not shown["moves"] and not world.replanner.list_proposals()


def test_rows_of_two_variants_that_send_the_same_tensor_are_shown_apart() -> None:
    """What each sent and the server's seconds for it, once for each row."""
    rows = tuple(
        Row(
            name=f"{name}:remote", remote=(f"{name}.s01",), sends=("x",), receives=("y",), up_bytes=1_000,
            remote_s=remote_s, variant=name, accuracy=0.5,
        )
        for name, remote_s in (("small", 0.01), ("large", 0.05))
    )  # fmt: skip
    link = Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.01)
    plan = Plan(model="birds@1", device_class=CLASS, rows=rows, link=link)
    messages = [
        TelemetryEvidence(
            at=float(number), emulated=False, up_bytes_per_s=1e6, rtt_s=0.01, remote_usable=True,
            models=(TelemetryWindow(
                model="birds", release="r", row=row.name, requests=2, up_bytes=2 * factor * 1_000,
                phases=(PhaseSeconds("remote", 2 * 3 * row.remote_s, ((0, 2),)),),
            ),),
        )
        for number, (row, factor) in enumerate(zip(rows * 3, (4, 5) * 3, strict=True))
    ]  # fmt: skip
    measured = measurements_of("one", messages, "birds", "r", plan)
    assert measured is not None
    layers = {"small.s01": ("small:all",), "large.s01": ("large:all",)}
    shown = [(item["quantity"], item["factor"]) for item in drift(plan, estimate([measured], plan, layers), layers)]
    assert shown[3:-1] == [
        ("server small:remote", pytest.approx(3.0)), ("server large:remote", pytest.approx(3.0)),
        ("sent by small:remote", pytest.approx(4.0)), ("sent by large:remote", pytest.approx(5.0)),
    ]  # fmt: skip


def test_the_next_table_is_planned_by_what_devices_measured_of_each_variant(world: FamilyAtWork) -> None:
    """A variant's costs, also of a plan of that model alone; not before a minute of work."""
    world.maker.planning.at_work = world.replanner.inspector.times_at_work
    models = {"small": world.maker.model, "large": world.maker.large}
    predicted = {name: device_s(world.maker.planning.costs(model, CLASS)) for name, model in models.items()}
    world.work("small:local", seconds=20)
    assert world.replanner.inspector.times_at_work(models["small"], CLASS) is None
    world.work("small:local")
    for name, model in models.items():
        assert device_s(world.maker.planning.costs(model, CLASS)) == pytest.approx(SLOWER[name] * predicted[name])
    later, manifest = world.maker.releasing.prepare(world.family, {CLASS: parse_link(LINK)}, PlanOptions())
    assert later != world.release
    assert manifest.plans[CLASS].row("small:local").device_s == pytest.approx(
        3.0 * world.plan.row("small:local").device_s
    )


def device_s(costs: Any) -> float:
    return sum(layer.seconds["device"] for layer in costs.layers)


def test_a_variant_that_a_device_runs_in_a_family_exports_as_a_costs_file(world: FamilyAtWork) -> None:
    """By the model's name; of the family's, the error names its variants."""
    with pytest.raises(UsageError, match="has not reported yet"):
        world.replanner.costs_measured_on("large", world.device)
    world.work("large:local")
    found = world.replanner.costs_measured_on("large", world.device)
    planned = {name: value for name, value in world.plan.slice_s.items() if name.startswith("large.")}
    assert device_s(load_costs(found)) == pytest.approx(5.0 * sum(planned.values()))
    assert {layer for slice_ in found["slices"] for layer in slice_["layers"]} == {
        layer["name"] for layer in found["layers"]
    }
    with pytest.raises(UsageError, match="birds@1 is a family: name one of its variants, small@1 or large@1"):
        world.replanner.costs_measured_on("birds", world.device)
