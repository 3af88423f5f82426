"""A hostile device with a valid certificate, against a real controller, a real mosquitto and a real agent.

Whatever it says, asks for, or leaves unread: nothing of the victim's is read, moved or disturbed; the victim keeps its
connection and gets its deployments while the flood lasts; the operator is told who floods. The hostile device is made
of paho and of bare sockets, for no client of ours would do what it does.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from edgesplit.errors import TrustError
from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import FetchChunks, FetchMetadata, encode, topic
from edgesplit.release.manifest import decode_manifest
from edgesplit.trust.store import TrustStore
from edgesplit.trust.verification import target_path
from support.edgesplit_processes import Agent, Cloud, eventually
from support.hostile_device import (
    PATIENCE_S,
    HostileDevice,
    connect_packet,
    publish_packet,
    resident_bytes,
    subscribe_packet,
)

VICTIM, BAD = "pi-victim", "pi-bad"
SEED = int(os.environ["EDGESPLIT_SEED"])
MEMORY_BYTES = 600 * 2**20
"""Of the controller and of the broker while they are flooded: far above what they need, far below endless."""


class HostileDeviceHarness:
    """One cloud with a deployed victim and a hostile device."""

    def __init__(self, folder: Path) -> None:
        print(f"EDGESPLIT_SEED={SEED}")
        self.cloud = Cloud(folder)
        self.cloud.start()
        self.cloud.push_digits()
        self._deployed = False
        self.victim: Agent = self.cloud.agent(VICTIM)
        self.release = ""
        self.deploy()
        self.hostile = HostileDevice(self.cloud, BAD)

    def deploy(self) -> None:
        """Deploy another cut to the victim, and wait until it runs."""
        self._deployed = not self._deployed
        partition = "device" if self._deployed else "cloud"
        made = self.cloud.json("deploy", "digits", "--partition", partition, "--to", VICTIM)
        assert made["release"] != self.release
        self.release = str(made["release"])
        eventually(f"{VICTIM} runs {partition}", lambda: self.runs(self.release), 120.0)

    def chunks(self) -> int:
        """How many chunks the release has that the victim runs."""
        raw = (self.cloud.data / "tuf" / "targets" / target_path(self.release)).read_bytes()
        return len(decode_manifest(raw).chunk_list())

    def shown(self, name: str = VICTIM) -> dict[str, Any]:
        found: dict[str, Any] = self.cloud.api.get(f"/v1/devices/{name}")
        return found

    def runs(self, release: str) -> bool:
        """The victim says that this release runs."""
        return any(one["release"] == release and one["state"] == "running" for one in self.shown()["models"])

    def births(self) -> int:
        """How often the victim has connected: its events are kept."""
        events = self.cloud.api.get("/v1/events?newest=10000")
        return sum(event["action"] == "device.born" and event["subject"] == VICTIM for event in events)

    def memory(self) -> dict[str, int]:
        """Resident bytes of the controller and its broker, now."""
        up = int(self.cloud.addresses["pid"])
        broker = int((self.cloud.data / "broker" / "mosquitto.pid").read_text())
        return {name: resident_bytes(pid) for name, pid in (("controller", up), ("broker", broker))}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostileDeviceHarness]:
    made = HostileDeviceHarness(tmp_path_factory.mktemp("hostile"))
    yield made
    made.cloud.stop()


@pytest.fixture()
def undisturbed(harness: HostileDeviceHarness) -> Iterator[HostileDeviceHarness]:
    """A harness whose victim still has its session and its release after the test, and still sends telemetry."""
    before = harness.births(), harness.shown()["session"]
    yield harness
    after = harness.shown()
    assert (harness.births(), after["session"]) == before, "the victim lost its connection"
    assert harness.runs(harness.release)
    seen = after["last_seen"]
    eventually("the victim is heard again", lambda: harness.shown()["last_seen"] > seen)


# Others' topics


WRITTEN = [
    *(topic(VICTIM, kind) for kind in ("birth", "desired", "reported", "telemetry", "fetch", "fetch_reply")),
    *(topic(BAD, kind) for kind in ("desired", "fetch_reply")),
    *(topic("controller", kind) for kind in ("birth", "desired", "fetch")),
    messages.chunk_topic("0" * 64),
    "edgesplit/v1/pi-bad/birth/deeper",
    "edgesplit/v1/pi-bad",
    "edgesplit/v1",
    "$SYS/broker/uptime",
    "$share/group/edgesplit/v1/pi-victim/desired",
    "/".join("x" * 900),
    "/",
    "elsewhere",
]


def test_a_hostile_device_cannot_publish_on_others_topics(undisturbed: HostileDeviceHarness) -> None:
    """D1: others' topics, the controller's, chunks, deep and odd ones: each is refused, retained or not, and has no
    effect on what is shown of the victim."""
    shown = undisturbed.shown()
    with undisturbed.hostile.client() as bad:
        death = encode(messages.Death(2**50))
        for name in WRITTEN:
            for retain in (False, True):
                if len(name) > 1_000 or name.startswith("$share"):
                    bad.client.publish(name, death, qos=0, retain=retain)
                else:
                    assert bad.refused(name, death, retain), name
    assert {key: undisturbed.shown()[key] for key in ("session", "models", "desired")} == {
        key: shown[key] for key in ("session", "models", "desired")
    }


LISTENED = [
    "#", "+/#", "+/+/+/+", "edgesplit/#", topic("+", "desired"), topic("+", "fetch_reply"), topic(VICTIM, "#"),
    topic(VICTIM, "telemetry"), topic(VICTIM, "birth"), "$SYS/#", "$share/all/#", "$share/all/edgesplit/v1/+/telemetry",
    f"$share/x/edgesplit/v1/{VICTIM}/desired", "edgesplit/v1/+/+",
]  # fmt: skip


def test_a_hostile_device_receives_nothing_of_others(undisturbed: HostileDeviceHarness) -> None:
    """D2: all kinds of wildcards and shared subscriptions: while the victim talks and fetches, the hostile device
    hears its own topics and chunks, and nothing else."""
    with undisturbed.hostile.client("", topic(BAD, "fetch_reply"), *LISTENED) as bad:
        sequence = (undisturbed.shown()["telemetry"] or {}).get("sequence", 0)
        eventually("the victim talks", lambda: undisturbed.shown()["telemetry"]["sequence"] > sequence + 2)
        bad.client.publish(topic(BAD, "fetch"), encode(FetchMetadata("metadata/timestamp.json")), qos=1)
        before = bad.heard_before(topic(BAD, "fetch_reply"))
        assert all(name == topic(BAD, "desired") or name.startswith(messages.chunk_topic("")) for name in before)


# Others' names


def test_anothers_client_id_and_last_will_have_no_effect(undisturbed: HostileDeviceHarness) -> None:
    """D3: under the victim's client id it is still itself, and its will on the victim's topic is never said."""
    with undisturbed.hostile.client(VICTIM, topic(VICTIM, "desired"), will=topic(VICTIM, "birth")) as bad:
        assert bad.refused(topic(VICTIM, "birth"), b"x")
        assert not bad.refused(topic(BAD, "telemetry"), b"\xc0")
        lost = bad.client.socket()
        assert lost is not None
        lost.shutdown(socket.SHUT_RDWR)  # without a goodbye: the broker says the will, if it may
        bad.client.loop_stop()
    assert undisturbed.shown()["state"] == "online"


def test_statements_are_accepted_only_by_the_device_they_name(
    undisturbed: HostileDeviceHarness, tmp_path: Path
) -> None:
    """C2, C3: the victim's statement believed by nobody else, the hostile device's own replayed to nobody, and an older
    one refused by who saw a newer."""
    own = Statements(undisturbed.hostile, undisturbed.cloud, tmp_path)
    raw = own.of_victim()
    with pytest.raises(TrustError, match=f"for device '{VICTIM}'"):
        own.store.verify_statement(raw, BAD, for_install=True)
    with undisturbed.hostile.client() as bad:
        assert bad.refused(topic(VICTIM, "desired"), raw, True)
        assert bad.refused(topic(BAD, "desired"), raw, True)
    # a device that took the victim's statements in, as the victim does: the older one is refused afterwards
    twin = TrustStore(tmp_path / "twin", own.root, now=own.clock)
    twin.refresh(own.fetch)
    twin.verify_statement(raw, VICTIM, for_install=True)
    undisturbed.deploy()
    newer = own.of_victim()
    assert newer != raw
    twin.verify_statement(newer, VICTIM, for_install=True)
    with pytest.raises(TrustError, match="older than"):
        twin.verify_statement(raw, VICTIM, for_install=True)


class Statements:
    """What an eavesdropper on the controller's disk could have: any statement, and the public metadata."""

    def __init__(self, hostile: HostileDevice, cloud: Cloud, folder: Path) -> None:
        self.root = hostile.claim["tuf_root"].encode()
        self._folder = cloud.data / "tuf"
        self._database = cloud.data / "controller.db"
        self.store = TrustStore(folder / "own", self.root)
        self.clock = self.store._now
        self.store.refresh(self.fetch)

    def fetch(self, path: str, most: int) -> bytes:
        return (self._folder / path).read_bytes()

    def of_victim(self) -> bytes:
        with closing(sqlite3.connect(f"file:{self._database}?mode=ro", uri=True)) as connection:
            (raw,) = connection.execute("select statement from devices where name = ?", (VICTIM,)).fetchone()
        return bytes(raw)


