"""From what the director wants to what runs here: one pure decision, and a loop that carries it out.

`next_step(want, have, now)` is the whole policy. The loop's failures become facts in the next `have`: a lost link is
tried again after a jittered pause, a thing that must not be believed never for that statement, and every other model
goes on meanwhile. A newer statement supersedes an older one in any state. What runs keeps running until its successor
is staged, verified and has answered its golden inputs; the successor runs on trial, and what ran before it stays whole,
until it was found healthy (`activation`). The agent's own version is one more thing that is wanted: activating it ends
this process, and its trial is judged otherwise (`versions.trial`); while it lasts nothing else is changed.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, Literal, Protocol

from edgesplit.concurrency import THREADS
from edgesplit.errors import (
    EdgeError,
    Expired,
    InferenceFailed,
    LinkError,
    MalformedMessage,
    ModelRefused,
    TrustError,
    UsageError,
)
from edgesplit.mqtt.messages import ModelState
from edgesplit.release.agent_release import AGENT
from edgesplit.release.manifest import Statement
from edgesplit_agent.self_update.trial import TRIAL_S, OwnTrial, judge_own, looks_at, why_own
from edgesplit_agent.state.slots import HEALTH_S, Trial, judge, why
from edgesplit_agent.updates.download_window import NotNow

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
BUNDLE_TRIES, BUNDLE_PATIENCE = 1_800, 2
"""A bundle whose stick was pulled is looked for every second or two, for about an hour."""
LOCAL_TRIES = 5
"""What needs only this device's disk is tried again after as long a pause as what has failed so often."""
FINAL = (TrustError, MalformedMessage, ModelRefused, InferenceFailed, UsageError)
"""Failures that the same bytes would bring again (but what has expired, by this clock, may be good tomorrow)."""


@dataclass(frozen=True, slots=True)
class Consider:
    """Refresh the metadata and decide whether the statement that came is believed."""

    raw: bytes


@dataclass(frozen=True, slots=True)
class TakeBundle:
    """Have what is wanted from a bundle that was brought here."""

    path: str


@dataclass(frozen=True, slots=True)
class FetchManifest:
    """Get the release's manifest, by the trusted metadata."""

    release: str


@dataclass(frozen=True, slots=True)
class FetchMissing:
    """Get the chunks that are not here."""

    release: str


@dataclass(frozen=True, slots=True)
class Stage:
    """Put the release together from its chunks, durably, under its digest."""

    release: str


@dataclass(frozen=True, slots=True)
class Verify:
    """Load it and let it answer its golden inputs."""

    release: str


@dataclass(frozen=True, slots=True)
class Activate:
    """Make it what runs: one rename."""

    model: str
    release: str


@dataclass(frozen=True, slots=True)
class CheckAgain:
    """Let a release on trial, whose own part failed, answer its golden inputs again."""

    model: str
    release: str


@dataclass(frozen=True, slots=True)
class Commit:
    """The release on trial is healthy: what ran before it is no longer needed."""

    model: str


@dataclass(frozen=True, slots=True)
class RollBack:
    """The release on trial is unhealthy: what ran before it runs again."""

    model: str
    release: str
    reason: str


@dataclass(frozen=True, slots=True)
class FindHealthy:
    """This start of the agent is a good one: count it no more."""


@dataclass(frozen=True, slots=True)
class Retire:
    """Stop serving a model that nobody wants here any more."""

    model: str


