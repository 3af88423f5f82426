"""`edgectl up`: everything that makes a controller, started in order and stopped in the opposite one.

All state is in one data folder and survives SIGKILL at any moment; a second start finds it again. What cannot be
started is told in one line (UsageError). A further process (`join`) has database and folder in common with the one that
came first, and starts neither broker nor offload server.

    DATA/controller.db    SQLite, unless there is --database        DATA/lock             who runs on this folder
    DATA/blobs/           files and chunks by SHA-256               DATA/ports.json       ports chosen for port 0
    DATA/keys/            authority, certificates, content.key      DATA/ca.pem           for clients of the API
    DATA/tuf/             signing keys and metadata                 DATA/operator.token   0600
    DATA/broker/          mosquitto's configuration and store       DATA/controller.json  addresses, while it runs
    DATA/offload/         root.json, revoked.pem and releases/ for the offload server
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

import edgesplit
from edgesplit.atomic_files import write_durably
from edgesplit.errors import UsageError
from edgesplit.mqtt.session import Session
from edgesplit.observability import log_format
from edgesplit.observability.metrics_server import metrics_server
from edgesplit.observability.prometheus import metrics_response
from edgesplit.observability.registry import Ledger
from edgesplit.process.lifecycle import on_stop_signals, open_as_many_files_as_allowed, wait_until
from edgesplit.process.supervised import Child
from edgesplit.trust.identity import Credentials
from edgesplit_controller.access.bootstrap import open_gate
from edgesplit_controller.access.tls_peer import TellingPeers
from edgesplit_controller.api.app import create_app
from edgesplit_controller.api.dispatch import Heavy
from edgesplit_controller.app.assembly import Assembly, Foundations, api_url, offload_url
from edgesplit_controller.app.housekeeping import Tending
from edgesplit_controller.app.offload_process import OFFLOAD, REVOKED, offload_command, told_addresses
from edgesplit_controller.app.processes import Place, start_further, take_place
from edgesplit_controller.backup.restore import RESTORED
from edgesplit_controller.components.probes import broker_look, offload_look
from edgesplit_controller.components.recorder import Noting
from edgesplit_controller.controller import Addresses
from edgesplit_controller.fleet.devices import Devices
from edgesplit_controller.history.rollup_loop import add_up
from edgesplit_controller.messaging.broker import Broker
from edgesplit_controller.messaging.broker_config import write_broker_files
from edgesplit_controller.messaging.delivery import RETAINED, SPREAD, Delivery
from edgesplit_controller.messaging.process_sharding import Alone, OnDatabase
from edgesplit_controller.messaging.statement_publisher import Stating
from edgesplit_controller.observability import metrics
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.pki.revocation import Revocations
from edgesplit_controller.pki.revocation_hook import RevocationCommand
from edgesplit_controller.replan.loop import watch
from edgesplit_controller.rollout.engine import RolloutLoop
from edgesplit_controller.rollout.metrics import counting
from edgesplit_controller.settings import BrokerKind, Settings, await_port, url_host, with_ports
from edgesplit_controller.status import Condition
from edgesplit_controller.storage.blobs import BlobStore
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.leases import Lease, forget_leases
from edgesplit_controller.tuf.repository import Repository
from edgesplit_controller.tuf.rotation import Rotation

log = logging.getLogger(__name__)

LEFTOVER_S = 15.0
"""How long the children of a killed controller may take to let go of their ports."""
CONNECT_S = 15.0
ABANDONED_S = 3_600.0
"""An upload that grew no more for so long is nobody's: other processes may be receiving the others."""
API = "api"


def run(
    settings: Settings,
    ready: Callable[[dict[str, Any]], None] | None = None,
    *,
    stop: threading.Event | None = None,
    listener: socket.socket | None = None,
) -> None:
    """Run a controller until SIGTERM, SIGINT or `stop`; `ready` is told its addresses once everything works. With
    `listener` the API answers there instead of at an address of its own."""
    if not logging.getLogger().handlers:
        log_format.configure("info", settings.log_format)
    ending = stop or threading.Event()
    open_as_many_files_as_allowed()  # the broker's too: a descriptor for each device
    with ExitStack() as stack:
        stack.enter_context(_stopped_by_signals(ending))
        if settings.join:
            known = settings if listener else _joined(settings)
        else:
            killed = stack.enter_context(_locked(settings.data))
            known = _with_free_ports(settings, LEFTOVER_S if killed else 0.0)
        addresses = _start(known, stack, ending, listener)
        if ready is not None:
            ready(addresses)
        wait_until(ending)
        log.info("stopping")


