"""The plan as the device uses it: a switching table, the cost model of its rows, and the choice of a row.

The partitioner computes the table; this module holds its format and the arithmetic that agent and planner must agree
on. All times are in seconds, all sizes in bytes, all rates in bytes per second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from edgesplit.cascade import Cascade, ChangedShare
from edgesplit.msgspec_warmup import warm_up_structs

Fallback = Literal["warm", "cold", "none"]

LOCAL = "local"
REMOTE = "remote"
VARIANT_MARK = ":"
"""Separates a variant's name from the name of its row or layer (`variant_name`)."""
FURTHER_LINK_MARK = "~"
"""Separates a row's name from the number of a further link: `cut-1~1` is the remote half of row `cut-1` beyond its
first further link."""
_DEAD_LINK_BYTES_PER_S = 1e-250
"""Stands for a rate of 0 bytes/s in a division: 0 bytes then take 0 seconds, and any others practically for ever."""
_UNLIMITED_BYTES_PER_S = 1e12
"""Bytes per second of a link whose bytes take no planned time."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A link between two neighbouring tiers, as seen from the lower one (the one closer to the device)."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    rtt_s: float
    name: str = ""


class Hop(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part of a row at one further link, beyond the first: the tier behind it, the tensors that cross it and the
    costs."""

    tier: str
    """Name of the tier beyond this link."""
    remote: tuple[str, ...] = ()
    """Slices that run beyond this link, in execution order, including those beyond later links."""
    sends: tuple[str, ...] = ()
    receives: tuple[str, ...] = ()
    codecs: dict[str, str] = {}
    clips: dict[str, float] = {}
    """As `Row.clips`."""
    compress: bool = False
    encode_s: float = 0.0
    """Seconds to encode, on the tier before this link."""
    up_bytes: int = 0
    down_bytes: int = 0
    decode_s: float = 0.0
    """Seconds to decode, on the tier beyond this link."""
    seconds: float = 0.0
    """Seconds of the layers on the tier beyond this link, without those of tiers further out."""
    up_s: float = 0.0
    """Planned seconds that the bytes take up this link."""
    down_s: float = 0.0
    """Planned seconds that the bytes take down this link."""


CUT_NAME_SEPARATOR = " + "
"""Between the layers in the name of a cut."""


def cut_name(last_layers: Iterable[str]) -> str:
    """The name of a cut by the layers on the device that no other layer there reads: one in a chain, one per branch
    where the cut goes through branches. Two cuts never share it, since these layers and all they depend on are the
    device's part; the last layer in the order of the model may be the same in many."""
    return CUT_NAME_SEPARATOR.join(last_layers)


def variant_name(variant: str, name: str) -> str:
    """The name of a variant's row or layer in a family's plan, as in `small:cut-3`; the name itself where the plan has
    no variants."""
    return f"{variant}{VARIANT_MARK}{name}" if variant else name


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One cut (split point) with its codecs and costs. Its latency is a line a + b·x in x = 1/bandwidth."""

    name: str
    """`local`, `remote`, or by its cut: `cut-N` has N layers on the device. Unique in its plan, and the same in every
    plan of the model. Where the all-remote row exists both plain and compressed, the second is `remote-zstd`."""
    device: tuple[str, ...] = ()
    """Slices that run on the device, in execution order."""
    remote: tuple[str, ...] = ()
    """Slices that run beyond the first link, in execution order."""
    layers: tuple[str, ...] = ()
    """Layers on the device (used by the planner; empty in a release, whose slices list their layers)."""
    split_after: str = ""
    """The cut's name for people (`cut_name`), which forces this cut again: the device runs exactly these layers and all
    they depend on. Empty for `remote`."""
    sends: tuple[str, ...] = ()
    """Tensors that cross the first link upwards, each once."""
    receives: tuple[str, ...] = ()
    """Model outputs that come back over the first link."""
    codecs: dict[str, str] = {}
    """Codec per sent tensor; a tensor that is not listed travels `raw`."""
    clips: dict[str, float] = {}
    """Per sent tensor with the codec `int4`: share of each request's own range that is divided into levels, above 0 and
    at most 1, found on samples. Not listed: 1."""
    loss: float = 0.0
    """End-to-end output error of all its codecs, measured on the half of the samples with which they were chosen; 0 is
    lossless."""
    confirmed_loss: float | None = None
    """End-to-end output error on the other half of the samples (validation); None where it was not measured."""
    changed: ChangedShare | None = None
    """The share of answers that its codecs change, bounded on samples that chose nothing; None where nothing was
    promised."""
    compress: bool = False
    """The request's body is compressed with zstd."""
    device_s: float = 0.0
    encode_s: float = 0.0
    up_bytes: int = 0
    down_bytes: int = 0
    decode_s: float = 0.0
    remote_s: float = 0.0
    """Seconds on all tiers beyond the first link, including encoding and decoding for further links."""
    device_joules: float | None = None
    """Energy of the device's layers, without encoding, waiting and radio (see `energy_j`)."""
    further_links_s: float = 0.0
    """Planned seconds on further links; 0 with two tiers."""
    hops: tuple[Hop, ...] = ()
    """Further links that the row crosses, outwards. `remote` holds the slices of all tiers beyond the first link."""
    variant: str = ""
    """In a family's plan: name of the variant that the row is a cut of."""
    accuracy: float | None = None
    """Share of right answers of its variant among the family's labelled samples, 0 to 1 (see `Plan.agreement_with`);
    None outside of a family."""

    @property
    def is_local(self) -> bool:
        """True if the device computes the answer alone and nothing crosses the link."""
        return not self.remote