@dataclass(frozen=True, slots=True)
class Clean:
    """Drop releases and chunks that nothing runs and nothing wants."""


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the controller what has become of its wishes."""


Step = (
    Consider
    | TakeBundle
    | FetchManifest
    | FetchMissing
    | Stage
    | Verify
    | Activate
    | CheckAgain
    | Commit
    | RollBack
    | FindHealthy
    | Retire
    | Clean
    | Report
)


@dataclass(frozen=True, slots=True)
class ReleaseState:
    """How far one wanted release has come on this device."""

    manifest: bool = False
    whole: bool = False
    """All its chunks are here (or it is staged)."""
    staged: bool = False
    verified: bool = False
    refused: str = ""
    """Why it will never run under this statement."""
    bad: bool = False
    """It was tried and thrown back, which outlives a restart."""
    waits_for: str = ""
    """What has to come, by itself, before it goes on at `retry_at`."""
    trouble: str = ""
    """Why the last try failed; another follows at `retry_at`."""
    tries: int = 0
    retry_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Standing:
    """What is on disk and what the engine serves, after the last change to either."""

    running: Mapping[str, str] = field(default_factory=dict)
    """Release by model."""
    trials: Mapping[str, str] = field(default_factory=dict)
    """Of these, the ones that were not found healthy yet."""
    committed: Mapping[str, str] = field(default_factory=dict)
    """What was found healthy last, by model; on trial days it runs no more, and stays whole."""
    held: frozenset[str] = frozenset()
    """Releases that safe mode forbids."""
    safe_mode: str = ""
    """Why the agent is in it."""
    starts: int = 0
    """Since one was found healthy, this one included; 0 once it was."""
    served_before: frozenset[str] = frozenset()
    """What the agent's version before the one on trial served."""
    offline_before: bool = False
    """It did not reach the broker."""


@dataclass(frozen=True, slots=True)
class DeviceState:
    """What the decision looks at."""

    online: bool = False
    offer: bytes | None = None
    """A statement that came and was not considered yet."""
    offer_retry_at: float = 0.0
    offer_trouble: str = ""
    """Why the newest offer is not obeyed."""
    bundle: str = ""
    """The path of a bundle that is still to be taken, or to be gone on with."""
    bundle_retry_at: float = 0.0
    releases: Mapping[str, ReleaseState] = field(default_factory=dict)
    running: Mapping[str, str] = field(default_factory=dict)
    """Release by model."""
    litter: bool = False
    reported: bool = True
    """The controller was told the present state."""
    report_retry_at: float = 0.0
    committed: Mapping[str, str] = field(default_factory=dict)
    held: frozenset[str] = frozenset()
    safe_mode: str = ""
    starts: int = 0
    trials: Mapping[str, Trial] = field(default_factory=dict)
    """What was seen of each release on trial, by model."""
    began: float = 0.0
    """When this start began to serve."""
    health_s: float = HEALTH_S
    local_retry_at: float = 0.0
    """When what needs only this device's disk is tried again."""
    own_trial: OwnTrial | None = None
    """What was seen of the agent's own version, where that is on trial."""


def next_step(want: Statement | None, have: DeviceState, now: float) -> Step | None:
    """The one thing to do next, or None while nothing can be done or all is as wanted."""
    step = health_step(have, now)
    if step is not None:
        return step
    if have.bundle and now >= have.bundle_retry_at:
        return TakeBundle(have.bundle)
    if have.online and have.offer is not None and now >= have.offer_retry_at:
        return Consider(have.offer)
    if want is None or have.own_trial is not None:
        return _report(have, now)
    for wanted in want.releases:
        step = _towards(wanted.model, wanted.release, have, now) or _repair(wanted.model, wanted.release, have, now)
        if step is not None:
            return step
    for kept in want.keeps:
        staged = have.releases.get(kept.release, ReleaseState()).staged
        step = None if staged else _fetch(kept.release, have, now)
        if step is not None:
            return step
    return _tidy(want, have, now)


def health_step(have: DeviceState, now: float) -> Step | None:
    """What the health of this start and of what is on trial asks for: it waits for no network, and for no download."""
    if now < have.local_retry_at:
        return None
    if have.own_trial is not None:
        own = judge_own(have.own_trial, have.running, now, have.health_s)
        if own != "wait":
            release = have.own_trial.release
            return (
                Commit(AGENT) if own == "healthy" else RollBack(AGENT, release, why_own(have.own_trial, have.running))
            )
    for model, trial in sorted(have.trials.items()):
        if model == AGENT:
            continue
        verdict = judge(trial, now, have.health_s)
        if verdict == "unhealthy":
            return RollBack(model, trial.release, why(trial))
        if verdict == "check again":
            return CheckAgain(model, trial.release)
        if verdict == "healthy":
            return Commit(model)
    if have.starts and not have.trials and now >= have.began + have.health_s:
        return FindHealthy()
    return None


def _report(have: DeviceState, now: float) -> Step | None:
    return Report() if have.online and not have.reported and now >= have.report_retry_at else None


