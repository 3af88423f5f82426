"""Why this cut? The reasons behind a plan as plain values; `edgesplit_cli.views.explain` makes sentences of them.

Pure, and made of nothing but more plans of the same question: layers held where they are (what moving the cut costs),
one layer sent elsewhere (the next best), a limit left out (what it costs), other links and speeds (where the choice
changes). So every reason is as exact as the plan, for any number of tiers, objective and limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit.plan import Link
from edgesplit_partitioner.costs.model import CodecCost, Costs, LayerCost, TensorCost
from edgesplit_partitioner.formulation.constraints import Limits, as_limits
from edgesplit_partitioner.formulation.tiers import Links, VaryingLink
from edgesplit_partitioner.planner.planner import Plan, plan

MOST_MOVED = 24
"""Layers at the cut that are tried elsewhere, at most: the cheapest to move."""
FURTHEST = 1000.0
"""How far a link's rate, the server's load and the device's speed are followed."""
FURTHEST_RTT_S = 10.0
STEPS = 100
CLOSE = 1e-9
NUDGE = 1e-6
"""Of the way that is left: so far is looked past a point where two cuts cost the same."""

Subject = Literal["uplink", "round trip", "server load", "device slow-down"]


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A cut and what it costs."""

    cut: dict[str, int]
    """Layers by tier."""
    last: dict[str, str]
    """The last layer on each tier that has some, but for the furthest."""
    value: float
    """What the plan wants least of."""
    seconds: float
    joules: float | None
    bytes: int
    split: dict[str, float]
    """`seconds` by where they go."""


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One layer elsewhere, all others where they are."""

    layer: str
    source: str
    target: str
    to: Choice
    more: float
    """Value above the plan's."""
    split: dict[str, float]
    """By where seconds go: how many more."""
    allowed: bool
    """False where a limit forbids it."""


class Bind(msgspec.Struct, frozen=True, kw_only=True):
    """A limit, and the plan without it."""

    limit: str
    """As it was given."""
    without: Choice
    costs: float
    """Value that the plan would be better by; 0 where the limit changes nothing."""

    @property
    def binds(self) -> bool:
        """The plan would be another."""
        return self.costs > 0


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """The nearest condition at which another cut is best, all else as planned."""

    subject: Subject
    rises: bool
    """It is met as the subject grows."""
    at: float
    """Bytes per second, seconds, or a factor."""
    to: Choice


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """All reasons. Values are in the objective's unit."""

    model: str
    objective: str
    unit: str
    tiers: tuple[str, ...]
    best: Choice
    lower_bound: float
    gap: float
    all_local: float | None
    all_remote: float | None
    inward: tuple[Move, ...]
    """One layer more towards the device, cheapest first."""
    outward: tuple[Move, ...]
    """One layer more away from it, cheapest first."""
    next_best: Choice | None
    next_exact: bool
    """No other cut is better; False where not every layer at the cut was tried."""
    limits: tuple[Bind, ...]
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class _Question:
    """What was asked, so that it can be asked again with a difference."""

    costs: Costs
    links: Links
    limits: Limits
    objective: Any
    codecs: tuple[str, ...] | None
    found: Plan

    def again(self, *, costs: Costs | None = None, links: Links | None = None, limits: Limits | None = None) -> Plan:
        return plan(
            costs or self.costs,
            self.links if links is None else links,
            objective=self.objective,
            limits=limits or self.limits,
            codecs=self.codecs,
        )

    def maybe(self, **difference: Any) -> Plan | None:
        """None where no cut keeps the limits."""
        try:
            return self.again(**difference)
        except InfeasibleLimits:
            return None


