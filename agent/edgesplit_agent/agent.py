"""One agent: its parts put together, started and stopped. What each part decides is in its own module."""

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
from edgesplit.errors import UsageError
from edgesplit.http1.server import Response, Server
from edgesplit.links import host_and_port, parse_link
from edgesplit.mqtt.messages import Telemetry
from edgesplit.mqtt.telemetry import Queue, ReleaseHealth
from edgesplit.observability import log_format as logs
from edgesplit.observability import tracing
from edgesplit.observability.metrics import AGENT_INFO
from edgesplit.observability.metrics_server import metrics_server
from edgesplit.observability.prometheus import metrics_response
from edgesplit.observability.registry import gauge
from edgesplit.offload_client.pool import Remote
from edgesplit.oip.options import Hedge
from edgesplit.oip.report import phases
from edgesplit.plan import Plan
from edgesplit.release.privacy_floor import Floor
from edgesplit.release_store import Release
from edgesplit.runtime import Runtime
from edgesplit.runtime.dispatch import EngineByFormat
from edgesplit.runtime.emulated import EmulatedRuntime
from edgesplit.runtime.options import Optimise, Setup
from edgesplit_agent.control.certificate_renewal import Renewing, certificate_in_use
from edgesplit_agent.control.enrolment import credentials
from edgesplit_agent.control.gateway_server import GatewayServer, Onward
from edgesplit_agent.control.log_bundle import Diagnosis
from edgesplit_agent.control.mqtt_uplink import Uplink
from edgesplit_agent.host.clock import moment
from edgesplit_agent.host.log_buffer import keep_log
from edgesplit_agent.host.machine import board
from edgesplit_agent.offload.foreign_server import ForeignServers, Trust
from edgesplit_agent.offload.gateway_route import Way
from edgesplit_agent.power.mode import Wishes as PowerWishes
from edgesplit_agent.power.monitor import PowerWatch
from edgesplit_agent.power.sensors import ROOT as SYSFS
from edgesplit_agent.releases.chunk_store import ChunkStore
from edgesplit_agent.releases.output_drift import Drift
from edgesplit_agent.releases.tuner import Tuner
from edgesplit_agent.releases.tuning import Allowed, Memory
from edgesplit_agent.self_update.manager import OwnVersion
from edgesplit_agent.self_update.trial import TRIAL_S
from edgesplit_agent.serving.engine import Answer, Engine, predictions
from edgesplit_agent.serving.engine import Settings as EngineSettings
from edgesplit_agent.serving.http_endpoint import Endpoint, answers
from edgesplit_agent.serving.metrics import RequestMetrics, emulated_label, power, readings
from edgesplit_agent.state.data_folder import DataFolder, Here, Identity
from edgesplit_agent.state.slots import HEALTH_S
from edgesplit_agent.telemetry.disk_ring import OLDEST_S, QUOTA_BYTES, Ring
from edgesplit_agent.telemetry.outbox import Outbox
from edgesplit_agent.telemetry.release_health import HealthLedger
from edgesplit_agent.telemetry.windows import Windows, telemetry
from edgesplit_agent.updates.actions import Work
from edgesplit_agent.updates.bundle.request import BundleWatch
from edgesplit_agent.updates.download_window import FetchHours, Span
from edgesplit_agent.updates.reconciler import Updater, kept_states, model_states
from edgesplit_agent.worker.host import Host, in_process
from edgesplit_agent.worker.proc_stats import default_memory, machine_memory, vitals
from edgesplit_agent.worker.supervised_host import Hosted
from edgesplit_agent.worker.watchdog_policy import Bounds

if TYPE_CHECKING:
    from edgesplit.link_emulation import ShapedLink

log = logging.getLogger(__name__)

MOST_THREADS = 4
MOST_CORES = 16
"""That tuning tries; a device has fewer."""
NO_POWER = "the plan has no power figures: power budget and battery policy do not count for it (deploy the model again)"


