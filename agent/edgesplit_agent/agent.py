"""Assembles one agent: creates its components, connects them, starts and stops them. Decisions are in the
components."""

from __future__ import annotations

import logging
import math
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

import edgesplit
from edgesplit.bandwidth_trace import UplinkTrace
from edgesplit.errors import EdgeError, UsageError
from edgesplit.http1.server import Response, Server
from edgesplit.links import parse_host_and_port, parse_link
from edgesplit.mqtt.messages import ReportedCondition, Telemetry
from edgesplit.mqtt.telemetry import QueueState, ReleaseHealth
from edgesplit.observability import log_format as logs
from edgesplit.observability import tracing
from edgesplit.observability.metrics import AGENT_INFO, AGENT_REMOTE_INFERENCES
from edgesplit.observability.metrics_server import make_metrics_server
from edgesplit.observability.prometheus import metrics_response
from edgesplit.observability.registry import gauge_series
from edgesplit.offload_client.pool import OffloadClient
from edgesplit.oip.options import Hedge
from edgesplit.plan import Plan
from edgesplit.process.memory import default_memory, machine_memory
from edgesplit.release.privacy_floor import PrivacyFloor
from edgesplit.release_store import StoredRelease
from edgesplit.runtime import Runtime
from edgesplit.runtime.dispatch import DispatchingRuntime
from edgesplit.runtime.emulated import EmulatedRuntime
from edgesplit.runtime.options import EngineOptions, Optimise
from edgesplit_agent.control.certificate_renewal import CertificateRenewer, certificate_in_use
from edgesplit_agent.control.enrolment import credentials
from edgesplit_agent.control.gateway_server import GatewayServer, NextTier
from edgesplit_agent.control.log_bundle import LogBundleService
from edgesplit_agent.control.mqtt_uplink import Uplink
from edgesplit_agent.control.remote_inference import RemoteInferenceService
from edgesplit_agent.host.clock import current_moment
from edgesplit_agent.host.log_buffer import install_log_buffer
from edgesplit_agent.host.machine import machine_figures
from edgesplit_agent.offload.foreign_server import ForeignServers, ForeignTls
from edgesplit_agent.offload.gateway_route import GatewayRoute
from edgesplit_agent.policy.audit_budget import AUDIT_LIMITS, AuditLimits
from edgesplit_agent.policy.still_calibration import SPACING_S
from edgesplit_agent.power.mode import PowerSettings as PowerWishes
from edgesplit_agent.power.monitor import PowerMonitor
from edgesplit_agent.power.sensors import ROOT as SYSFS
from edgesplit_agent.releases.chunk_store import ChunkStore
from edgesplit_agent.releases.golden_result import GoldenResult
from edgesplit_agent.releases.output_drift import Drift
from edgesplit_agent.releases.tuner import Tuner
from edgesplit_agent.releases.tuning import TuningLimits, TuningResults
from edgesplit_agent.self_update.manager import VersionManager
from edgesplit_agent.self_update.trial import TRIAL_S
from edgesplit_agent.serving.engine import Engine, predictions
from edgesplit_agent.serving.engine import Settings as EngineSettings
from edgesplit_agent.serving.http_endpoint import Endpoint, check_live
from edgesplit_agent.serving.metrics import (
    RequestMetrics,
    emulated_label,
    engine_series,
    outcome_label,
    power_gauges,
)
from edgesplit_agent.serving.remote_requests import RemoteRequests
from edgesplit_agent.state.cascade_store import CascadeStore
from edgesplit_agent.state.data_folder import AgentAddress, DataFolder, Identity
from edgesplit_agent.state.slots import HEALTH_S
from edgesplit_agent.telemetry.conditions import reported_conditions
from edgesplit_agent.telemetry.disk_ring import MAX_AGE_S, QUOTA_BYTES, DiskRing
from edgesplit_agent.telemetry.outbox import Outbox
from edgesplit_agent.telemetry.release_health import ReleaseHealthTracker
from edgesplit_agent.telemetry.request_record import DeviceRunObserver
from edgesplit_agent.telemetry.windows import TelemetryWindows, build_telemetry, with_cascades
from edgesplit_agent.updates.actions import DeviceUpdateActions
from edgesplit_agent.updates.bundle.request import BundleWatch
from edgesplit_agent.updates.download_window import DownloadWindow, Span
from edgesplit_agent.updates.reconciler import Reconciler, kept_states, model_states
from edgesplit_agent.worker.host import Host, in_process
from edgesplit_agent.worker.proc_stats import read_process_stats
from edgesplit_agent.worker.supervised_host import SupervisedHost
from edgesplit_agent.worker.watchdog_policy import Bounds