def explain(
    costs: Costs,
    links: Links,
    limits: Limits | Mapping[str, Any] | None = None,
    made: Plan | None = None,
    *,
    objective: str | Mapping[str, float] = "latency",
    codecs: Iterable[str] | None = None,
) -> Explanation:
    """The reasons for the plan `made`, which was made of the same arguments (it is made here where it is not given)."""
    asked, allowed = as_limits(limits), tuple(codecs) if codecs is not None else None
    found = made or plan(costs, links, objective=objective, limits=asked, codecs=allowed)
    question = _Question(costs, links, asked, objective, allowed, found)
    moves = sorted(_moves(question), key=lambda move: move.more)
    next_best, exact = (None, False) if asked.forced else _next_best(question, moves)
    outward = {move.layer for move in moves if _outward(found, move)}
    return Explanation(
        model=costs.model,
        objective=found.objective,
        unit=unit_of(objective),
        tiers=tuple(found.tiers),
        best=_choice(found),
        lower_bound=found.certificate.lower_bound,
        gap=found.certificate.gap,
        all_local=found.certificate.all_local,
        all_remote=found.certificate.all_remote,
        inward=tuple(move for move in moves if not _outward(found, move)),
        outward=tuple(move for move in moves if move.layer in outward and _outward(found, move)),
        next_best=next_best,
        next_exact=exact,
        limits=tuple(_binds(question)),
        changes=tuple(_changes(question)),
    )


def unit_of(objective: str | Mapping[str, float]) -> str:
    """Of the objective's values: seconds, joules, or none where both are weighed."""
    names = {objective} if isinstance(objective, str) else {name for name, weight in objective.items() if weight}
    if names == {"energy"}:
        return "J"
    return "" if "energy" in names or not isinstance(objective, str) else "s"


def _outward(found: Plan, move: Move) -> bool:
    return found.tiers.index(move.target) > found.tiers.index(move.source)


def _choice(made: Plan) -> Choice:
    cut = {tier: made.cut.get(tier, ()) for tier in made.tiers}
    return Choice(
        cut={tier: len(layers) for tier, layers in cut.items()},
        last={tier: layers[-1] for tier, layers in list(cut.items())[:-1] if layers},
        value=value_of(made),
        seconds=made.seconds,
        joules=made.joules,
        bytes=made.bytes,
        split=dict(made.split),
    )


def value_of(made: Plan) -> float:
    """What the plan is least in."""
    return made.value


# ---- moving layers -----------------------------------------------------------------------------------------------


def _tier_of(made: Plan) -> dict[str, str]:
    return {layer: tier for tier, layers in made.cut.items() for layer in layers}


def held(costs: Costs, tier_of: Mapping[str, str]) -> Costs:
    """The same costs, each layer held on its tier."""
    layers = tuple(msgspec.structs.replace(layer, tiers=(tier_of[layer.name],)) for layer in costs.layers)
    return msgspec.structs.replace(costs, layers=layers)


def _moves(question: _Question) -> Iterator[Move]:
    """Every layer that can go to the next tier, inwards or outwards, without any other."""
    tier_of = _tier_of(question.found)
    kept = question.limits.max_loss
    free = Limits(fallback=question.limits.fallback) if kept is None else Limits(max_loss=kept)
    best = question.found
    for layer, target in movable(question.costs, question.found.tiers, tier_of):
        pinned = held(question.costs, {**tier_of, layer: target})
        made = question.maybe(costs=pinned, limits=free)
        if made is None:
            continue
        yield Move(
            layer=layer,
            source=tier_of[layer],
            target=target,
            to=_choice(made),
            more=value_of(made) - value_of(best),
            split={name: took - best.split.get(name, 0.0) for name, took in made.split.items()},
            allowed=question.maybe(costs=pinned) is not None,
        )


