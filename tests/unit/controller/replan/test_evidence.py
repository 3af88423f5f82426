"""Evidence of a device class against its plan: true drift is found, noise and lying devices change nothing."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.mqtt.messages import PhaseSeconds, SliceSeconds, TelemetryWindow
from edgesplit.plan import Link
from edgesplit_controller.replan.evidence import (
    TelemetryEvidence,
    estimate,
    measurements_of,
    parse_message,
    robust_median,
)
from edgesplit_partitioner.costs.from_telemetry import MAX_FACTOR, with_measurements
from edgesplit_partitioner.costs.model import check_costs
from support.replan_samples import LINK, MODEL, RELEASE, Fleet, costs_of, device_measurements, world

_, PLAN, LAYERS = world(costs_of(remote_part=0.6))
SLOW = Link(up_bytes_per_s=2e5, down_bytes_per_s=4e6, rtt_s=0.08)


def factors(told: dict[str, list[TelemetryEvidence]]) -> dict[str, float]:
    """By slice, the estimated factor of the plan's seconds."""
    seen = estimate(device_measurements(PLAN, told), PLAN, LAYERS)
    return {group.layers[0]: group.seconds / PLAN.slice_s[f"s-{group.layers[0]}"] for group in seen.device}


def test_slower_layers_and_links_are_estimated_through_noise() -> None:
    """Each quantity by itself, within a few per cent."""
    fleet = Fleet(PLAN, slow={"s-body": 3.0}, link=SLOW)
    told = {name: fleet.telemetry(name) for name in ("a", "b", "c", "d", "e")}
    seen = estimate(device_measurements(PLAN, told), PLAN, LAYERS)
    assert seen.link.up_bytes_per_s == pytest.approx(2e5, rel=0.05)
    assert seen.link.rtt_s == pytest.approx(0.08, rel=0.05)
    found = factors(told)
    assert found["body"] == pytest.approx(3.0, rel=0.05) and found["stem"] == pytest.approx(1.0, rel=0.05)
    assert (seen.devices, seen.basis) == (5, "measured")


@pytest.mark.parametrize("lie", [1e-9, 1e-3, 40.0, 1e12])
def test_one_lying_device_stays_between_the_honest_values(lie: float) -> None:
    """Whatever one device claims, its class's estimate lies between two honest ones."""
    fleet = Fleet(PLAN, link=SLOW)
    liar = Fleet(PLAN, slow=dict.fromkeys(PLAN.slice_s, lie), link=Link(
        up_bytes_per_s=max(200.0, 2e6 / lie), down_bytes_per_s=4e6, rtt_s=min(50.0, 0.01 * lie)
    ))  # fmt: skip
    honest = {name: fleet.telemetry(name) for name in ("a", "b")}
    said = {name: factors({name: values}) for name, values in honest.items()}
    found = factors({**honest, "liar": liar.telemetry("liar")})
    for name, factor in found.items():
        low, high = sorted(value[name] for value in said.values())
        assert low <= factor <= high


def test_many_messages_add_no_weight() -> None:
    """A device that sends a hundred times as much counts once."""
    fleet, loud = Fleet(PLAN), Fleet(PLAN, slow=dict.fromkeys(PLAN.slice_s, 9.0))
    told = {"a": fleet.telemetry("a", 8), "b": fleet.telemetry("b", 8), "loud": loud.telemetry("loud", 800)}
    assert all(factor == pytest.approx(1.0, rel=0.1) for factor in factors(told).values())


def test_of_two_devices_the_one_nearer_to_the_plan_counts() -> None:
    """Both must have drifted before the estimate drifts."""
    fleet, slow = Fleet(PLAN), Fleet(PLAN, slow=dict.fromkeys(PLAN.slice_s, 4.0))
    one = factors({"a": fleet.telemetry("a"), "b": slow.telemetry("b")})
    both = factors({"a": slow.telemetry("a"), "b": slow.telemetry("b")})
    assert all(factor == pytest.approx(1.0, rel=0.1) for factor in one.values())
    assert all(factor == pytest.approx(4.0, rel=0.1) for factor in both.values())


def test_emulated_and_simulated_devices_are_no_evidence_for_real_ones() -> None:
    """A hundred emulated devices beside two real ones are ignored; alone they count, and the result is marked."""
    real = Fleet(PLAN)
    emulated = Fleet(PLAN, slow=dict.fromkeys(PLAN.slice_s, 5.0), kind="emulated")
    told = {f"e{number}": emulated.telemetry(f"e{number}", 8) for number in range(20)}
    alone = device_measurements(PLAN, told)
    mixed = device_measurements(PLAN, {**told, "r1": real.telemetry("r1"), "r2": real.telemetry("r2")})
    assert {item.kind for item in alone} == {"emulated"} and len(alone) == 20
    assert sorted(item.device for item in mixed) == ["r1", "r2"]
    assert estimate(alone, PLAN, LAYERS).basis == "emulated"
    simulated = {f"sim{number}": real.telemetry(f"sim{number}", 8) for number in range(9)}
    assert {device.kind for device in device_measurements(PLAN, simulated)} == {"simulated"}
    assert len(device_measurements(PLAN, {**told, **simulated})) == 20


