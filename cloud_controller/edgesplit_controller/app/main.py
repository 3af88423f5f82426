"""Runs a controller process (`edgectl up`): starts every part in order and stops them in reverse order.

All state is in one data folder and survives SIGKILL at any moment; the next start continues from it. A part that cannot
be started is reported in one line (UsageError). An additional process (`join`) shares database and folder with the
first one, and starts neither broker nor offload server.

    DATA/controller.db    SQLite, unless there is --database        DATA/lock             pid of the running controller
    DATA/blobs/           files and chunks by SHA-256               DATA/ports.json       ports chosen for port 0
    DATA/cache/blobs/     copies of them, where they are in --blobs
    DATA/keys/            authority, content.key, derivation.key    DATA/ca.pem           for clients of the API
    DATA/tuf/             signing keys and metadata                 DATA/operator.token   0600
    DATA/broker/          mosquitto's configuration and store       DATA/controller.json  addresses, while it runs
    DATA/settings.json    options kept by `edgectl up`      DATA/addresses.json   addresses that devices were given
    DATA/offload/         root.json, revoked.pem and releases/ for the offload server
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI
from sqlalchemy import select

import edgesplit
from edgesplit.atomic_files import write_durably
from edgesplit.errors import EdgeError, UsageError
from edgesplit.mqtt.session import Session
from edgesplit.observability import log_format
from edgesplit.observability.metrics_server import make_metrics_server
from edgesplit.observability.prometheus import metrics_response
from edgesplit.observability.registry import MetricRegistry
from edgesplit.process.environment import environment_for_models
from edgesplit.process.lifecycle import forbid_core_dumps, on_stop_signals, raise_open_file_limit, wait_until
from edgesplit.process.supervised import SupervisedProcess
from edgesplit.release_store import remove_leftovers
from edgesplit.trust.identity import Credentials
from edgesplit.trust.renewed_context import RenewedContext
from edgesplit_controller.access.bootstrap import open_authenticator
from edgesplit_controller.access.tls_peer import HandshakeDeadlineLoop, PeerAwareHttp
from edgesplit_controller.api.app import create_app
from edgesplit_controller.api.dispatch import HeavyJobQueue
from edgesplit_controller.app import given_addresses
from edgesplit_controller.app.assembly import Assembly, Foundations, api_url, offload_url
from edgesplit_controller.app.housekeeping import CHECK_INTERVAL_S, Housekeeping
from edgesplit_controller.app.offload_process import OFFLOAD, REVOKED, offload_command, read_addresses
from edgesplit_controller.app.processes import ProcessSlot, acquire_slot, start_children
from edgesplit_controller.backup.origin import load_or_make_signing_key
from edgesplit_controller.backup.restore import RESTORED
from edgesplit_controller.caller import OWNER
from edgesplit_controller.components.offload_status import OffloadStatusProbes
from edgesplit_controller.components.probes import Probe, blobs_probe, broker_probe, offload_probe
from edgesplit_controller.components.recorder import PROBE_INTERVAL_S, StatusRecorder
from edgesplit_controller.fleet.devices import Devices
from edgesplit_controller.history import rollup_job
from edgesplit_controller.messaging.broker import Broker
from edgesplit_controller.messaging.broker_config import write_broker_files
from edgesplit_controller.messaging.broker_traffic import EVERY_S, TrafficInspection
from edgesplit_controller.messaging.delivery import RETAINED, SHARED
from edgesplit_controller.messaging.process_sharding import LeasedProcesses, SingleProcess
from edgesplit_controller.messaging.statement_publisher import StatementPublisher
from edgesplit_controller.observability import metrics
from edgesplit_controller.periodic_thread import PeriodicThread
from edgesplit_controller.pki.authority import BROKER_LIST_LIFE, Authority
from edgesplit_controller.pki.derived_secrets import DerivedSecrets
from edgesplit_controller.pki.own_certificates import OwnCertificates
from edgesplit_controller.pki.revocation_hook import RevocationCommand
from edgesplit_controller.planning.planner_service import REMEASURE_S
from edgesplit_controller.retention.holds import Holds
from edgesplit_controller.rollout.engine import SHORTEST_PAUSE_S, RolloutJob
from edgesplit_controller.rollout.metrics import rollout_counter
from edgesplit_controller.settings import RETENTION_FIELDS, BrokerKind, Settings, await_port, url_host, with_ports
from edgesplit_controller.status import ProcessStatus
from edgesplit_controller.storage.blob_location import open_blobs
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.leases import Lease, free_all_leases
from edgesplit_controller.storage.s3_blobs import S3BlobStore
from edgesplit_controller.storage.tables.core import Device, Model
from edgesplit_controller.tuf.repository import Repository
from edgesplit_controller.tuf.rotation import Rotation

log = logging.getLogger(__name__)

PORT_RELEASE_TIMEOUT_S = 15.0
"""Timeout, in seconds, for the child processes of a killed controller to release their ports."""
BROKER_CONNECT_TIMEOUT_S = 15.0
"""Timeout of the first connection to the broker, in seconds."""
REPLAN_INTERVAL_S = 60.0
"""Seconds between two inspections of the plans in use."""
COLLECT_AFTER_S, COLLECT_INTERVAL_S = 600.0, 3_600.0
"""Seconds from the start to the first garbage collection, and between two of them."""
MODELS_LOOKED_FOR = 8
"""As many of the newest models are looked for at the start; none of them there means another place."""
ABANDONED_S = 3_600.0
"""An upload that has not grown for this many seconds is deleted; until then another process may be receiving it."""
API_CREDENTIALS = "api"
"""Name of the API's server credentials."""


