"""The reasons behind a plan as plain values; `edgesplit_cli.views.explain` formats them as sentences.

Pure, and derived from nothing but more plans of the same request: layers pinned where they are (what moving the cut
costs), one layer forbidden where it is (the next best cut), a limit left out (what it costs), other links and speeds
(where the choice changes). So every reason is as exact as the plan, for any number of tiers, objective and limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec

from edgesplit.cascade import ChangedShare
from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit.plan import Link
from edgesplit_partitioner.costs.model import Costs, LayerCost
from edgesplit_partitioner.formulation.constraints import Limits, parse_limits
from edgesplit_partitioner.formulation.tiers import Links, VaryingLink
from edgesplit_partitioner.planner.planner import PlanResult, plan

MAX_MOVED_LAYERS = 24
"""Layers at the cut that are tried elsewhere for the next best, at most: the cheapest to move."""
MAX_FACTOR = 1000.0
"""Factor up to which a link's rate, the server's load and the device's slow-down are varied."""
MAX_RTT_S = 10.0
"""Round trip up to which it is varied."""
MAX_STEPS = 100
"""Plans made to locate one change, at most."""
TOLERANCE = 1e-9
"""Values closer than this fraction are equal."""
NUDGE = 1e-6
"""Fraction of the remaining range by which a search steps past a point where two cuts cost the same."""

Subject = Literal["uplink", "round trip", "server load", "device slow-down"]


class CutSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A cut and what it costs."""

    cut: dict[str, int]
    """Number of layers by tier."""
    last: dict[str, str]
    """By tier that runs layers, except the furthest: the name of its last layer; the name of the cut for the device."""
    value: float
    """Of the objective."""
    seconds: float
    joules: float | None
    bytes: int
    split: dict[str, float]
    """`seconds` by phase: device, encode, link, decode, remote."""


class LayerMove(msgspec.Struct, frozen=True, kw_only=True):
    """The plan with one layer on another tier, all others where they are."""

    layer: str
    source: str
    target: str
    to: CutSummary
    more: float
    """The move's value minus the plan's."""
    split: dict[str, float]
    """By phase: the move's seconds minus the plan's."""
    allowed: bool
    """False where a limit forbids it."""


class LimitCost(msgspec.Struct, frozen=True, kw_only=True):
    """A limit, and the plan without it."""

    limit: str
    """As it was given."""
    without: CutSummary
    costs: float
    """By how much the plan's value would be lower without it; 0 where the limit changes nothing."""

    @property
    def binds(self) -> bool:
        """Whether the plan would be better without the limit."""
        return self.costs > 0


class CutChange(msgspec.Struct, frozen=True, kw_only=True):
    """The nearest condition at which another cut is best, all else as planned."""

    subject: Subject
    rises: bool
    """Whether the subject has to grow to get there."""
    at: float
    """Bytes per second, seconds, or a factor."""
    to: CutSummary


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """All reasons for a plan. Values are in the objective's unit."""

    model: str
    objective: str
    unit: str
    tiers: tuple[str, ...]
    best: CutSummary
    lower_bound: float
    gap: float
    all_local: float | None
    all_remote: float | None
    inward: tuple[LayerMove, ...]
    """One layer more towards the device, cheapest first."""
    outward: tuple[LayerMove, ...]
    """One layer more away from it, cheapest first."""
    next_best: CutSummary | None
    next_exact: bool
    """Whether no other cut is better than `next_best`; False where not every layer at the cut was tried."""
    limits: tuple[LimitCost, ...]
    changes: tuple[CutChange, ...]
    changed: ChangedShare | None = None
    """What is promised of the answers that the plan's codecs change."""


@dataclass(frozen=True)
class _Request:
    """The arguments of a plan and the plan itself, so that it can be made again with a difference."""

    costs: Costs
    links: Links
    limits: Limits
    objective: Any
    codecs: tuple[str, ...] | None
    made: PlanResult

    def again(
        self, *, costs: Costs | None = None, links: Links | None = None, limits: Limits | None = None
    ) -> PlanResult | None:
        """The plan with other costs, links or limits; None where no cut keeps the limits."""
        costs, links, limits = costs or self.costs, links or self.links, limits or self.limits
        try:
            return plan(costs, links, objective=self.objective, limits=limits, codecs=self.codecs)
        except InfeasibleLimits:
            return None


