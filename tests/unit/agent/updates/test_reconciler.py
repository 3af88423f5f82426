"""From the desired to the reported state: the decision as a table, and the loop with actions that fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from edgesplit.errors import EdgeError, Expired, InferenceFailed, LinkError, ModelRefused, TrustError
from edgesplit.mqtt.messages import ModelState
from edgesplit.release.manifest import DesiredRelease, Statement
from edgesplit_agent.state.slots import ENOUGH_ANSWERS, Trial
from edgesplit_agent.updates.reconciler import (
    RETRY,
    AcceptStatement,
    Activate,
    ApplyBundle,
    CollectGarbage,
    Commit,
    DeviceState,
    FetchManifest,
    FetchMissing,
    InstalledState,
    MarkStartHealthy,
    Reconciler,
    ReleaseProgress,
    Report,
    Retire,
    Reverify,
    RollBack,
    Stage,
    Step,
    Verify,
    after_failure,
    model_states,
    next_step,
    wake_at,
)
from support.agent_engine import eventually

A, B = "a" * 64, "b" * 64
FAILED_ONCE = Trial(A, 9.0, failed=1, unchecked=True, error="the kernel failed")
DONE = ReleaseProgress(manifest=True, whole=True, staged=True, verified=True)


def want(*wanted: tuple[str, str], counter: int = 1) -> Statement:
    releases = tuple(DesiredRelease(model, release) for model, release in wanted)
    return Statement(device="cam", releases=releases, counter=counter, expires=2**40)


def have(state: ReleaseProgress | None = None, **more: object) -> DeviceState:
    return replace(DeviceState(online=True, releases={A: state} if state else {}), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("statement", "state", "expected"),
    [
        (None, have(), None),
        (None, have(reported=False), Report()),
        (None, have(offer=b"new"), AcceptStatement(b"new")),
        (None, have(offer=b"new", online=False), None),
        (None, have(offer=b"new", offer_retry_at=11.0), None),
        (want(("m", A)), have(), FetchManifest(A)),
        (want(("m", A)), have(online=False), None),
        (want(("m", A)), have(ReleaseProgress(manifest=True)), FetchMissing(A)),
        (want(("m", A)), have(ReleaseProgress(manifest=True), online=False), None),
        (want(("m", A)), have(ReleaseProgress(manifest=True, whole=True), online=False), Stage(A)),
        (want(("m", A)), have(replace(DONE, verified=False), online=False), Verify(A)),
        (want(("m", A)), have(DONE, online=False), Activate("m", A)),
        (want(("m", A)), have(replace(DONE, whole=False)), FetchMissing(A)),  # golden inputs, swept meanwhile
        (
            want(("m", A)),
            have(DONE, offer=b"newer"),
            AcceptStatement(b"newer"),
        ),  # F3: a newer one supersedes in any state
        (want(("m", A)), have(DONE, running={"m": A}), None),
        (want(("m", A)), have(DONE, running={"m": A}, reported=False), Report()),
        (want(("m", A)), have(DONE, running={"m": A}, litter=True), CollectGarbage()),
        (
            want(("m", A)),
            have(ReleaseProgress(refused="forged"), running={"m": B}, litter=True),
            None,
        ),  # old keeps running
        (want(("m", A)), have(ReleaseProgress(manifest=True, tries=1, retry_at=11.0)), None),
        (want(("m", A)), have(ReleaseProgress(manifest=True, tries=1, retry_at=9.0)), FetchMissing(A)),
        (want(("m", A), ("n", B)), have(ReleaseProgress(refused="forged")), FetchManifest(B)),  # others go on
        (want(("m", A)), have(DONE, running={"m": A, "old": B}), Retire("old")),
        (want(), have(DONE, running={"m": A}), Retire("m")),
        # On trial: what its health asks for comes before anything else, a newer statement too, and waits for no network
        (want(("m", A)), have(DONE, running={"m": A}, trials={"m": Trial(A, 5.0)}), None),
        (
            want(("m", A)),
            have(DONE, running={"m": A}, trials={"m": Trial(A, 5.0)}, offer=b"newer"),
            AcceptStatement(b"newer"),
        ),
        (want(("m", A)), have(DONE, running={"m": A}, trials={"m": Trial(A, 0.0)}, online=False), Commit("m")),
        (want(("m", A)), have(DONE, running={"m": A}, trials={"m": Trial(A, 9.0, ENOUGH_ANSWERS)}), Commit("m")),
        (want(("m", A)), have(DONE, running={"m": A}, trials={"m": Trial(A, 0.0)}, local_retry_at=11.0), None),
        (
            want(("m", A)),
            have(DONE, running={"m": A}, trials={"m": FAILED_ONCE}, online=False, offer=b"newer"),
            Reverify("m", A),
        ),
        (
            want(("m", A)),
            have(DONE, running={"m": A}, trials={"m": replace(FAILED_ONCE, condemned="wrong")}, offer=b"newer"),
            RollBack("m", A, "wrong"),
        ),
        (want(("m", A)), have(DONE, running={"m": A}, trials={"m": Trial(A, 5.0)}, litter=True), None),  # all is kept
        (want(("m", B)), have(running={"m": A}, trials={"m": Trial(A, 5.0)}), FetchManifest(B)),  # superseded on trial
        # A start is found healthy by time alone, without anything to run; while something is on trial, by its commit
        (None, have(starts=1, began=0.0, online=False), MarkStartHealthy()),
        (None, have(starts=1, began=1.0), None),
        (want(("m", A)), have(DONE, running={"m": A}, starts=1, trials={"m": Trial(A, 5.0)}), None),
        # Safe mode: what it forbids is not even fetched; another release is
        (want(("m", A)), have(held=frozenset({A}), safe_mode="three starts"), None),
        (
            want(("m", A)),
            have(held=frozenset({A}), safe_mode="three starts", offer=b"newer"),
            AcceptStatement(b"newer"),
        ),
        (want(("m", A)), have(held=frozenset({B})), FetchManifest(A)),
        # Nothing runs, and the wanted one is bad: what was healthy before is brought back
        (want(("m", A)), have(ReleaseProgress(refused="bad", bad=True), committed={"m": B}), FetchManifest(B)),
        (want(("m", A)), have(ReleaseProgress(refused="bad", bad=True), committed={"m": B}, running={"m": B}), None),
        # A disk that fails is not asked again at once
        (want(), have(DONE, running={"m": A}, local_retry_at=11.0), None),
        (want(("m", A)), have(DONE, running={"m": A}, litter=True, local_retry_at=11.0), None),
    ],
)
def test_next_step(statement: Statement | None, state: DeviceState, expected: Step | None) -> None:
    """One look at desired and actual state gives the one thing to do at time 10, or nothing."""
    assert next_step(statement, state, 10.0) == expected


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (have(), ModelState("m", "", A, "fetching")),
        (have(replace(DONE, verified=False)), ModelState("m", "", A, "staged")),
        (have(DONE, running={"m": A}), ModelState("m", A, A, "running")),
        (have(ReleaseProgress(refused="forged"), running={"m": B}), ModelState("m", B, A, "failed", "forged")),
        (have(ReleaseProgress(trouble="no room")), ModelState("m", "", A, "failed", "no room")),
        (have(DONE, running={"m": A}, trials={"m": Trial(A, 5.0)}), ModelState("m", A, A, "trial")),
        (
            have(DONE, running={"m": A}, trials={"m": FAILED_ONCE}),
            ModelState("m", A, A, "trial", "its own part failed: the kernel failed"),
        ),
        (
            have(ReleaseProgress(refused="it crashed", bad=True), running={"m": B}),
            ModelState("m", B, A, "rolled back", "it crashed"),
        ),
        (have(held=frozenset({A}), safe_mode="three starts"), ModelState("m", "", A, "safe mode", "three starts")),
    ],
)
def test_reported_states(state: DeviceState, expected: ModelState) -> None:
    """The controller is told what runs, what is desired, its progress, and why it failed."""
    assert model_states(want(("m", A)), state) == (expected,)


@pytest.mark.parametrize("error", [TrustError("forged"), ModelRefused("unknown operator")])
def test_trust_failure_is_never_retried(error: Exception) -> None:
    """It is final under this statement; the back-off of a lost link does not apply."""
    state = after_failure(ReleaseProgress(manifest=True), error, 10.0, 0.5)
    assert state.refused and wake_at(have(state, health_s=0.0), 10.0) == float("inf")
    assert next_step(want(("m", A)), have(state), 1e9) is None


def test_idle_device_does_not_wake_for_past_times() -> None:
    """Offline, with failed attempts behind it and a start long found healthy: it sleeps until it is woken."""
    waiting = have(ReleaseProgress(manifest=True, tries=3, retry_at=5.0), online=False, began=1.0, health_s=1.0)
    assert next_step(want(("m", A)), waiting, 10.0) is None
    assert wake_at(waiting, 10.0) == float("inf")
    assert wake_at(replace(waiting, trials={"m": Trial(A, 9.5)}), 10.0) == 10.5


MAY_PASS = [LinkError("gone"), EdgeError("no room"), Expired("a clock?"), OSError(28, "No space left on device")]


@pytest.mark.parametrize("error", MAY_PASS)
def test_transient_failures_are_retried_later(error: Exception) -> None:
    """A lost link soon, a full disk after a while; and the state reports the reason once it lasts."""
    state = after_failure(ReleaseProgress(manifest=True), error, 10.0, 0.5)
    assert not state.refused and 10.0 < state.retry_at <= 10.0 + RETRY.longest_s
    assert next_step(want(("m", A)), have(state), state.retry_at) == FetchMissing(A)


def test_retries_back_off_to_a_bound_with_jitter() -> None:
    """B11: ten thousand devices do not come back at once."""
    assert [RETRY.pause_s(tries, 1.0) for tries in (0, 1, 2, 60)] == [0.5, 1.0, 2.0, RETRY.longest_s]
    assert RETRY.pause_s(3, 0.0) != RETRY.pause_s(3, 0.9)


class FakeActions:
    """Does everything at once; a test breaks single steps."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []
        self.states: dict[str, ReleaseProgress] = {}
        self.breaks: dict[str, Exception] = {}
        self.statements: dict[bytes, Statement] = {}
        self.reports: list[tuple[ModelState, ...]] = []
        self.served: dict[str, str] = {}
        self.trials: dict[str, str] = {}
        self.before: dict[str, str] = {}
        self.fetching = threading.Event()
        self.slow = False

    def _do(self, step: str, of: str) -> None:
        self.done.append((step, of))
        if error := self.breaks.get(step):
            raise error

    def accept_statement(self, raw: bytes) -> Statement:
        self._do("consider", raw.decode())
        return self.statements[raw]

    def fetch_manifest(self, release: str) -> None:
        self._do("manifest", release)
        self.states[release] = ReleaseProgress(manifest=True)

    def fetch_missing(self, release: str, superseded: Callable[[], bool]) -> bool:
        self._do("missing", release)
        self.fetching.set()
        if self.slow:
            eventually("something newer", superseded)
            return False
        self.states[release] = ReleaseProgress(manifest=True, whole=True)
        return True

    def stage(self, release: str) -> None:
        self._do("stage", release)
        self.states[release] = ReleaseProgress(manifest=True, whole=True, staged=True)

    def verify(self, release: str) -> None:
        self._do("verify", release)

    def activate(self, model: str, release: str) -> None:
        self._do("activate", release)
        if model in self.served:
            self.before[model] = self.served[model]
        self.served[model] = self.trials[model] = release

    def reverify(self, model: str) -> None:
        self._do("check again", model)

    def commit(self, model: str) -> None:
        self._do("commit", model)
        self.before[model] = self.trials.pop(model)

    def roll_back(self, model: str, reason: str) -> None:
        self._do("roll back", model)
        self.states[self.trials.pop(model)] = ReleaseProgress(refused=reason, bad=True)
        if model in self.before:
            self.served[model] = self.before[model]
        else:
            del self.served[model]

    def mark_start_healthy(self) -> None:
        self._do("healthy", "")

    def installed(self) -> InstalledState:
        return InstalledState(running=dict(self.served), trials=dict(self.trials), committed=dict(self.before))

    def retire(self, model: str) -> None:
        self._do("retire", model)
        del self.served[model]

    def collect_garbage(self, want: Statement) -> None:
        self._do("clean", "")

    def report(
        self, counter: int, models: tuple[ModelState, ...], safe_mode: str, trouble: str, kept: tuple[ModelState, ...]
    ) -> None:
        self._do("report", "")
        self.reports.append(models)

    def progress(self, release: str) -> ReleaseProgress:
        return self.states.get(release, ReleaseProgress())


