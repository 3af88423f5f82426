"""What splitting gains over the better of all-local and all-remote, on trained models, links and device profiles.

Planned on one half of the samples: bytes, codecs' seconds and losses, and layers timed in runs of their own. Judged on
the other half's: the cut's seconds there beside those of the pure modes there, all-remote with every codec and with the
JPEG where frames are given. The device's seconds are the profile's in both. Every cell is published, those without gain
too. The sums here are this script's own, not the planner's.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from record import Target, finish, make_parser
from trained import Skipped, TrainedModel, left_out, load_models, scale_to_whole

from edgesplit.device_profile import list_profiles, load_profile
from edgesplit.input_spec import INPUT_LAYER
from edgesplit.links import LINKS
from edgesplit.plan import Link, Row
from edgesplit_partitioner import Costs, plan
from edgesplit_partitioner.costs.build import build_costs
from edgesplit_partitioner.costs.model import TensorCost
from edgesplit_partitioner.profiling.codecs import CodecMeasurements, measure_codecs, with_codecs
from edgesplit_partitioner.profiling.layers import TensorMeasurements, measure_input, measure_layers, measure_samples

LINK_NAMES = ("wifi", "lte", "3g")
LEAST_GAIN = 0.98
"""Threshold of the target on the smallest gain."""
ALLOWANCE = 0.005
SAMPLES = 16
TIERS = "device-cloud"


@dataclass(frozen=True, slots=True)
class HalfMeasurements:
    """Measurements on one half of the samples."""

    layers_s: dict[str, float]
    tensors: TensorMeasurements
    codecs: CodecMeasurements


@dataclass(frozen=True, slots=True)
class Cell:
    """Results of one model on one device profile and link. Seconds, except `planned_s`, are those of the half that
    judges."""

    model: str
    given: str
    profile: str
    link: str
    lossy: bool
    row: str
    after: str
    codecs: dict[str, str]
    compress: bool
    up_bytes: int
    """Bytes sent, as planned."""
    planned_s: float
    seconds: float
    all_local_s: float
    all_remote_s: float
    gain: float
    planned_loss: float
    loss: float
    """Mean codec loss over all samples of the half that judges."""
    plan_s: float
    """Seconds that planning took."""


def measure(model: TrainedModel, positions: Sequence[int], runs: int) -> HalfMeasurements:
    """Time layers and codecs and measure losses on these samples."""
    samples = [model.samples[position] for position in positions]
    labels = [model.labels[position] for position in positions] if model.labels else ()
    feeds = samples[0] if isinstance(samples[0], Mapping) else None
    times = measure_layers(model.model, model.model.graph, runs=runs, inputs=feeds)
    layers_s = scale_to_whole(model, {name: took.median_s for name, took in times.items()}, runs)
    if model.spec is not None:
        frames = [frame for frame in samples if isinstance(frame, bytes)]
        layers_s[INPUT_LAYER] = measure_input(model.spec, frames).median_s
    return HalfMeasurements(
        layers_s=layers_s,
        tensors=measure_samples(model.model, model.graph, spec=model.spec, samples=samples),
        codecs=measure_codecs(model.model, model.graph, spec=model.spec, samples=samples, labels=labels),
    )


def costs_of(model: TrainedModel, half: HalfMeasurements, profile: str) -> Costs:
    """Costs with the layers' seconds on a device of this profile."""
    return build_costs(
        model.name,
        model.graph,
        profile=load_profile(profile),
        cloud_s=half.layers_s,
        tensors=with_codecs(half.tensors.tensors, half.codecs),
        frame_bytes=half.tensors.frame_bytes,
        model_format=model.model.format,
    )


def seconds_of(costs: Costs, row: Row, link: Link) -> float:
    """Latency of a cut by these costs (docs/costs.md, "What a plan charges")."""
    here = frozenset(row.layers)
    there = [layer for layer in costs.layers if layer.name not in here]
    total = sum(layer.seconds["device" if layer.name in here else "cloud"] for layer in costs.layers)
    if not there:
        return total
    known = {**costs.inputs, **{name: cost for layer in costs.layers for name, cost in layer.writes.items()}}
    written = {name for layer in there for name in layer.writes}
    for name in dict.fromkeys(name for layer in there for name in layer.reads if name not in written):
        sent, encode_s, decode_s = _transfer_cost(known[name], row.codecs.get(name, "raw"), row.compress)
        total += encode_s + sent / link.up_bytes_per_s + decode_s
    down = sum(known[name].bytes for name in costs.outputs if name in written)
    return total + link.rtt_s + down / link.down_bytes_per_s


def _transfer_cost(cost: TensorCost, codec: str, compress: bool) -> tuple[float, float, float]:
    """Bytes, seconds to encode and seconds to decode; a codec that does not suit the tensor on this half leaves it
    raw."""
    sent = None
    for name in (codec, "raw"):
        sent = sent or (cost.codecs.get(f"{name}+zstd") if compress else None) or cost.codecs.get(name)
    if sent is None:
        return float(cost.bytes), 0.0, 0.0
    return float(sent.bytes), sent.encode_s.get("device", 0.0), sent.decode_s.get("cloud", 0.0)


def codec_loss(costs: Costs, row: Row) -> float:
    """Loss of the row's codecs on all samples of a half."""
    known = {name: cost for layer in costs.layers for name, cost in layer.writes.items()} | dict(costs.inputs)
    total = 0.0
    for name, codec in row.codecs.items():
        cost = known[name].codecs.get(codec)
        if cost is not None and codec != "raw":
            total += statistics.fmean([cost.loss, cost.loss if cost.confirmed_loss is None else cost.confirmed_loss])
    return total


