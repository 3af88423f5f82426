"""Reconciles what the director wants (desired state) with what runs here: one pure decision, and a loop that carries it
out.

`next_step(want, have, now)` is the whole policy. A failed step becomes a fact in the next `have`: after a lost link the
step is retried with a jittered back-off, a release that must not be trusted is never retried under the same statement,
and every other model goes on meanwhile. A newer statement supersedes an older one in any state.

A release runs until its successor is staged, verified and has answered its golden inputs. The successor runs on trial,
and its predecessor stays complete on disk until the trial has succeeded (`state.slots`). The agent's own version is
updated by the same steps: activating it ends this process, and its trial has its own verdict (`self_update.trial`).
While that trial lasts nothing else is changed.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from time import monotonic
from typing import Any, Literal, Protocol

from edgesplit import errors
from edgesplit.backoff import Backoff
from edgesplit.concurrency import THREAD_CONCURRENCY
from edgesplit.errors import EdgeError, LinkError
from edgesplit.mqtt.messages import ModelState
from edgesplit.release.agent_release import AGENT_MODEL
from edgesplit.release.manifest import Statement
from edgesplit_agent.self_update.trial import TRIAL_S, VersionTrial
from edgesplit_agent.state.slots import HEALTH_S, Trial, trial_verdict, unhealthy_reason
from edgesplit_agent.updates.download_window import NotNow

log = logging.getLogger(__name__)

RETRY = Backoff(first_s=0.5, longest_s=30.0)
"""Back-off of steps that failed."""
BUNDLE_TRIES, BUNDLE_RETRY = 1_800, Backoff(first_s=0.5, longest_s=2.0)
"""Number of attempts to read a release bundle, and the back-off between them: a bundle whose USB stick was pulled is
retried every second or two, for about an hour."""
LOCAL_RETRY = Backoff(first_s=16.0, longest_s=16.0)
"""Pause before a failed step that needs only this device's disk is retried."""
FINAL_ERRORS = (
    errors.TrustError, errors.MalformedMessage, errors.ModelRefused, errors.InferenceFailed, errors.UsageError,
)  # fmt: skip
"""Errors that the same bytes would cause again; `Expired` is excepted, because this device's clock may be wrong."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing for the agent to do; each kind is a subclass."""


@dataclass(frozen=True, slots=True)
class AcceptStatement(Step):
    """Refresh the metadata and decide whether the received statement is accepted."""

    raw: bytes
    """The signed statement."""


@dataclass(frozen=True, slots=True)
class ApplyBundle(Step):
    """Fetch and stage what is wanted from a release bundle on a local medium."""

    path: str
    """Folder or tar file of the bundle."""


@dataclass(frozen=True, slots=True)
class ReleaseStep(Step):
    """A step that brings one release nearer to running."""

    release: str


class FetchManifest(ReleaseStep):
    """Fetch the release's manifest and verify it by the trusted metadata."""


class FetchMissing(ReleaseStep):
    """Fetch the release's chunks that are missing on disk."""


class Stage(ReleaseStep):
    """Assemble the release from its chunks, durably, under its digest."""


class Verify(ReleaseStep):
    """Load the release and run its golden inputs."""


@dataclass(frozen=True, slots=True)
class Activate(Step):
    """Make the release the running one, by one rename on disk."""

    model: str
    release: str


@dataclass(frozen=True, slots=True)
class Reverify(Step):
    """Run the golden inputs again on a release on trial whose own slices failed."""

    model: str
    release: str


@dataclass(frozen=True, slots=True)
class RollBack(Step):
    """The release on trial is unhealthy: its predecessor runs again."""

    model: str
    release: str
    reason: str


@dataclass(frozen=True, slots=True)
class ModelStep(Step):
    """A step that concerns whichever release of the model is installed."""

    model: str


class Commit(ModelStep):
    """The release on trial is healthy: its predecessor is no longer needed."""


class Retire(ModelStep):
    """Stop serving a model that the desired state no longer contains."""


class MarkStartHealthy(Step):
    """This start of the agent is healthy: clear the count of starts."""


class CollectGarbage(Step):
    """Remove releases and chunks that neither run nor are wanted."""