def gateway_part(row: Row) -> Row:
    """The part of a row with hops that the tier beyond the first link computes itself: from the tensors it receives to
    those it sends on, plus the outputs that are ready there."""
    # The tier runs the slices beyond the first link that do not go on beyond the next one. What it returns or forwards:
    # tensors that it sends on although it did not receive them (so it made them), and model outputs that do not come
    # back from further out.
    hop = row.hops[0]
    further = set(hop.remote)
    made_here = [tensor for tensor in hop.sends if tensor not in row.sends]
    ready = [output for output in row.receives if output not in hop.receives]
    return msgspec.structs.replace(
        row, remote=tuple(name for name in row.remote if name not in further),
        receives=tuple(dict.fromkeys((*made_here, *ready))), hops=(),
    )  # fmt: skip


def remote_half_beyond(row: Row) -> Row:
    """The remainder of a row with hops for the tiers beyond its next link, as a row of its own: the request from that
    link's lower end to its upper end."""
    # The next link becomes the first one: every slice before it counts as "on the device", and the costs of the hop
    # become those of the row.
    hop = row.hops[0]
    whole, _, link = row.name.partition(FURTHER_LINK_MARK)
    return Row(
        name=f"{whole}{FURTHER_LINK_MARK}{int(link or '0') + 1}", device=(*row.device, *gateway_part(row).remote),
        remote=hop.remote, sends=hop.sends, receives=hop.receives, codecs=hop.codecs, clips=hop.clips,
        compress=hop.compress, encode_s=hop.encode_s, up_bytes=hop.up_bytes, down_bytes=hop.down_bytes,
        decode_s=hop.decode_s, remote_s=hop.seconds, hops=row.hops[1:], variant=row.variant, accuracy=row.accuracy,
    )  # fmt: skip