if TYPE_CHECKING:
    from edgesplit.link_emulation import ShapedLink

log = logging.getLogger(__name__)

MAX_DEFAULT_THREADS = 4
"""Most threads of the runtime where the operator gives no number."""
MAX_TUNED_CORES = 16
"""Most cores that tuning tries."""
NO_POWER = "the plan has no power figures: power budget and battery policy do not count for it (deploy the model again)"
"""Status text where the operator set a power option that the plan has no figures for."""


@dataclass(frozen=True)
class LocalSocket:
    """The Unix socket for applications on this device."""

    path: Path | None = None
    """None: `agent.sock` in the data folder, and no socket where that cannot be created."""
    mode: int = 0o600
    """File permissions of the socket."""
    group: str | None = None
    """Group of the socket; None: the agent's own."""
    wanted: bool = True
    """False: no Unix socket."""


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """Settings from the command line; None or empty: the value from enrolment."""

    data: Path
    port: int = 8600
    emulate: bool = False
    offload: str | None = None
    broker: str | None = None
    link: str | None = None
    fetch_bytes_per_s: float = math.inf
    """Limit of the download rate of releases."""
    privacy_floor: PrivacyFloor = field(default_factory=PrivacyFloor)
    """The device's privacy floor: what no plan may send away, whatever its signature."""
    health_s: float = HEALTH_S
    """Seconds that a release on trial must serve without a failure of its own slices before it is committed."""
    trial_s: float = TRIAL_S
    """Seconds that a new version of the agent has to reach the broker and to serve the models that were served before
    it."""
    foreign_trust: ForeignTls = field(default_factory=ForeignTls)
    """TLS trust and client certificate for foreign offload servers."""
    download_spans: tuple[Span, ...] = ()
    """Releases are downloaded only in these hours; empty: at any time."""
    store_quota_bytes: int | None = None
    """Quota of stored releases; None: half of the disk."""
    telemetry_quota_bytes: int = QUOTA_BYTES
    """Quota of telemetry that is stored while the link is lost."""
    telemetry_age_s: float = MAX_AGE_S
    """Age at which stored telemetry is deleted."""
    gateway: str | None = None
    """HOST:PORT at which other devices offload to this one; None: this device is no gateway."""
    metrics: tuple[str, int] | None = None
    """Address at which Prometheus may read metrics from outside of this device; None: only on localhost, at the local
    endpoint."""
    power: PowerWishes = field(default_factory=PowerWishes)
    """The operator's settings of battery policy and power budget."""
    sensors_root: Path | None = None
    """Root of sysfs. None: /sys, or no sensors on an emulated device, because its host's are not its own."""
    link_trace: UplinkTrace | None = None
    """Bandwidth trace that the emulated link's uplink follows."""
    gateway_metrics: str = ""
    """ADDRESS:PORT at which the gateway's server serves its metrics; empty: none."""
    log_format: logs.Format = "text"
    socket: LocalSocket = field(default_factory=LocalSocket)
    """Unix socket for applications."""
    threads: int = 0
    """Threads of the runtime; 0: as many as the device has cores, at most four, and one where the device is emulated.
    """
    isolate: bool = True
    """Models run in worker processes instead of the agent's process."""
    worker_memory_bytes: int = 0
    """Memory limit of one worker; 0: half of the machine's."""
    optimise: Optimise = "fast"
    """Whether engines may fuse further than slices were cut, where that was measured to be faster."""
    providers: tuple[str, ...] | None = None
    """Accelerators to try first, in order; None: those that the plan names for this class of device."""
    lanes: bool = True
    """Applications may use a direct connection to a model's worker, where the agent has nothing to decide for each
    request."""
    remote_inference: bool = True
    """Operators may run inferences here through the controller."""
    hedge: Hedge = "auto"
    """When a request is also run on the device while the offload target works on it."""
    hedge_budget: float | None = None
    """Share of the cost of running everything locally that hedges may use; see `policy.hedge_budget`."""
    skip_still: float = 0.0
    """Share of the answers of a named stream that may change where those of still frames are repeated; 0: none are."""
    audits: AuditLimits = AUDIT_LIMITS
    """What the audits of cascades may cost."""
    still_spacing_s: float = SPACING_S
    """Least seconds between the frames that count for that promise."""


