"""A release without golden inputs is tuned with synthetic ones, and compared with itself."""

from __future__ import annotations

import numpy as np
import pytest

from edgesplit.errors import InferenceFailed
from edgesplit.release.manifest import TensorSpec
from edgesplit_agent.releases.loaded_release import LoadedRelease, tolerance_of
from edgesplit_agent.releases.synthetic_inputs import make_synthetic_inputs, unchanged_answers_check
from support.agent_engine import LOCAL, REMOTE, Step, active


def of(*specs: TensorSpec) -> LoadedRelease:
    """A release that takes these."""
    from dataclasses import replace

    from msgspec import structs

    release = active(LOCAL)
    return replace(release, manifest=structs.replace(release.manifest, inputs=specs))


def test_synthetic_inputs_have_the_models_shapes_and_are_reproducible() -> None:
    """Floats differ from each other, so that no product is zero by chance; integers are valid indices."""
    release = of(TensorSpec("x", "FP16", (2, 3)), TensorSpec("i", "INT64", (4,)), TensorSpec("s", "FP32", ()))
    first, again = make_synthetic_inputs(release), make_synthetic_inputs(release)
    assert first is not None and again is not None
    assert {name: (one.dtype.name, one.shape) for name, one in first.items()} == {
        "x": ("float16", (2, 3)), "i": ("int64", (4,)), "s": ("float32", ()),
    }  # fmt: skip
    assert len(set(first["x"].ravel().tolist())) > 1 and not first["i"].any()
    assert all(np.array_equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("spec", [TensorSpec("frame", "UINT8", (-1,)), TensorSpec("text", "BYTES", (1,))])
def test_no_synthetic_pictures_or_text(spec: TensorSpec) -> None:
    """Random bytes are neither."""
    assert make_synthetic_inputs(of(spec)) is None


def test_options_that_change_the_answer_are_detected() -> None:
    """Equal, nearly equal, and different answers."""
    add = {"is": np.float32(1)}
    release = active(LOCAL, steps={"a": Step("x", "h", lambda x: x + add["is"]), "b": Step("h", "y", lambda h: 2 * h)})
    inputs = make_synthetic_inputs(release)
    assert inputs is not None
    check = unchanged_answers_check(release, inputs)
    check()
    add["is"] = np.float32(1 + 1e-5)
    check()
    add["is"] = np.float32(1.1)
    with pytest.raises(InferenceFailed, match="differs from the first run's"):
        check()


def test_a_score_of_4e_5_on_noise_was_compared_relative_to_itself() -> None:
    """A detector's scores on noise differ by 1.5e-7 in fast mode, which was refused; a third of them still is."""
    shift = {"by": np.float32(0)}
    steps = {"a": Step("x", "h", lambda x: x), "b": Step("h", "y", lambda h: h * np.float32(4e-5) + shift["by"])}
    release = active(LOCAL, steps=steps)
    check = unchanged_answers_check(release, {"x": np.ones((1, 4), np.float32)})
    shift["by"] = np.float32(1.5e-7)
    check()
    shift["by"] = np.float32(1.3e-5)
    with pytest.raises(InferenceFailed, match="differs from the first run's"):
        check()


@pytest.mark.parametrize(
    ("largest", "allowed"), [(1.0, 1e-3), (1e-3, 1e-6), (4e-5, 1e-6), (1e-6, 5e-8), (0.0, 0.0), (300.0, 0.3)]
)
def test_the_tolerance_is_relative_with_an_absolute_floor(largest: float, allowed: float) -> None:
    """A thousandth of the range, at least 1e-6, but never more than a twentieth of the range."""
    assert tolerance_of(largest) == pytest.approx(allowed)


def test_no_comparison_without_a_local_row() -> None:
    """The device has no whole answer of its own to compare with."""
    release = active(REMOTE)
    unchanged_answers_check(release, make_synthetic_inputs(release) or {})()