@pytest.fixture
def hands() -> FakeActions:
    made = FakeActions()
    made.statements = {b"one": want(("m", A)), b"two": want(("m", B), counter=2)}
    return made


def running(updater: Reconciler) -> dict[str, str]:
    return dict(updater.snapshot[1].running)


def test_statement_is_applied_step_by_step(hands: FakeActions) -> None:
    """Every step in its order, once; then reported, then cleaned up."""
    updater = Reconciler(hands, health_s=0.0)
    updater.start(None)
    updater.on_connection(True)
    updater.on_statement(b"one")
    eventually("it is tidied up", lambda: ("clean", "") in hands.done)
    steps = [step for step, _ in hands.done if step != "report"]
    assert steps == ["consider", "manifest", "missing", "stage", "verify", "activate", "commit", "clean"]
    assert hands.reports[-1] == (ModelState("m", A, A, "running"),)
    updater.stop()


def test_newer_statement_supersedes_a_stuck_one(hands: FakeActions) -> None:
    """F3: the first one's download never ends; the second is applied and runs."""
    hands.slow = True
    updater = Reconciler(hands, health_s=0.0)
    updater.start(None)
    updater.on_connection(True)
    updater.on_statement(b"one")
    assert hands.fetching.wait(10)
    hands.slow = False
    updater.on_statement(b"two")
    eventually("the second runs", lambda: running(updater) == {"m": B})
    assert ("activate", A) not in hands.done
    updater.stop()


