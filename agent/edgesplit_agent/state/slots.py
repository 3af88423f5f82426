"""Activation state of the models' releases (`current.json`) and its transitions, as pure functions.

Each model has two slots, like an A/B update: the committed release, and the release on trial that runs in its place. A
release enters the trial slot after it has answered its golden inputs. The committed release stays complete on disk
until the one on trial was found healthy and is committed itself. Each start of the agent is counted on disk before any
model is loaded, and the count is cleared once the start was found healthy: this also detects a release that kills the
whole process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from edgesplit.msgspec_warmup import warm_up_structs

UNHEALTHY_STARTS = 3
"""After this many starts in a row that were not found healthy, the next start rolls back what is on trial, or enters
safe mode."""
HEALTH_S = 10.0
"""Seconds that a release on trial must serve without a failure of its own slices before it is committed."""
ENOUGH_ANSWERS = 20
"""Requests answered in a row that commit a release on trial before `HEALTH_S` has passed."""
FAILURES_IN_A_ROW = 5
"""Consecutive failures of the device's own slices after which the release is rolled back, even if it passes its golden
inputs."""


class Slots(msgspec.Struct, frozen=True):
    """The two releases of one model, or of the agent itself, on this device."""

    committed: str = ""
    """Release that was found healthy; empty before the first."""
    trial: str = ""
    """Release that runs in place of the committed one until its trial is decided; empty where none is on trial."""

    @property
    def running(self) -> str:
        """The release that answers requests."""
        return self.trial or self.committed


class SafeMode(msgspec.Struct, frozen=True):
    """No model is loaded; updates, telemetry and reports go on. A statement with a higher counter ends it."""

    reason: str
    held: tuple[str, ...]
    """Releases that may not be loaded while safe mode lasts."""


class Current(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `current.json`: what runs, what is on trial, and what must not be loaded again."""

    statement: bytes = b""
    """The newest accepted statement, in its signed form (base64 in the file)."""
    counter: int = 0
    """Counter of that statement."""
    models: dict[str, Slots] = {}
    """Slots by model."""
    rejected: dict[str, str] = {}
    """Reason by release: rolled back or fatal, and not loaded again under this statement."""
    load_attempts: dict[str, int] = {}
    """Loads by release that were started before its first activation and whose end was not recorded."""
    unhealthy_starts: int = 0
    """Starts of the agent since one was last found healthy, this one included."""
    safe_mode: SafeMode | None = None


def with_start_counted(current: Current) -> Current:
    """Count this start. The result must be on disk before anything of a release is loaded."""
    fatal = {release: count for release, count in current.load_attempts.items() if count >= UNHEALTHY_STARTS}
    if fatal:
        bad = {release: f"the agent ended {count} times while loading it" for release, count in fatal.items()}
        rejected, attempts = {**current.rejected, **bad}, _without(current.load_attempts, fatal)
        current = _replace(current, rejected=rejected, load_attempts=attempts, unhealthy_starts=0)
    # Checked before this start is counted: `unhealthy_starts` is the number of earlier starts that were not healthy.
    if current.unhealthy_starts >= UNHEALTHY_STARTS and current.safe_mode is None:
        current = _after_unhealthy_starts(current)
    return _replace(current, unhealthy_starts=current.unhealthy_starts + 1)


def _after_unhealthy_starts(current: Current) -> Current:
    """Roll back every release on trial; where none is on trial, enter safe mode."""
    reason = f"{current.unhealthy_starts} starts in a row were not found healthy"
    trials = [model for model, slots in current.models.items() if slots.trial]
    for model in trials:
        current = with_rollback(current, model, reason)
    running = sorted(slots.running for slots in current.models.values())
    # With a release on trial the rollback is the remedy; only if that was not enough, after three more starts, safe
    # mode. It also holds back what was bad before: a new trial would meet the same fate.
    safe = None if trials or not running else SafeMode(reason, tuple({*running, *current.rejected}))
    return _replace(current, unhealthy_starts=0, safe_mode=safe)


def with_statement(current: Current, raw: bytes, counter: int) -> Current:
    """Adopt an accepted statement. One with another counter clears `rejected` and `load_attempts` and ends safe mode:
    a device whose power failed three times in a row recovers with a new deployment of what it ran."""
    if counter != current.counter:
        current = _replace(current, rejected={}, load_attempts={})
        current = _replace(current, safe_mode=None, unhealthy_starts=0) if current.safe_mode is not None else current
    return _replace(current, statement=raw, counter=counter)


def with_load_started(current: Current, release: str) -> Current:
    """Count a first load of a release that is about to start."""
    attempts = current.load_attempts.get(release, 0) + 1
    return _replace(current, load_attempts={**current.load_attempts, release: attempts})


