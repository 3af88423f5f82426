"""Releases that do not live: on trial, thrown back, or taking the whole agent down (reference faults A2, A3, C14, C15).

The agent's real parts in one process, with time that a test moves (`support.device_storage`). `Died` ends a start as a
segmentation fault or a kill by the kernel would: nothing is tidied up.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgesplit.errors import InferenceFailed, LinkError
from edgesplit_agent.state.slots import ENOUGH_ANSWERS, FAILURES_IN_A_ROW, UNHEALTHY_STARTS
from edgesplit_agent.updates.reconciler import Activate, RollBack, Verify
from support.device_storage import DAY, HEALTH_S, NOW, Died, Machine, Source, Tiny, imaginary_disks

V1, V2, V3 = Tiny(1), Tiny(2, factor=3.0), Tiny(3, factor=4.0)
DEADLY = "ends the process at load"


class Device:
    """One device that is started again and again."""

    def __init__(self, folder: Path) -> None:
        self.source = Source(folder / "repository")
        self.source.add(V1, V2, V3)
        self.data = folder / "device"
        self.data.mkdir()
        self.moods: dict[int, str] = {}
        self.is_silent = False
        """Whether the local endpoint does not answer."""
        self.machine: Machine | None = None

    def start(self, *, online: bool = True) -> Machine:
        """Power on; whatever ran before is off."""
        if self.machine is not None:
            self.machine.off()
        self.machine = Machine(self.data, self.source, self.moods, check_endpoint=self._check_endpoint)
        return self.machine.boot(online=online)

    def _check_endpoint(self) -> None:
        if self.is_silent:
            raise LinkError("the local endpoint does not answer")

    def committed_to(self, made: Tiny) -> Machine:
        self.source.say(made)
        machine = self.start().settle()
        assert machine.standing.committed == {"tiny": made.digest} and machine.standing.starts == 0
        return machine

    def on_trial(self, made: Tiny) -> Machine:
        machine = self.committed_to(V1).offer(self.source.say(made))
        machine.settle(lambda now: now.running == made.digest)
        assert machine.standing.trials == {"tiny": made.digest}
        return machine

    def dies(self) -> None:
        """A start that takes the process with it, while it boots or soon after."""
        with pytest.raises(Died):
            self.start().settle()


@pytest.fixture
def device() -> Iterator[Device]:
    with imaginary_disks() as folder:
        yield Device(folder)


def test_a_release_is_committed_after_it_was_healthy_for_a_while(device: Device) -> None:
    """Until then it is reported as on trial, and the release before it lies whole beside it; afterwards that is
    deleted."""
    machine = device.on_trial(V2)
    machine.step()
    assert machine.state.state == "trial"
    assert (machine.folder.releases / V1.digest).exists()

    machine.time += HEALTH_S - 1
    assert machine.settle(lambda now: True).standing.trials
    machine.settle()
    assert machine.standing.committed == {"tiny": V2.digest} and machine.state.state == "running"
    assert not (machine.folder.releases / V1.digest).exists()


def test_a_trial_that_began_at_an_odd_moment_waited_for_ever(device: Device) -> None:
    """60.1 + 10 is 70.1, and 70.1 - 60.1 is less than 10: the moment to wake at is the moment to commit."""
    device.source.say(V1)
    machine = device.start()
    machine.time = 60.1
    assert machine.settle().standing.committed == {"tiny": V1.digest}


def test_enough_successful_requests_end_a_trial_early(device: Device) -> None:
    """So many requests answered in a row are worth the wait."""
    machine = device.on_trial(V2)
    began = machine.time
    assert machine.failed_requests(ENOUGH_ANSWERS) == []
    machine.settle(lambda now: not now.standing.trials)
    assert machine.standing.committed == {"tiny": V2.digest} and machine.time == began


def test_a_failure_whose_golden_inputs_fail_too_brings_the_old_one_back_at_once(device: Device) -> None:
    """One failed request, one look at the golden inputs: the old release answers the next request."""
    machine = device.on_trial(V2)
    device.moods[2] = "fails"
    assert isinstance(machine.failed_requests()[0], InferenceFailed)
    machine.settle(lambda now: now.running == V1.digest)
    assert machine.failed_requests() == []
    machine.settle()
    assert machine.state.state == "rolled back" and "golden" in machine.state.detail
    assert machine.standing.committed == {"tiny": V1.digest} and not machine.standing.trials


def test_a_failure_that_the_golden_inputs_do_not_confirm_prolongs_the_trial(device: Device) -> None:
    """It may be the application's input: the clock begins anew, and the release is not blamed."""
    machine = device.on_trial(V2)
    machine.time += HEALTH_S / 2
    machine.updater.on_device_run(V2.digest, InferenceFailed("a strange input"))
    failed_at = machine.time
    machine.settle(lambda now: not now.standing.trials)
    assert machine.running == V2.digest and machine.time >= failed_at + HEALTH_S