def cell(model: TrainedModel, mine: Costs, judge: Costs, profile: str, link: Link, allowance: float) -> Cell:
    """Plan by the costs `mine` and judge the plan by the costs `judge`."""
    limits: dict[str, Any] = {"max_loss": allowance} if allowance else {}
    links = {TIERS: link}
    start = time.perf_counter()
    result = plan(mine, links, limits=limits)
    row = result.row
    took = time.perf_counter() - start
    local = Row(name="local", layers=tuple(layer.name for layer in judge.layers))
    remote = plan(mine, links, limits={**limits, "force": "cloud"}).row
    ways = [remote, Row(name="remote"), Row(name="remote", compress=True)]
    all_local_s, seconds = seconds_of(judge, local, link), seconds_of(judge, row, link)
    all_remote_s = min(seconds_of(judge, way, link) for way in ways)
    return Cell(
        model=model.name, given=model.given, profile=profile, link=link.name, lossy=bool(allowance),
        row=row.name, after=row.split_after, codecs={name: codec for name,
        codec in row.codecs.items() if codec != "raw"},
        compress=row.compress, up_bytes=row.up_bytes, planned_s=result.seconds, seconds=seconds,
        all_local_s=all_local_s, all_remote_s=all_remote_s, gain=min(all_local_s, all_remote_s) / seconds,
        planned_loss=row.loss, loss=codec_loss(judge, row), plan_s=took,
    )  # fmt: skip


def cells_of(model: TrainedModel, profiles: Sequence[str], runs: int, allowance: float) -> list[Cell]:
    """Results for every profile and link, lossless and lossy."""
    every = range(len(model.samples))
    mine, judge = (measure(model, [n for n in every if n % 2 == part], runs) for part in (0, 1))
    cells = []
    for profile in profiles:
        both = costs_of(model, mine, profile), costs_of(model, judge, profile)
        for name in LINK_NAMES:
            cells += [cell(model, *both, profile, LINKS[name], allowed) for allowed in (0.0, allowance)]
    return cells


def format_cells(cells: Sequence[Cell]) -> None:
    """Text with a line per model and profile: the gain by link, lossless and lossy, with the place of the cut."""
    print(
        f"{'model (given)':44} {'profile':16} " + " ".join(f"{f'{name}: lossless, lossy':>23}" for name in LINK_NAMES)
    )
    lines: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        lines.setdefault((f"{cell.model} ({cell.given})", cell.profile), []).append(cell)
    for (model, profile), row in lines.items():
        print(f"{model:44} {profile:16} " + " ".join(f"{_format_cell(cell):>11}" for cell in row))
    print(
        "x: times the better pure mode; L all-local, R all-remote, C a cut between (h: fp16, q: int8, 6: int6, 4: int4)"
    )


def _format_cell(cell: Cell) -> str:
    where = "L" if cell.row == "local" else "R" if not cell.after else "C"
    lossy = "".join(
        sorted({"fp16": "h", "int8": "q", "int6": "6", "int4": "4"}[codec] for codec in cell.codecs.values())
    )[:2]
    return f"{cell.gain:.2f}x {where}{''.join(dict.fromkeys(lossy))}"


def targets_of(cells: Sequence[Cell], missing: tuple[str, ...]) -> list[Target]:
    """The threshold over all cells; `missing` is what was not measured."""
    least = min((cell.gain for cell in cells), default=None)
    return [Target("gain.least_of_all_cells", least, LEAST_GAIN, at_least=True, left_out=missing)]


def main() -> int:
    """Measure, plan, judge, print and write."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", action="append", default=[], help="only this one; may be given several times")
    parser.add_argument("--profile", action="append", default=[], help="only this one; default: all that ship")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"per model, both halves together [{SAMPLES}]")
    parser.add_argument("--runs", type=int, default=30, help="timed runs of the whole model per half [30]")
    parser.add_argument("--allow-loss", type=float, default=ALLOWANCE, help=f"of the lossy cells [{ALLOWANCE}]")
    options = parser.parse_args()
    cells: list[Cell] = []
    skipped: list[Skipped] = []
    for model in load_models(options.samples, options.model, tflite=True):
        if isinstance(model, Skipped):
            skipped.append(model)
            print(f"skipped: {model.name}: {model.why}", flush=True)
            continue
        start = time.perf_counter()
        cells += cells_of(model, options.profile or list_profiles(), options.runs, options.allow_loss)
        print(
            f"{model.name} ({model.given}): {len(model.samples)} samples, {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    format_cells(cells)
    results = {
        "allowance": options.allow_loss,
        "samples": options.samples,
        "cells": [asdict(cell) for cell in cells],
        "lossy_rows": sum(bool(cell.codecs) for cell in cells),
        "lossy_rows_beyond_the_allowance_on_the_judging_half": sum(cell.loss > options.allow_loss for cell in cells),
        "with_gain_above_1_percent": sum(cell.gain > 1.01 for cell in cells),
        "skipped": [asdict(model) for model in skipped],
    }
    missing = left_out(skipped, options.model)
    if options.profile:
        missing += (f"profiles other than {', '.join(options.profile)} (not asked for)",)
    finish(results, targets_of(cells, missing), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
