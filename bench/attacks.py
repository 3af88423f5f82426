"""What an attack on an offload server or the broker costs a bystander: its p95 round trip beside that under the
attacker's processor load alone.

A real offload server with mutual TLS and a revocation list, and a real controller with the mosquitto that it runs; one
bystander that asks on a kept connection (an inference; a message to the controller and its answer), and an attacker in
a process of its own. Each attack runs by turns with its control: a process that uses as much processor time as the
attacker did, and sends nothing. Every request of the bystander must be answered. An attack on the broker includes what
follows: the attacker is found, cut off and refused, and tries again every second. A refused one that tries without a
pause is an attack of its own.
"""

from __future__ import annotations

import itertools
import multiprocessing
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from time import monotonic, perf_counter, process_time, sleep
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from record import Target, finish, make_parser, percentile

from edgesplit.client.connection import Connection
from edgesplit.limits import LIMITS
from edgesplit.mqtt.messages import FetchMetadata, encode, topic
from edgesplit.trust.identity import Credentials
from support.attacked_server import DECLARED, AttackedServer
from support.broker_floods import FLOODS, Flood
from support.edgesplit_processes import Cloud
from support.hostile_device import HostileDevice, connect_packet, publish_packet, subscribe_packet
from support.offload_processes import outputs, signed_release

ROUNDS = 5
INTERVAL_S = 0.01
"""Seconds between two requests of the bystander."""
MAX_RATIO = 1.5
Attack = Callable[[], Iterator[object]]
"""Sends what it sends piece by piece; what it yields in between is time for the measured attacker to be stopped."""
Bystander = Callable[[float], list[float]]
"""Asks for so many seconds; the seconds of each round trip. AssertionError for a request without its answer."""


def declared_lengths(server: AttackedServer, device: Credentials) -> Iterator[None]:
    """Sixteen sockets declare 256 MiB each and send a byte now and then."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(server.open(device)) for _ in range(16)]
        for sock in sockets:
            sock.sendall(DECLARED % (b"0" * 64 + b".pi.cut-1", LIMITS.http_body_bytes))
        while True:
            yield
            sleep(0.1)
            for sock in sockets:
                with suppress(OSError):
                    sock.sendall(b"x")


def refused_bodies(server: AttackedServer, device: Credentials) -> Iterator[None]:
    """Large bodies for a route that does not exist, connection after connection."""
    while True:
        yield
        with suppress(OSError), server.open(device) as sock:
            sock.sendall(DECLARED % (b"nothing", LIMITS.http_body_bytes) + bytes(65_536))
            sock.recv(65_536)


def idle_connections(server: AttackedServer, device: Credentials) -> Iterator[None]:
    """One certificate takes as many connections as it gets, and keeps them by blank lines."""
    with ExitStack() as stack:
        sockets = []
        while True:
            yield
            with suppress(OSError):
                sockets.append(stack.enter_context(server.open(device)))
            if len(sockets) > 300:
                with suppress(OSError):
                    sockets.pop(0).close()
            for sock in sockets[-8:]:
                with suppress(OSError):
                    sock.sendall(b"\r\n")


def no_handshake(server: AttackedServer, device: Credentials) -> Iterator[None]:
    """TCP connections without a TLS handshake, 300 at a time, renewed. They come from another address than the
    bystander's: before the handshake a share belongs to an address."""
    del device
    address, sockets = ("127.0.0.1", server.serving.port), list[socket.socket]()
    while True:
        yield
        with suppress(OSError):
            sockets.append(socket.create_connection(address, timeout=1.0, source_address=("127.0.0.9", 0)))
        if len(sockets) > 300:
            sockets.pop(0).close()


SERVER_ATTACKS: Mapping[str, Callable[[AttackedServer, Credentials], Iterator[None]]] = {
    "declared lengths": declared_lengths,
    "refused bodies": refused_bodies,
    "idle connections": idle_connections,
    "no handshake": no_handshake,
}


def _attack(attack: Attack, seconds: float, used: Any) -> None:
    """Attack for so long, and report the share of a processor that it took."""
    ends, began = monotonic() + seconds, process_time()
    for _ in attack():
        used.value = (process_time() - began) / seconds
        if monotonic() >= ends:
            return


def _spin(share: float, seconds: float) -> None:
    """Use so much of a processor, in slices of 10 ms."""
    ends = monotonic() + seconds
    while monotonic() < ends:
        began = perf_counter()
        while perf_counter() - began < 0.01 * min(1.0, share):
            pass
        sleep(max(0.0, 0.01 * (1.0 - share)))


def _ask_for(seconds: float, ask: Callable[[], None]) -> list[float]:
    """Seconds of each call of `ask`, which returns with the answer."""
    taken = []
    ends = monotonic() + seconds
    while monotonic() < ends:
        began = perf_counter()
        ask()
        taken.append(perf_counter() - began)
        sleep(INTERVAL_S)
    return taken


