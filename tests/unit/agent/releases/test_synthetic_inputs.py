"""A release without golden inputs is tuned by made-up ones, and compared with itself."""

from __future__ import annotations

import numpy as np
import pytest

from edgesplit.errors import InferenceFailed
from edgesplit.release.manifest import TensorSpec
from edgesplit_agent.releases.loaded_release import LoadedRelease
from edgesplit_agent.releases.synthetic_inputs import make_synthetic_inputs, unchanged_answers_check
from support.agent_engine import LOCAL, REMOTE, Step, active


def of(*specs: TensorSpec) -> LoadedRelease:
    """A release that takes these."""
    from dataclasses import replace

    from msgspec import structs

    release = active(LOCAL)
    return replace(release, manifest=structs.replace(release.manifest, inputs=specs))


def test_inputs_have_the_releases_shapes_and_are_the_same_each_time() -> None:
    """Floats differ from each other, so that nothing is nought by chance; integers are indices that exist."""
    release = of(TensorSpec("x", "FP16", (2, 3)), TensorSpec("i", "INT64", (4,)), TensorSpec("s", "FP32", ()))
    first, again = make_synthetic_inputs(release), make_synthetic_inputs(release)
    assert first is not None and again is not None
    assert {name: (one.dtype.name, one.shape) for name, one in first.items()} == {
        "x": ("float16", (2, 3)), "i": ("int64", (4,)), "s": ("float32", ()),
    }  # fmt: skip
    assert len(set(first["x"].ravel().tolist())) > 1 and not first["i"].any()
    assert all(np.array_equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("spec", [TensorSpec("frame", "UINT8", (-1,)), TensorSpec("text", "BYTES", (1,))])
def test_pictures_and_text_are_not_made_up(spec: TensorSpec) -> None:
    """Random bytes are neither."""
    assert make_synthetic_inputs(of(spec)) is None


def test_a_setup_that_answers_otherwise_is_noticed() -> None:
    """The same, nearly the same, and not the same."""
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


def test_a_device_that_cannot_answer_alone_compares_nothing() -> None:
    """There is no whole answer of its own."""
    release = active(REMOTE)
    unchanged_answers_check(release, make_synthetic_inputs(release) or {})()
