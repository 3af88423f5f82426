"""Settings of one controller process (`edgectl up`): data folder, host names, ports, database, broker.

Port 0 means: choose a free port and remember it in `ports.json` in the data folder, so that a restarted controller has
the same address. This module reads and writes that file and probes ports; `app.main` opens them.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import random
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edgesplit.atomic_files import write_durably
from edgesplit.errors import UsageError
from edgesplit.links import parse_host_and_port
from edgesplit.mqtt.messages import TELEMETRY_INTERVAL_RANGE_S
from edgesplit.observability.log_format import Format
from edgesplit.process.memory import default_memory, machine_memory
from edgesplit.quantities import format_size

if TYPE_CHECKING:
    from edgesplit.runtime.options import Optimise

BrokerKind = Literal["mosquitto", "emqx"]
"""Broker products for which configuration can be written, when the broker is not run by the controller."""
MIN_BROKER_MEMORY = 64 * 2**20
"""Least memory that the broker may be given, in bytes."""
MAX_PROCESSES = 16
"""Limit of processes of one controller, over all machines: the broker's access rules list that many client names."""
PORT_FIELDS = ("api_port", "mqtt_port", "offload_port")
"""Names of the fields of `Settings` that are ports."""
RETENTION_FIELDS = ("keep_releases", "keep_versions", "keep_history_s", "keep_unused_s")
"""Names of the fields of `Settings` that are retention rules; a process that joins takes them from the first one."""
_PORT_RANGE = range(15_000, 32_000)
"""Range from which ports are chosen: below Linux's range for outgoing connections, so that a remembered port is not
taken by an outgoing connection."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one controller process."""

    data: Path
    hosts: tuple[str, ...] = ()
    """Names and addresses at which devices reach the controller; the first is the one that is given to devices. Empty:
    only this machine reaches it."""
    bind: str = ""
    """Address to listen on. Empty: loopback if `hosts` is empty, otherwise every address."""
    api_port: int = 8443
    mqtt_port: int = 8883
    offload_port: int = 8500
    offload: bool = True
    """Run the offload server too, as a supervised child process."""
    offload_url: str = ""
    """URL of the offload server that is given to devices, instead of the own offload server's."""
    metrics: tuple[str, int] | None = None
    """Address and port at which Prometheus scrapes this process's metrics over plain HTTP; None: no metrics server."""
    offload_metrics: str = ""
    """ADDRESS:PORT at which Prometheus scrapes the offload server's metrics; empty: no metrics server."""
    offload_mode: Optimise = "exact"
    """Graph optimisation of the offload server. `fast` allows fusions beyond those in the slices, which may change the
    last digits of results."""
    log_format: Format = "text"
    """Format of the log lines of this process and of the offload server."""
    database: str = ""
    """URL of a PostgreSQL database; empty: SQLite in the data folder."""
    blobs: str = ""
    """s3:// URL of the object store with models and chunks; empty: a folder in the data folder."""
    blob_cache_bytes: int = 10 * 10**9
    """Largest local cache of blobs that are in an object store, in bytes."""
    broker: str = ""
    """mqtts://HOST:PORT of an external broker; empty: the controller runs mosquitto as a supervised child process."""
    broker_memory_bytes: int = 0
    """Memory that mosquitto may allocate; 0: half of this machine's (`broker_memory`)."""
    advertised_broker: str = ""
    """HOST:PORT of the broker that is given to devices, instead of the address in `broker`."""
    on_revocation: str = ""
    """Command that installs a new certificate revocation list at the external broker."""
    processes: int = 1
    """Number of controller processes on this machine; they share one listening socket."""
    join: bool = False
    """Run as an additional process of a controller on another machine, with its database and data folder."""
    api_url: str = ""
    """URL of the API that is given to devices, instead of this machine's."""
    model_bytes: int = 16 * 2**30
    """Largest model file that is accepted, in bytes."""
    telemetry_s: float = 2.0
    """Interval at which devices are asked to send telemetry, in seconds; changes are sent at once besides."""
    stale_after_s: float = 10.0
    """Seconds without a message after which a device is stale instead of online; the effective value
    (`effective_stale_after_s`) is at least five times `telemetry_s`."""
    statement_s: int = 30 * 86_400
    """Validity of a director statement in seconds: until then it may install something new. It is renewed at half of
    that."""

    keep_releases: int = 3
    """Newest releases of each model that are kept though nothing uses them."""
    keep_versions: int = 0
    """Newest versions of each model that are kept though nothing uses them; 0: all."""
    keep_history_s: float = 90 * 86_400.0
    """How long rollouts and proposals are kept after their end, in seconds."""
    keep_unused_s: float = 86_400.0
    """How long files that nothing refers to are kept after they were stored, in seconds."""

    force: bool = False
    """Start also where enrolled devices could not reach the controller any more."""

    def __post_init__(self) -> None:
        for host in self.hosts:
            check_host(host)
        if self.broker:
            broker_address(self.broker)
        if self.advertised_broker:
            parse_host_and_port(self.advertised_broker, "broker")
        if 0 < self.broker_memory_bytes < MIN_BROKER_MEMORY:
            raise UsageError(f"--broker-memory is at least {format_size(MIN_BROKER_MEMORY)}: mosquitto needs that")
        if self.on_revocation and not self.broker:
            raise UsageError("--on-revocation is for a broker of your own: give it with --broker")
        if not 1 <= self.processes <= MAX_PROCESSES:
            raise UsageError(f"--processes is 1 to {MAX_PROCESSES}, not {self.processes}")
        if min(getattr(self, name) for name in RETENTION_FIELDS) < 0:
            raise UsageError("--keep-releases, --keep-versions, --keep-history and --keep-unused are not negative")
        least, most = TELEMETRY_INTERVAL_RANGE_S
        if not least <= self.telemetry_s <= most:
            raise UsageError(f"--telemetry-every is {least:g} to {most:g} seconds, not {self.telemetry_s:g}")

    @property
    def effective_stale_after_s(self) -> float:
        """Seconds without a message after which a device is stale: `stale_after_s`, but at least 5 `telemetry_s`."""
        return max(self.stale_after_s, 5 * self.telemetry_s)

    @property
    def database_url(self) -> str:
        """URL of the database in use."""
        return self.database or f"sqlite:///{self.data / 'controller.db'}"

    @property
    def runs_broker(self) -> bool:
        """Whether this process runs the broker as a child."""
        return not (self.broker or self.join)

    @property
    def broker_memory(self) -> int:
        """Memory that mosquitto may allocate, in bytes."""
        return self.broker_memory_bytes or default_memory(machine_memory())

    @property
    def broker_address(self) -> tuple[str, int]:
        """Host and port at which the controller reaches the broker."""
        return broker_address(self.broker) if self.broker else (self.own_address, self.mqtt_port)

    @property
    def device_broker(self) -> tuple[str, int]:
        """Host and port at which devices reach the broker."""
        if self.advertised_broker:
            return parse_host_and_port(self.advertised_broker, "broker")
        return self.broker_address if self.broker else (self.host, self.mqtt_port)

    @property
    def address(self) -> str:
        """The address to listen on."""
        return self.bind or ("0.0.0.0" if self.hosts else "127.0.0.1")

    @property
    def host(self) -> str:
        """The host name or address that is given to devices."""
        return self.hosts[0] if self.hosts else "127.0.0.1"

    @property
    def url_host(self) -> str:
        """`host` as it is written in a URL (IPv6 addresses in brackets)."""
        return url_host(self.host)

    @property
    def own_address(self) -> str:
        """The address at which the controller reaches its own servers."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address, self.address)

    @property
    def certificate_hosts(self) -> tuple[str, ...]:
        """Every name and address in the server certificates, without duplicates."""
        always = ("localhost", "127.0.0.1", "::1", socket.gethostname())
        return tuple(dict.fromkeys((*self.hosts, self.own_address, *always)))


def check_host(host: str) -> None:
    """Raise UsageError unless `host` is an IP address or a valid DNS name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        try:
            name = host.encode("idna").decode("ascii").removesuffix(".")
        except UnicodeError:
            name = ""
        if len(name) > 253 or not re.fullmatch(r"(?:[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.?)+", name):
            raise UsageError(
                f"--host {host[:80]!r} is neither a name nor an address: write it without scheme and port, "
                "as in hub.local or 10.0.0.2"
            ) from None
        if re.fullmatch(r"[0-9.]+", name):
            raise UsageError(f"--host {host[:80]!r} is no IP address, as in 10.0.0.2") from None


