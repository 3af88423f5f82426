"""Lanes, as the engine has them: where there is nothing to decide for each request, an application may ask the worker.

`why_not` is the whole decision. What is answered by lanes is counted as everything else is: the worker notes each
answer in memory that the agent sees, and here it becomes the report that the engine's observers are told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic

from edgesplit.client.direct.grant import Grant, laid_out
from edgesplit.errors import Busy, InferenceFailed, UsageError
from edgesplit.oip.report import Report
from edgesplit.plan import Plan, Row
from edgesplit.runtime import Timing
from edgesplit_agent.power.energy_model import EnergyLedger, spent_j
from edgesplit_agent.releases.loaded_release import ActiveRelease
from edgesplit_agent.serving.deferred_accounting import Afterwards
from edgesplit_agent.worker.dataflow import flow_of
from edgesplit_agent.worker.direct_broker import LaneNotes, LaneOrder
from edgesplit_agent.worker.direct_shared_state import MOST_SLICES
from edgesplit_agent.worker.host import Laned

Settled = Callable[[str], bool]
"""Whether nothing is on trial for that model."""
Learn = Callable[[ActiveRelease, Timing], None]
Tell = Callable[[str, ActiveRelease, Report], None]
"""Told of each answer: model, release, how it was made."""


@dataclass(frozen=True)
class Circumstances:
    """What decides whether a model may be asked by lanes."""

    allowed: bool
    """By the operator."""
    models: int
    """That this device serves."""
    row_in_use: str
    traced: bool
    watts: float | None
    """The power budget."""
    settled: bool


def certain_row(release: ActiveRelease) -> Row | None:
    """The row that answers whatever comes, where it is the device's alone."""
    forced = next((row for row in release.plan.rows if row.name == release.plan.forced and row.is_local), None)
    return release.only_row or forced


def why_not(release: ActiveRelease, now: Circumstances) -> str:
    """What there is to decide for each request; empty where nothing is."""
    row = certain_row(release)
    if not now.allowed:
        return "lanes are switched off"
    if row is None:
        return "the plan has several ways to answer"
    if now.models != 1:
        return "several models share this device's processor"
    if now.row_in_use != row.name:
        return "it was not asked yet"
    if now.traced:
        return "requests are traced"
    if now.watts is not None:
        return "there is a power budget"
    if not now.settled:
        return "a release is on trial"
    return _unfit(release, row)


def _unfit(release: ActiveRelease, row: Row) -> str:
    """Why this release cannot be asked past the agent, whatever the circumstances."""
    order = release.order(row.device)
    if not isinstance(release.host, Laned):
        return "models run in the agent's own process"
    if release.emulated:
        return "the device is emulated"
    if release.decoding or release.passed:
        return "inputs are decoded, or are outputs too"
    if {one.slice.name for one in release.manifest.compiled} & set(order) or len(order) > MOST_SLICES:
        return "its slices are watched one by one"
    return ""


def terms(release: ActiveRelease, row: Row) -> Grant:
    """What a client is told. UsageError where a size is known only at run time."""
    inputs = laid_out(release.inputs, 0)
    outputs = laid_out(release.outputs, inputs[1]) if inputs is not None else None
    if inputs is None or outputs is None:
        raise UsageError("no lane: not all of its tensors have a fixed size")
    power = release.plan.power
    return Grant(
        release=release.digest, row=row.name, after=row.after, inputs=inputs[0], outputs=outputs[0],
        answers_at=inputs[1], bytes=outputs[1],
        busy_watts=power.busy_watts if power is not None else None,
        idle_watts=power.idle_watts if power is not None else None,
    )  # fmt: skip


@dataclass(frozen=True)
class Ears:
    """Who is told what came of lanes."""

    learn: Learn
    tell: Tell
    spent: Callable[[float], None]
    """An inference took so many joules beyond idling."""
    energy: EnergyLedger
    own_part: Callable[[str, Exception | None], None]
    notes: Afterwards
    """Where all is noted in turn."""


class Lanes:
    """Grants lanes and ends them. While one is granted nothing else begins to be served, and the other way round."""

    def __init__(self, ears: Ears) -> None:
        self.changing = threading.Lock()
        self._ears = ears
        self._asked: tuple[tuple[Laned, Plan, Row], ...] = ()
        """Hosts that have granted one, since what is served last changed."""
        self._slowdown = 1.0

    def open(self, model: str, release: ActiveRelease, now: Circumstances, descriptor: int, *, shared: bool) -> Grant:
        """A lane for whoever has the other end of that socket. Busy, saying why, where there is none. Held: `changing`;
        leased: the release."""
        if reason := why_not(release, now):
            raise Busy(f"no lane: {reason}")
        row, host = certain_row(release), release.host
        assert row is not None and isinstance(host, Laned)
        grant, order = terms(release, row), tuple(release.order(row.device))
        known = {name: seconds for name, seconds, _ in release.learnt()}
        expected_s = sum(known[name] for name in order) if known.keys() >= set(order) else None
        if set(flow_of(release.manifest, order).reads) - {spec.name for spec in release.inputs}:
            raise Busy("no lane: its slices need what no application gives")

        def told(notes: LaneNotes) -> None:
            self._ears.notes.later(lambda: self._note(model, release, row, order, notes))

        host.open_lane(
            LaneOrder(
                order, grant.inputs, grant.outputs, grant.answers_at, grant.bytes, expected_s,
                release.predicted_s(order), told, self._ears.notes.catch_up,
            ), descriptor, shared=shared,
        )  # fmt: skip
        if all(one is not host for one, _, _ in self._asked):
            self._asked = (*self._asked, (host, release.plan, row))
        return grant

    def end(self, releases: Mapping[str, ActiveRelease]) -> None:
        """Whatever was granted is to be asked for again. Held: `changing`."""
        self._asked = ()
        for release in releases.values():
            if isinstance(release.host, Laned):
                release.host.end_lanes()

    @property
    def were_granted(self) -> bool:
        """Whether there is anything to note."""
        return bool(self._asked)

    def note(self, slowdown: float) -> None:
        """What came of lanes is noted now, and what their answers say is brought up to date."""
        self._slowdown = slowdown
        for host, _, row in self._asked:
            host.note_lanes(row.device_s * slowdown, self._ears.energy.scale(monotonic()) or 0.0)

    def _note(self, model: str, release: ActiveRelease, row: Row, order: tuple[str, ...], notes: LaneNotes) -> None:
        ears = self._ears
        if notes.slice_s:
            ears.learn(release, Timing(dict(zip(order, notes.slice_s, strict=True))))
        if notes.answers:
            ears.own_part(release.digest, None)
        for _ in range(notes.failures):
            ears.own_part(release.digest, InferenceFailed("its slices failed, asked by a lane"))
        for latency_s, run_s in notes.answers:
            joules, basis = self._weighed(release.plan, row, latency_s, run_s)
            report = Report(
                release=release.digest, row=row.name, after=row.after, latency_s=latency_s,
                predicted_s=row.device_s * self._slowdown, device_s=run_s, joules=joules, joules_basis=basis,
            )  # fmt: skip
            ears.tell(model, release, report)

    def _weighed(self, plan: Plan, row: Row, latency_s: float, run_s: float) -> tuple[float, str]:
        if plan.power is None:
            return 0.0, ""
        predicted = spent_j(row, plan.power, run_s, latency_s, 0.0)
        self._ears.spent(predicted - plan.power.idle_watts * latency_s)
        return self._ears.energy.answered(plan, predicted, latency_s, monotonic())
