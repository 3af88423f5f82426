"""Chunks over MQTT by our window, beside a plain paho publish of the same bytes over the same link in the same run.

The broker is a real mosquitto with mutual TLS, the links are shaped by a user-space proxy (emulated), the controller's
side is `Delivery` on its own session. One device over links of 50 and 300 ms, one on loopback, a group of twenty, one
whose connection is cut a hundred times, and the controller's memory while four processes fetch four large releases.
"""

from __future__ import annotations

import hashlib
import math
import random
import resource
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from record import Target, finish, make_parser

from edgesplit.errors import LinkError
from edgesplit.limits import LIMITS
from edgesplit.link_emulation import ShapedLink
from edgesplit.mqtt import messages
from edgesplit.mqtt.session import Session
from edgesplit.plan import Link
from edgesplit.release.manifest import Chunk, SliceFile
from edgesplit.trust.identity import Credentials, certificate_request, load_or_make_key
from edgesplit_agent.control.fetcher import ChunkFetcher, chunk_digest
from edgesplit_agent.releases.chunk_store import ChunkStore, ReleaseAssembly, ReleaseLayout
from edgesplit_controller.messaging.broker import CONTROLLER, Broker
from edgesplit_controller.messaging.delivery import SUBSCRIPTIONS, Delivery, Sources
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.storage.blobs import BlobStore

MBIT = 125_000.0
PLAIN = "edgesplit/v1/chunk/" + "f" * 64
TIMEOUT_S = 300.0
"""Seconds after which a transfer counts as failed."""
DEVICES = 20
FETCHERS = 4
LARGE_BYTES = 256 * 2**20
CUTS = 100
REPEATS = 3
PLAIN_WINDOW = 64


@dataclass(frozen=True, slots=True)
class Transfer:
    """Duration and size of one transfer."""

    seconds: float
    bytes: int

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds


class World:
    """A broker, and the controller's side of delivery with random chunks to send."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder / "ca")
        hosts = ["localhost", "127.0.0.1"]
        self.broker = Broker(folder / "broker", self.authority.issue_server("broker", hosts), 0)
        self.blobs = BlobStore(folder / "blobs")
        self.release = ""
        self.chunks: dict[str, bytes] = {}
        self.on_disk: dict[str, tuple[str, ...]] = {}
        """Chunks of the releases that are stored on disk, by release."""
        self.sent = 0
        """Bytes of chunks that the controller passed to the broker."""
        self.delivery = Delivery(
            Sources(
                metadata=lambda path: b"",
                chunk=self._chunk,
                release_chunks=lambda release: self.on_disk.get(release) or tuple(self.chunks),
                ingest=lambda said: None,
                statements=lambda devices: {},
            )
        )
        self.broker.start()
        self.controller = self.session(CONTROLLER, self.authority.issue_client(CONTROLLER), self.delivery.on_message)
        self.controller.subscribe(SUBSCRIPTIONS)
        self.delivery.start(self)
        self.controller.start()
        assert self.controller.wait_connected(20), self.controller.problem

    def close(self) -> None:
        self.controller.stop()
        self.delivery.stop()
        self.broker.stop()

    def fill(self, size: int) -> None:
        """Add a release of so many bytes, held in memory."""
        self.release = random.randbytes(32).hex()
        made = (random.randbytes(LIMITS.chunk_bytes) for _ in range(max(1, size // LIMITS.chunk_bytes)))
        self.chunks = {hashlib.sha256(data).hexdigest(): data for data in made}
        self.sent = 0

    def fill_disk(self, size: int) -> None:
        """Add a release of so many bytes that is stored on disk, as the controller's releases are."""
        self.release = random.randbytes(32).hex()
        made = (random.randbytes(LIMITS.chunk_bytes) for _ in range(size // LIMITS.chunk_bytes))
        self.on_disk[self.release] = tuple(self.blobs.put_all(made))

    @property
    def sizes(self) -> dict[str, int]:
        return {sha256: len(data) for sha256, data in self.chunks.items()}

    def _chunk(self, sha256: str) -> bytes:
        return self.chunks[sha256] if sha256 in self.chunks else self.blobs.get(sha256)

    def publish(self, topic: str, payload: bytes, **options: Any) -> bool:
        """Publish as the session does, and count the bytes of chunks, including those to a single device."""
        sent = self.controller.publish(topic, payload, **options)
        if sent and (topic.startswith(messages.chunk_topic("")) or chunk_digest(options.get("correlation"))):
            self.sent += len(payload)
        return sent

    def device(self, name: str) -> Credentials:
        key = load_or_make_key(self.folder / f"{name}.key")
        certificate = self.folder / f"{name}.pem"
        certificate.write_bytes(self.authority.sign_request(certificate_request(key, name), name))
        return Credentials(self.folder / f"{name}.key", certificate, self.authority.certificate_file)

    def session(
        self,
        name: str,
        credentials: Credentials,
        on_message: Callable[[str, bytes, bytes | None], None],
        port: int | None = None,
    ) -> Session:
        context = credentials.client_context()
        return Session("localhost", port or self.broker.port, name, context, on_message=on_message)


class Device:
    """A device that fetches into a chunk store on disk, as the agent does."""

    def __init__(
        self,
        world: World,
        name: str,
        port: int | None = None,
        *,
        on_disk: bool = True,
        cap_bytes_per_s: float = math.inf,
    ) -> None:
        self.world = world
        self.store = ChunkStore(world.folder / name / "chunks", world.folder / name / "releases")
        self.kept = 0
        self.session = world.session(name, world.device(name), self._received, port)
        self._on_disk = on_disk
        self.fetcher = ChunkFetcher(self.session, name, cap_bytes_per_s=cap_bytes_per_s)
        self.session.subscribe([messages.topic(name, "fetch_reply")], qos=0)
        self.session.start()
        assert self.session.wait_connected(20), self.session.problem

    @property
    def assembly(self) -> ReleaseAssembly:
        """All chunks of the setup as one file of one slice."""
        chunks = tuple(Chunk(sha256, size) for sha256, size in self.world.sizes.items())
        whole = SliceFile("weights.bin", sum(self.world.sizes.values()), "0" * 64, chunks)
        return self.store.assembly(ReleaseLayout(self.world.release, (("s01", whole),), {}))

    def missing(self) -> dict[str, int]:
        return self.assembly.missing()

    def _received(self, topic: str, payload: bytes, correlation: bytes | None) -> None:
        self.fetcher.on_message(chunk_digest(correlation) or topic.rpartition("/")[2], payload)

    def fetch(self, wanted: Mapping[str, int], stop: Callable[[], bool] = lambda: False) -> Transfer:
        start = perf_counter()
        assembly = self.assembly

        def keep(chunks: Sequence[tuple[str, bytes]]) -> None:
            if self._on_disk:
                assembly.put_all(chunks)
            self.kept += len(chunks)

        self.fetcher.fetch(self.world.release, wanted, tuple(self.world.chunks), keep, stop)
        return Transfer(perf_counter() - start, sum(wanted.values()))


def plain_publish(world: World, port: int | None = None) -> Transfer:
    """Publish the same bytes on one topic at QoS 1, with as many in flight as have not arrived yet. A real publisher
    does not see what has arrived; here sender and receiver share the process.

    Without that limit mosquitto drops what a slow link does not take in time.
    """
    left, done = threading.Semaphore(0), 0
    receiver = world.session("plain", world.device("plain"), lambda *_: left.release(), port)
    receiver.subscribe([PLAIN], qos=1)
    receiver.start()
    assert receiver.wait_connected(20)
    probe = threading.Event()
    while not left.acquire(blocking=False):  # until the subscription is in force
        world.controller.publish(PLAIN, b"", qos=1, wait_s=10)
        probe.wait(0.05)
    while left.acquire(timeout=1.0):
        pass
    start = perf_counter()
    in_flight = threading.BoundedSemaphore(PLAIN_WINDOW)

    def publish() -> None:
        for data in world.chunks.values():
            in_flight.acquire()
            world.controller.publish(PLAIN, data, qos=1)

    sender = threading.Thread(target=publish, daemon=True)
    sender.start()
    while done < len(world.chunks) and left.acquire(timeout=TIMEOUT_S):
        done += 1
        in_flight.release()
    took_s = perf_counter() - start
    sender.join()
    receiver.stop()
    return Transfer(took_s, sum(map(len, world.chunks.values())))


def measure_links(world: World, results: dict[str, Any]) -> list[Target]:
    """One device over a shaped link: bytes received per second, relative to the link's rate."""
    targets = []
    for rtt_ms in (50, 300):
        rate = 20 * MBIT
        link = ShapedLink(
            "127.0.0.1", world.broker.port, Link(up_bytes_per_s=rate, down_bytes_per_s=rate, rtt_s=rtt_ms / 1e3)
        )
        link.start()
        try:
            world.fill(int(12 * rate))
            device = Device(world, f"link-{rtt_ms}", link.port)
            ours = device.fetch(world.sizes)
            device.session.stop()
            beside = plain_publish(world, link.port)
        finally:
            link.stop()
        results[f"shaped, {rtt_ms} ms"] = {
            "link_bytes_per_s": rate, "ours_bytes_per_s": ours.bytes_per_s, "plain_bytes_per_s": beside.bytes_per_s,
            "asked_again": device.fetcher.counters.asked_again,
        }  # fmt: skip
        print(f"20 Mbit/s, {rtt_ms} ms (emulated): ours {ours.bytes_per_s / rate:.1%} of the link, "
              f"plain publish {beside.bytes_per_s / rate:.1%}")  # fmt: skip
        targets.append(Target(f"part of the link's rate at {rtt_ms} ms", ours.bytes_per_s / rate, 0.8, at_least=True))
    return targets


def measure_loopback(world: World, results: dict[str, Any]) -> list[Target]:
    """64 MB over loopback, in turns with the plain publish."""
    ours, beside = [], []
    for turn in range(REPEATS):
        world.fill(64 * 10**6)
        device = Device(world, f"loop-{turn}")
        ours.append(device.fetch(world.sizes).bytes_per_s)
        device.session.stop()
        beside.append(plain_publish(world).bytes_per_s)
    ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, beside, strict=True))
    results["loopback, 64 MB"] = {"ours_bytes_per_s": ours, "plain_bytes_per_s": beside}
    print(f"loopback: ours {statistics.median(ours) / 1e6:.0f} MB/s with every chunk fsynced, "
          f"plain publish {statistics.median(beside) / 1e6:.0f} MB/s")  # fmt: skip
    return [Target("64 MB on loopback over the plain publish", ratio, 0.5, at_least=True)]


