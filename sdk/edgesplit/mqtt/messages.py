"""The MQTT messages between devices and controller: this module is the specification of the protocol.

MQTT version 5 only. Payloads are MessagePack of the structs below, at most `LIMITS.message_bytes`; chunks are raw
bytes. Every text, byte string and list has a maximum length: a message with a longer one is malformed. `{device}` is
the common name in the certificate: the broker lets a device write and read only under its own.

    edgesplit/v1/{device}/birth       device -> controller   QoS 1, retained   Birth; the last will is Death
    edgesplit/v1/{device}/desired     controller -> device   QoS 1, retained   manifest.Signed over manifest.Statement:
                                                                               the desired state
    edgesplit/v1/{device}/reported    device -> controller   QoS 1, retained   Reported: the reported state
    edgesplit/v1/{device}/telemetry   device -> controller   QoS 0             Telemetry
    edgesplit/v1/{device}/backlog     device -> controller   QoS 1             Backlog: telemetry that could not be sent
    edgesplit/v1/{device}/ack         controller -> device   QoS 0             Ack: telemetry that was stored
    edgesplit/v1/{device}/job         controller -> device   QoS 1             DeviceJob: a request for diagnostics
    edgesplit/v1/{device}/log         device -> controller   QoS 1             LogPiece or JobRefused
    edgesplit/v1/{device}/infer       controller -> device   QoS 1             an inference (`mqtt.remote_inference`)
    edgesplit/v1/{device}/infer_reply/{process}
                                      device -> controller   QoS 1             its answer, to one controller process
    edgesplit/v1/{device}/fetch       device -> controller   QoS 0             FetchMetadata or FetchChunks
    edgesplit/v1/{device}/fetch_reply controller -> device   QoS 0             FetchReply (answer to FetchMetadata), or
                                                                               a chunk's bytes for this device alone
    edgesplit/v1/chunk/{sha256}       controller -> all      QoS 0             the chunk's bytes
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from edgesplit.decoding import decode_msgpack
from edgesplit.errors import MalformedMessage
from edgesplit.limits import LIMITS
from edgesplit.mqtt.telemetry import (
    Amount,
    BacklogState,
    Count,
    Detail,
    DeviceTime,
    Digest,
    JoulesBasis,
    MachineState,
    ModelName,
    QueueState,
    ReleaseHealth,
    RowName,
    RowReason,
    Score,
    VariantName,
    Version,
)
from edgesplit.msgspec_warmup import warm_up_structs

ROOT = "edgesplit/v1"
TELEMETRY_INTERVAL_RANGE_S = (1.0, 3_600.0)
"""Shortest and longest interval between telemetry messages, in seconds."""
BucketIndex = Annotated[int, Meta(ge=0, lt=64)]
"""Index of a histogram bucket."""
FilePath = Annotated[str, Meta(max_length=400)]
"""Path of a TUF file or a manifest: `metadata/ROLE.json`, `metadata/N.root.json`, or `targets/NAME`."""
JobId = Annotated[str, Meta(pattern="^[0-9a-f]{16}$", max_length=16)]
"""Random id of a device job."""
TopicKind = Literal[
    "birth", "desired", "reported", "telemetry", "fetch", "fetch_reply", "backlog", "ack", "job", "log", "infer"
]  # fmt: skip
"""Last level of a device's topics."""
INFER_REPLY = "infer_reply"
"""Level of the topics for answers to remote inferences, before the controller process."""


def topic(device: str, kind: TopicKind) -> str:
    """Topic of one kind of message of one device; with `+` as device, a subscription to all devices."""
    return f"{ROOT}/{device}/{kind}"


def infer_reply_topic(device: str, process: int | str) -> str:
    """Topic on which a device answers the remote inferences of one controller process."""
    return f"{ROOT}/{device}/{INFER_REPLY}/{process}"


def chunk_topic(sha256: str) -> str:
    """Topic on which a chunk is published for every device that needs it."""
    return f"{ROOT}/chunk/{sha256}"


