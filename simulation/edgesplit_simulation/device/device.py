"""One simulated device: the agent's own data folder, trust store, chunk store, update loop and MQTT uplink, run as
tasks of a hub; only the engine and the runtime are simulated.

A device can be switched on and off and can lose power at any step; at the next start it finds on its disk what it had
written.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from edgesplit.errors import EdgeError, LinkError
from edgesplit.links import parse_host_and_port
from edgesplit.mqtt.messages import ModelState, Telemetry
from edgesplit.mqtt.telemetry import DeviceTime, ReleaseHealth
from edgesplit.oip.report import Report
from edgesplit.testing.in_memory_broker import NetworkPath
from edgesplit.testing.virtual_time import Hub, Task, TaskKilled, Timer
from edgesplit_agent.control.mqtt_uplink import Connection, TelemetrySchedule, Uplink
from edgesplit_agent.releases.chunk_store import ChunkStore
from edgesplit_agent.releases.golden_result import GoldenResult
from edgesplit_agent.releases.output_drift import Drift
from edgesplit_agent.state.data_folder import DataFolder, Identity
from edgesplit_agent.telemetry.conditions import reported_conditions
from edgesplit_agent.telemetry.disk_ring import DiskRing
from edgesplit_agent.telemetry.outbox import Outbox
from edgesplit_agent.telemetry.windows import build_telemetry, with_cascades
from edgesplit_agent.updates.reconciler import InstalledState, Reconciler, model_states
from edgesplit_simulation.device.engine import DEADLINE_S, SimulatedEngine, SimulatedOffloadServer, host_of
from edgesplit_simulation.device.runtime import simulated_hosts
from edgesplit_simulation.device.sensors import PowerModel
from edgesplit_simulation.invariants.checker import InvariantChecker
from edgesplit_simulation.invariants.observed_actions import ObservedUpdateActions
from edgesplit_simulation.releases import HEALTHY, Behaviour

QUOTA_BYTES = 2**30


class CuttableConnection(Connection, Protocol):
    """A connection that can end without a goodbye, as at a power cut, and whose network can be cut and restored."""

    def vanish(self) -> None:
        """End the client without notifying the broker."""
        ...

    def cut(self) -> None:
        """Cut the network to the broker without notifying either side."""
        ...

    def mend(self) -> None:
        """Restore the network that `cut` cut."""
        ...


@dataclass
class DeviceEnvironment:
    """The environment of one simulated device: time, network, offload server, invariant checker and injected faults."""

    hub: Hub
    connect: Callable[..., CuttableConnection]
    """Makes an MQTT session, with the signature of `edgesplit_agent.control.mqtt_uplink.Connect`."""
    checker: InvariantChecker
    offload_server: SimulatedOffloadServer
    behaviour_of: Callable[[str, str], Behaviour] = lambda device, release: HEALTHY
    """How a release behaves on a device, by device name and release digest."""
    telemetry_schedule: TelemetrySchedule = field(default_factory=TelemetrySchedule)
    health_s: float = 10.0
    slowdown: float = 1.0
    clock_offset_s: float = 0.0
    """Seconds by which the device's wall clock is ahead of true time."""
    broker_link: NetworkPath = field(default_factory=NetworkPath)
    """The link to an in-process broker."""
    tls: Callable[[DataFolder], ssl.SSLContext | None] = lambda folder: None
    """TLS context for a real broker; None for an in-process broker."""
    certificate: Callable[[DataFolder], str] = lambda folder: ""
    """Serial number of the certificate in use; empty with an in-process broker."""
    telemetry_backlog_bytes: int = 0
    """Size limit of the telemetry backlog on disk while there is no link; 0 drops telemetry that cannot be sent."""