def explain(
    costs: Costs,
    links: Links,
    limits: Limits | Mapping[str, Any] | None = None,
    made: PlanResult | None = None,
    *,
    objective: str | Mapping[str, float] = "latency",
    codecs: Iterable[str] | None = None,
) -> Explanation:
    """The reasons for the plan `made`, which was made of the same arguments; it is made here where it is None."""
    parsed, allowed = parse_limits(limits), tuple(codecs) if codecs is not None else None
    made = made or plan(costs, links, objective=objective, limits=parsed, codecs=allowed)
    request = _Request(costs, links, parsed, objective, allowed, made)
    moves = sorted(_moves(request), key=lambda move: move.more)
    next_best, exact = (None, False) if parsed.forced else _next_best(request, moves)
    return Explanation(
        model=costs.model, objective=made.objective, unit=_unit_of(objective), tiers=made.tiers, best=_choice(made),
        **asdict(made.certificate),
        inward=tuple(move for move in moves if not _is_outward(made, move)),
        outward=tuple(move for move in moves if _is_outward(made, move)),
        next_best=next_best, next_exact=exact, limits=tuple(_limit_costs(request)), changes=tuple(_changes(request)),
        changed=made.row.changed,
    )  # fmt: skip


def _unit_of(objective: str | Mapping[str, float]) -> str:
    """Unit of the objective's values: `s`, `J`, or empty where both are weighed."""
    names = {objective} if isinstance(objective, str) else {name for name, weight in objective.items() if weight}
    if names == {"energy"}:
        return "J"
    return "" if "energy" in names or not isinstance(objective, str) else "s"


def _is_outward(made: PlanResult, move: LayerMove) -> bool:
    return made.tiers.index(move.target) > made.tiers.index(move.source)


def _choice(made: PlanResult) -> CutSummary:
    cut = {tier: made.cut.get(tier, ()) for tier in made.tiers}
    return CutSummary(
        cut={tier: len(layers) for tier, layers in cut.items()},
        last={
            tier: made.row.split_after if tier == made.tiers[0] else layers[-1]
            for tier, layers in list(cut.items())[:-1]
            if layers
        },
        value=made.value,
        seconds=made.seconds,
        joules=made.joules,
        bytes=made.bytes,
        split=dict(made.split),
    )


# ---- moving layers -----------------------------------------------------------------------------------------------


def _tier_of(made: PlanResult) -> dict[str, str]:
    return {layer: tier for tier, layers in made.cut.items() for layer in layers}


def pinned(costs: Costs, tier_of: Mapping[str, str]) -> Costs:
    """The costs with each layer allowed on its tier alone, by the layer's name."""
    layers = tuple(msgspec.structs.replace(layer, tiers=(tier_of[layer.name],)) for layer in costs.layers)
    return msgspec.structs.replace(costs, layers=layers)


def _moves(request: _Request) -> Iterator[LayerMove]:
    """Every layer that can go to the next tier, inwards or outwards, without any other."""
    best = request.made
    tier_of = _tier_of(best)
    # What a move costs is shown without the limits, and whether they allow it is tried apart. Loss stays limited: it
    # decides which codecs there are.
    limits = request.limits
    keeps_lossless = limits.max_loss is None and limits.max_changed is None
    free = Limits(
        max_loss=limits.max_loss, max_changed=limits.max_changed, fallback=limits.fallback if keeps_lossless else "warm"
    )
    for layer, target in movable(request.costs, best.tiers, tier_of):
        costs = pinned(request.costs, {**tier_of, layer: target})
        moved = request.again(costs=costs, limits=free)
        if moved is None:
            continue
        yield LayerMove(
            layer=layer,
            source=tier_of[layer],
            target=target,
            to=_choice(moved),
            more=moved.value - best.value,
            split={phase: took_s - best.split.get(phase, 0.0) for phase, took_s in moved.split.items()},
            allowed=request.again(costs=costs) is not None,
        )


