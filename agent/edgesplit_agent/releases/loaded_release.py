"""A release that is loaded and can answer on this device: the usable rows of its plan, and the slices that they run
here.

The agent enforces its own privacy floor: a row that would send data which must not leave the device is dropped,
whatever the plan contains.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from edgesplit.answers.answer_rule import AnswerRule, infer_answer_rule, rule_of_boxes
from edgesplit.answers.detections import RULE, to_detections
from edgesplit.errors import InferenceFailed, MalformedMessage, TrustError, UsageError
from edgesplit.foreign_server import ForeignServer
from edgesplit.identifiers import ModelRef
from edgesplit.lazy_import import lazy_import
from edgesplit.oip import protocol as oip
from edgesplit.plan import Plan, Row
from edgesplit.release import boundary_codecs
from edgesplit.release.manifest import CompiledSlice, GoldenExample, Manifest, ReleaseVariant, TensorSpec
from edgesplit.release.privacy_floor import PrivacyFloor, floor_violation
from edgesplit.release_store import StoredRelease
from edgesplit.runtime import Tensor, Tensors, Timing
from edgesplit.runtime.providers import ACCELERATOR_GONE
from edgesplit_agent.releases.class_labels import by_label
from edgesplit_agent.releases.measured_plan import FirstWork, with_measured_seconds
from edgesplit_agent.worker.host import Host, SliceRun, StartHost

if TYPE_CHECKING:
    import numpy as np
else:
    np = lazy_import("numpy")

log = logging.getLogger(__name__)

RELATIVE_TOLERANCE = 1e-3
"""Tolerance of golden answers, which were computed on another processor: their bits differ here, by far less than this.
"""
ABSOLUTE_FLOOR = 1e-6
"""Difference that never counts in an output that is at least `1 / FLOOR_PART` times as large: values inside a network
are about 1, and their rounding shows in an output however small it is for these inputs."""
FLOOR_PART = 0.05
"""Part of an output's range that the absolute floor may be, at most: an output that is tiny everywhere is compared
too."""
SMOOTHING = 0.3
"""Weight of a new measurement in the exponential moving average of a slice's run time."""