def _towards(model: str, release: str, have: DeviceState, now: float) -> Step | None:
    """The next step of one model, or None: it runs, or it cannot go on just now."""
    if have.running.get(model) == release or release in have.held:
        return None
    state = have.releases.get(release, ReleaseState())
    if not (state.staged and state.whole):  # its golden inputs may be gone, though it is staged
        return _fetch(release, have, now)
    if state.refused or now < state.retry_at:
        return None
    return Activate(model, release) if state.verified else Verify(release)


def _fetch(release: str, have: DeviceState, now: float) -> Step | None:
    """The next step until a release lies here whole and verified; None where it cannot go on just now."""
    state = have.releases.get(release, ReleaseState())
    if state.refused or now < state.retry_at:
        return None
    if not state.manifest:
        return FetchManifest(release) if have.online else None
    if not state.whole:
        return FetchMissing(release) if have.online else None
    return Stage(release)


def _repair(model: str, wanted: str, have: DeviceState, now: float) -> Step | None:
    """Where the wanted release is refused, and nothing runs: what ran before is brought back, should it be spoilt."""
    refused = have.releases.get(wanted, ReleaseState()).refused
    before = have.committed.get(model, "")
    return _towards(model, before, have, now) if refused and before and model not in have.running else None


def _tidy(want: Statement, have: DeviceState, now: float) -> Step | None:
    """What is left to do once no wanted model can be brought further."""
    unwanted = sorted(set(have.running) - {AGENT} - {wanted.model for wanted in want.releases})  # an agent must run
    if unwanted and now >= have.local_retry_at:
        return Retire(unwanted[0])
    litter = have.litter and now >= have.local_retry_at
    kept = [have.releases.get(one.release, ReleaseState()) for one in want.keeps]
    settled = not have.trials and all(have.running.get(one.model) == one.release for one in want.releases)
    settled = settled and all(state.staged or state.refused for state in kept)
    return _report(have, now) or (Clean() if litter and settled else None)


def wake_at(have: DeviceState, now: float) -> float:
    """When, after `now`, time alone could bring a new step."""
    moments = [state.retry_at for state in have.releases.values() if state.tries and not state.refused]
    if have.online and have.offer is not None:
        moments.append(have.offer_retry_at)
    if have.bundle:
        moments.append(have.bundle_retry_at)
    if have.online and not have.reported:
        moments.append(have.report_retry_at)
    moments += [have.local_retry_at, have.began + have.health_s]
    moments += [trial.since + have.health_s for trial in have.trials.values()]
    moments += looks_at(have.own_trial, have.health_s) if have.own_trial is not None else []
    return min((moment for moment in moments if moment > now), default=float("inf"))


def model_states(want: Statement | None, have: DeviceState) -> tuple[ModelState, ...]:
    """What is reported of each model."""
    wanted = {one.model: one.release for one in want.releases} if want else {}
    names = sorted({*wanted, *have.running} - ({AGENT} - {*wanted}))
    return tuple(_model_state(model, wanted.get(model, ""), have) for model in names)


def kept_states(want: Statement | None, have: DeviceState) -> tuple[ModelState, ...]:
    """What is reported of each release that is kept for others."""
    return tuple(_kept_state(one.model, one.release, have) for one in want.keeps) if want else ()


def _kept_state(model: str, release: str, have: DeviceState) -> ModelState:
    state = have.releases.get(release, ReleaseState())
    if state.staged:
        return ModelState(model, release, release, "staged")
    if state.refused or state.trouble:
        return ModelState(model, "", release, "failed", state.refused or state.trouble)
    return ModelState(model, "", release, "fetching", state.waits_for)


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
    state = have.releases.get(wanted, ReleaseState())
    if state.bad:
        return ModelState(model, running, wanted, "rolled back", state.refused)
    if state.refused or state.trouble:
        return ModelState(model, running, wanted, "failed", state.refused or state.trouble)
    if not wanted:
        return ModelState(model, running, wanted, "running")
    return ModelState(model, running, wanted, "staged" if state.staged else "fetching", state.waits_for)