def broker_address(url: str) -> tuple[str, int]:
    """Host and port of an mqtts://HOST[:PORT] URL; the port defaults to 8883. UsageError for anything else."""
    scheme, _, rest = url.partition("://")
    if scheme.lower() != "mqtts" or not rest.strip("/"):
        raise UsageError(f"--broker {url[:80]!r} is no broker's URL: mqtts://HOST:8883 (mutual TLS is needed)")
    authority = rest.rstrip("/")
    has_no_port = not re.search(r":\d+$", authority) or (authority.count(":") > 1 and "]" not in authority)
    return parse_host_and_port(f"{authority}:8883" if has_no_port else authority, "broker")


def url_host(host: str) -> str:
    """`host` as it is written in a URL: IPv6 addresses in brackets."""
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        return host


def with_ports(settings: Settings) -> Settings:
    """`settings` with every port set: as given, else as remembered in `ports.json`, else chosen and written there."""
    ports_file = settings.data / "ports.json"
    remembered = _read_ports(ports_file)
    chosen: dict[str, Any] = {}
    for name in PORT_FIELDS:
        if getattr(settings, name) == 0:
            chosen[name] = remembered.get(name) or find_free_port(settings.address, taken=tuple(chosen.values()))
    if any(remembered.get(name) != port for name, port in chosen.items()):
        write_durably(ports_file, json.dumps({**remembered, **chosen}, indent=1).encode())
    return replace(settings, **chosen)


