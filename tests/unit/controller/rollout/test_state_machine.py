"""Invariants of rollouts under random orders of deployments, commands, reports, silence and restarts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import select

from edgesplit_controller.errors import Conflict
from edgesplit_controller.rollout.commands import COMMANDS, Verb
from edgesplit_controller.rollout.states import IN_PROGRESS
from edgesplit_controller.rollout.terms import Portion
from edgesplit_controller.storage.tables.core import Desired
from support.rollout_harness import BAD, NEW, NEWER, OLD, RolloutHarness

EXAMPLES = int(os.environ.get("EDGESPLIT_ROLLOUT_EXAMPLES", "6"))
"""`make soak` tries more."""
DEVICES = 6
ASKED = (
    {},
    {"stages": ("1",)},
    {"stages": ("1", "50%"), "abort_when_failed": "1", "device_timeout": "5m"},
    {"stages": ("50%",), "abort_when_failed": "50%", "when_failed": "rollback", "device_timeout": "5m"},
    {"stages": ("2",), "next_when_succeeded": "50%", "approve_stages": (2,), "device_timeout": "5m"},
    {"rate": "2/min", "abort_when_failed": "never"},
    {"device_timeout": "5m", "timeouts_count": "all", "abort_when_failed": "34%"},
)


class Rollouts(RuleBasedStateMachine):
    """Operators, devices and time against one controller."""

    world: RolloutHarness
    examples = 0

    @initialize()
    def enrol(self) -> None:
        """Devices of their own for each example; what earlier ones left has ended."""
        type(self).examples += 1
        self.names = [f"d{self.examples}-{number}" for number in range(DEVICES)]
        self.world.fleet.clear()
        self.world.enrol(*self.names)
        self.made: dict[int, tuple[str, set[str]]] = {}
        self.governed = dict.fromkeys(self.names, 0)

    @precondition(lambda self: len(self.made) < 8)
    @rule(release=st.sampled_from([NEW, NEWER, BAD]), asked=st.sampled_from(ASKED), some=st.integers(1, 2**DEVICES - 1))
    def deploy(self, release: str, asked: dict[str, object], some: int) -> None:
        """An operator brings a release to some devices, whatever else is on its way."""
        names = [name for place, name in enumerate(self.names) if some >> place & 1]
        self.made[self.world.deploy(release, names, **asked)] = release, set(names)

    @rule(some=st.integers(0, 2**DEVICES - 1), times=st.integers(1, 3))
    def work(self, some: int, times: int) -> None:
        """Some devices go on, and say so."""
        for _ in range(times):
            for place, name in enumerate(self.names):
                if some >> place & 1:
                    self.world.fleet[name].work(self.world.bad)
            self.world.speak()

    @rule(seconds=st.sampled_from([0.5, 5.0, 61.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        """The loop looks."""
        self.world.step(seconds)
        for shown in self.world.rollouts.list_views(20):
            if shown["id"] in self.made and shown["state"] == "running":
                self._check_threshold(shown)

    def _check_threshold(self, shown: dict) -> None:  # type: ignore[type-arg]
        """A stage that has reached its threshold tells nobody any more."""
        asked = shown["terms"]["abort_when_failed"]
        for stage in shown["stages"][: shown["stage"]]:
            left = sum(stage["states"].get(state, 0) for state in ("skipped", "superseded"))
            if asked:
                part = Portion(part=float(asked[:-1]) / 100) if asked.endswith("%") else Portion(count=int(asked))
                assert not stage["failures"] or stage["failures"] < part.of(stage["devices"] - left)

    @rule(place=st.integers(0, DEVICES - 1), mood=st.sampled_from(["good", "silent", "stuck"]))
    def mood(self, place: int, mood: str) -> None:
        """A device falls silent, hangs, or comes back and hears what is retained."""
        self.world.fleet[self.names[place]].mood = mood  # type: ignore[assignment]
        if mood == "good":
            self.world.announce([self.names[place]])

    @precondition(lambda self: self.made)
    @rule(data=st.data(), verb=st.sampled_from(sorted(COMMANDS)))
    def command(self, data: st.DataObject, verb: Verb) -> None:
        """An operator says something, fitting or not."""
        try:
            self.world.rollouts.command(data.draw(st.sampled_from(sorted(self.made))), verb)
        except Conflict:
            return

    @rule()
    def restart(self) -> None:
        """The controller's session with the broker begins anew: everybody hears again what is stored."""
        self.world.state_all()

    @invariant()
    def nobody_goes_below_its_counter(self) -> None:
        """What a device is told never falls."""
        assert not self.world.broken()

    @invariant()
    def nobody_else_is_touched(self) -> None:
        """A device only ever runs what a rollout that names it brought."""
        for name, device in self.world.fleet.items():
            brought = {release for release, names in self.made.values() if name in names}
            assert device.ran <= {OLD} | brought

    @invariant()
    def nobody_is_left_empty(self) -> None:
        """There is always something that it runs well, and something that it shall run; a bad release never is the
        former."""
        for device in self.world.fleet.values():
            assert device.runs and device.wanted and device.runs != BAD

    @invariant()
    def the_newest_word_counts(self) -> None:
        """Who says what a device shall run is never an older rollout than before."""
        with self.world.database.read() as session:
            rows = session.scalars(select(Desired).where(Desired.device.in_(self.names))).all()
        for row in rows:
            assert row.deployment >= self.governed[row.device]
            self.governed[row.device] = row.deployment

    def teardown(self) -> None:
        """Once everybody answers again, every rollout ends, and every device runs well what it shall run."""
        if not hasattr(self, "made"):
            return
        for device in self.world.fleet.values():
            device.mood = "good"
        self.world.state_all()
        for _ in range(40):
            for shown in self.world.rollouts.list_views(20):
                verb = {"paused": "resume", "waiting": "approve"}.get(shown["state"])
                if verb and shown["id"] in self.made:
                    self.world.rollouts.command(shown["id"], verb)  # type: ignore[arg-type]
            self.world.settle(seconds=61.0, most=10)
            if not self.world.active:
                break
        stuck = {number: self.world.members(number) for number in self.world.active}
        assert not stuck, stuck
        self.world.work(times=4)
        for name, device in self.world.fleet.items():
            assert device.runs == device.wanted or (device.wanted == BAD and device.state == "rolled back"), name
        for number in self.made:
            for name, member in self.world.members(number).items():
                assert member["state"] not in (*IN_PROGRESS, "queued") and not member["rolls_back"], name
        self.nobody_goes_below_its_counter()


@pytest.fixture
def world() -> Iterator[RolloutHarness]:
    with tempfile.TemporaryDirectory(prefix="es-rollouts-") as folder:
        yield RolloutHarness(Path(folder))


def test_random_operations_keep_the_rollout_invariants(world: RolloutHarness) -> None:
    """Counters never fall, thresholds hold, other devices are untouched, the newer rollout wins, and every rollout
    ends."""

    class Machine(Rollouts):
        pass

    Machine.world = world
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
