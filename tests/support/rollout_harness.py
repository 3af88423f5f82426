"""Rollouts over a real database and director, with devices at the level of messages: they read signed statements, take
them or not by their counter, and report. Time is what the test says it is; nothing here runs by itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import ModelState, Reported
from edgesplit.release.manifest import DesiredRelease, Signed, Statement
from edgesplit_controller.fleet.devices import Devices
from edgesplit_controller.releases.director import Director
from edgesplit_controller.rollout.engine import Rollouts
from edgesplit_controller.rollout.engine import RolloutSpec as WantedRollout
from edgesplit_controller.rollout.gates import Evidence
from edgesplit_controller.rollout.request import RolloutRequest
from edgesplit_controller.rollout.states import Member, Rollout
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Deployment, Desired, Device, Model, ReleaseRow

OLD, NEW, NEWER, BAD = "0" * 64, "1" * 64, "2" * 64, "b" * 64
Mood = Literal["good", "silent", "stuck", "frail"]
"""`silent`: hears nothing. `stuck`: hears, begins to fetch and never ends. `frail`: nothing new runs on it."""


@dataclass
class StandIn:
    """One device: what it was told, what it runs. It keeps its own record of the counter, as agents do."""

    name: str
    model: str
    mood: Mood = "good"
    counter: int = 0
    wanted: str = ""
    runs: str = ""
    """What was found healthy last."""
    state: Literal["assigned", "fetching", "trial", "running", "rolled back"] = "running"
    """How far `wanted` has come."""
    failed: str = ""
    told: list[int] = field(default_factory=list)
    """Counters of everything that it was told."""
    below: list[tuple[int, int]] = field(default_factory=list)
    """(own counter, counter told): each is a promise that was broken."""
    ran: set[str] = field(default_factory=set)

    def hear(self, raw: bytes) -> None:
        """A statement came; one that is older than what it knows is refused."""
        statement = messages.decode(messages.decode(raw, Signed).payload, Statement)
        assert statement.device == self.name
        self.told.append(statement.counter)
        if statement.counter < self.counter:
            self.below.append((self.counter, statement.counter))
            return
        wanted = {release.model: release.release for release in statement.releases}.get(self.model, "")
        self.counter = statement.counter
        if wanted != self.wanted:
            self.wanted, self.failed = wanted, ""
            self.state = "running" if wanted == self.runs else "assigned"

    def work(self, bad: Collection[str]) -> None:
        """One step towards what is wanted; a bad release is found out on trial, and what ran before runs on."""
        if self.state == "assigned" and not self.wanted:
            self.state, self.runs = "running", ""
        elif self.state == "assigned":
            self.state = "fetching"
        elif self.state == "fetching" and self.mood != "stuck":
            self.state = "trial"
            self.ran.add(self.wanted)
        elif self.state == "trial" and (self.wanted in bad or self.mood == "frail"):
            self.state, self.failed = "rolled back", f"golden inputs of {self.wanted[:12]} differ by 0.25"
        elif self.state == "trial":
            self.state, self.runs = "running", self.wanted

    def report(self) -> Reported | None:
        """What it says of itself; nothing yet of what it was told just now."""
        if self.state == "assigned":
            return None
        runs = self.wanted if self.state in ("trial", "running") else self.runs
        if not runs and not self.wanted:
            return Reported(1, self.counter, ())
        return Reported(1, self.counter, (ModelState(self.model, runs, self.wanted, self.state, self.failed),))


class RolloutHarness:
    """A controller's decisions and a fleet."""

    def __init__(self, folder: Path, *, url: str = "", model: str = "m", **limits: int) -> None:
        self.now = 1_800_000_000.0
        self.model = model
        self.bad: set[str] = {BAD}
        self.fleet: dict[str, StandIn] = {}
        self.evidence: dict[str, Mapping[str, Any]] = {}
        """What is known of a device besides what it reports, by device."""
        self.database = Database(url or f"sqlite:///{folder / 'controller.db'}")
        self.devices = Devices(self.database, stale_after_s=30.0, now=lambda: self.now)
        self.director = Director(self.database, sign, statement_s=86_400, now=lambda: self.now)
        self.rollouts = Rollouts(
            self.database, self.director, now=lambda: self.now, announce=self.announce, evidences=self._known, **limits
        )
        with self.database.write() as session:
            if session.query(Model).count() == 0:
                session.add(Model(
                    id=1, name=model, version=1, sha256="", optimised_sha256="", bytes=0, input_text="", bindings={},
                    shown={}, created=0.0,
                ))  # fmt: skip
                session.flush()
                session.add_all(
                    ReleaseRow(digest=release, model_id=1, created=0.0, options={})
                    for release in (OLD, NEW, NEWER, BAD)
                )

    def _known(self, _session: object, rollout: Rollout, members: Collection[Member]) -> Mapping[str, Evidence]:
        return {
            member.name: Evidence(model=rollout.model, release=rollout.release, **self.evidence[member.name])
            for member in members
            if member.name in self.evidence
        }

    # ---- the fleet ------------------------------------------------------------------------------------------------

    def enrol(self, *names: str, runs: str = OLD, group: str = "", **labels: str) -> None:
        """Devices that are online and run something already, as an earlier deployment left them."""
        with self.database.write() as session:
            before = Deployment(
                release=runs or OLD, model=f"{self.model}@1", targets=[], devices=[], options={}, created=self.now
            )
            session.add(before)
            session.flush()
            for name in names:
                device = self.fleet[name] = StandIn(name, self.model, runs=runs, wanted=runs)
                row = Device(
                    name=name, device_class="raspberrypi4", group=group, labels=labels, link="", enrolled=self.now,
                    certificate_serial="", public_key_sha256="", session=1, alive=True, last_seen=self.now,
                )  # fmt: skip
                session.add(row)
                if runs:
                    device.counter = row.counter = int(self.now)
                    row.statement_expires = self.now + 86_400
                    row.statement = sign(Statement(
                        device=name, releases=(DesiredRelease(self.model, runs),), counter=row.counter,
                        expires=int(row.statement_expires),
                    ))  # fmt: skip
            session.flush()
            if runs:
                session.add_all(
                    Desired(device=name, model=self.model, release=runs, deployment=before.id) for name in names
                )

    def announce(self, names: Iterable[str]) -> None:
        """What the broker would carry."""
        for name, raw in self.director.statements(list(names)).items():
            if raw and self.fleet[name].mood != "silent":
                self.fleet[name].hear(raw)

    def state_all(self) -> None:
        """As after a new session with the broker: everybody hears again what is stored."""
        self.announce(list(self.fleet))

    def work(self, *, times: int = 1) -> None:
        """Every device takes a step, and reports."""
        for _ in range(times):
            for device in self.fleet.values():
                device.work(self.bad)
            self.speak()

    def speak(self) -> None:
        """Every device that hears reports."""
        said = [(device.name, device.report()) for device in self.fleet.values() if device.mood != "silent"]
        self.devices.ingest([(name, report) for name, report in said if report is not None])

    # ---- rollouts -------------------------------------------------------------------------------------------------

    def deploy(self, release: str, names: Iterable[str] = (), **asked: Any) -> int:
        """Begin a rollout to these devices (none: to all)."""
        targets = sorted(names) or ["all"]
        chosen = self.devices.select(targets)
        wanted = WantedRollout(release, f"{self.model}@1", chosen, targets, request=RolloutRequest(**asked))
        return self.rollouts.create(wanted).number

    def step(self, seconds: float = 1.0) -> None:
        """Time passes, and the loop looks until it has nothing to do at once."""
        self.now += seconds
        while self.rollouts.step_all():
            pass

    def settle(self, seconds: float = 1.0, until: Callable[[], bool] = lambda: False, most: int = 60) -> None:
        """Devices work and the loop looks until every rollout has ended, or `until` holds."""
        for _ in range(most):
            self.work()
            self.step(seconds)
            if until() or not self.active:
                return

    @property
    def active(self) -> list[int]:
        """Rollouts on their way."""
        return [rollout["id"] for rollout in self.rollouts.list_views(1_000) if rollout["ended"] is None]

    def shown(self, number: int) -> dict[str, Any]:
        """As the API shows it."""
        return self.rollouts.view(number)

    def state(self, number: int) -> str:
        """Of a rollout."""
        return str(self.shown(number)["state"])

    def members(self, number: int) -> dict[str, dict[str, Any]]:
        """Its devices, by name, in the order in which they are told."""
        found: list[dict[str, Any]] = []
        while True:
            after = found[-1]["position"] if found else -1
            more = self.rollouts.device_views(number, states=(), after=after, most=1_000)
            if not more:
                return {item["device"]: item for item in found}
            found += more

    def running(self) -> dict[str, str]:
        """What each device runs."""
        return {name: device.runs for name, device in self.fleet.items()}

    def broken(self) -> list[object]:
        """Devices that were told to go below their counter, or by counters that fell."""
        return [
            (device.name, device.below, device.told)
            for device in self.fleet.values()
            if device.below or device.told != sorted(device.told)
        ]


def sign(statement: Statement) -> bytes:
    """A statement in its envelope; who signed it is not what is tested here."""
    return messages.encode(Signed(messages.encode(statement), ()))
