"""The agent updates itself: reconciler, trust store and version store of one device; each start is a new process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgesplit.errors import TrustError
from edgesplit.release.agent_release import AGENT_MODEL
from edgesplit.release.manifest import DesiredRelease, Statement, decode_manifest
from edgesplit.release.recut import check_recut
from edgesplit_agent.self_update.version_store import VersionStore
from edgesplit_agent.updates.reconciler import Activate, Commit, RollBack, Stage, Verify
from support.agent_versions import AgentRelease, SelfUpdateHarness, told
from support.device_storage import HEALTH_S, Machine

A, B = AgentRelease("0.3.0"), AgentRelease("0.4.0")


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SelfUpdateHarness:
    monkeypatch.setattr(os, "sync", lambda: None)  # all disks of a busy machine are nobody's to wait for
    made = SelfUpdateHarness(tmp_path)
    made.add(A, B)
    return made


def on(harness: SelfUpdateHarness, version: AgentRelease) -> Machine:
    """A device that runs this version, committed, and serves a model."""
    harness.say(version)
    machine = harness.settle(harness.start())
    assert harness.runs(machine) == version.digest and not machine.standing.trials
    return machine


def test_version_is_installed_tried_and_committed(harness: SelfUpdateHarness) -> None:
    """Fetched and verified like a model, started on trial, committed after being connected for the health time; the
    model is served throughout, and a wheel that both versions share was transferred once."""
    machine = on(harness, A)

    machine.offer(harness.say(B)).settle(lambda now: harness.again > 0)
    machine.stop()
    assert machine.running == harness.model.digest
    trial = harness.start().settle(lambda now: bool(now.reports))

    assert told(trial)[:2] == (B.digest, "trial") and trial.running == harness.model.digest
    trial.settle()
    assert told(trial)[:2] == (B.digest, "running")
    assert VersionStore(harness.data).read().committed == B.digest
    assert len(machine.sent) == 1, "the wheel that stays was sent again"
    assert not trial.strangers()


def test_version_without_broker_connection_is_rolled_back(harness: SelfUpdateHarness) -> None:
    """After its time limit the previous version starts and reports why; the same statement does not bring it again."""
    machine = on(harness, A)
    harness.mutes.add(B.digest)
    machine.offer(harness.say(B))

    back = harness.settle(machine)

    assert harness.runs(back) == A.digest and back.running == harness.model.digest
    assert told(back) == (A.digest, "rolled back", "it did not reach the broker within 300 s")
    assert not any(isinstance(step, Activate) for step in back.steps)


def test_version_that_does_not_serve_a_model_is_rolled_back(harness: SelfUpdateHarness) -> None:
    """It is connected, but a model that was served before is not."""
    machine = on(harness, A)
    harness.forgets.add(B.digest)
    machine.offer(harness.say(B))

    back = harness.settle(machine)

    assert harness.runs(back) == A.digest and back.running == harness.model.digest
    assert told(back)[1:] == ("rolled back", "it does not serve tiny, which the version before it served")


def test_version_that_exits_at_every_start_is_rolled_back(harness: SelfUpdateHarness) -> None:
    """Only the launcher sees it: three starts, then the previous version. The models' own start counter is not
    affected, and no safe mode follows."""
    machine = on(harness, A)
    machine.offer(harness.say(B)).settle(lambda now: harness.again > 0)
    machine.stop()
    for _ in range(3):
        dying = harness.start(online=False)
        assert harness.runs(dying) == B.digest
        dying.off()

    back = harness.settle(harness.start())

    assert harness.runs(back) == A.digest and back.running == harness.model.digest
    assert told(back)[1:] == ("rolled back", "3 starts in a row were not found healthy")
    assert not back.standing.safe_mode and not back.standing.starts


def test_unsigned_wheels_are_never_installed(harness: SelfUpdateHarness) -> None:
    """Bytes changed by a broker or on a card are refused on arrival, and again before they are unpacked."""
    machine = on(harness, A)
    wheel = next(iter(B.chunks))
    harness.source.chunks[wheel] = b"x" * len(B.chunks[wheel])
    machine = harness.settle(machine.offer(harness.say(B)))
    assert told(machine)[1] == "failed" and not VersionStore(harness.data).version_folder(B.digest).exists()

    harness.source.chunks[wheel] = B.chunks[wheel]
    machine.offer(harness.say(B)).settle(lambda now: isinstance(now.steps[-1], Stage))
    (file,) = (harness.data / "releases" / B.digest / "slices").glob("*/wheels.tar")
    file.write_bytes(b"x" * file.stat().st_size)
    machine = harness.settle(machine)
    assert harness.runs(machine) == A.digest and not VersionStore(harness.data).version_folder(B.digest).exists()


def test_newer_statement_retries_a_failed_version(harness: SelfUpdateHarness) -> None:
    """A version that failed because the broker was away runs again once the operator deploys it again."""
    machine = on(harness, A)
    harness.mutes.add(B.digest)
    back = harness.settle(machine.offer(harness.say(B)))
    harness.mutes.clear()

    again = harness.settle(back.offer(harness.say(B)))

    assert harness.runs(again) == B.digest and told(again)[1] == "running"


def test_version_that_fails_its_fitness_check_is_never_started(harness: SelfUpdateHarness) -> None:
    """A version that does not support this launcher or folder is refused before anything is changed."""
    unfit = AgentRelease("0.5.0", unfit=True)
    harness.add(unfit)
    machine = on(harness, A)

    machine = harness.settle(machine.offer(harness.say(unfit)))

    assert told(machine) == (A.digest, "failed", "agent 0.5.0 cannot run here: it needs a newer launcher")
    assert harness.runs(machine) == A.digest and not VersionStore(harness.data).version_folder(unfit.digest).exists()
    machine.stop()
    again = harness.settle(harness.start())
    assert told(again)[1] == "failed" and not any(isinstance(step, Verify) for step in again.steps)
    unfit.unfit = False
    assert harness.runs(harness.settle(again.offer(harness.say(unfit)))) == unfit.digest


def test_trial_version_changes_no_models(harness: SelfUpdateHarness) -> None:
    """While a version is on trial, no model is fetched or activated: if it is rolled back, the previous one finds the
    folder as it left it."""
    machine = on(harness, A)
    machine.offer(harness.say(B)).settle(lambda now: harness.again > 0)
    machine.stop()
    trial = harness.start()
    trial.offer(harness.say(B, model=False))

    trial.settle(lambda now: any(isinstance(step, Commit) for step in now.steps))

    assert {type(step).__name__ for step in trial.steps} <= {"AcceptStatement", "Report", "Commit"}
    assert trial.running == harness.model.digest
    trial.settle()
    assert trial.running == "", "the model is retired now"


def test_version_from_a_bundle_needs_no_broker(harness: SelfUpdateHarness, tmp_path: Path) -> None:
    """Where the previous version had no broker connection either, serving the same models is enough."""
    machine = on(harness, A)
    machine.disconnect_broker()
    harness.say(B)
    machine.updater.on_bundle("1", str(harness.bundle(tmp_path / "stick", harness.model.digest, B.digest)))
    harness.again = 0
    machine.settle(lambda now: harness.again > 0)
    machine.stop()

    trial = harness.start(online=False).settle()

    assert harness.runs(trial) == B.digest and VersionStore(harness.data).read().committed == B.digest


def test_restarts_by_the_operator_do_not_end_a_trial(harness: SelfUpdateHarness) -> None:
    """Restarted five times before it was found healthy: no reason to roll back."""
    machine = on(harness, A)
    machine.offer(harness.say(B)).settle(lambda now: harness.again > 0)
    machine.stop()
    for _ in range(5):
        harness.start().stop()
    assert harness.runs(harness.settle(harness.start())) == B.digest


def test_health_time_restarts_at_each_connection(harness: SelfUpdateHarness) -> None:
    """On an unsteady link the health time counts from the last connection on."""
    machine = on(harness, A)
    machine.offer(harness.say(B)).settle(lambda now: harness.again > 0)
    machine.stop()
    trial = harness.start()
    trial.settle(lambda now: now.step() is None)
    trial.time += HEALTH_S - 1
    trial.updater.on_connection(False)
    trial.updater.on_connection(True)
    trial.time += HEALTH_S - 1

    assert not any(isinstance(trial.step(), (Commit, RollBack)) for _ in range(3))
    trial.time += 1
    trial.settle()
    assert VersionStore(harness.data).read().committed == B.digest


def test_version_absent_from_the_statement_keeps_running(harness: SelfUpdateHarness) -> None:
    """A statement without an agent release does not remove the running one: some version must run."""
    machine = on(harness, A)
    machine = harness.settle(machine.offer(harness.say(None)))
    assert harness.runs(machine) == A.digest and all(state.model != AGENT_MODEL for state in machine.reports[-1][1])
    assert VersionStore(harness.data).damage(A.digest) == ""


def test_agent_update_without_launcher_is_refused_with_advice(harness: SelfUpdateHarness) -> None:
    """An agent that was started by hand says what would help; its models are still updated."""
    harness.launcher = False
    harness.say(A)
    machine = harness.settle(harness.start())
    release, state, detail = told(machine)
    assert (release, state) == ("", "failed") and "edgesplit-agent launch" in detail
    assert machine.running == harness.model.digest


def test_model_and_agent_releases_are_not_interchangeable(harness: SelfUpdateHarness) -> None:
    """A statement that mixes them up starts nothing: the release's own manifest decides."""
    machine = on(harness, A)
    harness.source.counter += 1
    mixed = (DesiredRelease(AGENT_MODEL, harness.model.digest), DesiredRelease("tiny", B.digest))
    raw = harness.source.repository.sign_statement(
        Statement(
            device="cam-1", releases=mixed, counter=harness.source.counter, expires=int(harness.source.now + 9_999)
        )
    )
    harness.source.retained = raw

    machine = harness.settle(machine.offer(raw))

    assert harness.runs(machine) == A.digest and machine.running == harness.model.digest
    assert {state.state for state in machine.reports[-1][1]} == {"failed"}


