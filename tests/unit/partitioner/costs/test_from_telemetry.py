"""Costs from telemetry: what changes the next plan, and what is noise."""

from __future__ import annotations

import msgspec
import pytest

from edgesplit.input_spec import FRAME
from edgesplit_partitioner.costs.from_telemetry import (
    MAX_FACTOR,
    FieldMeasurements,
    SliceMeasurement,
    TransferMeasurement,
    is_within_noise,
    planned_transfer_bytes,
    with_measurements,
)
from edgesplit_partitioner.costs.model import CodecCost, TensorCost, check_costs
from support.replan_samples import DEVICE_S, LINK, costs_of


def device_s(measured: FieldMeasurements) -> dict[str, float]:
    made = with_measurements(costs_of(), measured)
    check_costs(made)
    return {layer.name: layer.seconds["device"] for layer in made.layers}


def test_slice_seconds_are_distributed_over_their_layers() -> None:
    """Proportions inside a slice stay; a layer without measurements is scaled by the factor of all measured ones."""
    seen = FieldMeasurements(
        link=LINK, device=(SliceMeasurement(("body", "neck"), 0.052), SliceMeasurement(("head",), 0.004)), devices=5
    )
    found = device_s(seen)
    assert found["body"] == pytest.approx(0.04) and found["neck"] == pytest.approx(0.012)
    assert found["head"] == pytest.approx(0.004) and found["stem"] == pytest.approx(0.008)
    made = with_measurements(costs_of(), seen)
    assert made.layers[1].joules["device"] == pytest.approx(0.12)
    assert made.basis["device"] == "measured: at work, on 5 of pi" and "device" not in made.intervals


def test_deviations_of_a_twentieth_are_noise() -> None:
    """Costs that were measured as planned stay the same, to the bit."""
    seen = FieldMeasurements(
        link=LINK, device=tuple(SliceMeasurement((name,), s * 1.05) for name, s in DEVICE_S.items())
    )
    assert device_s(seen) == DEVICE_S


def test_implausible_measurements_are_bounded() -> None:
    """A class that agrees on nonsense changes a layer by a factor of fifty at most; a slice of another model changes
    nothing."""
    found = device_s(
        FieldMeasurements(link=LINK, device=(SliceMeasurement(("stem",), 1e6), SliceMeasurement(("nobody",), 1.0)))
    )
    assert found["stem"] == pytest.approx(DEVICE_S["stem"] * MAX_FACTOR)
    assert all(seconds <= DEVICE_S[name] * MAX_FACTOR for name, seconds in found.items())


def test_one_server_factor_is_estimated_over_all_rows() -> None:
    """Rows share layers on the server."""
    rows = (SliceMeasurement(("body", "neck", "head"), 0.0112), SliceMeasurement(("head",), 0.0008))
    made = with_measurements(costs_of(), FieldMeasurements(link=LINK, remote=rows))
    assert made.layers[1].seconds["cloud"] == pytest.approx(0.002 * 0.012 / 0.003)
    assert made.layers[1].seconds["device"] == 0.02 and made.basis["device"] == "predicted: a profile"


def test_only_encoded_tensors_get_measured_sizes() -> None:
    """A raw tensor's size is known; a compressed one's and a picture's is what was sent."""
    costs = costs_of()
    packed = TensorCost(bytes=60_000, codecs={"raw+zstd": CodecCost(bytes=30_000)})
    layers = list(costs.layers)
    layers[1] = msgspec.structs.replace(layers[1], writes={"body.out": packed})
    costs = msgspec.structs.replace(
        costs, layers=tuple(layers), inputs={FRAME: TensorCost(bytes=10_000)}, outputs=("head.out",)
    )
    costs = msgspec.structs.replace(
        costs, layers=(msgspec.structs.replace(costs.layers[0], reads=(FRAME,)), *costs.layers[1:])
    )
    assert planned_transfer_bytes(costs, ("body.out",), {}, compress=True) == 30_000
    assert planned_transfer_bytes(costs, ("body.out", "neck.out"), {}, compress=True) == 42_000
    sent = (
        TransferMeasurement(("body.out",), {}, True, 45_000),
        TransferMeasurement((FRAME,), {}, False, 25_000),
        TransferMeasurement(("neck.out",), {}, False, 9e9),
    )
    made = with_measurements(costs, FieldMeasurements(link=LINK, sent=sent))
    assert made.inputs[FRAME].bytes == 25_000
    assert made.layers[1].writes["body.out"].bytes == 60_000
    assert made.layers[1].writes["body.out"].codecs["raw+zstd"].bytes == 45_000
    assert made.layers[2].writes["neck.out"].bytes == 12_000


def test_costs_that_differ_by_noise_are_similar() -> None:
    """A twentieth here and there; a fifth of anything, or another slice, is a difference."""
    one = FieldMeasurements(
        link=LINK, device=(SliceMeasurement(("stem",), 0.1),), sent=(TransferMeasurement(("x",), {}, True, 500.0),)
    )
    near = msgspec.structs.replace(one, device=(SliceMeasurement(("stem",), 0.105),), fixed_s=0.0005)
    assert is_within_noise(one, one) and is_within_noise(one, near) and is_within_noise(near, one)
    slower = msgspec.structs.replace(LINK, up_bytes_per_s=LINK.up_bytes_per_s / 1.2)
    for other in (
        msgspec.structs.replace(one, link=slower),
        msgspec.structs.replace(one, device=(SliceMeasurement(("stem",), 0.12),)),
        msgspec.structs.replace(one, device=(SliceMeasurement(("body",), 0.1),)),
        msgspec.structs.replace(one, device=()),
        msgspec.structs.replace(one, sent=(TransferMeasurement(("x",), {}, True, 600.0),)),
        msgspec.structs.replace(one, sent=()),
    ):
        assert not is_within_noise(one, other) and not is_within_noise(other, one)


def test_measurements_round_trip_through_the_database() -> None:
    """A proposal is planned again with exactly the measurements it was made with."""
    seen = FieldMeasurements(
        link=LINK,
        device=(SliceMeasurement(("stem",), 0.1),),
        sent=(TransferMeasurement(("x",), {"x": "int8"}, True, 5.0),),
        fixed_s=0.001,
        devices=3,
        basis="emulated",
    )
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(seen)), FieldMeasurements) == seen