# Words that are meant to confuse


def confusing() -> dict[str, tuple[messages.TopicKind, bytes]]:
    """What a device may say of itself, and no agent would."""
    rng = random.Random(SEED)
    telemetry = messages.Telemetry(
        session=2**53, sequence=0, emulated=False, up_bytes_per_s=1.0, rtt_s=0.0, remote_usable=True, models=()
    )
    raw = messages.encode(telemetry)
    return {
        "a session beyond all numbers": ("birth", encode(messages.Birth(2**64 - 1, 0.0, "1", "x", True, ""))),
        "a time that is none": ("birth", encode(messages.Birth(1, float("nan"), "1", "x", True, "\x1b[2J"))),
        "bandwidth without end": ("telemetry", raw.replace(encode_number(1.0), encode_number(float("inf")))),
        "bandwidth that is none": ("telemetry", raw.replace(encode_number(1.0), encode_number(float("nan")))),
        "bandwidth below nothing": ("telemetry", raw.replace(encode_number(1.0), encode_number(-1e30))),
        "a counter of its own": ("reported", encode(messages.Reported(2**63, 2**64 - 1, ()))),
        "names of a megabyte": ("reported", encode(messages.Reported(1, 1, (model("m" * 200_000),)))),
        "names with zeros": ("reported", encode(messages.Reported(1, 1, (model("m\0\x1b[31m"),)))),
        "the victim's death": ("birth", encode(messages.Death(2**53))),
        "no MessagePack": ("telemetry", b"\xc1" * 1_000),
        "a bomb of lists": ("telemetry", b"\x91" * 100_000),
        "a map without end": ("birth", b"\xdf\xff\xff\xff\xff"),
        "random bytes": ("fetch", rng.randbytes(5_000)),
        "invalid UTF-8": ("fetch", encode(FetchMetadata("aaaa")).replace(b"aaaa", b"\xff\xfe\xff\xfe")),
        "chunks of no release": ("fetch", encode(FetchChunks.from_indexes("f" * 64, range(16)))),
        "too many chunks": ("fetch", encode(FetchChunks("f" * 64, 0, b"\xff" * 3_000))),
        "paths that lead out": ("fetch", encode(FetchMetadata("metadata/../../keys/ca.key"))),
        "a path with a zero": ("fetch", encode(FetchMetadata("metadata/\0"))),
        "nothing at all": ("telemetry", b""),
        "as much as allowed": ("birth", b"\x00" * LIMITS.message_bytes),
    }


