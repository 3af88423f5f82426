"""What runs, what is on trial, what must not be loaded again: how `current.json` changes, as pure functions.

A release that has answered its golden inputs runs on trial. Beside it lies, whole, the one that was committed before,
until the one on trial was found healthy and is committed itself. Each start is counted before anything is loaded and
is uncounted once it was found healthy, so what takes the whole process down is known too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from edgesplit.msgspec_warmup import settle

UNHEALTHY_STARTS = 3
"""So many starts that were not found healthy, and something else is loaded next time, or nothing."""
HEALTH_S = 10.0
"""A release on trial serves so long without a failure of its own before it is committed."""
ENOUGH_ANSWERS = 20
"""Or answers so many requests in a row."""
FAILURES_IN_A_ROW = 5
"""Of the device's own part, with no success between: then the release is at fault, though it passes golden inputs."""


class Slots(msgspec.Struct, frozen=True):
    """One model's releases on this device."""

    committed: str = ""
    """Found healthy; empty before the first."""
    trial: str = ""
    """Runs in its place until it is found healthy or not."""

    @property
    def running(self) -> str:
        """What applications are answered by."""
        return self.trial or self.committed


class SafeMode(msgspec.Struct, frozen=True):
    """No model is loaded; updates, telemetry and reports go on. A newer statement ends it."""

    reason: str
    held: tuple[str, ...]
    """Releases that may not be loaded until then."""


class Current(msgspec.Struct, frozen=True, kw_only=True):
    """What runs: `current.json`."""

    statement: bytes = b""
    """The newest believed statement, as it was signed (base64 in the file)."""
    counter: int = 0
    models: dict[str, Slots] = {}
    bad: dict[str, str] = {}
    """Why, by release: not loaded again under this statement."""
    tried: dict[str, int] = {}
    """Loads of a release, before it was ever activated, of which no end was seen."""
    starts: int = 0
    """Since one was last found healthy, this one included."""
    safe: SafeMode | None = None


def begun(current: Current) -> Current:
    """A start begins. To be on disk before anything of a release is loaded."""
    deadly = {release: count for release, count in current.tried.items() if count >= UNHEALTHY_STARTS}
    if deadly:
        bad = {release: f"the agent ended {count} times while loading it" for release, count in deadly.items()}
        current = _replace(current, bad={**current.bad, **bad}, tried=_without(current.tried, deadly), starts=0)
    if current.starts >= UNHEALTHY_STARTS and current.safe is None:
        current = _after_unhealthy_starts(current)
    return _replace(current, starts=current.starts + 1)


def _after_unhealthy_starts(current: Current) -> Current:
    reason = f"{current.starts} starts in a row were not found healthy"
    trials = [model for model, slots in current.models.items() if slots.trial]
    for model in trials:
        current = rolled_back(current, model, reason)
    running = sorted(slots.running for slots in current.models.values())
    safe = None if trials or not running else SafeMode(reason, tuple({*running, *current.bad}))
    return _replace(current, starts=0, safe=safe)


def obeying(current: Current, raw: bytes, counter: int) -> Current:
    """A statement was believed. A newer one forgives what was bad under the last and ends safe mode: power that failed
    three times in a row must not cost more than a new deployment of what ran."""
    if counter != current.counter:
        current = _replace(current, bad={}, tried={})
        current = _replace(current, safe=None, starts=0) if current.safe is not None else current
    return _replace(current, statement=raw, counter=counter)


def trying(current: Current, release: str) -> Current:
    """A release is about to be loaded for the first time."""
    return _replace(current, tried={**current.tried, release: current.tried.get(release, 0) + 1})


def tried(current: Current, release: str) -> Current:
    """It came to an end, good or bad."""
    return _replace(current, tried=_without(current.tried, [release]))


def activated(current: Current, model: str, release: str) -> Current:
    """A release runs: on trial, unless it is the one that was found healthy already."""
    before = current.models.get(model, Slots()).committed
    slots = Slots(before) if before == release else Slots(before, release)
    # What ends between here and the commit is an unhealthy start, also of a process that had long been healthy.
    starts = max(1, current.starts) if slots.trial else current.starts
    # Whatever safe mode is about, it was not this one.
    return _replace(tried(current, release), models={**current.models, model: slots}, starts=starts, safe=None)


def committed(current: Current, model: str) -> Current:
    """The release on trial was found healthy; with the last of them, so is this start."""
    models = {**current.models, model: Slots(current.models[model].running)}
    others = any(slots.trial for slots in models.values())
    return _replace(current, models=models, starts=current.starts if others else 0)


def rolled_back(current: Current, model: str, reason: str) -> Current:
    """The release on trial is bad, and what was committed before it runs."""
    slots = current.models[model]
    bad = {**current.bad, slots.trial: reason}
    return _replace(withdrawn(current, model), bad=bad) if slots.trial else current


def withdrawn(current: Current, model: str) -> Current:
    """What was committed runs; the release on trial is only not here, as whole as it should be."""
    models = {**current.models, model: Slots(current.models[model].committed)}
    return _replace(current, models={name: slots for name, slots in models.items() if slots.running})


def retired(current: Current, model: str) -> Current:
    """Nobody wants this model here."""
    return _replace(current, models=_without(current.models, [model]))


def found_healthy(current: Current) -> Current:
    """This start is a good one."""
    return _replace(current, starts=0)


def stopped(current: Current, starts_before: int) -> Current:
    """We are asked to end, which says nothing about what runs."""
    return _replace(current, starts=min(current.starts, starts_before))


_replace = msgspec.structs.replace
T = TypeVar("T")


def _without(table: Mapping[str, T], names: Iterable[str]) -> dict[str, T]:
    dropped = set(names)
    return {name: value for name, value in table.items() if name not in dropped}


@dataclass(frozen=True, slots=True)
class Trial:
    """What was seen of a release on trial, by this process. Times are of a monotonic clock."""

    release: str
    since: float
    """When it began to serve, or its own part last failed."""
    answered: int = 0
    """Times its own part did its work since then."""
    failed: int = 0
    """Times in a row that it did not."""
    unchecked: bool = False
    """It has failed, and its golden inputs were not run since."""
    error: str = ""
    """The last failure."""
    condemned: str = ""
    """Why it must go."""

    def after(self, error: Exception | None, now: float) -> Trial:
        """Its own part has run (None), or has failed. What cloud, link or application did is not told here."""
        if error is None:
            return Trial(self.release, self.since, self.answered + 1, 0, self.unchecked, self.error, self.condemned)
        text = str(error) or type(error).__name__
        return Trial(self.release, now, 0, self.failed + 1, True, text, self.condemned)


Verdict = Literal["wait", "check again", "healthy", "unhealthy"]


def judge(trial: Trial, now: float, health_s: float) -> Verdict:
    """What is to be done with a release on trial now."""
    if trial.condemned or trial.failed >= FAILURES_IN_A_ROW:
        return "unhealthy"
    if trial.unchecked:
        return "check again"
    # A monotonic clock: one that was set makes nothing healthy, and nothing wait for ever. Who waits computes that
    # moment by the same sum: a difference is rounded otherwise, and the moment would come and be none.
    return "healthy" if trial.answered >= ENOUGH_ANSWERS or now >= trial.since + health_s else "wait"


def why(trial: Trial) -> str:
    """Why it is unhealthy, for people."""
    return trial.condemned or f"its own part failed {trial.failed} times in a row: {trial.error}"


settle(__name__)