def server_bystander(server: AttackedServer, seconds: float) -> list[float]:
    """Inferences at the offload server, on one connection."""
    with closing(Connection("127.0.0.1", server.serving.port, server.bystander.client_context())) as connection:

        def ask() -> None:
            assert outputs(server.serving.ask(connection)) == [2.0] * 4

        return _ask_for(seconds, ask)


def broker_bystander(device: HostileDevice, seconds: float) -> list[float]:
    """Messages to the controller, and its answers, in one session of the broker."""
    request = publish_packet(topic(device.name, "fetch").encode(), encode(FetchMetadata("metadata/timestamp.json")))
    with device.socket() as link, link.makefile("rb") as packets:
        link.sendall(connect_packet(device.name) + subscribe_packet(topic(device.name, "fetch_reply").encode()))

        def receive() -> int:
            """Type of the next packet."""
            kind, length = packets.read(2)
            for shift in itertools.count(7, 7):
                if length < 1 << shift:
                    break
                length += (packets.read(1)[0] - 1) << shift
            assert len(packets.read(length)) == length
            return int(kind) >> 4

        assert [receive(), receive()] == [2, 9]  # CONNACK, SUBACK

        def ask() -> None:
            link.sendall(request)
            assert receive() == 3  # PUBLISH

        return _ask_for(seconds, ask)


@contextmanager
def beside(context: ForkContext, target: Callable[..., None], *arguments: Any) -> Iterator[ForkProcess]:
    """Context manager for a process beside the bystander; waits for its end."""
    process = context.Process(target=target, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.join()


def measure(attacks: Mapping[str, Callable[[], Attack]], bystander: Bystander, seconds: float) -> dict[str, Any]:
    """By attack: p95 in ms of each round under the attack and under its control, and the attacker's processor share.
    An attack is made anew for each of its rounds."""
    context = multiprocessing.get_context("fork")
    results: dict[str, Any] = {}
    for name, make in attacks.items():
        rounds: list[dict[str, float]] = []
        for _ in range(ROUNDS):
            used = context.Value("d", 0.0)
            with beside(context, _attack, make(), seconds, used):
                attacked = bystander(seconds)
            with beside(context, _spin, used.value, seconds):
                control = bystander(seconds)
            p95_ms = {"attacked": percentile(attacked, 0.95) * 1e3, "control": percentile(control, 0.95) * 1e3}
            rounds.append({**p95_ms, "ratio": p95_ms["attacked"] / p95_ms["control"], "share": used.value})
        results[name] = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        results[name]["rounds"] = rounds
        shown = results[name]
        print(
            f"{name:40s} bystander's p95 {shown['attacked']:.2f} ms, control {shown['control']:.2f} ms, "
            f"ratio {shown['ratio']:.2f}, attacker {shown['share']:.2f} processors"
        )
    return results


def attack_server(place: Path, seconds: float) -> dict[str, Any]:
    """Measure the attacks on an offload server."""
    place.mkdir()
    with ExitStack() as stack:
        server = AttackedServer(signed_release(place / "release"), place, stack)

        def make(name: str) -> Attack:
            return partial(SERVER_ATTACKS[name], server, server.device(name.replace(" ", "-")))

        return measure(
            {name: partial(make, name) for name in SERVER_ATTACKS}, partial(server_bystander, server), seconds
        )


def until_refused(flood: Flood, device: HostileDevice) -> Iterator[None]:
    """A flood, again and again while the broker accepts the device; else an attempt each second."""
    for accepted in flood(device):
        yield
        if not accepted:
            sleep(1.0)


def attack_broker(place: Path, seconds: float) -> dict[str, Any]:
    """Measure the attacks on a controller's own broker, each round by a certificate that floods for the first time."""
    cloud = Cloud(place, "--no-offload")
    cloud.start()
    numbers = itertools.count()
    try:
        bystander = HostileDevice(cloud, "bystander")

        def make(flood: Flood) -> Attack:
            return partial(until_refused, flood, HostileDevice(cloud, f"attacker-{next(numbers)}"))

        def make_revoked() -> Attack:
            device = HostileDevice(cloud, f"attacker-{next(numbers)}")
            cloud.edgectl("device", "revoke", device.name, "--yes")
            return partial(FLOODS["pings"], device)

        attacks: dict[str, Callable[[], Attack]] = {name: partial(make, flood) for name, flood in FLOODS.items()}
        attacks["connections of a revoked certificate"] = make_revoked
        return measure(attacks, partial(broker_bystander, bystander), seconds)
    finally:
        cloud.stop()


def main() -> None:
    """Measure all attacks and write the record."""
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each attack on the offload server, each round")
    parser.add_argument("--broker-seconds", type=float, default=30.0, help="of each attack on the broker, each round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="es-attacks-") as folder:
        server = attack_server(Path(folder) / "server", options.seconds)
        broker = attack_broker(Path(folder) / "broker", options.broker_seconds)
    results = server | {f"broker, {name}": figures for name, figures in broker.items()}
    targets = [
        Target(f"{name}: bystander's p95 over its control's", figures["ratio"], MAX_RATIO)
        for name, figures in results.items()
    ]
    finish(results, targets, options.json)


if __name__ == "__main__":
    main()