def encode_number(value: float) -> bytes:
    return b"\xcb" + struct.pack(">d", value)


def model(name: str) -> messages.ModelState:
    return messages.ModelState(name, "r", "r", "running", "")


def test_absurd_telemetry_does_not_disturb_the_controller(undisturbed: HostileDeviceHarness) -> None:
    """B5: absurd, malformed, retained words on its own topics: the controller answers as before, about everybody, as
    JSON that any reader takes; and nothing of them is a secret's way out."""
    with undisturbed.hostile.client("", topic(BAD, "fetch_reply")) as bad:
        for kind, raw in confusing().values():
            for retain in (False, True):
                bad.client.publish(topic(BAD, kind), raw, qos=1, retain=retain)
        bad.client.publish(topic(BAD, "fetch"), encode(FetchMetadata("metadata/timestamp.json")), qos=1)
        fetched = []
        while True:
            name, raw = bad.heard.get(timeout=PATIENCE_S)
            piece = messages.decode(raw, messages.FetchReply)
            if piece.path == "metadata/timestamp.json":
                break
            fetched.append((name, piece.total))
        assert all(total == -1 for _, total in fetched)
        listed = undisturbed.cloud.api.get("/v1/devices")
        assert {VICTIM, BAD} <= {one["name"] for one in listed}
        json.dumps(listed, allow_nan=False)
        undisturbed.cloud.edgectl("device", "list")
        assert "\x1b" not in undisturbed.cloud.edgectl("device", "show", BAD)
        for kind in ("birth", "reported", "telemetry", "fetch"):
            bad.client.publish(topic(BAD, kind), b"", qos=1, retain=True).wait_for_publish(PATIENCE_S)