def movable(costs: Costs, tiers: Iterable[str], tier_of: Mapping[str, str]) -> list[tuple[str, str]]:
    """Layers with the nearest tier each way that they could run on, all others staying where they are.

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
    found = []
    for layer in costs.layers:
        here = at[layer.name]
        lowest = max((made_at.get(name, 0) for name in layer.reads), default=0)
        highest = min((read_at.get(name, len(ordered)) for name in layer.writes), default=len(ordered))
        inward = (there for there in range(here - 1, lowest - 1, -1) if ordered[there] in _may_run(layer))
        outward = (
            there for there in range(here + 1, min(highest, len(ordered) - 1) + 1) if ordered[there] in _may_run(layer)
        )
        found += [
            (layer.name, ordered[there]) for there in (next(inward, None), next(outward, None)) if there is not None
        ]
    return found


def _may_run(layer: LayerCost) -> tuple[str, ...]:
    return layer.tiers or tuple(layer.seconds)


def _next_best(question: _Question, moves: list[Move]) -> tuple[Choice | None, bool]:
    """The best of all other cuts. Any other cut moves a layer that could be moved alone (of those it moves outwards the
    last, else of those it moves inwards the first), so sending each of these away in turn finds it.
    """
    tier_of = _tier_of(question.found)
    alone = (layer for layer, _ in movable(question.costs, question.found.tiers, tier_of))
    layers = list(dict.fromkeys((*(move.layer for move in moves), *alone)))
    found = []
    for layer in layers[:MOST_MOVED]:
        made = question.maybe(costs=_sent_away(question.costs, layer, tier_of[layer]))
        if made is not None:
            found.append(made)
    best = min(found, key=value_of, default=None)
    return (_choice(best) if best is not None else None), len(layers) <= MOST_MOVED


def _sent_away(costs: Costs, name: str, tier: str) -> Costs:
    """The same costs, one layer not allowed where it is."""
    layers = (
        msgspec.structs.replace(layer, tiers=tuple(one for one in _may_run(layer) if one != tier))
        if layer.name == name
        else layer
        for layer in costs.layers
    )
    return msgspec.structs.replace(costs, layers=tuple(layers))


# ---- limits ------------------------------------------------------------------------------------------------------


def _binds(question: _Question) -> Iterator[Bind]:
    """Each limit that was given, and what the plan would be without it."""
    nothing = Limits()
    given_limits = question.limits.as_text()
    if question.limits.memory_bytes is not None:
        given_limits.setdefault("fallback", question.limits.fallback)  # a warm one is counted by default
    for name, text in given_limits.items():
        given = getattr(question.limits, name)
        easier = msgspec.structs.replace(
            question.limits, **{name: "cold" if name == "fallback" else getattr(nothing, name)}
        )
        without = question.maybe(limits=easier)
        if without is None:
            continue
        costs = value_of(question.found) - value_of(without)
        label = name if given is True else f"{name}={text}"
        noticed = costs > CLOSE * abs(value_of(question.found))
        yield Bind(limit=label, without=_choice(without), costs=costs if noticed else 0.0)


# ---- other conditions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Knob:
    """One condition that is turned away from where it stands until another cut is best."""

    subject: Subject
    start: float
    far: float
    turned: Callable[[float], dict[str, Any]]
    """The question's difference at a position. The value is linear in the position for every cut."""
    shown: Callable[[float], float]


def _changes(question: _Question) -> Iterator[Change]:
    """The nearest change each way. Not for throughput, which is no sum: its slowest stage jumps."""
    weights = question.objective if isinstance(question.objective, Mapping) else {question.objective: 1.0}
    if weights.get("throughput") or question.limits.forced:
        return
    for knob in _knobs(question):
        turned = _first_change(question, knob)
        if turned is not None:
            position, made = turned
            at = knob.shown(position)
            made = _there(question, knob, position, made)
            yield Change(
                subject=knob.subject, rises=knob.shown(knob.far) > knob.shown(knob.start), at=at, to=_choice(made)
            )


def _first_change(question: _Question, knob: _Knob) -> tuple[float, Plan] | None:
    """Where the cut of the plan stops being best on the way from `start` to `far`, and what is best there.

    Each cut's value is a line over the position (of a cut with several ways to travel: the lowest of some lines), and
    the best value their lower envelope. So going back from the far end to where its best cut meets ours, again and
    again, ends at the nearest corner.
    """
    tier_of = _tier_of(question.found)

    def best(position: float) -> Plan | None:
        return question.maybe(**knob.turned(position))

    def own(position: float) -> float:
        difference = knob.turned(position)
        pinned = held(difference.get("costs") or question.costs, tier_of)
        made = question.maybe(**{**difference, "costs": pinned})
        return value_of(made) if made is not None else float("inf")

    def other(made: Plan, position: float) -> float:
        difference = knob.turned(position)
        pinned = held(difference.get("costs") or question.costs, _tier_of(made))
        again = question.maybe(**{**difference, "costs": pinned})
        return value_of(again) if again is not None else float("inf")

    near, far, found = knob.start, knob.far, best(knob.far)
    if found is None or _tier_of(found) == tier_of or not own(far) > value_of(found) * (1 + CLOSE):
        return None
    fell_short = False
    for _ in range(STEPS):
        over_near, over_far = other(found, near) - own(near), own(far) - other(found, far)
        if not (0 <= over_near < float("inf") and over_far > 0):
            return None
        part = 0.5 if fell_short else over_near / (over_near + over_far)
        crossing, fell_short = near + (far - near) * part, False
        nearer, mine = best(crossing), own(crossing)
        if nearer is None:
            return None
        if mine > value_of(nearer) * (1 + CLOSE):
            far, found = crossing, nearer
        elif other(found, crossing) <= mine * (1 + 10 * CLOSE):
            past = crossing + (far - crossing) * NUDGE
            ahead = best(past)
            if ahead is None or own(past) > value_of(ahead) * (1 + CLOSE):
                return crossing, found
            near, fell_short = past, True  # they only touch here
        else:
            near, fell_short = crossing, True  # a bent line between them: halve, so that both ends come nearer
    return far, found