def movable(costs: Costs, tiers: Iterable[str], tier_of: Mapping[str, str]) -> list[tuple[str, str]]:
    """Pairs of a layer and the nearest tier, each way, that it could run on with all others where they are.

    Nothing comes back towards the device inside: what a layer reads is made no further out than the layer runs.
    """
    ordered = list(tiers)
    number = {tier: place for place, tier in enumerate(ordered)}
    at = {layer.name: number[tier_of[layer.name]] for layer in costs.layers}
    made_at = {name: at[layer.name] for layer in costs.layers for name in layer.writes}
    read_at: dict[str, int] = {}
    for layer in costs.layers:
        for name in layer.reads:
            read_at[name] = min(read_at.get(name, len(ordered)), at[layer.name])
    moves: list[tuple[str, str]] = []
    for layer in costs.layers:
        here, runs_on = at[layer.name], _runs_on(layer)
        # No nearer than the furthest of what it reads, no further than the nearest of those that read it.
        lowest = max((made_at.get(name, 0) for name in layer.reads), default=0)
        highest = min((read_at.get(name, len(ordered)) for name in layer.writes), default=len(ordered))
        inward = range(here - 1, lowest - 1, -1)
        outward = range(here + 1, min(highest, len(ordered) - 1) + 1)
        for places in (inward, outward):
            target = next((ordered[place] for place in places if ordered[place] in runs_on), None)
            if target is not None:
                moves.append((layer.name, target))
    return moves


def _runs_on(layer: LayerCost) -> tuple[str, ...]:
    return layer.tiers or tuple(layer.seconds)


def _next_best(request: _Request, moves: list[LayerMove]) -> tuple[CutSummary | None, bool]:
    """The best of all other cuts, and whether that is certain.

    Any other cut moves a layer that could be moved alone (of those it moves outwards the last, else of those it moves
    inwards the first), so forbidding each of these its tier in turn finds it.
    """
    tier_of = _tier_of(request.made)
    alone = (layer for layer, _ in movable(request.costs, request.made.tiers, tier_of))
    layers = list(dict.fromkeys((*(move.layer for move in moves), *alone)))
    others = [
        request.again(costs=_forbidden(request.costs, layer, tier_of[layer])) for layer in layers[:MAX_MOVED_LAYERS]
    ]
    best = min((other for other in others if other is not None), key=lambda other: other.value, default=None)
    return (_choice(best) if best is not None else None), len(layers) <= MAX_MOVED_LAYERS


def _forbidden(costs: Costs, name: str, tier: str) -> Costs:
    """The costs with one layer not allowed on one tier."""
    layers = (
        msgspec.structs.replace(layer, tiers=tuple(other for other in _runs_on(layer) if other != tier))
        if layer.name == name
        else layer
        for layer in costs.layers
    )
    return msgspec.structs.replace(costs, layers=tuple(layers))


# ---- limits ------------------------------------------------------------------------------------------------------


def _limit_costs(request: _Request) -> Iterator[LimitCost]:
    """Each limit that was given, and what the plan would be without it."""
    limits, defaults = request.limits, Limits()
    given = limits.as_text()
    if limits.memory_bytes is not None:
        given.setdefault("fallback", limits.fallback)  # a warm one is counted by default
    for name, text in given.items():
        relaxed = "cold" if name == "fallback" else getattr(defaults, name)
        without = request.again(limits=msgspec.structs.replace(limits, **{name: relaxed}))
        if without is None:
            continue
        costs = request.made.value - without.value
        label = name if getattr(limits, name) is True else f"{name}={text}"
        matters = costs > TOLERANCE * abs(request.made.value)
        yield LimitCost(limit=label, without=_choice(without), costs=costs if matters else 0.0)


# ---- other conditions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Condition:
    """One condition that is varied from its planned position until another cut is best."""

    subject: Subject
    start: float
    end: float
    at: Callable[[float], dict[str, Any]]
    """The request's difference at a position. Every cut's value is linear in the position."""
    figure: Callable[[float], float]
    """The condition's own unit at a position."""


def _changes(request: _Request) -> Iterator[CutChange]:
    """The nearest change each way. Not for throughput, which is no sum: its slowest stage jumps."""
    weights = request.objective if isinstance(request.objective, Mapping) else {request.objective: 1.0}
    if weights.get("throughput") or request.limits.forced:
        return
    for condition in _conditions(request):
        change = _first_change(request, condition)
        if change is not None:
            position, other = change
            yield CutChange(
                subject=condition.subject,
                rises=condition.figure(condition.end) > condition.figure(condition.start),
                at=condition.figure(position),
                to=_choice(_pinned_at(request, condition, position, other) or other),
            )


def _pinned_at(request: _Request, condition: _Condition, position: float, made: PlanResult) -> PlanResult | None:
    """The cut of `made` at a position of the condition, with what it costs there; None where a limit forbids it."""
    difference = condition.at(position)
    costs = pinned(difference.get("costs") or request.costs, _tier_of(made))
    return request.again(**{**difference, "costs": costs})


