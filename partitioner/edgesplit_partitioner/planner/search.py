"""One planning question: what was asked, checked, and the searches that answer it.

`best` is one minimum cut per furthest tier and way of sending; `rows` is the lower envelope over the first link's
uplink bandwidth, searched only when asked for. `planner` turns them into a Plan, `beside_the_best` into a table for
people.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import msgspec
import numpy as np

from edgesplit import plan as words
from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit.limits import LIMITS
from edgesplit.plan import REMOTE, Conditions, Link, Power, Row
from edgesplit_partitioner.algorithms.lower_envelope import Line, explore, lower_envelope, thinned
from edgesplit_partitioner.algorithms.mincut import TIE, Ints, Mask
from edgesplit_partitioner.costs.model import CODECS, LOSSLESS, LOSSY, Costs
from edgesplit_partitioner.formulation.constraints import Limits
from edgesplit_partitioner.formulation.mincut_problem import Price, Problem, Solution
from edgesplit_partitioner.formulation.objectives import Objective, Scene, price
from edgesplit_partitioner.formulation.placement import allowed
from edgesplit_partitioner.formulation.radio_energy import Radio
from edgesplit_partitioner.formulation.tiers import P95, Chain, Links, chain_of
from edgesplit_partitioner.planner import constrained, sensitivity, tail_latency

What = TypeVar("What")


@dataclass(frozen=True)
class Search:
    """A question that was checked. Make it with `Search.of`."""

    problem: Problem
    chain: Chain
    objective: Objective
    limits: Limits
    codecs: tuple[str, ...]
    allowed: Mask
    """By tier and layer: may it run there, the forced cut included?"""
    unforced: Mask
    """The same without the forced cut."""
    power: Power

    @classmethod
    def of(
        cls,
        costs: Costs,
        links: Links,
        limits: Limits,
        codecs: Iterable[str] | None,
        objective: Objective | None = None,
    ) -> Search:
        """The question, or UsageError or InfeasibleLimits."""
        wanted = objective or Objective(latency=1.0)
        chain = chain_of(costs, links)
        if not costs.layers:
            raise UsageError("costs: there are no layers to plan")
        known = codecs_of(costs, codecs, limits)
        try:
            unforced = allowed(costs, limits, chain.tiers, force=False)
            both = allowed(costs, limits, chain.tiers) if limits.forced else unforced
        except InfeasibleLimits as error:
            if not limits.needs_search:
                raise
            raise constrained.conflict(costs, chain.tiers, chain.mean, known, limits, power_of(costs, chain)) from error
        problem = Problem.of(costs, chain.tiers, frozenset(known))
        counted = wanted.energy or limits.energy_joules is not None
        power = power_of(costs, chain) if counted else Power()
        if wanted.energy:
            _check_joules(problem, unforced)
        return cls(problem, chain, wanted, limits, known, both, unforced, power)

    @cached_property
    def scenes(self) -> tuple[Scene, ...]:
        """The states of the links whose weighted costs add up to the objective, where that can be said in advance."""
        found = []
        if self.objective.latency or self.objective.energy:
            found.append(Scene(self.chain.mean, latency=self.objective.latency, energy=self.objective.energy))
        if self.objective.latency_p95:
            found.append(Scene(self.chain.at(P95), latency=self.objective.latency_p95))
        return tuple(found)

    @property
    def by_program(self) -> bool:
        """A limit or the objective is beyond a minimum cut: `limited` solves it."""
        return self.limits.needs_search or bool(self.objective.throughput)

    @property
    def exact(self) -> bool:
        """The objective is the sum over the scenes; else it is a p95 over several links, which `risk` searches."""
        varying = self.chain.varying
        alone = not varying or (len(varying) == 1 and varying[0].moves_as_one)
        return not self.objective.latency_p95 or alone

    @property
    def links(self) -> tuple[Link, ...]:
        """The links that seconds are stated for: their means; where p95 alone counts and one link varies, its p95."""
        p95_alone = self.objective.latency_p95 and not self.objective.latency and not self.objective.energy
        return self.chain.at(P95) if p95_alone and self.exact else self.chain.mean

    @property
    def link(self) -> Link:
        """The first of them."""
        return self.links[0]

    def row(self, solution: Solution, name: str = "") -> Row:
        """A solution as a row, its further links at the planned rates."""
        return self._beyond(self.problem.row(solution, name), self.links)

    def figures(self, solution: Solution) -> Row:
        """The same without names."""
        return self._beyond(self.problem.figures(solution), self.links)

    def seconds(self, row: Row) -> float:
        """Latency on the planned links: the same arithmetic as on the device."""
        return words.latency_s(self._beyond(row, self.links), Conditions(link=self.link))

    def joules(self, row: Row) -> float | None:
        """Device energy on the planned links by the whole model where it is the objective, else of the layers alone."""
        if not self.objective.energy and self.limits.energy_joules is None:
            return row.device_joules
        return words.energy_j(self._beyond(row, self.links), Conditions(link=self.link), self.power)

    def value(self, row: Row) -> float:
        """The objective: seconds, joules, or their weighted sum."""
        if self.objective.throughput:
            return words.slowest_s(self._beyond(row, self.links), Conditions(link=self.link))
        if not self.exact:
            return tail_latency.value(self, row)
        return self.value_in(self.scenes, row)

    def value_in(self, scenes: Sequence[Scene], row: Row) -> float:
        """The sum of what a row costs in each scene."""
        costs = (scene_cost(self._beyond(row, scene.links), scene, self.power) for scene in scenes)
        return sum(costs, 0.0)

    @cached_property
    def best(self) -> Row:
        """The best cut on the planned links."""
        return self.row(self.solution)

    @cached_property
    def solution(self) -> Solution:
        """The same as an assignment; its bound is that of the whole question."""
        if self.by_program:
            return constrained.best(self)
        if not self.exact:
            return tail_latency.best(self)
        found = self.solutions(self.scenes)
        bound = min(one.lower_bound for one in found)
        best = self.least(found)
        return Solution(best.tier_of, best.compress, bound)

    @property
    def lower_bound(self) -> float:
        """No allowed cut is better."""
        return self.solution.lower_bound

    def solutions(
        self, scenes: Sequence[Scene], x: float | None = None, *, exact: bool = True, near: Iterable[Ints] = ()
    ) -> list[Solution]:
        """The least assignments, the best for each furthest tier among them; bounds count the round trips up to it.

        Solved for each tensor's cheapest way first: where that is the same way for all that crosses, no other way of
        sending can be better; else each way is solved. `near` are assignments that may be good, and speed it up.
        """
        prices = {one: price(self.problem, scenes, self.power, one, x) for one in self.problem.ways}
        wishes = {one: self.problem.bytes_sent(one) for one in self.problem.ways}
        near = tuple(near)
        found = []
        for reach in range(1, len(self.chain.tiers)):
            solved = self._cheapest_ways(prices, wishes, reach, near, exact)
            if solved is None:
                ties = {one: (wishes[one],) if exact else () for one in prices}
                solved = [
                    self.problem.solve(one, prices[one], self.allowed, reach, *ties[one], exact=exact, near=near)
                    for one in prices
                ]
            trips = float(next(iter(prices.values())).reached[reach])
            found += [replace(one, lower_bound=one.lower_bound + trips) for one in solved if one.lower_bound < math.inf]
        if self.allow(self.everything):
            local = Solution(self.everything, False, 0.0)
            found.append(replace(local, lower_bound=self.value_in(scenes, self.figures(local))))
        return found

    def _cheapest_ways(
        self,
        prices: Mapping[bool, Price],
        wishes: Mapping[bool, Price],
        reach: int,
        near: tuple[Ints, ...],
        exact: bool,
    ) -> list[Solution] | None:
        """The least assignment if every tensor may choose its way, where all that cross choose one; None where not."""
        if len(prices) == 1:
            return None
        plain, packed = prices[False].sending, prices[True].sending
        sending = np.minimum(plain, packed)
        sizes = {one: np.where(prices[one].sending == sending, wishes[one].sending, np.inf) for one in prices}
        fewest = np.minimum(sizes[False], sizes[True])
        least, wish = replace(prices[False], sending=sending), replace(wishes[False], sending=fewest)
        ties = (wish,) if exact else ()
        one = self.problem.solve(False, least, self.allowed, reach, *ties, exact=exact, near=near)
        if one.lower_bound == math.inf:
            return []
        crosses = np.array([self.problem.crossing(one.tier_of <= link)[0] for link in range(reach)])
        for way in prices:
            if (sizes[way][:reach][crosses] == fewest[:reach][crosses]).all():
                return [replace(one, compress=way)]
        return None

    def least(self, found: Sequence[Solution]) -> Solution:
        """The best of some; equals go to fewer bytes, then to more layers nearer the device."""
        values = [self.value(self.figures(one)) for one in found]
        least = min(values)
        equal = [one for one, value in zip(found, values, strict=True) if value <= least * (1 + 10 * TIE)]
        return min(equal, key=lambda one: (bytes_of(self.figures(one)), int(one.tier_of.sum())))

    def allow(self, tier_of: Ints, *, forced: bool = True) -> bool:
        """May every layer run where this puts it?"""
        may = self.allowed if forced else self.unforced
        return bool(may[tier_of, np.arange(len(tier_of))].all())

    @cached_property
    def pure(self) -> tuple[float | None, float | None]:
        """The value of all-local and of all on one further tier, None where a layer cannot run there."""
        runs = allowed(self.problem.costs, Limits(), self.chain.tiers)
        local = self._pure_value([0]) if runs[0].all() else None
        further = [tier for tier in range(1, len(runs)) if runs[tier].all()]
        return local, self._pure_value(further) if further else None

    @property
    def better_pure(self) -> float | None:
        """Value of the better pure mode of those that the limits allow; a forced cut is no limit."""
        further = [tier for tier in range(1, len(self.unforced)) if self.unforced[tier].all()]
        given = [0, *further] if self.unforced[0].all() else further
        return self._pure_value(given) if given else None

    def _pure_value(self, tiers: Iterable[int]) -> float:
        return min(self.value(self.figures(one)) for tier in tiers for one in self.all_on(tier))

    def all_on(self, tier: int) -> list[Solution]:
        """Every layer on one tier, by each way of sending."""
        ways = self.problem.ways if tier else (False,)
        return [Solution(self.everything + tier, compress, 0.0) for compress in ways]

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The table: every cut that is best at some uplink bandwidth without round trip, those that are best under
        sampled factors, the best one, and all-local.

        A forced cut stands alone, with all-local behind it as its fallback. A table that would outgrow a release
        loses the rows that are missed least.
        """
        if self.by_program:
            return _named(_unique(map(self.row, constrained.table(self))))
        kept = [self.line_of(self.solution)]
        if not self.limits.forced:
            kept = [*self._lines, *map(self.line_of, self.sampled.added)]
        local = Solution(self.everything, False, 0.0)
        if self.wants_local(kept) and self.allow(self.everything, forced=False):
            kept.append(self.line_of(local))
        if not self.limits.forced:
            kept.sort(key=lambda line: (line.what.reaches == 0, -line.b, line.a))
        return _named(_unique(self.row(line.what) for line in kept))

    def wants_local(self, kept: Iterable[Line[Solution]]) -> bool:
        """Does all-local belong beside these? As a fallback; or because one of them sends nothing up, so that it beats
        all-local without a round trip and may lose to it with one."""
        if self.limits.fallback != "none":
            return True
        return not self.limits.forced and any(line.what.reaches and not line.b for line in kept)

    @cached_property
    def sampled(self) -> sensitivity.Sampled:
        """What other server loads and device slow-downs ask for at the planned link."""
        room = max(LIMITS.rows - 1 - len(self._lines), 0)
        return sensitivity.sample(self, [line.what for line in self._lines], room)

    @cached_property
    def _lines(self) -> list[Line[Solution]]:
        """The best cut, and those of the envelope but for one that costs the same at every bandwidth."""
        mine = self.line_of(self.solution)
        return [mine, *(line for line in self._envelope if not _same_line(line, mine))]

    @cached_property
    def _envelope(self) -> list[Line[Solution]]:
        """What is best at some uplink bandwidth without round trip, as much of it as a release holds."""
        return thinned([one.line for one in lower_envelope(self._explored())], LIMITS.rows - 2)

    @cached_property
    def raw_tensors(self) -> tuple[str, ...]:
        """What `keep_raw_input` holds on the device, in the order of the costs."""
        return tuple(name for name in self.problem.tensors if name in self.problem.costs.raw)

    @cached_property
    def everything(self) -> Ints:
        """All layers on the device."""
        return np.zeros(len(self.problem.layers), dtype=np.intp)

    def line_of(self, solution: Solution) -> Line[Solution]:
        """Its value over x = 1/uplink bandwidth, at round trip 0 and the radio awake."""
        return self.line(self.figures(solution), solution, awake=True)

    def line(self, row: Row, what: What, *, awake: bool = False) -> Line[What]:
        """A row's value over x = 1/uplink bandwidth of the first link, the other rates as planned; `awake` leaves out
        the first link's round trip and waking the radio, which all rows but all-local pay.
        """
        power = msgspec.structs.replace(self.power, wake_joules=0.0) if awake else self.power
        fixed, slope = 0.0, 0.0
        for scene in self.scenes:
            first = scene.links[0]
            endless = Link(
                up_bytes_per_s=math.inf,
                down_bytes_per_s=first.down_bytes_per_s,
                rtt_s=0.0 if awake else first.rtt_s,
            )
            fixed += scene_cost(self._beyond(row, scene.links), scene.with_first(endless), power)
            slope += scene.latency + scene.energy * (power.idle_watts + power.radio_watts)
        return Line(fixed, row.up_bytes * slope, what)

    def _beyond(self, row: Row, links: Sequence[Link]) -> Row:
        """With its seconds on further links at their rates."""
        if not row.hops:
            return row
        hops = [
            msgspec.structs.replace(
                hop, up_s=hop.up_bytes / link.up_bytes_per_s, down_s=hop.down_bytes / link.down_bytes_per_s
            )
            for hop, link in zip(row.hops, links[1:], strict=False)
        ]
        took_s = sum((hop.up_s + hop.down_s + link.rtt_s for hop, link in zip(hops, links[1:], strict=False)), 0.0)
        return msgspec.structs.replace(row, hops=tuple(hops), beyond_s=took_s)

    def _explored(self) -> list[Line[Solution]]:
        """Every cut that is lowest at some x = 1/bandwidth."""
        steep = [self.line_of(one) for one in self.solutions(self.scenes, 0.0)]
        flat = [self.line_of(one) for one in self._fewest_bytes()]

        def lowest(x: float, *near: Line[Solution]) -> Line[Solution]:
            around = [line.what.tier_of for line in near]
            found = [self.line_of(one) for one in self.solutions(self.scenes, x, exact=False, near=around)]
            return min(found, key=lambda line: line.at(x))

        steepest, flattest = min(steep, key=lambda line: (line.a, line.b)), min(flat, key=lambda line: (line.b, line.a))
        return explore(lowest, steepest, flattest, LIMITS.rows)

    def _fewest_bytes(self) -> list[Solution]:
        """The assignments that send least up the first link; equals go to the best on an infinite uplink."""
        found = []
        for compress in self.problem.ways:
            least = self.problem.bytes_sent(compress, first_link_up=True)
            ties = price(self.problem, self.scenes, self.power, compress, 0.0)
            for reach in range(1, len(self.chain.tiers)):
                one = self.problem.solve(compress, least, self.allowed, reach, ties)
                if math.isfinite(one.lower_bound):
                    found.append(one)
        return found


