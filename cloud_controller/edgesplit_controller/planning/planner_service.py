"""Costs and plans of registered models: layers measured on this machine once, predicted per device profile, planned by
the partitioner.

Measurements are stored and reused until samples are added or `profile` requests new ones. They run in child processes
of the partitioner, one at a time where that costs no long wait. Callers run this in worker threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

import msgspec
from sqlalchemy import Select, select

from edgesplit.answers.answer_rule import AnswerRule, infer_answer_rule, parse_answer_rule
from edgesplit.device_profile import DeviceProfile, list_profiles, load_profile
from edgesplit.errors import ModelRefused, UsageError
from edgesplit.foreign_server import ForeignServer
from edgesplit.input_spec import INPUT_LAYER
from edgesplit.links import parse_link
from edgesplit.plan import Link
from edgesplit.release import boundary_codecs
from edgesplit.release.manifest import TensorSpec
from edgesplit.variant_choice import ACCURACY
from edgesplit_controller.errors import not_found
from edgesplit_controller.job_progress import report_step
from edgesplit_controller.model_registry.early_exits import answers_at_exit
from edgesplit_controller.model_registry.registry import LoadedModel, Registry, check_stored
from edgesplit_controller.model_registry.sample_sets import BlobSamples
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Measurement, Model
from edgesplit_partitioner import Costs, PlanResult, describe, plan
from edgesplit_partitioner.costs.build import build_costs, with_tier
from edgesplit_partitioner.costs.foreign_server import adapt_limits, check_servable, costs_for_foreign_server
from edgesplit_partitioner.costs.from_telemetry import FieldMeasurements, with_measurements
from edgesplit_partitioner.costs.model import TensorCost
from edgesplit_partitioner.edgetpu import is_edge_tpu
from edgesplit_partitioner.formulation.constraints import check_keep_first, parse_limits
from edgesplit_partitioner.planner.cascade import PlannedCascade
from edgesplit_partitioner.planner.cascade_calibration import CascadeRequest, FamilyAnswers
from edgesplit_partitioner.planner.changed_answers import check_samples
from edgesplit_partitioner.planner.early_exit import ExitPlan, PlannedExit, plan_exit
from edgesplit_partitioner.planner.planner import tensors_to_confirm
from edgesplit_partitioner.presentation.plan_json import describe_exit
from edgesplit_partitioner.profiling.codecs import (
    AnswerChanges,
    CodecMeasurements,
    count_changes,
    lossy_clips,
    measure_codecs,
    with_changes,
    with_codecs,
)
from edgesplit_partitioner.profiling.layers import TensorMeasurements, measure_input, measure_layers, measure_samples
from edgesplit_partitioner.profiling.machine_load import MachineLoad, is_quiet, measure_in_rounds
from edgesplit_partitioner.profiling.ort_profile import LayerTime
from edgesplit_partitioner.profiling.slices import (
    Cuts,
    WholeSliceTimes,
    corrected_by_slices,
    measure_whole_slices,
    with_tier_factor,
)
from edgesplit_partitioner.slicing import atoms, cut_sets, cut_slices

TIERS = "device-cloud"
"""Tiers of a plan without a gateway."""
EDGE = "edge"
"""The tier of a gateway."""
HERE = "cloud"
"""The tier whose times are measured on this machine."""
ASSUMED_LINK = "wifi"
"""Link that is assumed where neither the operator nor the device's claim names one."""
OnPriced = Callable[[str, PlannedCascade | PlannedExit], object]
"""Gets a device class and its cascade with the price, of which the plan keeps what is signed."""
MEASURED_SAMPLES = 16
"""Samples used by measurements."""
CHOOSING_SAMPLES = MEASURED_SAMPLES
"""Samples by which codecs are chosen, the oldest; all others confirm that few answers change."""
OWN_CLASS = "generic-x86"
"""Device class whose predictions a costs file contains where no device was named."""
FEW_SAMPLES = "lossy codecs need two samples at least, one to choose by and one to confirm by, not {}"
MAX_TURN_WAIT_S = 60.0
"""Seconds that a measurement waits for the one before it."""
QUIET_S = 2.0
"""Seconds for which the machine must be quiet before a model is measured again."""
REMEASURE_S, MAX_REMEASURE_S = 60.0, 86_400.0
"""Seconds from a measurement on a busy machine to the next; four times as many after each that was no better."""
MOST_TABLES = 16
"""Plan tables of a model for which measurements of whole slices are stored."""


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a plan, as an operator requests it."""

    partition: str = "auto"
    """`auto`, `device`, `edge` (all on the gateway), `cloud`, or the name of the last layer on the device."""
    limits: dict[str, Any] = {}
    codecs: tuple[str, ...] | None = None
    objective: str | dict[str, float] = ""
    """One of the planner's objectives, or a weight for each of several. Empty: `latency`, of a family `accuracy`."""
    least_accuracy: float = 0.0
    """Of a family: no request is answered by a variant of less accuracy, 0 to 1."""
    cascade: CascadeRequest | None = None
    """Of a family: a fast variant answers where it is sure, and a more accurate one is asked otherwise. Of a model:
    its early exit answers where it is sure, and the rest runs otherwise."""
    encrypt: bool = False
    """The release's slices are encrypted; the planner does not use this."""
    offload: str = ""
    """A foreign server (`edgesplit.foreign_server`) that runs the remote halves; empty: the device's own offload
    server."""
    answer: str = ""
    """What an answer is, where `max_changed` limits the answers that change (`edgesplit.answers`); empty: the most
    likely class of a classifier."""

    @property
    def lossy(self) -> bool:
        """Whether some loss is allowed, so that lossy codecs are worth measuring."""
        return parse_limits(self.planner_limits()).allows_loss

    @property
    def max_changed(self) -> float:
        """The share of answers that may change; 0 where no change is allowed by share."""
        return parse_limits(self.planner_limits()).max_changed or 0.0

    @property
    def model_objective(self) -> str | dict[str, float]:
        """The objective of a model's plan."""
        return self.objective or "latency"

    @property
    def family_objective(self) -> str | dict[str, float]:
        """The objective of a family's plan."""
        return self.objective or ACCURACY

    @property
    def server(self) -> ForeignServer | None:
        """The foreign server, where one is named; UsageError if `offload` is not the address of one."""
        return ForeignServer.parse(self.offload) if self.offload else None

    def planner_limits(self) -> dict[str, Any]:
        """The limits in the planner's form. UsageError if both a partition and a forced cut are given."""
        if self.partition == "auto":
            return dict(self.limits)
        if "force" in self.limits or "force_after" in self.limits:
            raise UsageError("give a partition or force a cut by a limit, not both")
        key = "force" if self.partition in ("device", EDGE, "cloud") else "force_after"
        return {**self.limits, key: self.partition}

    def as_options(self) -> dict[str, Any]:
        """The options as stored in the database."""
        return {
            "partition": self.partition, "limits": self.limits, "codecs": list(self.codecs) if self.codecs else None,
            "objective": self.model_objective, "encrypt": self.encrypt,
            **({"offload": self.offload} if self.offload else {}), **({"answer": self.answer} if self.answer else {}),
            **({"least_accuracy": self.least_accuracy} if self.least_accuracy else {}),
            **({"cascade": msgspec.to_builtins(self.cascade)} if self.cascade is not None else {}),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class GatewayHop:
    """The gateway by which a device class reaches this machine."""

    device_class: str
    """Device class of the gateway itself."""
    uplink: Link
    """Link from the gateway to this machine."""


@dataclass(frozen=True, slots=True)
class LayerMeasurement:
    """Seconds of each layer, with what else the machine did."""

    times: dict[str, LayerTime]
    load: MachineLoad


class ModelMeasurer(Protocol):
    """How a model is measured on this machine."""

    def layers(self, loaded: LoadedModel, frames: Sequence[bytes]) -> LayerMeasurement:
        """Seconds of each layer, the input layer included."""
        ...

    def samples(self, loaded: LoadedModel, samples: Sequence[Any]) -> TensorMeasurements:
        """Bytes of each tensor when sent, raw and losslessly compressed."""
        ...

    def slices(
        self, loaded: LoadedModel, groups: Sequence[Sequence[str]], layer_s: Mapping[str, float]
    ) -> WholeSliceTimes:
        """Seconds of whole slices of these layers, compared with the sum of their layers."""
        ...

    def codecs(self, loaded: LoadedModel, samples: Sequence[Any], labels: Sequence[int | None]) -> CodecMeasurements:
        """Costs of the lossy codecs, and their effect on the model's outputs."""
        ...

    def changes(
        self, loaded: LoadedModel, samples: Sequence[Any], tensors: Mapping[str, TensorCost], rule: AnswerRule
    ) -> AnswerChanges:
        """The samples whose answer changes, for each lossy codec of these tensors."""
        ...


@dataclass(frozen=True, slots=True)
class LocalMeasurer:
    """Measurements by the partitioner, on one thread, as the offload server runs slices, in a few rounds."""

    runs: int = 8
    """Runs in each round."""

    def layers(self, loaded: LoadedModel, frames: Sequence[bytes]) -> LayerMeasurement:
        """Seconds per layer from the runtime's own profile; those of the fastest round."""

        def measure() -> dict[str, LayerTime]:
            measured = measure_layers(loaded.prepared, loaded.prepared.graph, runs=self.runs)
            if loaded.spec is not None:
                measured[INPUT_LAYER] = measure_input(loaded.spec, frames, runs=self.runs)
            return measured

        return LayerMeasurement(*measure_in_rounds(measure, lambda times: sum(_medians(times).values())))

    def samples(self, loaded: LoadedModel, samples: Sequence[Any]) -> TensorMeasurements:
        """Raw and compressed bytes on the given samples."""
        return measure_samples(loaded.prepared, loaded.graph, spec=loaded.spec, samples=samples)

    def slices(
        self, loaded: LoadedModel, groups: Sequence[Sequence[str]], layer_s: Mapping[str, float]
    ) -> WholeSliceTimes:
        """Seconds of slices as the offload server would run them. Slices that cannot run on noise are priced by the sum
        of their layers."""
        cut = cut_slices(loaded.prepared, loaded.graph, groups, loaded.spec)
        try:
            times, load = measure_in_rounds(
                lambda: measure_whole_slices(cut, layer_s, runs=self.runs),
                lambda found: sum(slice_.median_s for slice_ in found.slices),
            )
        except ModelRefused:
            return WholeSliceTimes()
        return msgspec.structs.replace(times, is_busy=load.is_busy)

    def codecs(self, loaded: LoadedModel, samples: Sequence[Any], labels: Sequence[int | None]) -> CodecMeasurements:
        """Every lossy codec on every tensor; the rest of the model runs again on the decoded tensor."""
        return measure_codecs(loaded.prepared, loaded.graph, spec=loaded.spec, samples=samples, labels=labels)

    def changes(
        self, loaded: LoadedModel, samples: Sequence[Any], tensors: Mapping[str, TensorCost], rule: AnswerRule
    ) -> AnswerChanges:
        """The rest of the model runs again on each sample as each codec decodes it."""
        return count_changes(loaded.prepared, loaded.graph, tensors, rule, spec=loaded.spec, samples=samples)


class MeasuringInTurn:
    """Measures one model at a time, because measurements side by side take each other's processor.

    A measurement waits for another at most `MAX_TURN_WAIT_S`: one that does not end must not hold back all plans.
    """

    def __init__(self, measurer: ModelMeasurer, max_wait_s: float = MAX_TURN_WAIT_S) -> None:
        self._measurer = measurer
        self._max_wait_s = max_wait_s
        self._lock = threading.Lock()

    @contextmanager
    def _turn(self, step: str) -> Iterator[ModelMeasurer]:
        report_step("waiting for the measurement of another model")
        is_alone = self._lock.acquire(timeout=self._max_wait_s)
        try:
            report_step(step)
            yield self._measurer
        finally:
            if is_alone:
                self._lock.release()

    def layers(self, loaded: LoadedModel, frames: Sequence[bytes]) -> LayerMeasurement:
        """Seconds of each layer."""
        with self._turn("timing each layer on the controller's machine") as measurer:
            return measurer.layers(loaded, frames)

    def samples(self, loaded: LoadedModel, samples: Sequence[Any]) -> TensorMeasurements:
        """Bytes of each tensor when sent, and the seconds of compressing them."""
        with self._turn(f"measuring what each layer sends, on {len(samples)} samples") as measurer:
            return measurer.samples(loaded, samples)

    def slices(
        self, loaded: LoadedModel, groups: Sequence[Sequence[str]], layer_s: Mapping[str, float]
    ) -> WholeSliceTimes:
        """Seconds of whole slices."""
        with self._turn(f"timing {len(groups)} slices whole") as measurer:
            return measurer.slices(loaded, groups, layer_s)

    def codecs(self, loaded: LoadedModel, samples: Sequence[Any], labels: Sequence[int | None]) -> CodecMeasurements:
        """Costs of the lossy codecs."""
        with self._turn(f"measuring what lossy codecs do to the answers, on {len(samples)} samples") as measurer:
            return measurer.codecs(loaded, samples, labels)

    def changes(
        self, loaded: LoadedModel, samples: Sequence[Any], tensors: Mapping[str, TensorCost], rule: AnswerRule
    ) -> AnswerChanges:
        """Changed answers."""
        with self._turn(f"counting answers that lossy codecs change, on {len(samples)} samples") as measurer:
            return measurer.changes(loaded, samples, tensors, rule)


TimesAtWork = Callable[[Model, str], FieldMeasurements | None]
"""What devices of a class measured of a model at work; None where no device has."""


class StoredLayers(msgspec.Struct, frozen=True, kw_only=True):
    """Measured seconds of a model's layers, as stored."""

    layers: dict[str, LayerTime]
    load: MachineLoad | None = None
    """Load of the machine meanwhile. None: measured by a version that did not look."""
    taken: float = 0.0
    """Unix time."""
    attempts: int = 0
    """Measurements since then that were no better."""

    @property
    def total_s(self) -> float:
        """Sum of the layers' medians."""
        return sum(time.median_s for time in self.layers.values())

    @property
    def is_doubtful(self) -> bool:
        """Whether other work may have lengthened the times."""
        return self.load is None or self.load.is_busy

    def is_due(self, now: float) -> bool:
        """Whether to measure again at that time, if the machine is quiet."""
        return self.is_doubtful and now - self.taken >= min(REMEASURE_S * 4.0**self.attempts, MAX_REMEASURE_S)

    @property
    def text(self) -> str:
        """For operators: what was measured, and how much it can be believed."""
        if self.load is None:
            return f"{1e3 * self.total_s:.1f} ms in all layers, measured by an earlier version"
        busy = "; the machine was busy: it is measured again when it is quiet" if self.load.is_busy else ""
        return f"{1e3 * self.total_s:.1f} ms in all layers; {self.load}{busy}"


def better_measurement(stored: StoredLayers | None, fresh: StoredLayers) -> StoredLayers:
    """The measurement to keep: a quiet one before any other, of two busy ones the faster, since other work only adds
    time."""
    assert fresh.load is not None
    if stored is None or not fresh.load.is_busy:
        return fresh
    if stored.load is not None and stored.load.is_busy and fresh.total_s < stored.total_s:
        return msgspec.structs.replace(fresh, attempts=stored.attempts + 1)
    return msgspec.structs.replace(stored, attempts=stored.attempts + 1)


class StoredChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Changed answers as stored, of the tensors that plans asked for so far."""

    rule: AnswerRule
    measured: AnswerChanges
    clips: dict[str, dict[str, float]]
    """The codecs that were compared, with their clips, by tensor."""


class StoredExits(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of early exits and of the whole model as stored, of the exits that plans asked for so far."""

    count: int = 0
    """Samples that the model had."""
    answers: dict[str, FamilyAnswers] = {}
    """By the output that is the exit."""


class SliceFactors(msgspec.Struct, frozen=True, kw_only=True):
    """Ratios of the seconds of whole slices to the sums over their layers, by plan table."""

    factors: dict[str, float | None] = {}
    busy: dict[str, list[list[str]]] = {}
    """The tables that were measured on a busy machine, with the layers of their slices."""

    def with_measurement(self, key: str, groups: Sequence[Sequence[str]], measured: WholeSliceTimes) -> SliceFactors:
        """With the factor of one table. From a busy machine it is at most 1, since other work only adds time."""
        factor, is_busy = measured.factor, measured.is_busy
        factors = {**self.factors, key: min(factor, 1.0) if is_busy and factor is not None else factor}
        kept = dict(list(factors.items())[-MOST_TABLES:])
        busy = {name: layers for name, layers in self.busy.items() if name in kept and name != key}
        return SliceFactors(factors=kept, busy={**busy, key: [list(group) for group in groups]} if is_busy else busy)


class PlanningService:
    """Costs and plans for the models of one registry."""

    def __init__(
        self, database: Database, registry: Registry, *, now: Callable[[], float],
        measure: ModelMeasurer | None = None, at_work: TimesAtWork = lambda model, device_class: None,
    ) -> None:  # fmt: skip
        """`at_work`: what devices of a class measured of a model at work, if they did."""
        self._database = database
        self._registry = registry
        self._now = now
        self._measure = MeasuringInTurn(measure or LocalMeasurer())
        self.at_work = at_work

    def profile(self, model: Model, *, device_class: str = OWN_CLASS, codecs: bool = False) -> dict[str, Any]:
        """Measure the model on this machine again: layers, whole slices that plans choose, and codecs if requested.

        Returns a costs file for that device class with further fields: `median_s` and `p95_s` of each layer, `slices`,
        `codecs`, and the samples that tensor sizes come from.
        """
        loaded, profile = self._registry.load(model), device_profile(device_class)
        measured_layers = self._measure_layers(model, self.stored_layers(model))
        times = measured_layers.layers
        samples = self._samples(model, anew=True)
        enough = samples.count > 1
        lossy = _codec_rows(samples, self._codecs(model, anew=True)) if codecs and enough else []
        costs = self.costs(model, profile.name)
        classes = dict.fromkeys([profile.name, *list_profiles()])
        chosen = dict.fromkeys(cut for name in classes for cut in self._cuts(model, name))
        measured_slices = self._measure.slices(loaded, atoms(loaded.graph, list(chosen)), _medians(times))
        costs = costs if measured_slices.factor is None else with_tier_factor(costs, HERE, measured_slices.factor)
        report: dict[str, Any] = msgspec.to_builtins(costs)
        report["layers"] = [{**layer, **msgspec.to_builtins(times[layer["name"]])} for layer in report["layers"]]
        return report | {
            "where": "local", "tensors": samples.basis, "slices": msgspec.to_builtins(measured_slices.slices),
            "whole_factor": measured_slices.factor, "codecs": lossy, "measurement": measured_layers.text,
            "notes": [FEW_SAMPLES.format(samples.count)] if codecs and not enough else [],
        }  # fmt: skip

    def _cuts(self, model: Model, device_class: str) -> Cuts:
        """Split points in the table for this class, one of whose rows is chosen whatever the link."""
        report_step(f"planning for {device_class}")
        return cut_sets(plan(self.costs(model, device_class), {TIERS: parse_link(ASSUMED_LINK)}).table)

    def costs(
        self, model: Model, device_class: str, *, lossy: bool = False, tiers: Mapping[str, str] | None = None,
        whole: bool = False, at_work: bool = True,
    ) -> Costs:  # fmt: skip
        """The model's costs on that device class and on this machine; measures first what was not measured yet.

        Costs of lossy codecs are included if they were measured; with `lossy` they are measured now. `tiers` maps
        further tiers between device and this machine to their device profiles. `whole`: with this machine's seconds
        corrected by those of whole slices in a plan for that class. `at_work`: what devices of the class measured of
        the model replaces predicted seconds.
        """
        profile = device_profile(device_class)
        extra_tiers = {name: device_profile(profile_name) for name, profile_name in (tiers or {}).items()}
        loaded = self._registry.load(model)
        layers = self.stored_layers(model) or self._measure_layers(model, None)
        samples = self._samples(model)
        costs = build_costs(
            model.ref, loaded.graph, profile=profile, cloud_s=_medians(layers.layers),
            tensors=with_codecs(samples.tensors, self._codecs(model, wanted=lossy)), frame_bytes=samples.frame_bytes,
            model_format=loaded.prepared.format, basis={HERE: measured_basis(layers.load)},
        )  # fmt: skip
        measured = self.at_work(model, device_class) if at_work else None
        costs = with_measurements(costs, measured) if measured else costs
        if whole:
            costs = self._with_whole_slices(model, costs, links_through(parse_link(ASSUMED_LINK)), PlanOptions())
        for name, tier_profile in extra_tiers.items():
            costs = with_tier(costs, loaded.graph, name, tier_profile, loaded.prepared.format)
        return costs

    def plan(
        self, model: Model, device_class: str, link: Link, options: PlanOptions, gateway: GatewayHop | None = None,
        measured: FieldMeasurements | None = None, on_priced: OnPriced | None = None,
    ) -> PlanResult:  # fmt: skip
        """The plan of a model for one device class and its first link (to this machine, or to the gateway). A foreign
        server is reached directly, without the gateway. `measured`: times that devices of the class measured in use
        replace predicted ones. `on_priced` gets an early exit with its price."""
        gateway = None if options.server else gateway
        tiers = {EDGE: gateway.device_class} if gateway else {}
        links = links_through(link, gateway)
        self._check_confirming_samples(model, options)
        costs = self.costs(model, device_class, lossy=options.lossy, tiers=tiers, at_work=measured is None)
        costs, options = self._effective(model, costs, links, options, measured)
        report_step(f"planning for {device_class}")
        if options.cascade is not None:
            by_exit = self._plan_exit(model, device_class, costs, links, options, options.cascade)
            if on_priced is not None:
                on_priced(device_class, by_exit.planned)
            return by_exit.result
        return plan(
            costs, links, objective=options.model_objective, limits=options.planner_limits(), codecs=options.codecs
        )

    def _plan_exit(
        self, model: Model, device_class: str, costs: Costs, links: Mapping[str, Link], options: PlanOptions,
        request: CascadeRequest,
    ) -> ExitPlan:  # fmt: skip
        """The plan of a model with an early exit."""
        if is_edge_tpu(device_profile(device_class)):
            raise UsageError(
                f"{device_class} runs its part of a model compiled as one, so nothing can end before it: plan without"
                " --exit"
            )
        return plan_exit(
            costs, links, request, self.exit_answers(model, request.exit_output), objective=options.model_objective,
            limits=options.planner_limits(), codecs=options.codecs,
        )  # fmt: skip

    def exit_answers(self, model: Model, exit_output: str) -> FamilyAnswers:
        """Heavy, if it was not asked for since samples were added. What the model answers to its samples by an early
        exit and by its final output. UsageError where that output is no early exit of the model."""
        entries = self._registry.sample_entries(model)
        stored = msgspec.convert(self._stored(model, "exits") or {}, StoredExits)
        if stored.count == len(entries) and exit_output in stored.answers:
            return stored.answers[exit_output]
        samples = BlobSamples(self._registry.blobs, entries)
        answers = answers_at_exit(self._registry.load(model), exit_output, samples)
        known = stored.answers if stored.count == len(entries) else {}
        kept = StoredExits(count=len(entries), answers={**known, exit_output: answers})
        self._store(model, "exits", msgspec.to_builtins(kept))
        return answers

    def _effective(
        self, model: Model, costs: Costs, links: Mapping[str, Link], options: PlanOptions,
        measured: FieldMeasurements | None = None,
    ) -> tuple[Costs, PlanOptions]:  # fmt: skip
        """The costs to plan with, and the options as far as the server that runs the remote half supports them."""
        if options.server is not None:
            check_servable(model.ref, self._registry.load(model).prepared.format)
            costs = costs_for_foreign_server(costs, options.server)
            limits = adapt_limits(options.planner_limits(), costs)
            options = msgspec.structs.replace(options, partition="auto", limits=limits)
        costs = with_measurements(costs, measured) if measured else costs
        costs = self._with_confirmed_codecs(model, costs, links, options)
        if measured is not None and measured.remote:
            check_keep_first(costs, parse_limits(options.planner_limits()))
            return costs, options  # measured at work is measured whole
        return self._with_whole_slices(model, costs, links, options), options

    def describe(self, model: Model, device_class: str, link_text: str, options: PlanOptions) -> dict[str, Any]:
        """The plan for a class and a link as JSON for people: candidates, ranges, certificate of optimality."""
        link = parse_link(link_text or ASSUMED_LINK)
        self._check_confirming_samples(model, options)
        costs, options = self._effective(
            model, self.costs(model, device_class, lossy=options.lossy), links_through(link), options
        )
        if options.cascade is not None:
            return describe_exit(
                self._plan_exit(model, device_class, costs, links_through(link), options, options.cascade)
            )
        return describe(
            costs, link, objective=options.model_objective, limits=options.planner_limits(), codecs=options.codecs
        )

    def _check_confirming_samples(self, model: Model, options: PlanOptions) -> None:
        """UsageError where the model has too few samples to confirm the share of answers that may change."""
        if options.max_changed:
            confirming = max(self._registry.sample_count(model) - CHOOSING_SAMPLES, 0)
            check_samples(confirming, CHOOSING_SAMPLES, options.max_changed)

    def _with_confirmed_codecs(
        self, model: Model, costs: Costs, links: Mapping[str, Link], options: PlanOptions
    ) -> Costs:
        """The costs with the answers that codecs change on the tensors that the plan would send by them; the same costs
        without a limit on changed answers."""
        if not options.max_changed:
            return costs
        limits = options.planner_limits()
        tensors = tensors_to_confirm(
            costs, links, objective=options.model_objective, limits=limits, codecs=options.codecs
        )
        return self.with_changed_answers(model, costs, tensors, options)

    def with_changed_answers(self, model: Model, costs: Costs, tensors: Iterable[str], options: PlanOptions) -> Costs:
        """The model's costs with the answers that lossy codecs change on these tensors, on all samples but those that
        choose codecs; counted first where they were not yet. UsageError where these are too few for
        `options.max_changed`, or where it must be said what an answer is."""
        self._check_confirming_samples(model, options)
        loaded = self._registry.load(model)
        rule = answer_rule_of(options.answer, loaded.prepared.outputs)
        by_tensor = {name: cost for name, cost in costs.tensors.items() if name in set(tensors)}
        clips = {name: lossy_clips(cost) for name, cost in by_tensor.items()}
        count = self._registry.sample_count(model) - CHOOSING_SAMPLES
        stored = self._stored_changes(model)
        if stored is None or stored.rule != rule or stored.measured.count != count:
            stored = StoredChanges(rule=rule, measured=AnswerChanges(count=count), clips={})
        missing = {name: cost for name, cost in by_tensor.items() if stored.clips.get(name) != clips[name]}
        if missing:
            samples = BlobSamples(self._registry.blobs, self._registry.sample_entries(model)[CHOOSING_SAMPLES:])
            fresh = self._measure.changes(loaded, samples, missing, rule)
            stored = StoredChanges(
                rule=rule, measured=AnswerChanges(tensors={**stored.measured.tensors, **fresh.tensors}, count=count),
                clips={**stored.clips, **{name: clips[name] for name in missing}},
            )  # fmt: skip
            self._store(model, "changes", msgspec.to_builtins(stored))
        changed = with_changes(by_tensor, stored.measured)
        return costs.with_tensors(lambda name, cost: changed.get(name, cost))

    def _stored_changes(self, model: Model) -> StoredChanges | None:
        stored = self._stored(model, "changes")
        return None if stored is None else msgspec.convert(stored, StoredChanges)

    def _with_whole_slices(self, model: Model, costs: Costs, links: Mapping[str, Link], options: PlanOptions) -> Costs:
        """The costs with this machine's seconds corrected by whole slices of the plan. If that changes the plan, slices
        of the new plan count."""
        check_keep_first(costs, parse_limits(options.planner_limits()))

        def cuts_of(costs: Costs) -> Cuts:
            limits = options.planner_limits()
            return cut_sets(
                plan(costs, links, objective=options.model_objective, limits=limits, codecs=options.codecs).table
            )

        return corrected_by_slices(costs, HERE, cuts_of, lambda cuts: self._whole_factor(model, cuts))

    def _whole_factor(self, model: Model, cuts: Cuts) -> float | None:
        """Ratio of the measured seconds of this table's slices to the sum of their layers, measured once; None where
        they cannot be compared."""
        loaded, times = self._registry.load(model), self._layers(model)
        groups = atoms(loaded.graph, cuts)
        key = sha256(msgspec.json.encode(groups)).hexdigest()
        stored = self._slice_factors(model)
        if key not in stored.factors:
            stored = stored.with_measurement(key, groups, self._measure.slices(loaded, groups, _medians(times)))
            self._store(model, "slices", msgspec.to_builtins(stored))
        return stored.factors[key]

    def _slice_factors(self, model: Model) -> SliceFactors:
        return msgspec.convert(self._stored(model, "slices") or {}, SliceFactors)

    def _layers(self, model: Model, *, anew: bool = False) -> dict[str, LayerTime]:
        stored = self.stored_layers(model)
        if stored is not None and not anew:
            return stored.layers
        return self._measure_layers(model, stored).layers

    def _measure_layers(self, model: Model, stored: StoredLayers | None) -> StoredLayers:
        """Measure the layers, store the better of this and the stored measurement, and return it."""
        samples = self._registry.samples(model, MEASURED_SAMPLES)
        frames = [sample for sample in samples if isinstance(sample, bytes)]
        measured = self._measure.layers(self._registry.load(model), frames)
        fresh = StoredLayers(layers=measured.times, load=measured.load, taken=self._now())
        chosen = better_measurement(stored, fresh)
        self._store(model, "layers", msgspec.to_builtins(chosen))
        if chosen is fresh:
            self._store(model, "slices", msgspec.to_builtins(SliceFactors()))
        return chosen

    def stored_layers(self, model: Model) -> StoredLayers | None:
        """The measurement of the model's layers on this machine that plans use; None before the first."""
        stored = self._stored(model, "layers")
        return None if stored is None else msgspec.convert(stored, StoredLayers)

    def remeasure_busy(self, wait: Callable[[float], object]) -> None:
        """Heavy. Measure one model again whose times come from a busy machine, if the machine is quiet for some seconds
        (`wait` lets them pass)."""
        model = self._due_for_remeasuring()
        if model is None or not is_quiet(QUIET_S, wait):
            return
        stored = self.stored_layers(model)
        if stored is None or stored.is_doubtful:
            stored = self._measure_layers(model, stored)
        if stored.is_doubtful:
            return
        loaded, factors = self._registry.load(model), self._slice_factors(model)
        for key, groups in factors.busy.items():
            measured = self._measure.slices(loaded, groups, _medians(stored.layers))
            factors = factors.with_measurement(key, groups, measured)
        self._store(model, "slices", msgspec.to_builtins(factors))

    def _due_for_remeasuring(self) -> Model | None:
        """A model whose stored times come from a busy machine, or from an earlier version that did not look, and whose
        back-off is over."""
        with self._database.read() as session:
            rows = session.execute(
                select(Model, Measurement)
                .join(Measurement, Measurement.model_id == Model.id)
                .where(Measurement.place == HERE, Measurement.kind.in_(("layers", "slices")))
            )
            for model, row in rows:
                if row.kind == "layers":
                    is_due = msgspec.convert(row.content, StoredLayers).is_due(self._now())
                else:
                    is_due = bool(row.content.get("busy")) and self._now() - row.taken >= REMEASURE_S
                if is_due:
                    return model
        return None

    def _samples(self, model: Model, *, anew: bool = False) -> TensorMeasurements:
        """Stored tensor sizes; measured again if the number of samples changed."""
        count = len(self._registry.samples(model, MEASURED_SAMPLES))
        stored = None if anew else self._stored(model, "tensors")
        if stored is not None and stored["samples"]["count"] == count:
            return msgspec.convert(stored["samples"], TensorMeasurements)
        measured = self._measure.samples(self._registry.load(model), self._registry.samples(model, MEASURED_SAMPLES))
        self._store(model, "tensors", {"samples": msgspec.to_builtins(measured)})
        return measured

    def _codecs(self, model: Model, *, wanted: bool = True, anew: bool = False) -> CodecMeasurements:
        """Stored codec costs; measured again if samples or labels changed. Empty where they are neither stored nor
        wanted."""
        count = len(self._registry.samples(model, MEASURED_SAMPLES))
        labels = self._registry.labels(model, MEASURED_SAMPLES)
        stored = None if anew else self._stored(model, "codecs")
        known = list(boundary_codecs.LOSSY)
        if stored is not None and stored["labels"] == labels and stored.get("known") == known:
            return msgspec.convert(stored["codecs"], CodecMeasurements)
        if not wanted:
            return CodecMeasurements()
        if count < 2:
            raise UsageError(f"{model.ref}: {FEW_SAMPLES.format(count)}; add some by `edgectl profile --samples`")
        samples = self._registry.samples(model, MEASURED_SAMPLES)
        measured = self._measure.codecs(self._registry.load(model), samples, labels)
        self._store(model, "codecs", {"codecs": msgspec.to_builtins(measured), "labels": labels, "known": known})
        return measured

    def _stored(self, model: Model, kind: str) -> Mapping[str, Any] | None:
        with self._database.read() as session:
            row = session.scalars(_measurement(model, kind)).first()
            return row.content if row is not None else None

    def _store(self, model: Model, kind: str, content: dict[str, Any]) -> None:
        with self._database.write() as session:
            check_stored(session, model)
            row = session.scalars(_measurement(model, kind)).first()
            if row is None:
                row = Measurement(model_id=model.id, kind=kind, place=HERE)
                session.add(row)
            row.content, row.taken = content, self._now()


def measured_basis(load: MachineLoad | None, remedy: str = "measured again when it is quiet") -> str:
    """Text for `Costs.basis` of seconds that were measured on this machine; `remedy` says what comes after a busy
    one."""
    busy = load is not None and load.is_busy
    return "measured: on this machine" + (f", which was busy ({load}): {remedy}" if busy else "")


def check_for_model(ref: str, options: PlanOptions) -> None:
    """UsageError where the options ask for what only a family has."""
    if options.cascade is not None and not options.cascade.exit_output:
        raise UsageError(
            f"{ref} is no family: a cascade is of two variants of one (`edgectl family create`), or of a model with an"
            " output of its first layers (--exit OUTPUT)"
        )


def answer_rule_of(text: str, outputs: Sequence[TensorSpec]) -> AnswerRule:
    """What an answer of a model with these outputs is: as the text says, or the class of a classifier. UsageError where
    neither says it."""
    rule = parse_answer_rule(text, outputs) if text else infer_answer_rule(outputs)
    if rule is None:
        named = ", ".join(spec.name for spec in outputs)
        raise UsageError(
            f"max_changed: when two answers differ must be said for the outputs {named}: give --answer class:OUTPUT,"
            " boxes:LAYOUT[:THRESHOLD] or close:0.01; or limit the output error by --allow-loss"
        )
    return rule


def _measurement(model: Model, kind: str) -> Select[Measurement]:
    return select(Measurement).filter_by(model_id=model.id, kind=kind, place=HERE)


def _medians(times: Mapping[str, LayerTime]) -> dict[str, float]:
    return {name: time.median_s for name, time in times.items()}


def _codec_rows(samples: TensorMeasurements, measured: CodecMeasurements) -> list[dict[str, Any]]:
    """Every lossy codec on every tensor, as JSON rows."""
    rows = []
    for tensor, by_codec in measured.tensors.items():
        for codec, measures in by_codec.items():
            figures = {
                "bytes": measures.cost.bytes, "zstd_bytes": measures.packed.bytes,
                "encode_s": measures.packed.encode_s[HERE], "decode_s": measures.packed.decode_s[HERE],
                "loss": measures.chosen.loss, "confirmed_loss": measures.confirmed.loss,
                "accuracy": measures.confirmed.accuracy, "accuracy_raw": measures.confirmed.accuracy_raw,
            }  # fmt: skip
            rows.append({"tensor": tensor, "codec": codec, "raw_bytes": samples.tensors[tensor].bytes, **figures})
    return rows


def device_profile(name: str) -> DeviceProfile:
    """The shipped profile of that name. NotFound for anything else: a path, which would name a file on the controller's
    machine, is not accepted."""
    if name not in list_profiles():
        raise not_found("device profile", name, list_profiles())
    return load_profile(name)


def links_through(link: Link, gateway: GatewayHop | None = None) -> dict[str, Link]:
    """The links of a plan, by the tiers they connect."""
    if gateway is None:
        return {TIERS: link}
    return {f"device-{EDGE}": link, f"{EDGE}-{HERE}": gateway.uplink}


def link_of(*texts: str) -> Link:
    """The link that the first non-empty text describes; `ASSUMED_LINK` if all are empty."""
    return parse_link(next((text for text in texts if text), ASSUMED_LINK))


def slowest_link(links: Sequence[Link]) -> Link:
    """The slowest link, for which a plan for several devices is made; its table contains rows for all the others
    too."""
    return min(links, key=lambda link: (link.up_bytes_per_s, -link.rtt_s))