def device_of_topic(topic_name: str) -> str:
    """The device that a topic belongs to; MalformedMessage if it is not one of edgesplit's topics."""
    parts = topic_name.split("/")
    if len(parts) != (5 if parts[3:4] == [INFER_REPLY] else 4) or "/".join(parts[:2]) != ROOT:
        raise MalformedMessage(f"not a topic of edgesplit: {topic_name[:80]!r}")
    return parts[2]


ENDPOINT_FLOODED = "endpoint flooded"
"""A program on the device is refused by the local endpoint again and again."""
GATEWAY_FLOODED = "gateway flooded"
"""A gateway's server refuses a device again and again."""
LIST_EXPIRED = "revocation list expired"
"""A gateway's revocation list has expired."""
REPEATS_CHANGED = "repeated answers changed"
"""Audits showed that more repeated answers differ from the model's than the stream allows."""
CASCADE_CHANGED = "cascade changed"
"""Audits showed that more answers of a cascade's first variant differ from the second one's than was allowed."""


class Birth(msgspec.Struct, frozen=True, tag="birth"):
    """A device has connected."""

    session: Count
    """Session number, which increases with every connection; messages of an older session are ignored."""
    agent_uptime_s: Amount
    """Seconds since the agent started, by the monotonic clock."""
    agent_version: Version
    """Version of the agent."""
    device_class: Annotated[str, Meta(max_length=80)]
    """Name of its device profile."""
    emulated: bool
    local_url: Annotated[str, Meta(max_length=400)]
    """URL at which applications on the device reach the agent."""
    start_id: Annotated[str, Meta(max_length=64)] = ""
    """Random id of this start of the agent. Births that alternate between two ids mean two agents with one identity (a
    copied SD card)."""
    certificate_serial: Annotated[str, Meta(max_length=64)] = ""
    """Serial number (decimal) of the certificate in use; confirms that a renewed one has been installed."""
    simulated: bool = False
    """The device is simulated: its agent's decisions are real, its runtime and perhaps its time are not."""
    build_tag: Annotated[str, Meta(max_length=40)] = ""
    """Tag of the agent builds that fit the device (`agent_release.Target.tag`), for example `cp311-aarch64`; empty: the
    agent cannot update itself."""


class Death(msgspec.Struct, frozen=True, tag="death"):
    """The last will: the broker publishes it when the device's session `session` ends without a DISCONNECT."""

    session: Count


class ModelState(msgspec.Struct, frozen=True):
    """Reported state of one model that the device has been instructed to serve."""

    model: ModelName
    release: Digest
    """Digest of the running release; empty if none runs."""
    desired_release: Digest
    """Digest of the desired release, by the newest valid statement."""
    state: Literal["fetching", "staged", "trial", "running", "failed", "rolled back", "safe mode"]
    """`trial`: runs and has not been found healthy yet. `rolled back`: it was unhealthy, and the previous release runs
    again. `safe mode`: not loaded, because the agent crashed with it."""
    detail: Detail = ""
    """Reason of a failure, for display."""


ReportedModels = Annotated[tuple[ModelState, ...], Meta(max_length=LIMITS.reported_models)]
"""Models that a device reports: the desired ones, and those that it has not stopped yet."""


class Reported(msgspec.Struct, frozen=True, tag="reported"):
    """Reported state: the models that a device really runs."""

    session: Count
    statement_counter: Count
    """Counter of the statement that this state results from."""
    models: ReportedModels
    safe_mode: Detail = ""
    """Reason why no model is loaded; empty outside of safe mode."""
    statement_problem: Detail = ""
    """Reason why the newest statement is not followed; empty where it is."""
    gateway_models: Annotated[tuple[ModelState, ...], Meta(max_length=LIMITS.gateway_releases)] = ()
    """For a gateway: releases that it stores for the devices behind it; only those in state `staged` are listed."""
    report_number: Count = 0
    """Sequence number of this report in its session, increasing; a report with a lower number that arrives later is
    ignored."""