def test_planner_cannot_sign_an_agent_release(harness: SelfUpdateHarness) -> None:
    """Another cut of an agent release is refused by the controller and by every device: it has no plan."""
    recut = AgentRelease("0.4.0", recut_of=A.digest)
    with pytest.raises(TrustError, match="without a plan"):
        harness.source.repository.add_recut(recut.raw)
    with pytest.raises(TrustError, match="without a plan"):
        check_recut(decode_manifest(recut.raw), decode_manifest(A.raw), None)


def test_lost_version_is_reinstalled_from_stored_wheels(harness: SelfUpdateHarness) -> None:
    """After file loss on the card the installed version starts, and reinstalls the other from the signed wheels."""
    on(harness, A).off()
    (VersionStore(harness.data).version_folder(A.digest) / "bin" / "python").write_bytes(b"rot")

    first = harness.start(online=False)
    assert harness.runs(first) == "" and first.running == harness.model.digest
    first.settle(lambda now: harness.again > 0)
    first.stop()
    healed = harness.settle(harness.start())

    assert harness.runs(healed) == A.digest and VersionStore(harness.data).damage(A.digest) == ""
    assert not first.sent and not healed.sent


def test_old_versions_are_removed(harness: SelfUpdateHarness) -> None:
    """The previous version is removed once the next one is committed."""
    machine = on(harness, A)
    harness.settle(machine.offer(harness.say(B)))
    shelf = VersionStore(harness.data)
    assert [entry.name for entry in shelf.folder.iterdir()] == [B.digest]