def test_one_devices_messages_do_not_make_the_list_of_devices_useless(undisturbed: HostileDeviceHarness) -> None:
    """1,200 models and a version of 100,000 letters are malformed. As many models and as long texts as the protocol
    allows are stored, and the operator's list of devices stays short; `--json` has all of them."""
    version, session = "9" * 100_000, 2**53
    many = tuple(model(f"m{at}") for at in range(1_200))
    details = "d" * 1_000
    allowed = tuple(
        messages.ModelState(f"{at:03d}" + "m" * 77, "r", "r", "failed", details) for at in range(LIMITS.reported_models)
    )
    with undisturbed.hostile.client("", topic(BAD, "fetch_reply")) as bad:
        for kind, message in (
            ("birth", messages.Birth(session, 0.0, version, "x", True, "")),
            ("reported", messages.Reported(session, 1, many, report_number=1)),
            ("birth", messages.Birth(session, 0.0, "1.2.3", "x", True, "h" * 400)),
            ("reported", messages.Reported(session, 1, allowed, details, details, report_number=2)),
        ):
            bad.client.publish(topic(BAD, kind), encode(message), qos=1)  # type: ignore[arg-type]
        # Other tests leave a report of one model.
        eventually("its report", lambda: len(undisturbed.shown(BAD)["models"]) == LIMITS.reported_models)
        listed = undisturbed.cloud.edgectl("device", "list")
        assert VICTIM in listed and "999999" not in listed and "112 more" in " ".join(listed.split())
        assert len(listed) < 100_000
        everything = json.loads(undisturbed.cloud.edgectl("device", "list", "--json"))
        (own,) = [device for device in everything if device["name"] == BAD]
        assert len(own["models"]) == LIMITS.reported_models and own["agent_version"] == "1.2.3"


def broken_packets() -> list[bytes]:
    rng = random.Random(SEED)
    own = topic(BAD, "telemetry").encode()
    return [
        publish_packet(b"\xff\xfe\xc0", b"x"),
        publish_packet(b"edgesplit/v1/pi-bad/\x00", b"x"),
        publish_packet(b"edgesplit/v1/+/telemetry", b"x"),
        publish_packet(b"", b"x"),
        publish_packet(b"/" * 65_000, b"x"),
        publish_packet(own, b"x" * (LIMITS.message_bytes + 10_000)),
        b"\x30\xff\xff\xff\x7f",
        b"\x30\xff\xff\xff\xff\xff",
        b"\x82\x02\x00\x01",
        b"\xf0\x00",
        *(rng.randbytes(rng.randrange(1, 500)) for _ in range(20)),
    ]


def test_broken_packets_end_only_their_own_connection(undisturbed: HostileDeviceHarness) -> None:
    """B5: invalid UTF-8, endless lengths, topics of 65,000 levels, payloads beyond the limit, random bytes."""
    for packet in broken_packets():
        with undisturbed.hostile.socket() as link, suppress(OSError):
            link.sendall(connect_packet(BAD) + packet)
            link.shutdown(socket.SHUT_WR)
            while link.recv(4_096):
                pass
    assert undisturbed.shown()["state"] == "online"