class Report(Step):
    """Send the reported state to the controller."""


@dataclass(frozen=True, slots=True)
class ReleaseProgress:
    """Progress of one wanted release on this device."""

    manifest: bool = False
    """Its verified manifest is here."""
    whole: bool = False
    """All its chunks are here, or it is staged."""
    staged: bool = False
    """It is assembled on disk under its digest."""
    verified: bool = False
    """It has answered its golden inputs in this process."""
    refused: str = ""
    """Why it will never run under this statement; empty while it may."""
    bad: bool = False
    """It was activated and rolled back, which is remembered across restarts."""
    waits_for: str = ""
    """The condition it waits for (download window, power), checked again at `retry_at`."""
    trouble: str = ""
    """Why the last step failed; it is retried at `retry_at`."""
    tries: int = 0
    """Failed steps so far."""
    retry_at: float = 0.0
    """Monotonic time of the next attempt."""


@dataclass(frozen=True, slots=True)
class InstalledState:
    """What is on disk and what the engine serves, read again after each change to either."""

    running: Mapping[str, str] = field(default_factory=dict)
    """Running release by model."""
    trials: Mapping[str, str] = field(default_factory=dict)
    """Release on trial by model: those of the running ones that were not found healthy yet."""
    committed: Mapping[str, str] = field(default_factory=dict)
    """Committed release by model; during a trial it does not run, and stays complete on disk."""
    held: frozenset[str] = frozenset()
    """Releases that safe mode forbids to load."""
    safe_mode: str = ""
    """Reason of safe mode; empty outside it."""
    starts: int = 0
    """Starts since one was last found healthy, this one included; 0 once this one was."""
    served_before: frozenset[str] = frozenset()
    """Models that the agent's version before the one on trial served."""
    offline_before: bool = False
    """That version had no connection to the broker."""


@dataclass(frozen=True, slots=True)
class DeviceState:
    """The actual state that `next_step` compares with the desired one. Times are of one monotonic clock, in seconds."""

    online: bool = False
    """The broker is connected."""
    offer: bytes | None = None
    """A received statement that has not been accepted or refused yet."""
    offer_retry_at: float = 0.0
    offer_trouble: str = ""
    """Why the newest received statement is not applied; empty where it is."""
    bundle: str = ""
    """Path of a release bundle that is still to be applied, or to be resumed; empty for none."""
    bundle_retry_at: float = 0.0
    releases: Mapping[str, ReleaseProgress] = field(default_factory=dict)
    """Progress by release."""
    running: Mapping[str, str] = field(default_factory=dict)
    """Running release by model."""
    litter: bool = False
    """There may be releases or chunks on disk that nothing needs."""
    reported: bool = True
    """The controller has received the present state."""
    report_retry_at: float = 0.0
    committed: Mapping[str, str] = field(default_factory=dict)
    """Committed release by model."""
    held: frozenset[str] = frozenset()
    safe_mode: str = ""
    starts: int = 0
    trials: Mapping[str, Trial] = field(default_factory=dict)
    """Trial by model."""
    began: float = 0.0
    """When this start began to serve."""
    health_s: float = HEALTH_S
    """Seconds without a failure after which a trial or a start is healthy."""
    local_retry_at: float = 0.0
    """When steps that need only this device's disk are retried."""
    own_trial: VersionTrial | None = None
    """Trial of the agent's own version; None where that is not on trial."""


def next_step(want: Statement | None, have: DeviceState, now: float) -> Step | None:
    """The next step from the actual state `have` towards the desired state `want`; None where nothing can be done now,
    or both agree."""
    # The order of the branches is the priority.
    # 1. Health: a bad release on trial is rolled back before anything else is fetched or accepted.
    step = health_step(have, now)
    if step is not None:
        return step
    # 2. A release bundle needs no network; it carries a statement of its own.
    if have.bundle and now >= have.bundle_retry_at:
        return ApplyBundle(have.bundle)
    # 3. A newer statement supersedes what the present one still lacks.
    if have.online and have.offer is not None and now >= have.offer_retry_at:
        return AcceptStatement(have.offer)
    # 4. While the agent's own version is on trial no model changes: a failure could not be attributed to either.
    if want is None or have.own_trial is not None:
        return _report(have, now)
    # 5. The first wanted model that can proceed; one that waits for a retry does not hold up the others.
    for wanted in want.releases:
        step = _next_for_model(wanted.model, wanted.release, have, now) or _repair(
            wanted.model, wanted.release, have, now
        )
        if step is not None:
            return step
    for stored in want.gateway_releases:
        staged = have.releases.get(stored.release, ReleaseProgress()).staged
        step = None if staged else _fetch(stored.release, have, now)
        if step is not None:
            return step
    return _cleanup_step(want, have, now)