def test_a_device_that_changes_its_kind_counts_from_then_on() -> None:
    """The name of an emulated device may be a real one's tomorrow."""
    before, after = Fleet(PLAN, kind="emulated").telemetry("a", 10), Fleet(PLAN).telemetry("a", 5)
    one = measurements_of("a", [*before, *after], MODEL, RELEASE, PLAN)
    assert one is not None and one.kind == "measured" and len(one.observations) == 5


def test_times_of_an_overloaded_emulation_host_are_ignored() -> None:
    """Late samples are the host's fault; the link's samples still count."""
    told = [
        msgspec.structs.replace(
            window, models=tuple(msgspec.structs.replace(model, emulation_overruns=9) for model in window.models)
        )
        for window in Fleet(PLAN, slow={"s-body": 8.0}, link=SLOW, kind="emulated").telemetry("a")
    ]
    one = measurements_of("a", told, MODEL, RELEASE, PLAN)
    assert one is not None and not one.slice_s and one.link.rtt_s == pytest.approx(0.08, rel=0.1)


@pytest.mark.parametrize(
    "change",
    [{"up_bytes_per_s": 0.0}, {"up_bytes_per_s": 1e15}, {"rtt_s": 1e9}, {"remote_usable": False}, {"models": ()}],
)
def test_windows_without_link_or_requests_are_no_evidence(change: dict[str, object]) -> None:
    """A window without the cloud, or without a request, reveals nothing about the plan."""
    told = [msgspec.structs.replace(window, **change) for window in Fleet(PLAN).telemetry("a")]
    assert measurements_of("a", told, MODEL, RELEASE, PLAN) is None


def test_windows_of_another_release_are_ignored() -> None:
    """After a rollout the evidence starts again."""
    assert measurements_of("a", Fleet(PLAN).telemetry("a"), MODEL, "cd" * 32, PLAN) is None


def test_a_stored_message_parses_and_a_corrupt_one_is_skipped() -> None:
    """Also one of an agent before slices were reported."""
    told = Fleet(PLAN).telemetry("a", 1)[0]
    stored = msgspec.to_builtins(told)
    assert parse_message(stored) == told
    del stored["down_bytes_per_s"], stored["models"][0]["slices"]
    older = parse_message(stored)
    assert older is not None and measurements_of("a", [older], MODEL, RELEASE, PLAN)
    assert parse_message({**stored, "models": 7}) is None and parse_message({}) is None


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9), st.floats(1e-6, 1e6))
def test_the_median_is_one_of_the_values_and_halves_them(values: list[float], assumed: float) -> None:
    """Fewer than half of the values cannot move it beyond the others."""
    found = robust_median(values, assumed)
    assert found in values
    assert sum(value < found for value in values) <= len(values) / 2
    assert sum(value > found for value in values) <= len(values) / 2


AMOUNTS = st.floats(0, 1e15)
NAMES = st.sampled_from([*(row.name for row in PLAN.rows), *PLAN.slice_s, "", "nobody", "input", "x" * 64])
WINDOWS = st.builds(
    TelemetryWindow,
    model=st.just(MODEL),
    release=st.just(RELEASE),
    row=NAMES,
    requests=st.integers(0, 2**53),
    switches=st.integers(0, 1),
    fallbacks=st.integers(0, 1),
    emulation_overruns=st.integers(0, 2**53),
    up_bytes=st.integers(0, 2**53),
    slices=st.lists(st.builds(SliceSeconds, NAMES, AMOUNTS, st.integers(0, 2**53)), max_size=4).map(tuple),
    phases=st.lists(
        st.builds(PhaseSeconds, st.sampled_from(["remote", "remote_queue", "x"]), AMOUNTS, st.just(())), max_size=3
    ).map(tuple),
)


@given(
    st.lists(
        st.lists(st.tuples(WINDOWS, AMOUNTS, AMOUNTS, AMOUNTS, st.booleans()), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    )
)
def test_any_telemetry_yields_valid_bounded_costs(
    said: list[list[tuple[TelemetryWindow, float, float, float, bool]]],
) -> None:
    """Any figures that the wire lets through: no exception, and nothing in the next costs that no plan can be made of;
    no layer moves by more than its bound."""
    told = {
        f"d{number}": [
            TelemetryEvidence(at=at, emulated=emulated, up_bytes_per_s=up, down_bytes_per_s=down, rtt_s=rtt,
            remote_usable=True,      models=(window,))
            for at, (window, up, down, rtt, emulated) in enumerate(evidence)
        ]
        for number, evidence in enumerate(said)
    }  # fmt: skip
    seen = estimate(device_measurements(PLAN, told), PLAN, LAYERS)
    costs = with_measurements(costs_of(remote_part=0.6), seen)
    check_costs(costs)
    assert 0.0 <= seen.planned_link.rtt_s <= 120.0 and seen.link.up_bytes_per_s >= 100.0
    for before, after in zip(costs_of(remote_part=0.6).layers, costs.layers, strict=True):
        for tier, seconds in before.seconds.items():
            assert (
                seconds / MAX_FACTOR <= after.seconds[tier] * 1.000001
                and after.seconds[tier] <= seconds * MAX_FACTOR * 1.000001
            )


def test_without_evidence_the_planned_costs_stay() -> None:
    """No telemetry is no drift."""
    seen = estimate([], PLAN, LAYERS)
    assert seen.link == LINK and not seen.device and robust_median([], 3.0) == 3.0
