"""The plan as the device knows it: a switching table and the choice from it.

The partitioner computes the table; here are only its words and the arithmetic that agent and planner must agree on.
All times are seconds, all sizes bytes, all rates bytes per second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from edgesplit.msgspec_warmup import settle

Fallback = Literal["warm", "cold", "none"]

LOCAL = "local"
REMOTE = "remote"
BEYOND = "~"
"""Between a row's name and the number of the further link beyond which its far half is meant, as in `cut-1~1`."""
_DEAD = 1e-250
_ENDLESS = 1e12
"""Bytes per second of a link whose rate is 0: its seconds are beyond all others, and still a number."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A link between two neighbouring tiers, seen from the lower one."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    rtt_s: float
    name: str = ""


class Hop(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a row does at a further link, beyond the first: who is there, what crosses and what it takes."""

    tier: str
    """The tier beyond this link."""
    remote: tuple[str, ...] = ()
    """Slices that run beyond this link, in execution order, those beyond the next included."""
    sends: tuple[str, ...] = ()
    receives: tuple[str, ...] = ()
    codecs: dict[str, str] = {}
    compress: bool = False
    encode_s: float = 0.0
    """On the tier before this link."""
    up_bytes: int = 0
    down_bytes: int = 0
    decode_s: float = 0.0
    """On the tier beyond it."""
    seconds: float = 0.0
    """Of the layers on the tier beyond it, those further out not included."""
    up_s: float = 0.0
    """That the bytes take up the link, as planned."""
    down_s: float = 0.0


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
    loss: float = 0.0
    """End-to-end output error of all its codecs, as they were chosen by one half of the samples; 0 is lossless."""
    confirmed_loss: float | None = None
    """The same on the other half."""
    compress: bool = False
    """The request's body is compressed with zstd."""
    device_s: float = 0.0
    encode_s: float = 0.0
    up_bytes: int = 0
    down_bytes: int = 0
    decode_s: float = 0.0
    remote_s: float = 0.0
    """On all tiers beyond the first link, encoding and decoding for further links included."""
    device_joules: float | None = None
    """Of the device's layers; encoding, waiting and radio are not in it (see `energy_j`)."""
    beyond_s: float = 0.0
    """Seconds on further links, as planned; 0 with two tiers."""
    hops: tuple[Hop, ...] = ()
    """Further links that the row crosses, outwards; `remote` holds the slices of all tiers beyond the first link."""

    @property
    def is_local(self) -> bool:
        """Nothing crosses: the device answers alone."""
        return not self.remote


def near_half(row: Row) -> Row:
    """What the tier beyond the first link does itself of a row with hops: from what comes up to what goes on up, and
    the answers that are ready there."""
    hop = row.hops[0]
    further = set(hop.remote)
    made_here = [tensor for tensor in hop.sends if tensor not in row.sends]
    ready = [answer for answer in row.receives if answer not in hop.receives]
    return msgspec.structs.replace(
        row,
        remote=tuple(name for name in row.remote if name not in further),
        receives=tuple(dict.fromkeys((*made_here, *ready))),
        hops=(),
    )


def far_half(row: Row) -> Row:
    """What is left of a row with hops for the tiers beyond its next link, as a row of its own: what that link's lower
    end asks the upper one for."""
    hop = row.hops[0]
    whole, _, link = row.name.partition(BEYOND)
    return Row(
        name=f"{whole}{BEYOND}{int(link or '0') + 1}",
        device=(*row.device, *near_half(row).remote),
        remote=hop.remote,
        sends=hop.sends,
        receives=hop.receives,
        codecs=hop.codecs,
        compress=hop.compress,
        encode_s=hop.encode_s,
        up_bytes=hop.up_bytes,
        down_bytes=hop.down_bytes,
        decode_s=hop.decode_s,
        remote_s=hop.seconds,
        hops=row.hops[1:],
    )