def run(
    settings: Settings, ready: Callable[[dict[str, Any]], None] | None = None, *, stop: threading.Event | None = None,
    listener: socket.socket | None = None,
) -> None:  # fmt: skip
    """Run a controller until SIGTERM, SIGINT or `stop`. `ready` is called with its addresses once everything works.
    With `listener` the API uses that socket instead of opening its own."""
    if not logging.getLogger().handlers:
        log_format.configure("info", settings.log_format)
    stopping = stop or threading.Event()
    forbid_core_dumps()
    raise_open_file_limit()  # inherited by the broker, which needs one per device
    with ExitStack() as stack:
        stack.enter_context(_stopped_by_signals(stopping))
        if settings.join:
            complete = settings if listener else _settings_of_joining(settings)
        else:
            killed = stack.enter_context(_locked(settings.data))
            complete = _with_free_ports(settings, PORT_RELEASE_TIMEOUT_S if killed else 0.0)
        addresses = _start(complete, stack, stopping, listener)
        if ready is not None:
            ready(addresses)
        wait_until(stopping)
        log.info("stopping")


def write_external_broker(settings: Settings, kind: BrokerKind, folder: Path, installed_at: Path | None) -> list[Path]:
    """Write the configuration for an external broker at `settings.broker`, before or while a controller runs; returns
    the files' paths."""
    if not settings.broker:
        raise UsageError("give the broker's address, as devices reach it: --broker mqtts://HOST:8883")
    DerivedSecrets(settings.data / "keys")  # before the authority is created
    authority = Authority(settings.data / "keys")
    database = Database(settings.database_url)
    try:
        devices = Devices(database, stale_after_s=settings.effective_stale_after_s, now=time.time)
        revoked = authority.revocation_list(devices.revoked_serials(), BROKER_LIST_LIFE)
    finally:
        database.close()
    names = dict.fromkeys((settings.device_broker[0], settings.broker_address[0]))
    return write_broker_files(
        kind, folder, authority, revoked, list(names), settings.broker_address[1], installed_at=installed_at,
        memory_bytes=settings.broker_memory,
    )  # fmt: skip


class _Part(Protocol):
    def start(self) -> None: ...

    def stop(self) -> None: ...