@pytest.mark.parametrize("step", ["manifest", "missing", "stage", "verify", "activate"])
def test_trust_failure_in_any_step_keeps_the_old_release_running(hands: FakeActions, step: str) -> None:
    """Whichever step refuses: reported as failed with its reason, tried once, and the old release keeps running."""
    hands.breaks[step] = TrustError("forged")
    updater = Reconciler(hands, health_s=0.0)
    hands.served = {"m": B}
    updater.start(None)
    updater.on_connection(True)
    updater.on_statement(b"one")
    expected = (ModelState("m", B, A, "failed", "forged"),)
    eventually("it is reported", lambda: expected in hands.reports)
    assert [name for name, _ in hands.done].count(step) == 1
    assert running(updater) == {"m": B}
    updater.on_statement(b"one")  # the broker says it again
    eventually("it is considered again", lambda: hands.done.count(("consider", "one")) == 2)
    eventually("and reported again", lambda: hands.reports.count(expected) >= 2)
    assert [name for name, _ in hands.done].count(step) == 1, "refused under this statement stays refused"
    updater.stop()


def test_refused_statement_changes_nothing(hands: FakeActions) -> None:
    """C3: a replayed or forged statement is dropped; the running releases stay."""
    hands.breaks["consider"] = TrustError("older than one accepted before")
    updater = Reconciler(hands, health_s=0.0)
    hands.served = {"m": A}
    updater.start(want(("m", A)))
    updater.on_connection(True)
    updater.on_statement(b"two")
    eventually("it was considered", lambda: ("consider", "two") in hands.done)
    eventually("nothing is left to consider", lambda: updater.snapshot[1].offer is None)
    assert running(updater) == {"m": A} and updater.snapshot[0] == want(("m", A))
    updater.stop()