def health_step(have: DeviceState, now: float) -> Step | None:
    """The step that health requires: of this start, or of what is on trial. It needs no network and interrupts
    downloads."""
    if now < have.local_retry_at:
        return None
    if have.own_trial is not None:
        own_verdict = have.own_trial.verdict(have.running, now, have.health_s)
        if own_verdict == "healthy":
            return Commit(AGENT_MODEL)
        if own_verdict == "unhealthy":
            return RollBack(AGENT_MODEL, have.own_trial.release, have.own_trial.unhealthy_reason(have.running))
    for model, trial in sorted(have.trials.items()):
        if model == AGENT_MODEL:  # judged above, by its own criteria
            continue
        verdict = trial_verdict(trial, now, have.health_s)
        if verdict == "unhealthy":
            return RollBack(model, trial.release, unhealthy_reason(trial))
        if verdict == "check again":
            return Reverify(model, trial.release)
        if verdict == "healthy":
            return Commit(model)
    # While a release is on trial the start is judged with it: the commit of the last one clears the count.
    if have.starts and not have.trials and now >= have.began + have.health_s:
        return MarkStartHealthy()
    return None


def _report(have: DeviceState, now: float) -> Step | None:
    """Report where the controller has not received the present state."""
    return Report() if have.online and not have.reported and now >= have.report_retry_at else None


def _next_for_model(model: str, release: str, have: DeviceState, now: float) -> Step | None:
    """The next step that makes `release` the running one of `model`; None where it runs, or cannot proceed now."""
    if have.running.get(model) == release or release in have.held:
        return None
    progress = have.releases.get(release, ReleaseProgress())
    if not (progress.staged and progress.whole):  # a staged one may lack golden inputs, which are loose chunks
        return _fetch(release, have, now)
    if progress.refused or now < progress.retry_at:
        return None
    return Activate(model, release) if progress.verified else Verify(release)


def _fetch(release: str, have: DeviceState, now: float) -> Step | None:
    """The next step until the release is staged; None where it cannot proceed now."""
    progress = have.releases.get(release, ReleaseProgress())
    if progress.refused or now < progress.retry_at:
        return None
    if not progress.manifest:
        return FetchManifest(release) if have.online else None
    if not progress.whole:
        return FetchMissing(release) if have.online else None
    return Stage(release)


def _repair(model: str, wanted: str, have: DeviceState, now: float) -> Step | None:
    """Where the wanted release is refused and the model has no running release: the next step that restores the
    committed release, whose files may be damaged."""
    # Never while a model runs: a refused release must not cost the release that serves.
    refused = have.releases.get(wanted, ReleaseProgress()).refused
    committed = have.committed.get(model, "")
    return _next_for_model(model, committed, have, now) if refused and committed and model not in have.running else None


def _cleanup_step(want: Statement, have: DeviceState, now: float) -> Step | None:
    """What is left once no wanted model can proceed: retire unwanted models, report, collect garbage."""
    unwanted = sorted(set(have.running) - {AGENT_MODEL} - {wanted.model for wanted in want.releases})  # never AGENT
    if unwanted and now >= have.local_retry_at:
        return Retire(unwanted[0])
    has_garbage = have.litter and now >= have.local_retry_at
    stored_progress = [have.releases.get(item.release, ReleaseProgress()) for item in want.gateway_releases]
    settled = not have.trials and all(have.running.get(item.model) == item.release for item in want.releases)
    settled = settled and all(state.staged or state.refused for state in stored_progress)
    # Garbage is collected only once every wanted release runs and no trial is open: until then an older release may
    # still be needed for a rollback, and its files for chunks that the new one shares with it.
    return _report(have, now) or (CollectGarbage() if has_garbage and settled else None)