def test_consecutive_failures_roll_a_trial_back_whatever_its_golden_inputs_say(device: Device) -> None:
    """It passes what it was tried with and fails whatever it is really asked."""
    machine = device.on_trial(V2)
    for _ in range(FAILURES_IN_A_ROW):
        machine.updater.on_device_run(V2.digest, InferenceFailed("out of memory"))
    machine.settle()
    assert machine.running == V1.digest
    assert "out of memory" in machine.state.detail and machine.state.state == "rolled back"


def test_a_rollback_needs_no_network(device: Device) -> None:
    """The link is gone while the release on trial fails."""
    machine = device.on_trial(V2)
    machine.updater.on_connection(False)
    device.moods[2] = "fails"
    machine.failed_requests()
    machine.settle()
    assert machine.running == V1.digest and machine.failed_requests() == []


def test_a_rollback_does_not_wait_for_a_download(device: Device) -> None:
    """The next release is being fetched, for ever, while the one on trial fails: the old one is back between chunks."""
    machine = device.on_trial(V2)
    device.moods[2] = "fails"

    class Slow(dict[str, bytes]):
        def __contains__(self, sha256: object) -> bool:
            machine.failed_requests()  # the application goes on asking, from its own thread
            raise LinkError("a link that drips")

    good, device.source.chunks = device.source.chunks, Slow(device.source.chunks)
    machine.offer(device.source.say(V3)).settle(lambda now: now.running == V1.digest)
    device.source.chunks = good
    machine.settle()
    assert machine.running == V3.digest


def test_a_failed_release_is_retried_only_under_a_newer_statement(device: Device) -> None:
    """Across restarts, and however often the broker repeats it; the operator's next word forgives."""
    machine = device.on_trial(V2)
    device.moods[2] = "fails"
    machine.failed_requests()
    machine.settle()
    for _ in range(3):
        machine = device.start().settle()
        assert machine.running == V1.digest and machine.state.state == "rolled back"
        assert not {Activate("tiny", V2.digest), Verify(V2.digest)} & set(machine.steps)
    device.moods.clear()
    machine.offer(device.source.say(V2)).settle()
    assert machine.running == V2.digest and machine.state.state == "running"


def test_a_trial_that_crashes_the_process_is_rolled_back_after_three_starts(device: Device) -> None:
    """A3: what crashes after its golden inputs, at each start: counted before it is loaded; the fourth runs the old."""
    device.on_trial(V2)
    device.moods[2] = DEADLY
    for _ in range(UNHEALTHY_STARTS - 1):  # the start in which it was activated is the first
        device.dies()
    machine = device.start().settle()
    assert machine.running == V1.digest and machine.failed_requests() == []
    assert machine.state.state == "rolled back" and "3 starts" in machine.state.detail
    assert machine.standing.starts == 0