def test_reconnection_ends_the_back_off(hands: FakeActions) -> None:
    """No device waits half a minute while its broker is available again."""
    hands.breaks["missing"] = LinkError("gone")
    updater = Reconciler(
        hands, clock=lambda: 10.0, health_s=0.0
    )  # a clock that stands still: only the reconnection can help
    updater.start(None)
    updater.on_connection(True)
    updater.on_statement(b"one")
    eventually("it failed", lambda: updater.snapshot[1].releases.get(A, ReleaseProgress()).tries == 1)
    updater.on_connection(False)
    del hands.breaks["missing"]
    updater.on_connection(True)
    eventually("it runs", lambda: running(updater) == {"m": A})
    updater.stop()


def test_unexpected_exception_does_not_end_updates(hands: FakeActions) -> None:
    """An unexpected exception in a step is a failed attempt: the next statement is still applied."""
    hands.breaks["stage"] = ZeroDivisionError("ours")
    updater = Reconciler(hands, health_s=0.0)
    updater.start(None)
    updater.on_connection(True)
    updater.on_statement(b"one")
    eventually("it failed", lambda: updater.snapshot[1].releases.get(A, ReleaseProgress()).trouble == "ours")
    del hands.breaks["stage"]
    updater.on_statement(b"two")
    eventually("the second runs", lambda: running(updater) == {"m": B})
    updater.stop()


def test_unhealthy_trial_is_rolled_back_once_and_reported(hands: FakeActions) -> None:
    """Its golden inputs fail after a request did: one step back, reported with the reason, and not tried again."""
    hands.served = {"m": B}
    hands.breaks["check again"] = InferenceFailed("golden input: output 'y' is not what the whole model gave")
    updater = Reconciler(hands, health_s=1e9)
    updater.start(None)
    updater.on_connection(True)
    updater.on_statement(b"one")
    eventually("it is on trial", lambda: "m" in updater.snapshot[1].trials)
    updater.on_device_run(A, InferenceFailed("the kernel failed"))
    eventually("the old one runs", lambda: running(updater) == {"m": B})
    eventually("it is told", lambda: hands.reports[-1][0].state == "rolled back")
    assert hands.done.count(("activate", A)) == 1
    updater.stop()