def measure_group(world: World, results: dict[str, Any]) -> list[Target]:
    """Twenty devices, limited to 10 Mbit/s each, begin within a quarter of a second, as they do when a statement
    reaches them; measures the bytes that the controller sends, relative to one copy."""
    world.fill(12 * 10**6)
    devices = [Device(world, f"group-{number}", on_disk=False, cap_bytes_per_s=10 * MBIT) for number in range(DEVICES)]
    pause, rng = threading.Event(), random.Random(7)
    starts = [rng.uniform(0.0, 0.25) for _ in devices]

    def begin(device: Device, at: float) -> None:
        pause.wait(at)
        device.fetch(world.sizes)

    threads = [threading.Thread(target=begin, args=pair) for pair in zip(devices, starts, strict=True)]
    begun = perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = perf_counter() - begun
    whole = sum(map(len, world.chunks.values()))
    complete = sum(device.fetcher.counters.chunk_bytes == whole for device in devices)
    for device in devices:
        device.session.stop()
    results["group"] = {
        "devices": DEVICES, "complete": complete, "copy_bytes": whole, "controller_bytes": world.sent,
        "broker_bytes": DEVICES * whole, "seconds": took_s,
    }  # fmt: skip
    print(
        f"{DEVICES} devices at 10 Mbit/s, {complete} complete in {took_s:.1f} s: the controller sent "
        f"{world.sent / whole:.2f} copies, the broker fanned out {DEVICES}"
    )
    return [
        Target("bytes from the controller for a group of 20, over one copy", world.sent / whole, 1.1),
        Target("devices of the group that have everything", complete, DEVICES, at_least=True),
    ]