class PhaseSeconds(msgspec.Struct, frozen=True, array_like=True):
    """Histogram of the seconds that one phase (`edgesplit.oip.report.PHASES`) took in the requests of a telemetry
    window."""

    phase: Annotated[str, Meta(pattern="^[a-z_]{1,24}$", max_length=24)]
    total_s: Amount
    counts: Annotated[tuple[tuple[BucketIndex, Count], ...], Meta(max_length=32)]
    """Requests by bucket: (index in `edgesplit.observability.histogram.SECONDS_BOUNDS`, count), without empty buckets.
    The index after the last bound holds longer times."""


class SliceSeconds(msgspec.Struct, frozen=True, array_like=True):
    """Recent run time of one slice on the device."""

    name: Annotated[str, Meta(max_length=64)]
    seconds: Amount
    """Smoothed over its runs."""
    runs: Count
    """Number of runs since the release was loaded."""


class CascadeCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A cascade (`edgesplit.cascade`) in a telemetry window: who answered, and what audits found."""

    sure: Count = 0
    """Answers of the first variant whose score reached the threshold."""
    escalated: Count = 0
    """Answers of the second variant."""
    unsure: Count = 0
    """Answers of the first variant that were given, or refused, although they are unsure: the second one could not be
    asked in time."""
    audited: Count = 0
    """Frames drawn for audit whose outcome is known, escalated ones included: a sample of all frames."""
    changed: Count = 0
    """Those of them that the first variant answered surely and differently from the second one."""
    unaudited: Count = 0
    """Frames drawn for audit whose sure answer was not compared: link, power or the audits' own budget prevented it."""
    alarms: Count = 0
    """Alarms of the sequential test, each of which tightened the threshold."""
    threshold: Score = 0.0
    """The threshold in force at the end of the window; `cascade.MOST_SCORE`: every answer is escalated."""
    allowed: Amount = 0.0
    """Share of all answers that may be changed."""
    answered: Annotated[dict[VariantName, Count], Meta(max_length=LIMITS.variants)] = {}
    """Answers by the variant that gave them."""


class StillCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Streams whose still frames are given their last answer, in a telemetry window."""

    repeated: Count = 0
    """Answers that were repeated."""
    audited_same: Count = 0
    """Frames drawn for audit whose answer was the model's."""
    changed: Count = 0
    """Still frames drawn for audit to which the model's answer was another."""
    unaudited: Count = 0
    """Still frames drawn for audit that the model could not answer."""
    alarms: Count = 0
    """Alarms, each of which tightened a stream's threshold."""
    allowed: Amount = 0.0
    """Share of a stream's answers that may be changed; of several streams the largest."""


class TelemetryWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Telemetry window: statistics of one model's requests since the previous telemetry message. Times in seconds; p50
    and p95 over the window."""

    model: ModelName
    release: Digest
    row: RowName
    """Row of the plan in use at the end of the window."""
    requests: Count = 0
    failed: Count = 0
    fallbacks: Count = 0
    switches: Count = 0
    emulation_overruns: Count = 0
    """Emulated runs for which this host was slower than the emulated device."""
    up_bytes: Count = 0
    latency_p50_s: Amount = 0.0
    latency_p95_s: Amount = 0.0
    predicted_s: Amount = 0.0
    """The plan's prediction for `row` in the current conditions."""
    device_s: Amount = 0.0
    link_s: Amount = 0.0
    remote_s: Amount = 0.0
    problem: Annotated[str, Meta(max_length=400)] = ""
    """Why the release runs differently than it should: worker processes lost, an accelerator gone."""
    phases: Annotated[tuple[PhaseSeconds, ...], Meta(max_length=24)] = ()
    """Breakdown of the requests' time; omitted where the message would become too long, and by agents before 0.2."""
    slices: Annotated[tuple[SliceSeconds, ...], Meta(max_length=64)] = ()
    """Run times of the slices that ran on the device; input to the next planning. Omitted where the message would
    become too long, and by agents before 0.2."""
    joules: Amount = 0.0
    """Mean energy per answer, over the answers whose energy is known."""
    reason: RowReason = ""
    """Why the row of the last request was chosen; empty before the first, and by agents before 0.3."""
    joules_basis: JoulesBasis = ""
    """`measured` (scaled to this device's power rails) or `predicted` (the plan's figures). Empty: unknown."""
    cascade: CascadeCounts | None = None
    """Where the release is a cascade; None otherwise, and by agents before 0.3."""
    still: StillCounts | None = None
    """Where streams repeat answers; None otherwise, and by agents before 0.3."""