@pytest.mark.parametrize("step", ["commit", "healthy", "retire", "clean", "roll back"])
def test_disk_failure_is_retried_with_back_off(hands: FakeActions, step: str) -> None:
    """A step that needs only this device's disk fails: the next attempt is after a pause, not at once and not never."""
    now = [0.0]
    hands.breaks[step] = OSError(28, "No space left on device")
    hands.served = {"m": A, "n": B} if step == "retire" else {"m": A}
    hands.trials = {"m": A} if step in ("commit", "roll back") else {}
    hands.states[A] = ReleaseProgress(manifest=True, whole=True, staged=True)
    hands.installed = lambda: InstalledState(  # type: ignore[method-assign]
        running=dict(hands.served), trials=dict(hands.trials), committed=dict(hands.before), starts=step == "healthy"
    )
    updater = Reconciler(hands, clock=lambda: now[0], health_s=0.0 if step != "roll back" else 1e9)
    updater.begin(want(("m", A)))
    for _ in range(5 if step == "roll back" else 0):
        updater.on_device_run(A, InferenceFailed("always"))
    for _ in range(10):
        updater.run_step()
    tries = [name for name, _ in hands.done].count(step)
    assert tries == 1 and now[0] < updater.wakes_at(now[0]) <= RETRY.longest_s
    now[0] = updater.wakes_at(now[0])
    updater.run_step()
    assert [name for name, _ in hands.done].count(step) == 2


def test_bundle_is_applied_before_fetching_and_after_health_steps() -> None:
    """Also without a network; while its stick is absent, other steps are done."""
    assert next_step(None, have(bundle="/stick", online=False), 10.0) == ApplyBundle("/stick")
    assert next_step(want(("m", A)), have(bundle="/stick", offer=b"new"), 10.0) == ApplyBundle("/stick")
    condemned = have(DONE, running={"m": A}, trials={"m": replace(FAILED_ONCE, condemned="wrong")}, bundle="/stick")
    assert next_step(want(("m", A)), condemned, 10.0) == RollBack("m", A, "wrong")
    assert next_step(want(("m", A)), have(bundle="/stick", bundle_retry_at=11.0), 10.0) == FetchManifest(A)
    assert wake_at(have(bundle="/stick", bundle_retry_at=11.0), 10.0) == 11.0


class Stick(FakeActions):
    """Hands that take a bundle, or fail as they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: list[Exception] = []
        self.took: list[str] = []

    def apply_bundle_at(
        self, path: str, on_statement: Callable[[Statement], None], superseded: Callable[[], bool]
    ) -> str:
        self.took.append(path)
        on_statement(want(("m", A), counter=7))
        if self.fails:
            raise self.fails.pop(0)
        return "all"


def test_removed_stick_is_retried_while_its_statement_is_applied() -> None:
    """The statement counts from when it was verified; the bundle is applied once the stick is back."""
    hands, now = Stick(), [100.0]
    hands.fails = [LinkError("the stick is gone")]
    updater = Reconciler(hands, clock=lambda: now[0])
    updater.begin(None)
    updater.on_bundle("1", "/stick")
    assert updater.run_step() == ApplyBundle("/stick")
    assert (updater.bundle_status.state, updater.bundle_status.detail) == ("waiting", "the stick is gone")
    believed, state = updater.snapshot
    assert believed is not None and believed.counter == 7
    now[0] = state.bundle_retry_at
    assert updater.run_step() == ApplyBundle("/stick")
    assert (updater.bundle_status.number, updater.bundle_status.state, updater.bundle_status.detail) == (
        "1",
        "taken",
        "all",
    )
    assert updater.snapshot[1].bundle == ""


@pytest.mark.parametrize("error", [TrustError("forged"), Expired("old"), ModelRefused("no"), ValueError("ours")])
def test_untrusted_bundle_is_tried_once(error: Exception) -> None:
    """Expired is final here: no clock makes a stick newer. An unexpected exception is final too."""
    hands = Stick()
    hands.fails = [error]
    updater = Reconciler(hands)
    updater.begin(None)
    updater.on_bundle("1", "/stick")
    updater.run_step()
    assert updater.bundle_status.state == "refused" and updater.snapshot[1].bundle == ""


def test_newer_bundle_supersedes_a_waiting_one() -> None:
    """The stick that was inserted last is the one that is meant."""
    hands = Stick()
    hands.fails = [LinkError("gone")]
    updater = Reconciler(hands)
    updater.begin(None)
    updater.on_bundle("1", "/old")
    updater.run_step()
    updater.on_bundle("2", "/new")
    updater.run_step()
    assert (
        hands.took == ["/old", "/new"]
        and updater.bundle_status.number == "2"
        and updater.bundle_status.state == "taken"
    )