def test_a_release_that_crashes_the_process_at_its_first_load_is_given_up(device: Device) -> None:
    """C14: its first load takes the agent down, again and again; the old one runs between, and then for good."""
    machine = device.committed_to(V1)
    device.moods[2] = DEADLY
    device.source.say(V2)
    for _ in range(UNHEALTHY_STARTS):
        device.dies()
    machine = device.start().settle()
    assert machine.running == V1.digest and machine.state.state == "rolled back"
    assert "ended 3 times while loading it" in machine.state.detail and not machine.standing.safe_mode


def test_a_committed_release_that_crashes_ends_in_safe_mode_until_a_new_statement(device: Device) -> None:
    """Nothing older is here: the agent lives without a model, says so, and takes the next deployment."""
    device.committed_to(V1)
    device.moods[1] = DEADLY
    for _ in range(UNHEALTHY_STARTS):
        device.dies()
    for _ in range(UNHEALTHY_STARTS + 2):  # it stays there, and is not loaded
        machine = device.start().settle()
        assert machine.running == "" and not machine.loaded
    assert machine.state.state == "safe mode" and "3 starts" in machine.reports[-1][2]

    with pytest.raises(Died):  # said anew: it may have been the power, so it is tried once more
        machine.offer(device.source.say(V1)).settle()
    for _ in range(UNHEALTHY_STARTS):
        device.dies()
    machine = device.start().settle()
    assert machine.running == "" and machine.state.state == "safe mode", "it was not the power"

    machine.offer(device.source.say(V2)).settle()
    assert machine.running == V2.digest and machine.reports[-1][2] == ""


def test_repeated_power_cuts_cost_no_more_than_a_new_deployment(device: Device) -> None:
    """Three starts cut short by the power look like three deaths: safe mode, until the controller says it anew."""
    device.committed_to(V1)
    for _ in range(UNHEALTHY_STARTS + 1):
        machine = device.start(online=False)
    assert machine.standing.safe_mode and machine.running == ""
    machine.connect_broker()
    assert machine.settle().running == "", "what was said before is no news"
    machine.offer(device.source.say(V1)).settle()
    assert machine.running == V1.digest and not machine.standing.safe_mode and machine.state.state == "running"


def test_crashes_of_the_trial_and_of_the_release_before_it_end_in_safe_mode(device: Device) -> None:
    """Three starts for the release on trial, three for the one before it, then none is loaded (a broken runtime)."""
    device.on_trial(V2)
    device.moods.update({1: DEADLY, 2: DEADLY})
    starts = 0
    while True:
        starts += 1
        try:
            machine = device.start().settle()
            break
        except Died:
            continue
    assert starts == (UNHEALTHY_STARTS - 1) + UNHEALTHY_STARTS + 1
    assert machine.running == "" and machine.standing.safe_mode
    device.moods.clear()
    assert machine.offer(device.source.say(V3)).settle().running == V3.digest


def test_a_clean_stop_does_not_count_as_an_unhealthy_start(device: Device) -> None:
    """An operator who restarts a device ten times while a release is on trial does not lose it."""
    machine = device.on_trial(V2)
    for _ in range(10):
        machine.stop()
        device.machine = None
        machine = device.start(online=False)
        assert machine.running == V2.digest
    assert machine.standing.starts <= 2


def test_a_power_cut_of_a_healthy_start_does_not_count_as_unhealthy(device: Device) -> None:
    """Every start lives for a while, without any network, and ends without a word: nothing is blamed for it."""
    device.committed_to(V1)
    for _ in range(10):
        machine = device.start(online=False).settle()
        assert machine.running == V1.digest and machine.standing.starts == 0


def test_a_trial_is_committed_without_any_network(device: Device) -> None:
    """Activated, then the van drives off: it becomes healthy all the same."""
    device.on_trial(V2)
    machine = device.start(online=False).settle()
    assert machine.standing.committed == {"tiny": V2.digest}


def test_an_endpoint_that_does_not_answer_commits_nothing(device: Device) -> None:
    """A release that serves nobody was not found healthy; once applications are answered again it is."""
    machine = device.on_trial(V2)
    device.is_silent = True
    machine.settle(lambda now: now.time > 10 * HEALTH_S)
    assert machine.standing.trials == {"tiny": V2.digest}
    device.is_silent = False
    assert machine.settle().standing.committed == {"tiny": V2.digest}