def _first_change(request: _Request, condition: _Condition) -> tuple[float, PlanResult] | None:
    """Where the plan's cut stops being best on the way from `start` to `end`, and what is best there.

    Each cut's value is a line over the position (of a cut that can use several codecs: the lowest of some lines), and
    the best value their lower envelope. So going back from the far end to where its best cut meets the plan's, again
    and again, ends at the nearest corner.
    """
    tier_of = _tier_of(request.made)

    def best(position: float) -> PlanResult | None:
        return request.again(**condition.at(position))

    def value(made: PlanResult, position: float) -> float:
        there = _pinned_at(request, condition, position, made)
        return there.value if there is not None else float("inf")

    def own(position: float) -> float:
        return value(request.made, position)

    near, far, other = condition.start, condition.end, best(condition.end)
    if other is None or _tier_of(other) == tier_of or not own(far) > other.value * (1 + TOLERANCE):
        return None
    fell_short = False
    for _ in range(MAX_STEPS):
        # How far the two cuts are apart at both ends gives the position at which their lines meet.
        over_near, over_far = value(other, near) - own(near), own(far) - value(other, far)
        if not (0 <= over_near < float("inf") and over_far > 0):
            return None
        fraction = 0.5 if fell_short else over_near / (over_near + over_far)
        crossing, fell_short = near + (far - near) * fraction, False
        nearer, mine = best(crossing), own(crossing)
        if nearer is None:
            return None
        if mine > nearer.value * (1 + TOLERANCE):
            far, other = crossing, nearer  # a third cut is better where they meet: the change is before it
        elif value(other, crossing) <= mine * (1 + 10 * TOLERANCE):
            past = crossing + (far - crossing) * NUDGE
            ahead = best(past)
            if ahead is None or own(past) > ahead.value * (1 + TOLERANCE):
                return crossing, other
            near, fell_short = past, True  # they only touch here
        else:
            near, fell_short = crossing, True  # a bent line between them: halve, so that both ends come nearer
    return far, other


def _conditions(request: _Request) -> Iterator[_Condition]:
    """The uplink rate and round trip of the first link both ways, more load on the servers, a slower device."""
    name, figures = first_link(request.links, request.made.tiers)
    up = figures["up_bytes_per_s"]
    rate = up if isinstance(up, int | float) else None
    if rate is not None:
        # The position is 1/rate in units of the planned one: cuts are linear in seconds per byte, not in the rate.
        for end in (MAX_FACTOR, 1 / MAX_FACTOR):

            def slower(factor: float) -> dict[str, Any]:
                assert rate is not None
                return {"links": {**request.links, name: {**figures, "up_bytes_per_s": rate / factor}}}

            yield _Condition("uplink", 1.0, end, slower, lambda factor: rate / factor if rate is not None else 0.0)

    def trip(seconds: float) -> dict[str, Any]:
        return {"links": {**request.links, name: {**figures, "rtt_s": seconds}}}

    for end in (MAX_RTT_S, 0.0):
        yield _Condition("round trip", figures["rtt_s"], end, trip, lambda seconds: seconds)
    device, *beyond = request.made.tiers
    loads: tuple[tuple[Subject, tuple[str, ...]], ...] = (
        ("server load", tuple(beyond)),
        ("device slow-down", (device,)),
    )
    for subject, tiers in loads:

        def busier(factor: float, tiers: tuple[str, ...] = tiers) -> dict[str, Any]:
            return {"costs": slowed(request.costs, tiers, factor)}

        yield _Condition(subject, 1.0, MAX_FACTOR, busier, lambda factor: factor)


def first_link(links: Links, tiers: Iterable[str]) -> tuple[str, dict[str, Any]]:
    """Name and figures of the link that leaves the device; UsageError where there is none."""
    device = next(iter(tiers))
    for name, given in links.items():
        if name.startswith(f"{device}-"):
            return name, msgspec.to_builtins(given) if isinstance(given, Link | VaryingLink) else dict(given)
    raise UsageError(f"no link leaves {device!r}")


def slowed(costs: Costs, tiers: Iterable[str], factor: float) -> Costs:
    """The costs where everything on these tiers takes `factor` times as long and as much energy."""
    slow = set(tiers)

    def times(by_tier: Mapping[str, float]) -> dict[str, float]:
        return {tier: value * factor if tier in slow else value for tier, value in by_tier.items()}

    slower = costs.with_tensors(lambda _, tensor: tensor.with_codec_seconds(times))
    layers = tuple(
        msgspec.structs.replace(layer, seconds=times(layer.seconds), joules=times(layer.joules))
        for layer in slower.layers
    )
    return msgspec.structs.replace(slower, layers=layers)
