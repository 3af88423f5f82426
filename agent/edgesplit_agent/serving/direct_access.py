"""Lanes on the engine's side: direct channels from an application to the worker process, past the agent.

A lane is granted only while there is nothing to decide per request; `reason_against` is the whole decision. Requests
answered over lanes are counted like all others: the worker records each answer in shared memory, and here it becomes
the report that the engine's observers receive. See docs/decisions/0042-lanes.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic

from edgesplit.client.direct.grant import Grant, layout_tensors
from edgesplit.errors import Busy, InferenceFailed, UsageError
from edgesplit.oip.report import Report
from edgesplit.plan import Plan, Row
from edgesplit.runtime import Timing
from edgesplit_agent.power.energy_model import EnergyMeter, actual_joules
from edgesplit_agent.releases.loaded_release import LoadedRelease
from edgesplit_agent.serving.deferred_accounting import DeferredAccounting
from edgesplit_agent.worker.dataflow import dataflow_of
from edgesplit_agent.worker.direct_broker import LaneResults, LaneSpec
from edgesplit_agent.worker.direct_shared_state import MAX_SLICES
from edgesplit_agent.worker.host import LaneHost

IsSettled = Callable[[str], bool]
"""Whether no release is on trial for that model."""
OnSliceTimes = Callable[[LoadedRelease, Timing], None]
"""Callback for measured slice times."""
OnLaneAnswer = Callable[[str, LoadedRelease, Report], None]
"""Callback for each answer given over a lane: model, release, report."""


@dataclass(frozen=True)
class LaneConditions:
    """The conditions that decide whether a model may be reached by lanes."""

    allowed: bool
    """The operator permits lanes."""
    models: int
    """Number of models that this device serves."""
    row_in_use: str
    traced: bool
    watts: float | None
    """Power budget in watts; None: none."""
    settled: bool


def only_local_row(release: LoadedRelease) -> Row | None:
    """The row that answers every request, where it is certain and local; else None."""
    forced = next((row for row in release.plan.rows if row.name == release.plan.forced_row and row.is_local), None)
    return release.only_row or forced


def reason_against(release: LoadedRelease, conditions: LaneConditions) -> str:
    """Why lanes cannot be granted now; empty where they can."""
    row = only_local_row(release)
    if not conditions.allowed:
        return "lanes are switched off"
    if row is None:
        return "the plan has several ways to answer"
    if conditions.models != 1:
        return "several models share this device's processor"
    if conditions.row_in_use != row.name:
        return "it was not asked yet"
    if conditions.traced:
        return "requests are traced"
    if conditions.watts is not None:
        return "there is a power budget"
    if not conditions.settled:
        return "a release is on trial"
    return _release_reason_against(release, row)


def _release_reason_against(release: LoadedRelease, row: Row) -> str:
    """Why this release can never be reached by lanes; empty where it can."""
    order = release.order(row.device)
    if not isinstance(release.host, LaneHost):
        return "models run in the agent's own process"
    if release.emulated:
        return "the device is emulated"
    if release.input_decoders or release.passed_through:
        return "inputs are decoded, or are outputs too"
    if {compiled.slice.name for compiled in release.manifest.compiled} & set(order) or len(order) > MAX_SLICES:
        return "its slices are watched one by one"
    return ""


def grant_for(release: LoadedRelease, row: Row) -> Grant:
    """The grant for a client: tensor layout, row and power figures. UsageError where a size is known only at run
    time."""
    inputs = layout_tensors(release.inputs, 0)
    outputs = layout_tensors(release.outputs, inputs[1]) if inputs is not None else None
    if inputs is None or outputs is None:
        raise UsageError("no lane: not all of its tensors have a fixed size")
    power = release.plan.power
    return Grant(
        release=release.digest, row=row.name, split_after=row.split_after, inputs=inputs[0], outputs=outputs[0],
        outputs_offset=inputs[1], bytes=outputs[1],
        busy_watts=power.busy_watts if power is not None else None,
        idle_watts=power.idle_watts if power is not None else None,
    )  # fmt: skip


@dataclass(frozen=True)
class LaneObservers:
    """Receivers of what the lanes' results contain."""

    on_slice_times: OnSliceTimes
    on_answer: OnLaneAnswer
    on_joules: Callable[[float], None]
    """Called with the joules of each inference beyond idling."""
    energy: EnergyMeter
    on_device_part: Callable[[str, Exception | None], None]
    deferred: DeferredAccounting
    """Queue in which all of it is recorded in order."""


