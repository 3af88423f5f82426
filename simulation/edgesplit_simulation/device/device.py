"""One simulated device: the agent's own folder, trust, chunk store, update loop and uplink, on a hub's tasks; only the
engine and the runtime are made up.

A device is switched on and off, loses its power in the middle of anything, and finds on its disk what it had written.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from edgesplit.errors import EdgeError, LinkError
from edgesplit.links import host_and_port
from edgesplit.mqtt.messages import ModelState, Telemetry
from edgesplit.mqtt.telemetry import Moment, ReleaseHealth
from edgesplit.oip.report import Report
from edgesplit.testing.in_memory_broker import Way
from edgesplit.testing.virtual_time import Ended, Hub, Task, Timer
from edgesplit_agent.control.mqtt_uplink import Connection, Rhythm, Uplink
from edgesplit_agent.releases.chunk_store import ChunkStore
from edgesplit_agent.releases.output_drift import Drift
from edgesplit_agent.state.data_folder import DataFolder, Identity
from edgesplit_agent.telemetry.disk_ring import Ring
from edgesplit_agent.telemetry.outbox import Outbox
from edgesplit_agent.telemetry.windows import telemetry
from edgesplit_agent.updates.actions import Work
from edgesplit_agent.updates.reconciler import Standing, Updater, model_states
from edgesplit_simulation.device.engine import DEADLINE_S, SimulatedEngine, Sky, host_of
from edgesplit_simulation.device.runtime import simulated_hosts
from edgesplit_simulation.device.sensors import Body
from edgesplit_simulation.invariants.checker import Witness
from edgesplit_simulation.invariants.observed_actions import Watched
from edgesplit_simulation.releases import WELL, Mood

QUOTA_BYTES = 2**30


class Vanishing(Connection, Protocol):
    """A connection that may end as power does."""

    def vanish(self) -> None:
        """The client is no more, and nobody is told."""
        ...

    def cut(self) -> None:
        """The way to the broker is cut, and neither side is told."""
        ...

    def mend(self) -> None:
        """It is whole again."""
        ...


@dataclass
class Surroundings:
    """What a device finds around it."""

    hub: Hub
    connect: Callable[..., Vanishing]
    """Makes a session, as `edgesplit_agent.control.mqtt_uplink.Connect`."""
    witness: Witness
    sky: Sky
    mood: Callable[[str, str], Mood] = lambda device, release: WELL
    """How a release behaves on a device."""
    rhythm: Rhythm = field(default_factory=Rhythm)
    health_s: float = 10.0
    slowdown: float = 1.0
    clock_off_s: float = 0.0
    """The device's own clock is ahead by so much."""
    way: Way = field(default_factory=Way)
    """To the broker, where that is in this process."""
    tls: Callable[[DataFolder], ssl.SSLContext | None] = lambda folder: None
    """For a broker that is real."""
    certificate: Callable[[DataFolder], str] = lambda folder: ""
    """Serial number of the certificate in use, where one is shown."""
    keeps_bytes: int = 0
    """Telemetry that waits on its disk while there is no link, at most so much; 0: what cannot be sent is lost."""


