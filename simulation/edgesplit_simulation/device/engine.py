"""How a simulated device answers: the agent's own choice of a row, breaker, link meter, patience and windows, over a
link and a cloud that are numbers.

What the real engine does with threads is worked out here in one go when the request comes: how long the device's part
takes, whether the cloud answers, when the tail begins, who is first. The outcome is told at its own moment, unless the
device has lost its power by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from edgesplit import plan as plans
from edgesplit.errors import DeadlineExceeded, EdgeError, InferenceFailed, LinkError, NotFound
from edgesplit.offload_client.circuit_breaker import Breaker
from edgesplit.oip.report import Report
from edgesplit.plan import Conditions, Link, Row
from edgesplit.testing.virtual_time import Hub, Timer
from edgesplit_agent.offload.target import WAKE_UP
from edgesplit_agent.policy.hedge_budget import moments
from edgesplit_agent.policy.hedge_timing import LEAST_S
from edgesplit_agent.policy.link_estimator import LinkMeter
from edgesplit_agent.policy.row_selection import Choice, Chooser, Situation
from edgesplit_agent.releases.loaded_release import ActiveRelease
from edgesplit_agent.telemetry.release_health import HealthLedger
from edgesplit_agent.telemetry.windows import Windows
from edgesplit_simulation.device.runtime import SimulatedHost
from edgesplit_simulation.device.sensors import BASIS, Body, joules

DEADLINE_S = 2.0
PING_S = 1.0


@dataclass
class Sky:
    """The way to the offload server, and whether it is there."""

    link: Link
    up: Callable[[], bool] = lambda: True
    """The server answers."""
    reachable: Callable[[], bool] = lambda: True
    """The device has a network."""
    load: float = 1.0


Told = Callable[["Report | EdgeError"], None]


@dataclass
class SimulatedEngine:
    """The models that one simulated device serves."""

    hub: Hub
    sky: Sky
    own_part: Callable[[str, Exception | None], None]
    """As `edgesplit_agent.serving.local_executor.OwnPart`."""
    slowdown: float = 1.0
    """Of the device, beside its plan."""
    health: HealthLedger = field(default_factory=HealthLedger)
    body: Body = field(default_factory=lambda: Body(0.0))
    windows: Windows = field(default_factory=Windows)
    _serving: dict[str, ActiveRelease] = field(default_factory=dict)
    _chooser: Chooser = field(default_factory=Chooser)
    _breaker: Breaker = field(default_factory=Breaker)
    _meter: LinkMeter | None = None
    _out: int = 0
    _pending: dict[str, tuple[Timer, Told]] = field(default_factory=dict)
    _results: dict[str, tuple[str, ActiveRelease, Report | EdgeError]] = field(default_factory=dict)

    # What the update loop needs

    @property
    def serving(self) -> Mapping[str, ActiveRelease]:
        """What is answered now, by model."""
        return self._serving

    def serve(self, model: str, release: ActiveRelease) -> None:
        """Answer `model` by this release from now on."""
        before = self._serving.get(model)
        self._serving = {**self._serving, model: release}
        self._chooser.forget(model)
        self._meter = self._meter or LinkMeter.of(release.plan.link)
        if before is not None and before is not release:
            before.retire()

    def drop(self, model: str) -> None:
        """Answer `model` no more."""
        before = self._serving.get(model)
        self._serving = {name: one for name, one in self._serving.items() if name != model}
        self._chooser.forget(model)
        if before is not None:
            before.retire()

    # What telemetry needs

    @property
    def conditions(self) -> Conditions:
        """What is known of link and cloud."""
        return (self._meter or LinkMeter.of(WAKE_UP)).conditions(self._breaker.lets_through)

    @property
    def breaker(self) -> str:
        """How the cloud is doing, as far as this device knows."""
        return self._breaker.state

    def row_of(self, model: str) -> str:
        """The row in use."""
        return self._chooser.row_of(model)

    # Requests

    def ask(self, request_id: str, model: str, told: Told, deadline_s: float = DEADLINE_S) -> None:
        """One request: `told` hears once what became of it, by its deadline."""
        release = self._serving.get(model)
        if release is None:
            told(NotFound(f"no model {model!r} runs here"))
            return
        release.lease()
        self._probe_if_due()
        try:
            result, seconds = self._answer(release, model, deadline_s)
        except InferenceFailed as error:
            result, seconds = self._without_the_device(release, error)
        except EdgeError as error:
            result, seconds = error, 0.0
        self._pending[request_id] = self.hub.call_later(seconds, lambda: self._done(request_id)), told
        self._results[request_id] = model, release, result

    def cut(self, why: str) -> None:
        """The process ends: whoever waits is told by the connection that breaks."""
        pending, self._pending = self._pending, {}
        self._results.clear()
        for timer, told in pending.values():
            timer.cancel()
            told(LinkError(why))

    def _done(self, request_id: str) -> None:
        _, told = self._pending.pop(request_id)
        model, release, result = self._results.pop(request_id)
        if isinstance(result, Report):
            self.windows.observe(model, result)
            self.health.answered(model, result)
        else:
            self.windows.observe(model, None)
            self.health.failed(model, release.digest, result)
        release.give_back()
        told(result)

    # One request, worked out

    def _answer(self, release: ActiveRelease, model: str, deadline_s: float) -> tuple[Report | EdgeError, float]:
        """What becomes of it, and after how many seconds that is known."""
        choice = self._choose(release, model, deadline_s)
        if choice is None:
            raise LinkError("the plan has no way to answer without the cloud, and the cloud does not answer")
        row = choice.row
        expected_s = plans.latency_s(row, self.conditions)
        device_s = self._own_part(release, row) if row.device else 0.0
        if device_s > deadline_s:
            return DeadlineExceeded("the device's part was not done before the deadline"), deadline_s
        if row.is_local:
            return self._report(release, row, expected_s, device_s, device_s=device_s), device_s
        return self._finished(release, choice, expected_s, device_s, deadline_s)

    def _choose(self, release: ActiveRelease, model: str, deadline_s: float) -> Choice | None:
        there = self._breaker.has_room(self._out)
        meter = self._meter or LinkMeter.of(WAKE_UP)
        return self._chooser.choose(
            model, release.plan, Situation(meter, self.hub.monotonic(), there, deadline_s=deadline_s)
        )

    def _own_part(self, release: ActiveRelease, row: Row) -> float:
        """Seconds that the device's slices take. InferenceFailed where the worker is lost."""
        host = host_of(release)
        try:
            host.used()
        except InferenceFailed as error:
            self.own_part(release.digest, error)
            raise
        self.own_part(release.digest, None)
        predicted_s = release.predicted_s(row.device)
        seconds = predicted_s * host.slow * self.slowdown * self.hub.dice.uniform(0.95, 1.1)
        self.body.worked(seconds)
        if self._meter is not None:
            self._meter = self._meter.computed(seconds, predicted_s)
        return seconds

    def _finished(
        self, release: ActiveRelease, choice: Choice, expected_s: float, device_s: float, deadline_s: float
    ) -> tuple[Report | EdgeError, float]:
        """The rest is asked of the cloud, and the device may finish alone."""
        row, now = choice.row, self.hub.monotonic()
        link_s, remote_s, failed = self._exchange(row)
        cloud_s = device_s + link_s + remote_s
        tail = release.tail(row)
        if tail is None:
            tail_s, begins_s = float("inf"), float("inf")
        else:
            tail_s = self._own_part(release, _tail_row(row, tail))
            left_s = deadline_s - device_s
            when = moments("auto", left_s, tail_s, link_s + remote_s, early_s=choice.early_s)
            begins_s = device_s + (link_s if failed else min(when.by_choice, when.by_need))
        alone_s = begins_s + tail_s
        falls_back = failed or alone_s < cloud_s
        self._learn(row, failed, link_s, now)
        if falls_back and choice.alone and alone_s <= deadline_s:  # a race that the device was meant to run alone
            local = release.plan.local or row
            return self._report(release, local, expected_s, alone_s, device_s=device_s + tail_s), alone_s
        if falls_back and alone_s <= deadline_s:
            cause = failed or "timeout"
            return self._report(
                release, row, expected_s, alone_s, device_s=device_s + tail_s, tail_s=tail_s, fallback=True, cause=cause
            ), alone_s
        if not failed and cloud_s <= deadline_s:
            return self._report(
                release, row, expected_s, cloud_s, device_s=device_s, link_s=link_s, remote_s=remote_s
            ), cloud_s
        return DeadlineExceeded("neither the cloud nor the device was done before the deadline"), deadline_s

    def _exchange(self, row: Row) -> tuple[float, float, str]:
        """Seconds on the link and in the cloud, and why the cloud does not answer, if it does not."""
        if not self.sky.reachable():
            return LEAST_S, 0.0, "link"
        link = self.sky.link
        if not self.sky.up():
            return link.rtt_s, 0.0, "refused"
        moving_s = row.up_bytes / link.up_bytes_per_s + row.down_bytes / link.down_bytes_per_s
        return (link.rtt_s + moving_s) * self.hub.dice.uniform(0.9, 1.3), row.remote_s * self.sky.load, ""

    def _learn(self, row: Row, failed: str, link_s: float, now: float) -> None:
        if failed:
            self._breaker = self._breaker.failed(now, self.hub.dice.random(), refused=failed == "refused", sent_at=now)
        else:
            self._breaker = self._breaker.succeeded(now)
            if self._meter is not None:
                self._meter = self._meter.transferred(row.up_bytes, row.down_bytes, link_s, now).loaded(self.sky.load)

    def _probe_if_due(self) -> None:
        """The cheap question whether the cloud is there again. A real agent asks it when it is due; here the answer
        matters only once there is a request."""
        now = self.hub.monotonic()
        if self._breaker.state != "open" or now < self._breaker.probe_at:
            return
        if self.sky.reachable() and self.sky.up():
            self._breaker = self._breaker.probed(now)
        else:
            self._breaker = self._breaker.failed(now, self.hub.dice.random(), refused=True, probe=True)

    def _without_the_device(self, release: ActiveRelease, failure: InferenceFailed) -> tuple[Report | EdgeError, float]:
        """The device's own part failed: the cloud does it all, where it can."""
        row = plans.best([row for row in release.plan.rows if not row.device], self.conditions)
        if row is None:
            return failure, 0.0
        link_s, remote_s, failed = self._exchange(row)
        self._learn(row, failed, link_s, self.hub.monotonic())
        if failed:
            return failure, link_s
        expected_s = plans.latency_s(row, self.conditions)
        report = self._report(
            release, row, expected_s, link_s + remote_s, link_s=link_s, remote_s=remote_s, cause="device"
        )
        return report, link_s + remote_s

    def _report(
        self,
        release: ActiveRelease,
        row: Row,
        expected_s: float,
        latency_s: float,
        device_s: float = 0.0,
        **more: object,
    ) -> Report:
        spent = joules(device_s, latency_s, host_of(release).hungry)
        return Report(
            release=release.digest, row=row.name, after=row.after, emulated=True, predicted_s=expected_s,
            latency_s=latency_s, up_bytes=row.up_bytes, down_bytes=row.down_bytes, device_s=device_s, joules=spent,
            joules_basis=BASIS, **more,  # type: ignore[arg-type]
        )  # fmt: skip


def host_of(release: ActiveRelease) -> SimulatedHost:
    """What is loaded of a release."""
    assert isinstance(release.host, SimulatedHost)
    return release.host


def _tail_row(row: Row, tail: list[str]) -> Row:
    return Row(name=row.name, device=tuple(tail))
