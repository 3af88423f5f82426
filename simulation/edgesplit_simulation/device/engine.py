"""How a simulated device answers requests: the agent's own row selection, circuit breaker, link estimator, hedge timing
and telemetry windows, over a link and an offload server given as numbers.

What the real engine does with threads is computed here in one step when the request arrives: how long the device's part
takes, whether the offload server answers, when the fallback tail starts, which of the two finishes first. The outcome
is delivered at its virtual time, unless the device loses power before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from edgesplit import plan as plans
from edgesplit.errors import DeadlineExceeded, EdgeError, InferenceFailed, LinkError, NotFound, Unsure
from edgesplit.offload_client.circuit_breaker import CircuitBreaker
from edgesplit.oip.report import Report
from edgesplit.plan import Conditions, Link, Plan, Row
from edgesplit.testing.virtual_time import Hub, Timer
from edgesplit_agent.offload.target import INITIAL_LINK
from edgesplit_agent.policy.cascade_audit import Draw
from edgesplit_agent.policy.escalation import CascadeRows, may_answer_unsure
from edgesplit_agent.policy.hedge_budget import hedge_schedule
from edgesplit_agent.policy.hedge_timing import MIN_OFFLOAD_WAIT_S
from edgesplit_agent.policy.link_estimator import LinkEstimate
from edgesplit_agent.policy.row_selection import RowChoice, RowSelector, SelectionContext
from edgesplit_agent.releases.loaded_release import LoadedRelease
from edgesplit_agent.telemetry.release_health import ReleaseHealthTracker
from edgesplit_agent.telemetry.request_record import RequestRecord
from edgesplit_agent.telemetry.windows import TelemetryWindows
from edgesplit_simulation.device.cascade import SimulatedCascade, SimulatedCascades
from edgesplit_simulation.device.runtime import SimulatedHost
from edgesplit_simulation.device.sensors import BASIS, PowerModel, joules

DEADLINE_S = 2.0
"""Seconds that a request may take when the caller sets no deadline."""


@dataclass
class SimulatedOffloadServer:
    """The offload server as one device sees it: the link to it and whether it answers."""

    link: Link
    is_up: Callable[[], bool] = lambda: True
    """True while the server answers."""
    is_reachable: Callable[[], bool] = lambda: True
    """True while the device has a network."""
    load: float = 1.0
    """Factor on the server's planned run times."""


OnResult = Callable[["Report | EdgeError"], None]