class SimulatedDevice:
    """A device that was enrolled. `power_on` before anything else."""

    def __init__(self, folder: DataFolder, identity: Identity, around: Surroundings) -> None:
        self.folder = folder
        self.identity = identity
        self.around = around
        self.card = identity.device
        """Its own name, or that of a copy."""
        self.trouble = ""
        """Why it is not expected to answer: what was done to its disk."""
        self.hangs = False
        """It is connected, and does nothing."""
        self.starts = 0
        self._damaged_in = 0
        self.requests = 0
        self._on: _Powered | None = None

    @property
    def name(self) -> str:
        """The device's."""
        return self.identity.device

    @property
    def is_on(self) -> bool:
        """It has power, and its agent runs."""
        return self._on is not None

    @property
    def is_connected(self) -> bool:
        """The broker has let it in."""
        return self._on is not None and self._on.uplink.connected

    @property
    def session_number(self) -> int:
        """Of its newest connection, or try at one; 0 without power."""
        return 0 if self._on is None else self._on.uplink.session_number

    @property
    def running(self) -> dict[str, str]:
        """Release by model, as it answers now."""
        return {} if self._on is None else {m: one.digest for m, one in self._on.engine.serving.items()}

    @property
    def standing(self) -> Standing:
        """What is on its disk and served; empty without power."""
        return Standing() if self._on is None else self._on.hands.standing()

    @property
    def states(self) -> tuple[ModelState, ...]:
        """What it reports of each model."""
        return () if self._on is None else self._on.states

    @property
    def safe_mode(self) -> str:
        """Why no model is loaded."""
        return self.standing.safe_mode

    def power_on(self) -> None:
        """Start the agent on what its disk holds."""
        if self._on is None:
            self.starts += 1
            on = self._on = _Powered(self)
            on.boot()

    def power_cut(self) -> None:
        """The agent ends here and now; its peers find out by their own means."""
        on, self._on = self._on, None
        if on is not None:
            on.end()

    def stop(self) -> None:
        """As at SIGTERM."""
        on, self._on = self._on, None
        if on is not None:
            on.stop()

    def ask(self, model: str, deadline_s: float = DEADLINE_S) -> None:
        """An application on the device asks; the witness hears what becomes of it."""
        now, witness = self.around.hub.monotonic(), self.around.witness
        self.requests += 1
        request = f"{self.name}-{self.requests}"
        witness.accepted(request, now + deadline_s)

        def told(result: Report | EdgeError) -> None:
            witness.outcome(request, result, self.around.hub.monotonic())

        if self._on is None:
            told(LinkError("nobody listens"))
        else:
            self._on.engine.ask(request, model, told, deadline_s)

    def cut(self) -> None:
        """It has no network."""
        self.around.way.cut = True
        if self._on is not None:
            self._on.cut()

    def mend(self) -> None:
        """It has one again."""
        self.around.way.cut = False
        if self._on is not None:
            self._on.mend()

    def hang(self) -> None:
        """It stays connected, and does nothing more."""
        self.hangs = True

    def wake(self) -> None:
        """It goes on."""
        self.hangs = False
        if self._on is not None:
            self._on.poke()

    def damaged(self, why: str) -> None:
        """Its disk is not what it was: it is excused until it has started once more and answers."""
        self.trouble, self._damaged_in = why, self.starts

    def check(self) -> None:
        """Complain where it has nothing healthy to answer by, and nothing that would excuse it."""
        if self._on is None:
            return
        stands = self.standing
        if self.trouble:
            if self.starts > self._damaged_in and stands.committed.items() <= stands.running.items():
                self.trouble = ""
            return
        for model, release in stands.committed.items():
            if model not in stands.running and not stands.safe_mode:
                self.around.witness.complain(f"{self.name} committed {model} {release[:12]} and does not answer")