def wake_at(have: DeviceState, now: float) -> float:
    """The earliest time after `now` at which time alone can cause a step; infinity where none can."""
    moments = [state.retry_at for state in have.releases.values() if state.tries and not state.refused]
    if have.online and have.offer is not None:
        moments.append(have.offer_retry_at)
    if have.bundle:
        moments.append(have.bundle_retry_at)
    if have.online and not have.reported:
        moments.append(have.report_retry_at)
    moments += [have.local_retry_at, have.began + have.health_s]
    moments += [trial.since + have.health_s for trial in have.trials.values()]
    moments += have.own_trial.verdict_times(have.health_s) if have.own_trial is not None else []
    return min((moment for moment in moments if moment > now), default=float("inf"))


def model_states(want: Statement | None, have: DeviceState) -> tuple[ModelState, ...]:
    """The reported state of each model."""
    wanted = {item.model: item.release for item in want.releases} if want else {}
    names = sorted({*wanted, *have.running} - ({AGENT_MODEL} - {*wanted}))
    return tuple(_model_state(model, wanted.get(model, ""), have) for model in names)


def kept_states(want: Statement | None, have: DeviceState) -> tuple[ModelState, ...]:
    """The reported state of each release that is stored for other devices."""
    return tuple(_stored_state(stored.model, stored.release, have) for stored in want.gateway_releases) if want else ()


def _stored_state(model: str, release: str, have: DeviceState) -> ModelState:
    progress = have.releases.get(release, ReleaseProgress())
    if progress.staged:
        return ModelState(model, release, release, "staged")
    if progress.refused or progress.trouble:
        return ModelState(model, "", release, "failed", progress.refused or progress.trouble)
    return ModelState(model, "", release, "fetching", progress.waits_for)


def _model_state(model: str, wanted: str, have: DeviceState) -> ModelState:
    running = have.running.get(model, "")
    trial = have.trials.get(model)
    if running and running == wanted:
        if trial is None:
            return ModelState(model, running, wanted, "running")
        detail = f"its own part failed: {trial.error}" if trial.error else ""
        return ModelState(model, running, wanted, "trial", detail)
    if wanted in have.held:
        return ModelState(model, running, wanted, "safe mode", have.safe_mode)
    progress = have.releases.get(wanted, ReleaseProgress())
    if progress.bad:
        return ModelState(model, running, wanted, "rolled back", progress.refused)
    if progress.refused or progress.trouble:
        return ModelState(model, running, wanted, "failed", progress.refused or progress.trouble)
    if not wanted:
        return ModelState(model, running, wanted, "running")
    return ModelState(model, running, wanted, "staged" if progress.staged else "fetching", progress.waits_for)


def after_failure(state: ReleaseProgress, error: Exception, now: float, jitter: float) -> ReleaseProgress:
    """Progress of a release after a failed step. Only errors that may not occur again are retried."""
    text = str(error) or type(error).__name__
    if is_final(error):
        return replace(state, refused=text)
    if isinstance(error, NotNow):
        return replace(state, waits_for=text, trouble="", tries=1, retry_at=now + error.retry_after_s)
    # A lost link is common and short: exponential back-off, and no report before the fourth failure in a row. Anything
    # else that is retried (a full disk, a programming error) waits the longest time and is reported at once.
    delay_s = RETRY.pause_s(state.tries, jitter) if isinstance(error, LinkError) else RETRY.longest_s
    trouble = "" if isinstance(error, LinkError) and state.tries < 3 else text
    return replace(state, trouble=trouble, tries=state.tries + 1, retry_at=now + delay_s)


def is_final(error: Exception) -> bool:
    """Whether the same bytes would cause the error again."""
    return isinstance(error, FINAL_ERRORS) and not isinstance(error, errors.Expired)