class Lanes:
    """Grants lanes and ends them. Under the lock `changing`, granting and changing the served releases exclude each
    other."""

    def __init__(self, observers: LaneObservers) -> None:
        self.changing = threading.Lock()
        self._observers = observers
        self._granted: tuple[tuple[LaneHost, Plan, Row], ...] = ()
        """Hosts that granted a lane since the served releases last changed, with plan and row."""
        self._slowdown = 1.0

    def open(
        self, model: str, release: LoadedRelease, conditions: LaneConditions, descriptor: int, *, shared: bool
    ) -> Grant:
        """Grant a lane over the socket `descriptor`; Busy with the reason where there is none.

        The caller holds `changing` and a lease of the release.
        """
        if reason := reason_against(release, conditions):
            raise Busy(f"no lane: {reason}")
        row, host = only_local_row(release), release.host
        assert row is not None and isinstance(host, LaneHost)
        grant, order = grant_for(release, row), tuple(release.order(row.device))
        measured_s = {name: seconds for name, seconds, _ in release.learned()}
        expected_s = sum(measured_s[name] for name in order) if measured_s.keys() >= set(order) else None
        if set(dataflow_of(release.manifest, order).reads) - {spec.name for spec in release.inputs}:
            raise Busy("no lane: its slices need what no application gives")

        def on_results(notes: LaneResults) -> None:
            self._observers.deferred.defer(lambda: self._report(model, release, row, order, notes))

        host.open_lane(
            LaneSpec(
                order, grant.inputs, grant.outputs, grant.outputs_offset, grant.bytes, expected_s,
                release.predicted_s(order), on_results, self._observers.deferred.flush,
            ), descriptor, shared=shared,
        )  # fmt: skip
        if all(known_host is not host for known_host, _, _ in self._granted):
            self._granted = (*self._granted, (host, release.plan, row))
        return grant

    def end(self, releases: Mapping[str, LoadedRelease]) -> None:
        """End all lanes; clients must request new ones. The caller holds `changing`."""
        self._granted = ()
        for release in releases.values():
            if isinstance(release.host, LaneHost):
                release.host.end_lanes()

    @property
    def has_grants(self) -> bool:
        """Whether lane results may be waiting to be collected."""
        return bool(self._granted)

    def collect(self, slowdown: float) -> None:
        """Collect the results of all lanes, and update the predictions that lane answers contain."""
        self._slowdown = slowdown
        for host, _, row in self._granted:
            host.collect_lanes(row.device_s * slowdown, self._observers.energy.scale(monotonic()) or 0.0)

    def _report(
        self, model: str, release: LoadedRelease, row: Row, order: tuple[str, ...], results: LaneResults
    ) -> None:
        """Report one batch of lane results to the observers."""
        ears = self._observers
        if results.slice_s:
            ears.on_slice_times(release, Timing(dict(zip(order, results.slice_s, strict=True))))
        if results.answers:
            ears.on_device_part(release.digest, None)
        for _ in range(results.failures):
            ears.on_device_part(release.digest, InferenceFailed("its slices failed, asked by a lane"))
        for latency_s, run_s in results.answers:
            joules, basis = self._joules(release.plan, row, latency_s, run_s)
            report = Report(
                release=release.digest, row=row.name, split_after=row.split_after, latency_s=latency_s,
                predicted_s=row.device_s * self._slowdown, device_s=run_s, joules=joules, joules_basis=basis,
            )  # fmt: skip
            ears.on_answer(model, release, report)

    def _joules(self, plan: Plan, row: Row, latency_s: float, run_s: float) -> tuple[float, str]:
        """Joules of one answer and their basis; (0, "") where the plan has no power figures."""
        if plan.power is None:
            return 0.0, ""
        predicted = actual_joules(row, plan.power, run_s, latency_s, 0.0)
        self._observers.on_joules(predicted - plan.power.idle_watts * latency_s)
        return self._observers.energy.record_answer(plan, predicted, latency_s, monotonic())
