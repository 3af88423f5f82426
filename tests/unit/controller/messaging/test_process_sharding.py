"""Several processes of one controller: each chunk is published by its owner, whichever process receives the request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from hashlib import sha256

import pytest

from edgesplit.mqtt import messages
from edgesplit_controller.messaging.broker import access_rules
from edgesplit_controller.messaging.delivery import Delivery, Sources
from edgesplit_controller.messaging.process_sharding import (
    MOST_FORWARDED,
    ForwardedChunks,
    LeasedProcesses,
    forwarded_topic,
    owner_by_hash,
)
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.leases import LeaseRow

PATIENCE_S = 30.0
RELEASE = "a" * 64
CHUNKS = tuple(sha256(str(number).encode()).hexdigest() for number in range(120))


def test_each_chunk_maps_to_one_process_with_few_moves() -> None:
    """All processes compute the same owner; each has its share; without the third, only its chunks move."""
    before = {chunk: owner_by_hash(chunk, (1, 2, 3)) for chunk in CHUNKS}
    assert before == {chunk: owner_by_hash(chunk, (3, 1, 2)) for chunk in CHUNKS}
    assert all(20 < list(before.values()).count(number) < 60 for number in (1, 2, 3))
    after = {chunk: owner_by_hash(chunk, (1, 2)) for chunk in CHUNKS}
    assert all(after[chunk] == before[chunk] for chunk in CHUNKS if before[chunk] != 3)


def test_live_processes_are_those_with_a_valid_lease(database_url: str) -> None:
    """Read once a second; a process that ended or was killed owns nothing any more."""
    database, now = Database(database_url), [0.0]
    me = LeasedProcesses(database, 1, now=lambda: now[0])
    assert {me.owner_of(chunk) for chunk in CHUNKS} == {1}
    with database.write() as session:
        for number, holder, expires in ((1, "a", 4e9), (2, "b", 4e9), (3, "", 4e9), (4, "killed", 1.0)):
            session.add(LeaseRow(name=f"process {number}", holder=holder, token=1, expires=expires))
    assert {me.owner_of(chunk) for chunk in CHUNKS} == {1}
    now[0] += 1.1
    assert {me.owner_of(chunk) for chunk in CHUNKS} == {1, 2} and me.count() == 2
    database.close()


def test_devices_cannot_publish_on_the_forwarding_topic() -> None:
    """The topic belongs to a controller process, whose name no device can have, and no access rule lets a device write
    there."""
    assert forwarded_topic(2) == "edgesplit/v1/controller.2/passed"
    assert "passed" not in access_rules()


class FixedProcess:
    """A process in a test: which others there are is fixed."""

    def __init__(self, own: int) -> None:
        self.own_number = own

    def owner_of(self, chunk: str) -> int:
        return owner_by_hash(chunk, (1, 2))

    def count(self) -> int:
        return 2


class Broker:
    """Passes messages between deliveries immediately, and records the publisher of each chunk."""

    def __init__(self) -> None:
        self.published: list[tuple[int, str]] = []
        self.processes: dict[int, Delivery] = {}
        self.changed = threading.Condition()
        self.full = False

    def channel(self, number: int) -> Channel:
        return Channel(self, number)


class Channel:
    """One process' session."""

    def __init__(self, broker: Broker, number: int) -> None:
        self._broker, self._number = broker, number

    def publish(self, topic: str, payload: bytes, **_more: object) -> bool:
        passed = {value.forwarded_topic: value for value in self._broker.processes.values()}
        if topic in passed:
            if self._broker.full:
                return False
            passed[topic].on_message(topic, payload, None)
            return True
        with self._broker.changed:
            self._broker.published.append((self._number, topic.rpartition("/")[2]))
            self._broker.changed.notify_all()
        return True


@pytest.fixture
def broker() -> Iterator[Broker]:
    made = Broker()
    sources = Sources(
        metadata=lambda path: b"",
        chunk=lambda chunk: b"weights",
        release_chunks=lambda release: CHUNKS if release == RELEASE else (),
        ingest=lambda said: None,
        statements=lambda names: {},
    )
    for number in (1, 2):
        made.processes[number] = Delivery(sources, sharding=FixedProcess(number))
        made.processes[number].start(made.channel(number))
    yield made
    for delivery in made.processes.values():
        delivery.stop()


def test_a_chunk_is_published_by_its_owning_process(broker: Broker) -> None:
    """Two devices request the same chunks from two processes: each chunk is published by its owner only."""
    wish = messages.FetchChunks.from_indexes(RELEASE, list(range(24)))
    for number, device in ((1, "cam-1"), (2, "cam-2")):
        broker.processes[number].on_message(messages.topic(device, "fetch"), messages.encode(wish), None)
    with broker.changed:
        assert broker.changed.wait_for(lambda: {chunk for _, chunk in broker.published} == set(CHUNKS[:24]), PATIENCE_S)
    assert all(number == owner_by_hash(chunk, (1, 2)) for number, chunk in broker.published)
    assert {number for number, _ in broker.published} == {1, 2}


def test_a_request_that_cannot_be_forwarded_is_served_locally(broker: Broker) -> None:
    """With a full session a chunk is published twice rather than never. Garbage on the forwarding topic is ignored."""
    broker.full = True
    wish = messages.FetchChunks.from_indexes(RELEASE, list(range(24)))
    broker.processes[1].on_message(broker.processes[1].forwarded_topic, b"\xff", None)
    broker.processes[1].on_message(messages.topic("cam-1", "fetch"), messages.encode(wish), None)
    with broker.changed:
        assert broker.changed.wait_for(lambda: len(broker.published) == 24, PATIENCE_S)
    assert {number for number, _ in broker.published} == {1}


def test_a_forwarded_request_fits_one_message() -> None:
    """The longest names and as many chunks as go into one."""
    longest = ForwardedChunks("d" * 63, RELEASE, CHUNKS[:MOST_FORWARDED])
    assert messages.decode(messages.encode(longest), ForwardedChunks, 8_192) == longest