@dataclass(frozen=True)
class LocalSocket:
    """The Unix socket that applications may use."""

    path: Path | None = None
    """None: `agent.sock` in the data folder, or none where there can be none."""
    mode: int = 0o600
    group: str | None = None
    wanted: bool = True


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """What the command line says; None or empty: as enrolment said."""

    data: Path
    port: int = 8600
    emulate: bool = False
    offload: str | None = None
    broker: str | None = None
    link: str | None = None
    fetch_bytes_per_s: float = math.inf
    """Releases are fetched no faster than this."""
    floor: Floor = field(default_factory=Floor)
    """What no plan may send away, whoever signed it."""
    health_s: float = HEALTH_S
    """A release on trial serves so long without a failure of its own before it is committed."""
    trial_s: float = TRIAL_S
    """A new version of the agent has so long to reach the broker and to serve what was served before."""
    foreign: Trust = field(default_factory=Trust)
    """How servers that are not ours are met over TLS."""
    fetch_hours: tuple[Span, ...] = ()
    """Releases are fetched in these hours only; empty: at any time."""
    store_quota_bytes: int | None = None
    """Releases take no more room than this; None: half of the disk."""
    telemetry_quota_bytes: int = QUOTA_BYTES
    """What is measured while the link is gone takes no more room than this..."""
    telemetry_age_s: float = OLDEST_S
    """...and is kept for no longer."""
    gateway: str | None = None
    """HOST:PORT at which devices offload to this one; None: nobody does."""
    metrics: tuple[str, int] | None = None
    """Where Prometheus may read from outside of this device; None: only on localhost, where applications ask."""
    power: PowerWishes = field(default_factory=PowerWishes)
    """What the operator wants of battery and power."""
    sensors_root: Path | None = None
    """Where sysfs is; None: /sys, and nowhere on an emulated device, whose host's sensors are not its own."""
    link_trace: UplinkTrace | None = None
    """The emulated link's uplink follows it."""
    gateway_metrics: str = ""
    """ADDRESS:PORT of the same for a gateway's server; empty: nowhere."""
    log_format: logs.Format = "text"
    socket: LocalSocket = field(default_factory=LocalSocket)
    """Where applications reach it without TCP."""
    threads: int = 0
    """Of the runtime; 0: as many as the device has, at most four, and one where the device is emulated."""
    isolate: bool = True
    """Models run in worker processes, not in the agent's own."""
    worker_memory_bytes: int = 0
    """That one worker may take; 0: half of the machine's."""
    optimise: Optimise = "fast"
    """Whether engines may fuse further than slices were cut, where that was measured to be faster."""
    providers: tuple[str, ...] | None = None
    """Accelerators to try first, in order; None: what the plan names for this class of device."""
    lanes: bool = True
    """Applications may ask a model's worker past the agent, where there is nothing to decide for each request."""
    hedge: Hedge = "auto"
    hedge_budget: float | None = None
    """See `hedging`."""


