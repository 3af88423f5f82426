"""Floods at the broker that the controller never receives, each by its own certificate, against a real controller and
the mosquitto that it runs.

Whatever a device sends: it is found and named, its connection is cut, the broker refuses it, the broker's memory stays
bounded, and a bystander loses no message and no connection.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic

import pytest

from edgesplit.mqtt.messages import FetchMetadata, FetchReply, decode, encode, topic
from support.broker_floods import FLOODS, Flood
from support.edgesplit_processes import Cloud, eventually
from support.hostile_device import PATIENCE_S, HostileDevice

MEMORY_BYTES = 300 * 2**20
"""Of the broker, at its highest: an unbounded one passes it within ten seconds."""
PATH = "metadata/timestamp.json"


class FloodedCloud:
    """A controller with its own broker, and a bystander that fetches metadata through both."""

    def __init__(self, folder: Path) -> None:
        self.cloud = Cloud(folder, "--no-offload")
        self.cloud.start()
        self.bystander = HostileDevice(self.cloud, "bystander")

    @contextmanager
    def fetching(self) -> Iterator[list[int]]:
        """Let the bystander fetch in a loop meanwhile. Yields the sizes of what it received so far; AssertionError at
        the end if it lost a message or its connection."""
        answered = list[int]()
        failures = list[BaseException]()
        ends = threading.Event()

        def fetch() -> None:
            try:
                with self.bystander.client("", topic("bystander", "fetch_reply")) as client:
                    while not ends.wait(0.02):
                        assert not client.refused(topic("bystander", "fetch"), encode(FetchMetadata(PATH)))
                        answered.append(decode(client.heard.get(timeout=PATIENCE_S)[1], FetchReply).total)
                        assert not client.lost.is_set()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=fetch, daemon=True)
        thread.start()
        try:
            eventually("the bystander fetches", lambda: answered or failures)
            yield answered
            after = len(answered)
            eventually("the bystander fetches after the flood", lambda: len(answered) > after or failures)
        finally:
            ends.set()
            thread.join(2 * PATIENCE_S)
        assert not failures and not thread.is_alive(), failures
        assert all(size > 0 for size in answered)

    def peak_memory(self) -> int:
        """Most resident bytes that the broker ever had."""
        pid = int((self.cloud.data / "broker" / "mosquitto.pid").read_text())
        status = Path(f"/proc/{pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]


@pytest.fixture(scope="module")
def flooded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FloodedCloud]:
    made = FloodedCloud(tmp_path_factory.mktemp("floods"))
    yield made
    made.cloud.stop()


def flood_until_refused(flood: Flood, attacker: HostileDevice) -> int:
    """Flood until the broker refuses the device; returns the writes that it took."""
    accepted, until = 0, monotonic() + PATIENCE_S
    for let_in in flood(attacker):
        if not let_in:
            break
        accepted += 1
        assert monotonic() < until, "it was never refused"
    return accepted


@pytest.mark.parametrize(("number", "flood"), list(enumerate(FLOODS.values())), ids=FLOODS)
def test_a_flood_that_no_controller_receives_was_unseen(flooded: FloodedCloud, number: int, flood: Flood) -> None:
    """SUBSCRIBE without reading, PINGREQ, refused messages, ever new subscriptions: memory grew without bound, every
    device's round trip with it, and `edgectl` showed nothing."""
    name = f"pi-bad-{number}"
    attacker = HostileDevice(flooded.cloud, name)
    with flooded.fetching() as answered:
        accepted = flood_until_refused(flood, attacker)
    shown = flooded.cloud.api.get(f"/v1/devices/{name}")
    peak = flooded.peak_memory()
    print(f"{accepted} bursts, {len(answered)} fetches beside them, broker's peak {peak >> 20} MiB: {shown['flooded']}")
    assert accepted and peak < MEMORY_BYTES
    assert shown["flooded"]["held_until"] > shown["flooded"]["at"] and not attacker.is_let_in()
    (event,) = [
        event
        for event in flooded.cloud.api.get("/v1/events?newest=1000")
        if (event["action"], event["subject"]) == ("device.flooding", name)
    ]
    assert event["detail"]["unseen_bytes"] > 0
    assert re.search(rf"{name}\b.*quarantined", flooded.cloud.edgectl("device", "list"))
    assert "it flooded the broker" in flooded.cloud.edgectl("device", "show", name)
    assert re.search(r"flooding +[1-9]", flooded.cloud.edgectl("fleet"))
    assert flooded.cloud.api.get("/v1/devices/bystander")["flooded"] is None


def test_attackers_that_keep_the_broker_busy_were_not_cut(flooded: FloodedCloud) -> None:
    """Eight certificates ping at once: they are cut although no handshake gets through, by which sessions are taken
    over."""
    attackers = [HostileDevice(flooded.cloud, f"pi-worse-{number}") for number in range(8)]
    with flooded.fetching(), ThreadPoolExecutor(len(attackers)) as pool:
        accepted = list(pool.map(partial(flood_until_refused, FLOODS["pings"]), attackers))
    shown = [flooded.cloud.api.get(f"/v1/devices/{attacker.name}")["flooded"] for attacker in attackers]
    assert all(accepted) and all(shown)
    assert flooded.peak_memory() < MEMORY_BYTES
    assert flooded.cloud.api.get("/v1/devices/bystander")["flooded"] is None
