"""The simulated broker does what MQTT 5 promises, as far as edgesplit uses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from edgesplit.errors import LinkError
from edgesplit.testing.in_memory_broker import InMemoryBroker, InMemorySession, NetworkPath, matches
from edgesplit.testing.virtual_time import Hub

CAM = "edgesplit/v1/cam"


class BrokerHarness:
    """A broker, its sessions and what each of them received."""

    def __init__(self) -> None:
        self.hub = Hub()
        self.broker = InMemoryBroker(self.hub, controllers=("controller", "controller-1", "controller-2"))
        self.heard: dict[str, list[tuple[str, bytes]]] = {}

    def client(self, name: str, *topics: str, **options: Any) -> InMemorySession:
        heard = self.heard.setdefault(name, [])
        session = self.broker.session(
            name, on_message=lambda topic, payload, _: heard.append((topic, payload)), **options
        )
        session.subscribe(topics)
        session.start()
        self.hub.run(0.5)
        return session


@pytest.fixture
def network() -> Iterator[BrokerHarness]:
    yield BrokerHarness()


def test_retained_message_is_sent_to_later_subscribers(network: BrokerHarness) -> None:
    """The newest one, and none once it was cleared."""
    controller = network.client("controller")
    controller.publish(f"{CAM}/desired", b"1", retain=True)
    controller.publish(f"{CAM}/desired", b"2", retain=True)
    network.hub.run(1)
    cam = network.client("cam", f"{CAM}/desired")
    assert network.heard["cam"] == [(f"{CAM}/desired", b"2")]

    cam.stop()
    controller.publish(f"{CAM}/desired", b"", retain=True)
    network.client("cam", f"{CAM}/desired")
    assert len(network.heard["cam"]) == 1


def test_device_publishes_and_subscribes_under_its_own_name_only(network: BrokerHarness) -> None:
    """Its messages to other topics are not delivered, and messages for others are not delivered to it."""
    controller = network.client("controller", "edgesplit/v1/+/birth")
    cam = network.client("cam", "edgesplit/v1/other/desired", "edgesplit/v1/chunk/+")
    cam.publish("edgesplit/v1/other/birth", b"no")
    cam.publish(f"{CAM}/birth", b"yes")
    controller.publish("edgesplit/v1/other/desired", b"secret")
    controller.publish("edgesplit/v1/chunk/aa", b"chunk")
    network.hub.run(1)

    assert network.heard["controller"] == [(f"{CAM}/birth", b"yes")]
    assert network.heard["cam"] == [("edgesplit/v1/chunk/aa", b"chunk")]
    assert network.broker.counts.refused == 1


def test_last_will_is_sent_after_keepalive_but_not_after_disconnect(network: BrokerHarness) -> None:
    """Once."""
    network.client("controller", "edgesplit/v1/+/birth")
    for _ in range(2):
        cam = network.client("cam", will=(f"{CAM}/birth", b"dead", True), keepalive_s=10)
        cam.vanish()
        network.hub.run(14)
    assert network.heard["controller"] == [(f"{CAM}/birth", b"dead")]  # the second one found the first still listed
    network.hub.run(5)
    assert len(network.heard["controller"]) == 2

    network.client("cam", will=(f"{CAM}/birth", b"dead", True)).stop()
    network.hub.run(100)
    assert len(network.heard["controller"]) == 2


def test_second_connection_of_a_name_takes_over(network: BrokerHarness) -> None:
    """The first is disconnected, and then waits long before it reconnects."""
    first = network.client("cam")
    second = network.client("cam")
    assert second.connected and not first.connected
    assert "copied" in first.problem

    network.hub.run(10)
    assert second.connected and not first.connected
    assert network.hub.run(30, lambda: first.connected)
    assert not second.connected


def test_both_sides_detect_a_cut_link(network: BrokerHarness) -> None:
    """Nothing is delivered; after the keepalive both know; once restored, the client is back with its subscriptions."""
    controller = network.client("controller", "edgesplit/v1/+/birth")
    cam = network.client(
        "cam", f"{CAM}/desired", path=NetworkPath(), will=(f"{CAM}/birth", b"dead", True), keepalive_s=10
    )
    cam.cut()
    controller.publish(f"{CAM}/desired", b"lost")
    network.hub.run(14)
    assert cam.connected and not network.heard["controller"]
    network.hub.run(2)
    assert not cam.connected and network.heard["controller"] == [(f"{CAM}/birth", b"dead")]

    network.hub.run(600)
    cam.mend()
    network.hub.run(31)
    controller.publish(f"{CAM}/desired", b"back")
    network.hub.run(1)
    assert network.heard["cam"] == [(f"{CAM}/desired", b"back")]


def test_slow_link_delays_and_keeps_the_order(network: BrokerHarness) -> None:
    """A thousand bytes at a hundred a second arrive after ten seconds, and what was sent after them later."""
    controller = network.client("controller")
    cam = network.client("cam", "edgesplit/v1/chunk/+", path=NetworkPath(delay_s=0.1, bytes_per_s=100))
    assert cam.connected
    network.hub.run(5)
    for payload in (b"x" * 1_000, b"y"):
        controller.publish("edgesplit/v1/chunk/aa", payload)
    network.hub.run(9.9)
    assert not network.heard["cam"]
    network.hub.run(1)
    assert [payload[:1] for _, payload in network.heard["cam"]] == [b"x", b"y"]


def test_broker_restart_drops_every_connection(network: BrokerHarness) -> None:
    """All clients reconnect by themselves, at different moments; messages that the broker lost are not repeated."""
    controller = network.client("controller")
    controller.publish(f"{CAM}/desired", b"1", retain=True)
    network.hub.run(1)
    clients = [network.client(f"cam-{number}") for number in range(20)]
    network.broker.stop(clear_retained=True)
    assert not any(client.connected for client in clients)
    network.hub.run(5)
    network.broker.start()
    network.hub.run(31)
    assert all(client.connected for client in clients)
    assert network.broker.retained(f"{CAM}/desired") == b""


def test_waiting_publish_gets_its_outcome(network: BrokerHarness) -> None:
    """Acknowledged, refused, or lost with the connection."""
    cam, outcomes = network.client("cam"), []

    def publish(topic: str) -> None:
        try:
            outcomes.append(cam.publish(topic, b"1", qos=1, wait_s=5))
        except LinkError as error:
            outcomes.append(str(error))

    def work() -> None:
        publish(f"{CAM}/reported")
        publish("edgesplit/v1/other/reported")
        network.broker.stop()
        publish(f"{CAM}/reported")

    network.hub.spawn(work)
    network.hub.run(60)
    assert outcomes[0] is True
    assert "Not authorized" in outcomes[1] and "not connected" in outcomes[2]


def test_shared_subscription_delivers_to_one_member(network: BrokerHarness) -> None:
    """Each message goes to one member, in turn."""
    hub = network.hub
    for number in (1, 2):
        network.client(f"controller-{number}", "$share/all/edgesplit/v1/+/telemetry")
    cam = network.client("cam")
    for _ in range(6):
        cam.publish(f"{CAM}/telemetry", b"1")
    hub.run(1)
    assert [len(network.heard[f"controller-{number}"]) for number in (1, 2)] == [3, 3]


@pytest.mark.parametrize(
    ("topic_filter", "topic", "holds"),
    [
        ("a/+/c", "a/b/c", True),
        ("a/+/c", "a/b/d", False),
        ("a/+", "a/b/c", False),
        ("a/#", "a/b/c", True),
        ("a/#", "a", True),
        ("a/#", "b/c", False),
        ("#", "a/b", True),
    ],
)
def test_topic_filters_match_as_in_mqtt(topic_filter: str, topic: str, holds: bool) -> None:
    """With `+` for one level and `#` for the rest."""
    assert matches(topic_filter, topic) is holds
