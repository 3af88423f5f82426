"""Direct access ("lanes"): channels from an application to the worker process, past the agent.

A lane is granted only while there is nothing to decide per request; `reason_against` is the whole decision. Requests
answered over lanes are counted like all others: the worker records each answer in shared memory, and here it becomes
the record that the engine's observers receive. See docs/decisions/0042-lanes.md.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

import msgspec

from edgesplit.client.direct.grant import LANE_PATH, Grant, LaneRequest, layout_tensors
from edgesplit.errors import Busy, InferenceFailed, MalformedMessage, UsageError
from edgesplit.http1.server import Request, Response, error_response, json_response
from edgesplit.oip.report import Report
from edgesplit.plan import Plan, Row
from edgesplit.runtime import Timing
from edgesplit_agent.power.energy_model import EnergyMeter, actual_joules
from edgesplit_agent.releases.loaded_release import LoadedRelease
from edgesplit_agent.serving.accounting import RequestAccounting
from edgesplit_agent.serving.request import served_name
from edgesplit_agent.telemetry.request_record import RequestRecord
from edgesplit_agent.worker.dataflow import dataflow_of
from edgesplit_agent.worker.direct.broker import LaneResults, LaneSpec, ReleaseLanes
from edgesplit_agent.worker.direct.shared_state import MAX_SLICES

IsSettled = Callable[[str], bool]
"""Whether no release is on trial for that model."""


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
    serving: LoadedRelease | None = None
    """The release that serves the model; None once the engine has stopped."""


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
        return "the plan has several rows"
    if conditions.models != 1:
        return "several models share this device's processor"
    if conditions.row_in_use != row.name:
        return "it has answered no request yet"
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
    if release.host.lanes is None:
        return "models run in the agent's own process"
    if release.emulated:
        return "the device is emulated"
    if release.input_decoders or release.passed_through:
        return "inputs are decoded, or are outputs too"
    if {compiled.slice.name for compiled in release.manifest.compiled} & set(order) or len(order) > MAX_SLICES:
        return "its slices are monitored one by one"
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


@dataclass(eq=False)
class DirectAccess:
    """Grants lanes, ends them, and records the requests that they answered. Thread-safe."""

    lease: Callable[[str], LoadedRelease]
    """The release that serves a model, leased for the caller; NotFound."""
    conditions: Callable[[str], LaneConditions]
    accounting: RequestAccounting
    energy: EnergyMeter
    on_joules: Callable[[float], None]
    """Called with the joules of each inference beyond idling."""
    slowdown: Callable[[], float]
    """The device's present slowdown."""
    _changing: threading.Lock = field(default_factory=threading.Lock)
    """Granting lanes and changing the served releases exclude each other."""
    _granted: tuple[tuple[ReleaseLanes, Row], ...] = ()
    """Releases that granted a lane since the served releases last changed."""
    _last_slowdown: float = 1.0
    """The slowdown in the predictions that lane answers contain."""

    def answer(self, request: Request) -> Response:
        """Answer a request to `LANE_PATH`: grant a lane over the socket whose descriptor came with it; the application
        keeps the other end. UsageError, MalformedMessage, NotFound, or Busy with the reason."""
        if request.method != "POST":
            return error_response(405, f"{request.method} is not for {LANE_PATH}", {"allow": "POST"})
        channel = request.connection_peer
        descriptor = channel.received_fd() if channel is not None and channel.is_local_socket else None
        if descriptor is None:
            raise UsageError("pass one end of a socket pair with this request, over the Unix socket")
        try:
            lane_request = msgspec.json.decode(request.body, type=LaneRequest)
            return json_response(200, self.open(lane_request.model, descriptor, shared=lane_request.shared))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedMessage(f"{LANE_PATH}: {error}") from error
        finally:
            os.close(descriptor)

    def open(self, model: str, descriptor: int, *, shared: bool) -> Grant:
        """Grant a lane to `model` (`name` or `name@version`) over the socket `descriptor`. Raises NotFound, UsageError,
        or Busy with the reason."""
        release = self.lease(model)
        model = served_name(model)
        try:
            with self._changing:
                conditions = self.conditions(model)
                if conditions.serving is not release:
                    raise Busy("no lane: the release is being replaced")
                grant = self._open(model, release, conditions, descriptor, shared=shared)
            self.collect()
            return grant
        finally:
            release.end_lease()

    def reason_against(self, model: str) -> str:
        """Why applications cannot have lanes to this model now; empty where they can."""
        conditions = self.conditions(model)
        release = conditions.serving
        return reason_against(release, conditions) if release is not None else "it does not run here"

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Context manager for a change of the served releases: all lanes are ended first, so that requests which begin
        from now on belong to the new release, and none is granted meanwhile. Clients must request new ones."""
        with self._changing:
            granted, self._granted = self._granted, ()
            for lanes, _ in granted:
                lanes.end_all()
            yield

    def collect(self) -> None:
        """Queue the records of everything that lanes answered, and update the predictions that lane answers contain."""
        granted = self._granted
        if granted:
            self._last_slowdown = self.slowdown()
        for lanes, row in granted:
            lanes.collect(row.device_s * self._last_slowdown, self.energy.scale(monotonic()) or 0.0)

    def _open(
        self, model: str, release: LoadedRelease, conditions: LaneConditions, descriptor: int, *, shared: bool
    ) -> Grant:
        if reason := reason_against(release, conditions):
            raise Busy(f"no lane: {reason}")
        row, lanes = only_local_row(release), release.host.lanes
        assert row is not None and lanes is not None
        grant, order = grant_for(release, row), tuple(release.order(row.device))
        measured_s = {name: seconds for name, seconds, _ in release.learned()}
        expected_s = sum(measured_s[name] for name in order) if measured_s.keys() >= set(order) else None
        if set(dataflow_of(release.manifest, order).reads) - {spec.name for spec in release.inputs}:
            raise Busy("no lane: its slices need inputs that no application sends")

        def on_results(results: LaneResults) -> None:
            self.accounting.defer(lambda: self._record(model, release, row, order, results))

        spec = LaneSpec(
            order, grant.inputs, grant.outputs, grant.outputs_offset, grant.bytes, expected_s,
            release.predicted_s(order),
            on_results, self.accounting.deliver,
        )  # fmt: skip
        lanes.open(spec, descriptor, shared=shared)
        if all(known is not lanes for known, _ in self._granted):
            self._granted = (*self._granted, (lanes, row))
        return grant

    def _record(
        self, model: str, release: LoadedRelease, row: Row, order: tuple[str, ...], results: LaneResults
    ) -> None:
        """Queue the records of one batch of lane results: a report for each answer."""
        timing = Timing(dict(zip(order, results.slice_s, strict=True))) if results.slice_s else None
        runs: list[Exception | None] = [None] if results.answers else []
        runs += [InferenceFailed("its slices failed for a request on a lane") for _ in range(results.failures)]
        self.accounting.finished(RequestRecord(model, release, None, tuple(runs), timing, is_direct=True))
        for latency_s, run_s in results.answers:
            joules, basis = self._joules(release.plan, row, latency_s, run_s)
            report = Report(
                release=release.digest, row=row.name, split_after=row.split_after, latency_s=latency_s,
                predicted_s=row.device_s * self._last_slowdown, device_s=run_s, joules=joules, joules_basis=basis,
            )  # fmt: skip
            self.accounting.finished(RequestRecord(model, release, report, is_direct=True))

    def _joules(self, plan: Plan, row: Row, latency_s: float, run_s: float) -> tuple[float, str]:
        """Joules of one answer and their basis; (0, "") where the plan has no power figures."""
        if plan.power is None:
            return 0.0, ""
        predicted = actual_joules(row, plan.power, run_s, latency_s, 0.0)
        self.on_joules(predicted - plan.power.idle_watts * latency_s)
        return self.energy.record_answer(plan, predicted, latency_s, monotonic())
