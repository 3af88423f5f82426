"""The loss that a codec causes in the outputs, and its comparison with an allowance."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from edgesplit.plan import Row
from edgesplit_partitioner.costs.model import CodecCost, Costs, LayerCost, TensorCost
from edgesplit_partitioner.planner.loss_validation import unconfirmed, with_losses, without
from edgesplit_partitioner.profiling.codec_loss import (
    CodecLoss,
    SampleLoss,
    aggregate_loss,
    predicted_class,
    sample_loss,
    split_halves,
)

SCORES = np.array([[0.1, 0.7, 0.2]], np.float32)


def test_equal_outputs_have_no_loss() -> None:
    """Also where they contain NaN."""
    for answer in (SCORES, np.array([np.nan, 1.0], np.float32), np.array([7]), np.zeros(3, np.float32)):
        assert sample_loss({"y": answer.copy()}, {"y": answer}) == SampleLoss(error=0.0)


@pytest.mark.parametrize(
    ("got", "wanted", "error"),
    [
        (SCORES + np.float32(0.07), SCORES, 0.1),
        (np.array([np.nan, 1.0]), np.array([0.5, 1.0]), 1.0),
        (np.array([np.inf, 1.0]), np.array([0.5, 1.0]), 1.0),
        (np.array([9.0, 0.0]), np.array([1.0, 0.0]), 1.0),
        (np.array([1e-9, 0.0]), np.array([0.0, 0.0]), 1.0),
        (np.array([1, 2, 3, 5]), np.array([1, 2, 3, 4]), 0.25),
        (np.array([130, 0], np.uint8), np.array([128, 0], np.uint8), 2 / 128),
        (np.zeros(3), np.zeros(4), 1.0),
    ],
)
def test_error_is_relative_to_the_outputs_largest_value(got: np.ndarray, wanted: np.ndarray, error: float) -> None:
    """At most 1; of integers, which may be class numbers, the share that differs."""
    assert sample_loss({"y": got}, {"y": wanted}).error == pytest.approx(error)


def test_a_class_is_read_from_one_row_of_scores_or_one_number() -> None:
    """A mask beside a state, a box, a picture: no class is read from those."""
    assert predicted_class({"y": SCORES}) == predicted_class({"y": SCORES.reshape(1, 3, 1, 1)}) == 1
    assert predicted_class({"y": np.array([4])}) == 4
    for outputs in ({"y": SCORES, "state": SCORES}, {"y": np.zeros((2, 3))}, {"y": np.array([0.5])}, {}):
        assert predicted_class(outputs) is None


def test_with_labels_loss_is_accuracy() -> None:
    """A wrong output that became another wrong one, or a right one, is no loss; a right one that turned wrong is."""
    other = SCORES[:, ::-1].copy()
    other[0, 0] = 0.9
    assert sample_loss({"y": other}, {"y": SCORES}, label=1) == SampleLoss(error=1.0, changed=True, right=False)
    mistaken = CodecLoss(error=0.001, changed=0.5, accuracy=0.75, accuracy_raw=0.5)
    assert mistaken.loss == 0.001
    assert msgspec.structs.replace(mistaken, accuracy=0.25).loss == 0.25
    assert msgspec.structs.replace(mistaken, accuracy=None).loss == 0.5


def test_sample_halves_are_disjoint_and_deterministic() -> None:
    """Every sample is in one of them; neither is what is sorted first, nor every other."""
    for count in range(2, 40):
        one, other = split_halves(count)
        assert sorted(one + other) == list(range(count)) and 0 <= len(one) - len(other) <= 1
        assert split_halves(count) == (one, other)
    assert split_halves(16)[0] != tuple(range(8)) and split_halves(16)[0] != tuple(range(0, 16, 2))


def test_losses_of_a_half_are_averaged() -> None:
    """Means over the half's samples; accuracy only where every one of them has its label."""
    samples = [SampleLoss(error=0.1 * n, changed=n == 3, right=n != 3) for n in range(4)]
    whole = [SampleLoss(error=0.0, right=True)] * 4

    found = aggregate_loss(samples, whole, (1, 3))

    assert found == CodecLoss(error=pytest.approx(0.2), changed=0.5, accuracy=0.5, accuracy_raw=1.0)
    unlabelled = [*samples[:3], SampleLoss(error=0.3)]
    assert (found := aggregate_loss(unlabelled, whole, (1, 3))) is not None and found.accuracy is None
    assert aggregate_loss(samples, whole, ()) is None


def costs(**confirmed: float) -> Costs:
    """x -> a -> t -> b -> y; t by int8 and fp16 as `confirmed` says."""
    codecs = {
        name + way: CodecCost(bytes=10, loss=0.001, confirmed_loss=lost)
        for name, lost in confirmed.items()
        for way in ("", "+zstd")
    }
    tensor = TensorCost(bytes=100, codecs={**codecs, "raw+zstd": CodecCost(bytes=50)})
    seconds = {"device": 1.0, "cloud": 0.1}
    layers = (
        LayerCost(name="a", reads=("x",), writes={"t": tensor}, seconds=seconds),
        LayerCost(name="b", reads=("t",), writes={"y": TensorCost(bytes=4)}, seconds=seconds),
    )
    return Costs(model="m", tiers=("device", "cloud"), inputs={"x": TensorCost(bytes=9)}, outputs=("y",), layers=layers)


def test_an_unconfirmed_codec_is_dropped_for_the_next_best() -> None:
    """Chosen within the allowance by one half, beyond it on the other: dropped, compressed or not; fp16 and raw
    stay."""
    row = Row(name="cut-1", sends=("t",), codecs={"t": "int8"}, compress=True)
    known = costs(int8=0.02, fp16=0.001)

    failed = unconfirmed([row], known, 0.01)

    assert failed == {("t", "int8")}
    assert set(without(known, failed).layers[0].writes["t"].codecs) == {"fp16", "fp16+zstd", "raw+zstd"}
    assert not unconfirmed([msgspec.structs.replace(row, codecs={"t": "fp16"}), Row(name="local")], known, 0.01)
    assert not unconfirmed([row], known, 0.02)


def test_a_row_states_its_chosen_and_confirmed_loss() -> None:
    """A lossless row states neither."""
    tensors = costs(int8=0.02).tensors
    row = Row(name="cut-1", sends=("t",), codecs={"t": "int8"})

    assert with_losses(row, tensors).loss == 0.001 and with_losses(row, tensors).confirmed_loss == 0.02
    lossless = msgspec.structs.replace(row, codecs={"t": "raw"})
    assert with_losses(lossless, tensors) == lossless
