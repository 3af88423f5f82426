"""What a network, a broker and a disk can do to a download (reference faults A8, B1 to B5, B10).

A real mosquitto with mutual TLS, the controller's own delivery and the agent's own session, fetcher and chunk store.
The claim of all: what was verified is never fetched again, what is not right is never kept, and it gets done.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from edgesplit.backoff import Backoff
from edgesplit.errors import LinkError, MalformedMessage
from edgesplit.link_emulation import ShapedLink
from edgesplit.mqtt import messages
from edgesplit.mqtt.session import Session
from edgesplit.plan import Link
from edgesplit.release.manifest import Chunk, SliceFile
from edgesplit_agent.control.fetcher import ChunkFetcher, MetadataFetcher, chunk_digest
from edgesplit_agent.releases.chunk_store import ChunkStore, ReleaseAssembly, ReleaseLayout
from edgesplit_agent.releases.disk_quota import NoRoom
from edgesplit_controller.messaging.broker import Broker
from edgesplit_controller.messaging.delivery import SUBSCRIPTIONS, Channel, Delivery, Sources
from edgesplit_controller.pki.authority import Authority
from support.agent_engine import eventually
from support.mosquitto import enrol

DEVICE = "cam"
KILLS = 100
PATIENCE_S = 60.0
RECONNECT = Backoff(first_s=0.02, longest_s=0.2)
"""A hundred reconnections need not take a quarter of a second each."""


class DeliveryHarness:
    """A controller with one release of many small chunks, and a device that lacks it."""

    def __init__(self, folder: Path, chunks: int, seed: int) -> None:
        self.folder = folder
        source = random.Random(seed)
        made = [source.randbytes(source.randint(1, 6_000)) for _ in range(chunks)]
        self.chunks = {hashlib.sha256(data).hexdigest(): data for data in made}
        self.whole = b"".join(made)
        listed = tuple(Chunk(sha256, len(data)) for sha256, data in self.chunks.items())
        file = SliceFile("weights.bin", len(self.whole), hashlib.sha256(self.whole).hexdigest(), listed)
        self.layout = ReleaseLayout(hashlib.sha256(b"release").hexdigest(), (("s01", file),), {})
        self.authority = Authority(folder / "ca")
        self.server = self.authority.issue_server("broker", ["localhost", "127.0.0.1"])
        self.broker = Broker(folder / "broker", self.server, 0, restart_backoff=Backoff(0.001, 0.001))
        self.kept: Counter[str] = Counter()
        self.before_chunk: Callable[[], None] = lambda: None
        """Called before the controller reads a chunk."""
        self.sent = 0
        self.sent_of: Counter[str] = Counter()
        self.losses = 0
        """Connections that the device lost."""
        self.told = threading.Semaphore(0)
        """Released when the device hears what it shall run."""
        self.delivery = Delivery(
            Sources(
                metadata=lambda path: b"metadata",
                chunk=self.chunk,
                release_chunks=lambda release: tuple(self.chunks) if release == self.layout.release else (),
                ingest=lambda said: None,
                statements=lambda devices: {DEVICE: b"a statement"},
            )
        )
        self.store = ChunkStore(folder / "card" / "chunks", folder / "card" / "releases")
        self._sessions: list[Session] = []

    def chunk(self, sha256: str) -> bytes:
        self.before_chunk()
        self.sent += 1
        self.sent_of[sha256] += 1
        return self.chunks[sha256]

    def start(
        self,
        twist: Callable[[Channel], Channel] = lambda channel: channel,
        link: Callable[[int], int] = lambda port: port,
    ) -> None:
        """`twist` changes what the controller sends. `link` is called with the broker's port and returns the port to
        which the device connects."""
        self.broker.start()
        port = self.broker.port
        controller = self.authority.issue_client("controller")
        self.controller = self._session(
            port, "controller", controller, self.delivery.on_message, self.delivery.on_connect
        )
        self.controller.subscribe(SUBSCRIPTIONS)
        self.delivery.start(twist(self.controller))
        self.device = self._session(
            link(port), DEVICE, enrol(self.authority, self.folder, DEVICE), self.received, None, self.lost
        )
        self.fetcher = ChunkFetcher(self.device, DEVICE)
        self.metadata = MetadataFetcher(self.device, DEVICE, (1.0, 2.0, 4.0, 8.0, 16.0))
        self.device.subscribe([messages.topic(DEVICE, "fetch_reply")], qos=0)
        self.device.subscribe([messages.topic(DEVICE, "desired")], qos=1)
        for session in (self.controller, self.device):
            session.start()
            assert session.wait_connected(20), session.problem

    def _session(self, port: int, name: str, credentials: Any, *callbacks: Any) -> Session:
        options = dict(zip(("on_message", "on_connect", "on_disconnect"), callbacks, strict=False))
        session = Session("localhost", port, name, credentials.client_context(), reconnect=RECONNECT, **options)
        self._sessions.append(session)
        return session

    def stop(self) -> None:
        for session in self._sessions:
            session.stop()
        self.delivery.stop()
        self.broker.stop()

    def received(self, topic: str, payload: bytes, correlation: bytes | None) -> None:
        kind = topic.rpartition("/")[2]
        if kind == "desired":
            self.told.release()
        elif kind == "fetch_reply" and (sha256 := chunk_digest(correlation)):
            self.fetcher.on_message(sha256, payload)
        elif kind == "fetch_reply":
            self.metadata.on_message(payload, correlation)
        else:
            self.fetcher.on_message(kind, payload)

    def lost(self) -> None:
        self.losses += 1

    def heard_anew(self) -> bool:
        """Whether the controller has spoken since this was asked last."""
        heard = False
        while self.told.acquire(blocking=False):
            heard = True
        return heard

    def keep(self, assembly: ReleaseAssembly) -> Callable[[Sequence[tuple[str, bytes]]], None]:
        def kept(chunks: Sequence[tuple[str, bytes]]) -> None:
            assembly.put_all(chunks)
            self.kept.update(sha256 for sha256, _ in chunks)

        return kept

    def fetch_all(self) -> None:
        """As the agent does: until nothing is missing, by the disk; begin anew when the controller has spoken."""
        while missing := self.store.assembly(self.layout).missing():
            if not self.device.wait_connected(PATIENCE_S):
                continue
            self.heard_anew()
            assembly = self.store.assembly(self.layout)
            stop = lambda: not self.device.connected or self.heard_anew()  # noqa: E731
            try:
                self.fetcher.fetch(self.layout.release, missing, tuple(self.chunks), self.keep(assembly), stop)
            except LinkError as error:
                print(error)

    def check(self) -> None:
        """Everything is here, at its place, and nothing was kept twice."""
        file = self.store.assembly(self.layout).folder / "slices" / "s01" / "weights.bin"
        assert file.read_bytes() == self.whole
        assert set(self.kept) == set(self.chunks) and set(self.kept.values()) == {1}


def test_a_broker_killed_a_hundred_times_costs_no_chunk_twice(tmp_path: Path) -> None:
    """B1, B2: SIGKILL a hundred times during one download, its database lost each tenth time: resumed each time.

    Each life of the broker carries a few chunks and is then killed, so that every kill lands during the download.
    """
    seed = int(os.environ.get("EDGESPLIT_SEED", "1"))
    print(f"EDGESPLIT_SEED={seed}")
    rng = random.Random(seed)
    harness = DeliveryHarness(tmp_path, 400, seed)
    budget, refilled, over = [0], threading.Condition(), threading.Event()

    def wait_for_budget() -> None:
        with refilled:
            refilled.wait_for(lambda: budget[0] > 0 or over.is_set())
            budget[0] -= 1

    harness.before_chunk = wait_for_budget
    harness.start()
    fetching = threading.Thread(target=harness.fetch_all, daemon=True)
    fetching.start()
    try:
        for kill in range(KILLS):
            with refilled:
                budget[0] = rng.randint(1, 3)
                refilled.notify_all()
            eventually("chunks were sent", lambda: budget[0] <= 0, PATIENCE_S)
            assert fetching.is_alive(), f"the download was over after {kill} kills"
            pid = harness.broker.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            eventually("it is dead", lambda pid=pid: harness.broker.pid != pid, PATIENCE_S)
            if kill % 10 == 9:
                (tmp_path / "broker" / "mosquitto.db").unlink(missing_ok=True)
            eventually("it lives again", lambda: harness.broker.pid is not None, PATIENCE_S)
            for session in (harness.controller, harness.device):
                eventually("a session of the new life", lambda one=session: one.connected, PATIENCE_S)
        with refilled:
            over.set()
            refilled.notify_all()
        fetching.join(PATIENCE_S)
        assert not fetching.is_alive()
        harness.check()
        assert harness.broker.restarts >= KILLS
    finally:
        with refilled:
            over.set()
            refilled.notify_all()
        harness.stop()


class Meddler:
    """Between controller and broker, with the controller's own certificate: doubles, holds back, reorders, spoils,
    shortens, lengthens, swaps and swallows chunks."""

    def __init__(self, channel: Channel, seed: int, foreign: bytes) -> None:
        self._channel = channel
        self._random = random.Random(seed)
        self._held: list[tuple[str, bytes]] = []
        self._foreign = foreign
        self.did: Counter[str] = Counter()

    def publish(self, topic: str, payload: bytes, **options: Any) -> bool:
        if not topic.startswith(messages.chunk_topic("")):
            return self._channel.publish(topic, payload, **options)
        what = self._random.choice(
            (
                "right",
                "right",
                "right",
                "right",
                "right",
                "right",
                "twice",
                "held",
                "spoilt",
                "short",
                "long",
                "empty",
                "foreign",
                "lost",
            )
        )
        self.did[what] += 1
        spoilt = bytes([payload[0] ^ 1]) + payload[1:]
        told = {
            "right": [payload], "twice": [payload, payload], "spoilt": [spoilt], "short": [payload[:-1]],
            "long": [payload + b"!"], "empty": [b""], "foreign": [self._foreign, payload],
        }  # fmt: skip
        if what == "held":
            self._held.append((topic, payload))
        for one in told.get(what, []):
            self._channel.publish(topic, one, **options)
        if self._held and self._random.random() < 0.3:
            for held in reversed(self._held):
                self._channel.publish(*held)
            self._held.clear()
        return True


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_doubled_reordered_delayed_and_forged_chunks_change_nothing(tmp_path: Path, seed: int) -> None:
    """B3, B4: most chunks go wrong in some way; the file is right, and each chunk was kept once."""
    print(f"seed {seed}")
    harness = DeliveryHarness(tmp_path, 100, seed)
    meddlers: list[Meddler] = []

    def twist(channel: Channel) -> Channel:
        meddlers.append(Meddler(channel, seed, b"a chunk of another release"))
        return meddlers[0]

    harness.start(twist)
    try:
        fetching = threading.Thread(target=harness.fetch_all, daemon=True)
        fetching.start()
        fetching.join(120)
        assert not fetching.is_alive(), meddlers[0].did
        harness.check()
        assert harness.fetcher.counters.refused > 0 and min(meddlers[0].did.values()) > 0, meddlers[0].did
    finally:
        harness.stop()


def bombs() -> list[bytes]:
    """What no correct peer sends: deep, wide, cut, endless, and not even MessagePack."""
    deep = [b"\x91" * 8_000 + b"\xc0", b"\x81\xa1a" * 2_000 + b"\xc0"]
    wide = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"]
    wish = messages.encode(messages.FetchChunks.from_indexes("a" * 64, [0]))
    cut = [wish[:length] for length in range(0, len(wish), 7)]
    huge = [messages.encode(messages.FetchMetadata("x" * 100_000)), b"\x00" * 200_000]
    many = [
        messages.encode(messages.FetchChunks("a" * 64, 0, b"\xff" * 6_000)),
        messages.encode(messages.FetchChunks("a" * 64, 2**40, b"\xff")),
        messages.encode(messages.FetchChunks("a" * 64, 0, b"")),
    ]
    noise = [random.Random(seed).randbytes(200) for seed in range(20)]
    return [*deep, *wide, *cut, *huge, *many, *noise]


def test_malformed_messages_of_a_device_are_dropped_and_its_session_lives(tmp_path: Path) -> None:
    """B5: bombs, cut and empty messages on each topic that a device may write; then it fetches as if nothing was."""
    harness = DeliveryHarness(tmp_path, 20, 5)
    harness.start()
    try:
        for kind in ("birth", "reported", "telemetry", "fetch"):
            for bomb in bombs():
                harness.device.publish(messages.topic(DEVICE, kind), bomb, qos=1, wait_s=PATIENCE_S)  # type: ignore[arg-type]
        assert harness.metadata.fetch("metadata/timestamp.json", 100) == b"metadata"
        harness.fetch_all()
        harness.check()
        assert harness.delivery.dropped[DEVICE] >= 4
    finally:
        harness.stop()


def test_malformed_messages_to_a_device_are_dropped(tmp_path: Path) -> None:
    """B5, the other way: whoever has the controller's place sends bombs; the device counts them and goes on."""
    harness = DeliveryHarness(tmp_path, 20, 6)
    harness.start()
    try:
        some = next(iter(harness.chunks))
        harness.device.subscribe([messages.chunk_topic(some)], qos=1)
        for bomb in bombs():
            for topic in (messages.topic(DEVICE, "fetch_reply"), messages.chunk_topic(some)):
                harness.controller.publish(topic, bomb, qos=1, wait_s=PATIENCE_S)
        harness.device.unsubscribe([messages.chunk_topic(some)])
        assert harness.metadata.fetch("metadata/timestamp.json", 100) == b"metadata"
        harness.fetch_all()
        harness.check()
    finally:
        harness.stop()


