"""The search leaves as few layers in float as the terms allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from edgesplit_partitioner.compression.gate import weigh
from edgesplit_partitioner.compression.maker_job import MakeJob, MakeResult
from edgesplit_partitioner.compression.search import Candidate, best_of, fewest_float_layers

LAYERS = [f"layer{number}" for number in range(20)]


def passing_from(least: int) -> Callable[[Sequence[str]], Candidate]:
    """A model that keeps the terms with at least so many layers in float."""

    def attempt(layers: Sequence[str]) -> Candidate:
        return candidate(changed=max(0, least - len(layers)), passes=len(layers) >= least, layers=tuple(layers))

    return attempt


def candidate(*, changed: int, passes: bool, layers: tuple[str, ...] = (), file: Path = Path("none")) -> Candidate:
    """A variant that was tried."""
    job = MakeJob(file="made", method="int8", float_layers=layers)
    return Candidate(job, MakeResult(), file, weigh([True] * changed + [False] * 100), 0.0, passes)


@pytest.mark.parametrize("least", range(1, 11))
def test_the_fewest_layers_that_pass_are_found(least: int) -> None:
    """Whatever the number, the search ends with exactly that many of the worst layers in float."""
    tried = fewest_float_layers(LAYERS, len(LAYERS), passing_from(least), lambda: False)
    passing = [found.job.float_layers for found in tried if found.passes]
    assert min(passing, key=len) == tuple(LAYERS[:least])


def test_no_more_than_half_of_the_layers_stay_in_float() -> None:
    """Where that does not suffice no candidate passes, and none has more."""
    tried = fewest_float_layers(LAYERS, len(LAYERS), passing_from(11), lambda: False)
    assert not any(found.passes for found in tried)
    assert max(len(found.job.float_layers) for found in tried) == 10


def test_the_time_limit_ends_the_search() -> None:
    """After the limit nothing more is tried."""
    assert fewest_float_layers(LAYERS, len(LAYERS), passing_from(1), lambda: True) == []


def test_the_smallest_passing_file_is_the_best(tmp_path: Path) -> None:
    """Among those that pass size decides; where none passes, the fewest changed answers."""
    (tmp_path / "small").write_bytes(b"1")
    (tmp_path / "large").write_bytes(b"12")
    small = candidate(changed=3, passes=True, file=tmp_path / "small")
    large = candidate(changed=0, passes=True, file=tmp_path / "large")
    assert best_of([large, small]) is small
    failing = [candidate(changed=9, passes=False), candidate(changed=7, passes=False)]
    assert best_of(failing) is failing[1]
    assert best_of([*failing, large]) is large
