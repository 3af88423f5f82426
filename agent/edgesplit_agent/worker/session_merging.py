"""Merged sessions: neighbouring slices that run as one engine session; which the agent requests and which serve a run.

Only in mode `fast`: in mode `exact`, where results must be reproducible bit by bit, each slice runs as it was cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from edgesplit.plan import Plan, Row
from edgesplit.release.manifest import Manifest, Slice
from edgesplit.runtime import Program, Tensor, Tensors, Timing, run_slices
from edgesplit.runtime.onnx_merge import mergeable_runs
from edgesplit_agent.worker.dataflow import dataflow_of
from edgesplit_agent.worker.ipc import MergeSpec

MAX_MERGES = 4
"""Maximum number of merged sessions per release: each holds its weights a second time."""


def merges_of(manifest: Manifest, plan: Plan, max_bytes: int) -> tuple[MergeSpec, ...]:
    """The merges worth opening for the plan's rows, all-local first; their files hold at most `max_bytes` together."""
    onnx = {slice_.name for slice_ in manifest.slices if slice_.format == "onnx"}
    merges: dict[MergeSpec, None] = {}
    held_bytes = 0
    for row in sorted(plan.rows, key=lambda row: not row.is_local):
        for order in _orders(manifest, row):
            for run in mergeable_runs(order, onnx):
                merge = MergeSpec(run, _outputs(manifest, order, run))
                size = sum(manifest.slice(name).bytes for name in run)
                if merge not in merges and len(merges) < MAX_MERGES and held_bytes + size <= max_bytes:
                    merges[merge] = None
                    held_bytes += size
    return tuple(merges)


def _orders(manifest: Manifest, row: Row) -> Iterator[list[str]]:
    """What runs at once of the row's slices here: all, or those up to an early exit and those behind it."""
    order = [slice_.name for slice_ in manifest.slices if slice_.name in row.device]
    before = {name for output in manifest.exit_outputs for name in manifest.slices_for(output)}
    yield [name for name in order if name not in before]
    if before:
        yield [name for name in order if name in before]


def _outputs(manifest: Manifest, order: Sequence[str], run: Sequence[str]) -> tuple[str, ...]:
    """The run's tensors that are needed outside of it."""
    inside = [manifest.slice(name) for name in run]
    after = [manifest.slice(name) for name in order[order.index(run[-1]) + 1 :]]
    return _needed(inside, after, dataflow_of(manifest, order).returns)


def _needed(inside: Sequence[Slice], after: Sequence[Slice], wants: Sequence[str]) -> tuple[str, ...]:
    read = {*wants, *(spec.name for slice_ in after for spec in slice_.inputs)}
    return tuple(spec.name for slice_ in inside for spec in slice_.outputs if spec.name in read)


@dataclass(frozen=True)
class MergedSession:
    """An open merged session."""

    merge: MergeSpec
    program: Program


Steps = list[tuple[tuple[str, ...], "Program | None"]]
"""Names of the slices of each step, and the program that runs them all; None: run them one by one."""


def plan_steps(
    order: Sequence[str], wants: Sequence[str], slices: Mapping[str, Slice], merged: Sequence[MergedSession]
) -> Steps:
    """The order as the fewest programs: merged sessions where they fit, else single slices."""
    planned: Steps = []
    index = 0
    while index < len(order):  # greedy: at each slice the first merge that fits
        session = next((session for session in merged if _fits_at(session.merge, order, index, wants, slices)), None)
        names = session.merge.order if session is not None else (order[index],)
        planned.append((tuple(names), session.program if session is not None else None))
        index += len(names)
    return planned


def _fits_at(
    merge: MergeSpec, order: Sequence[str], index: int, wants: Sequence[str], slices: Mapping[str, Slice]
) -> bool:
    """Whether the merge matches the order at this index and returns everything needed afterwards."""
    end = index + len(merge.order)
    if tuple(order[index:end]) != merge.order:
        return False
    after = [slices[name] for name in order[end:]]
    return set(_needed([slices[name] for name in merge.order], after, wants)) <= set(merge.outputs)


def run_steps(
    planned: Sequence[tuple[tuple[str, ...], Program | None]],
    programs: Mapping[str, Program],
    tensors: Tensors,
    timing: Timing,
    shares: Mapping[str, float],
) -> dict[str, Tensor]:
    """Run the steps; all tensors available afterwards. See `runtime.run_slices`.

    The seconds of a merged session are divided among its slices in proportion to `shares`.
    """
    live = dict(tensors)
    for names, program in planned:
        if program is None:
            live = run_slices(programs, names, live, timing)
            continue
        together = "+".join(names)
        live = run_slices({together: program}, [together], live, timing)
        seconds = timing.seconds.pop(together)
        parts = {name: max(shares.get(name, 0.0), 1e-9) for name in names}
        timing.seconds.update({name: seconds * part / sum(parts.values()) for name, part in parts.items()})
    return live
