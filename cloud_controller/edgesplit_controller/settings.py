"""What `edgectl up` is told: where its state lies, by which names devices reach it, which ports it takes.

Port 0 means: choose one and remember it in the data folder, so that a restart is found where it was. Reading and
writing of that memory is here too; opening the ports is `up`'s.
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
from edgesplit.links import host_and_port
from edgesplit.mqtt.messages import TELEMETRY_S
from edgesplit.observability.log_format import Format

if TYPE_CHECKING:
    from edgesplit.runtime.options import Optimise

BrokerKind = Literal["mosquitto", "emqx"]
"""Brokers that somebody else may run for us."""
PROCESSES = 16
"""Of one controller, on all machines together: as many names the broker knows."""
PORTS = ("api_port", "mqtt_port", "offload_port")
_CHOSEN = range(15_000, 32_000)
"""Below Linux's range for outgoing connections, so that a remembered port is not lost to one of them."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How one controller runs."""

    data: Path
    hosts: tuple[str, ...] = ()
    """Names and addresses by which devices reach us; the first is what they are told. Empty: this machine only."""
    bind: str = ""
    """Address to listen on; empty: loopback without `hosts`, every address with them."""
    api_port: int = 8443
    mqtt_port: int = 8883
    offload_port: int = 8500
    offload: bool = True
    """Run the offload server too, as a supervised child."""
    offload_url: str = ""
    """What devices are told instead of our own offload server's address."""
    metrics: tuple[str, int] | None = None
    """Where Prometheus may read the controller's metrics, in plain HTTP; None: nowhere."""
    offload_metrics: str = ""
    """ADDRESS:PORT of the same for the offload server; empty: nowhere."""
    offload_mode: Optimise = "exact"
    """fast: the offload server may fuse further than slices were cut, and last digits differ."""
    log_format: Format = "text"
    """Of this process's log lines, and the offload server's."""
    database: str = ""
    """URL of PostgreSQL; empty: SQLite in the data folder."""
    broker: str = ""
    """mqtts://HOST:PORT of a broker that somebody else runs; empty: our own, as a supervised child."""
    broker_told: str = ""
    """HOST:PORT that devices are told instead of `broker`."""
    on_revocation: str = ""
    """Command that brings a new revocation list to that broker."""
    processes: int = 1
    """Controller processes on this machine, behind one address."""
    join: bool = False
    """Be a further process of a controller that runs elsewhere on the same database and folder."""
    api_url: str = ""
    """What devices are told instead of our own API's address."""
    model_bytes: int = 16 * 2**30
    """Largest model file taken."""
    telemetry_s: float = 2.0
    """How often devices are told to send telemetry; at once besides, where something changed."""
    stale_after_s: float = 10.0
    """A device that said nothing for so long is not called online any more; at least five times `telemetry_s`."""
    statement_s: int = 30 * 86_400
    """How long a director statement may install something new; it is renewed at half of that."""

    def __post_init__(self) -> None:
        for host in self.hosts:
            check_host(host)
        if self.broker:
            broker_address(self.broker)
        if self.broker_told:
            host_and_port(self.broker_told, "broker")
        if self.on_revocation and not self.broker:
            raise UsageError("--on-revocation is for a broker of your own: give it with --broker")
        if not 1 <= self.processes <= PROCESSES:
            raise UsageError(f"--processes is 1 to {PROCESSES}, not {self.processes}")
        least, most = TELEMETRY_S
        if not least <= self.telemetry_s <= most:
            raise UsageError(f"--telemetry-every is {least:g} to {most:g} seconds, not {self.telemetry_s:g}")

    @property
    def silent_after_s(self) -> float:
        """A device that said nothing for so long is stale."""
        return max(self.stale_after_s, 5 * self.telemetry_s)

    @property
    def database_url(self) -> str:
        """The database that is used."""
        return self.database or f"sqlite:///{self.data / 'controller.db'}"

    @property
    def broker_address(self) -> tuple[str, int]:
        """Where we reach the broker."""
        return broker_address(self.broker) if self.broker else (self.own_address, self.mqtt_port)

    @property
    def told_broker(self) -> tuple[str, int]:
        """Where devices reach it."""
        if self.broker_told:
            return host_and_port(self.broker_told, "broker")
        return self.broker_address if self.broker else (self.host, self.mqtt_port)

    @property
    def address(self) -> str:
        """The address to listen on."""
        return self.bind or ("0.0.0.0" if self.hosts else "127.0.0.1")

    @property
    def host(self) -> str:
        """The name that devices are told."""
        return self.hosts[0] if self.hosts else "127.0.0.1"

    @property
    def url_host(self) -> str:
        """The same as it stands in a URL."""
        return url_host(self.host)

    @property
    def own_address(self) -> str:
        """The address at which we reach our own servers."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address, self.address)

    @property
    def certificate_hosts(self) -> tuple[str, ...]:
        """Every name and address that the server certificates carry, each once."""
        always = ("localhost", "127.0.0.1", "::1", socket.gethostname())
        return tuple(dict.fromkeys((*self.hosts, self.own_address, *always)))


def check_host(host: str) -> None:
    """UsageError where devices could never reach us by this: no address, and no name as DNS has them."""
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
    """Host and port of mqtts://HOST[:PORT]; UsageError for anything else."""
    scheme, _, rest = url.partition("://")
    if scheme.lower() != "mqtts" or not rest.strip("/"):
        raise UsageError(f"--broker {url[:80]!r} is no broker's URL: mqtts://HOST:8883 (mutual TLS is needed)")
    place = rest.rstrip("/")
    bare = not re.search(r":\d+$", place) or (place.count(":") > 1 and "]" not in place)
    return host_and_port(f"{place}:8883" if bare else place, "broker")


def url_host(host: str) -> str:
    """`host` as it stands in a URL: IPv6 addresses in brackets."""
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        return host


def with_ports(settings: Settings) -> Settings:
    """`settings` with every port known: as given, else as remembered, else chosen and remembered."""
    memory = settings.data / "ports.json"
    remembered = _remembered(memory)
    chosen: dict[str, Any] = {}
    for name in PORTS:
        if getattr(settings, name) == 0:
            chosen[name] = remembered.get(name) or free_port(settings.address, taken=tuple(chosen.values()))
    if any(remembered.get(name) != port for name, port in chosen.items()):
        write_durably(memory, json.dumps({**remembered, **chosen}, indent=1).encode())
    return replace(settings, **chosen)


def _remembered(memory: Path) -> dict[str, int]:
    try:
        found = json.loads(memory.read_bytes())
    except (OSError, ValueError):
        return {}
    return {name: found[name] for name in PORTS if isinstance(found, dict) and isinstance(found.get(name), int)}


def free_port(address: str, taken: Sequence[int] = ()) -> int:
    """A port that nobody listens on now."""
    for port in random.sample(_CHOSEN, 200):
        if port not in taken and not listen_problem(address, port):
            return port
    raise UsageError(f"no free port found on {address}: {listen_problem(address, _CHOSEN[0])}")


def listen_problem(address: str, port: int) -> str:
    """What stops a server from listening there now; empty for nothing."""
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


def await_port(settings: Settings, name: str, patience_s: float) -> None:
    """Wait for a child of a killed controller to let its port go; UsageError if it is not free after `patience_s`."""
    port = getattr(settings, name)
    deadline = time.monotonic() + patience_s
    while problem := listen_problem(settings.address, port):
        if time.monotonic() > deadline:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{problem}; choose another with {option}")
        time.sleep(0.02)