def _too_large(session: Session) -> None:
    session._client.publish(messages.topic(DEVICE, "telemetry"), b"x" * 400_000, 0)


def _too_deep(session: Session) -> None:
    session._client.publish("/".join(["a"] * 30_000), b"deep", 0)


@pytest.mark.parametrize("rude", [_too_large, _too_deep])
def test_a_client_that_violates_mqtt_is_disconnected_and_reconnects(
    tmp_path: Path, rude: Callable[[Session], None]
) -> None:
    """B5: more than a message may have, a topic of 30,000 levels: broker and controller do not mind, and who did it is
    connected again after a pause."""
    harness = DeliveryHarness(tmp_path, 20, 7)
    harness.start()
    try:
        rude(harness.device)
        eventually("it is served again", lambda: _answers(harness), PATIENCE_S)
        assert harness.broker.restarts == 0
        harness.fetch_all()
        harness.check()
    finally:
        harness.stop()


CONNECT = b"\x10\x11\x00\x04MQTT\x05\x02\x00\x1e\x00\x00\x04rude"
NOT_UTF8 = b"\x30\x08\x00\x03\xff\xfe\xc0\x00hi"
ZERO_BYTE = b"\x30\x06\x00\x01\x00\x00hi"
WILDCARD = b"\x30\x06\x00\x01#\x00hi"
ENDLESS = b"\x30\xff\xff\xff\x7f\x00\x01a" + bytes(1_000_000)