def after_failure(state: ReleaseState, error: Exception, now: float, jitter: float) -> ReleaseState:
    """What a failed step makes of a release. Only what may go better another time is tried again."""
    text = str(error) or type(error).__name__
    if is_final(error):
        return replace(state, refused=text)
    if isinstance(error, NotNow):
        return replace(state, waits_for=text, trouble="", tries=1, retry_at=now + error.look_again_s)
    pause_s = pause_after(state.tries, jitter) if isinstance(error, LinkError) else LONGEST_PAUSE_S
    trouble = "" if isinstance(error, LinkError) and state.tries < 3 else text
    return replace(state, trouble=trouble, tries=state.tries + 1, retry_at=now + pause_s)


def is_final(error: Exception) -> bool:
    """Would the same bytes bring it again?"""
    return isinstance(error, FINAL) and not isinstance(error, Expired)


def pause_after(tries: int, jitter: float) -> float:
    """Seconds until the next try: doubling, bounded, and never in step with other devices (`jitter` in [0, 1))."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(tries, 16)) * (0.5 + 0.5 * jitter)


class Hands(Protocol):
    """Carries steps out. Each method raises an EdgeError (or OSError: a disk) when it cannot."""

    def consider(self, raw: bytes) -> Statement:
        """The statement, if it is to be believed and obeyed."""
        ...

    def take_bundle(self, path: str, believed: Callable[[Statement], None], superseded: Callable[[], bool]) -> str:
        """Have what is wanted from that bundle; what there is to say of it, for people."""
        ...

    def fetch_manifest(self, release: str) -> None:
        """Get and keep the release's manifest."""
        ...

    def fetch_missing(self, release: str, superseded: Callable[[], bool]) -> bool:
        """Get what is not here; False if it stopped because `superseded()`."""
        ...

    def stage(self, release: str) -> None:
        """Write the release to disk."""
        ...

    def verify(self, release: str) -> None:
        """Load it and run its golden inputs."""
        ...

    def activate(self, model: str, release: str) -> None:
        """On trial, on disk; and answer by it from now on."""
        ...

    def check_again(self, model: str) -> None:
        """Run the golden inputs of what is on trial once more; InferenceFailed where it fails them."""
        ...

    def commit(self, model: str) -> None:
        """The release on trial was found healthy."""
        ...

    def roll_back(self, model: str, reason: str) -> None:
        """Answer by what was committed before; the release on trial is bad."""
        ...

    def find_healthy(self) -> None:
        """This start was found healthy."""
        ...

    def standing(self) -> Standing:
        """What is on disk, and what is served."""
        ...

    def retire(self, model: str) -> None:
        """Commit, and answer no more."""
        ...

    def clean(self, want: Statement) -> None:
        """Drop what is neither wanted nor running."""
        ...

    def report(
        self,
        counter: int,
        models: tuple[ModelState, ...],
        safe_mode: str,
        trouble: str,
        kept: tuple[ModelState, ...],
    ) -> None:
        """Tell the controller: each model; why we are in safe mode, if we are; why its word is not obeyed; what is kept
        for others."""
        ...

    def look(self, release: str) -> ReleaseState:
        """How far that release has come by what is on disk."""
        ...


@dataclass(frozen=True, slots=True)
class Taking:
    """What has become of a bundle that was brought, for people."""

    number: str = ""
    state: Literal["", "taking", "waiting", "taken", "refused"] = ""
    detail: str = ""
    tries: int = 0