def test_a_slow_reader_delays_no_other_device(undisturbed: HostileDeviceHarness) -> None:
    """B6: it asks for all chunks and reads a byte now and then: the victim's deployment comes, and the broker keeps
    no more for the slow one than its bounded queue."""
    with undisturbed.hostile.socket() as link:
        link.sendall(connect_packet(BAD))
        link.recv(1)
        link.sendall(subscribe_packet(b"edgesplit/v1/chunk/+"))
        undisturbed.deploy()
        link.recv(1)
        used = undisturbed.memory()
    print(f"memory with a slow reader: {used}")
    assert max(used.values()) < MEMORY_BYTES


# Floods


def as_fast_as_it_can(send: Callable[[], object], until: threading.Event) -> None:
    while not until.is_set():
        send()


def flooding(hostile: HostileDevice, until: threading.Event) -> list[threading.Thread]:
    """One connection that publishes all it can, of all kinds, and one that opens connections in a loop."""

    def pump() -> None:
        telemetry = b"\xc0" * 100
        kinds = [
            publish_packet(topic(BAD, "telemetry").encode(), telemetry),
            publish_packet(topic(BAD, "fetch").encode(), encode(FetchMetadata("metadata/timestamp.json"))),
            publish_packet(topic(BAD, "birth").encode(), b"\xc1" * 200_000),
            publish_packet(topic(VICTIM, "fetch").encode(), b"x"),
        ]
        burst = b"".join(kinds[:2] * 200 + kinds[2:])
        while not until.is_set():
            with suppress(OSError), hostile.socket() as link:
                link.settimeout(1.0)
                link.sendall(connect_packet(BAD))
                while not until.is_set():
                    link.sendall(burst)

    def knock() -> None:
        while not until.is_set():
            with suppress(OSError), hostile.socket() as link:
                link.sendall(connect_packet(BAD))
                link.settimeout(1.0)
                link.recv(1)

    threads = [threading.Thread(target=work, daemon=True) for work in (pump, knock)]
    for thread in threads:
        thread.start()
    return threads


def test_a_flooding_device_is_blocked_and_reported_while_others_get_deployments(
    undisturbed: HostileDeviceHarness,
) -> None:
    """D2, B6: at full speed on a second identity: the operator is told, its certificate opens no session for a while,
    the victim's next release arrives meanwhile, and memory stays bounded."""
    until = threading.Event()
    threads = flooding(undisturbed.hostile, until)
    try:
        told = eventually("the flood is told", lambda: undisturbed.shown(BAD)["flooded"], 120.0)
        eventually("its certificate opens no session", lambda: not undisturbed.hostile.is_let_in(), 120.0)
        undisturbed.deploy()
        used = undisturbed.memory()
    finally:
        until.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    print(f"memory under flood: {used}; told: {told}")
    assert max(used.values()) < MEMORY_BYTES
    assert told["held_until"] > told["at"] and told["times"] >= 1
    events = undisturbed.cloud.api.get("/v1/events?newest=10000")
    assert any(event["action"] == "device.flooding" and event["subject"] == BAD for event in events)
    assert "it flooded the broker" in undisturbed.cloud.edgectl("device", "show", BAD)
    assert undisturbed.shown()["flooded"] is None


def test_thousands_of_subscriptions_and_requests_delay_no_other_device(undisturbed: HostileDeviceHarness) -> None:
    """A third device listens to as many topics as it may before it floods, and asks for every chunk again and again:
    the victim's next deployment comes all the same."""
    third = HostileDevice(undisturbed.cloud, "pi-third")
    until = threading.Event()
    wish = encode(
        FetchChunks.from_indexes(undisturbed.release, range(min(LIMITS.fetch_window_chunks, undisturbed.chunks())))
    )
    with third.client("", topic("pi-third", "fetch_reply")) as bad:
        for start in range(0, 3_000, 500):
            bad.subscribe(*(f"edgesplit/v1/chunk/{number:064x}" for number in range(start, start + 500)))

        def ask() -> None:
            bad.client.publish(topic("pi-third", "fetch"), wish, qos=0)
            bad.client.publish(topic("pi-third", "fetch"), encode(FetchMetadata("metadata/timestamp.json")), qos=0)

        thread = threading.Thread(target=as_fast_as_it_can, args=(ask, until), daemon=True)
        thread.start()
        try:
            undisturbed.deploy()
        finally:
            until.set()
            thread.join(PATIENCE_S)