def _there(question: _Question, knob: _Knob, position: float, made: Plan) -> Plan:
    """The cut of `made` at a position, with what it costs there."""
    difference = knob.turned(position)
    pinned = held(difference.get("costs") or question.costs, _tier_of(made))
    return question.maybe(**{**difference, "costs": pinned}) or made


def _knobs(question: _Question) -> Iterator[_Knob]:
    name, plain = first_link(question.links, question.found.tiers)
    up = plain["up_bytes_per_s"]
    rate = up if isinstance(up, int | float) else None
    if rate is not None:
        for far in (FURTHEST, 1 / FURTHEST):

            def slower(times: float) -> dict[str, Any]:
                assert rate is not None
                return {"links": {**question.links, name: {**plain, "up_bytes_per_s": rate / times}}}

            yield _Knob("uplink", 1.0, far, slower, lambda times: rate / times if rate is not None else 0.0)

    def trip(seconds: float) -> dict[str, Any]:
        return {"links": {**question.links, name: {**plain, "rtt_s": seconds}}}

    for far in (FURTHEST_RTT_S, 0.0):
        yield _Knob("round trip", plain["rtt_s"], far, trip, lambda seconds: seconds)
    device, *beyond = question.found.tiers
    for subject, tiers in (("server load", tuple(beyond)), ("device slow-down", (device,))):

        def busier(factor: float, tiers: tuple[str, ...] = tiers) -> dict[str, Any]:
            return {"costs": slowed(question.costs, tiers, factor)}

        yield _Knob(subject, 1.0, FURTHEST, busier, lambda factor: factor)  # type: ignore[arg-type]


def first_link(links: Links, tiers: Iterable[str]) -> tuple[str, dict[str, Any]]:
    """The link that leaves the device, its name and its figures."""
    device = next(iter(tiers))
    for name, given in links.items():
        if name.startswith(f"{device}-"):
            plain = msgspec.to_builtins(given) if isinstance(given, Link | VaryingLink) else dict(given)
            return name, plain
    raise UsageError(f"no link leaves {device!r}")


def slowed(costs: Costs, tiers: Iterable[str], factor: float) -> Costs:
    """The same costs where everything on these tiers takes so many times as long, and draws power for it."""
    slow = set(tiers)

    def times(by_tier: Mapping[str, float]) -> dict[str, float]:
        return {tier: value * factor if tier in slow else value for tier, value in by_tier.items()}

    def codec(cost: CodecCost) -> CodecCost:
        return msgspec.structs.replace(cost, encode_s=times(cost.encode_s), decode_s=times(cost.decode_s))

    def tensor(cost: TensorCost) -> TensorCost:
        return msgspec.structs.replace(cost, codecs={name: codec(one) for name, one in cost.codecs.items()})

    layers = tuple(
        msgspec.structs.replace(
            layer,
            seconds=times(layer.seconds),
            joules=times(layer.joules),
            writes={name: tensor(one) for name, one in layer.writes.items()},
        )
        for layer in costs.layers
    )
    inputs = {name: tensor(one) for name, one in costs.inputs.items()}
    return msgspec.structs.replace(costs, layers=layers, inputs=inputs)
