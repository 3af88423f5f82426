"""The plan as the device knows it: a switching table and the choice from it.

The partitioner computes the table; here are only its words and the arithmetic that agent and planner must agree on.
All times are seconds, all sizes bytes, all rates bytes per second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import msgspec

Fallback = Literal["warm", "cold", "none"]

LOCAL = "local"
REMOTE = "remote"


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A link between two neighbouring tiers, seen from the lower one."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    rtt_s: float
    name: str = ""


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One cut with its codecs and its costs: a line a + b·x in x = 1/bandwidth."""

    name: str
    """`local`, `remote`, or `cut-N`, N counting from the most remote cut; unique in its plan.
    Where all-remote is there twice, plain and compressed, the second is `remote-zstd`."""
    device: tuple[str, ...] = ()
    """Slices that run on the device, in execution order."""
    remote: tuple[str, ...] = ()
    """Slices that run beyond the link, in execution order."""
    layers: tuple[str, ...] = ()
    """Layers on the device (the planner's view; empty in a release, whose slices list their layers)."""
    after: str = ""
    """The last layer on the device, for people to read; empty for `remote`."""
    sends: tuple[str, ...] = ()
    """Tensors that cross upwards, each once."""
    receives: tuple[str, ...] = ()
    """Outputs that come back."""
    codecs: dict[str, str] = {}
    """Codec per sent tensor; one left out travels `raw`."""
    compress: bool = False
    """The request's body is compressed with zstd."""
    device_s: float = 0.0
    encode_s: float = 0.0
    up_bytes: int = 0
    down_bytes: int = 0
    decode_s: float = 0.0
    remote_s: float = 0.0
    device_joules: float | None = None

    @property
    def is_local(self) -> bool:
        """Nothing crosses: the device answers alone."""
        return not self.remote


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The switching table for one model on one device class.

    `local` is always among its rows unless the fallback is `none`.
    """

    model: str
    device_class: str
    rows: tuple[Row, ...]
    link: Link
    """The link that the plan was asked for; the choice at run time uses the measured one."""
    fallback: Fallback = "warm"
    objective: str = "latency"
    limits: dict[str, str] = {}
    """The side limits in force, by name, as the operator gave them."""
    never_leaves: tuple[str, ...] = ()
    """Tensors that may not cross the link whatever the table says: the agent enforces it too."""
    slice_s: dict[str, float] = {}
    """Predicted seconds of each slice on this device class."""
    basis: str = "predicted"
    """Where the device's times come from: `measured` or `predicted`."""
    forced: str = ""
    """The row that the operator chose: while it is usable no other is taken. Empty: the fastest is."""

    def row(self, name: str) -> Row:
        """The row of that name; KeyError if there is none."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    @property
    def local(self) -> Row | None:
        """The row that needs nobody else, or None where the plan has no fallback."""
        return next((row for row in self.rows if row.is_local), None)


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What the device sees now."""

    link: Link
    server_load: float = 1.0
    """Factor on the remote seconds: 1 is an idle server."""
    device_slowdown: float = 1.0
    """Factor on the device's seconds: 1 is as planned."""
    remote_ok: bool = True
    """False while the breaker is open: only rows that need nobody else count."""


class Hysteresis(msgspec.Struct, frozen=True, kw_only=True):
    """How much better another row must be before it is worth the change."""

    ratio: float = 0.9
    """The other row's seconds must be below this part of the current one's..."""
    gain_s: float = 0.002
    """...and at least this much less."""


def link_s(row: Row, link: Link) -> float:
    """Seconds on the link: the round trip once if anything crosses, and each byte by its direction's rate."""
    if row.is_local:
        return 0.0
    return link.rtt_s + row.up_bytes / link.up_bytes_per_s + row.down_bytes / link.down_bytes_per_s


def latency_s(row: Row, now: Conditions) -> float:
    """Seconds from input to answer by this row in today's conditions (after Neurosurgeon, ASPLOS 2017, section 5)."""
    on_device_s = (row.device_s + row.encode_s) * now.device_slowdown
    remotely_s = (row.decode_s + row.remote_s) * now.server_load
    return on_device_s + link_s(row, now.link) + remotely_s


def best(rows: Iterable[Row], now: Conditions) -> Row | None:
    """The fastest usable row, ties to fewer bytes, then to the earlier row; None if no row is usable."""
    usable = [row for row in rows if row.is_local or now.remote_ok]
    return min(usable, key=lambda row: (latency_s(row, now), row.up_bytes), default=None)


def choose(plan: Plan, now: Conditions, current: str | None = None, hysteresis: Hysteresis | None = None) -> Row | None:
    """The row to use next, or None if nothing usable is left.

    `current` names the row in use: it is kept unless another is better by more than `hysteresis` says.
    """
    forced = best((row for row in plan.rows if row.name == plan.forced), now) if plan.forced else None
    if forced is not None:
        return forced
    winner = best(plan.rows, now)
    if winner is None or current is None or winner.name == current:
        return winner
    held = next((row for row in plan.rows if row.name == current and (row.is_local or now.remote_ok)), None)
    if held is None:
        return winner
    margin = hysteresis or Hysteresis()
    held_s, winner_s = latency_s(held, now), latency_s(winner, now)
    worth_it = winner_s < held_s * margin.ratio and held_s - winner_s > margin.gain_s
    return winner if worth_it or math.isinf(held_s) else held
