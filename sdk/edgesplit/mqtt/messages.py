"""What travels over MQTT: this module is the specification.

Version 5 of MQTT only. Payloads are MessagePack of the structs below, at most `LIMITS.message_bytes`; chunks are bare
bytes. `{device}` is the certificate's name: the broker lets a device write and read only under its own.

    edgesplit/v1/{device}/birth       device -> controller   QoS 1, retained   Birth; the last will is Death
    edgesplit/v1/{device}/desired     controller -> device   QoS 1, retained   release.Signed over release.Statement
    edgesplit/v1/{device}/reported    device -> controller   QoS 1, retained   Reported
    edgesplit/v1/{device}/telemetry   device -> controller   QoS 0             Telemetry
    edgesplit/v1/{device}/late        device -> controller   QoS 1             Late: telemetry that could not be sent
    edgesplit/v1/{device}/kept        controller -> device   QoS 0             Kept: what needs not be sent again
    edgesplit/v1/{device}/job         controller -> device   QoS 1             Job: something to be told of
    edgesplit/v1/{device}/bundle      device -> controller   QoS 1             BundlePiece or JobRefused
    edgesplit/v1/{device}/fetch       device -> controller   QoS 0             FetchMetadata or FetchChunks
    edgesplit/v1/{device}/fetched     controller -> device   QoS 0             Fetched (answer to FetchMetadata), or a
                                                                               chunk's bytes for this device alone
    edgesplit/v1/chunk/{sha256}       controller -> all      QoS 0             the chunk's bytes
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from edgesplit.errors import MalformedMessage
from edgesplit.limits import LIMITS
from edgesplit.mqtt.telemetry import Amount, BoardSeen, Count, Moment, Queue, ReleaseHealth, StoreSeen
from edgesplit.msgspec_warmup import settle

ROOT = "edgesplit/v1"
TELEMETRY_S = (1.0, 3_600.0)
"""Telemetry is sent at least and at most so often, in seconds."""
Place = Annotated[int, Meta(ge=0, lt=64)]
Kind = Literal[
    "birth", "desired", "reported", "telemetry", "fetch", "fetched", "late", "kept", "job", "bundle"
]  # fmt: skip


def topic(device: str, kind: Kind) -> str:
    """The topic of one kind of message of one device; `+` stands for every device in a subscription."""
    return f"{ROOT}/{device}/{kind}"


def chunk_topic(sha256: str) -> str:
    """The topic on which a chunk is published for every device that wants it."""
    return f"{ROOT}/chunk/{sha256}"


def device_of(topic_name: str) -> str:
    """The device a topic belongs to; MalformedMessage if it is none of ours."""
    parts = topic_name.split("/")
    if len(parts) != 4 or "/".join(parts[:2]) != ROOT:
        raise MalformedMessage(f"not one of our topics: {topic_name[:80]!r}")
    return parts[2]


class Birth(msgspec.Struct, frozen=True, tag="birth"):
    """A device is here."""

    session: Count
    """Grows with every connection; an older session's messages are ignored."""
    boot_s: Amount
    """Seconds since the agent started, by the monotonic clock."""
    version: str
    """Of the agent."""
    device_class: str
    """Name of its device profile."""
    emulated: bool
    local_url: str
    """Where applications on that device reach the agent."""
    start: str = ""
    """A random mark of this start of the agent: two that take turns are two agents with one identity."""
    certificate: str = ""
    """Serial number (decimal) of the certificate in use; tells that a renewed one has arrived."""
    simulated: bool = False
    """The device is none: its agent's decisions are real, its runtime and perhaps its time are made up."""
    built_for: Annotated[str, Meta(max_length=40)] = ""
    """Which builds of the agent fit there (`agent_release.Target.tag`), as in `cp311-aarch64`; empty: it cannot change
    its version by itself."""


class Death(msgspec.Struct, frozen=True, tag="death"):
    """The last will: the broker says it when the device's session `session` ends without a goodbye."""

    session: Count


class ModelState(msgspec.Struct, frozen=True):
    """What one device makes of one model it was told to serve."""

    model: str
    release: str
    """The release that runs; empty if none does."""
    wanted: str
    """The release the newest valid statement asks for."""
    state: Literal["fetching", "staged", "trial", "running", "failed", "rolled back", "safe mode"]
    """`trial`: runs, and was not found healthy yet. `rolled back`: it ran, was unhealthy, and what ran before runs
    again. `safe mode`: it is not loaded, for the agent did not live with it."""
    detail: str = ""
    """Why it failed, for people."""


