"""Neighbouring slices that run as one session: which the agent asks for, and which of them serve a run.

In `fast` alone: where bits matter each slice runs as it was cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgesplit.plan import Plan
from edgesplit.release.manifest import Manifest, Slice
from edgesplit.runtime import Program, Tensor, Tensors, Timing, execute
from edgesplit.runtime.onnx_merge import neighbours
from edgesplit_agent.worker.dataflow import flow_of
from edgesplit_agent.worker.ipc import Merge

MOST = 4
"""Sessions beyond those of the slices: each holds its weights once more."""


def merges_of(manifest: Manifest, plan: Plan, most_bytes: int) -> tuple[Merge, ...]:
    """What the plan's rows would have merged, all-local first; together they hold at most so many bytes of files."""
    onnx = {one.name for one in manifest.slices if one.format == "onnx"}
    found: dict[Merge, None] = {}
    held = 0
    for row in sorted(plan.rows, key=lambda row: not row.is_local):
        order = [one.name for one in manifest.slices if one.name in row.device]
        for run in neighbours(order, onnx):
            merge = Merge(run, _outputs(manifest, order, run))
            size = sum(manifest.slice(name).bytes for name in run)
            if merge not in found and len(found) < MOST and held + size <= most_bytes:
                found[merge] = None
                held += size
    return tuple(found)


def _outputs(manifest: Manifest, order: Sequence[str], run: Sequence[str]) -> tuple[str, ...]:
    """What of the run's tensors somebody outside of it needs."""
    inside = [manifest.slice(name) for name in run]
    after = [manifest.slice(name) for name in order[order.index(run[-1]) + 1 :]]
    return _needed(inside, after, flow_of(manifest, order).wants)


def _needed(inside: Sequence[Slice], after: Sequence[Slice], wants: Sequence[str]) -> tuple[str, ...]:
    read = {*wants, *(spec.name for one in after for spec in one.inputs)}
    return tuple(spec.name for one in inside for spec in one.outputs if spec.name in read)


@dataclass(frozen=True)
class Merged:
    """One that is open."""

    merge: Merge
    program: Program


Steps = list[tuple[tuple[str, ...], "Program | None"]]


def steps(order: Sequence[str], wants: Sequence[str], slices: Mapping[str, Slice], merged: Sequence[Merged]) -> Steps:
    """The order in as few programs as there are: slices by name, with the program that does several at once."""
    found: Steps = []
    at = 0
    while at < len(order):
        one = next((one for one in merged if _serves(one.merge, order, at, wants, slices)), None)
        names = one.merge.order if one is not None else (order[at],)
        found.append((tuple(names), one.program if one is not None else None))
        at += len(names)
    return found


def _serves(merge: Merge, order: Sequence[str], at: int, wants: Sequence[str], slices: Mapping[str, Slice]) -> bool:
    end = at + len(merge.order)
    if tuple(order[at:end]) != merge.order:
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
    """As `execute`. What merged slices took together is divided among them by their `shares`."""
    live = dict(tensors)
    for names, program in planned:
        if program is None:
            live = execute(programs, names, live, timing)
            continue
        together = "+".join(names)
        live = execute({together: program}, [together], live, timing)
        seconds = timing.seconds.pop(together)
        parts = {name: max(shares.get(name, 0.0), 1e-9) for name in names}
        timing.seconds.update({name: seconds * part / sum(parts.values()) for name, part in parts.items()})
    return live