class Power(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Power draw of the device, reduced to what the energy of a row needs."""

    idle_watts: float = 0.0
    """Power while the device waits for the link or for the remote half."""
    busy_watts: float = 0.0
    """Power while the device encodes."""
    radio_watts: float = 0.0
    """Power of the radio while bytes move, whatever their rate."""
    up_joules_per_byte: float = 0.0
    down_joules_per_byte: float = 0.0
    wake_joules: float = 0.0
    """Energy of the radio's promotion and tail, once per request that crosses the first link."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The switching table for one model on one device class.

    It always contains the row `local`, unless the fallback is `none`.
    """

    model: str
    device_class: str
    rows: tuple[Row, ...]
    link: Link
    """The link that the plan was computed for; the choice at run time uses the measured one."""
    fallback: Fallback = "warm"
    objective: str = "latency"
    limits: dict[str, str] = {}
    """The constraints in force, by name, as the operator gave them."""
    private_tensors: tuple[str, ...] = ()
    """Tensors that may not cross the link, whatever the table contains: the agent enforces this too."""
    required_local_layers: tuple[str, ...] = ()
    """Layers that run on the device in every row: the earliest cut that the privacy limits allow, closed under
    predecessors, in the model's order. Empty where there are no such limits."""
    slice_s: dict[str, float] = {}
    """Predicted seconds of each slice on this device class."""
    basis: str = "predicted"
    """Source of the device's times: `measured` or `predicted`."""
    offload: str = ""
    """Third-party server that runs the remote halves (`edgesplit.foreign_server`). Empty: the server that the device
    was enrolled with."""
    forced_row: str = ""
    """Row that the operator forces: it is used while it is usable. Empty: the row of least cost."""
    weights: dict[str, float] = {}
    """Weights of the cost function: per second of `latency`, per joule of device `energy`, per second of a stream's
    slowest stage (`throughput`). Empty: latency alone."""
    power: Power | None = None
    """The device's power draw; required where `weights` contains `energy`."""
    regret: float = 0.0
    """Upper bound on how much slower than the best cut the table is, as a ratio, at the planned link and within the
    server loads and device slow-downs of `factors`. At load 1 and slow-down 1 it is 0 at every bandwidth."""
    factors: dict[str, float] = {}
    """Largest sampled `server_load` and `device_slowdown`. Empty: none was sampled."""
    tiers: tuple[str, ...] = ()
    """Names of the tiers from the device outwards, where there are more than device and cloud."""
    providers: tuple[str, ...] = ()
    """Accelerators that devices of this class try first, in this order (`edgesplit.runtime.providers`)."""
    agreement_with: str = ""
    """Of a family whose samples have no labels: the variant that the others were compared with. `Row.accuracy` is then
    the share of answers that are its own, and no floor is held against it. Empty: an accuracy is one."""
    least_accuracy: float = 0.0
    """Of a family: no request is answered by a row of less accuracy; a request may ask for more."""
    deadline_s: float = 0.0
    """Of a family: seconds within which a request is to be answered, where it names no shorter deadline; 0: none."""
    cascade: Cascade | None = None
    """Of a family: one variant answers first, and another where it is unsure; None: the rows are chosen among."""

    def row(self, name: str) -> Row:
        """The row called `name`; `NAME~K` is its remote half beyond its K-th further link. KeyError if it does not
        exist."""
        whole, beyond, link = name.partition(FURTHER_LINK_MARK)
        matching_row = next((row for row in self.rows if row.name == whole), None)
        if matching_row is None or (beyond and link not in map(str, range(1, len(matching_row.hops) + 1))):
            raise KeyError(name)
        for _ in range(int(link or "0")):
            matching_row = remote_half_beyond(matching_row)
        return matching_row

    @property
    def has_gateway(self) -> bool:
        """True if there is a tier between device and cloud."""
        return len(self.tiers) > 2

    @property
    def local(self) -> Row | None:
        """The row that runs on the device alone, of several variants the most accurate one's; None where the plan has
        no fallback."""
        alone = (row for row in self.rows if row.is_local)
        return max(alone, key=lambda row: row.accuracy or 0.0, default=None)

    def required_layers(self, row: Row) -> tuple[str, ...]:
        """Those of `required_local_layers` that are layers of the row's variant; all, where the plan has no
        variants."""
        if not row.variant:
            return self.required_local_layers
        prefix = variant_name(row.variant, "")
        return tuple(layer for layer in self.required_local_layers if layer.startswith(prefix))


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """Run-time conditions as measured by the device."""

    link: Link
    server_load: float = 1.0
    """Factor on the remote seconds; 1 is an idle server."""
    device_slowdown: float = 1.0
    """Factor on the device's seconds; 1 is as planned."""
    remote_usable: bool = True
    """False while the circuit breaker is open: only the local row is usable."""
    further: Link | None = None
    """Recent measurement of the link beyond the first; None: as planned."""
    risk_s: dict[str, float] = {}
    """By row: expected seconds of device work per request that an offload target answering too late costs (fallback).
    It counts in the choice of a row but not in the prediction of one request's time."""


class Hysteresis(msgspec.Struct, frozen=True, kw_only=True):
    """How much better another row must be before the device switches to it."""

    ratio: float = 0.9
    """The other row's seconds must be less than this ratio of the current row's."""
    gain_s: float = 0.002
    """The other row must also be faster by more than this."""


def link_s(row: Row, link: Link) -> float:
    """Seconds on the first link: one round trip if anything crosses it, plus each byte at its direction's rate."""
    if row.is_local:
        return 0.0
    return link.rtt_s + _transfer_s(row, link)


def _transfer_s(row: Row, link: Link) -> float:
    """Seconds that the row's bytes take in both directions; 0 bytes take none, even over a dead link."""
    return row.up_bytes / (link.up_bytes_per_s or _DEAD_LINK_BYTES_PER_S) + row.down_bytes / (
        link.down_bytes_per_s or _DEAD_LINK_BYTES_PER_S
    )


def further_link(row: Row) -> Link | None:
    """The link beyond the first that the row was planned for; None where it crosses none."""
    if not row.hops:
        return None
    # The plan holds only sums: planned seconds on further links minus the seconds of the bytes are the round trips,
    # which are taken to be equal on all further links. Rates follow from planned bytes / planned seconds.
    hop = row.hops[0]
    round_trips_s = row.further_links_s - sum(later_hop.up_s + later_hop.down_s for later_hop in row.hops)
    return Link(
        up_bytes_per_s=hop.up_bytes / hop.up_s if hop.up_s > 0 else _UNLIMITED_BYTES_PER_S,
        down_bytes_per_s=hop.down_bytes / hop.down_s if hop.down_s > 0 else _UNLIMITED_BYTES_PER_S,
        rtt_s=max(0.0, round_trips_s / len(row.hops)),
    )


def _first_hop_transfer_s(row: Row, now: Conditions) -> tuple[float, float]:
    """Seconds that the bytes of a row's first hop take up and down the link beyond the first, by the measured rates if
    there are any."""
    hop = row.hops[0]
    if now.further is None:
        return hop.up_s, hop.down_s
    further = now.further
    up, down = (rate or _DEAD_LINK_BYTES_PER_S for rate in (further.up_bytes_per_s, further.down_bytes_per_s))
    return hop.up_bytes / up, hop.down_bytes / down


def further_links_s(row: Row, now: Conditions) -> float:
    """Seconds on the links beyond the first: as planned, except for the next of them where it was measured."""
    if now.further is None or (planned := further_link(row)) is None:
        return row.further_links_s
    hop = row.hops[0]
    others_s = row.further_links_s - planned.rtt_s - hop.up_s - hop.down_s
    return max(0.0, others_s) + now.further.rtt_s + sum(_first_hop_transfer_s(row, now))


def latency_s(row: Row, now: Conditions) -> float:
    """Predicted seconds from input to answer by this row in the current conditions (after Neurosurgeon, ASPLOS 2017,
    section 5)."""
    on_device_s = (row.device_s + row.encode_s) * now.device_slowdown
    remote_s = (row.decode_s + row.remote_s) * now.server_load
    return on_device_s + link_s(row, now.link) + further_links_s(row, now) + remote_s


def energy_j(row: Row, now: Conditions, power: Power) -> float:
    """Joules that the device spends on one inference by this row: its layers, encoding, idle waiting, and the radio.

    The radio model is that of Huang et al. (MobiSys 2012): a base power while bytes move, an energy per byte, promotion
    and tail.
    """
    busy_j = ((row.device_joules or 0.0) + power.busy_watts * row.encode_s) * now.device_slowdown
    if row.is_local:
        return busy_j
    remote_s = (row.decode_s + row.remote_s) * now.server_load
    waiting_j = power.idle_watts * (link_s(row, now.link) + further_links_s(row, now) + remote_s)
    bytes_j = row.up_bytes * power.up_joules_per_byte + row.down_bytes * power.down_joules_per_byte
    return busy_j + waiting_j + power.radio_watts * _transfer_s(row, now.link) + bytes_j + power.wake_joules


def marginal_energy_j(row: Row, now: Conditions, power: Power) -> float:
    """Joules of one inference in addition to the device's idle draw over the same time; never negative."""
    return max(0.0, energy_j(row, now, power) - power.idle_watts * latency_s(row, now))


def slowest_stage_s(row: Row, now: Conditions) -> float:
    """Seconds per inference of a stream by this row: those of its slowest stage, with all stages working in parallel.

    Round trips are in no stage: they delay the first answer and not the next.
    """
    return max(stages_s(row, now))


def stages_s(row: Row, now: Conditions) -> tuple[float, ...]:
    """Seconds per inference of each stage of a stream by this row; in steady state the slowest one sets the rate
    (pipelining).

    A tier's stage is running its layers, decoding what it receives and encoding what it sends on; each direction of a
    link is a stage of its own. Their order: the device; both directions of the first link; each further tier; both
    directions of each further link. A local row has the first alone.
    """
    device_s = (row.device_s + row.encode_s) * now.device_slowdown
    if row.is_local:
        return (device_s,)
    first_link = (
        row.up_bytes / (now.link.up_bytes_per_s or _DEAD_LINK_BYTES_PER_S),
        row.down_bytes / (now.link.down_bytes_per_s or _DEAD_LINK_BYTES_PER_S),
    )
    # `row.remote_s` covers all tiers beyond the first link; without the further ones it is that of the first tier
    # alone.
    further_s = sum(hop.encode_s + hop.decode_s + hop.seconds for hop in row.hops)
    tiers = [row.decode_s + row.remote_s - further_s, *(hop.decode_s + hop.seconds for hop in row.hops)]
    sending = [*(hop.encode_s for hop in row.hops), 0.0]
    beyond = [(compute_s + encode_s) * now.server_load for compute_s, encode_s in zip(tiers, sending, strict=True)]
    links = (
        [*_first_hop_transfer_s(row, now), *(s for hop in row.hops[1:] for s in (hop.up_s, hop.down_s))]
        if row.hops
        else []
    )
    return (device_s, *first_link, *beyond, *links)


def cost(row: Row, now: Conditions, weights: Mapping[str, float], power: Power | None = None) -> float:
    """The quantity that the plan minimises: seconds by default, otherwise the weighted sum of seconds and joules."""
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
        total += weights["throughput"] * slowest_stage_s(row, now)
    return total


def best_row(
    rows: Iterable[Row], now: Conditions, weights: Mapping[str, float] | None = None, power: Power | None = None
) -> Row | None:
    """The usable row of least cost, ties going to fewer bytes, then to the earlier row; None if no row is usable."""
    # The lower envelope of the rows' cost lines at the current conditions, evaluated by taking the minimum of all rows.
    usable = [row for row in rows if row.is_local or now.remote_usable]
    return min(usable, key=lambda row: (cost(row, now, weights or {}, power), row.up_bytes), default=None)


def choose_row(
    plan: Plan, now: Conditions, current: str | None = None, hysteresis: Hysteresis | None = None
) -> Row | None:
    """The row to use next, or None if no row is usable.

    `current` names the row in use: it is kept unless another is better by more than `hysteresis`. A condition that no
    measurement can give (not a number, negative) counts as planned; an infinite round trip or load counts as an
    unreachable remote.
    """
    now = _with_valid_conditions(plan, now)
    # 1. A row that the operator forces is used whenever it is usable.
    forced = best_row((row for row in plan.rows if row.name == plan.forced_row), now) if plan.forced_row else None
    if forced is not None:
        return forced
    # 2. The cheapest usable row, if no usable row is in use.
    winner = best_row(plan.rows, now, plan.weights, plan.power)
    if winner is None or current is None or winner.name == current:
        return winner
    current_row = next((row for row in plan.rows if row.name == current and (row.is_local or now.remote_usable)), None)
    if current_row is None:
        return winner
    # 3. Hysteresis: the winner must be better both by a ratio and by an absolute gain, or rows of almost equal cost
    # would alternate with every measurement. A current row of infinite cost is left in any case.
    margin = hysteresis or Hysteresis()
    current_cost, winner_cost = (cost(row, now, plan.weights, plan.power) for row in (current_row, winner))
    is_better = winner_cost < current_cost * margin.ratio and current_cost - winner_cost > _min_cost_gain(plan, margin)
    return winner if is_better or math.isinf(current_cost) else current_row


def _with_valid_conditions(plan: Plan, now: Conditions) -> Conditions:
    """The conditions, with the planned value in place of each impossible one."""
    link = now.link
    rates, rest = (link.up_bytes_per_s, link.down_bytes_per_s), (link.rtt_s, now.server_load, now.device_slowdown)
    # Comparisons with NaN are false, so NaN takes the replacement path below.
    if all(rate >= 0 for rate in rates) and all(0 <= value < math.inf for value in rest):
        return now
    up, down = (
        rate if rate >= 0 else usual
        for rate, usual in zip(rates, (plan.link.up_bytes_per_s, plan.link.down_bytes_per_s), strict=True)
    )
    rtt_s, load, slowdown = (
        value if 0 <= value < math.inf else usual
        for value, usual in zip(rest, (plan.link.rtt_s, 1.0, 1.0), strict=True)
    )
    return Conditions(
        link=msgspec.structs.replace(link, up_bytes_per_s=up, down_bytes_per_s=down, rtt_s=rtt_s), server_load=load,
        device_slowdown=slowdown,
        remote_usable=now.remote_usable and link.rtt_s != math.inf and now.server_load != math.inf,
        further=now.further, risk_s=now.risk_s,
    )  # fmt: skip


def _min_cost_gain(plan: Plan, margin: Hysteresis) -> float:
    """`gain_s` in the unit of the cost. Where only joules count, there is no absolute threshold: the ratio decides."""
    return margin.gain_s * plan.weights.get("latency", 0.0) if plan.weights else margin.gain_s


warm_up_structs(__name__)