class Reported(msgspec.Struct, frozen=True, tag="reported"):
    """What a device really runs."""

    session: Count
    counter: Count
    """Of the statement acted upon."""
    models: tuple[ModelState, ...]
    safe_mode: str = ""
    """Why no model is loaded; empty outside of safe mode."""
    trouble: str = ""
    """Why the newest statement is not obeyed."""
    kept: tuple[ModelState, ...] = ()
    """Of a gateway: what it keeps for the devices behind it; here are those that are `staged`."""
    number: Count = 0
    """Of this report in its session, growing: an earlier one that comes later changes nothing."""


class PhaseSeconds(msgspec.Struct, frozen=True, array_like=True):
    """The seconds that one phase (`edgesplit.oip.report.PHASES`) took in a window's requests, as a histogram."""

    phase: Annotated[str, Meta(pattern="^[a-z_]{1,24}$")]
    total_s: Amount
    counts: Annotated[tuple[tuple[Place, Count], ...], Meta(max_length=32)]
    """Requests by bucket: (place in `edgesplit.observability.histogram.SECONDS`, count), without the empty ones; one
    place further stands for what is longer than the last bound."""


class SliceSeconds(msgspec.Struct, frozen=True, array_like=True):
    """What one slice takes on the device, as it was of late."""

    name: Annotated[str, Meta(max_length=64)]
    seconds: Amount
    """Smoothed over its runs."""
    runs: Count
    """Since the release was loaded."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to one model's requests since the last telemetry. Times in seconds, p50 and p95 over the window."""

    model: str
    release: str
    row: str
    """Row of the plan in use at the end of the window."""
    requests: Count = 0
    failed: Count = 0
    fallbacks: Count = 0
    switches: Count = 0
    late: Count = 0
    """Emulated samples for which this host was slower than the profile."""
    up_bytes: Count = 0
    latency_p50_s: Amount = 0.0
    latency_p95_s: Amount = 0.0
    predicted_s: Amount = 0.0
    """What the plan predicts for `row` in the conditions now."""
    device_s: Amount = 0.0
    link_s: Amount = 0.0
    remote_s: Amount = 0.0
    trouble: Annotated[str, Meta(max_length=400)] = ""
    """Why the release runs otherwise than it should: worker processes lost, an accelerator gone."""
    phases: Annotated[tuple[PhaseSeconds, ...], Meta(max_length=24)] = ()
    """Where the requests' time went; left away where the message would grow too long, and by agents before 0.2."""
    slices: Annotated[tuple[SliceSeconds, ...], Meta(max_length=64)] = ()
    """Of the slices that requests ran here; what the next plan is made with. Left away as `phases` is."""
    joules: Amount = 0.0
    """Per answer, of those whose joules are known."""
    joules_basis: Annotated[str, Meta(max_length=16)] = ""
    """`measured` (scaled to this device's rails) or `predicted` (the plan's figures). Empty: none is known."""


class PowerSeen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The device's power and heat, and what it makes of them. None: unknown there."""

    mode: Literal["performance", "balanced", "saver"] = "performance"
    why: Annotated[str, Meta(max_length=80)] = ""
    budget_watts: Amount | None = None
    updates_wait: Annotated[str, Meta(max_length=80)] = ""
    watts: Amount | None = None
    watts_from: Annotated[str, Meta(max_length=16)] = ""
    """`rails` or `battery`."""
    battery_percent: Annotated[float, Meta(ge=0, le=100)] | None = None
    discharging: bool | None = None
    celsius: Annotated[float, Meta(ge=-300, le=1000)] | None = None
    speed: Annotated[float, Meta(ge=0, le=1)] | None = None
    """What the processor's clock may reach now, as a part of what it could."""
    under_voltage: bool = False
    under_voltage_since_boot: bool = False


class Telemetry(msgspec.Struct, frozen=True, kw_only=True, tag="telemetry"):
    """Measured on the device (or emulated, and then it says so)."""

    session: Count
    sequence: Count
    """Of this message in its session, from 0 and without gaps, whether it could be sent or not."""
    emulated: bool
    up_bytes_per_s: Amount
    rtt_s: Amount
    remote_ok: bool
    models: tuple[Window, ...]
    down_bytes_per_s: Amount = 0.0
    """0: not told."""
    power: PowerSeen | None = None
    moment: Moment | None = None
    """When it was measured."""
    agent: Annotated[str, Meta(max_length=40)] = ""
    """The agent's version."""
    statement: Count = 0
    """Counter of the newest statement that is believed."""
    statement_expires: Count = 0
    """Unix seconds; 0: there is none."""
    queue: Queue | None = None
    board: BoardSeen | None = None
    health: Annotated[tuple[ReleaseHealth, ...], Meta(max_length=64)] = ()
    store: StoreSeen | None = None