def scene_cost(row: Row, scene: Scene, power: Power) -> float:
    """What a row costs in a scene, by the arithmetic of the device. Its further links must be the scene's."""
    now = Conditions(link=scene.links[0], server_load=scene.load, device_slowdown=scene.slowdown)
    spent = scene.latency * words.latency_s(row, now) if scene.latency else 0.0
    return spent + scene.energy * words.energy_j(row, now, power) if scene.energy else spent


def power_of(costs: Costs, chain: Chain) -> Power:
    """What the device draws: idle as the costs say, busy as its layers do on average, the radio as its link says."""
    device = chain.tiers[0]
    idle = costs.idle_watts.get(device, 0.0)
    known = [layer for layer in costs.layers if device in layer.joules and device in layer.seconds]
    seconds = sum(layer.seconds[device] for layer in known)
    busy = sum(layer.joules[device] for layer in known) / seconds if seconds else idle
    radio = chain.links[0].radio or Radio(up_mw_per_mbps=0.0, down_mw_per_mbps=0.0, base_mw=0.0)
    return radio.power(idle, busy)


def bytes_of(row: Row) -> int:
    """Bytes over all links, both directions."""
    return row.up_bytes + row.down_bytes + sum(hop.up_bytes + hop.down_bytes for hop in row.hops)