class Agent:
    """A device that is enrolled. The folder must be held by the caller."""

    def __init__(
        self,
        settings: AgentSettings,
        folder: DataFolder,
        identity: Identity,
        own_version: OwnVersion | None = None,
    ) -> None:
        """Without `own_version` it stays the version that it is."""
        self._settings = settings
        self._folder = folder
        self._identity = identity
        self._processor = threading.Lock()
        self._windows = Windows()
        self._health = HealthLedger()
        self._metrics = RequestMetrics()
        self._tracer = tracing.configured(
            "edgesplit-agent", {"edgesplit.device": identity.device, "edgesplit.emulated": settings.emulate}
        )
        self._shaped: ShapedLink | None = None
        tls = credentials(folder).client_context()
        self._remote = self._make_remote(tls)
        self._foreign = ForeignServers(settings.foreign, parse_link(settings.link) if settings.link else None)
        self._way = Way(
            self._remote, self._via, link=settings.link or "", stays=bool(settings.offload)
        )  # until the first statement is believed, to the cloud
        self._power = PowerWatch(
            settings.power, settings.sensors_root or (None if settings.emulate else SYSFS), emulated=settings.emulate
        )
        self._engine = Engine(
            identity.device_class, self._remote, observe=self._observe, own_part=self._own_part,
            outcome=self._outcome, tracer=self._tracer,
            power=self._power,
            settings=EngineSettings(hedge=settings.hedge, hedge_budget=settings.hedge_budget, lanes=settings.lanes),
            remote_of=self._foreign.of, settled=self._is_settled,
        )  # fmt: skip
        self._scraped = metrics_server(settings.metrics, self.metrics) if settings.metrics is not None else None
        self._endpoint = Endpoint(self._engine, self.status, self.metrics)
        self._server = Server(self._endpoint, host="127.0.0.1", port=settings.port)
        self._local_server: Server | None = None
        store = ChunkStore(folder.chunks, folder.releases, settings.store_quota_bytes)
        self._tuner = self._make_tuner(folder)
        self._work = Work(
            folder, identity, self._engine, store, self._start_host,
            lead=self._way.lead, tuner=self._tuner,
            floor=settings.floor, hours=FetchHours(settings.fetch_hours, hold=self._power.hold),
            endpoint=lambda: answers(self.url), activated=self._activated, own_version=own_version,
        )  # fmt: skip
        self._updater = Updater(self._work, health_s=settings.health_s, trial_s=settings.trial_s)
        self._bundles = BundleWatch(folder.bundle_wish, self._updater)
        self._work.told_of_bundle = self._bundles.copied
        self._tls = tls
        self._uplink: Uplink | None = None
        quota, oldest_s = settings.telemetry_quota_bytes, settings.telemetry_age_s
        self._outbox = Outbox(Ring(folder.late, quota_bytes=quota, oldest_s=oldest_s))
        self._renewing = Renewing(folder, identity, self._renewed)
        self._gateway = self._make_gateway()

    def start(self) -> None:
        """Serve what is here at once; then connect."""
        self._power.start()
        want = self._work.boot()
        self._server.start()  # only now: an application that came earlier would be told of a model that is not here
        self._local_server = self._listen_locally()
        self._engine.start()
        if self._scraped is not None:
            self._scraped.start()
        self._uplink = Uplink(
            self._folder,
            self._identity,
            host_and_port(self._settings.broker or self._identity.broker, "broker"),
            self._tls,
            fetch_bytes_per_s=self._settings.fetch_bytes_per_s,
            sample=self._sample,
            emulated=self._settings.emulate,
            local_url=self.url,
            certificate=lambda: str(certificate_in_use(self._folder).serial_number),
            outbox=self._outbox,
            built_for=self._work.built_for,
            on_job=lambda job: self._diagnosis.asked(job),
        )
        self._diagnosis = Diagnosis(
            self._folder, self._identity.device, keep_log(), self.status, self._uplink.answer
        )  # fmt: skip
        self._diagnosis.start()
        self._work.connect(self._uplink)
        self._updater.start(want)
        self._bundles.start()
        self._uplink.start(self._updater.offer, self._updater.online)
        self._renewing.start()
        if self._gateway is not None:
            self._gateway.start()
        here = Here(
            device=self._identity.device,
            url=self.url,
            pid=os.getpid(),
            emulated=self._settings.emulate,
            socket=self.socket_url,
        )
        self._folder.write_here(here)

    def stop(self) -> None:
        """Finish what runs, say goodbye, close every connection."""
        self._renewing.stop()
        self._bundles.stop()
        if self._gateway is not None:
            self._gateway.stop()
        for server in (self._local_server, self._server, self._scraped):
            if server is not None:
                server.stop()
        self._endpoint.close()
        if self._uplink is not None:
            self._diagnosis.stop()
            self._uplink.stop()
        self._updater.stop()
        self._work.stopped()
        self._engine.stop()
        self._power.stop()
        self._foreign.stop()
        for release in self._engine.serving.values():
            release.host.close()
        self._way.stop()
        if self._shaped is not None:
            self._shaped.stop()
        self._tracer.stop()

    @property
    def url(self) -> str:
        """Where applications on this device reach it."""
        return self._server.url

    @property
    def socket_url(self) -> str:
        """The same without TCP; empty where there is no Unix socket."""
        return self._local_server.url if self._local_server is not None else ""

    def proof(self) -> str:
        """What goes on, in a line, as an application would be told; LinkError where nobody would be answered, and
        nothing at all where a part of us hangs."""
        answers(self.url)
        told = self.status()
        models = ", ".join(one["model"] for one in told["models"]) or "no model yet"
        return f"{told['device']}: {models}; {'online' if told['broker']['connected'] else 'no broker'}"

    def status(self) -> dict[str, Any]:
        """What people and tools may know; `edgesplit-agent status` shows it."""
        self._engine.catch_up()
        want, have = self._updater.snapshot
        now = self._engine.conditions
        uplink = self._uplink
        return {
            "device": self._identity.device,
            "device_class": self._identity.device_class,
            "version": edgesplit.__version__,
            "emulated": self._settings.emulate,
            "link_emulated": self._settings.link or "",
            "broker": {"connected": bool(uplink and uplink.connected), "problem": uplink.problem if uplink else ""},
            "socket": self.socket_url,
            "session": uplink.session_number if uplink else 0,
            "floor": self._settings.floor.as_text(),
            "statement": want.counter if want else 0,
            "conditions": msgspec.to_builtins(now),
            "power": self._power.status(),
            "breaker": self._engine.breaker.state,
            "gateway": self._way.gateway,
            "serves": self._serves(),
            "kept": msgspec.to_builtins(kept_states(want, have)),
            "models": [self._model_status(name) for name in sorted(self._engine.serving)],
            "wanted": msgspec.to_builtins(model_states(want, have)),
            "safe_mode": have.safe_mode,
            "trouble": have.offer_trouble,
            "bundle": self._bundles.status(),
            "starts_not_found_healthy": have.starts,
            "joined": self._engine.joined,
            "hedging": dict(self._engine.hedging),
            "dropped": self._engine.dropped,
            "stale": self._engine.stale,
            "delivery": vars(uplink.chunks.counters) if uplink else {},
            "health": msgspec.to_builtins(self._health.told(monotonic())),
            "late_telemetry": msgspec.to_builtins(self._outbox.seen()),
        }

    def metrics(self) -> Response:
        """The page that Prometheus reads."""
        self._engine.catch_up()
        connected = bool(self._uplink and self._uplink.connected)
        info = gauge(AGENT_INFO, 1.0, self._identity.device, self._identity.device_class, edgesplit.__version__)
        powered = power(self._power.stance.mode, self._power.readings)
        series = [info, *self._metrics.ledger.series(), *readings(self._engine, connected), *powered]
        return metrics_response(series, emulated_label(self._settings.emulate))

    def _listen_locally(self) -> Server | None:
        """The endpoint on a Unix socket too. One that nobody asked for by name can be done without."""
        wanted = self._settings.socket
        if not wanted.wanted:
            return None
        path = wanted.path or self._folder.socket
        server = Server(self._endpoint, path=path.absolute(), mode=wanted.mode, group=wanted.group)
        try:
            server.start()
        except UsageError as error:
            if wanted.path is not None:
                raise
            log.warning("applications reach this agent by TCP only: %s", error)
            return None
        return server

    def _renewed(self) -> None:
        """Show the new certificate from now on, everywhere."""
        held = credentials(self._folder)
        self._tls.load_cert_chain(held.certificate_file, held.key_file)
        if self._remote is not None:
            self._remote.renew()
        if self._gateway is not None:
            self._gateway.renewed()
        if self._uplink is not None:
            self._uplink.renew()

    def _model_status(self, model: str) -> dict[str, Any]:
        release = self._engine.serving[model]
        conditions, breaker = self._engine.beyond(model)
        foreign = {"offload": release.plan.offload, "breaker": breaker.state} if release.plan.offload else {}
        return {
            "model": model,
            "version": release.manifest.model,
            "release": release.digest,
            "row": self._engine.row_of(model),
            "why": self._engine.why(model) or self._unpowered(release.plan),
            "rows": predictions(release.plan, conditions),
            **foreign,
            "counters": self._windows.total.get(model, {}),
            "worker": release.host.status(),
            "trouble": release.trouble,
            "no_lanes": self._engine.why_no_lane(model),
            "phases": self._metrics.split(release.manifest.model),
        }

    def _unpowered(self, plan: Plan) -> str:
        """What to tell an operator who asked for what this plan cannot be judged by."""
        asked = self._settings.power.watts is not None or self._power.stance.mode != "performance"
        return NO_POWER if asked and plan.power is None else ""

    def _is_settled(self, model: str) -> bool:
        return model not in self._updater.snapshot[1].trials

    def _own_part(self, release: str, error: Exception | None) -> None:
        self._updater.ran(release, error)

    def _activated(self, model: str, release: str, drift: Drift | None, golden_ok: bool | None) -> None:
        self._health.activated(model, release, monotonic(), drift, golden_ok)

    def _outcome(self, model: str, release: str, result: Answer | Exception) -> None:
        if isinstance(result, Answer):
            self._health.answered(model, result.report)
        else:
            self._health.failed(model, release, result)

    def _observe(self, model: str, result: Answer | Exception) -> None:
        release = self._engine.serving.get(model)
        named = release.manifest.model if release is not None else model
        if isinstance(result, Answer):
            split = phases(result.report)
            self._windows.observe(model, result.report, split)
            self._metrics.observe(named, result.report, split)
        else:
            self._windows.observe(model, None)
            self._metrics.observe(named, result)

    def _sample(self, session: int, sequence: int, take: bool) -> tuple[Telemetry | None, object]:
        now = self._engine.conditions
        worth = (now.remote_ok, tuple((model, self._engine.row_of(model)) for model in sorted(self._engine.serving)))
        if not take:
            return None, worth
        self._engine.catch_up()
        windows = self._windows.take(self._engine.serving, now)
        told = telemetry(
            session, sequence, self._settings.emulate, now, windows, self._power.seen(), **self._around()
        )  # fmt: skip
        return told, worth

    def _around(self) -> dict[str, Any]:
        """What telemetry says beside requests and power."""
        want, _ = self._updater.snapshot
        return {
            "moment": moment(),
            "agent": edgesplit.__version__[:40],
            "statement": want.counter if want else 0,
            "statement_expires": want.expires if want else 0,
            "queue": Queue(self._engine.here, self._engine.dropped),
            "board": board(self._folder.path),
            "health": self._healths(),
            "store": self._outbox.seen(),
        }

    def _healths(self) -> tuple[ReleaseHealth, ...]:
        """How each release that serves has done."""
        now, serving = monotonic(), self._engine.serving
        self._health.serving({model: one.digest for model, one in serving.items()}, now)
        celsius = self._power.readings.celsius
        for model, release in serving.items():
            pid = int(release.host.status().get("pid") or 0)
            seen = vitals(pid) if pid else None
            self._health.saw(model, seen.memory_bytes if seen is not None else None, celsius)
        return self._health.told(now)

    def _start_host(self, release: Release, plan: Plan) -> Host:
        """Where a release's slices run."""
        setup = self._setup(plan)
        if self._tuner is not None:
            setup = self._tuner.setup_of(release.digest, setup)
        if not self._settings.isolate:
            return in_process(lambda plan: self._runtime(plan, setup))(release, plan)
        bounds = Bounds(self._settings.worker_memory_bytes or default_memory(machine_memory()))
        slice_s = plan.slice_s if self._settings.emulate else None
        return Hosted(
            release, plan, setup, bounds, slice_s=slice_s, processor=self._processor, lost=self._own_part
        )  # fmt: skip

    def _make_tuner(self, folder: DataFolder) -> Tuner | None:
        """An emulated device takes the time that its profile predicts, however it is set up."""
        if self._settings.emulate or not self._settings.isolate:
            return None
        allowed = Allowed(
            cores=min(os.cpu_count() or 1, MOST_CORES), threads=self._settings.threads, optimise=self._settings.optimise
        )
        return Tuner(Memory(folder.tuning_file), allowed)

    def _setup(self, plan: Plan) -> Setup:
        if self._settings.emulate:
            return Setup(threads=self._settings.threads or 1)
        return Setup(
            threads=self._settings.threads or min(MOST_THREADS, os.cpu_count() or 1),
            providers=self._settings.providers if self._settings.providers is not None else plan.providers,
        )

    def _runtime(self, plan: Plan, setup: Setup) -> Runtime:
        engine = EngineByFormat(setup=setup)
        return EmulatedRuntime(engine, plan.slice_s, self._processor) if self._settings.emulate else engine

    def _make_remote(self, tls: Any) -> Remote | None:
        """The offload server, behind an emulated link where one is asked for."""
        url = self._settings.offload or self._identity.offload
        if not url:
            return None
        if not self._settings.link:
            return Remote(url, tls)
        from edgesplit.link_emulation import ShapedLink

        parts = urlsplit(url if "://" in url else f"https://{url}")
        host, port = host_and_port(parts.netloc, "offload server")
        self._shaped = ShapedLink(host, port, parse_link(self._settings.link))
        self._shaped.start()
        if self._settings.link_trace is not None:
            self._shaped.follow(self._settings.link_trace)
        log.warning("the link to the offload server is emulated: %s", self._settings.link)
        return Remote(url, tls, via=self._via)

    @property
    def _via(self) -> tuple[str, int] | None:
        """Where the emulated link to the cloud is entered."""
        return ("127.0.0.1", self._shaped.port) if self._shaped is not None else None

    def _make_gateway(self) -> GatewayServer | None:
        if self._settings.gateway is None:
            return None
        if self._remote is None:
            raise UsageError("a gateway needs an offload server beyond it: give one with --offload")
        onward = Onward(self._remote.url, self._via)
        watched = self._settings.gateway_metrics
        more = ["--log-format", self._settings.log_format, *(["--metrics", watched] if watched else [])]
        return GatewayServer(self._folder, self._identity, self._settings.gateway, onward, more)

    def _serves(self) -> dict[str, str] | None:
        """Of a gateway: where it listens, and why devices cannot offload there, if they cannot."""
        if self._gateway is None:
            return None
        return {"at": self._settings.gateway or "", "trouble": self._gateway.trouble}