def with_load_finished(current: Current, release: str) -> Current:
    """Record that the load has ended, successfully or not."""
    return _replace(current, load_attempts=_without(current.load_attempts, [release]))


def with_activated(current: Current, model: str, release: str) -> Current:
    """Make a release the running one: on trial, unless it is the committed one."""
    previous = current.models.get(model, Slots()).committed
    slots = Slots(previous) if previous == release else Slots(previous, release)
    # A process that ends between here and the commit counts as an unhealthy start, even if it was healthy before.
    starts = max(1, current.unhealthy_starts) if slots.trial else current.unhealthy_starts
    # This release loaded and answered its golden inputs, so safe mode ends.
    models, loaded = {**current.models, model: slots}, with_load_finished(current, release)
    return _replace(loaded, models=models, unhealthy_starts=starts, safe_mode=None)


def with_trial_committed(current: Current, model: str) -> Current:
    """Commit the model's release on trial. The start counts as healthy once no model has a release on trial."""
    models = {**current.models, model: Slots(current.models[model].running)}
    still_on_trial = any(slots.trial for slots in models.values())
    return _replace(current, models=models, unhealthy_starts=current.unhealthy_starts if still_on_trial else 0)


def with_rollback(current: Current, model: str, reason: str) -> Current:
    """Mark the release on trial as bad for `reason`; the committed one runs again."""
    slots = current.models[model]
    bad = {**current.rejected, slots.trial: reason}
    return _replace(without_trial(current, model), rejected=bad) if slots.trial else current


def without_trial(current: Current, model: str) -> Current:
    """Remove the release on trial without marking it as bad, as where its files are damaged; the committed one runs
    again. A model without a committed release is dropped."""
    models = {**current.models, model: Slots(current.models[model].committed)}
    return _replace(current, models={name: slots for name, slots in models.items() if slots.running})


def without_model(current: Current, model: str) -> Current:
    """Drop a model that no statement wants here any more."""
    return _replace(current, models=_without(current.models, [model]))


def with_start_healthy(current: Current) -> Current:
    """Clear the count of unhealthy starts."""
    return _replace(current, unhealthy_starts=0)


def with_start_uncounted(current: Current, starts_before: int) -> Current:
    """The agent was asked to end: this start counts neither as healthy nor as unhealthy."""
    return _replace(current, unhealthy_starts=min(current.unhealthy_starts, starts_before))


_replace = msgspec.structs.replace
T = TypeVar("T")


def _without(table: Mapping[str, T], names: Iterable[str]) -> dict[str, T]:
    dropped = set(names)
    return {name: value for name, value in table.items() if name not in dropped}


@dataclass(frozen=True, slots=True)
class Trial:
    """What this process has observed of one release on trial. Times are of a monotonic clock, in seconds."""

    release: str
    since: float
    """When it began to serve, or when its own slices last failed."""
    answered: int = 0
    """Successful runs of its own slices since then."""
    failed: int = 0
    """Consecutive failures of its own slices."""
    unchecked: bool = False
    """It has failed since its golden inputs were last run."""
    error: str = ""
    """Text of the last failure."""
    condemned: str = ""
    """Reason to roll it back at once; empty where there is none."""

    def after_run(self, error: Exception | None, now: float) -> Trial:
        """The trial after a run of the device's own slices, which succeeded (`error` is None) or failed. Failures of
        the offload target, the link or the application are not counted."""
        if error is None:
            return Trial(self.release, self.since, self.answered + 1, 0, self.unchecked, self.error, self.condemned)
        text = str(error) or type(error).__name__
        return Trial(self.release, now, 0, self.failed + 1, True, text, self.condemned)


Verdict = Literal["wait", "check again", "healthy", "unhealthy"]


def trial_verdict(trial: Trial, now: float, health_s: float) -> Verdict:
    """What is to be done with a release on trial at `now`, given that it must serve `health_s` seconds without a
    failure."""
    if trial.condemned or trial.failed >= FAILURES_IN_A_ROW:
        return "unhealthy"
    if trial.unchecked:
        return "check again"
    # A monotonic clock, so that setting the wall clock neither ends nor prolongs a trial. The sum must be the one in
    # `reconciler.wake_at`: a difference rounds differently, and the loop could wake up without a verdict.
    return "healthy" if trial.answered >= ENOUGH_ANSWERS or now >= trial.since + health_s else "wait"


def unhealthy_reason(trial: Trial) -> str:
    """Reason of an "unhealthy" verdict, for people."""
    return trial.condemned or f"its own part failed {trial.failed} times in a row: {trial.error}"


warm_up_structs(__name__)
