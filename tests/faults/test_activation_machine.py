"""Anything may follow anything: deployments good and bad, replays and forgeries, power cuts, stops, lost links, clocks.

A state machine of hypothesis drives the agent's real parts (`support.device_storage`), with time that it moves. After
each move:
nothing runs that was not signed, no counter falls, what was committed lies here whole until something else is, a bad
release does not run, and in the end the newest statement that was believed is what runs.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgesplit.release.manifest import DesiredRelease, Statement
from edgesplit.release_store import open_release
from edgesplit_agent.updates.reconciler import Retire, next_step
from support.device_storage import DAY, MODEL, NOW, Died, Machine, Source, Tiny, imaginary_disks

EXAMPLES = int(os.environ.get("EDGESPLIT_ACTIVATION_EXAMPLES", "25"))
GOOD = [Tiny(1), Tiny(2, factor=3.0), Tiny(3, factor=4.0)]
WRONG = Tiny(4, golden=9.0)
SICK, DEADLY = Tiny(5), Tiny(6)
UNSIGNED = Tiny(7)
LAST = [Tiny(8, factor=5.0), Tiny(9, factor=6.0), Tiny(10, factor=7.0)]
SIGNED = [*GOOD, WRONG, SICK, DEADLY, *LAST]


class Signed:
    """One signed world for all examples: making keys takes longer than an example."""

    source: Source
    folder: Path


class Activation(RuleBasedStateMachine):
    """One device, one model."""

    def __init__(self) -> None:
        super().__init__()
        self.source = Signed.source
        self.source.retained = None
        self.data = Signed.folder / uuid.uuid4().hex
        self.data.mkdir()
        self.said: list[bytes] = []
        self.highest = 0
        self.committed = ""
        self.retired = False
        self.starting = {6: "ends the process at load"}
        self.moods: dict[int, str] = dict(self.starting)

    @initialize()
    def first_start(self) -> None:
        self.machine = self._started(online=True)

    def teardown(self) -> None:
        if hasattr(self, "machine"):
            self.machine.off()
        shutil.rmtree(self.data)

    def _started(self, *, online: bool) -> Machine:
        self.moods = dict(self.starting)
        while True:
            machine = Machine(self.data, self.source, self.moods)
            try:
                return machine.boot(online=online)
            except Died:
                machine.off()

    def _alive(self, act: Callable[[], object]) -> None:
        """Carry something out; if it takes the process with it, start again."""
        try:
            act()
        except Died:
            self._remember_retirement()
            self.machine.off()
            self.machine = self._started(online=True)
        self._remember_retirement()

    def _remember_retirement(self) -> None:
        want, _ = self.machine.updater.snapshot
        nothing_wanted = want is not None and not want.releases
        self.retired = self.retired or nothing_wanted or any(isinstance(one, Retire) for one in self.machine.steps)
        self.machine.steps.clear()

    # What may happen

    @rule(made=st.sampled_from([*GOOD, *GOOD, WRONG, SICK, DEADLY]))
    def deploy(self, made: Tiny) -> None:
        self.said.append(self.source.say(made))
        self.machine.offer(self.said[-1])

    @rule()
    def deploy_nothing(self) -> None:
        self.said.append(self.source.say())
        self.machine.offer(self.said[-1])

    @rule()
    def deploy_what_nobody_signed(self) -> None:
        self.said.append(self.source.say(UNSIGNED))
        self.machine.offer(self.said[-1])

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        self.machine.offer(data.draw(st.sampled_from(self.said)))

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def forge(self, data: st.DataObject) -> None:
        raw = bytearray(self.said[-1])
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
        self.machine.offer(bytes(raw))

    @rule()
    def another_devices(self) -> None:
        self.source.counter += 1
        statement = Statement(
            device="cam-2",
            releases=(DesiredRelease(MODEL, GOOD[0].digest),),
            counter=self.source.counter,
            expires=2**40,
        )
        self.machine.offer(self.source.repository.sign_statement(statement))

    @rule(steps=st.integers(1, 8))
    def work(self, steps: int) -> None:
        for _ in range(steps):
            self._alive(self.machine.step)

    @rule(seconds=st.sampled_from([0.1, 5.0, 11.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.machine.time += seconds

    @rule(times=st.integers(1, 25))
    def ask(self, times: int) -> None:
        if self.machine.running == SICK.digest:
            self.moods[5] = "fails"
        if self.machine.running:
            errors = self.machine.failed_requests(times)
            assert not errors or self.machine.running == SICK.digest

    @rule(online=st.booleans())
    def power_cut(self, online: bool) -> None:
        self.machine.off()
        self.machine = self._started(online=online)

    @rule()
    def clean_stop(self) -> None:
        self.machine.stop()
        self.machine = self._started(online=True)

    @rule(online=st.booleans())
    def link(self, online: bool) -> None:
        if online:
            self.machine.connect_broker()
        else:
            self.machine.updater.on_connection(False)

    @rule(years=st.sampled_from([-10, -1, 0, 0, 1, 10]))
    def clock(self, years: int) -> None:
        self.machine.wall = lambda: NOW + years * 365 * DAY

    @rule()
    def come_to_rest(self) -> None:
        """With a link and the right clock: what is believed runs, unless it is bad, and then what was before it."""
        self.machine.wall = lambda: NOW
        self.machine.connect_broker()
        self._alive(lambda: self.machine.settle(hours=0.1))

    @rule()
    def deploy_and_come_to_rest(self) -> None:
        """Whatever state it is in: the newest deployment wins. (In safe mode: of another release than it is about.)"""
        last = next(one for one in LAST if one.digest not in self.machine.standing.held)
        self.said.append(self.source.say(last))
        self.machine.wall = lambda: NOW
        self.machine.connect_broker()
        for _ in range(9):  # a release that is deadly may still be on its way
            self._alive(lambda: self.machine.settle(hours=1))
        assert self.machine.running == last.digest, self.machine.reports[-1]
        assert self.machine.standing.committed == {MODEL: last.digest} and not self.machine.standing.safe_mode

    # What must hold

    @invariant()
    def nothing_unsigned(self) -> None:
        if hasattr(self, "machine"):
            assert not self.machine.strangers()
            assert self.machine.running in {"", *(one.digest for one in SIGNED)}
            assert self.machine.running != WRONG.digest, "it never answered its golden input"

    @invariant()
    def no_counter_falls(self) -> None:
        if hasattr(self, "machine"):
            counter = self.machine.activation.counter
            assert counter >= self.highest
            self.highest = counter

    @invariant()
    def what_was_committed_is_here(self) -> None:
        if not hasattr(self, "machine"):
            return
        standing = self.machine.standing
        committed = standing.committed.get(MODEL, "")
        if committed:
            opened = open_release(self.machine.folder.releases, committed, self.source.root)
            assert opened.has_slices({"a", "b"}), "the committed release is not whole"
            busy = next_step(*self.machine.updater.snapshot, self.machine.time) is not None  # safe mode has just ended
            assert self.machine.running or standing.safe_mode or self.retired or busy, (
                "what is whole and healthy does not run"
            )
        if self.committed and not committed:
            assert self.retired, "nothing healthy is left, and nobody asked for that"
        self.committed, self.retired = committed, False

    @invariant()
    def what_is_bad_does_not_run(self) -> None:
        if hasattr(self, "machine"):
            assert self.machine.running not in self.machine.activation.rejected


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with imaginary_disks() as folder:
        Signed.source = Source(folder / "repository")
        Signed.source.add(*SIGNED)
        Signed.folder = folder
        yield


TestActivation = Activation.TestCase
TestActivation.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
