"""A real mosquitto under our configuration: who may come in, who may say what, and that it is always there."""

from __future__ import annotations

import os
import select
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgesplit.errors import LinkError, UsageError
from edgesplit.mqtt.session import Session
from edgesplit.trust import identity
from edgesplit_controller.messaging.broker import DEVICE_READS, DEVICE_WRITES, Broker
from edgesplit_controller.pki.authority import Authority
from support.mosquitto import PATIENCE_S, BrokerHarness, enrol


@pytest.fixture(scope="module", params=["our own", "elsewhere"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerHarness]:
    """Our child, and one that runs by the files that we wrote for it: the same rules hold."""
    world = BrokerHarness(tmp_path_factory.mktemp("broker"), elsewhere=request.param == "elsewhere")
    world.broker.start()
    yield world
    world.close()


@pytest.fixture()
def world(shared: BrokerHarness) -> Iterator[BrokerHarness]:
    """The module's broker, with nobody connected."""
    yield shared
    shared.hang_up()


@pytest.fixture()
def own(tmp_path: Path) -> Iterator[BrokerHarness]:
    """A broker of its own, for tests that kill it."""
    world = BrokerHarness(tmp_path)
    world.broker.start()
    yield world
    world.close()


def topic(device: str, kind: str) -> str:
    return f"edgesplit/v1/{device}/{kind}"


# Who may come in


CONNECT = b"\x10\x10\x00\x04MQTT\x05\x02\x00\x1e\x00\x00\x03abc"
CONNACK = b"\x20"


def greeting(port: int, context: ssl.SSLContext | None) -> bytes:
    """The first byte of what the broker answers to an MQTT CONNECT; empty if it hung up."""
    try:
        with socket.create_connection(("localhost", port), PATIENCE_S) as link:
            if context is not None:
                link = context.wrap_socket(link, server_hostname="localhost")
            link.sendall(CONNECT)
            return link.recv(1)
    except OSError:
        return b""


def test_the_broker_admits_only_certificates_of_our_authority(world: BrokerHarness, tmp_path: Path) -> None:
    """D9: with a certificate of ours there is a session; with none, a foreign one, or without TLS there is not."""
    authority = world.authority
    stranger = enrol(Authority(tmp_path / "ca"), tmp_path, "cam-1")
    lured = identity.Credentials(stranger.key_file, stranger.certificate_file, authority.certificate_file)

    assert greeting(world.broker.port, enrol(authority, tmp_path, "cam-9").client_context()) == CONNACK
    assert greeting(world.broker.port, identity.enrolment_context(authority.ca_pem)) != CONNACK
    assert greeting(world.broker.port, lured.client_context()) != CONNACK
    assert greeting(world.broker.port, None) != CONNACK


def test_a_device_refuses_a_foreign_broker(world: BrokerHarness, tmp_path: Path) -> None:
    """D9: a broker of another authority gets no session, and the session says why."""
    stranger = enrol(Authority(tmp_path / "ca"), tmp_path, "cam-1")
    session = Session("localhost", world.broker.port, "cam-1", stranger.client_context(), on_message=lambda *_: None)
    with pytest.raises(OSError, match="certificate verify failed"):
        session._client.reconnect()


# Who may say what


WRITTEN = tuple(kind.replace("+", "1") for kind in DEVICE_WRITES)
"""Topic kinds that a device may publish; answers to remote inferences for the first controller process."""


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_device_may_publish_under_its_own_name(world: BrokerHarness, kind: str) -> None:
    """What a device is meant to say reaches the controller."""
    controller = world.controller("edgesplit/v1/+/#")
    world.device("cam-1").session.publish(topic("cam-1", kind), b"hello", qos=1, wait_s=PATIENCE_S)
    assert controller.next()[:2] == (topic("cam-1", kind), b"hello")


@pytest.mark.parametrize("kind", DEVICE_READS)
def test_a_device_receives_the_controllers_messages_for_it(world: BrokerHarness, kind: str) -> None:
    """What the controller tells a device reaches it, with its correlation data."""
    device = world.device("cam-1", topic("cam-1", kind))
    world.controller().session.publish(topic("cam-1", kind), b"do", qos=1, correlation=b"7", wait_s=PATIENCE_S)
    assert device.next() == (topic("cam-1", kind), b"do", b"7")


@pytest.mark.parametrize(
    "name",
    [topic("cam-2", kind) for kind in (*WRITTEN, *DEVICE_READS)]
    + [topic("cam-1", kind) for kind in DEVICE_READS]
    + [topic("cam-1", "job"), topic("cam-1", "birth/x"), "edgesplit/v1/cam-1", "edgesplit/v1/chunk/" + "0" * 64]
    + ["elsewhere", "edgesplit/v2/cam-1/birth", "$SYS/x", "/", "edgesplit/v1//birth"],
)
def test_a_device_cannot_publish_for_others(world: BrokerHarness, name: str) -> None:
    """D1: another's topics, the controller's part of its own, chunks, and everything else: refused, with a reason."""
    controller = world.controller("#")
    device = world.device("cam-1")
    with pytest.raises(LinkError):
        device.session.publish(name, b"forged", qos=1, wait_s=PATIENCE_S)
    world.device("cam-3").session.publish(topic("cam-3", "birth"), b"end", qos=1, wait_s=PATIENCE_S)
    assert controller.heard_before(topic("cam-3", "birth")) == []


@pytest.mark.parametrize(
    "wish",
    ["#", "+/+/+/+", "edgesplit/#", topic("+", "desired"), topic("cam-2", "desired"), topic("cam-2", "#"), "$SYS/#"],
)
def test_a_device_cannot_subscribe_to_others_topics(world: BrokerHarness, wish: str) -> None:
    """D2: whatever it subscribes to, a device hears its own and chunks, and nothing of another's."""
    device = world.device("cam-1", wish, topic("cam-1", "fetch_reply"))
    controller = world.controller()
    for kind in (*DEVICE_READS, *WRITTEN):
        controller.session.publish(topic("cam-2", kind), b"secret", qos=1, retain=False, wait_s=PATIENCE_S)
    controller.session.publish(topic("cam-1", "fetch_reply"), b"end", qos=1, wait_s=PATIENCE_S)
    assert device.heard_before(topic("cam-1", "fetch_reply")) == []


def test_every_device_may_read_chunks(world: BrokerHarness) -> None:
    """One published chunk feeds every device that wants it."""
    chunk = "edgesplit/v1/chunk/" + "a" * 64
    devices = [world.device(name, chunk) for name in ("cam-1", "cam-2")]
    world.controller().session.publish(chunk, b"weights", qos=1, wait_s=PATIENCE_S)
    assert [device.next()[:2] for device in devices] == [(chunk, b"weights")] * 2


def test_anothers_client_id_takes_over_no_session(world: BrokerHarness) -> None:
    """D3: the client id is the certificate's name whatever a client asks for: the victim keeps its connection."""
    victim = world.device("cam-1", topic("cam-1", "desired"))

    hostile = world.device("cam-2", client_id="cam-1")

    hostile.session.publish(topic("cam-2", "birth"), b"x", qos=1, wait_s=PATIENCE_S)
    victim.session.publish(topic("cam-1", "birth"), b"still here", qos=1, wait_s=PATIENCE_S)
    world.controller().session.publish(topic("cam-1", "desired"), b"go", qos=1, wait_s=PATIENCE_S)
    assert victim.next()[:2] == (topic("cam-1", "desired"), b"go")
    assert not victim.losses.acquire(blocking=False)


def test_a_last_will_is_published_for_a_lost_session_and_not_after_a_clean_stop(world: BrokerHarness) -> None:
    """The broker tells of a session that broke off; one that said goodbye is not reported dead."""
    controller = world.controller(topic("+", "birth"))
    polite = world.device("cam-1", will=(topic("cam-1", "birth"), b"dead", False))
    broken = world.device("cam-2", will=lambda: (topic("cam-2", "birth"), b"dead", False))

    polite.session.stop()
    broken.session._client.socket().shutdown(socket.SHUT_RDWR)

    assert controller.next()[:2] == (topic("cam-2", "birth"), b"dead")


# Always there


def killed(broker: Broker) -> int:
    """SIGKILL the mosquitto that runs now; its pid."""
    pid = broker.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


def test_a_killed_broker_is_restarted_and_sessions_reconnect(own: BrokerHarness) -> None:
    """B1: SIGKILL the broker, three times: it is started again, sessions reconnect and hear as before."""
    device = own.device("cam-1", topic("cam-1", "desired"))
    controller = own.controller()
    for round_ in range(3):
        old = killed(own.broker)
        for listener in (device, controller):
            assert listener.losses.acquire(timeout=PATIENCE_S)
            listener.wait_connected()
        controller.session.publish(topic("cam-1", "desired"), str(round_).encode(), qos=1, wait_s=PATIENCE_S)
        assert device.next()[1] == str(round_).encode()
        assert own.broker.pid not in (None, old)
    assert own.broker.restarts == 3


def test_the_desired_state_survives_a_restart_of_the_broker(own: BrokerHarness) -> None:
    """What was retained before the broker was stopped is told to a device that comes after it started again."""
    own.controller().session.publish(topic("cam-1", "desired"), b"run this", qos=1, retain=True, wait_s=PATIENCE_S)
    own.close()

    own.broker = Broker(own.folder / "broker", own.server, own.broker.port)
    own.broker.start()

    assert own.device("cam-1", topic("cam-1", "desired")).next()[1] == b"run this"


def test_a_corrupt_broker_database_is_set_aside(own: BrokerHarness) -> None:
    """A7: mosquitto refuses to start on a spoiled database; it is set aside, and the broker runs."""
    own.close()
    (own.folder / "broker" / "mosquitto.db").write_bytes(b"\x00\xb5\x00mosquitto db" + b"\xff" * 200)

    own.broker = Broker(own.folder / "broker", own.server, 0)
    own.broker.start()

    assert own.device("cam-1").session.connected
    assert (own.folder / "broker" / "mosquitto.db.spoiled").exists()


START_AND_WAIT = """
import sys
from pathlib import Path
from edgesplit_controller.messaging.broker import Broker
from edgesplit_controller.pki.authority import Authority
folder = Path(sys.argv[1])
credentials = Authority(folder / "ca").issue_server("broker", ["localhost", "127.0.0.1"])
broker = Broker(folder / "broker", credentials, int(sys.argv[2]))
broker.start()
print(broker.pid, broker.port, flush=True)
sys.stdin.read()
"""


def controller_process(folder: Path, port: int) -> tuple[subprocess.Popen[str], int, int]:
    """A process that starts a broker and lives until told otherwise; the broker's pid and port."""
    process = subprocess.Popen(
        [sys.executable, "-c", START_AND_WAIT, str(folder), str(port)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    pid, port_text = process.stdout.readline().split()
    return process, int(pid), int(port_text)


def test_a_controller_killed_at_once_takes_its_broker_with_it(tmp_path: Path) -> None:
    """SIGKILL the controller: the kernel ends its mosquitto, and the next controller starts on the same port."""
    process, pid, port = controller_process(tmp_path, 0)
    watch = os.pidfd_open(pid)
    process.kill()
    process.communicate()
    assert select.select([watch], [], [], PATIENCE_S)[0]
    os.close(watch)

    process, _, again = controller_process(tmp_path, port)
    assert again == port
    process.communicate("")


SLOW_TO_LISTEN = """#!{python}
import pathlib, select, socket, sys
_, port, host = next(line for line in open(sys.argv[2]) if line.startswith("listener ")).split()
with socket.create_server((host, int(port))) as door:
    print("this one is running", file=sys.stderr, flush=True)
    select.select([door], [], [])
    pathlib.Path("{looked_after}").touch()
    while True:
        door.accept()[0].close()
"""


def test_the_broker_counts_as_started_once_it_serves_connections(tmp_path: Path) -> None:
    """mosquitto says that it runs a moment before its loop does, and forgets a SIGTERM of that moment: who died then
    left it behind."""
    looked_after = tmp_path / "looked-after"
    program = tmp_path / "slow"
    program.write_text(SLOW_TO_LISTEN.format(python=sys.executable, looked_after=looked_after))
    program.chmod(0o700)
    broker = Broker(tmp_path / "broker", BrokerHarness(tmp_path).server, 0, program=str(program))

    broker.start()

    assert looked_after.exists()
    broker.stop()


def test_a_leftover_broker_does_not_block_the_next_start(own: BrokerHarness) -> None:
    """A mosquitto of ours that outlived its controller is ended, known by its pid file and its command line."""
    own.close()
    leftover = subprocess.Popen(own.broker._command, stderr=subprocess.PIPE)
    assert leftover.stderr is not None
    while b" running" not in leftover.stderr.readline():
        pass
    (own.folder / "broker" / "mosquitto.pid").write_text(f"{leftover.pid}\n")

    own.broker = Broker(own.folder / "broker", own.server, own.broker.port)
    own.broker.start()

    leftover.communicate(timeout=PATIENCE_S)
    assert own.device("cam-1").session.connected


def test_another_process_with_a_recycled_pid_is_left_alone(tmp_path: Path) -> None:
    """A pid file that now names somebody else's process ends nobody."""
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (tmp_path / "broker").mkdir()
    (tmp_path / "broker" / "mosquitto.pid").write_text(str(bystander.pid))
    world = BrokerHarness(tmp_path)

    world.broker.start()

    assert bystander.poll() is None
    world.close()
    bystander.communicate(b"\n")


# Errors that say what to do


def test_a_taken_port_is_named_with_the_option_that_changes_it(tmp_path: Path) -> None:
    """One line: which port, and which flag."""
    world = BrokerHarness(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"port {port} on 127.0.0.1 is taken.*--mqtt-port") as caught:
            Broker(tmp_path / "broker", world.server, port).start()
    assert "\n" not in str(caught.value)


def test_a_missing_mosquitto_says_how_to_get_it(tmp_path: Path) -> None:
    """The error names the package."""
    world = BrokerHarness(tmp_path)
    with pytest.raises(UsageError, match="apt-get install mosquitto"):
        Broker(tmp_path / "broker", world.server, 0, program="mosquitto-that-is-not-there").start()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file in the folder's place, as a read-only disk would be, is told with the folder's name."""
    world = BrokerHarness(tmp_path)
    (tmp_path / "place").write_text("a file")
    with pytest.raises(UsageError, match=r"cannot write in .*place"):
        Broker(tmp_path / "place" / "broker", world.server, 0).start()


def test_mosquittos_reason_is_named_though_the_folders_name_has_error_in_it(tmp_path: Path) -> None:
    """When mosquitto itself refuses, its reason is in the error; log lines that only name the folder are none."""
    world = BrokerHarness(tmp_path)
    spoiled = world.server
    spoiled.certificate_file.write_text("no certificate")
    with pytest.raises(UsageError, match=r"mosquitto cannot start: .*certificate"):
        Broker(tmp_path / "broker of errors", spoiled, 0).start()


def test_stopping_twice_or_before_the_start_does_nothing(tmp_path: Path) -> None:
    """`stop` can always be called."""
    broker = BrokerHarness(tmp_path).broker
    broker.stop()
    broker.stop()