class Updater:
    """The loop. `offer`, `online` and `ran` may be called from any thread; steps run on its own."""

    def __init__(
        self,
        hands: Hands,
        *,
        clock: Callable[[], float] = monotonic,
        health_s: float = HEALTH_S,
        dice: random.Random = THREADS.dice,
        trial_s: float = TRIAL_S,
    ) -> None:
        """`dice`: by which tries after a failure are spread; `trial_s`: how long the agent's own version has to prove
        itself."""
        self._trial_s = trial_s
        self._hands = hands
        self._clock = clock
        self._dice = dice
        self._changed = threading.Condition()
        self._want: Statement | None = None
        self._have = DeviceState(health_s=health_s)
        self._offers = 0
        self._offer_tries = 0
        self._bundle = Taking()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="updates", daemon=True)

    def start(self, want: Statement | None) -> None:
        """Begin from what the last run left, and go on by a thread."""
        self.begin(want)
        self._thread.start()

    def begin(self, want: Statement | None) -> None:
        """Begin from what the last run left; who calls this and not `start` takes the steps by `take_step`."""
        self._want = want
        self._have = replace(self._have, began=self._clock(), litter=True, reported=False)
        self._look_around()
        self._note(releases=self._looks(want))

    def stop(self) -> None:
        """End the loop after the step it is in."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout=10)

    def offer(self, raw: bytes) -> None:
        """A statement came; the newest supersedes all before it."""
        with self._changed:
            self._offers += 1
            self._offer_tries = 0
            self._have = replace(self._have, offer=raw, offer_retry_at=0.0)
            self._changed.notify_all()

    def take_bundle(self, number: str, path: str) -> None:
        """A bundle was brought; the newest supersedes one that is waited for. `number` tells it from others."""
        with self._changed:
            self._bundle = Taking(number, "taking")
            self._have = replace(self._have, bundle=path, bundle_retry_at=0.0)
            self._changed.notify_all()

    @property
    def taking(self) -> Taking:
        """What has become of the newest bundle."""
        with self._changed:
            return self._bundle

    def online(self, is_online: bool) -> None:
        """The broker is there or gone. Back online, nothing waits for its pause to end."""
        with self._changed:
            eased = {name: replace(state, retry_at=0.0) for name, state in self._have.releases.items()}
            releases = eased if is_online else self._have.releases
            reported = self._have.reported and not is_online
            self._have = replace(self._have, online=is_online, releases=releases, reported=reported)
            self._have = replace(self._have, offer_retry_at=0.0, report_retry_at=0.0)
            if self._have.own_trial is not None:
                since = self._clock() if is_online else None
                self._have = replace(self._have, own_trial=replace(self._have.own_trial, online_since=since))
            self._changed.notify_all()

    def ran(self, release: str, error: Exception | None) -> None:
        """The device's own part of a release has done its work (None), or has failed."""
        if error is None and not self._have.trials:
            return  # the way of every request on every day but a few: no lock
        with self._changed:
            trials = dict(self._have.trials)
            for model, trial in self._have.trials.items():
                if trial.release == release:
                    trials[model] = trial.after(error, self._clock())
            self._have = replace(self._have, trials=trials)
            self._changed.notify_all()

    @property
    def snapshot(self) -> tuple[Statement | None, DeviceState]:
        """For people and telemetry."""
        with self._changed:
            return self._want, self._have

    def _loop(self) -> None:
        while not self._stopping:
            if self.take_step() is not None:
                continue
            with self._changed:
                now = self._clock()
                if not self._stopping and next_step(self._want, self._have, now) is None:
                    pause_s = wake_at(self._have, now) - now
                    self._changed.wait(None if pause_s == float("inf") else max(0.01, pause_s))

    def wakes_at(self, now: float) -> float:
        """When, after `now`, time alone could bring a new step."""
        with self._changed:
            return wake_at(self._have, now)

    def take_step(self) -> Step | None:
        """Carry out the next step, if there is one now; which it was."""
        with self._changed:
            step = None if self._stopping else next_step(self._want, self._have, self._clock())
        if step is None:
            return None
        try:
            self._carry_out(step)
        except Exception as error:
            # A fault of ours must not end updates for ever: it is logged whole and counts as a failed try.
            if not isinstance(error, (EdgeError, OSError)):
                log.exception("step %s failed", step)
            self._failed(step, error)
        else:
            if isinstance(step, (Activate, RollBack)) and step.model == AGENT:
                self._stopping = True  # what follows is the next process's to do
        return step

    def _carry_out(self, step: Step) -> None:
        if isinstance(step, Consider):
            self._consider(step.raw)
        elif isinstance(step, TakeBundle):
            self._take(step)
        elif isinstance(step, FetchManifest):
            self._hands.fetch_manifest(step.release)
            self._became(step.release, self._hands.look(step.release))
        elif isinstance(step, FetchMissing):
            if self._hands.fetch_missing(step.release, self._superseded()):
                self._became(step.release, self._hands.look(step.release))
        elif isinstance(step, Stage):
            self._hands.stage(step.release)
            self._became(step.release, self._hands.look(step.release))
        elif isinstance(step, Verify):
            self._hands.verify(step.release)
            self._became(step.release, replace(self._state(step.release), verified=True))
        elif isinstance(step, Activate):
            self._hands.activate(step.model, step.release)
            self._changed_standing()
        elif isinstance(step, CheckAgain):
            self._hands.check_again(step.model)
            self._checked(step.model)
        elif isinstance(step, Commit):
            self._hands.commit(step.model)
            self._changed_standing()
        elif isinstance(step, RollBack):
            self._hands.roll_back(step.model, step.reason)
            self._changed_standing()
            self._note(releases=self._looks(self._want))
        elif isinstance(step, FindHealthy):
            self._hands.find_healthy()
            self._look_around()
        elif isinstance(step, Retire):
            self._hands.retire(step.model)
            self._changed_standing()
        elif isinstance(step, Report):
            self._report()
        elif self._want is not None:
            self._hands.clean(self._want)
            self._note(litter=False)

    def _take(self, step: TakeBundle) -> None:
        said = self._hands.take_bundle(step.path, self._believe, self._busy)
        with self._changed:
            interrupted = self._busy() and not self._stopping
            if self._have.bundle == step.path and not interrupted:
                self._have = replace(self._have, bundle="", reported=False)
                self._bundle = Taking(self._bundle.number, "taken", said)
        self._note(releases=self._looks(self._want))

    def _busy(self) -> bool:
        """What is copied from a bundle gives way to the health of what runs."""
        return self._stopping or health_step(self._have, self._clock()) is not None

    def _consider(self, raw: bytes) -> None:
        self._believe(self._hands.consider(raw), raw)

    def _believe(self, statement: Statement, raw: bytes = b"") -> None:
        """Want what this statement says, which came as `raw`, or in a bundle."""
        log.info(
            "statement %d: %s", statement.counter, ", ".join(f"{w.model}={w.release[:12]}" for w in statement.releases)
        )
        self._look_around()
        releases = self._looks(statement)
        with self._changed:
            if statement == self._want:  # said again: what was refused under it stays refused
                releases = {**releases, **{name: state for name, state in self._have.releases.items() if state.refused}}
            self._want = statement
            offer = None if self._have.offer == raw else self._have.offer
            self._have = replace(self._have, releases=releases, offer=offer, reported=False, litter=True)
            self._have = replace(self._have, offer_trouble="")

    def _report(self) -> None:
        with self._changed:
            want, have = self._want, self._have
            self._have = replace(have, reported=True)
        counter, models, kept = want.counter if want else 0, model_states(want, have), kept_states(want, have)
        self._hands.report(counter, models, have.safe_mode, have.offer_trouble, kept)

    def _superseded(self) -> Callable[[], bool]:
        """A download gives way to what is newer, and to the health of what runs."""
        seen = self._offers
        return lambda: (
            self._stopping
            or self._offers != seen
            or not self._have.online
            or health_step(self._have, self._clock()) is not None
        )

    def _state(self, release: str) -> ReleaseState:
        return self._have.releases.get(release, ReleaseState())

    def _became(self, release: str, state: ReleaseState) -> None:
        with self._changed:
            before = self._state(release)
            self._have = replace(self._have, releases={**self._have.releases, release: state})
            if (before.staged, before.trouble, before.waits_for) != (state.staged, state.trouble, state.waits_for):
                self._have = replace(self._have, reported=False)

    def _changed_standing(self) -> None:
        self._look_around()
        self._note(reported=False, litter=True)

    def _look_around(self) -> None:
        """Take in what is on disk and served now. A release that was on trial before keeps what was seen of it."""
        now, stands = self._clock(), self._hands.standing()
        with self._changed:
            seen = self._have.trials
            trials = {
                model: seen[model] if model in seen and seen[model].release == release else Trial(release, now)
                for model, release in stands.trials.items()
            }
            self._have = replace(
                self._have, running=stands.running, committed=stands.committed, held=stands.held,
                safe_mode=stands.safe_mode, starts=stands.starts, trials=trials,
                own_trial=self._own_trial(stands),
            )  # fmt: skip

    def _own_trial(self, stands: Standing) -> OwnTrial | None:
        """What is known of the agent's version on trial; it is this process, so it began with it."""
        release, seen = stands.trials.get(AGENT, ""), self._have.own_trial
        if not release or (seen is not None and seen.release == release):
            return seen if release else None
        since = self._clock() if self._have.online else None
        return OwnTrial(release, self._have.began, self._trial_s, stands.served_before, since, stands.offline_before)

    def _looks(self, statement: Statement | None) -> dict[str, ReleaseState]:
        """How far what is wanted has come, and what was committed before and does not run."""
        wanted = {one.release for one in (*statement.releases, *statement.keeps)} if statement else set()
        resting = {one for model, one in self._have.committed.items() if model not in self._have.running}
        return {release: self._hands.look(release) for release in sorted(wanted | resting)}

    def _checked(self, model: str) -> None:
        with self._changed:
            trial = self._have.trials.get(model)
            if trial is not None:
                self._have = replace(self._have, trials={**self._have.trials, model: replace(trial, unchecked=False)})

    def _check_failed(self, step: CheckAgain, error: Exception) -> None:
        """Wrong answers condemn; golden inputs that are not here to be run say nothing."""
        trial = self._have.trials.get(step.model)
        if trial is None or trial.release != step.release:
            return
        if is_final(error) or not isinstance(error, (EdgeError, OSError)):
            trial = replace(trial, condemned=f"its golden inputs fail now: {error}")
        trial = replace(trial, unchecked=False)
        self._have = replace(self._have, trials={**self._have.trials, step.model: trial}, reported=False)

    def _note(self, **changes: Any) -> None:
        with self._changed:
            self._have = replace(self._have, **changes)

    def _failed(self, step: Step, error: Exception) -> None:
        log.warning("%s: %s", type(step).__name__, error)
        now, jitter = self._clock(), self._dice.random()
        with self._changed:
            if isinstance(step, Consider):
                self._offer_failed(step, error, now, jitter)
            elif isinstance(step, TakeBundle):
                self._bundle_failed(step, error, now, jitter)
            elif isinstance(step, Report):
                self._have = replace(self._have, reported=False, report_retry_at=now + pause_after(1, jitter))
            elif isinstance(step, CheckAgain):
                self._check_failed(step, error)
            elif isinstance(step, (Commit, RollBack, FindHealthy, Retire, Clean)):
                self._have = replace(self._have, local_retry_at=now + pause_after(LOCAL_TRIES, jitter))
            else:
                state = after_failure(self._state(step.release), error, now, jitter)
                if isinstance(step, Stage) and isinstance(error, LinkError):
                    state = replace(state, whole=False)  # what was whole was spoilt meanwhile, and is completed
                known = isinstance(error, NotNow) and self._state(step.release).waits_for == state.waits_for
                reported = self._have.reported and known
                releases = {**self._have.releases, step.release: state}
                self._have = replace(self._have, releases=releases, reported=reported)

    def _bundle_failed(self, step: TakeBundle, error: Exception, now: float, jitter: float) -> None:
        """A medium that is gone or fails is waited for a while; anything else, and what has expired, ends it."""
        if self._have.bundle != step.path:
            return
        tries = self._bundle.tries + 1
        gone = isinstance(error, (LinkError, OSError)) and tries < BUNDLE_TRIES
        state: Literal["waiting", "refused"] = "waiting" if gone else "refused"
        self._bundle = Taking(self._bundle.number, state, str(error) or type(error).__name__, tries)
        retry_at = now + pause_after(min(tries, BUNDLE_PATIENCE), jitter)
        self._have = replace(self._have, bundle=step.path if gone else "", bundle_retry_at=retry_at)

    def _offer_failed(self, step: Consider, error: Exception, now: float, jitter: float) -> None:
        """A statement that is not believed is gone; one that could not be checked or kept just now waits."""
        if self._have.offer != step.raw:
            return
        trouble = f"the newest statement is not obeyed: {error}"
        if is_final(error):
            self._have = replace(self._have, offer=None, offer_trouble=trouble, reported=False)
            return
        self._offer_tries += 1
        self._have = replace(self._have, offer_retry_at=now + pause_after(self._offer_tries, jitter))
        if not isinstance(error, LinkError) and trouble != self._have.offer_trouble:
            self._have = replace(self._have, offer_trouble=trouble, reported=False)