class SimulatedDevice:
    """An enrolled device; call `power_on` first."""

    def __init__(self, folder: DataFolder, identity: Identity, environment: DeviceEnvironment) -> None:
        self.folder = folder
        self.identity = identity
        self.environment = environment
        self.card_name = identity.device
        """The device's name, or that of a copy of its card (`NAME.copy`)."""
        self.damage = ""
        """Damage done to its disk, which excuses it from answering; empty without damage."""
        self.is_hanging = False
        """True while the device is connected but does nothing."""
        self.start_count = 0
        self._damaged_at_start = 0
        self.request_count = 0
        self._agent: _PoweredAgent | None = None

    @property
    def name(self) -> str:
        """The device's name."""
        return self.identity.device

    @property
    def is_on(self) -> bool:
        """True while the device has power and its agent runs."""
        return self._agent is not None

    @property
    def is_connected(self) -> bool:
        """True while the broker accepts its session."""
        return self._agent is not None and self._agent.uplink.connected

    @property
    def session_number(self) -> int:
        """Number of the newest connection or connection attempt; 0 without power."""
        return 0 if self._agent is None else self._agent.uplink.session_number

    @property
    def running(self) -> dict[str, str]:
        """Digest of the release that answers now, by model."""
        serving = self._agent.engine.serving if self._agent is not None else {}
        return {model: release.digest for model, release in serving.items()}

    @property
    def installed_state(self) -> InstalledState:
        """What is installed and served; empty without power."""
        return InstalledState() if self._agent is None else self._agent.actions.installed()

    @property
    def states(self) -> tuple[ModelState, ...]:
        """The state that the device reports of each model."""
        return () if self._agent is None else self._agent.states

    @property
    def safe_mode(self) -> str:
        """Why no model is loaded; empty outside safe mode."""
        return self.installed_state.safe_mode

    def power_on(self) -> None:
        """Start the agent on what the disk holds."""
        if self._agent is None:
            self.start_count += 1
            self._agent = _PoweredAgent(self)
            self._agent.boot()

    def power_cut(self) -> None:
        """End the agent at once; its peers notice only by their own timeouts."""
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.power_cut()

    def stop(self) -> None:
        """Stop the agent in order, as at SIGTERM."""
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.stop()

    def request(self, model: str, deadline_s: float = DEADLINE_S) -> None:
        """Send one inference request from an application on the device; its outcome goes to the invariant checker."""
        now, witness = self.environment.hub.monotonic(), self.environment.checker
        self.request_count += 1
        request = f"{self.name}-{self.request_count}"
        witness.on_request(request, now + deadline_s)

        def on_result(result: Report | EdgeError) -> None:
            witness.on_outcome(request, result, self.environment.hub.monotonic())

        if self._agent is None:
            on_result(LinkError("the offload server does not answer"))
        else:
            self._agent.engine.submit(request, model, on_result, deadline_s)

    def cut_network(self) -> None:
        """Take the device's network away."""
        self.environment.broker_link.cut = True
        if self._agent is not None:
            self._agent.cut_network()

    def restore_network(self) -> None:
        """Give the device its network back."""
        self.environment.broker_link.cut = False
        if self._agent is not None:
            self._agent.restore_network()

    def hang(self) -> None:
        """Keep the connection but stop all work."""
        self.is_hanging = True

    def resume(self) -> None:
        """Resume work after `hang`."""
        self.is_hanging = False
        if self._agent is not None:
            self._agent.wake_update_loop()

    def mark_damaged(self, reason: str) -> None:
        """Record disk damage: the invariant "always a healthy version" is waived until the device has restarted and
        answers again."""
        self.damage, self._damaged_at_start = reason, self.start_count

    def check_serving(self) -> None:
        """Report a violation for each committed model that is not served, unless damage or safe mode excuses it."""
        if self._agent is None:
            return
        installed = self.installed_state
        if self.damage:
            if self.start_count > self._damaged_at_start and installed.committed.items() <= installed.running.items():
                self.damage = ""
            return
        for model, release in installed.committed.items():
            if model not in installed.running and not installed.safe_mode:
                text = f"{self.name} committed {model} {release[:12]} and does not answer"
                self.environment.checker.add_violation(text)