class Late(msgspec.Struct, frozen=True, kw_only=True, tag="late"):
    """Telemetry that was measured while the link was gone, oldest first. Answered by `Kept`, and sent again without."""

    number: Count
    """Of this batch."""
    sent: Moment
    """By the same clocks as the messages in it: how long ago each was measured, whatever the first clock says."""
    measured: Annotated[tuple[Telemetry, ...], Meta(min_length=1, max_length=256)]


class Kept(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="kept"):
    """What the controller has stored: the device may forget it."""

    late: Count | None = None
    """The batch of that number."""
    session: Count = 0
    sequence: Count | None = None
    """Telemetry of that session that came, up to this one."""
    every_s: Annotated[float, Meta(ge=TELEMETRY_S[0], le=TELEMETRY_S[1])] | None = None
    """How often telemetry is wanted, until something else is said."""


class Job(msgspec.Struct, frozen=True, kw_only=True, tag="job"):
    """Something to be told of. A closed list of kinds and bounds: nothing in it is run, loaded or opened."""

    id: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    what: Literal["logs"]
    most_bytes: Annotated[int, Meta(ge=1_024, le=1_048_576)] = 524_288
    """Of the answer, compressed."""


class BundlePiece(msgspec.Struct, frozen=True, kw_only=True, tag="piece"):
    """A piece of a job's answer: gzip of one JSON object, in all `total` bytes with that SHA-256."""

    id: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    offset: Annotated[int, Meta(ge=0, lt=1_048_576)]
    total: Annotated[int, Meta(ge=1, le=1_048_576)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    data: Annotated[bytes, Meta(min_length=1, max_length=65_536)]


class JobRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Why there is no answer."""

    id: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    why: Annotated[str, Meta(max_length=200)]


class FetchMetadata(msgspec.Struct, frozen=True, tag="metadata"):
    """Ask for one TUF metadata file or one manifest, by name; the answer carries the same correlation data."""

    path: str
    """`metadata/ROLE.json`, `metadata/N.root.json`, or `targets/NAME`."""


class FetchChunks(msgspec.Struct, frozen=True, omit_defaults=True, tag="chunks"):
    """Ask for chunks of a release; each is published on its own topic. At most `LIMITS.window_chunks` at a time.

    A chunk is named by its place in the release's own list (`Manifest.chunk_list`): sixteen of them are two bytes.
    """

    release: str
    first: Annotated[int, msgspec.Meta(ge=0, lt=8 * LIMITS.bitmap_bytes)]
    """The place that the first bit stands for."""
    bitmap: Annotated[bytes, msgspec.Meta(min_length=1, max_length=LIMITS.bitmap_bytes)]
    """Bit i (of byte i // 8, the lowest first) is set where the chunk at place `first` + i is asked for."""
    own: bool = False
    """A copy on the device's own `fetched` topic is good, too: bare bytes, with the digest as correlation data."""

    @classmethod
    def of(cls, release: str, places: Collection[int]) -> FetchChunks:
        """The request for the chunks at these places, of which there is at least one."""
        first = min(places)
        bits = 0
        for place in places:
            bits |= 1 << (place - first)
        return cls(release, first, bits.to_bytes((bits.bit_length() + 7) // 8, "little"), own=True)

    @property
    def places(self) -> list[int]:
        """The places asked for, in order; MalformedMessage where they are none or too many."""
        bits = int.from_bytes(self.bitmap, "little")
        count = bin(bits).count("1")
        if not 0 < count <= LIMITS.window_chunks:
            raise MalformedMessage(f"{count} chunks at once, at most {LIMITS.window_chunks}")
        return [self.first + place for place in range(bits.bit_length()) if bits >> place & 1]


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """A piece of a metadata file: `data` begins at `offset` of `total`; `total` -1 says there is no such file."""

    path: str
    offset: int
    total: int
    data: bytes


Message = (
    Birth | Death | Reported | Telemetry | Late | Kept | Job | BundlePiece | JobRefused
    | FetchMetadata | FetchChunks | Fetched
)  # fmt: skip
T = TypeVar("T")


def encode(message: Message | msgspec.Struct) -> bytes:
    """The message's bytes."""
    return msgspec.msgpack.encode(message)


def decode(raw: bytes, kind: type[T], most_bytes: int = LIMITS.message_bytes) -> T:
    """The message of type `kind` (a struct or a union of structs) in `raw`; MalformedMessage for anything else."""
    if len(raw) > most_bytes:
        raise MalformedMessage(f"message of {len(raw)} bytes, at most {most_bytes}")
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise MalformedMessage(f"{getattr(kind, '__name__', kind)}: {error}") from error


settle(__name__)
