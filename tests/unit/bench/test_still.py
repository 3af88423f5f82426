"""The benchmark of still frames: its truth is the world's, and it tells broken promises as such."""

from __future__ import annotations

import random
from argparse import Namespace
from itertools import groupby, islice

import numpy as np
import pytest
import still

from edgesplit_agent.policy.frame_difference import Thumbnail

SEED = 11


def made_up(*scenes: list[tuple[float, int]]) -> still.World:
    """Frames by their level and the model's answer to them."""
    return [
        [still.Shown(Thumbnail(np.array([[level]], np.float64), 1.0, b""), label) for level, label in scene]
        for scene in scenes
    ]


def test_the_truth_counts_what_a_threshold_repeats_wrongly() -> None:
    """Over each first frame of a scene; a frame that is answered anew is the one that later ones are compared with."""
    unsure, sure = [(0.0, 1), (0.01, 2), (0.03, 2)], [(1.0, 5)] * 3
    shown = made_up(unsure, sure)
    assert still.changed_by(shown, 0.0) == 0.0
    assert still.changed_by(shown, 0.015) == 2 / 18, "from the first frame, and from the last: 0.0 is followed by 0.01"
    assert still.changed_by(shown, 0.1) == 4 / 18, "two from the first frame, one from each of the others"


def test_a_stream_draws_scenes_of_many_lengths_and_never_one_twice_in_a_row() -> None:
    """So that no spacing meets each scene at the same frame."""
    shown = made_up(*([(float(scene), scene)] * 20 for scene in range(3)))
    frames = still.drawn_frames(shown, random.Random(SEED))
    runs = [len(list(run)) for _, run in groupby(islice((frame.label for frame in frames), 2_000))]
    assert all(10 <= run <= 30 for run in runs[:-1]) and len(set(runs)) > 10


def test_every_setting_is_told_with_the_broken_promises(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a world that is always sure most frames are repeated, and no promise breaks."""
    monkeypatch.setattr(still, "WORK_SCENES", 4)
    sure = made_up(*([(float(scene), scene % 10)] * 20 for scene in range(6)))
    monkeypatch.setattr(still, "world", lambda scenes, frames, noise, seed: sure)
    options = Namespace(noise=[4.0], scenes=6, frames=20, seed=SEED, streams=2, settings=((0.2, 0), (0.2, 20)))
    results, targets = still.measure(options)
    assert [told["spacing_s"] for told in results["settings"]] == [0, 20]
    for told in results["settings"]:
        assert told["changed"] == 0.0 and told["broken"] == 0 and 0.7 < told["repeated"] <= 0.95
    assert [target.met for target in targets] == [True] and "spacing of a scene" in targets[0].name
    assert "0 of 2 broken" in capsys.readouterr().out