@dataclass(frozen=True)
class _Process:
    """One controller process while it starts."""

    foundations: Foundations
    assembly: Assembly
    slot: ProcessSlot
    certificates: OwnCertificates
    stack: ExitStack
    """Stops what was started, in reverse order."""
    stopping: threading.Event

    @property
    def settings(self) -> Settings:
        return self.foundations.settings

    def start(self, part: _Part) -> None:
        """Start a part, which `stack` stops."""
        self.stack.callback(part.stop)
        part.start()


def _start(
    settings: Settings, stack: ExitStack, stopping: threading.Event, listener: socket.socket | None
) -> dict[str, Any]:
    """Start every part; `stack` stops them. Returns the addresses and reminders about the keys."""
    process = _assemble(settings, stack, stopping)
    _check_blobs(process)
    history = _check_addresses(process)
    api_credentials = process.certificates.server(
        process.slot.file_name(API_CREDENTIALS), settings.certificate_hosts, for_browsers=True
    )
    write_durably(settings.data / "ca.pem", process.foundations.authority.ca_pem.encode())
    if not settings.join:
        load_or_make_signing_key(settings.data)  # so that every copy of keys/ can verify backups
        _recover(process)
    process.assembly.revocations.publish()
    # Order matters: the broker needs the revocation list, the session needs the broker, rollouts need the session;
    # the API comes after everything that its calls use, and the child processes share its socket.
    broker, delivery = _start_broker_side(process)
    session = _start_mqtt(process)
    _start_traffic_inspection(process, session, broker)
    _start_rollouts(process)
    offload = _start_offload(process)
    _start_health_recorder(process, session, broker, delivery, offload)
    listener = listener or _open_listener(settings.address, settings.api_port)
    holds = Holds(process.foundations.database, process.slot.lease, now=time.time)
    heavy = HeavyJobQueue(around=holds.hold)
    _start_api(process, api_credentials, listener, heavy, session)
    _start_periodic_work(process, heavy)
    start_children(_settings_of_children(settings), listener, stack)
    addresses = _addresses(settings)
    if not settings.join:
        write_durably(settings.data / "controller.json", json.dumps(addresses, indent=1).encode())
        stack.callback((settings.data / "controller.json").unlink, missing_ok=True)
        given_addresses.remember(settings.data, history, given_addresses.addresses_of(settings, time.time()))
    return {**addresses, "notices": process.assembly.controller.signing.notices()}


def _assemble(settings: Settings, stack: ExitStack, stopping: threading.Event) -> _Process:
    """Create the parts and take this process's number; starts nothing."""
    data = settings.data
    blobs = open_blobs(settings.blobs, data, settings.blob_cache_bytes)
    database = Database(settings.database_url)
    stack.callback(database.close)
    if not (settings.join or database.shared):
        free_all_leases(database)  # the folder's lock proves that no other process runs
    process_slot, lease = acquire_slot(database), Lease(database, "controller")
    stack.callback(process_slot.lease.release)
    derived_secrets = DerivedSecrets(data / "keys")  # before the authority is created
    authority, repository = Authority(data / "keys"), Repository(data / "tuf")
    (data / OFFLOAD / "releases").mkdir(parents=True, exist_ok=True)
    colleagues = LeasedProcesses(database, process_slot.number) if database.shared else SingleProcess()
    ledger = MetricRegistry()
    metrics.observe_statements(database.engine, ledger)
    foundations = Foundations(
        settings, database, blobs, authority, derived_secrets, repository, Rotation(repository), lease, colleagues,
        ledger,
    )  # fmt: skip
    certificates = OwnCertificates(authority)
    return _Process(foundations, Assembly(foundations), process_slot, certificates, stack, stopping)


def _check_addresses(process: _Process) -> list[given_addresses.GivenAddresses]:
    """The addresses that devices were given so far. UsageError if this start would strand enrolled devices."""
    if process.settings.join:
        return []
    history = given_addresses.read_history(process.settings.data)
    with process.foundations.database.read() as session:
        rows = session.execute(select(Device.name, Device.enrolled).where(Device.revoked.is_(None))).all()
        enrolled = {row.name: row.enrolled for row in rows}
    given_addresses.check_reachable(history, enrolled, process.settings)
    return history


