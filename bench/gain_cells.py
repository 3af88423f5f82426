"""The cells of `gain`: measured by halves, planned on the one and judged on the other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from boundaries import boundaries
from changed_ways import (
    DELTA,
    SAMPLES_TO_COMPRESS,
    CascadeWay,
    VariantModel,
    cascades,
    passing_variants,
    variant_accuracy,
    whole_accuracy,
)
from compressed import rule_of
from gain_report import LINK_NAMES, Cell
from trained import TrainedModel, scale_to_whole

from edgesplit.device_profile import load_profile
from edgesplit.input_spec import INPUT_LAYER
from edgesplit.links import LINKS
from edgesplit.plan import Link, Row
from edgesplit.release.boundary_codecs import LOSSY, ZSTD_SUFFIX
from edgesplit_partitioner import Costs, plan
from edgesplit_partitioner.bounds.binomial import trials_needed
from edgesplit_partitioner.costs.build import build_costs
from edgesplit_partitioner.costs.model import TensorCost
from edgesplit_partitioner.costs.predict import as_servers_run, predict_intervals
from edgesplit_partitioner.ir.graph import LayerGraph
from edgesplit_partitioner.ir.prepared_model import PreparedModel
from edgesplit_partitioner.planner.changed_answers import confirm
from edgesplit_partitioner.planner.loss_validation import Pair
from edgesplit_partitioner.planner.planner import PlanResult
from edgesplit_partitioner.profiling.codecs import (
    AnswerChanges,
    CodecMeasurements,
    count_changes,
    measure_codecs,
    with_changes,
    with_codecs,
)
from edgesplit_partitioner.profiling.layers import TensorMeasurements, measure_input, measure_layers, measure_samples

SAMPLES_OF = {**SAMPLES_TO_COMPRESS, "squeezenet_fp16": 500}
"""Samples of the models whose answers are compared, for lossy codecs."""
CONFIRMING = 300
"""Most samples on which answers are compared for lossy codecs, beside those that planning takes."""
AUDITED = 0.01
"""Share of the frames of a cascade that are drawn for audit."""
MOST_TENSORS = 2
"""Most tensors of a model on which answers are compared: those that gain most. They share the error probability."""
TIERS = "device-cloud"
profile_of = functools.cache(load_profile)
"""A device profile, read once."""


@dataclass(frozen=True, slots=True)
class HalfMeasurements:
    """Measurements on one half of the samples."""

    layers_s: dict[str, float]
    tensors: TensorMeasurements
    codecs: CodecMeasurements


@dataclass(frozen=True, slots=True)
class Measured:
    """A model, or a variant of it, with its costs on a profile by both halves."""

    graph: LayerGraph
    mine: Costs
    judge: Costs


def measure(model: TrainedModel, positions: Sequence[int], runs: int, *, lossy: bool) -> HalfMeasurements:
    """Measure on these samples what tensors come to, and time layers; where `runs` is 0, the cloud is predicted."""
    samples = [model.samples[position] for position in positions]
    labels = [model.labels[position] for position in positions] if model.labels else ()
    chosen = {name: model.graph.tensors[name] for name in boundaries(model.graph)}
    divided = dataclasses.replace(model.graph, tensors=chosen)
    return HalfMeasurements(
        layers_s=timed_s(model, samples, runs) if runs else predicted_s(model.model, model.graph),
        tensors=measure_samples(model.model, model.graph, spec=model.spec, samples=samples),
        codecs=measure_codecs(model.model, divided, spec=model.spec, samples=samples, labels=labels)
        if lossy
        else CodecMeasurements(),
    )


def timed_s(model: TrainedModel, samples: Sequence[Any], runs: int) -> dict[str, float]:
    """Seconds of each layer on this machine."""
    feeds = samples[0] if isinstance(samples[0], Mapping) else None
    times = measure_layers(model.model, model.model.graph, runs=runs, inputs=feeds)
    layers_s = scale_to_whole(model, {name: took.median_s for name, took in times.items()}, runs)
    if model.spec is not None:
        frames = [frame for frame in samples if isinstance(frame, bytes)]
        layers_s[INPUT_LAYER] = measure_input(model.spec, frames).median_s
    return layers_s


def predicted_s(model: PreparedModel, graph: LayerGraph) -> dict[str, float]:
    """Seconds of each layer on this kind of server."""
    server = as_servers_run(profile_of("generic-x86"), model.format)
    return {name: one.seconds for name, one in predict_intervals(graph, server, model.format).items()}


def costs_of(model: TrainedModel, half: HalfMeasurements, profile: str) -> Costs:
    """Costs with the layers' seconds on a device of this profile."""
    return build_costs(
        model.name,
        model.graph,
        profile=profile_of(profile),
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


def flops_of(graph: LayerGraph, layers: Collection[str]) -> float:
    """Floating-point operations of these layers, without decoding frames."""
    chosen = (layer for layer in graph.layers if layer.name in layers)
    return sum(work.flops for layer in chosen for work in layer.work if work.operator != "input")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A way to answer at a cell, with what a request comes to in the mean."""

    way: str
    row: Row
    planned_s: float
    seconds: float
    up_bytes: float
    device_flops: float
    accuracy: float | None
    stays: float = 1.0


def by_row(way: str, measured: Measured, result: PlanResult, link: Link, accuracy: float | None) -> Chosen:
    """A way that is one row of a plan."""
    row = result.row
    seconds = seconds_of(measured.judge, row, link)
    flops = flops_of(measured.graph, row.layers)
    return Chosen(way, row, result.seconds, seconds, float(row.up_bytes), flops, accuracy)


def by_cascade(way: CascadeWay, first_s: float, whole: Chosen) -> Chosen:
    """A smaller model on the device, and the whole one's best row where it is unsure or audited."""
    escalated = way.escalated
    runs = escalated + AUDITED * (1.0 - escalated)
    flops = flops_of(way.first.graph, [layer.name for layer in way.first.graph.layers])
    return Chosen(
        f"cascade {way.first.name}", whole.row, first_s + escalated * whole.planned_s,
        first_s + escalated * whole.seconds, runs * whole.up_bytes, flops + runs * whole.device_flops,
        way.calibrated.accuracy, 1.0 - escalated,
    )  # fmt: skip


def pure_modes_s(whole: Measured, link: Link) -> tuple[float, float]:
    """Seconds of all-local and of the best all-remote row."""
    judge = whole.judge
    local = Row(name="local", layers=tuple(layer.name for layer in judge.layers))
    remote = plan(whole.mine, {TIERS: link}, limits={"force": "cloud"}).row
    ways = (remote, Row(name="remote"), Row(name="remote", compress=True))
    return seconds_of(judge, local, link), min(seconds_of(judge, row, link) for row in ways)


def lossy_rows(whole: Measured) -> list[Row]:
    """Every cut that one tensor crosses alone, by each lossy codec that was measured on it."""
    tensors, rows = whole.mine.tensors, []
    order = [layer.name for layer in whole.graph.layers]
    made = {name: number for number, layer in enumerate(whole.graph.layers) for name in layer.writes}
    for tensor in boundaries(whole.graph):
        for codec in LOSSY:
            cost = tensors[tensor].codecs.get(codec + ZSTD_SUFFIX)
            if cost is not None:
                layers = tuple(order[: made[tensor] + 1])
                rows.append(
                    Row(
                        name=f"{tensor} {codec}", layers=layers, codecs={tensor: codec}, compress=True,
                        up_bytes=cost.bytes, split_after=layers[-1], sends=(tensor,),
                    )
                )  # fmt: skip
    return rows


def local_s(first: VariantModel, profile: str) -> float:
    """Seconds of a model on the device alone."""
    cloud_s = predicted_s(first.model, first.graph)
    costs = build_costs(
        first.name, first.graph, profile=profile_of(profile), cloud_s=cloud_s, tensors={},
        model_format=first.model.format,
    )  # fmt: skip
    return sum(layer.seconds["device"] for layer in costs.layers)


class ModelCells:
    """The cells of one model, on all profiles and links, at all allowances."""

    def __init__(self, model: TrainedModel, runs: int, count: int, allowances: Sequence[float]) -> None:
        self._model, self._runs, self._allowances = model, runs, allowances
        self._positions = range(min(count, len(model.samples)))
        self._rule = rule_of(model)
        # Coarse codecs change most answers of the detectors, and a frame's JPEG is smaller than what codecs make of it.
        self._is_classifier = self._rule is not None and self._rule.kind == "class"
        is_lossy = bool(allowances) and self._is_classifier and model.spec is None
        self._lossy = is_lossy and is_float(model.model)
        self._halves = self._measured(model, lossy=self._lossy)
        self._variants = {allowed: passing_variants(model, allowed) for allowed in allowances}
        self._cascades = {allowed: cascades(model, allowed) for allowed in allowances}
        passing = {variant.name: variant for found, _ in self._variants.values() for variant in found}
        self._variant_halves = {
            name: self._measured_variant(self._variant_model(variant)) for name, variant in passing.items()
        }
        self._counted: AnswerChanges | None = None

    def _measured(self, model: TrainedModel, *, lossy: bool) -> list[HalfMeasurements]:
        return [
            measure(model, [n for n in self._positions if n % 2 == part], self._runs, lossy=lossy) for part in (0, 1)
        ]

    def _measured_variant(self, variant: TrainedModel) -> list[HalfMeasurements]:
        """A classifier's variant as the model itself; the boundaries of others travel raw."""
        if self._is_classifier:
            return self._measured(variant, lossy=False)
        declared = {name: TensorCost(bytes=tensor.bytes) for name, tensor in variant.graph.tensors.items()}
        layers_s = predicted_s(variant.model, variant.graph)
        return [
            HalfMeasurements(layers_s, dataclasses.replace(half.tensors, tensors=declared), CodecMeasurements())
            for half in self._halves
        ]

    def _variant_model(self, variant: VariantModel) -> TrainedModel:
        model = self._model
        samples = model.samples[: len(self._positions)]
        return TrainedModel(model.name, model.given, variant.model, variant.graph, model.spec, samples, ())

    def cells(self, profiles: Sequence[str]) -> Iterator[Cell]:
        """Every profile, link and allowance."""
        self._count_changes(profiles)
        for profile in profiles:
            whole = self._costs(self._model, self._halves, profile)
            variants = {
                name: self._costs(self._variant_model(variant), self._variant_halves[name], profile)
                for found, _ in self._variants.values()
                for variant in found
                for name in [variant.name]
            }
            firsts_s = {
                way.first.name: local_s(way.first, profile) for found, _ in self._cascades.values() for way in found
            }
            promised = {allowed: self._promises(whole, allowed) for allowed in self._allowances}
            for name in LINK_NAMES:
                link = LINKS[name]
                unchanged = self._unchanged(whole, link)
                by_variant = {
                    name: by_row(
                        f"variant {name}", measured, plan(measured.mine, {TIERS: link}), link,
                        variant_accuracy(self._model, name),
                    )
                    for name, measured in variants.items()
                }  # fmt: skip
                pure_s = pure_modes_s(whole, link)
                for allowed in (0.0, *self._allowances):
                    ways = [unchanged]
                    if allowed:
                        ways += [by_variant[variant.name] for variant in self._variants[allowed][0]]
                        ways += [
                            by_cascade(way, firsts_s[way.first.name], unchanged) for way in self._cascades[allowed][0]
                        ]
                        ways += self._by_codec(whole, promised[allowed], link)
                    yield self._cell(ways, pure_s, profile, link, allowed)

    def _costs(self, model: TrainedModel, halves: Sequence[HalfMeasurements], profile: str) -> Measured:
        mine, judge = (costs_of(model, half, profile) for half in halves)
        return Measured(model.graph, mine, judge)

    def _unchanged(self, whole: Measured, link: Link) -> Chosen:
        return by_row("unchanged", whole, plan(whole.mine, {TIERS: link}), link, whole_accuracy(self._model))

    def _by_codec(self, whole: Measured, promised: Collection[Pair], link: Link) -> list[Chosen]:
        """The best row that sends one tensor by a codec which samples confirm."""
        rows = [row for row in lossy_rows(whole) for pair in row.codecs.items() if pair in promised]
        if not rows:
            return []
        seconds = [seconds_of(whole.mine, row, link) for row in rows]
        best = seconds.index(min(seconds))
        flops = flops_of(whole.graph, rows[best].layers)
        judged_s, up_bytes = seconds_of(whole.judge, rows[best], link), float(rows[best].up_bytes)
        return [Chosen("codec", rows[best], seconds[best], judged_s, up_bytes, flops, None)]

    def _promises(self, whole: Measured, allowed: float) -> set[Pair]:
        """Tensors with the lossy codecs that samples confirm at this allowance."""
        if self._counted is None or self._counted.count < trials_needed(allowed, DELTA):
            return set()
        costs = whole.mine.with_tensors(self._with_changes)
        rows = [row for row in lossy_rows(whole) if set(row.codecs) <= set(self._counted.tensors)]
        return set(confirm(rows, costs, allowed))

    def _with_changes(self, name: str, cost: TensorCost) -> TensorCost:
        assert self._counted is not None
        return with_changes({name: cost}, self._counted)[name]

    def _count_changes(self, profiles: Sequence[str]) -> None:
        """Compare answers on samples that planning did not see, for the tensors that some cell would send by a lossy
        codec."""
        rule = self._rule
        others = self._model.samples[len(self._positions) :][:CONFIRMING]
        if not self._lossy or rule is None or len(others) < trials_needed(max(self._allowances), DELTA):
            return
        gains: dict[str, float] = {}
        costs: dict[str, TensorCost] = {}
        for profile in profiles:
            whole = self._costs(self._model, self._halves, profile)
            costs = whole.mine.tensors
            rows = lossy_rows(whole)
            for link in (LINKS[name] for name in LINK_NAMES):
                lossless_s = plan(whole.mine, {TIERS: link}).seconds
                for row in rows:
                    gain = lossless_s / seconds_of(whole.mine, row, link)
                    tensor = next(iter(row.codecs))
                    gains[tensor] = max(gain, gains.get(tensor, 0.0))
        most = sorted(gains, key=lambda tensor: -gains[tensor])[:MOST_TENSORS]
        wanted = {tensor: costs[tensor] for tensor in most if gains[tensor] > 1.0}
        if wanted:
            model = self._model
            self._counted = count_changes(model.model, model.graph, wanted, rule, spec=model.spec, samples=others)

    def _cell(
        self, ways: Sequence[Chosen], pure_s: tuple[float, float], profile: str, link: Link, allowed: float
    ) -> Cell:
        """The way that is planned to be fastest, judged beside the unchanged model's pure modes."""
        best = min(ways, key=lambda way: way.planned_s)
        model, (all_local_s, all_remote_s) = self._model, pure_s
        reasons = (self._variants[allowed][1], self._cascades[allowed][1]) if allowed else ()
        return Cell(
            model=model.name, given=model.given, profile=profile, link=link.name, allowed=allowed, way=best.way,
            row=best.row.name, after=best.row.split_after,
            codecs={name: codec for name, codec in best.row.codecs.items() if codec != "raw"},
            up_bytes=best.up_bytes, device_mflop=best.device_flops / 1e6, accuracy=best.accuracy, stays=best.stays,
            planned_s=best.planned_s, seconds=best.seconds, all_local_s=all_local_s, all_remote_s=all_remote_s,
            gain=min(all_local_s, all_remote_s) / best.seconds, has_choice=len(ways) > 1,
            reasons=tuple(filter(None, reasons)),
        )  # fmt: skip


def is_float(model: PreparedModel) -> bool:
    """Whether boundaries of the model hold floats, which lossy codecs are for."""
    return any(kind.datatype.startswith("FP") for kind in model.outputs) and not any(
        work.is_int8 for layer in model.graph.layers for work in layer.work
    )