@dataclass
class SimulatedEngine:
    """Serves the models of one simulated device; has the interface that the agent's update loop and telemetry use of
    the real engine."""

    hub: Hub
    offload_server: SimulatedOffloadServer
    on_device_run: Callable[[str, Exception | None], None]
    """Called with the release and the error (None on success) after each run of a request's device part; the signature
    of `edgesplit_agent.serving.local_executor`'s callback."""
    slowdown: float = 1.0
    """Factor of the device's run times over those of its plan."""
    health: ReleaseHealthTracker = field(default_factory=ReleaseHealthTracker)
    power_model: PowerModel = field(default_factory=lambda: PowerModel(0.0))
    windows: TelemetryWindows = field(default_factory=TelemetryWindows)
    cascades: SimulatedCascades = field(default_factory=SimulatedCascades)
    _serving: dict[str, LoadedRelease] = field(default_factory=dict)
    _row_selector: RowSelector = field(default_factory=RowSelector)
    _breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    _link_estimator: LinkEstimate | None = None
    _in_flight: int = 0
    _pending: dict[str, tuple[Timer, OnResult]] = field(default_factory=dict)
    _results: dict[str, tuple[str, LoadedRelease, Report | EdgeError]] = field(default_factory=dict)

    # What the update loop needs

    @property
    def serving(self) -> Mapping[str, LoadedRelease]:
        """The release that answers, by model."""
        return self._serving

    def serve(self, model: str, release: LoadedRelease) -> None:
        """Answer requests for `model` by this release from now on."""
        previous = self._serving.get(model)
        self._serving = {**self._serving, model: release}
        self._row_selector.forget(model)
        self.cascades.serve(model, release)
        self._link_estimator = self._link_estimator or LinkEstimate.from_link(release.plan.link)
        if previous is not None and previous is not release:
            previous.retire()

    def drop(self, model: str) -> None:
        """Stop answering requests for `model`."""
        previous = self._serving.get(model)
        self._serving = {name: release for name, release in self._serving.items() if name != model}
        self._row_selector.forget(model)
        self.cascades.drop(model)
        if previous is not None:
            previous.retire()

    # What telemetry needs

    @property
    def conditions(self) -> Conditions:
        """The estimated condition of link and offload server."""
        estimate = self._link_estimator or LinkEstimate.from_link(INITIAL_LINK)
        return estimate.conditions(self._breaker.is_allowing, self.hub.monotonic())

    def row_of(self, model: str) -> str:
        """Name of the plan row in use for `model`."""
        return self._row_selector.row_of(model)

    # Requests

    def submit(self, request_id: str, model: str, on_result: OnResult, deadline_s: float = DEADLINE_S) -> None:
        """Simulate one request. `on_result` is called exactly once, with a report or an error, at the latest at the
        deadline."""
        release = self._serving.get(model)
        if release is None:
            on_result(NotFound(f"no model {model!r} runs here"))
            return
        release.lease()
        self._probe_if_due()
        try:
            result, seconds = self._answer(release, model, deadline_s)
        except InferenceFailed as error:
            result, seconds = self._run_remotely(release, error)
        except EdgeError as error:
            result, seconds = error, 0.0
        self._pending[request_id] = self.hub.call_later(seconds, lambda: self._deliver(request_id)), on_result
        self._results[request_id] = model, release, result

    def abort(self, reason: str) -> None:
        """End the process: every request in flight fails with a LinkError, as its broken connection would report it."""
        pending, self._pending = self._pending, {}
        self._results.clear()
        for timer, on_result in pending.values():
            timer.cancel()
            on_result(LinkError(reason))

    def _deliver(self, request_id: str) -> None:
        _, on_result = self._pending.pop(request_id)
        model, release, result = self._results.pop(request_id)
        record = RequestRecord(model, release, result)
        self.windows.finished(record)
        self.health.finished(record)
        release.end_lease()
        on_result(result)

    # Simulation of one request

    def _answer(self, release: LoadedRelease, model: str, deadline_s: float) -> tuple[Report | EdgeError, float]:
        """The result of a request, by the release's cascade where it has one, and the seconds until it is known."""
        cascade = self.cascades.of(model)
        rows = cascade.rows(release.plan) if cascade is not None else None
        if cascade is None or rows is None:
            return self._simulate_request(release, release.plan, model, deadline_s)
        draw = cascade.audit.draw(self.hub.rng.random(), self.hub.monotonic(), lambda: self._breaker.is_allowing)
        try:
            return self._answer_by_cascade(release, model, cascade, rows, deadline_s, draw)
        except EdgeError:
            if draw == "drawn":
                cascade.audit.on_lost()
            raise

    def _answer_by_cascade(
        self, release: LoadedRelease, model: str, cascade: SimulatedCascade, rows: CascadeRows, deadline_s: float,
        draw: Draw,
    ) -> tuple[Report | EdgeError, float]:  # fmt: skip
        """The first variant's result where its drawn score is sure, else the second one's, or the first one's unsure
        answer where the second cannot be asked in time."""
        score = cascade.score(self.hub.rng)
        is_sure = cascade.audit.is_sure(score)
        # Rows behind an early exit contain its layers: what goes on computes them once.
        is_computed_later = bool(rows.cascade.exit_output) and not is_sure
        first_s = 0.0 if is_computed_later else self._run_on_device(release, rows.first)
        if first_s > deadline_s:
            if draw == "drawn":
                cascade.audit.on_lost()
            return DeadlineExceeded("the device's part was not finished before the deadline"), deadline_s
        own = partial(self._report, release, rows.first, rows.first.device_s, first_s, device_s=first_s, score=score)
        if is_sure:
            cascade.audit.on_sure(score, draw)
            if draw == "drawn":
                self._audit(release, model, cascade, rows)
            return own(), first_s
        try:
            result, seconds = self._simulate_request(release, rows.second, model, deadline_s - first_s)
        except LinkError as error:  # no row of the second variant can answer now
            result, seconds = error, 0.0
        if draw == "drawn":
            cascade.audit.on_outcome(False)
        if isinstance(result, Report):
            cascade.audit.on_escalated()
            marked = msgspec.structs.replace(
                result, escalated=True, score=score, latency_s=result.latency_s + first_s,
                device_s=result.device_s + first_s, predicted_s=result.predicted_s + first_s,
            )  # fmt: skip
            return marked, first_s + seconds
        is_given = may_answer_unsure(rows, 0.0)
        cascade.audit.on_unsure(is_given)
        unsure = f"{rows.cascade.first} is unsure, and {rows.cascade.second} could not be asked in time: {result}"
        return own(unsure=True) if is_given else Unsure(unsure), first_s + seconds

    def _audit(self, release: LoadedRelease, model: str, cascade: SimulatedCascade, rows: CascadeRows) -> None:
        """The second variant's answer to a frame that was answered surely: it costs time beside the requests."""
        choice = self._select_row(model, rows.second, DEADLINE_S)
        failed = choice is None or (not choice.row.is_local and bool(self._simulate_exchange(choice.row)[2]))
        if choice is None or failed:
            cascade.audit.on_unaudited()
            return
        if choice.row.device:
            self._run_on_device(release, choice.row)
        differs = cascade.differs(self.hub.rng, host_of(release).behaviour.drift)
        cascade.on_audited(differs, choice.row.up_bytes + choice.row.down_bytes, self.hub.monotonic())

    def _simulate_request(
        self, release: LoadedRelease, plan: Plan, model: str, deadline_s: float
    ) -> tuple[Report | EdgeError, float]:
        """The result of a request by one of the plan's rows and the seconds until it is known."""
        choice = self._select_row(model, plan, deadline_s)
        if choice is None:
            raise LinkError("the plan has no fallback, and the cloud does not answer")
        row = choice.row
        expected_s = plans.latency_s(row, self.conditions)
        device_s = self._run_on_device(release, row) if row.device else 0.0
        if device_s > deadline_s:  # the device's part alone misses the deadline: nothing is sent
            return DeadlineExceeded("the device's part was not finished before the deadline"), deadline_s
        if row.is_local:
            return self._report(release, row, expected_s, device_s, device_s=device_s), device_s
        return self._offload_with_fallback(release, choice, expected_s, device_s, deadline_s)

    def _select_row(self, model: str, plan: Plan, deadline_s: float) -> RowChoice | None:
        remote_usable = self._breaker.has_room(self._in_flight)
        meter = self._link_estimator or LinkEstimate.from_link(INITIAL_LINK)
        return self._row_selector.select(
            model, plan, SelectionContext(meter, self.hub.monotonic(), remote_usable, deadline_s=deadline_s)
        )

    def _run_on_device(self, release: LoadedRelease, row: Row) -> float:
        """Seconds that the device's slices take. Raises InferenceFailed where the worker is lost."""
        host = host_of(release)
        try:
            host.on_request()
        except InferenceFailed as error:
            self.on_device_run(release.digest, error)
            raise
        self.on_device_run(release.digest, None)
        predicted_s = release.predicted_s(row.device)
        seconds = predicted_s * host.behaviour.slowdown * self.slowdown * self.hub.rng.uniform(0.95, 1.1)
        self.power_model.add_busy_time(seconds)
        if self._link_estimator is not None:
            self._link_estimator = self._link_estimator.after_compute(seconds, predicted_s, self.hub.monotonic())
        return seconds

    def _offload_with_fallback(
        self, release: LoadedRelease, choice: RowChoice, expected_s: float, device_s: float, deadline_s: float
    ) -> tuple[Report | EdgeError, float]:
        """Result and duration of a request whose rest goes to the offload server, with the device as fallback."""
        row, now = choice.row, self.hub.monotonic()
        link_s, remote_s, failed = self._simulate_exchange(row)
        cloud_s = device_s + link_s + remote_s
        # The tail is the rest of the model run on the device: the fallback. Its start follows the real engine's hedge
        # timing; where the exchange fails, it starts as soon as the failure is known.
        tail = release.local_remainder(row, choice.finish)
        if tail is None:  # the device lacks the slices: without the offload server there is no answer
            tail_s, begins_s = float("inf"), float("inf")
        else:
            tail_s = self._run_on_device(release, Row(name=row.name, device=tuple(tail)))
            left_s = deadline_s - device_s
            start_times = hedge_schedule("auto", left_s, tail_s, link_s + remote_s, early_s=choice.early_s)
            begins_s = device_s + (link_s if failed else min(start_times.optional_s, start_times.forced_s))
        alone_s = begins_s + tail_s
        falls_back = failed or alone_s < cloud_s
        self._update_estimates(row, failed, link_s, now)
        report = partial(self._report, release, expected_s=expected_s)
        if falls_back and alone_s <= deadline_s:
            busy_s = device_s + tail_s
            if choice.local_was_chosen:  # the row was chosen for the device to win the race
                return report(choice.finish or row, latency_s=alone_s, device_s=busy_s), alone_s
            cause = failed or "timeout"
            return report(
                row, latency_s=alone_s, device_s=busy_s, local_finish_s=tail_s, fallback=True, cause=cause
            ), alone_s
        if not failed and cloud_s <= deadline_s:
            return report(row, latency_s=cloud_s, device_s=device_s, link_s=link_s, remote_s=remote_s), cloud_s
        return DeadlineExceeded("neither the cloud nor the device finished before the deadline"), deadline_s

    def _simulate_exchange(self, row: Row) -> tuple[float, float, str]:
        """Seconds on the link, seconds on the offload server, and the failure: `link`, `refused` or empty."""
        if not self.offload_server.is_reachable():
            return MIN_OFFLOAD_WAIT_S, 0.0, "link"
        link = self.offload_server.link
        if not self.offload_server.is_up():
            return link.rtt_s, 0.0, "refused"
        moving_s = row.up_bytes / link.up_bytes_per_s + row.down_bytes / link.down_bytes_per_s
        return (link.rtt_s + moving_s) * self.hub.rng.uniform(0.9, 1.3), row.remote_s * self.offload_server.load, ""

    def _update_estimates(self, row: Row, failed: str, link_s: float, now: float) -> None:
        """Update circuit breaker and link estimate with the outcome of an exchange."""
        if failed:
            self._breaker = self._breaker.after_failure(
                now, self.hub.rng.random(), refused=failed == "refused", sent_at=now
            )
        else:
            self._breaker = self._breaker.after_success(now)
            if self._link_estimator is not None:
                self._link_estimator = self._link_estimator.after_transfer(
                    row.up_bytes, row.down_bytes, link_s, now
                ).after_load_report(self.offload_server.load, now)

    def _probe_if_due(self) -> None:
        """Probe an offload server whose circuit breaker is open. A real agent probes when the probe is due; here the
        result matters only once a request arrives, so the probe is made then."""
        now = self.hub.monotonic()
        if self._breaker.state != "open" or now < self._breaker.probe_at:
            return
        if self.offload_server.is_reachable() and self.offload_server.is_up():
            self._breaker = self._breaker.after_probe(now)
        else:
            self._breaker = self._breaker.after_failure(now, self.hub.rng.random(), refused=True, probe=True)

    def _run_remotely(self, release: LoadedRelease, failure: InferenceFailed) -> tuple[Report | EdgeError, float]:
        """Result and duration where the device's part failed: the offload server runs the whole model, where a row
        allows it."""
        row = plans.best_row([row for row in release.plan.rows if not row.device], self.conditions)
        if row is None:
            return failure, 0.0
        link_s, remote_s, failed = self._simulate_exchange(row)
        self._update_estimates(row, failed, link_s, self.hub.monotonic())
        if failed:
            return failure, link_s
        expected_s = plans.latency_s(row, self.conditions)
        report = self._report(
            release, row, expected_s, link_s + remote_s, link_s=link_s, remote_s=remote_s, cause="device"
        )
        return report, link_s + remote_s

    def _report(
        self, release: LoadedRelease, row: Row, expected_s: float, latency_s: float, device_s: float = 0.0,
        **fields: object,
    ) -> Report:  # fmt: skip
        energy_j = joules(device_s, latency_s, host_of(release).behaviour.energy_factor)
        return Report(
            release=release.digest, row=row.name, split_after=row.split_after, emulated=True, predicted_s=expected_s,
            variant=row.variant, accuracy=row.accuracy or 0.0,
            latency_s=latency_s, up_bytes=row.up_bytes, down_bytes=row.down_bytes, device_s=device_s, joules=energy_j,
            joules_basis=BASIS, **fields,  # type: ignore[arg-type]
        )  # fmt: skip


def host_of(release: LoadedRelease) -> SimulatedHost:
    """The simulated host on which a release is loaded."""
    assert isinstance(release.host, SimulatedHost)
    return release.host