def _check_blobs(process: _Process) -> None:
    """UsageError if this start looks for the models in another place than where they are. One that was lost is no
    reason not to start."""
    foundations, settings = process.foundations, process.settings
    with foundations.database.read() as session:
        stored = select(Model).where(Model.sha256 != "")  # versions of the agent have no file of their own
        models = session.scalars(stored.order_by(Model.id.desc()).limit(MODELS_LOOKED_FOR)).all()
    if not models or settings.force or any(foundations.blobs.touch(model.sha256) for model in models):
        return
    place = settings.blobs or settings.data / "blobs"
    raise UsageError(
        f"none of the newest models ({models[0].ref}) is in {place}: give the place where the blobs are (--blobs), move"
        " them with `edgectl blobs move`, or restore them; --force starts without them"
    )


def _recover(process: _Process) -> None:
    """Recovery by the first process of a data folder: delete abandoned uploads, renew metadata, complete a restored
    backup."""
    if not process.foundations.database.shared:
        remove_leftovers(process.settings.data / OFFLOAD / "releases")  # no other process writes there
    process.foundations.blobs.clear_incoming(older_than_s=ABANDONED_S if process.foundations.database.shared else 0.0)
    process.foundations.repository.renew()
    signing, restored = process.assembly.controller.signing, process.settings.data / RESTORED
    if restored.is_file():
        signing.after_restore()
        restored.unlink()
    signing.resume()
    process.assembly.controller.release_builder.permitted_devices.complete()


def _start_broker_side(process: _Process) -> tuple[Broker | None, RevocationCommand | None]:
    """Start the revocation command, if there is one, and the own broker, unless an external one is configured."""
    settings, revocations, folder = process.settings, process.assembly.revocations, process.settings.data / "broker"
    command = None
    if settings.on_revocation:
        command = RevocationCommand(settings.on_revocation, folder / REVOKED)
        revocations.add_reader(command)
        process.start(command)
    if not settings.runs_broker:
        return None, command
    credentials = process.certificates.server("broker", settings.certificate_hosts, on_renewed=lambda: broker.reload())
    broker = Broker(
        folder, credentials, settings.mqtt_port, host=settings.address, revoked_file=folder / REVOKED,
        on_client=process.assembly.delivery.on_client_connected, memory_bytes=settings.broker_memory,
    )  # fmt: skip
    process.start(broker)
    revocations.add_reader(broker, of_others=True)
    return broker, command


def _start_rollouts(process: _Process) -> None:
    """Start the publication of revocations and the rollout loop."""
    process.start(process.assembly.revocations)
    rollouts = process.assembly.controller.rollouts
    job = RolloutJob(rollouts, is_leader=process.foundations.lease.held)
    process.start(PeriodicThread("rollouts", job, SHORTEST_PAUSE_S, first_s=0.0))
    process.stack.callback(rollouts.has_new_reports.set)  # called first: the job waits for it


def _start_periodic_work(process: _Process, heavy: HeavyJobQueue) -> None:
    """Start the periodic work: telemetry aggregation, drift inspection, housekeeping."""
    foundations, controller = process.foundations, process.assembly.controller
    trims = (controller.roll_up.trim, controller.log_bundle_store.trim)
    roll_up = rollup_job.RollUpJob(controller.roll_up, trims, foundations.lease.held, process.stopping)
    process.start(PeriodicThread("roll-up", roll_up, rollup_job.EVERY_S, stopping=process.stopping))

    def replan() -> None:
        if foundations.lease.held():
            heavy.run_blocking(controller.replanner.replan_all, process.stopping)

    process.start(PeriodicThread("replan", replan, REPLAN_INTERVAL_S, stopping=process.stopping))

    def remeasure() -> None:
        if foundations.lease.held() and not heavy.waiting:
            heavy.run_blocking(lambda: controller.planner.remeasure_busy(process.stopping.wait), process.stopping)

    process.start(PeriodicThread("remeasure", remeasure, REMEASURE_S, stopping=process.stopping))

    if not process.settings.join:  # the first process has the retention rules that the data folder keeps
        _start_collection(process)
    housekeeping = Housekeeping(
        foundations.repository, foundations.rotation, controller, process.assembly.delivery,
        process.assembly.revocations, StatementPublisher(foundations.database), process.certificates,
        foundations.lease, process.slot.lease, process.stopping,
    )  # fmt: skip
    stopping = process.stopping
    process.start(PeriodicThread("housekeeping", housekeeping, CHECK_INTERVAL_S, first_s=0.0, stopping=stopping))