def _read_ports(ports_file: Path) -> dict[str, int]:
    try:
        ports = json.loads(ports_file.read_bytes())
    except (OSError, ValueError):
        return {}
    return {name: ports[name] for name in PORT_FIELDS if isinstance(ports, dict) and isinstance(ports.get(name), int)}


def find_free_port(address: str, taken: Sequence[int] = ()) -> int:
    """A port on `address` on which no program listens now and which is not in `taken`; UsageError if 200 tries found
    none."""
    for port in random.sample(_PORT_RANGE, 200):
        if port not in taken and not listen_problem(address, port):
            return port
    raise UsageError(f"no free port found on {address}: {listen_problem(address, _PORT_RANGE[0])}")


def is_own_address(address: str) -> bool:
    """Whether programs on this machine can listen on this address."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True


def listen_problem(address: str, port: int) -> str:
    """Why a server cannot listen on this address and port now; empty if it can."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} on {address} is taken by another program"
        return f"cannot listen on {address}:{port}: {error.strerror or error}"
    return ""


def await_port(settings: Settings, name: str, timeout_s: float) -> None:
    """Wait until a port is free, as after a crash, while the child processes of the killed controller still end.
    UsageError if it is not free after `timeout_s` seconds."""
    port = getattr(settings, name)
    if not is_own_address(settings.address):
        raise UsageError(f"{settings.address} is no address of this machine: give --bind one that is")
    deadline = time.monotonic() + timeout_s
    while problem := listen_problem(settings.address, port):
        if time.monotonic() > deadline:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{problem}; choose another with {option}")
        time.sleep(0.02)
