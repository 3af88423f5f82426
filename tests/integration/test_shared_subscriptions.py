"""What the processes of one controller share at the broker: each message for one of them, and for nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgesplit.mqtt.session import Session
from edgesplit_controller.messaging.broker import CONTROLLERS
from edgesplit_controller.pki.derived_secrets import DerivedSecrets
from support.mosquitto import PATIENCE_S, BrokerHarness

SAID = "edgesplit/v1/cam-1/telemetry"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[BrokerHarness]:
    made = BrokerHarness(tmp_path)
    made.broker.start()
    yield made
    made.close()


def say(session: Session, count: int) -> None:
    for number in range(count):
        session.publish(SAID, str(number).encode(), qos=1, wait_s=PATIENCE_S)


def test_two_processes_receive_each_message_once(world: BrokerHarness, tmp_path: Path) -> None:
    """Whatever one of them does not get, the other gets."""
    shared = f"$share/{DerivedSecrets(tmp_path / 'keys').derive('shared subscriptions')}/edgesplit/v1/+/telemetry"
    ended = "edgesplit/v1/cam-1/reported"
    processes = [
        world._started(name, world.authority.issue_client(name), (shared, ended), {}) for name in CONTROLLERS[:2]
    ]
    device = world.device("cam-1")
    say(device.session, 40)
    device.session.publish(ended, b"", qos=1, wait_s=PATIENCE_S)
    heard = [[int(payload) for _, payload in one.heard_before(ended)] for one in processes]
    assert sorted(heard[0] + heard[1]) == list(range(40)) and all(heard)


def test_a_device_cannot_take_others_messages_away(world: BrokerHarness, tmp_path: Path) -> None:
    """mosquitto lets anybody join a group and would give it its share, to drop it: but nobody knows the name."""
    secret = DerivedSecrets(tmp_path / "keys").derive("shared subscriptions")
    shared, ended = f"$share/{secret}/edgesplit/v1/+/telemetry", "edgesplit/v1/cam-1/reported"
    controller = world.controller(shared, ended)
    guesses = [f"$share/{name}/edgesplit/v1/+/telemetry" for name in ("controllers", "controller", "", "edgesplit")]
    world.device("cam-2", *[guess for guess in guesses if "//" not in guess], "edgesplit/v1/+/telemetry", "#")
    device = world.device("cam-1")
    say(device.session, 20)
    device.session.publish(ended, b"", qos=1, wait_s=PATIENCE_S)
    assert [int(payload) for _, payload in controller.heard_before(ended)] == list(range(20))


def test_each_installation_has_secrets_of_its_own(tmp_path: Path) -> None:
    """The same for every process of one, for one purpose."""
    one, again, other = (DerivedSecrets(tmp_path / name) for name in ("a", "a", "b"))
    assert one.derive("x") == again.derive("x") != other.derive("x") and one.derive("x") != one.derive("y")
    assert len(one.derive("x")) == 32
