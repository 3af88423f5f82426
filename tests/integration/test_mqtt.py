"""The MQTT session over a real broker: what it promises to its owner when the link does not keep any promise."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgesplit.errors import LinkError, MalformedMessage, UsageError
from edgesplit.limits import LIMITS
from edgesplit.link_emulation import ShapedLink
from edgesplit.mqtt import session as mqtt
from edgesplit.mqtt.session import Session
from edgesplit.plan import Link
from support.mosquitto import PATIENCE_S, BrokerHarness, Listener, enrol

MINE = "edgesplit/v1/cam-1/birth"
DESIRED = "edgesplit/v1/cam-1/desired"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerHarness]:
    world = BrokerHarness(tmp_path_factory.mktemp("mqtt"))
    world.broker.start()
    yield world
    world.close()


@pytest.fixture()
def world(shared: BrokerHarness) -> Iterator[BrokerHarness]:
    yield shared
    shared.hang_up()


@pytest.fixture()
def link(world: BrokerHarness) -> Iterator[ShapedLink]:
    """A fast link to the broker that a test can cut."""
    fast = ShapedLink("127.0.0.1", world.broker.port, Link(up_bytes_per_s=1e9, down_bytes_per_s=1e9, rtt_s=0.0))
    fast.start()
    yield fast
    fast.stop()


def through(link: ShapedLink, world: BrokerHarness, *topics: str) -> Listener:
    """cam-1, connected over the link."""
    return Listener(link.port, "cam-1", enrol(world.authority, world.folder, "cam-1"), *topics).start()


def test_a_large_message_arrives_whole(world: BrokerHarness) -> None:
    """The largest payload allowed passes both ways in."""
    device = world.device("cam-1", DESIRED)
    payload = bytes(range(256)) * (LIMITS.message_bytes // 256)
    world.controller().session.publish(DESIRED, payload, qos=1, wait_s=PATIENCE_S)
    assert device.next()[1] == payload


def test_a_message_over_the_size_limit_is_refused_before_sending(world: BrokerHarness) -> None:
    """One byte more is refused before it is sent; the connection is not disturbed."""
    device = world.device("cam-1")
    with pytest.raises(MalformedMessage, match="at most"):
        device.session.publish(MINE, b"x" * (LIMITS.message_bytes + 1))
    assert device.session.publish(MINE, b"x", qos=1, wait_s=PATIENCE_S)
    assert not device.losses.acquire(blocking=False)


def test_messages_keep_their_order(world: BrokerHarness) -> None:
    """What one session publishes on a topic is heard in that order, within each quality of service."""
    controller = world.controller("edgesplit/v1/cam-1/#")
    device = world.device("cam-1")
    for number in range(200):
        device.session.publish(MINE, str(number).encode(), qos=number % 2)
    heard = [int(controller.next()[1]) for _ in range(200)]
    for parity in (0, 1):
        assert [number for number in heard if number % 2 == parity] == list(range(parity, 200, 2))


def test_a_waiting_publish_without_a_broker_fails_after_its_timeout(world: BrokerHarness) -> None:
    """Nobody there: `wait_s` ends in LinkError, a QoS 0 message is dropped and says so, a QoS 1 message is kept."""
    credentials = enrol(world.authority, world.folder, "cam-1")
    session = Session("localhost", 1, "cam-1", credentials.client_context(), on_message=lambda *_: None)
    session.start()
    with pytest.raises(LinkError, match="not connected to localhost:1"):
        session.publish(MINE, b"x", qos=1, wait_s=0.05)
    assert not session.publish(MINE, b"x")
    assert session.publish(MINE, b"x", qos=1)
    session.stop()


def test_the_publish_queue_is_bounded_while_disconnected(world: BrokerHarness) -> None:
    """A session that cannot send keeps a bounded number of QoS 1 messages, and says when it drops."""
    credentials = enrol(world.authority, world.folder, "cam-1")
    session = Session("localhost", 1, "cam-1", credentials.client_context(), on_message=lambda *_: None)
    kept = [session.publish(MINE, b"x", qos=1) for _ in range(mqtt.MAX_QUEUED_MESSAGES + 10)]
    assert kept.count(True) == mqtt.MAX_QUEUED_MESSAGES


def test_a_stalled_link_does_not_fill_the_memory(world: BrokerHarness, link: ShapedLink) -> None:
    """At QoS 0 too: what a slow link cannot take is dropped beyond a bound, and publishing never blocks."""
    device = through(link, world)
    link.set_link(Link(up_bytes_per_s=1000.0, down_bytes_per_s=1000.0, rtt_s=0.0))
    kept = 0
    payload = b"x" * LIMITS.message_bytes
    while device.session.publish(MINE, payload):
        kept += 1
        assert kept < 1000
    assert mqtt.MAX_QUEUED_BYTES // LIMITS.message_bytes <= kept
    link.cut()
    device.session.stop()


def test_an_acknowledgement_that_never_comes_is_a_link_error(world: BrokerHarness, link: ShapedLink) -> None:
    """A link that swallows everything ends in LinkError after `wait_s`, not in a hang."""
    device = through(link, world)
    link.set_link(Link(up_bytes_per_s=10.0, down_bytes_per_s=10.0, rtt_s=0.0))
    with pytest.raises(LinkError):
        device.session.publish(MINE, b"x" * 10_000, qos=1, wait_s=0.2)
    link.cut()
    device.session.stop()


def test_a_reconnected_session_has_its_subscriptions(world: BrokerHarness, link: ShapedLink) -> None:
    """Cut and restore the link: `on_disconnect`, `on_connect` again, and what was subscribed is heard again."""
    device = through(link, world, DESIRED)
    controller = world.controller()
    for round_ in (b"1", b"2"):
        link.cut()
        assert device.losses.acquire(timeout=PATIENCE_S)
        assert not device.session.connected and device.session.problem
        link.restore()
        device.wait_connected()
        controller.session.publish(DESIRED, round_, qos=1, wait_s=PATIENCE_S)
        assert device.next()[1] == round_
    device.session.stop()


def test_what_was_unsubscribed_stays_unsubscribed(world: BrokerHarness, link: ShapedLink) -> None:
    """A reconnection re-makes the subscriptions that are wanted now, not those of the start."""
    fetched = "edgesplit/v1/cam-1/fetch_reply"
    device = through(link, world, DESIRED)
    device.session.unsubscribe([DESIRED])
    link.cut()
    assert device.losses.acquire(timeout=PATIENCE_S)
    device.session.subscribe([fetched])
    link.restore()
    device.wait_connected()
    controller = world.controller()
    for name in (DESIRED, fetched):
        controller.session.publish(name, b"x", qos=1, wait_s=PATIENCE_S)
    assert device.next()[0] == fetched
    device.session.stop()


def test_a_qos_1_message_survives_a_lost_link(world: BrokerHarness, link: ShapedLink) -> None:
    """What was queued while the link was down arrives when it is back."""
    controller = world.controller(MINE)
    device = through(link, world)
    link.cut()
    assert device.losses.acquire(timeout=PATIENCE_S)
    assert device.session.publish(MINE, b"kept", qos=1)
    link.restore()
    assert controller.next()[1] == b"kept"
    device.session.stop()


def listen(session: Session) -> None:
    """Connect, and wait until the subscription is acknowledged."""
    acknowledged = threading.Event()
    session._client.on_subscribe = lambda *_: acknowledged.set()
    session.subscribe([DESIRED])
    session.start()
    assert session.wait_connected(PATIENCE_S) and acknowledged.wait(PATIENCE_S)


def test_an_exception_in_a_callback_does_not_end_the_session(world: BrokerHarness) -> None:
    """Exceptions in callbacks are logged; the next message is heard."""
    heard: list[bytes] = []
    done = threading.Event()

    def careless(topic: str, payload: bytes, correlation: bytes | None) -> None:
        heard.append(payload)
        if payload == b"last":
            done.set()
        raise {b"ours": MalformedMessage("bad")}.get(payload, ZeroDivisionError())

    credentials = enrol(world.authority, world.folder, "cam-1")
    session = Session("localhost", world.broker.port, "x", credentials.client_context(), on_message=careless)
    listen(session)
    controller = world.controller()
    for payload in (b"ours", b"theirs", b"last"):
        controller.session.publish(DESIRED, payload, qos=1, wait_s=PATIENCE_S)
    assert done.wait(PATIENCE_S)
    assert heard == [b"ours", b"theirs", b"last"]
    session.stop()


def test_a_callback_may_publish_but_not_wait(world: BrokerHarness) -> None:
    """An answer from a callback goes out; waiting there for the own network thread is refused instead of hanging."""
    outcome: list[object] = []
    done = threading.Event()
    holder: list[Session] = []

    def answer(topic: str, payload: bytes, correlation: bytes | None) -> None:
        outcome.append(holder[0].publish(MINE, b"answer", correlation=correlation))
        try:
            holder[0].publish(MINE, b"y", qos=1, wait_s=1.0)
        except UsageError as error:
            outcome.append(error)
        done.set()

    controller = world.controller(MINE)
    credentials = enrol(world.authority, world.folder, "cam-1")
    holder.append(Session("localhost", world.broker.port, "x", credentials.client_context(), on_message=answer))
    listen(holder[0])
    controller.session.publish(DESIRED, b"ask", qos=1, correlation=b"42", wait_s=PATIENCE_S)
    assert controller.next() == (MINE, b"answer", b"42")
    assert done.wait(PATIENCE_S)
    assert outcome[0] is True and isinstance(outcome[1], UsageError)
    holder[0].stop()


def test_many_threads_may_publish_at_once(world: BrokerHarness) -> None:
    """Eight threads that wait for their acknowledgements: each message arrives once."""
    controller = world.controller(MINE)
    device = world.device("cam-1")

    def say(thread: int) -> None:
        for number in range(20):
            device.session.publish(MINE, f"{thread}.{number}".encode(), qos=1, wait_s=PATIENCE_S)

    threads = [threading.Thread(target=say, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    heard = [controller.next()[1] for _ in range(160)]
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(set(heard)) == 160


def test_stop_sends_queued_messages(world: BrokerHarness) -> None:
    """A clean stop sends what was published just before it."""
    controller = world.controller(MINE)
    device = world.device("cam-1")
    for number in range(50):
        device.session.publish(MINE, str(number).encode())
    device.session.stop()
    assert [int(controller.next()[1]) for _ in range(50)] == list(range(50))


def test_stop_is_final_and_idempotent(world: BrokerHarness, tmp_path: Path) -> None:
    """Stopping twice, or before the start, is nothing; a stopped session stays away."""
    device = world.device("cam-1")
    device.session.stop()
    device.session.stop()
    assert not device.session.connected
    Session("localhost", 1, "x", enrol(world.authority, tmp_path, "cam-2").client_context(), on_message=print).stop()


def test_publishing_to_a_wildcard_is_a_usage_error(world: BrokerHarness) -> None:
    """Wildcards cannot be published to."""
    with pytest.raises(UsageError):
        world.device("cam-1").session.publish("edgesplit/v1/+/birth", b"x", qos=1)
