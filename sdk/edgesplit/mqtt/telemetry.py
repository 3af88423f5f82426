"""What a device measures of itself, beside its requests: numbers with bounds, and the small structs made of them.

`edgesplit.mqtt.messages` carries them; every field can be left out, so that an agent and a controller of different
versions understand each other.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from edgesplit.msgspec_warmup import settle

Count = Annotated[int, Meta(ge=0, le=2**53)]
"""A number that every database and every JSON reader holds exactly."""
Amount = Annotated[float, Meta(ge=0, le=1e15)]
"""Finite: a NaN or an infinity is no measurement, and no JSON."""
Celsius = Annotated[float, Meta(ge=-300, le=1000)]
Word = Annotated[str, Meta(max_length=80)]


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """When, by the device's own clocks. The first may be wrong, the second never is, but knows one boot only."""

    at: Amount = 0.0
    """Unix seconds; 0: not told."""
    boot: Annotated[str, Meta(max_length=16)] = ""
    """A mark of the machine's boot."""
    up_s: Amount = 0.0
    """Seconds since that boot, sleep included."""


class Queue(msgspec.Struct, frozen=True, omit_defaults=True):
    """Requests on the device now."""

    here: Count = 0
    """That run, wait or are away."""
    dropped: Count = 0
    """Frames that gave way to others, since the agent started."""


class BoardSeen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Disk and memory of the machine. None: unknown there."""

    disk_free_bytes: Count | None = None
    disk_bytes: Count | None = None
    memory_free_bytes: Count | None = None
    memory_bytes: Count | None = None


class StoreSeen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What waits on the device because the link was gone."""

    waiting: Count = 0
    """Messages."""
    waiting_bytes: Count = 0
    dropped_idle: Count = 0
    """Messages that nothing had happened in, and that found no room or grew too old; since the agent started."""
    dropped_busy: Count = 0
    dropped_trouble: Count = 0
    spoilt: Count = 0
    """Pieces that could not be read again: a power cut, a worn card."""


class ReleaseHealth(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a release has done on this device since it was activated: what gates judge. None: not known."""

    model: Annotated[str, Meta(max_length=80)]
    release: Annotated[str, Meta(max_length=64)]
    since_s: Amount = 0.0
    """Seconds since it was activated by this agent."""
    requests: Count = 0
    """Answered."""
    failed: Count = 0
    fallbacks: Count = 0
    latency_p95_s: Amount | None = None
    """Over the newest requests, at most 2,048."""
    memory_bytes: Count | None = None
    """Of its worker process, the most that was seen."""
    celsius: Celsius | None = None
    """The highest that was seen."""
    joules: Amount | None = None
    """Per answer, the mean."""
    joules_basis: Annotated[str, Meta(max_length=16)] = ""
    drift: Amount | None = None
    """Golden inputs on the release before and on this one: the largest difference, relative to the largest output."""
    top_agrees: bool | None = None
    """Whether the largest output is the same for each of them; None where no output is a vector of scores."""
    golden_ok: bool | None = None
    """It gives its own golden answers."""


settle(__name__)