class PowerState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The device's power and temperature, and the power mode that it chose. None: unknown."""

    mode: Literal["performance", "balanced", "saver"] = "performance"
    mode_reason: Annotated[str, Meta(max_length=80)] = ""
    budget_watts: Amount | None = None
    updates_deferred_reason: Annotated[str, Meta(max_length=80)] = ""
    watts: Amount | None = None
    watts_source: Annotated[str, Meta(max_length=16)] = ""
    """Sensor of `watts`: `rails` or `battery`."""
    battery_percent: Annotated[float, Meta(ge=0, le=100)] | None = None
    discharging: bool | None = None
    celsius: Annotated[float, Meta(ge=-300, le=1000)] | None = None
    clock_ratio: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Ratio of the currently allowed CPU clock to the maximum one."""
    under_voltage: bool = False
    under_voltage_since_boot: bool = False


class ReportedCondition(msgspec.Struct, frozen=True, array_like=True):
    """A condition that the device found itself."""

    kind: Annotated[str, Meta(pattern="^[a-z ]{1,40}$", max_length=40)]
    """One of `ENDPOINT_FLOODED`, `GATEWAY_FLOODED`, `LIST_EXPIRED`, `REPEATS_CHANGED` and `CASCADE_CHANGED`. Kinds that
    a controller does not know are ignored."""
    text: Annotated[str, Meta(max_length=200)]
    """Details, for display."""


class Telemetry(msgspec.Struct, frozen=True, kw_only=True, tag="telemetry"):
    """Measurements of a device (real or emulated, see `emulated`)."""

    session: Count
    sequence: Count
    """Sequence number of this message in its session, from 0 and without gaps, counting messages that could not be
    sent."""
    emulated: bool
    up_bytes_per_s: Amount
    rtt_s: Amount
    remote_usable: bool
    models: Annotated[tuple[TelemetryWindow, ...], Meta(max_length=LIMITS.reported_models)]
    down_bytes_per_s: Amount = 0.0
    """0: not reported."""
    power: PowerState | None = None
    measured_at: DeviceTime | None = None
    """Time of the measurement."""
    agent_version: Version = ""
    """Version of the agent."""
    statement_counter: Count = 0
    """Counter of the newest verified statement."""
    statement_expires: Count = 0
    """Expiry of that statement in Unix seconds; 0: there is none."""
    queue: QueueState | None = None
    machine: MachineState | None = None
    health: Annotated[tuple[ReleaseHealth, ...], Meta(max_length=64)] = ()
    backlog: BacklogState | None = None
    conditions: Annotated[tuple[ReportedCondition, ...], Meta(max_length=8)] = ()
    """Conditions that hold now; omitted by agents before 0.3."""


class Backlog(msgspec.Struct, frozen=True, kw_only=True, tag="backlog"):
    """Telemetry that was measured while the link was down, oldest first. Acknowledged by `Ack`, and sent again until
    then."""

    batch: Count
    """Number of this batch."""
    sent_at: DeviceTime
    """Time of sending, by the same clocks as the messages in it: the age of each is known even if the wall clock is
    wrong."""
    messages: Annotated[tuple[Telemetry, ...], Meta(min_length=1, max_length=256)]


class Ack(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="ack"):
    """Acknowledgement of telemetry that the controller has stored: the device may delete it."""

    batch: Count | None = None
    """Number of the acknowledged backlog batch."""
    session: Count = 0
    sequence: Count | None = None
    """Acknowledges the telemetry of `session` up to this sequence number."""
    telemetry_interval_s: (
        Annotated[float, Meta(ge=TELEMETRY_INTERVAL_RANGE_S[0], le=TELEMETRY_INTERVAL_RANGE_S[1])] | None
    ) = None
    """Requested interval between telemetry messages in seconds, until changed."""


class DeviceJob(msgspec.Struct, frozen=True, kw_only=True, tag="job"):
    """Request for diagnostics. A closed list of kinds with bounds: the device runs, loads or opens nothing on its
    behalf."""

    id: JobId
    kind: Literal["logs"]
    max_bytes: Annotated[int, Meta(ge=1_024, le=1_048_576)] = 524_288
    """Maximum size of the compressed answer."""


class LogPiece(msgspec.Struct, frozen=True, kw_only=True, tag="log_piece"):
    """Piece of a job's answer, a log bundle: gzip of one JSON object, `total` bytes in all, with that SHA-256."""

    id: JobId
    offset: Annotated[int, Meta(ge=0, lt=1_048_576)]
    total: Annotated[int, Meta(ge=1, le=1_048_576)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
    data: Annotated[bytes, Meta(min_length=1, max_length=65_536)]


class JobRefused(msgspec.Struct, frozen=True, kw_only=True, tag="job_refused"):
    """Reason why a job gets no answer."""

    id: JobId
    reason: Annotated[str, Meta(max_length=200)]


class FetchMetadata(msgspec.Struct, frozen=True, tag="fetch_metadata"):
    """Request for one TUF metadata file or one manifest, by name; the answer carries the same correlation data."""

    path: FilePath


class FetchChunks(msgspec.Struct, frozen=True, omit_defaults=True, tag="fetch_chunks"):
    """Request for chunks of a release; each is published on its own topic. At most `LIMITS.fetch_window_chunks` at a
    time.

    A chunk is identified by its index in the release's own list (`Manifest.chunk_list`): sixteen of them take two
    bytes.
    """

    release: Digest
    first: Annotated[int, msgspec.Meta(ge=0, lt=8 * LIMITS.bitmap_bytes)]
    """Index that the first bit stands for."""
    bitmap: Annotated[bytes, msgspec.Meta(min_length=1, max_length=LIMITS.bitmap_bytes)]
    """Bit i (of byte i // 8, least significant first) is set where the chunk at index `first` + i is requested."""
    direct: bool = False
    """The device also accepts a copy on its own `fetch_reply` topic: raw bytes, with the digest as correlation data."""

    @classmethod
    def from_indexes(cls, release: str, indexes: Collection[int]) -> FetchChunks:
        """Request for the chunks at these indexes, of which there must be at least one."""
        # The bitmap starts at the lowest index, so that requests for chunks at the end stay short.
        first = min(indexes)
        bits = 0
        for place in indexes:
            bits |= 1 << (place - first)
        return cls(release, first, bits.to_bytes((bits.bit_length() + 7) // 8, "little"), direct=True)

    @property
    def indexes(self) -> list[int]:
        """The requested indexes in order; MalformedMessage where there are none or too many."""
        bits = int.from_bytes(self.bitmap, "little")
        count = bin(bits).count("1")
        if not 0 < count <= LIMITS.fetch_window_chunks:
            raise MalformedMessage(f"{count} chunks at once, at most {LIMITS.fetch_window_chunks}")
        return [self.first + bit for bit in range(bits.bit_length()) if bits >> bit & 1]


class FetchReply(msgspec.Struct, frozen=True, tag="fetch_reply"):
    """Piece of a metadata file: `data` begins at `offset` of `total` bytes; a `total` of -1 means that there is no such
    file."""

    path: FilePath
    offset: int
    total: int
    data: Annotated[bytes, Meta(max_length=LIMITS.metadata_piece_bytes)]


Message = (
    Birth | Death | Reported | Telemetry | Backlog | Ack | DeviceJob | LogPiece | JobRefused
    | FetchMetadata | FetchChunks | FetchReply
)  # fmt: skip
T = TypeVar("T")


def encode(message: Message | msgspec.Struct) -> bytes:
    """Encode a message as MessagePack."""
    return msgspec.msgpack.encode(message)


def decode(raw: bytes, kind: type[T], most_bytes: int = LIMITS.message_bytes) -> T:
    """Decode a message of type `kind` (a struct or a union of structs); MalformedMessage for anything else."""
    return decode_msgpack(raw, kind, getattr(kind, "__name__", str(kind)), most_bytes)


warm_up_structs(__name__)