class Leases:
    """Reference counter with a pending end: reports when the last lease of an ending resource is returned. Thread-safe,
    because requests end on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = 0
        self._ending = False

    def acquire(self) -> None:
        """Add a lease."""
        with self._lock:
            self._held += 1

    def release(self) -> bool:
        """Return a lease. True where the resource is to be closed now."""
        with self._lock:
            self._held -= 1
            return self._ending and not self._held

    def end(self) -> bool:
        """Begin to end the resource. True where it is to be closed at once, because no lease is open."""
        with self._lock:
            self._ending = True
            return not self._held


@dataclass(eq=False)
class LoadedRelease:
    """A loaded release. Each request leases the release it began with, so that an update never changes a request in
    flight."""

    digest: str
    """Digest of the release."""
    manifest: Manifest
    plan: Plan
    """The plan with what was measured here in place of predicted seconds, once it was (`price_by`, `on_work`)."""
    host: Host
    emulated: bool = False
    measured_s: dict[str, float] = field(default_factory=dict)
    """Measured seconds by slice, smoothed."""
    runs: dict[str, int] = field(default_factory=dict)
    """Number of runs by slice from which `measured_s` was learned."""
    failed_compiled: dict[str, str] = field(default_factory=dict)
    """Compiled slices that failed in a run, with the reason: their CPU equivalents run until the release is loaded
    again."""
    _first_work: FirstWork = field(default_factory=FirstWork)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    _leases: Leases = field(default_factory=Leases)

    def lease(self) -> None:
        """Keep the release loaded until `end_lease` is called."""
        self._leases.acquire()

    def end_lease(self) -> None:
        """End a lease; the last one closes a retired release."""
        if self._leases.release():
            self.host.close()

    def retire(self) -> None:
        """End the release: its host is closed once no request leases it."""
        if self._leases.end():
            self.host.close()

    @cached_property
    def model(self) -> str:
        """The model's name, without its version."""
        return ModelRef.parse(self.manifest.model).name

    @cached_property
    def version(self) -> str:
        """The version of the model; "1" where it has none."""
        return self.manifest.model.partition("@")[2] or "1"

    @cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs of a request."""
        return self.manifest.inputs

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs of a request."""
        return self.manifest.outputs

    @cached_property
    def answer_rule(self) -> AnswerRule | None:
        """What an answer is, as far as the outputs say: the class of a classifier, the boxes of a family of
        detectors."""
        is_boxes = any(variant.answer for variant in self.manifest.family)
        return RULE if is_boxes else infer_answer_rule(self.outputs)

    @cached_property
    def passed_through(self) -> frozenset[str]:
        """Names of inputs that are outputs too."""
        return frozenset({spec.name for spec in self.inputs} & {spec.name for spec in self.outputs})

    @cached_property
    def input_decoders(self) -> frozenset[str]:
        """Names of the slices that decode the request's input."""
        return frozenset(item.name for item in self.manifest.slices if item.format == "input")

    @cached_property
    def layer_counts(self) -> Mapping[str, int]:
        """Number of the model's layers by slice."""
        return {item.name: len(item.layers) for item in self.manifest.slices}

    @property
    def has_runnable_golden(self) -> bool:
        """Whether it has golden inputs, and can run them on this device alone."""
        return bool(self.manifest.golden) and self.plan.local is not None

    @cached_property
    def exit_slices(self) -> tuple[str, ...]:
        """The slices that compute the plan's early exit, in an order in which they can run; empty where it has none."""
        cascade = self.plan.cascade
        return self.manifest.slices_for(cascade.exit_output) if cascade is not None and cascade.exit_output else ()

    @property
    def only_row(self) -> Row | None:
        """The plan's only row, where it has exactly one and that runs on the device alone; otherwise None. None for a
        family too: a request may ask for more accuracy than the row has; and with an early exit, where it may end.
        """
        rows = self.plan.rows
        is_only = len(rows) == 1 and rows[0].is_local and not rows[0].variant and self.plan.cascade is None
        return rows[0] if is_only else None

    def order(self, names: Collection[str]) -> list[str]:
        """These slices in an order in which they can run. Where a compiled slice covers all of them but the input
        decoder, it replaces them."""
        wanted = set(names)
        order = [item.name for item in self.manifest.slices if item.name in wanted]
        compiled = next((item for item in self.manifest.compiled if self._replaces(item, wanted)), None)
        if compiled is None:
            return order
        first = min(order.index(name) for name in compiled.covers)
        order.insert(first, compiled.slice.name)
        return [name for name in order if name not in compiled.covers]

    def _replaces(self, compiled: CompiledSlice, wanted: set[str]) -> bool:
        """Whether that compiled slice is loaded here, has not failed, and covers exactly these slices without the input
        decoder."""
        work = {item.name for item in self.manifest.slices if item.name in wanted and item.format != "input"}
        is_available = compiled.slice.name in self.host.slices and compiled.slice.name not in self.failed_compiled
        return is_available and set(compiled.covers) == work

    def run(
        self, order: Sequence[str], tensors: Tensors, timing: Timing | None = None, until: float = math.inf
    ) -> dict[str, Tensor]:
        """Run these slices in order; the input tensors together with all outputs that may be needed later.

        DeadlineExceeded after `until` (of perf_counter), WorkerLost where the worker process ended, InferenceFailed
        where a slice cannot run, UsageError where the request's input is at fault.
        """
        with self._lock:
            measured = [self.measured_s.get(name) for name in order]
        expected_s = None if None in measured else sum(slice_s or 0.0 for slice_s in measured)
        timing = timing if timing is not None else Timing()
        try:
            return self.host.run(SliceRun(order, tensors, until, expected_s, self.predicted_s(order)), timing)
        except InferenceFailed as failure:
            replacement = self._cpu_fallback(order, failure)
            if replacement is None:
                raise
            return self.host.run(SliceRun(replacement, tensors, until), timing)

    def _cpu_fallback(self, order: Sequence[str], failure: InferenceFailed) -> list[str] | None:
        """The order with the failed compiled slice replaced by the CPU slices that it covers, which run from now on;
        None where `order` contains no compiled slice."""
        compiled = next((item for item in self.manifest.compiled if item.slice.name in order), None)
        if compiled is None:
            return None
        reason = f"{ACCELERATOR_GONE}, the CPU runs instead: {failure}"
        log.error("%s: %s", self.manifest.model, reason)
        self.failed_compiled[compiled.slice.name] = f"{compiled.slice.name}: {reason}"
        names = (*(name for name in order if name != compiled.slice.name), *compiled.covers)
        return self.order(names)

    @property
    def trouble(self) -> str:
        """What is wrong with its execution: lost workers, a failed accelerator. Empty where nothing is."""
        status = self.host.status()
        messages = [*self.failed_compiled.values(), *status.get("notes", ())]
        if status.get("lost_in_a_row"):
            messages.append(f"{status['lost_in_a_row']} workers lost in a row, the last {status['last_lost']}")
        return "; ".join(messages)

    def local_remainder(self, row: Row, finish: Row | None) -> list[str] | None:
        """The slices of the local row `finish` that remain after `row`'s own, if the device finishes the request
        itself; None where it cannot."""
        return None if finish is None else self.order(set(finish.device) - set(row.device))

    def receives(self, row: Row) -> tuple[TensorSpec, ...]:
        """Specifications of the tensors that the offload target must return for this row."""
        by_name = self.manifest.tensors_of(row.variant)
        return tuple(by_name[name] for name in row.receives)

    def outputs_by(self, variant: str, tensors: Tensors) -> dict[str, Tensor]:
        """The request's outputs among the tensors that a variant computed ("": the one model), under the names of the
        family's outputs and in the order of its classes; boxes in their common form. InferenceFailed where one is
        missing."""
        names = self.manifest.outputs_of(variant)
        missing = [name for name in names if name not in tensors]
        if missing:
            raise InferenceFailed(f"there is no output {missing[0]!r}")
        found = self.manifest.variant(variant)
        if found is not None and found.answer:
            try:
                return to_detections(rule_of_variant(found), tensors)
            except UsageError as error:
                raise InferenceFailed(f"the answer of {variant} is none: {error}") from error
        labels = found.labels if found is not None else ()
        wanted = zip(self.outputs, names, strict=True)
        return {spec.name: by_label(tensors[name], labels, spec) for spec, name in wanted}

    def predicted_s(self, names: Collection[str]) -> float:
        """Seconds that the plan predicts for these slices on this class of device."""
        return sum(self.plan.slice_s.get(name, 0.0) for name in names)

    def learn(self, timing: Timing) -> None:
        """Update the smoothed run times from a run."""
        with self._lock:
            for name, seconds in timing.seconds.items():
                old = self.measured_s.get(name, seconds)
                self.measured_s[name] = old + SMOOTHING * (seconds - old)
                self.runs[name] = self.runs.get(name, 0) + 1

    def price_by(self, seconds: Mapping[str, float]) -> None:
        """Replace the plan's seconds by measured ones, by slice. Requests in flight keep the rows they selected. An
        emulated device takes what its profile predicts, and is not repriced."""
        if not self.emulated:
            self.plan = with_measured_seconds(self.plan, seconds)

    def on_work(self, seconds: Mapping[str, float], now: float) -> bool:
        """Count the run times of one request's slices; after the first minute of work they become the plan's. True
        where they have become so now."""
        with self._lock:
            medians = self._first_work.add(seconds, now)
        if medians:
            self.price_by(medians)
        return bool(medians) and not self.emulated

    def learned(self) -> list[tuple[str, float, int]]:
        """For each slice its name, smoothed seconds, and the number of runs that these were learned from."""
        with self._lock:
            return [(name, seconds, self.runs.get(name, 0)) for name, seconds in self.measured_s.items()]