@pytest.mark.parametrize("raw", [NOT_UTF8, ZERO_BYTE, WILDCARD, ENDLESS, b"\xf7" * 64, b"\x30\xff\xff\xff\xff\xff"])
def test_malformed_packets_end_only_their_own_connection(tmp_path: Path, raw: bytes) -> None:
    """B5: topics that are no UTF-8, hold a zero or a wildcard, a packet without end, no packet at all: the broker hangs
    up on who sent them, and another device's session does not notice."""
    harness = DeliveryHarness(tmp_path, 20, 7)
    harness.start()
    try:
        tls = enrol(harness.authority, tmp_path, "rude").client_context()
        with (
            socket.create_connection(("localhost", harness.broker.port), PATIENCE_S) as plain,
            tls.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            connection.sendall(CONNECT)
            assert connection.recv(1_024)[:1] == b"\x20"
            with contextlib.suppress(OSError):
                connection.sendall(raw)
                while connection.recv(1_024):
                    pass
        harness.fetch_all()
        harness.check()
        assert harness.broker.restarts == 0 and harness.device.connected and harness.losses == 0
    finally:
        harness.stop()


SUBSCRIBE_ALL = b"\x82\x1a\x00\x01\x00\x00\x14edgesplit/v1/chunk/+\x00"


def test_a_device_that_does_not_read_delays_no_other_device(tmp_path: Path) -> None:
    """B6: one that listens to every chunk and never takes a byte off its socket: the other has its release, the broker
    bounds what it keeps for the silent one, and the controller's session lives."""
    harness = DeliveryHarness(tmp_path, 2_000, 11)
    harness.start()
    try:
        tls = enrol(harness.authority, tmp_path, "rude").client_context()
        with (
            socket.create_connection(("localhost", harness.broker.port), PATIENCE_S) as plain,
            tls.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            connection.sendall(CONNECT)
            assert connection.recv(1_024)[:1] == b"\x20"
            connection.sendall(SUBSCRIBE_ALL)
            assert connection.recv(1_024)[:1] == b"\x90"
            harness.fetch_all()
            harness.check()
        assert harness.broker.restarts == 0 and harness.device.connected and harness.controller.connected
        assert harness.losses == 0
    finally:
        harness.stop()


def _answers(harness: DeliveryHarness) -> bool:
    try:
        return harness.metadata.fetch("metadata/timestamp.json", 100) == b"metadata"
    except LinkError:
        return False


def test_a_message_over_the_limit_is_refused_by_the_senders_session(tmp_path: Path) -> None:
    """B5: our own sessions refuse it before the broker would, and stay connected."""
    harness = DeliveryHarness(tmp_path, 1, 8)
    harness.start()
    try:
        for session in (harness.device, harness.controller):
            with pytest.raises(MalformedMessage):
                session.publish(messages.topic(DEVICE, "telemetry"), b"x" * 300_000)
            assert session.connected
    finally:
        harness.stop()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "edgesplit-test", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def filled(place: Path, leave: int) -> Path:
    """A file that leaves so many bytes free."""
    filler = place / "filler"
    free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    with filler.open("wb") as file:
        for _ in range(max(0, free - leave) // 4096):
            try:
                file.write(bytes(4096))
                file.flush()
            except OSError as error:
                assert error.errno == errno.ENOSPC
                break
    return filler


def test_a_full_disk_refuses_before_the_first_byte_and_completes_when_there_is_room(
    tmp_path: Path, small_disk: Path
) -> None:
    """A8 on a real small disk: refused with nothing written; what came before it was full stays; freed, it ends."""
    harness = DeliveryHarness(tmp_path, 300, 9)
    harness.store = ChunkStore(small_disk / "chunks", small_disk / "releases", quota_bytes=2**30)
    harness.start()
    try:
        assembly = harness.store.assembly(harness.layout)
        filler = filled(small_disk, 12 * 2**20)
        with pytest.raises(NoRoom, match="free on the disk"):
            harness.store.make_room(harness.layout, assembly.missing(), ())
        assert not list(small_disk.glob("chunks/*")) and not harness.sent
        filler.unlink()
        harness.store.make_room(harness.layout, assembly.missing(), ())
        filler = filled(small_disk, 300_000)  # somebody else was faster
        with pytest.raises(NoRoom, match="disk is full"):
            harness.fetch_all()
        left = set(assembly.missing())
        assert left and left != set(harness.chunks)
        filler.unlink()
        harness.metadata.fetch("metadata/timestamp.json", 10_000)  # behind all that was asked for until now
        eventually("what was asked for is sent", lambda: not harness.delivery.queue_lengths()["chunks"])
        before = Counter(harness.sent_of)
        harness.fetch_all()
        assert harness.store.assembly(harness.layout).missing() == {}
        assert set(harness.sent_of - before) <= left, "what was here was not sent again"
    finally:
        harness.stop()


def test_a_slow_link_with_interruptions_delivers_everything(tmp_path: Path) -> None:
    """B10: a narrow link with 300 ms, cut at random: everything comes, once, and metadata gets through meanwhile."""
    harness = DeliveryHarness(tmp_path, 120, 10)
    links = []

    def shaped(port: int) -> int:
        link = ShapedLink("127.0.0.1", port, Link(up_bytes_per_s=1e5, down_bytes_per_s=2e5, rtt_s=0.3))
        links.append(link)
        link.start()
        return link.port

    harness.start(link=shaped)
    (link,) = links
    try:
        fetching = threading.Thread(target=harness.fetch_all, daemon=True)
        fetching.start()
        rng = random.Random(10)
        for _ in range(5):
            goal = len(harness.kept) + rng.randint(1, 15)
            eventually(
                "more has come", lambda goal=goal: len(harness.kept) >= goal or not fetching.is_alive(), PATIENCE_S
            )
            link.cut()
            link.restore()
        eventually("metadata comes too", lambda: _answers(harness), PATIENCE_S)
        fetching.join(120)
        assert not fetching.is_alive()
        harness.check()
    finally:
        harness.stop()
        link.stop()