class UpdateActions(Protocol):
    """Carries out the steps. Each method raises an EdgeError, or an OSError for a disk error, when it fails."""

    def accept_statement(self, raw: bytes) -> Statement:
        """Verify the statement, store and return it; TrustError where it must not be trusted."""
        ...

    def apply_bundle_at(
        self, path: str, on_statement: Callable[[Statement], None], superseded: Callable[[], bool]
    ) -> str:
        """Fetch and stage what is wanted from the release bundle at `path`, whose accepted statement is passed to
        `on_statement`; what it lacks, for people. `superseded` is polled meanwhile and ends it early."""
        ...

    def fetch_manifest(self, release: str) -> None:
        """Fetch, verify and keep the release's manifest."""

    def fetch_missing(self, release: str, superseded: Callable[[], bool]) -> bool:
        """Fetch the missing chunks; False if it stopped because `superseded()`."""
        ...

    def stage(self, release: str) -> None:
        """Write the assembled release to disk."""

    def verify(self, release: str) -> None:
        """Load the release and run its golden inputs."""

    def activate(self, model: str, release: str) -> None:
        """Put the release on trial on disk, and serve it from now on."""

    def reverify(self, model: str) -> None:
        """Run the golden inputs of the release on trial again; InferenceFailed where it fails them."""

    def commit(self, model: str) -> None:
        """Commit the release on trial."""

    def roll_back(self, model: str, reason: str) -> None:
        """Mark the release on trial as bad, and serve the committed one."""

    def mark_start_healthy(self) -> None:
        """Clear the count of starts."""

    def installed(self) -> InstalledState:
        """What is on disk and what the engine serves."""
        ...

    def retire(self, model: str) -> None:
        """Drop the model on disk, then stop serving it."""

    def collect_garbage(self, want: Statement) -> None:
        """Remove what is neither wanted nor running."""

    def report(
        self, counter: int, models: tuple[ModelState, ...], safe_mode: str, trouble: str, kept: tuple[ModelState, ...]
    ) -> None:
        """Send the controller the state of each model, the reason of safe mode, the reason why the newest statement is
        not applied, and the state of the releases stored for other devices. LinkError unless the broker acknowledges
        it."""

    def progress(self, release: str) -> ReleaseProgress:
        """Progress of that release by what is on disk."""
        ...


@dataclass(frozen=True, slots=True)
class BundleStatus:
    """Status of the newest release bundle, for people."""

    number: str = ""
    """Identifies the request."""
    state: Literal["", "taking", "waiting", "taken", "refused"] = ""
    detail: str = ""
    tries: int = 0
    """Failed attempts to read it."""


