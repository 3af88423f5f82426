"""Worlds of known truth, in which a threshold is fixed again and again: how often its promise breaks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgesplit_partitioner.bounds.threshold import ThresholdChoice, choose_threshold

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
JUST_ABOVE = 1.0001
"""A share just above the allowance: the hardest one to tell from it."""


class World(Protocol):
    """What frames a small model sees, how sure it is of them, and whether the big one's answer differs."""

    def draw(self, frames: int, random: np.random.Generator) -> tuple[Floats, Flags]:
        """Scores and whether the answers differ, of independent frames."""
        ...

    def loss(self, threshold: float) -> float:
        """True share of frames that are answered here, at this threshold, and differ."""
        ...

    def stay(self, threshold: float) -> float:
        """True share of frames that are answered here at this threshold."""
        ...


@dataclass(frozen=True, slots=True)
class Photographs:
    """Photographs on which both models ran: they are the world, and frames are drawn from them with replacement."""

    scores: Floats = field(repr=False)
    differs: Flags = field(repr=False)

    def draw(self, frames: int, random: np.random.Generator) -> tuple[Floats, Flags]:
        """Photographs, each as likely as the others."""
        drawn = random.integers(len(self.scores), size=frames)
        return self.scores[drawn], self.differs[drawn]

    def loss(self, threshold: float) -> float:
        """Over all photographs."""
        return float((self.differs & (self.scores >= threshold)).mean())

    def stay(self, threshold: float) -> float:
        """Over all photographs."""
        return float((self.scores >= threshold).mean())


@dataclass(frozen=True, slots=True)
class Rising:
    """Scores spread evenly from 0 to 1; of the frames with score s the part (1 - s) `most` differs. Frames are never
    seen twice."""

    most: float = 0.4

    def draw(self, frames: int, random: np.random.Generator) -> tuple[Floats, Flags]:
        """New frames."""
        scores = random.random(frames)
        return scores, random.random(frames) < self.most * (1.0 - scores)

    def loss(self, threshold: float) -> float:
        """The integral from the threshold to 1."""
        return self.most * (1.0 - threshold) ** 2 / 2.0

    def stay(self, threshold: float) -> float:
        """Frames above the threshold."""
        return 1.0 - threshold


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Half of the frames have score 1, half 0, and a share of all frames just above the allowance has 1 and differs:
    to let any frame stay is to break the promise."""

    allowed: float

    def draw(self, frames: int, random: np.random.Generator) -> tuple[Floats, Flags]:
        """New frames."""
        sure = random.random(frames) < 0.5
        return sure.astype(np.float64), sure & (random.random(frames) < 2.0 * self.allowed * JUST_ABOVE)

    def loss(self, threshold: float) -> float:
        """The same at every threshold that lets frames stay."""
        return self.allowed * JUST_ABOVE if threshold <= 1.0 else 0.0

    def stay(self, threshold: float) -> float:
        """Half of the frames, or all."""
        return float(threshold <= 0.0) / 2.0 + float(threshold <= 1.0) / 2.0


@dataclass(frozen=True, slots=True)
class Promise:
    """How often a promise was broken, and what it was worth."""

    draws: int
    broken: int
    stay: float
    """Mean true share of frames that stay."""
    loss: float
    """Mean true share of frames that stay and differ."""


def fix_threshold(
    world: World, allowed: float, delta: float, frames: int, random: np.random.Generator
) -> ThresholdChoice:
    """A threshold from so many frames of this world."""
    scores, differs = world.draw(frames, random)
    return choose_threshold(scores.tolist(), differs.tolist(), allowed, delta)


def count_broken(
    world: World, allowed: float, delta: float, *, draws: int, frames: int, random: np.random.Generator
) -> Promise:
    """Fix a threshold `draws` times, and count those at which the true loss exceeds what is allowed."""
    choices = [fix_threshold(world, allowed, delta, frames, random) for _ in range(draws)]
    thresholds = [math.inf if choice.threshold is None else choice.threshold for choice in choices]
    losses = [0.0 if threshold == math.inf else world.loss(threshold) for threshold in thresholds]
    stays = [0.0 if threshold == math.inf else world.stay(threshold) for threshold in thresholds]
    return Promise(draws, sum(loss > allowed for loss in losses), float(np.mean(stays)), float(np.mean(losses)))
