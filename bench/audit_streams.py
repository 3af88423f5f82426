"""Streams of audited frames, many at once, under the sequential test of `edgesplit.answers.sequential`: its own
formulas on arrays, one number for each stream and bet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from edgesplit.answers.sequential import bets, delta_after, growth, not_yet_entered

Flags = npt.NDArray[np.bool_]
Draw = Callable[[int, npt.NDArray[np.int64]], Flags]
"""Whether the answers differ at a frame (counted from 0), for the streams of these numbers."""


def first_alarms(allowed: float, delta: float, streams: int, frames: int, draw: Draw) -> npt.NDArray[np.int64]:
    """Audited frames until the first alarm of each stream; 0 where none is raised within `frames`."""
    placed = np.array(bets(allowed))[:, None]
    running = np.arange(streams)
    capital = np.zeros((len(placed), streams))
    alarmed_at = np.zeros(streams, np.int64)
    for frame in range(frames):
        enters = not_yet_entered(frame) - not_yet_entered(frame + 1)
        capital = (capital + enters) * growth(placed, allowed, draw(frame, running))
        alarm = capital.mean(axis=0) + not_yet_entered(frame + 1) >= 1.0 / delta_after(0, delta)
        if alarm.any():
            alarmed_at[running[alarm]] = frame + 1
            running, capital = running[~alarm], capital[:, ~alarm]
        if not len(running):
            break
    return alarmed_at


def share_by_frame(shares: Sequence[tuple[int, float]], random: np.random.Generator) -> Draw:
    """Independent frames; `shares` says from which frame on which share of answers differs."""

    def draw(frame: int, streams: npt.NDArray[np.int64]) -> Flags:
        share = [share for start, share in shares if start <= frame][-1]
        return random.random(len(streams)) < share

    return draw