class Reconciler:
    """The reconciliation loop. `on_statement`, `on_connection`, `on_device_run` and `on_bundle` may be called from any
    thread; steps run on the loop's own."""

    def __init__(
        self,
        actions: UpdateActions,
        *,
        clock: Callable[[], float] = monotonic,
        health_s: float = HEALTH_S,
        rng: random.Random = THREAD_CONCURRENCY.rng,
        trial_s: float = TRIAL_S,
    ) -> None:
        """`rng` jitters the back-off; `trial_s` is the time that the agent's own version has to prove itself
        healthy."""
        self._trial_s = trial_s
        self._actions = actions
        self._clock = clock
        self._rng = rng
        self._changed = threading.Condition()
        self._want: Statement | None = None
        self._have = DeviceState(health_s=health_s)
        self._offer_count = 0
        self._offer_tries = 0
        self.bundle_status = BundleStatus()
        """Status of the newest release bundle."""
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="updates", daemon=True)

    def start(self, want: Statement | None) -> None:
        """Start from the state that the last run left, and run the loop on a thread of its own."""
        self.begin(want)
        self._thread.start()

    def begin(self, want: Statement | None) -> None:
        """Read the state that the last run left without starting the thread: the caller runs each step by
        `run_step`."""
        self._want = want
        self._have = replace(self._have, began=self._clock(), litter=True, reported=False)
        self._reload_installed()
        self._update_state(releases=self._progress_of(want))

    def stop(self) -> None:
        """End the loop after its present step."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout=10)

    def on_statement(self, raw: bytes) -> None:
        """A statement was received; it supersedes all before it."""
        with self._changed:
            self._offer_count += 1
            self._offer_tries = 0
            self._update_state(offer=raw, offer_retry_at=0.0)

    def on_bundle(self, number: str, path: str) -> None:
        """A release bundle is to be applied; it supersedes one that is waited for. `number` identifies the request."""
        with self._changed:
            self.bundle_status = BundleStatus(number, "taking")
            self._update_state(bundle=path, bundle_retry_at=0.0)

    def on_connection(self, is_online: bool) -> None:
        """The broker was connected or lost. A new connection ends every back-off."""
        with self._changed:
            have, since = self._have, self._clock() if is_online else None
            without_backoff = {name: replace(state, retry_at=0.0) for name, state in have.releases.items()}
            self._update_state(
                online=is_online, releases=without_backoff if is_online else have.releases,
                reported=have.reported and not is_online, offer_retry_at=0.0, report_retry_at=0.0,
                own_trial=have.own_trial and replace(have.own_trial, online_since=since),
            )  # fmt: skip

    def on_device_run(self, release: str, error: Exception | None) -> None:
        """The device's own slices of a release ran successfully (`error` is None) or failed."""
        if error is None and not self._have.trials:
            return  # almost every request: a success outside a trial changes nothing, so the lock is not taken
        with self._changed:
            trials = dict(self._have.trials)
            for model, trial in self._have.trials.items():
                if trial.release == release:
                    trials[model] = trial.after_run(error, self._clock())
            self._update_state(trials=trials)

    @property
    def snapshot(self) -> tuple[Statement | None, DeviceState]:
        """Desired and actual state, for people and telemetry."""
        with self._changed:
            return self._want, self._have

    def _loop(self) -> None:
        while not self._stopping:
            if self.run_step() is not None:
                continue
            # Decided again under the lock: an event between `run_step` and here would otherwise not end the wait.
            with self._changed:
                now = self._clock()
                if not self._stopping and next_step(self._want, self._have, now) is None:
                    pause_s = wake_at(self._have, now) - now
                    self._changed.wait(None if pause_s == float("inf") else max(0.01, pause_s))

    def wakes_at(self, now: float) -> float:
        """The earliest time after `now` at which time alone can cause a step."""
        with self._changed:
            return wake_at(self._have, now)

    def run_step(self) -> Step | None:
        """Carry out the next step; the step, or None where there is none now."""
        with self._changed:
            step = None if self._stopping else next_step(self._want, self._have, self._clock())
        if step is None:
            return None
        try:
            self._execute(step)
        except Exception as error:
            # A programming error must not end updates for ever: its traceback is logged, and it counts as a failure.
            if not isinstance(error, (EdgeError, OSError)):
                log.exception("step %s failed", step)
            self._on_step_failed(step, error)
        else:
            if isinstance(step, (Activate, RollBack)) and step.model == AGENT_MODEL:
                self._stopping = True  # the process restarts as another version, which takes the next step
        return step

    def _execute(self, step: Step) -> None:
        if isinstance(step, AcceptStatement):
            self._adopt_statement(self._actions.accept_statement(step.raw), step.raw)
        elif isinstance(step, ApplyBundle):
            self._apply_bundle(step)
        elif isinstance(step, FetchManifest):
            self._actions.fetch_manifest(step.release)
        elif isinstance(step, FetchMissing):
            if not self._actions.fetch_missing(step.release, self._superseded()):
                return
        elif isinstance(step, Stage):
            self._actions.stage(step.release)
        elif isinstance(step, Verify):
            self._actions.verify(step.release)
            self._set_progress(step.release, replace(self._known_progress(step.release), verified=True))
        elif isinstance(step, Activate):
            self._actions.activate(step.model, step.release)
        elif isinstance(step, Reverify):
            self._actions.reverify(step.model)
            self._on_reverified(step)
        elif isinstance(step, Commit):
            self._actions.commit(step.model)
        elif isinstance(step, RollBack):
            self._actions.roll_back(step.model, step.reason)
        elif isinstance(step, MarkStartHealthy):
            self._actions.mark_start_healthy()
            self._reload_installed()
        elif isinstance(step, Retire):
            self._actions.retire(step.model)
        elif isinstance(step, Report):
            self._report()
        elif self._want is not None:
            self._actions.collect_garbage(self._want)
            self._update_state(litter=False)
        if isinstance(step, (FetchManifest, FetchMissing, Stage)):
            self._set_progress(step.release, self._actions.progress(step.release))
        if isinstance(step, (Activate, Commit, RollBack, Retire)):
            self._reload_installed()
            self._update_state(reported=False, litter=True)
        if isinstance(step, RollBack):
            self._update_state(releases=self._progress_of(self._want))

    def _apply_bundle(self, step: ApplyBundle) -> None:
        """Apply the release bundle. One that was interrupted by a health step stays in `have` and is resumed."""
        detail = self._actions.apply_bundle_at(step.path, self._adopt_statement, self._must_interrupt)
        with self._changed:
            interrupted = self._must_interrupt() and not self._stopping
            if self._have.bundle == step.path and not interrupted:
                self._update_state(bundle="", reported=False)
                self.bundle_status = BundleStatus(self.bundle_status.number, "taken", detail)
        self._update_state(releases=self._progress_of(self._want))

    def _must_interrupt(self) -> bool:
        """Whether a long step must stop, because the agent stops or health requires another step."""
        return self._stopping or health_step(self._have, self._clock()) is not None

    def _adopt_statement(self, statement: Statement, raw: bytes = b"") -> None:
        """Make an accepted statement the desired state. `raw` is its signed form, empty where it came in a bundle."""
        names = ", ".join(f"{wanted.model}={wanted.release[:12]}" for wanted in statement.releases)
        log.info("statement %d: %s", statement.counter, names)
        self._reload_installed()
        releases = self._progress_of(statement)
        with self._changed:
            if statement == self._want:  # received again: what was refused under it stays refused
                releases = {**releases, **{name: state for name, state in self._have.releases.items() if state.refused}}
            self._want = statement
            offer = None if self._have.offer == raw else self._have.offer
            self._update_state(releases=releases, offer=offer, offer_trouble="", reported=False, litter=True)

    def _report(self) -> None:
        """Report the state. It counts as reported before it is sent, so that a change during the transfer causes
        another report."""
        with self._changed:
            want, have = self._want, self._have
            self._have = replace(have, reported=True)
        counter, models, stored = want.counter if want else 0, model_states(want, have), kept_states(want, have)
        self._actions.report(counter, models, have.safe_mode, have.offer_trouble, stored)

    def _superseded(self) -> Callable[[], bool]:
        """A predicate that tells a download to stop: for a newer statement, a lost connection, or a step that health
        requires."""
        offer_count = self._offer_count
        return lambda: self._offer_count != offer_count or not self._have.online or self._must_interrupt()

    def _known_progress(self, release: str) -> ReleaseProgress:
        return self._have.releases.get(release, ReleaseProgress())

    def _set_progress(self, release: str, progress: ReleaseProgress) -> None:
        """Set a release's progress. What the controller can see of it makes a new report due."""
        with self._changed:
            visible = attrgetter("staged", "trouble", "waits_for")
            reported = self._have.reported and visible(progress) == visible(self._known_progress(release))
            self._update_state(releases={**self._have.releases, release: progress}, reported=reported)

    def _reload_installed(self) -> None:
        """Read again what is on disk and served. A release that was on trial before keeps its observed trial."""
        now, installed = self._clock(), self._actions.installed()
        with self._changed:
            trials = {model: Trial(release, now) for model, release in installed.trials.items()}
            observed = self._have.trials.items()
            trials |= {model: trial for model, trial in observed if installed.trials.get(model) == trial.release}
            self._update_state(
                running=installed.running, committed=installed.committed, held=installed.held,
                safe_mode=installed.safe_mode, starts=installed.starts, trials=trials,
                own_trial=self._own_trial(installed),
            )  # fmt: skip

    def _own_trial(self, installed: InstalledState) -> VersionTrial | None:
        """Trial of the agent's own version, which is this process, so it began with this start; None where it is not on
        trial."""
        release, observed = installed.trials.get(AGENT_MODEL, ""), self._have.own_trial
        if not release or (observed is not None and observed.release == release):
            return observed if release else None
        since = self._clock() if self._have.online else None
        return VersionTrial(
            release, self._have.began, self._trial_s, installed.served_before, since, installed.offline_before
        )

    def _progress_of(self, statement: Statement | None) -> dict[str, ReleaseProgress]:
        """Progress of the wanted releases, and of committed releases that do not run, which `_repair` may restore."""
        wanted = {entry.release for entry in (*statement.releases, *statement.gateway_releases)} if statement else set()
        not_running = {entry for model, entry in self._have.committed.items() if model not in self._have.running}
        return {release: self._actions.progress(release) for release in sorted(wanted | not_running)}

    def _on_reverified(self, step: Reverify, error: Exception | None = None) -> None:
        """Wrong answers condemn the release; where they are right, or golden inputs could not be run, the trial
        continues."""
        with self._changed:
            trial = self._have.trials.get(step.model)
            if trial is None or trial.release != step.release:
                return
            if error is not None and (is_final(error) or not isinstance(error, (EdgeError, OSError))):
                trial = replace(trial, condemned=f"its golden inputs fail now: {error}")
            trials = {**self._have.trials, step.model: replace(trial, unchecked=False)}
            self._update_state(trials=trials, reported=self._have.reported and error is None)

    def _update_state(self, **changes: Any) -> None:
        with self._changed:
            self._have = replace(self._have, **changes)
            self._changed.notify_all()

    def _on_step_failed(self, step: Step, error: Exception) -> None:
        """Turn a failed step into facts of the state, from which the next step is decided."""
        log.warning("%s: %s", type(step).__name__, error)
        now, jitter = self._clock(), self._rng.random()
        with self._changed:
            if isinstance(step, AcceptStatement):
                self._on_statement_failed(step, error, now, jitter)
            elif isinstance(step, ApplyBundle):
                self._on_bundle_failed(step, error, now, jitter)
            elif isinstance(step, Report):
                self._update_state(reported=False, report_retry_at=now + RETRY.pause_s(1, jitter))
            elif isinstance(step, Reverify):
                self._on_reverified(step, error)
            elif isinstance(step, (Commit, RollBack, MarkStartHealthy, Retire, CollectGarbage)):
                self._update_state(local_retry_at=now + LOCAL_RETRY.pause_s(0, jitter))
            elif isinstance(step, (ReleaseStep, Activate)):
                before = self._known_progress(step.release)
                state = after_failure(before, error, now, jitter)
                if isinstance(step, Stage) and isinstance(error, LinkError):
                    state = replace(state, whole=False)  # chunks were damaged on disk meanwhile: fetch them again
                # Waiting for the same condition is no news: no further report.
                is_same_wait = isinstance(error, NotNow) and before.waits_for == state.waits_for
                releases = {**self._have.releases, step.release: state}
                self._update_state(releases=releases, reported=self._have.reported and is_same_wait)

    def _on_bundle_failed(self, step: ApplyBundle, error: Exception, now: float, jitter: float) -> None:
        """A medium that is missing or fails is retried for a while; any other error ends the bundle, an expired
        statement included."""
        if self._have.bundle != step.path:
            return
        tries = self.bundle_status.tries + 1
        is_retried = isinstance(error, (LinkError, OSError)) and tries < BUNDLE_TRIES
        state: Literal["waiting", "refused"] = "waiting" if is_retried else "refused"
        self.bundle_status = BundleStatus(self.bundle_status.number, state, str(error) or type(error).__name__, tries)
        retry_at = now + BUNDLE_RETRY.pause_s(tries, jitter)
        self._update_state(bundle=step.path if is_retried else "", bundle_retry_at=retry_at)

    def _on_statement_failed(self, step: AcceptStatement, error: Exception, now: float, jitter: float) -> None:
        """A statement that must not be trusted is dropped; one that could not be verified or stored at present is
        retried."""
        if self._have.offer != step.raw:
            return
        trouble = f"the newest statement is not applied: {error}"
        if is_final(error):
            self._update_state(offer=None, offer_trouble=trouble, reported=False)
            return
        self._offer_tries += 1
        self._update_state(offer_retry_at=now + RETRY.pause_s(self._offer_tries, jitter))
        if not isinstance(error, LinkError) and trouble != self._have.offer_trouble:
            self._update_state(offer_trouble=trouble, reported=False)