def measure_interruptions(world: World, results: dict[str, Any]) -> list[Target]:
    """The link is cut a hundred times at random; after each cut the device looks up the chunks that it has and fetches
    the others."""
    world.fill(24 * 10**6)
    rate = 40 * MBIT
    link = ShapedLink("127.0.0.1", world.broker.port, Link(up_bytes_per_s=rate, down_bytes_per_s=rate, rtt_s=0.01))
    link.start()
    device = Device(world, "cut", link.port)
    rng, stop, cuts = random.Random(11), threading.Event(), 0

    def cutting() -> None:
        nonlocal cuts
        while cuts < CUTS and not stop.wait(rng.uniform(0.01, 0.25)):
            link.cut()
            cuts += 1
            stop.wait(rng.uniform(0.0, 0.05))
            link.restore()

    cutter = threading.Thread(target=cutting)
    cutter.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while missing := device.missing():
        try:
            if device.session.wait_connected(20):
                device.fetch(missing, lambda: not device.session.connected)
        except LinkError as error:
            print(f"  {error}")
    stop.set()
    cutter.join()
    device.session.stop()
    link.stop()
    twice = device.kept - len(world.chunks)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    results["interrupted"] = {"cuts": cuts, "chunks": len(world.chunks), "kept_twice": twice, "grown_mb": grown}
    print(f"{cuts} interruptions: {len(world.chunks)} chunks, {twice} fetched twice; grown by {grown:.0f} MB")
    return [
        Target("verified chunks fetched twice over the interruptions", twice, 0),
        Target("interruptions", cuts, CUTS, at_least=True),
    ]


def measure_large_releases(world: World, results: dict[str, Any]) -> list[Target]:
    """Four releases of 256 MB go to four devices at once, each in a process of its own; measures the memory of the
    controller's process (this one: its session, its delivery, its store) that the kernel cannot reclaim."""
    for _ in range(FETCHERS):
        world.fill_disk(LARGE_BYTES)
    jobs = []
    for number, (release, listed) in enumerate(world.on_disk.items()):
        credentials = world.device(f"fetcher-{number}")
        jobs.append((f"fetcher-{number}", credentials, world.broker.port, release, listed))
    before = most = anonymous_bytes()
    world.sent = 0
    begun = perf_counter()
    with get_context("spawn").Pool(FETCHERS) as pool:
        fetched = pool.starmap_async(fetch_in_process, jobs)
        while not fetched.ready():
            fetched.wait(0.05)
            most = max(most, anonymous_bytes())
        complete = sum(size == LARGE_BYTES for size in fetched.get())
    took_s, after = perf_counter() - begun, anonymous_bytes()
    results["controller's memory"] = {
        "releases": FETCHERS, "release_bytes": LARGE_BYTES, "complete": complete, "sent_bytes": world.sent,
        "before_bytes": before, "max_bytes": most, "after_bytes": after, "seconds": took_s,
    }  # fmt: skip
    print(
        f"{world.sent / 1e6:.0f} MB to {FETCHERS} devices in {took_s:.1f} s: the controller's memory was"
        f" {before / 1e6:.0f} MB before, {most / 1e6:.0f} MB at most, {after / 1e6:.0f} MB after"
    )
    return [
        Target("controller's growth over one of four releases of 256 MB", (most - before) / LARGE_BYTES, 0.25),
        Target("devices that have their large release", complete, FETCHERS, at_least=True),
    ]


def anonymous_bytes() -> int:
    """Memory of this process in bytes, without memory-mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def fetch_in_process(name: str, credentials: Credentials, port: int, release: str, listed: Sequence[str]) -> int:
    """The process of one device, which hashes what it fetches and stores nothing; returns the number of bytes
    received."""
    session = Session(
        "localhost", port, name, credentials.client_context(),
        on_message=lambda topic, data, tag: fetcher.on_message(chunk_digest(tag) or topic.rpartition("/")[2], data),
    )  # fmt: skip
    fetcher = ChunkFetcher(session, name)
    session.subscribe([messages.topic(name, "fetch_reply")], qos=0)
    session.start()
    assert session.wait_connected(20), session.problem
    fetcher.fetch(release, dict.fromkeys(listed, LIMITS.chunk_bytes), listed, lambda chunks: None)
    session.stop()
    return fetcher.counters.chunk_bytes


def main() -> None:
    """Run all measurements, print and write them."""
    options = make_parser(__doc__).parse_args()
    results: dict[str, Any] = {}
    targets: list[Target] = []
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        try:
            for part in (measure_links, measure_loopback, measure_group, measure_interruptions, measure_large_releases):
                targets += part(world, results)
        finally:
            world.close()
    finish(results, targets, options.json)


if __name__ == "__main__":
    main()
