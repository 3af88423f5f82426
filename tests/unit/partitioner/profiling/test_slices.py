"""Slices measured whole, and the correction of a plan's costs by them."""

from __future__ import annotations

import pytest

from edgesplit.errors import ModelRefused, UsageError
from edgesplit.release.manifest import Slice
from edgesplit_partitioner.costs.model import Costs, LayerCost, TensorCost
from edgesplit_partitioner.profiling.ort_profile import LayerTime
from edgesplit_partitioner.profiling.slices import measure_slices, whole_factor, with_tier_factor
from edgesplit_partitioner.slicing import CutSlice, atoms, cut_slices
from support import onnx_models as tiny


def cut(name: str, layers: int) -> list[CutSlice]:
    """The named model, cut after so many layers."""
    model = tiny.prepared(name)
    first = frozenset(layer.name for layer in model.graph.layers[:layers])
    return cut_slices(model, model.graph, atoms(model.graph, [first]), None)


@pytest.mark.parametrize("name", ["chain", "branches", "state"])
def test_slices_are_timed_on_outputs_of_the_earlier_ones(name: str) -> None:
    """Medians and 95th percentiles by slice, p95 never below the median."""
    slices = cut(name, 1)
    times = measure_slices(slices, runs=3, warmup=1)

    assert list(times) == [slice_.slice.name for slice_ in slices] and len(times) == 2
    assert all(0 < time.median_s <= time.p95_s for time in times.values())


def test_a_slice_that_cannot_run_is_refused() -> None:
    """An invalid file ends the child process, not this one."""
    broken = cut("chain", 1)
    files = {name: [b"no model"] for name in broken[0].runs}

    with pytest.raises(ModelRefused, match="cannot run this model"):
        measure_slices([CutSlice(broken[0].slice, files), *broken[1:]])
    with pytest.raises(UsageError, match="at least one run"):
        measure_slices(broken, runs=0)


def test_an_input_slice_is_not_timed() -> None:
    """It runs no model: its layer was measured by decoding frames."""
    assert measure_slices([CutSlice(Slice("input", "input", ("input",), (), ()), {})]) == {}


def slice_(name: str, *layers: str) -> Slice:
    """A slice of these layers."""
    return Slice(name, "onnx", layers, (), ())


LAYER_S = {"a": 0.01, "b": 0.02, "c": 0.03}


def test_the_correction_factor_covers_all_slices() -> None:
    """Whole over summed seconds; a slice without layers' seconds counts on neither side."""
    slices = [slice_("s1", "a"), slice_("s2", "b", "c"), slice_("s3", "unmeasured")]
    times = {"s1": LayerTime(0.008, 0.01), "s2": LayerTime(0.046, 0.05), "s3": LayerTime(9.0, 9.0)}

    assert whole_factor(times, slices, LAYER_S) == pytest.approx(0.054 / 0.06)


@pytest.mark.parametrize("median_s", [0.0, 1.0, 0.0001])
def test_an_implausible_correction_factor_is_ignored(median_s: float) -> None:
    """Nothing measured, or a hundred times off: the layers' sums stay."""
    assert whole_factor({"s1": LayerTime(median_s, median_s)}, [slice_("s1", "a")], LAYER_S) is None
    assert whole_factor({}, [slice_("s1", "a")], LAYER_S) is None


def test_the_correction_changes_one_tier_and_its_basis() -> None:
    """Device seconds stay, and so does the input layer's time, which was measured whole already."""
    tensor = {"t": TensorCost(bytes=4)}
    layers = (
        LayerCost(name="input", reads=("frame",), writes=tensor, seconds={"device": 1.0, "cloud": 0.5}),
        LayerCost(name="a", reads=("t",), writes={"y": TensorCost(bytes=4)}, seconds={"device": 1.0, "cloud": 0.5}),
    )
    costs = Costs(
        model="m", tiers=("device", "cloud"), inputs={"frame": TensorCost(bytes=9)}, outputs=("y",), layers=layers
    )
    made = with_tier_factor(costs, "cloud", 0.8)

    assert [layer.seconds for layer in made.layers] == [{"device": 1.0, "cloud": 0.5}, {"device": 1.0, "cloud": 0.4}]
    assert "take 0.800 times the sum of their layers" in made.basis["cloud"]