def write_external_broker(settings: Settings, kind: BrokerKind, folder: Path, installed_at: Path | None) -> list[Path]:
    """The files for a broker at `settings.broker`, before or while a controller runs; their paths."""
    if not settings.broker:
        raise UsageError("say where that broker will be, as devices reach it: --broker mqtts://HOST:8883")
    authority = Authority(settings.data / "keys")
    database = Database(settings.database_url)
    try:
        devices = Devices(database, stale_after_s=settings.silent_after_s, now=time.time)
        revoked = authority.revocation_list(devices.revoked_serials())
    finally:
        database.close()
    names = dict.fromkeys((settings.told_broker[0], settings.broker_address[0]))
    return write_broker_files(
        kind, folder, authority, revoked, list(names), settings.broker_address[1], installed_at=installed_at
    )


@dataclass(frozen=True)
class _Process:
    """One process of a controller while it starts."""

    on: Foundations
    made: Assembly
    place: Place
    stack: ExitStack
    """Stops what was started, in the opposite order."""
    ending: threading.Event

    @property
    def settings(self) -> Settings:
        return self.on.settings


def _start(
    settings: Settings, stack: ExitStack, ending: threading.Event, listener: socket.socket | None
) -> dict[str, Any]:
    """Start every part; `stack` stops them."""
    one = _assembled(settings, stack, ending)
    api_credentials = one.on.authority.issue_server(
        one.place.file_name(API), settings.certificate_hosts, to_browsers=True
    )
    write_durably(settings.data / "ca.pem", one.on.authority.ca_pem.encode())
    if not settings.join:
        _catch_up(one)
    one.made.revocations.publish()
    broker = _broker_side(one)
    session = _mqtt(one)
    _roll_out(one)
    offload = _offload(one)
    _note_parts(one, session, broker, offload)
    listener, heavy = listener or _listener(settings.address, settings.api_port), Heavy()
    _api(one, api_credentials, listener, heavy, session)
    _tend(one, heavy)
    start_further(_of_further(settings), listener, stack)
    addresses = _as_told(settings)
    if not settings.join:
        write_durably(settings.data / "controller.json", json.dumps(addresses, indent=1).encode())
        stack.callback((settings.data / "controller.json").unlink, missing_ok=True)
    return {**addresses, "notices": one.made.controller.signing.notices()}


def _assembled(settings: Settings, stack: ExitStack, ending: threading.Event) -> _Process:
    """What keeps and decides, and this process's place among others; nothing runs yet."""
    data = settings.data
    database = Database(settings.database_url)
    stack.callback(database.close)
    if not (settings.join or database.shared):
        forget_leases(database)  # the folder's lock says that we are alone
    place, lease = take_place(database), Lease(database, "controller")
    stack.callback(place.lease.release)
    authority, repository = Authority(data / "keys"), Repository(data / "tuf")
    (data / OFFLOAD / "releases").mkdir(parents=True, exist_ok=True)
    colleagues = OnDatabase(database, place.number) if database.shared else Alone()
    ledger = Ledger()
    metrics.watch(database.engine, ledger)
    on = Foundations(
        settings, database, BlobStore(data / "blobs"), authority, repository, Rotation(repository), lease, colleagues,
        ledger,
    )  # fmt: skip
    return _Process(on, Assembly(on), place, stack, ending)


def _catch_up(one: _Process) -> None:
    """What the first process of a folder does for what an earlier one left: uploads, metadata, a backup restored."""
    one.on.blobs.clear_incoming(older_than_s=ABANDONED_S if one.on.database.shared else 0.0)
    one.on.repository.renew()
    signing, restored = one.made.controller.signing, one.settings.data / RESTORED
    if restored.is_file():
        signing.come_back()
        restored.unlink()
    signing.catch_up()


def _broker_side(one: _Process) -> Broker | None:
    """Whoever is to hear of revocations hears of them; our own broker, where it is ours to run."""
    settings, revocations = one.settings, one.made.revocations
    if settings.on_revocation:
        _told_of_revocations(settings, revocations, one.stack)
    if settings.broker or settings.join:
        return None
    credentials = one.on.authority.issue_server("broker", settings.certificate_hosts)
    broker = _broker(settings, credentials, one.made.delivery, one.stack)
    revocations.tell(broker, of_others=True)
    return broker


def _roll_out(one: _Process) -> None:
    """Devices can be told: revocations and rollouts go on."""
    one.stack.callback(one.made.revocations.stop)
    one.made.revocations.start()
    loop = RolloutLoop(one.made.controller.rollouts, may_step=one.on.lease.held)
    one.stack.callback(loop.stop)
    loop.start()


