"""Which layers stay in float: the fewest of those that change most answers, until the choosing half keeps the terms.

Layers are ranked by harm: each is quantised alone, on some of the choosing samples. Then the worst 1, 2, 4, … stay in
float until the terms are kept, and bisection finds the least number. The time limit ends the search with the best so
far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from edgesplit.release.lineage import VariantEvidence
from edgesplit_partitioner.compression.maker_job import MakeJob, MakeResult

LARGEST_FLOAT_SHARE: Final = 0.5
"""Largest share of the layers that may stay in float: beyond it `fp16` is smaller."""


class LayerHarm(msgspec.Struct, frozen=True, kw_only=True):
    """How much one layer's quantisation alone changes, on some of the choosing samples."""

    layer: str
    changed: int
    """Number of changed answers."""
    samples: int
    """Of so many."""
    error: float
    """Mean largest difference of an output, relative to its largest value, by which layers are ranked: so few samples
    change too few answers for that."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A variant that was made, and what it changes on the choosing half."""

    job: MakeJob
    made: MakeResult
    file: Path
    evidence: VariantEvidence
    error: float
    """Mean output error."""
    passes: bool

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.file.stat().st_size

    @property
    def rank(self) -> tuple[bool, int, float]:
        """Smaller is better: passing before failing, then fewer changed answers, then a smaller error."""
        return (not self.passes, self.evidence.changed, self.error)


def fewest_float_layers(
    ranked: Sequence[str],
    total: int,
    attempt: Callable[[Sequence[str]], Candidate],
    is_over: Callable[[], bool],
) -> list[Candidate]:
    """Candidates with a growing number of the worst layers in float, in the order in which they were tried. The last
    passing one has the fewest layers in float that pass; none passes where the limit or the time ended the search."""
    tried: list[Candidate] = []
    failing, count = 0, 1
    most = min(len(ranked), int(total * LARGEST_FLOAT_SHARE))
    while count <= most and not is_over():
        tried.append(attempt(ranked[:count]))
        if tried[-1].passes:
            break
        failing, count = count, most if count < most < 2 * count else 2 * count
    if not tried or not tried[-1].passes:
        return tried
    passing = count
    while passing - failing > 1 and not is_over():
        middle = (failing + passing) // 2
        candidate = attempt(ranked[:middle])
        tried.append(candidate)
        failing, passing = (failing, middle) if candidate.passes else (middle, passing)
    return tried


def best_of(candidates: Sequence[Candidate]) -> Candidate:
    """The smallest file of those that pass; where none does, the one that changes the fewest answers."""
    passing = [candidate for candidate in candidates if candidate.passes]
    if passing:
        return min(passing, key=lambda candidate: (candidate.size, candidate.rank))
    return min(candidates, key=lambda candidate: candidate.rank)