@pytest.mark.parametrize("stuck", ["fetching", "trial", "refused", "rolled back", "safe mode", "no room"])
def test_a_new_deployment_supersedes_a_stuck_one(device: Device, stuck: str) -> None:
    """F3: whatever state the device is in, the next statement's release runs."""
    machine = device.committed_to(V1)
    chunks = device.source.chunks
    if stuck == "fetching":
        device.source.chunks = {}
        machine.offer(device.source.say(V2)).settle(hours=0.1)
    elif stuck == "trial":
        machine = device.on_trial(V2)
        machine.updater.on_device_run(V2.digest, InferenceFailed("now and then"))
    elif stuck == "refused":
        machine.offer(device.source.say(Tiny(9))).settle(hours=0.1)  # nobody signed it
    elif stuck == "rolled back":
        machine = device.on_trial(V2)
        for _ in range(FAILURES_IN_A_ROW):
            machine.updater.on_device_run(V2.digest, InferenceFailed("always"))
        machine.settle()
        assert any(isinstance(step, RollBack) for step in machine.steps)
    elif stuck == "safe mode":
        device.moods[1] = DEADLY
        for _ in range(UNHEALTHY_STARTS):
            device.dies()
        machine = device.start().settle()
        assert machine.standing.safe_mode
    else:
        machine.store.make_room = lambda *of: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        machine.offer(device.source.say(V2)).settle(hours=0.1)
        assert "No space" in machine.state.detail
        del machine.store.make_room
    device.source.chunks = chunks
    machine.offer(device.source.say(V3)).settle()
    assert machine.running == V3.digest and machine.state.state == "running" and machine.failed_requests() == []


@pytest.mark.parametrize("years", [-10, 10])
def test_a_wrong_clock_keeps_the_running_release(device: Device, years: int) -> None:
    """A12, C8: started with a clock ten years off, without a network, then with one: what runs goes on in any case; by
    a clock that is ahead nothing is installed, and once it is right the update comes by itself."""
    device.committed_to(V1)
    device.source.say(V2)
    machine = device.start(online=False)
    machine.wall = lambda: NOW + years * 365 * DAY
    assert machine.running == V1.digest
    machine.connect_broker()
    machine.settle(hours=0.1)
    if years > 0:
        assert machine.running == V1.digest and "expired" in machine.reports[-1][3]
        machine.wall = lambda: NOW
        machine.settle()
        assert machine.reports[-1][3] == ""
    assert machine.running == V2.digest


def test_a_clock_that_jumps_back_during_a_session_forgets_nothing(device: Device) -> None:
    """A12: counters and session numbers do not fall, an older statement stays refused, and a trial comes to its end."""
    machine = device.on_trial(V2)
    older = device.source.say(V1)
    newer = device.source.say(V2)
    session = machine.folder.next_session(machine.wall())
    machine.wall = lambda: NOW - 10 * 365 * DAY
    machine.offer(newer).settle()
    machine.offer(older).settle()
    assert machine.running == V2.digest and "older than" in machine.reports[-1][3]
    assert machine.standing.committed == {"tiny": V2.digest}
    assert machine.folder.next_session(machine.wall()) > session


def test_expired_metadata_keeps_and_installs_nothing(device: Device) -> None:
    """C5, C7: the controller was away for a year: what runs runs through restarts; fresh metadata brings the update."""
    device.committed_to(V1)
    statement = device.source.say(V2, lasts_s=1000 * DAY)
    machine = device.start(online=False)
    machine.wall = lambda: NOW + 365 * DAY
    machine.updater.on_connection(True)
    machine.offer(statement).settle(hours=0.2)
    assert machine.running == V1.digest and machine.failed_requests() == [] and "expired" in machine.reports[-1][3]
    device.source.now = NOW + 365 * DAY
    device.source.repository.renew()
    machine.settle()
    assert machine.running == V2.digest
