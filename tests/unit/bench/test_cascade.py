"""The benchmark of cascades: what it says without models, and that its drifts are those of the streams."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import cascade
import numpy as np
import pytest
from promise_worlds import Photographs

SEED = 15


def test_missing_models_are_missed_targets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each pair is named with what it lacks; the simulated worlds are measured all the same."""
    monkeypatch.setenv("EDGESPLIT_MODELS", str(tmp_path))
    monkeypatch.setattr(cascade, "STREAM_FRAMES", 50)
    monkeypatch.setattr(cascade, "TASKS", (cascade.LADDER_TASK,))  # the digits are in the repository
    results, targets = cascade.measure(Namespace(seed=SEED, draws=20, streams=20))
    missed = [target for target in targets if not target.met]
    assert len(missed) == len(cascade.LADDER_TASK.pairs)
    assert all("labels.json" in target.text() and "not measured" in target.text() for target in missed)
    assert len(results["promises"]) == 2 * len(cascade.ALLOWED) and results["drifts"] == []


def test_a_change_that_breaks_the_promise_is_told_with_its_delay() -> None:
    """And one that does not raises no alarm."""
    random = np.random.default_rng(SEED)
    scores = random.random(500)
    world = Photographs(scores, (scores < 0.5) & (random.random(500) < 0.5))
    broken = Photographs(scores, np.ones(500, bool))
    pair = cascade.Pair(cascade.LADDER_TASK, "small", "big", world, {"worse": broken, "same": world}, 0.5, 0.9)
    worse, same = (cascade.drift(pair, what, 0.05, random) for what in ("worse", "same"))
    assert worse["alarms"] == worse["streams_above"] > 450 and worse["median_frames"] <= 30
    assert worse["median_s"] == worse["median_frames"] * 10
    assert worse["changed_before"] < 0.05 < worse["changed_after"] == pytest.approx(worse["stay_after"])
    assert same["streams_above"] <= 50 and same["early_alarms"] <= 50