class _Powered:
    """From power on to power off."""

    def __init__(self, device: SimulatedDevice) -> None:
        around, folder, identity = device.around, device.folder, device.identity
        self._device = device
        self._hub = around.hub
        self._session: Vanishing | None = None
        self._booted = self._hub.monotonic()
        self.engine = SimulatedEngine(
            around.hub, around.sky, self._own_part, around.slowdown, body=Body(around.hub.monotonic())
        )
        store = ChunkStore(folder.chunks, folder.releases, QUOTA_BYTES)
        start_host = simulated_hosts(
            lambda release: around.mood(device.name, release),
            self._golden(store),
            lambda sha256: around.witness.loaded(device.name, sha256),
        )
        work = Work(folder, identity, self.engine, store, start_host, activated=self._activated, now=self._time)
        self._work = work
        self.hands = Watched(work, device.card, around.witness)
        self.updater = Updater(self.hands, clock=around.hub.monotonic, health_s=around.health_s, dice=around.hub.dice)
        tls = around.tls(folder)
        self.uplink = Uplink(
            folder,
            identity,
            host_and_port(identity.broker, "broker"),
            tls,  # type: ignore[arg-type]  # a broker in this process asks for none
            sample=self._sample,
            emulated=False,
            simulated=True,
            local_url="",
            certificate=lambda: around.certificate(folder),
            rhythm=around.rhythm,
            connect=self._connect,
            pace=_Own(self),
            outbox=self._outbox(),
        )
        self._tasks: list[Task] = []
        self._worker: Task | None = None
        self._wake: Timer | None = None
        self._ended = False

    def boot(self) -> None:
        self._device.folder.sweep()
        try:
            want = self._work.boot()
        except Ended:
            return
        self._device.check()
        self._work.connect(self.uplink)
        self.updater.begin(want)
        self.uplink.start(self._offer, self._online)
        self.poke()

    def end(self) -> None:
        """Power fails."""
        self._ended = True
        self.engine.cut("the device lost its power")
        if self._session is not None:
            self._session.vanish()
        self._forget()

    def cut(self) -> None:
        if self._session is not None:
            self._session.cut()

    def mend(self) -> None:
        if self._session is not None:
            self._session.mend()

    def stop(self) -> None:
        self._ended = True
        self.engine.cut("the agent was stopped")
        self.uplink.stop()
        self._work.stopped()
        self._forget()

    @property
    def states(self) -> tuple[ModelState, ...]:
        return model_states(*self.updater.snapshot)

    def spawn(self, work: Callable[[], None], name: str) -> Task:
        """A task that ends with the device's power."""
        self._tasks = [one for one in self._tasks if not one.ended]
        task = self._hub.spawn(work, f"{self._device.name} {name}")
        self._tasks.append(task)
        return task

    def _forget(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
        for task in self._tasks:
            task.kill()
        for release in self.engine.serving.values():
            release.host.close()

    # The update loop, a step at a time

    def _offer(self, raw: bytes) -> None:
        self.updater.offer(raw)
        self.poke()

    def _online(self, is_online: bool) -> None:
        self.updater.online(is_online)
        self.poke()

    def poke(self) -> None:
        """There may be something to do."""
        if not self._ended and not self._device.hangs and (self._worker is None or self._worker.ended):
            self._worker = self.spawn(self._take_steps, "updates")

    def _take_steps(self) -> None:
        while not (self._ended or self._device.hangs) and self.updater.take_step() is not None:
            self._device.check()
        if self._ended or self._device.hangs:
            return
        if self._wake is not None:
            self._wake.cancel()
        at = self.updater.wakes_at(self._hub.monotonic())
        if at < float("inf"):
            self._wake = self._hub.call_at(at, self.poke)

    def _own_part(self, release: str, error: Exception | None) -> None:
        """A request has told something of a release, which may be on trial."""
        self.updater.ran(release, error)
        if self.updater.snapshot[1].trials:
            self.poke()

    def _connect(self, *where: Any, **callbacks: Any) -> Connection:
        self._session = self._device.around.connect(*where, **callbacks)
        return self._session

    def _sample(self, session: int, sequence: int, take: bool) -> tuple[Telemetry | None, object]:
        engine = self.engine
        now = engine.conditions
        worth = (now.remote_ok, tuple((model, engine.row_of(model)) for model in sorted(engine.serving)))
        if not take or self._device.hangs:
            return None, worth
        power = engine.body.sensed(self._hub.monotonic(), [host_of(one).hotter for one in engine.serving.values()])
        windows, health = engine.windows.take(engine.serving, now), self._health(power.celsius)
        more = {"health": health, **({"moment": self._moment()} if self._device.around.keeps_bytes else {})}
        return telemetry(session, sequence, True, now, windows, power, **more), worth

    def _health(self, celsius: float | None) -> tuple[ReleaseHealth, ...]:
        """What gates judge, of each release that serves."""
        engine, now = self.engine, self._hub.monotonic()
        engine.health.serving({model: one.digest for model, one in engine.serving.items()}, now)
        for model, one in engine.serving.items():
            engine.health.saw(model, host_of(one).memory_bytes, celsius)
        return engine.health.told(now)

    def _activated(self, model: str, release: str, drift: Drift | None, golden_ok: bool | None) -> None:
        """It answers from now on; where it is to drift, that is what is told."""
        told = self._device.around.mood(self._device.name, release).drift
        found = Drift(told, top_agrees=False) if told and drift is not None else drift
        self.engine.health.activated(model, release, self._hub.monotonic(), found, golden_ok)

    def _outbox(self) -> Outbox | None:
        """Telemetry that waits for a link, where that is wanted: it writes to the device's disk."""
        keeps_bytes = self._device.around.keeps_bytes
        ring = Ring(self._device.folder.late, quota_bytes=keeps_bytes) if keeps_bytes else None
        return Outbox(ring, self._moment) if ring is not None else None

    def _moment(self) -> Moment:
        """By the device's clocks: one that may be wrong, and one that knows this boot only."""
        return Moment(at=self._time(), boot=f"{self._device.starts}", up_s=self._hub.monotonic() - self._booted)

    def _time(self) -> float:
        around = self._device.around
        return around.hub.time() + around.clock_off_s

    def _golden(self, store: ChunkStore) -> Callable[[str], bytes]:
        def chunk(sha256: str) -> bytes:
            data = store.get(sha256)
            if data is None:
                raise LinkError(f"chunk {sha256[:12]} has gone again")
            return data

        return chunk


class _Own:
    """The hub's pace, for tasks that end with a device's power."""

    def __init__(self, powered: _Powered) -> None:
        self._powered = powered
        self._hub = powered._hub
        self.monotonic = self._hub.monotonic
        self.dice = self._hub.dice
        self.condition = self._hub.condition

    def time(self) -> float:
        return self._hub.time() + self._powered._device.around.clock_off_s

    def start(self, work: Callable[[], None], name: str) -> Task:
        return self._powered.spawn(work, name)
