"""Telemetry of the device itself, apart from its requests: bounded number and text types, and small structs made of
them.

The messages in `edgesplit.mqtt.messages` contain them. Every field can be omitted, so that agents and controllers of
different versions understand each other.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from edgesplit.cascade import MOST_SCORE
from edgesplit.limits import LIMITS
from edgesplit.msgspec_warmup import warm_up_structs

Count = Annotated[int, Meta(ge=0, le=2**53)]
"""An integer that every database and every JSON parser represents exactly."""
Amount = Annotated[float, Meta(ge=0, le=1e15)]
"""A non-negative finite float: NaN and infinity are no measurements and not valid JSON."""
Celsius = Annotated[float, Meta(ge=-300, le=1000)]
ModelName = Annotated[str, Meta(max_length=80)]
"""A model's name without its version."""
Digest = Annotated[str, Meta(max_length=64)]
"""SHA-256 of a manifest in hex; empty for none."""
ROW_NAME_CHARS = 80
RowName = Annotated[str, Meta(max_length=ROW_NAME_CHARS)]
"""Name of a row of a plan."""
ROW_REASON_CHARS = 240
RowReason = Annotated[str, Meta(max_length=ROW_REASON_CHARS)]
"""Why a row was chosen, as one sentence for people."""
VariantName = Annotated[str, Meta(max_length=80)]
"""Name of a variant of a family."""
Score = Annotated[float, Meta(ge=-MOST_SCORE, le=MOST_SCORE)]
"""How sure an answer is."""
Version = Annotated[str, Meta(max_length=80)]
"""Version of an agent."""
JoulesBasis = Annotated[str, Meta(max_length=16)]
"""`measured` or `predicted`; empty: unknown."""
Detail = Annotated[str, Meta(max_length=LIMITS.detail_chars)]
"""A reason in words, for display. Agents cut what is longer (`shorten`)."""


class DeviceTime(msgspec.Struct, frozen=True, kw_only=True):
    """A time by the device's own clocks. The wall clock may be wrong; the time since boot is always right, but only
    comparable within one boot."""

    unix_s: Amount = 0.0
    """Unix seconds; 0: not reported."""
    boot_id: Annotated[str, Meta(max_length=16)] = ""
    """Id of the machine's boot."""
    since_boot_s: Amount = 0.0
    """Seconds since that boot, including sleep."""


class QueueState(msgspec.Struct, frozen=True, omit_defaults=True):
    """Requests on the device now."""

    in_flight: Count = 0
    """Requests in the agent: running, queued or offloaded."""
    dropped: Count = 0
    """Frames that were dropped in favour of others since the agent started."""


class MachineState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Disk and memory of the machine. None: unknown."""

    disk_free_bytes: Count | None = None
    disk_bytes: Count | None = None
    memory_free_bytes: Count | None = None
    memory_bytes: Count | None = None


class BacklogState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Backlog of telemetry that is stored on the device because the link was down."""

    messages: Count = 0
    """Messages in the backlog."""
    bytes: Count = 0
    dropped_idle: Count = 0
    """Messages without events that were dropped for lack of room or because of their age, since the agent started."""
    dropped_busy: Count = 0
    """Messages with requests that were dropped, since the agent started."""
    dropped_failures: Count = 0
    """Messages with failures that were dropped, since the agent started."""
    corrupt: Count = 0
    """Records that could not be read back (power cut, worn card)."""


class ReleaseHealth(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Health of a release on this device since it was activated; input of the rollout gates. None: unknown."""

    model: ModelName
    release: Digest
    active_s: Amount = 0.0
    """Seconds since this agent activated it."""
    requests: Count = 0
    """Answered requests."""
    failed: Count = 0
    fallbacks: Count = 0
    latency_p95_s: Amount | None = None
    """Over the most recent requests, at most 2,048."""
    memory_bytes: Count | None = None
    """Peak memory of its worker process."""
    celsius: Celsius | None = None
    """Peak temperature."""
    joules: Amount | None = None
    """Mean energy per answer."""
    joules_basis: JoulesBasis = ""
    drift: Amount | None = None
    """Largest difference between the outputs of the previous release and of this one on golden inputs, relative to the
    largest output."""
    top1_agrees: bool | None = None
    """True if the largest output has the same index for each golden input; None where no output is a vector of scores.
    """
    golden_ok: bool | None = None
    """True if it reproduces its own golden answers."""
    golden_labelled: Count = 0
    """Golden inputs whose class is known, where a rollout gate judges by them."""
    golden_right: Count = 0
    """Those that it answered by their class."""
    golden_compared: Count = 0
    """Golden inputs with an answer of the model that it stands in for."""
    golden_agreeing: Count = 0
    """Those that it answered the same."""


warm_up_structs(__name__)