class Agent:
    """An enrolled device's agent. The caller must hold the lock of the data folder."""

    def __init__(
        self,
        settings: AgentSettings,
        folder: DataFolder,
        identity: Identity,
        version_manager: VersionManager | None = None,
    ) -> None:
        """Without `version_manager` the agent cannot update itself."""
        self._settings = settings
        self._folder = folder
        self._identity = identity
        self._processor_lock = threading.Lock()
        self._tracer = tracing.make_tracer(
            "edgesplit-agent", {"edgesplit.device": identity.device, "edgesplit.emulated": settings.emulate}
        )
        self._shaped_link: ShapedLink | None = None
        tls = credentials(folder).client_context()
        self._offload_client = self._make_offload_client(tls)
        self._foreign = ForeignServers(settings.foreign_trust, parse_link(settings.link) if settings.link else None)
        self._route = GatewayRoute(
            self._offload_client, self._link_address, link=settings.link or "", is_fixed=bool(settings.offload)
        )  # to the cloud, until the first accepted statement names a gateway
        self._power = PowerMonitor(
            settings.power, settings.sensors_root or (None if settings.emulate else SYSFS), emulated=settings.emulate
        )
        self._engine = Engine(
            identity.device_class, self._offload_client, tracer=self._tracer, power=self._power,
            settings=EngineSettings(
                hedge=settings.hedge, hedge_budget=settings.hedge_budget, lanes=settings.lanes,
                skip_still=settings.skip_still, audits=settings.audits, still_spacing_s=settings.still_spacing_s,
                still_file=folder.still_frames_file,
            ),
            client_for=self._foreign.for_release, is_settled=self._is_committed,
            cascade_store=CascadeStore(folder.cascades_file),
        )  # fmt: skip
        self._telemetry_windows = self._engine.observe(TelemetryWindows())
        self._health = self._engine.observe(ReleaseHealthTracker())
        self._metrics = self._engine.observe(RequestMetrics())
        self._engine.observe(DeviceRunObserver(self._on_device_run))
        self._metrics_server = make_metrics_server(settings.metrics, self.metrics) if settings.metrics else None
        self._endpoint = Endpoint(self._engine, self.status, self.metrics)
        self._server = Server(
            self._endpoint, host="127.0.0.1", port=settings.port, check_head=self._endpoint.check_head
        )
        self._local_server: Server | None = None
        store = ChunkStore(folder.chunks, folder.releases, settings.store_quota_bytes)
        self._tuner = self._make_tuner(folder)
        self._update_actions = DeviceUpdateActions(
            folder, identity, self._engine, store, self._start_host,
            use_gateway=self._route.use, tuner=self._tuner,
            floor=settings.privacy_floor, download_window=DownloadWindow(settings.download_spans,
            hold=self._power.update_hold), check_endpoint=lambda: check_live(self.url), on_activated=self._on_activated,
            on_bundle_progress=lambda done, of: self._bundle_watch.on_progress(done, of),
            version_manager=version_manager,
        )  # fmt: skip
        self._reconciler = Reconciler(self._update_actions, health_s=settings.health_s, trial_s=settings.trial_s)
        self._bundle_watch = BundleWatch(folder.bundle_request_file, self._reconciler)
        self._tls = tls
        self._uplink: Uplink | None = None
        quota, oldest_s = settings.telemetry_quota_bytes, settings.telemetry_age_s
        self._outbox = Outbox(DiskRing(folder.backlog, quota_bytes=quota, max_age_s=oldest_s))
        self._certificate_renewer = CertificateRenewer(folder, identity, self._on_certificate_renewed)
        self._gateway = self._make_gateway()

    def start(self) -> None:
        """Serve the releases on disk at once, then connect."""
        self._power.start()
        statement = self._update_actions.boot()
        self._server.start()  # only after boot: an earlier request would fail, because no model is loaded yet
        self._local_server = self._start_unix_socket()
        self._engine.start()
        if self._metrics_server is not None:
            self._metrics_server.start()
        self._uplink = Uplink(
            self._folder, self._identity, parse_host_and_port(self._settings.broker or self._identity.broker, "broker"),
            self._tls, fetch_bytes_per_s=self._settings.fetch_bytes_per_s, sample=self._sample_telemetry,
            emulated=self._settings.emulate, local_url=self.url,
            certificate=lambda: str(certificate_in_use(self._folder).serial_number), outbox=self._outbox,
            built_for=self._update_actions.built_for, on_job=lambda job: self._log_bundles.on_job(job),
            on_inference=lambda payload: self._remote_inferences.on_message(payload),
        )  # fmt: skip
        self._remote_inferences = self._make_remote_inferences(self._uplink)
        self._remote_inferences.start()
        self._log_bundles = LogBundleService(
            self._folder, self._identity.device, install_log_buffer(), self.status, self._uplink.answer
        )  # fmt: skip
        self._log_bundles.start()
        self._update_actions.connect(self._uplink)
        self._reconciler.start(statement)
        self._bundle_watch.start()
        self._uplink.start(self._reconciler.on_statement, self._reconciler.on_connection)
        self._certificate_renewer.start()
        if self._gateway is not None:
            self._gateway.start()
        address = AgentAddress(
            device=self._identity.device, url=self.url, pid=os.getpid(), emulated=self._settings.emulate,
            socket=self.socket_url,
        )  # fmt: skip
        self._folder.write_address(address)

    def stop(self) -> None:
        """Finish requests in flight, disconnect in an orderly way, and stop every component."""
        self._certificate_renewer.stop()
        self._bundle_watch.stop()
        if self._gateway is not None:
            self._gateway.stop()
        for server in (self._local_server, self._server, self._metrics_server):
            if server is not None:
                server.stop()
        self._endpoint.close()
        if self._uplink is not None:
            self._log_bundles.stop()
            self._remote_inferences.stop()
            self._uplink.stop()
        self._reconciler.stop()
        self._update_actions.on_stopped()
        self._engine.stop()
        self._power.stop()
        self._foreign.stop()
        for release in self._engine.serving.values():
            release.host.close()
        self._route.stop()
        if self._shaped_link is not None:
            self._shaped_link.stop()
        self._tracer.stop()

    @property
    def url(self) -> str:
        """URL of the local endpoint."""
        return self._server.url

    @property
    def socket_url(self) -> str:
        """URL of the local endpoint on the Unix socket; empty where there is none."""
        return self._local_server.url if self._local_server is not None else ""

    def check_alive(self) -> str:
        """A status line, obtained as an application would. LinkError where the endpoint does not answer; blocks where a
        component hangs."""
        check_live(self.url)
        status = self.status()
        models = ", ".join(model["model"] for model in status["models"]) or "no model yet"
        return f"{status['device']}: {models}; {'online' if status['broker']['connected'] else 'no broker'}"

    def status(self) -> dict[str, Any]:
        """Status for people and tools, as JSON values; `edgesplit-agent status` prints it."""
        health, conditions = self._health(), self._engine.conditions
        desired, actual = self._reconciler.snapshot
        uplink = self._uplink
        return {
            "device": self._identity.device, "device_class": self._identity.device_class,
            "version": edgesplit.__version__, "emulated": self._settings.emulate,
            "link_emulated": self._settings.link or "",
            "broker": {"connected": bool(uplink and uplink.connected), "problem": uplink.problem if uplink else ""},
            "socket": self.socket_url, "session": uplink.session_number if uplink else 0,
            "floor": self._settings.privacy_floor.to_text(), "remote_inference": self._settings.remote_inference,
            "statement_counter": desired.counter if desired else 0,
            "conditions": msgspec.to_builtins(conditions), "power": self._power.status(),
            "breaker": self._engine.breaker.state, "gateway": self._route.gateway,
            "gateway_service": self._gateway_status(),
            "gateway_models": msgspec.to_builtins(kept_states(desired, actual)),
            "models": [self._model_status(name) for name in sorted(self._engine.serving)],
            "desired": msgspec.to_builtins(model_states(desired, actual)), "safe_mode": actual.safe_mode,
            "statement_problem": actual.offer_trouble, "release_bundle": self._bundle_watch.status(),
            "unhealthy_starts": actual.starts, "deduplicated": self._engine.idempotency.joined,
            "hedging": dict(self._engine.hedge_budget.counts), "dropped": self._engine.queue.dropped,
            "stale": self._engine.stale_answers.given, "still_frames": self._engine.still_frames.status(),
            "delivery": vars(uplink.chunks.counters) if uplink else {},
            "health": msgspec.to_builtins(health.to_telemetry(monotonic())),
            "backlog": msgspec.to_builtins(self._outbox.to_telemetry()),
        }  # fmt: skip

    def metrics(self) -> Response:
        """The metrics page for Prometheus."""
        connected = bool(self._uplink and self._uplink.connected)
        info = gauge_series(AGENT_INFO, 1.0, self._identity.device, self._identity.device_class, edgesplit.__version__)
        power_series = power_gauges(self._power.mode.mode, self._power.readings)
        series = [info, *self._metrics().registry.series(), *engine_series(self._engine, connected), *power_series]
        return metrics_response(series, emulated_label(self._settings.emulate))

    def _start_unix_socket(self) -> Server | None:
        """Serve the endpoint on a Unix socket too. A failure is tolerated unless the operator named the socket."""
        wanted = self._settings.socket
        if not wanted.wanted:
            return None
        path = wanted.path or self._folder.socket
        server = Server(
            self._endpoint, path=path.absolute(), mode=wanted.mode, group=wanted.group,
            check_head=self._endpoint.check_head,
        )  # fmt: skip
        try:
            server.start()
        except UsageError as error:
            if wanted.path is not None:
                raise
            log.warning("applications reach this agent by TCP only: %s", error)
            return None
        return server

    def _on_certificate_renewed(self) -> None:
        """Use the renewed certificate for every new connection."""
        renewed = credentials(self._folder)
        self._tls.load_cert_chain(renewed.certificate_file, renewed.key_file)
        if self._offload_client is not None:
            self._offload_client.renew()
        if self._gateway is not None:
            self._gateway.on_renewed()
        if self._uplink is not None:
            self._uplink.reconnect()

    def _model_status(self, model: str) -> dict[str, Any]:
        release = self._engine.serving[model]
        conditions, breaker = self._engine.target_state(model)
        foreign = {"offload": release.plan.offload, "breaker": breaker.state} if release.plan.offload else {}
        return {
            "model": model, "version": release.manifest.model, "release": release.digest,
            "row": self._engine.selector.row_of(model),
            "reason": "; ".join(filter(None, (self._power_note(release.plan), self._reason_of(model)))),
            "rows": predictions(release.plan, conditions), **foreign,
            "counters": self._telemetry_windows().total.get(model, {}), "worker": release.host.status(),
            "problem": release.trouble, "no_direct_access": self._engine.direct.reason_against(model),
            "phases": self._metrics().phase_statistics(release.manifest.model),
            "cascade": self._engine.cascades.status(model),
        }  # fmt: skip

    def _reason_of(self, model: str) -> str:
        return self._engine.cascades.reason(model, self._engine.reasons.of(model))

    def _power_note(self, plan: Plan) -> str:
        """A note where the operator set a power option that this plan has no figures for; empty otherwise."""
        is_power_limited = self._settings.power.watts is not None or self._power.mode.mode != "performance"
        return NO_POWER if is_power_limited and plan.power is None else ""

    def _is_committed(self, model: str) -> bool:
        return model not in self._reconciler.snapshot[1].trials

    def _on_device_run(self, release: str, error: Exception | None) -> None:
        self._reconciler.on_device_run(release, error)

    def _on_activated(self, model: str, release: str, drift: Drift | None, golden: GoldenResult | None) -> None:
        self._health().on_activated(model, release, monotonic(), drift, golden)

    def _sample_telemetry(self, session: int, sequence: int, take: bool) -> tuple[Telemetry | None, object]:
        conditions = self._engine.conditions
        rows = tuple((model, self._engine.selector.row_of(model)) for model in sorted(self._engine.serving))
        notable = (conditions.remote_usable, rows)
        if not take:
            return None, notable
        windows = self._telemetry_windows().close_windows(
            self._engine.serving, conditions, self._reason_of, self._engine.still_frames.take_window()
        )
        windows = with_cascades(windows, self._engine.cascades.close_windows())
        message = build_telemetry(
            session, sequence, self._settings.emulate, conditions, windows, self._power.to_telemetry(),
            **self._device_fields()
        )  # fmt: skip
        return message, notable

    def _device_fields(self) -> dict[str, Any]:
        """Fields of telemetry about the device, beside requests and power."""
        desired, _ = self._reconciler.snapshot
        return {
            "measured_at": current_moment(),
            "agent_version": edgesplit.__version__[:40],
            "statement_counter": desired.counter if desired else 0,
            "statement_expires": desired.expires if desired else 0,
            "queue": QueueState(self._engine.queue.in_flight, self._engine.queue.dropped),
            "machine": machine_figures(self._folder.path),
            "health": self._release_health(),
            "backlog": self._outbox.to_telemetry(),
            "conditions": self._conditions(),
        }

    def _conditions(self) -> tuple[ReportedCondition, ...]:
        """Conditions that the agent finds itself."""
        servers = [server for server in (self._server, self._local_server) if server is not None]
        endpoints = [server.recent_refusals() for server in servers]
        repeats, cascades = self._engine.still_frames.alarms(), self._engine.cascades.alarms()
        gateway = self._gateway
        flood, problem = (gateway.flood, gateway.list_problem) if gateway is not None else ("", "")
        return reported_conditions(endpoints, flood, problem, repeats, cascades)

    def _release_health(self) -> tuple[ReleaseHealth, ...]:
        """Health of each serving release."""
        now, serving = monotonic(), self._engine.serving
        self._health().reconcile({model: active.digest for model, active in serving.items()}, now)
        celsius = self._power.readings.celsius
        for model, release in serving.items():
            pid = int(release.host.status().get("pid") or 0)
            usage = read_process_stats(pid) if pid else None
            self._health().on_readings(model, usage.memory_bytes if usage is not None else None, celsius)
        return self._health().to_telemetry(now)

    def _start_host(self, release: StoredRelease, plan: Plan) -> Host:
        """Start the worker (or, without isolation, the engine in this process) that runs a release's slices."""
        setup = self._default_setup(plan)
        if self._tuner is not None:
            setup = self._tuner.setup_of(release.digest, setup)
        if not self._settings.isolate:
            return in_process(lambda plan: self._runtime(plan, setup))(release, plan)
        bounds = Bounds(self._settings.worker_memory_bytes or default_memory(machine_memory()))
        slice_s = plan.slice_s if self._settings.emulate else None
        return SupervisedHost(
            release, plan, setup, bounds, slice_s=slice_s, processor=self._processor_lock, on_lost=self._on_device_run
        )  # fmt: skip

    def _make_remote_inferences(self, uplink: Uplink) -> RemoteInferenceService:
        """The service that runs inferences of operators elsewhere."""

        def on_end(error: EdgeError | None) -> None:
            outcome = "answered" if error is None else outcome_label(error)
            self._metrics().registry.count(AGENT_REMOTE_INFERENCES, outcome)

        return RemoteInferenceService(
            self._update_actions.verify_inference_job,
            RemoteRequests(self._engine, self._settings.privacy_floor).answer, uplink.reply_inference,
            lambda: uplink.session_number, allowed=self._settings.remote_inference, on_end=on_end,
        )  # fmt: skip

    def _make_tuner(self, folder: DataFolder) -> Tuner | None:
        """The tuner; None on an emulated device, whose times are those of its profile with any setup, and without
        worker processes."""
        if self._settings.emulate or not self._settings.isolate:
            return None
        cores = min(os.cpu_count() or 1, MAX_TUNED_CORES)
        allowed = TuningLimits(cores, self._settings.threads, self._settings.optimise)
        return Tuner(TuningResults(folder.tuning_file), allowed)

    def _default_setup(self, plan: Plan) -> EngineOptions:
        """Default engine options."""
        if self._settings.emulate:
            return EngineOptions(threads=self._settings.threads or 1)
        return EngineOptions(
            threads=self._settings.threads or min(MAX_DEFAULT_THREADS, os.cpu_count() or 1),
            providers=self._settings.providers if self._settings.providers is not None else plan.providers,
        )

    def _runtime(self, plan: Plan, setup: EngineOptions) -> Runtime:
        engine = DispatchingRuntime(setup=setup)
        return EmulatedRuntime(engine, plan.slice_s, self._processor_lock) if self._settings.emulate else engine

    def _make_offload_client(self, tls: Any) -> OffloadClient | None:
        """The client of the offload server, behind an emulated link where one is configured; None without an offload
        server."""
        url = self._settings.offload or self._identity.offload
        if not url:
            return None
        if not self._settings.link:
            return OffloadClient(url, tls)
        from edgesplit.link_emulation import ShapedLink

        parts = urlsplit(url if "://" in url else f"https://{url}")
        host, port = parse_host_and_port(parts.netloc, "offload server")
        self._shaped_link = ShapedLink(host, port, parse_link(self._settings.link))
        self._shaped_link.start()
        if self._settings.link_trace is not None:
            self._shaped_link.replay_trace(self._settings.link_trace)
        log.warning("the link to the offload server is emulated: %s", self._settings.link)
        return OffloadClient(url, tls, via=self._link_address)

    @property
    def _link_address(self) -> tuple[str, int] | None:
        """Address of the emulated link to the cloud; None without one."""
        return ("127.0.0.1", self._shaped_link.port) if self._shaped_link is not None else None

    def _make_gateway(self) -> GatewayServer | None:
        if self._settings.gateway is None:
            return None
        if self._offload_client is None:
            raise UsageError("a gateway needs an offload server beyond it: give one with --offload")
        next_tier = NextTier(self._offload_client.url, self._link_address)
        metrics_address = self._settings.gateway_metrics
        options = ["--log-format", self._settings.log_format]
        options += ["--metrics", metrics_address] if metrics_address else []
        return GatewayServer(self._folder, self._identity, self._settings.gateway, next_tier, options)

    def _gateway_status(self) -> dict[str, str] | None:
        """Status of a gateway: its address, and why devices cannot offload to it; None for a device that is no
        gateway."""
        if self._gateway is None:
            return None
        return {"address": self._settings.gateway or "", "problem": self._gateway.trouble}