def rule_of_variant(variant: ReleaseVariant) -> AnswerRule:
    """A detector's own answer rule, on its own outputs. UsageError where its layout is unknown here."""
    return rule_of_boxes(variant.answer, variant.outputs, variant.labels)


def plan_for(manifest: Manifest, device_class: str, floor: PrivacyFloor | None = None) -> Plan:
    """The plan for this class of device, without the rows that this device must not or cannot run. UsageError where the
    release has none for the class, TrustError where no row is left."""
    plan = manifest.plans.get(device_class)
    if plan is None:
        raise UsageError(f"the release has no plan for {device_class!r}, only for {sorted(manifest.plans)}")
    reasons = {row.name: _reason_against(row, plan, manifest, floor or PrivacyFloor()) for row in plan.rows}
    rows = tuple(row for row in plan.rows if not reasons[row.name])
    for name, reason in reasons.items():
        if reason:
            log.warning("row %s of %s is not used here: %s", name, manifest.model, reason)
    if not rows:
        name, reason = next(iter(reasons.items()))
        raise TrustError(f"no row of the plan can run here; {name}: {reason}")
    return msgspec.structs.replace(plan, rows=rows)


def _reason_against(row: Row, plan: Plan, manifest: Manifest, floor: PrivacyFloor) -> str:
    """Why this device must not or cannot run the row; empty where it can."""
    known = manifest.tensors_of(row.variant)
    unknown = sorted({*row.codecs.values()} - {*boundary_codecs.CODECS}) or sorted({*row.receives} - {*known})
    if foreign := sorted({*row.codecs.values()} & {*boundary_codecs.PACKED}) if plan.offload else []:
        return f"it sends by {foreign[0]}, which {plan.offload} does not decode"
    variant = manifest.variant(row.variant)
    if variant is not None and variant.answer:
        try:
            rule_of_variant(variant)
        except UsageError as error:
            return str(error)
    if any(not 0 < clip <= 1 for clip in row.clips.values()):
        return f"its clips are {row.clips}, but must be above 0 and at most 1"
    if row.compress and plan.offload and not ForeignServer.parse(plan.offload).accepts_gzip:
        return f"its requests are compressed, which {plan.offload} is not known to support"
    return floor_violation(row, plan, manifest, floor) or (
        f"it needs {unknown[0]!r}, which is unknown here" if unknown else ""
    )