class _PoweredAgent:
    """The agent of a device from power on to power off."""

    def __init__(self, device: SimulatedDevice) -> None:
        around, folder, identity = device.environment, device.folder, device.identity
        self._device = device
        self._hub = around.hub
        self._session: CuttableConnection | None = None
        self._booted_at = self._hub.monotonic()
        power_model = PowerModel(around.hub.monotonic())
        self.engine = SimulatedEngine(
            around.hub, around.offload_server, self._on_device_run, around.slowdown, power_model=power_model
        )
        store = ChunkStore(folder.chunks, folder.releases, QUOTA_BYTES)
        start_host = simulated_hosts(
            lambda release: around.behaviour_of(device.name, release),
            self._golden_reader(store),
            lambda sha256: around.checker.on_file_loaded(device.name, sha256),
        )
        self.actions = ObservedUpdateActions(
            device.card_name, around.checker, folder, identity, self.engine, store, start_host,
            on_activated=self._on_activated, now=self._time,
        )  # fmt: skip
        self.updater = Reconciler(
            self.actions, clock=around.hub.monotonic, health_s=around.health_s, rng=around.hub.rng
        )
        broker, tls = parse_host_and_port(identity.broker, "broker"), around.tls(folder)
        self.uplink = Uplink(
            folder, identity, broker, tls,  # type: ignore[arg-type]  # an in-process broker uses no TLS
            sample=self._sample, emulated=False, simulated=True, local_url="",
            certificate=lambda: around.certificate(folder), schedule=around.telemetry_schedule, connect=self._connect,
            concurrency=_AgentConcurrency(self), outbox=self._outbox(),
        )  # fmt: skip
        self._tasks: list[Task] = []
        self._update_task: Task | None = None
        self._wake_timer: Timer | None = None
        self._ended = False

    def boot(self) -> None:
        self._device.folder.remove_partial_files()
        try:
            want = self.actions.boot()
        except TaskKilled:
            return
        self._device.check_serving()
        self.actions.connect(self.uplink)
        self.updater.begin(want)
        self.uplink.start(self._on_statement, self._on_online)
        self.wake_update_loop()

    def power_cut(self) -> None:
        """End the agent as a power failure does."""
        self._ended = True
        self.engine.abort("the device lost its power")
        if self._session is not None:
            self._session.vanish()
        self._cancel_tasks()

    def cut_network(self) -> None:
        if self._session is not None:
            self._session.cut()

    def restore_network(self) -> None:
        if self._session is not None:
            self._session.mend()

    def stop(self) -> None:
        self._ended = True
        self.engine.abort("the agent was stopped")
        self.uplink.stop()
        self.actions.on_stopped()
        self._cancel_tasks()

    @property
    def states(self) -> tuple[ModelState, ...]:
        return model_states(*self.updater.snapshot)

    def spawn(self, work: Callable[[], None], name: str) -> Task:
        """Start a task that ends with the device's power."""
        self._tasks = [running for running in self._tasks if not running.ended]
        task = self._hub.spawn(work, f"{self._device.name} {name}")
        self._tasks.append(task)
        return task

    def _cancel_tasks(self) -> None:
        if self._wake_timer is not None:
            self._wake_timer.cancel()
        for task in self._tasks:
            task.kill()
        for release in self.engine.serving.values():
            release.host.close()

    # The update loop: one task at a time, which ends once no step is due; a timer starts the next

    def _on_statement(self, raw: bytes) -> None:
        self.updater.on_statement(raw)
        self.wake_update_loop()

    def _on_online(self, is_online: bool) -> None:
        self.updater.on_connection(is_online)
        self.wake_update_loop()

    def wake_update_loop(self) -> None:
        """Run the update loop if it is idle: there may be something to do."""
        if not self._ended and not self._device.is_hanging and (self._update_task is None or self._update_task.ended):
            self._update_task = self.spawn(self._run_update_steps, "updates")

    def _run_update_steps(self) -> None:
        while not (self._ended or self._device.is_hanging) and self.updater.run_step() is not None:
            self._device.check_serving()
        if self._ended or self._device.is_hanging:
            return
        if self._wake_timer is not None:
            self._wake_timer.cancel()
        at = self.updater.wakes_at(self._hub.monotonic())
        if at < float("inf"):
            self._wake_timer = self._hub.call_at(at, self.wake_update_loop)

    def _on_device_run(self, release: str, error: Exception | None) -> None:
        """Pass the outcome of a request's device part to the update loop, which may have the release on trial."""
        self.updater.on_device_run(release, error)
        if self.updater.snapshot[1].trials:
            self.wake_update_loop()

    def _connect(self, *where: Any, **callbacks: Any) -> Connection:
        self._session = self._device.environment.connect(*where, **callbacks)
        return self._session

    def _sample(self, session: int, sequence: int, take: bool) -> tuple[Telemetry | None, object]:
        engine = self.engine
        now = engine.conditions
        marker = (now.remote_usable, tuple((model, engine.row_of(model)) for model in sorted(engine.serving)))
        if not take or self._device.is_hanging:
            return None, marker
        power = engine.power_model.sample(
            self._hub.monotonic(), [host_of(release).behaviour.extra_celsius for release in engine.serving.values()]
        )
        windows, health = engine.windows.close_windows(engine.serving, now), self._health(power.celsius)
        windows = with_cascades(windows, engine.cascades.close_windows())
        backlog = {"measured_at": self._moment()} if self._device.environment.telemetry_backlog_bytes else {}
        conditions = reported_conditions((), cascade_alarms=engine.cascades.alarms(self._hub.monotonic()))
        return build_telemetry(
            session, sequence, True, now, windows, power, health=health, conditions=conditions, **backlog
        ), marker

    def _health(self, celsius: float | None) -> tuple[ReleaseHealth, ...]:
        """The health figures that rollout gates evaluate, for each release that serves."""
        engine, now = self.engine, self._hub.monotonic()
        engine.health.reconcile({model: release.digest for model, release in engine.serving.items()}, now)
        for model, release in engine.serving.items():
            engine.health.on_readings(model, host_of(release).memory_bytes, celsius)
        return engine.health.to_telemetry(now)

    def _on_activated(self, model: str, release: str, drift: Drift | None, golden: GoldenResult | None) -> None:
        """Start the health record of a release; a simulated output drift replaces the measured one."""
        simulated = self._device.environment.behaviour_of(self._device.name, release).drift
        reported = Drift(simulated, top_agrees=False) if simulated and drift is not None else drift
        self.engine.health.on_activated(model, release, self._hub.monotonic(), reported, golden)

    def _outbox(self) -> Outbox | None:
        """The telemetry backlog on the device's disk; None where none is kept."""
        quota_bytes = self._device.environment.telemetry_backlog_bytes
        if not quota_bytes:
            return None
        return Outbox(DiskRing(self._device.folder.backlog, quota_bytes=quota_bytes), self._moment)

    def _moment(self) -> DeviceTime:
        """The time by the device's clocks: a wall clock that may be wrong and a monotonic clock that counts from this
        boot."""
        since_boot_s = self._hub.monotonic() - self._booted_at
        return DeviceTime(unix_s=self._time(), boot_id=f"{self._device.start_count}", since_boot_s=since_boot_s)

    def _time(self) -> float:
        around = self._device.environment
        return around.hub.time() + around.clock_offset_s

    def _golden_reader(self, store: ChunkStore) -> Callable[[str], bytes]:
        def chunk(sha256: str) -> bytes:
            data = store.get(sha256)
            if data is None:
                raise LinkError(f"chunk {sha256[:12]} is missing on disk")
            return data

        return chunk


class _AgentConcurrency:
    """The hub's concurrency interface, for tasks that end with a device's power."""

    def __init__(self, agent: _PoweredAgent) -> None:
        self._agent = agent
        self._hub = agent._hub
        self.monotonic = self._hub.monotonic
        self.rng = self._hub.rng
        self.condition = self._hub.condition

    def time(self) -> float:
        return self._hub.time() + self._agent._device.environment.clock_offset_s

    def start(self, work: Callable[[], None], name: str) -> Task:
        return self._agent.spawn(work, name)