def key_of(row: Row) -> tuple[object, ...]:
    """What tells one cut from another: where its layers run, and how its tensors travel."""
    codecs = [tuple(sorted(row.codecs.items())), *(tuple(sorted(hop.codecs.items())) for hop in row.hops)]
    return row.layers, row.compress, tuple((hop.remote, hop.compress) for hop in row.hops), tuple(codecs)


def _check_joules(problem: Problem, may: Mask) -> None:
    unknown = np.flatnonzero(may[0] & np.isnan(problem.joules))
    if len(unknown):
        name, device = problem.layers[int(unknown[0])], problem.tiers[0]
        raise UsageError(f"objective energy: layer {name!r} has no joules on {device!r} in the costs")


def _same_line(one: Line[Solution], other: Line[Solution]) -> bool:
    return one.b == other.b and math.isclose(one.a, other.a, rel_tol=10 * TIE)


def _unique(rows: Iterable[Row]) -> list[Row]:
    """Each cut once per way of sending."""
    return list({key_of(row): row for row in rows}.values())


def _named(rows: list[Row]) -> tuple[Row, ...]:
    """`cut-1` is the most remote; a second all-remote row is the compressed one."""
    named: dict[str, Row] = {}
    cuts = 0
    for row in rows:
        name = row.name
        if name == REMOTE and REMOTE in named:
            packed = row.compress or any(hop.compress for hop in row.hops)
            name = "remote-zstd" if packed and "remote-zstd" not in named else ""
        if not name:
            cuts += 1
            name = f"cut-{cuts}"
        named[name] = msgspec.structs.replace(row, name=name)
    return tuple(named.values())


def codecs_of(costs: Costs, given: Iterable[str] | None, limits: Limits) -> tuple[str, ...]:
    """The codecs to plan with: by default all lossless ones, and where loss is allowed all that were measured."""
    if given is not None and not isinstance(given, Iterable):
        raise UsageError(f"codecs: give some of {', '.join(CODECS)}, not {given!r}")
    measured = (codec for tensor in costs.tensors for codec in tensor.codecs)
    known = tuple(dict.fromkeys((*CODECS, *measured))) if limits.max_loss else LOSSLESS
    wanted = tuple(dict.fromkeys(known if given is None else [given] if isinstance(given, str) else given))
    unknown = [codec for codec in wanted if codec not in known]
    if unknown or not wanted:
        lose = [codec for codec in unknown if codec in LOSSY or any(codec in one.codecs for one in costs.tensors)]
        why = f"; {', '.join(lose)} may lose accuracy and needs limits={{'max_loss': ...}} above 0" if lose else ""
        raise UsageError(f"codecs {unknown or 'none'} not supported; supported: {', '.join(known)}{why}")
    return wanted
