"""A model, its plan, and devices that tell of it: seeded, with no network and no clock but the one handed in."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from edgesplit.mqtt.messages import PhaseSeconds, SliceSeconds, TelemetryWindow
from edgesplit.plan import Conditions, Link, Plan, choose_row, latency_s
from edgesplit_controller.replan.evidence import DeviceMeasurements, Kind, TelemetryEvidence, best_kind, measurements_of
from edgesplit_partitioner import plan as make_plan
from edgesplit_partitioner.costs.model import Costs, LayerCost, TensorCost
from edgesplit_partitioner.slicing import cut_sets

MODEL, RELEASE = "eyes", "ab" * 32
LINK = Link(up_bytes_per_s=2e6, down_bytes_per_s=4e6, rtt_s=0.01)
DEVICE_S = {"stem": 0.004, "body": 0.02, "neck": 0.006, "head": 0.002}
SIZES = {"stem": 400_000, "body": 60_000, "neck": 12_000, "head": 40}


def costs_of(device_s: Mapping[str, float] = DEVICE_S, remote_part: float = 0.1, image_bytes: int = 30_000) -> Costs:
    """Four layers in a row; what they write gets smaller."""
    names = list(device_s)
    layers = [
        LayerCost(
            name=name,
            reads=("image" if not place else f"{names[place - 1]}.out",),
            writes={f"{name}.out": TensorCost(bytes=SIZES[name])},
            seconds={"device": device_s[name], "cloud": device_s[name] * remote_part},
            joules={"device": device_s[name] * 3.0},
            weight_bytes=1_000,
        )
        for place, name in enumerate(names)
    ]
    return Costs(
        model=f"{MODEL}@1",
        tiers=("device", "cloud"),
        inputs={"image": TensorCost(bytes=image_bytes)},
        outputs=("head.out",),
        layers=tuple(layers),
        idle_watts={"device": 2.0},
        device_class="pi",
        basis={"device": "predicted: a profile", "cloud": "measured: here"},
    )


def released(table: Plan, costs: Costs) -> tuple[Plan, dict[str, tuple[str, ...]]]:
    """The table as a release holds it, a slice per layer, and the slices' layers."""
    names = [layer.name for layer in costs.layers]
    assert cut_sets(table)
    rows = tuple(
        msgspec.structs.replace(
            row,
            device=tuple(f"s-{name}" for name in names if name in row.layers),
            remote=tuple(f"s-{name}" for name in names if name not in row.layers),
            layers=(),
        )
        for row in table.rows
    )
    seconds = {f"s-{layer.name}": layer.seconds["device"] for layer in costs.layers}
    return msgspec.structs.replace(table, rows=rows, slice_s=seconds), {f"s-{name}": (name,) for name in names}


@dataclass
class Fleet:
    """Devices of one class at work, as they really are."""

    plan: Plan
    slow: Mapping[str, float] = field(default_factory=dict)
    """By slice, how many times slower than planned."""
    link: Link = LINK
    server: float = 1.0
    noise: float = 0.03
    seed: int = 7
    kind: Kind = "measured"

    def telemetry(
        self, name: str, moments: int = 20, *, every_s: float = 2.0, links: Sequence[Link] = ()
    ) -> list[TelemetryEvidence]:
        """Telemetry windows of one device, oldest first; its link cycles through `links`."""
        rng = random.Random(f"{self.seed} {name}")
        told = []
        for place in range(moments):
            link = (links or [self.link])[place % len(links or [self.link])]
            told.append(self.message(place * every_s, link, rng))
        return told

    def message(self, at: float, link: Link, rng: random.Random) -> TelemetryEvidence:
        def about(value: float) -> float:
            return value * rng.lognormvariate(0.0, self.noise)

        seconds = {name: planned_s * self.slow.get(name, 1.0) for name, planned_s in self.plan.slice_s.items()}
        slowdown = sum(seconds.values()) / sum(self.plan.slice_s.values())
        row = choose_row(self.plan, Conditions(link=link, device_slowdown=slowdown))
        assert row is not None
        phases = () if row.is_local else (PhaseSeconds("remote", 10 * about(row.remote_s * self.server), ()),)
        window = TelemetryWindow(
            model=MODEL,
            release=RELEASE,
            row=row.name,
            requests=10,
            up_bytes=10 * row.up_bytes,
            latency_p50_s=latency_s(row, Conditions(link=link)),
            slices=tuple(SliceSeconds(name, about(seconds[name]), 50) for name in seconds),
            phases=phases,
        )
        return TelemetryEvidence(
            at=at,
            emulated=self.kind == "emulated",
            up_bytes_per_s=about(link.up_bytes_per_s),
            down_bytes_per_s=about(link.down_bytes_per_s),
            rtt_s=about(link.rtt_s),
            remote_usable=True,
            models=(window,),
        )


def device_measurements(plan: Plan, told: Mapping[str, Sequence[TelemetryEvidence]]) -> list[DeviceMeasurements]:
    """Evidence of these devices about the plan; those named `sim…` are simulated."""
    measured = [
        measurements_of(name, windows, MODEL, RELEASE, plan, simulated=name.startswith("sim"))
        for name, windows in told.items()
    ]
    return best_kind(device for device in measured if device is not None)


def world(
    costs: Costs | None = None, link: Link = LINK, **wish: object
) -> tuple[Costs, Plan, dict[str, tuple[str, ...]]]:
    """Costs, and the plan that a release made of them holds."""
    costs = costs or costs_of()
    plan, layers = released(make_plan(costs, {"device-cloud": link}, **wish).table, costs)  # type: ignore[arg-type]
    return costs, plan, layers
