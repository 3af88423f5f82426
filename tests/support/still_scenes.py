"""Made-up streams whose truth is known in closed form: scenes of geometric length, the model unsure in some of them.

Each frame of a scene after the first is, with probability one half, moved by the scene's own distance. In an unsure
scene its answer is then another: a threshold above the distance calls the frame still, so the repeated answer is
changed; one below sees that it moved. Frames of a scene are far from those of every other, so each scene's first frame
is answered.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from edgesplit_agent.policy.frame_difference import Thumbnail

LEAST, MOST = 0.002, 0.1
"""Range of the scenes' distances, which are equally likely."""


@dataclass(frozen=True)
class Scenes:
    """A kind of stream."""

    unsure: float
    """Probability that the model is unsure in a scene."""
    frames: float
    """Mean number of frames of a scene."""

    def changed_share(self, threshold: float) -> float:
        """Share of all frames whose answer is changed where this threshold plays for ever."""
        seen = min(1.0, max(0.0, (threshold - LEAST) / (MOST - LEAST)))
        return self.unsure * seen * 0.5 * (1.0 - 1.0 / self.frames)

    def stream(self, seed: int) -> Iterator[tuple[Thumbnail, int]]:
        """Frames without end, each with the model's answer to it: one of ten classes."""
        rng = random.Random(seed)
        for scene in count(1):
            distance, is_unsure = rng.uniform(LEAST, MOST), rng.random() < self.unsure
            yield _frame(10.0 * scene), scene % 5
            while rng.random() >= 1.0 / self.frames:
                is_moved = rng.random() < 0.5
                yield _frame(10.0 * scene + is_moved * distance), scene % 5 + 5 * (is_moved and is_unsure)


def _frame(level: float) -> Thumbnail:
    return Thumbnail(np.array([[level]], np.float64), 1.0, b"")