def _start_collection(process: _Process) -> None:
    """Start the periodic garbage collection."""
    collector = process.assembly.controller.collector

    def collect() -> None:
        try:
            collector.collect()
        except EdgeError as error:
            log.error("garbage is not collected now: %s", error)

    process.start(
        PeriodicThread("collection", collect, COLLECT_INTERVAL_S, first_s=COLLECT_AFTER_S, stopping=process.stopping)
    )


def _start_mqtt(process: _Process) -> Session:
    """Start the MQTT session and the workers behind it. Only the process that holds the lease subscribes to retained
    messages."""
    settings = process.settings
    delivery, lease = process.assembly.delivery, process.foundations.lease
    session = Session(
        *settings.broker_address,
        process.slot.broker_name,
        process.certificates.client_context(process.slot.broker_name),
        on_message=delivery.on_message,
        on_connect=delivery.on_connect,
    )
    # The name of the shared subscription is a secret: a client that knew it could join, and receive messages in place
    # of a controller process.
    group = process.foundations.derived_secrets.derive("shared subscriptions")
    own_topics = [delivery.forwarded_topic, delivery.reply_topic]
    session.subscribe([*(f"$share/{group}/{topic}" for topic in SHARED), *own_topics], qos=1)
    delivery.start(session)
    process.stack.callback(delivery.stop)
    session.start()
    process.stack.callback(session.stop)
    if not session.wait_connected(BROKER_CONNECT_TIMEOUT_S):
        whose = f"the broker {settings.broker}" if settings.broker else "our own broker"
        raise UsageError(f"{whose} refuses the connection: {session.problem}")

    def on_lease(ours: bool) -> None:
        if ours:
            session.subscribe(RETAINED, qos=1)
            delivery.on_connect()
        else:
            session.unsubscribe(RETAINED)

    process.stack.callback(lease.release)
    lease.keep_renewed(on_lease)
    return session


def _start_traffic_inspection(process: _Process, session: Session, broker: Broker | None) -> None:
    """Start counting the traffic of the own broker, so that floods which the controller never receives are found."""
    meter = process.assembly.meter
    if broker is not None and meter is not None:
        inspection = TrafficInspection(
            meter, broker.port, process.assembly.delivery.on_unseen_flood, busy_s=broker.processor_s,
            end_connection=broker.end_connection,
            processes=process.foundations.sharding.count, connected=lambda: session.connected,
        )  # fmt: skip
        process.start(PeriodicThread("broker traffic", inspection, EVERY_S, stopping=process.stopping))


def _start_offload(process: _Process) -> SupervisedProcess | None:
    """Start the offload server as a child process, unless it runs elsewhere; its credentials are created in either
    case."""
    settings = process.settings
    if not settings.join:
        process.certificates.server(OFFLOAD, settings.certificate_hosts)
    if not settings.offload:
        return None
    child = SupervisedProcess(
        "offload server", offload_command(settings), ready_line="listening on",
        log_file=settings.data / OFFLOAD / "offload.log", pid_file=settings.data / OFFLOAD / "pid",
        environment=environment_for_models(),
    )  # fmt: skip
    process.start(child)
    return child