def load_release(
    release: StoredRelease, device_class: str, start: StartHost, floor: PrivacyFloor | None = None
) -> LoadedRelease:
    """Load the release for this class of device; each file's digest is checked now. TrustError, ModelRefused."""
    plan = plan_for(release.manifest, device_class, floor)
    host = start(release, plan)
    return LoadedRelease(release.digest, release.manifest, plan, host, host.emulated)


def check_golden(
    active: LoadedRelease,
    golden: GoldenExample,
    chunk: Callable[[str], bytes],
    ranges: Mapping[str, float] | None = None,
    variant: str = "",
) -> dict[str, Tensor]:
    """Run one golden input on the device alone and return its outputs. InferenceFailed where they differ from the whole
    model's, relative to their `ranges` (`golden_ranges`).

    In a family the whole model is `variant`. Where the plan has no local row of it there is nothing to compare, loading
    was the whole test, and the result is empty.
    """
    local = next((row for row in active.plan.rows if row.is_local and row.variant == variant), None)
    if local is None:
        return {}
    request = oip.decode_request(*with_header_length(chunk(golden.request.sha256)))
    expected = oip.decode_response(*with_header_length(chunk(golden.response.sha256)))
    timing = Timing()
    outputs = active.run(active.order(local.device), request.inputs, timing)
    active.learn(timing)
    for name, wanted in expected.outputs.items():
        if name not in outputs or not is_close(outputs[name], wanted, (ranges or {}).get(name, 0.0)):
            raise InferenceFailed(f"golden input: output {name!r} differs from the whole model's")
    return {name: outputs[name] for name in expected.outputs}


def golden_inputs(golden: GoldenExample, chunk: Callable[[str], bytes]) -> Tensors:
    """The input tensors of a golden request."""
    return oip.decode_request(*with_header_length(chunk(golden.request.sha256))).inputs


def golden_ranges(goldens: Sequence[GoldenExample], chunk: Callable[[str], bytes]) -> dict[str, float]:
    """The largest absolute value of each output over all golden answers: on a picture that shows nothing, a detector's
    scores are far below their range."""
    found: dict[str, float] = {}
    for golden in goldens:
        for name, tensor in oip.decode_response(*with_header_length(chunk(golden.response.sha256))).outputs.items():
            found[name] = max(found.get(name, 0.0), range_of(tensor))
    return found


def range_of(tensor: Tensor) -> float:
    """The largest absolute value that is finite; 0 where there is none, and for text."""
    if not np.issubdtype(tensor.dtype, np.number):
        return 0.0
    finite = tensor[np.isfinite(tensor)]
    return float(np.max(np.abs(finite.astype(np.float64)))) if finite.size else 0.0


def tolerance_of(largest: float) -> float:
    """Absolute difference that is allowed in an output whose values are up to `largest`."""
    return max(RELATIVE_TOLERANCE * largest, min(ABSOLUTE_FLOOR, FLOOR_PART * largest))


def is_close(actual: Tensor, expected: Tensor, largest: float = 0.0) -> bool:
    """Whether the tensors are equal up to the rounding of another processor or kernel; never where a value became NaN.

    `largest` is what the output reaches for other inputs, where that is known.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not np.issubdtype(expected.dtype, np.floating):
        return bool(np.array_equal(actual, expected))
    allowed = tolerance_of(max(range_of(expected), largest))
    return bool(np.allclose(actual, expected, rtol=RELATIVE_TOLERANCE, atol=allowed, equal_nan=True))


def with_header_length(body: bytes) -> tuple[bytes, int | None]:
    """The body of a golden request or response, and the length of its JSON part: what the binary tensors' sizes leave.
    None where it has no binary tensors."""
    try:
        head, _ = json.JSONDecoder().raw_decode(body.decode("latin-1"))
        tensors = [*head.get("inputs", ()), *head.get("outputs", ())]
        sizes = [int(tensor.get("parameters", {}).get("binary_data_size", 0)) for tensor in tensors]
    except (ValueError, TypeError, AttributeError) as error:
        raise MalformedMessage(f"golden body: {error}") from error
    return body, len(body) - sum(sizes) if any(sizes) else None