def _tend(one: _Process, heavy: Heavy) -> None:
    """What is done now and then: adding up, looking for better plans, renewing what expires."""
    on, controller = one.on, one.made.controller
    trims = (controller.rolling.trim, controller.bundles.trim)
    add_up(controller.rolling, trims, on.lease.held, one.stack, one.ending)
    watch(controller.replanner.look, heavy.submit, on.lease.held, one.stack, one.ending)
    tending = Tending(
        on.repository, on.rotation, controller, one.made.delivery, one.made.revocations, Stating(on.database), on.lease,
        one.place.lease, one.ending,
    )  # fmt: skip
    one.stack.callback(tending.stop)
    tending.start()


def _broker(settings: Settings, credentials: Credentials, delivery: Delivery, stack: ExitStack) -> Broker:
    folder = settings.data / "broker"
    broker = Broker(
        folder,
        credentials,
        settings.mqtt_port,
        host=settings.address,
        revoked_file=folder / REVOKED,
        on_client=delivery.connected,
    )
    stack.callback(broker.stop)
    broker.start()
    return broker


def _mqtt(one: _Process) -> Session:
    """Our own session, and the workers behind it. Who holds the lease hears what the broker retains."""
    settings, authority, delivery, lease = one.settings, one.on.authority, one.made.delivery, one.on.lease
    session = Session(
        *settings.broker_address,
        one.place.broker_name,
        authority.issue_client(one.place.broker_name).client_context(),
        on_message=delivery.on_message,
        on_connect=delivery.on_connect,
    )
    # Whoever knew the group's name could join it, and would take others' messages away.
    group = authority.secret("shared subscriptions")
    session.subscribe([*(f"$share/{group}/{topic}" for topic in SPREAD), delivery.passed_topic], qos=1)
    delivery.start(session)
    one.stack.callback(delivery.stop)
    session.start()
    one.stack.callback(session.stop)
    if not session.wait_connected(CONNECT_S):
        whose = f"the broker {settings.broker}" if settings.broker else "our own broker"
        raise UsageError(f"{whose} does not let us in: {session.problem}")

    def lead(ours: bool) -> None:
        if ours:
            session.subscribe(RETAINED, qos=1)
            delivery.on_connect()
        else:
            session.unsubscribe(RETAINED)

    one.stack.callback(lease.release)
    lease.keep(lead)
    return session


def _told_of_revocations(settings: Settings, revocations: Revocations, stack: ExitStack) -> None:
    command = RevocationCommand(settings.on_revocation, settings.data / "broker" / REVOKED)
    stack.callback(command.stop)
    revocations.tell(command)
    command.start()


def _offload(one: _Process) -> Child | None:
    """Our own offload server, where there shall be one; one that is run elsewhere finds its credentials."""
    settings = one.settings
    if not settings.join:
        one.on.authority.issue_server(OFFLOAD, settings.certificate_hosts)
    if not settings.offload:
        return None
    child = Child(
        "offload server",
        offload_command(settings),
        announces="listening on",
        log_file=settings.data / OFFLOAD / "offload.log",
        pid_file=settings.data / OFFLOAD / "pid",
    )
    one.stack.callback(child.stop)
    child.start()
    return child


def _note_parts(one: _Process, session: Session, broker: Broker | None, offload: Child | None) -> None:
    """From now on this process notes how broker and offload server are."""
    settings = one.settings
    tls = one.on.authority.issue_client(one.place.broker_name).client_context()
    own = f"https://{url_host(settings.own_address)}:{settings.offload_port}"
    looks = (
        broker_look(session, settings.broker, broker),
        offload_look(own if settings.offload else offload_url(settings), tls, offload),
    )
    noting = Noting(one.on.database, one.place.number, looks, now=time.time)
    one.stack.callback(noting.stop)
    noting.start()


def _told_to_devices(addresses: Addresses) -> dict[str, str]:
    return {"broker": f"{addresses.mqtt_host}:{addresses.mqtt_port}", "offload": addresses.offload_url}


def _api(one: _Process, credentials: Credentials, listener: socket.socket, heavy: Heavy, session: Session) -> None:
    """The HTTPS server in a thread of its own; its end is ours."""
    settings, controller, delivery = one.settings, one.made.controller, one.made.delivery

    def reading() -> dict[str, float]:
        return {**delivery.waiting(), "heavy": heavy.waiting, "broker": session.connected}

    gate, operators_ca = open_gate(settings.data, one.on.database, one.on.authority, first=not settings.join)
    _metrics(one, reading)
    app = create_app(
        controller,
        gate,
        hosts=settings.certificate_hosts,
        model_bytes=settings.model_bytes,
        heavy=heavy,
        ledger=one.on.ledger,
        own=Condition(reading, _told_to_devices(controller.addresses)),
    )
    one.stack.callback(listener.close)
    _serve(one, app, uvicorn.Server(_of_https(app, credentials, operators_ca)), listener)