def _start_health_recorder(
    process: _Process, session: Session, broker: Broker | None, delivery: RevocationCommand | None,
    offload: SupervisedProcess | None,
) -> None:  # fmt: skip
    """Start recording the health of broker, offload server and revocation lists."""
    settings = process.settings
    tls = process.certificates.client_context(process.slot.broker_name)
    own_url = f"https://{url_host(settings.own_address)}:{settings.offload_port}"
    url = own_url if settings.offload else offload_url(settings)
    probes: list[Probe] = [broker_probe(session, settings.broker, broker), offload_probe(url, tls, offload)]
    if isinstance(blobs := process.foundations.blobs, S3BlobStore):
        probes.append(blobs_probe(blobs.check))
    if not settings.join:  # one process asks for the status: its answer leads to events
        operator_tls = process.certificates.client_context(OWNER)
        on_flood = process.assembly.controller.devices.record_offload_flood
        status = OffloadStatusProbes(url, operator_tls, on_flood, now=time.time, delivery=delivery)
        probes += [status.lists, status.confinement]
    recorder = StatusRecorder(process.foundations.database, process.slot.number, probes, now=time.time)
    recorder.step()
    process.start(PeriodicThread("component health", recorder.step, PROBE_INTERVAL_S))


def _start_api(
    process: _Process, credentials: Credentials, listener: socket.socket, heavy: HeavyJobQueue, session: Session
) -> None:
    """Start the HTTPS server on a thread of its own; when it ends, the process ends."""
    settings, controller, delivery = process.settings, process.assembly.controller, process.assembly.delivery

    def queue_lengths() -> dict[str, float]:
        return {**delivery.queue_lengths(), "heavy": heavy.waiting, "broker": session.connected}

    gate, operators_ca = open_authenticator(
        settings.data, process.foundations.database, process.certificates, first=not settings.join
    )
    _start_metrics(process, queue_lengths)
    host, port = settings.device_broker
    addresses = {"broker": f"{host}:{port}", "offload": controller.addresses.offload_url}
    app = create_app(
        controller, gate, hosts=settings.certificate_hosts, model_bytes=settings.model_bytes, heavy=heavy,
        ledger=process.foundations.metric_registry, status=ProcessStatus(queue_lengths, addresses),
    )  # fmt: skip
    process.stack.callback(listener.close)
    _serve(process, app, uvicorn.Server(_https_config(app, credentials, operators_ca)), listener)


def _start_metrics(process: _Process, queue_lengths: metrics.QueueLengths) -> None:
    """Start the metrics server for Prometheus, if an address is configured."""
    if process.settings.metrics is None:
        return
    controller, rollouts = process.assembly.controller, rollout_counter(process.foundations.database)
    parts = (process.foundations.metric_registry, controller.fleet_overview, controller.roll_up, rollouts)
    server = make_metrics_server(
        process.settings.metrics, lambda: metrics_response(metrics.series(*parts, queue_lengths))
    )
    process.start(server)
    log.info("metrics at %s/metrics", server.url)


def _https_config(app: FastAPI, credentials: Credentials, operators_ca: Path) -> uvicorn.Config:
    """uvicorn's configuration."""
    # No proxy headers: the client is identified by its connection, never by a header.
    config = uvicorn.Config(
        app, http=PeerAwareHttp, ws="none", ssl_certfile=credentials.certificate_file, ssl_keyfile=credentials.key_file,
        log_config=None, log_level="warning", access_log=False, server_header=False, proxy_headers=False,
        lifespan="off", timeout_graceful_shutdown=3,
    )  # fmt: skip
    config.load()

    # Client certificates are optional: devices without one, or with an expired one, enrol and renew. What a client
    # without a certificate may do is decided by `api.authorisation`.
    def make_context() -> ssl.SSLContext:
        context = credentials.server_context(client_required=False)
        context.load_verify_locations(operators_ca)
        return context

    config.ssl = RenewedContext(credentials, make_context)
    return config