class Power(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the device draws, reduced to what the energy of a row needs."""

    idle_watts: float = 0.0
    """While it waits for the link and for others."""
    busy_watts: float = 0.0
    """While it encodes."""
    radio_watts: float = 0.0
    """Of the radio while bytes move, whatever their rate."""
    up_joules_per_byte: float = 0.0
    down_joules_per_byte: float = 0.0
    wake_joules: float = 0.0
    """Promotion and tail of the radio, once per request that crosses the first link."""


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
    earliest_cut: tuple[str, ...] = ()
    """Layers that run on the device in every row: the earliest cut that the privacy limits allow, closed, in the
    model's order. Empty where they demand none."""
    slice_s: dict[str, float] = {}
    """Predicted seconds of each slice on this device class."""
    basis: str = "predicted"
    """Where the device's times come from: `measured` or `predicted`."""
    offload: str = ""
    """A server that is not ours, where the far halves run (`edgesplit.foreign_server`). Empty: the one that the device
    was enrolled with."""
    forced: str = ""
    """The row that the operator chose: while it is usable no other is taken. Empty: the fastest is."""
    weights: dict[str, float] = {}
    """What a row costs: so much per second of `latency`, per joule of device `energy`, per second of a stream's
    slowest stage (`throughput`). Empty: latency alone."""
    power: Power | None = None
    """Needed where energy counts."""
    regret: float = 0.0
    """How much slower than the best cut the table may be, as a part of it, at the planned link and within the server
    loads and device slow-downs that `factors` names. At load 1 and slow-down 1 it is 0 at every bandwidth."""
    factors: dict[str, float] = {}
    """Largest sampled `server_load` and `device_slowdown`. Empty: none was sampled."""
    tiers: tuple[str, ...] = ()
    """From the device outwards, where there are more than device and cloud."""
    providers: tuple[str, ...] = ()
    """Accelerators that devices of this class try first, in this order (`edgesplit.runtime.providers`)."""

    def row(self, name: str) -> Row:
        """The row of that name, or of `NAME~K` its far half beyond its K-th further link; KeyError if there is none."""
        whole, beyond, link = name.partition(BEYOND)
        found = next((row for row in self.rows if row.name == whole), None)
        if found is None or (beyond and link not in map(str, range(1, len(found.hops) + 1))):
            raise KeyError(name)
        for _ in range(int(link or "0")):
            found = far_half(found)
        return found

    @property
    def has_gateway(self) -> bool:
        """Whether there is a tier between device and cloud."""
        return len(self.tiers) > 2

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
    further: Link | None = None
    """The link beyond the first, as it was measured of late; None: as planned."""
    risk_s: dict[str, float] = {}
    """By row: what a request pays on average for a cloud that comes too late, in seconds, in which the device works.
    Weighs in the choice, and is in no prediction of one request's time."""


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
    return link.rtt_s + _moving_s(row, link)


def _moving_s(row: Row, link: Link) -> float:
    """Seconds that its bytes take in both directions; none over a dead link take none."""
    return row.up_bytes / (link.up_bytes_per_s or _DEAD) + row.down_bytes / (link.down_bytes_per_s or _DEAD)


def further_link(row: Row) -> Link | None:
    """The link beyond the first that a row was planned for; None where it crosses none."""
    if not row.hops:
        return None
    hop = row.hops[0]
    round_trips_s = row.beyond_s - sum(one.up_s + one.down_s for one in row.hops)
    return Link(
        up_bytes_per_s=hop.up_bytes / hop.up_s if hop.up_s > 0 else _ENDLESS,
        down_bytes_per_s=hop.down_bytes / hop.down_s if hop.down_s > 0 else _ENDLESS,
        rtt_s=max(0.0, round_trips_s / len(row.hops)),
    )


def _on_first_hop(row: Row, now: Conditions) -> tuple[float, float]:
    """Seconds that the bytes of a row's first hop take up and down the link beyond the first."""
    hop = row.hops[0]
    if now.further is None:
        return hop.up_s, hop.down_s
    up, down = now.further.up_bytes_per_s or _DEAD, now.further.down_bytes_per_s or _DEAD
    return hop.up_bytes / up, hop.down_bytes / down


def beyond_s(row: Row, now: Conditions) -> float:
    """Seconds on the links beyond the first: as planned, but for the next of them where it was measured."""
    if now.further is None or (planned := further_link(row)) is None:
        return row.beyond_s
    hop = row.hops[0]
    others_s = row.beyond_s - planned.rtt_s - hop.up_s - hop.down_s
    return max(0.0, others_s) + now.further.rtt_s + sum(_on_first_hop(row, now))


def latency_s(row: Row, now: Conditions) -> float:
    """Seconds from input to answer by this row in today's conditions (after Neurosurgeon, ASPLOS 2017, section 5)."""
    on_device_s = (row.device_s + row.encode_s) * now.device_slowdown
    remotely_s = (row.decode_s + row.remote_s) * now.server_load
    return on_device_s + link_s(row, now.link) + beyond_s(row, now) + remotely_s


def energy_j(row: Row, now: Conditions, power: Power) -> float:
    """Joules that the device spends on one inference by this row: its layers, encoding, waiting idle, and the radio.

    Radio after Huang et al. (MobiSys 2012): a base power while bytes move, an energy per byte, promotion and tail.
    """
    busy_j = ((row.device_joules or 0.0) + power.busy_watts * row.encode_s) * now.device_slowdown
    if row.is_local:
        return busy_j
    remotely_s = (row.decode_s + row.remote_s) * now.server_load
    waiting_j = power.idle_watts * (link_s(row, now.link) + beyond_s(row, now) + remotely_s)
    bytes_j = row.up_bytes * power.up_joules_per_byte + row.down_bytes * power.down_joules_per_byte
    return busy_j + waiting_j + power.radio_watts * _moving_s(row, now.link) + bytes_j + power.wake_joules


def marginal_j(row: Row, now: Conditions, power: Power) -> float:
    """Joules of one inference beyond what the device draws anyway while it idles; never negative."""
    return max(0.0, energy_j(row, now, power) - power.idle_watts * latency_s(row, now))


def slowest_s(row: Row, now: Conditions) -> float:
    """Seconds per inference of a stream by this row: those of its slowest stage, all stages working at once.

    A tier runs its layers, decodes what comes up to it and encodes what it sends on; a link carries bytes, each
    direction for itself. Round trips are in no stage: they delay the first answer and not the next.
    """
    stages = [(row.device_s + row.encode_s) * now.device_slowdown]
    if row.is_local:
        return stages[0]
    stages += [row.up_bytes / (now.link.up_bytes_per_s or _DEAD), row.down_bytes / (now.link.down_bytes_per_s or _DEAD)]
    further_s = sum(hop.encode_s + hop.decode_s + hop.seconds for hop in row.hops)
    tiers = [row.decode_s + row.remote_s - further_s, *(hop.decode_s + hop.seconds for hop in row.hops)]
    sending = [*(hop.encode_s for hop in row.hops), 0.0]
    stages += [(here + onward) * now.server_load for here, onward in zip(tiers, sending, strict=True)]
    links = [*_on_first_hop(row, now), *(s for hop in row.hops[1:] for s in (hop.up_s, hop.down_s))] if row.hops else []
    return max(*stages, *links)


def cost(row: Row, now: Conditions, weights: Mapping[str, float], power: Power | None = None) -> float:
    """What the plan wants least of: seconds by default, else the weighted sum of seconds and joules."""
    risk_s = now.risk_s.get(row.name, 0.0)
    seconds = latency_s(row, now) + risk_s
    if not weights:
        return seconds
    total = 0.0
    if "latency" in weights:
        total = weights["latency"] * seconds
    if "energy" in weights:
        drawn = power or Power()
        total += weights["energy"] * (energy_j(row, now, drawn) + drawn.busy_watts * risk_s)
    if "throughput" in weights:
        total += weights["throughput"] * slowest_s(row, now)
    return total


def best(
    rows: Iterable[Row], now: Conditions, weights: Mapping[str, float] | None = None, power: Power | None = None
) -> Row | None:
    """The usable row of least cost, ties to fewer bytes, then to the earlier row; None if no row is usable."""
    usable = [row for row in rows if row.is_local or now.remote_ok]
    return min(usable, key=lambda row: (cost(row, now, weights or {}, power), row.up_bytes), default=None)


def choose(plan: Plan, now: Conditions, current: str | None = None, hysteresis: Hysteresis | None = None) -> Row | None:
    """The row to use next, or None if nothing usable is left.

    `current` names the row in use: it is kept unless another is better by more than `hysteresis` says. A condition that
    no measurement gives (not a number, negative) counts as planned; an endless round trip or load is nobody there.
    """
    now = _as_far_as_known(plan, now)
    forced = best((row for row in plan.rows if row.name == plan.forced), now) if plan.forced else None
    if forced is not None:
        return forced
    winner = best(plan.rows, now, plan.weights, plan.power)
    if winner is None or current is None or winner.name == current:
        return winner
    held = next((row for row in plan.rows if row.name == current and (row.is_local or now.remote_ok)), None)
    if held is None:
        return winner
    margin = hysteresis or Hysteresis()
    held_cost, winner_cost = (cost(row, now, plan.weights, plan.power) for row in (held, winner))
    worth_it = winner_cost < held_cost * margin.ratio and held_cost - winner_cost > _least_gain(plan, margin)
    return winner if worth_it or math.isinf(held_cost) else held


def _as_far_as_known(plan: Plan, now: Conditions) -> Conditions:
    """The conditions with what was planned in place of what cannot be."""
    link = now.link
    rates, rest = (link.up_bytes_per_s, link.down_bytes_per_s), (link.rtt_s, now.server_load, now.device_slowdown)
    # A comparison with what is not a number is false.
    if all(rate >= 0 for rate in rates) and all(0 <= one < math.inf for one in rest):
        return now
    up, down = (
        rate if rate >= 0 else usual
        for rate, usual in zip(rates, (plan.link.up_bytes_per_s, plan.link.down_bytes_per_s), strict=True)
    )
    rtt_s, load, slowdown = (
        one if 0 <= one < math.inf else usual for one, usual in zip(rest, (plan.link.rtt_s, 1.0, 1.0), strict=True)
    )
    return Conditions(
        link=msgspec.structs.replace(link, up_bytes_per_s=up, down_bytes_per_s=down, rtt_s=rtt_s),
        server_load=load,
        device_slowdown=slowdown,
        remote_ok=now.remote_ok and link.rtt_s != math.inf and now.server_load != math.inf,
        further=now.further,
        risk_s=now.risk_s,
    )


def _least_gain(plan: Plan, margin: Hysteresis) -> float:
    """`gain_s` as a cost. Where only joules count there is no such floor: the ratio decides."""
    return margin.gain_s * plan.weights.get("latency", 0.0) if plan.weights else margin.gain_s


settle(__name__)