def _metrics(one: _Process, reading: metrics.Reading) -> None:
    """A page for Prometheus at an address of its own, where one was given."""
    if one.settings.metrics is None:
        return
    ledger, controller, rollouts = one.on.ledger, one.made.controller, counting(one.on.database)
    scraped = metrics_server(
        one.settings.metrics,
        lambda: metrics_response(metrics.series(ledger, controller.fleet, controller.rolling, rollouts, reading)),
    )
    one.stack.callback(scraped.stop)
    scraped.start()
    log.info("metrics at %s/metrics", scraped.url)


def _of_https(app: FastAPI, credentials: Credentials, operators_ca: Path) -> uvicorn.Config:
    """How uvicorn serves it."""
    config = uvicorn.Config(
        app,
        http=TellingPeers,
        ssl_certfile=credentials.certificate_file,
        ssl_keyfile=credentials.key_file,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # who is on the other end is told by the connection, and by nothing that is said on it
        lifespan="off",
        timeout_graceful_shutdown=3,
    )
    config.load()
    # Mutual, but for who has no certificate yet, or one that expired: what those may is the application's to say.
    config.ssl = credentials.server_context(client_required=False)
    config.ssl.load_verify_locations(operators_ca)
    return config


def _serve(one: _Process, app: FastAPI, server: uvicorn.Server, listener: socket.socket) -> None:
    """In a thread; back once it is there. UsageError where it does not start."""

    def serve() -> None:
        try:
            server.run(sockets=[listener])
        finally:
            one.ending.set()

    thread = threading.Thread(target=serve, name="api", daemon=True)

    def end() -> None:
        server.should_exit = True
        app.state.hub.stop_soon()  # pages that are open would hold the server
        thread.join(10)

    one.stack.callback(end)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise UsageError(
                f"the API does not start on {one.settings.address}:{one.settings.api_port}; its log says more"
            )
        time.sleep(0.005)


def _of_further(settings: Settings) -> Settings:
    """What further processes of this machine are told: everything is there already."""
    host, port = settings.broker_address
    told_host, told_port = settings.told_broker
    return replace(
        settings,
        join=True,
        offload=False,
        database=settings.database_url,
        broker=f"mqtts://{url_host(host)}:{port}",
        broker_told=f"{url_host(told_host)}:{told_port}",
        api_url=api_url(settings),
        offload_url=offload_url(settings),
    )


def _joined(settings: Settings) -> Settings:
    """What a process that joins is not told, it reads in the folder that it shares with the first one."""
    told = told_addresses(settings.data)
    if not (settings.data / "keys" / "ca.pem").is_file():
        raise UsageError(f"{settings.data} is no controller's data folder yet: `edgectl up` without --join comes first")
    if not settings.database:
        raise UsageError("--join needs the database that the processes share: --database postgresql://HOST/NAME")
    if not settings.broker and not told.get("mqtt_port"):
        raise UsageError("no controller that runs says where the broker is: give it with --broker mqtts://HOST:8883")
    told_broker = f"{url_host(str(told.get('mqtt_host')))}:{told.get('mqtt_port')}" if told else ""
    joined = replace(
        settings,
        offload=False,
        broker=settings.broker or f"mqtts://{told_broker}",
        broker_told=settings.broker_told or told_broker,
        api_url=settings.api_url or str(told.get("api_url", "")),
        offload_url=settings.offload_url or str(told.get("offload_url", "")),
    )
    await_port(joined, "api_port", 0.0)
    return joined


def _with_free_ports(settings: Settings, patience_s: float) -> Settings:
    """Every port known and free. The broker's own is its business: it ends a leftover of its own first."""
    known = with_ports(settings)
    await_port(known, "api_port", patience_s)
    if known.offload:
        await_port(known, "offload_port", patience_s)
    return known


def _listener(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {address}:{port}: {error.strerror}") from error
    return listener


def _as_told(settings: Settings) -> dict[str, Any]:
    """What `controller.json` says."""
    return {
        "api_url": api_url(settings),
        "mqtt_host": settings.told_broker[0],
        "mqtt_port": settings.told_broker[1],
        "offload_url": offload_url(settings),
        "offload_port": settings.offload_port,
        "bind": settings.address,
        "pid": os.getpid(),
        "version": edgesplit.__version__,
    }


@contextmanager
def _locked(data: Path) -> Iterator[bool]:
    """One controller per data folder; the lock goes with the process, however it ends. Was the last one killed?"""
    try:
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(data / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"cannot write in {data}: {error.strerror}; choose another folder with --data") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _owner(descriptor)
            raise UsageError(f"a controller runs on {data} already (process {owner or 'unknown'})") from error
        killed = bool(_owner(descriptor))
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield killed
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _owner(descriptor: int) -> str:
    """The process that the lock file names; empty after a clean end."""
    return os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()


@contextmanager
def _stopped_by_signals(ending: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set `ending`, where we are the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    on_stop_signals(ending.set)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