def _serve(process: _Process, app: FastAPI, server: uvicorn.Server, listener: socket.socket) -> None:
    """Start the server on a thread and wait until it accepts connections. UsageError if it does not start."""

    def serve() -> None:
        try:
            with asyncio.Runner(loop_factory=HandshakeDeadlineLoop) as runner:
                runner.run(server.serve(sockets=[listener]))
        finally:
            process.stopping.set()

    thread = threading.Thread(target=serve, name="api", daemon=True)

    def stop() -> None:
        server.should_exit = True
        app.state.hub.request_stop()  # open event streams would block the shutdown
        thread.join(10)

    process.stack.callback(stop)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise UsageError(
                f"the API does not start on {process.settings.address}:{process.settings.api_port}; its log says more"
            )
        time.sleep(0.005)


def _settings_of_children(settings: Settings) -> Settings:
    """Settings of the additional processes on this machine: shared database and broker, no port chosen anew."""
    host, port = settings.broker_address
    device_host, device_port = settings.device_broker
    return replace(
        settings, join=True, offload=False, database=settings.database_url, broker=f"mqtts://{url_host(host)}:{port}",
        advertised_broker=f"{url_host(device_host)}:{device_port}", api_url=api_url(settings),
        offload_url=offload_url(settings),
    )  # fmt: skip


def _settings_of_joining(settings: Settings) -> Settings:
    """Settings of a process that joins: what is not given is read from the shared data folder."""
    running = read_addresses(settings.data)
    if not (settings.data / "keys" / "ca.pem").is_file():
        raise UsageError(f"{settings.data} is no controller's data folder yet: `edgectl up` without --join comes first")
    if not settings.database:
        raise UsageError("--join needs the database that the processes share: --database postgresql://HOST/NAME")
    if not settings.broker and not running.get("mqtt_port"):
        raise UsageError(
            "no running controller has stored the broker's address: give it with --broker mqtts://HOST:8883"
        )
    device_broker = f"{url_host(str(running.get('mqtt_host')))}:{running.get('mqtt_port')}" if running else ""
    joined = replace(
        settings, offload=False, broker=settings.broker or f"mqtts://{device_broker}",
        blobs=settings.blobs or str(running.get("blobs", "")),
        advertised_broker=settings.advertised_broker or device_broker,
        api_url=settings.api_url or str(running.get("api_url", "")),
        offload_url=settings.offload_url or str(running.get("offload_url", "")), **running.get("retention", {}),
    )  # fmt: skip
    await_port(joined, "api_port", 0.0)
    return joined


def _with_free_ports(settings: Settings, timeout_s: float) -> Settings:
    """Settings with every port chosen, once the ports are free. The broker's port is not checked: `messaging.broker`
    first ends a process left over by a killed controller."""
    known = with_ports(settings)
    await_port(known, "api_port", timeout_s)
    if known.offload:
        await_port(known, "offload_port", timeout_s)
    return known


def _open_listener(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {address}:{port}: {error.strerror}") from error
    return listener


def _addresses(settings: Settings) -> dict[str, Any]:
    """Content of `controller.json`."""
    return {
        "api_url": api_url(settings), "api_port": settings.api_port,
        "mqtt_host": settings.device_broker[0], "mqtt_port": settings.device_broker[1],
        "offload_url": offload_url(settings), "offload_port": settings.offload_port, "bind": settings.address,
        "blobs": settings.blobs, "pid": os.getpid(), "version": edgesplit.__version__,
        "retention": {name: getattr(settings, name) for name in RETENTION_FIELDS},
    }  # fmt: skip


@contextmanager
def _locked(data: Path) -> Iterator[bool]:
    """Lock the data folder for one controller; the lock ends with the process, however that ends. Yields whether the
    previous controller was killed."""
    try:
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(data / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"cannot write in {data}: {error.strerror}; choose another folder with --data") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _lock_owner(descriptor)
            raise UsageError(f"a controller runs on {data} already (process {owner or 'unknown'})") from error
        killed = bool(_lock_owner(descriptor))
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield killed
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _lock_owner(descriptor: int) -> str:
    """The process id in the lock file; empty after a clean shutdown."""
    return os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()


@contextmanager
def _stopped_by_signals(stopping: threading.Event) -> Iterator[None]:
    """Set `ending` on SIGTERM and SIGINT, if this is the main thread; restore the handlers afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    on_stop_signals(stopping.set)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
