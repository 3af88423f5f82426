"""One planning request, checked, and the searches that answer it.

`solution` is the best cut: one minimum cut per furthest tier and kind of request. `rows` is the switching table: the
lower envelope over the first link's uplink bandwidth, searched only when it is read. `planner` makes a plan of them,
`alternatives` a list of cuts for people.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from edgesplit import plan as plan_table
from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit.limits import LIMITS
from edgesplit.plan import REMOTE, Conditions, Link, Power, Row
from edgesplit_partitioner.algorithms.lower_envelope import Line, explore, lower_envelope, thinned
from edgesplit_partitioner.arrays import TIE, Ints, Mask
from edgesplit_partitioner.costs.model import CODECS, LOSSLESS, LOSSY, RAW, Costs
from edgesplit_partitioner.formulation.constraints import Limits
from edgesplit_partitioner.formulation.cost_model import CostModel
from edgesplit_partitioner.formulation.cost_terms import LinkScenario, Memory, memory_of
from edgesplit_partitioner.formulation.mincut_problem import ArcPrices, MinCutProblem, arc_prices, byte_prices
from edgesplit_partitioner.formulation.objectives import Objective
from edgesplit_partitioner.formulation.placement import allowed_tiers
from edgesplit_partitioner.formulation.radio_energy import Radio
from edgesplit_partitioner.formulation.solution import Solution, cost_row, to_row
from edgesplit_partitioner.formulation.tiers import P95, Links, TierChain, parse_links
from edgesplit_partitioner.planner import constrained, sensitivity, tail_latency

if TYPE_CHECKING:
    from edgesplit_partitioner.milp.solve import MilpProblem

Item = TypeVar("Item")


@dataclass(frozen=True)
class PlanSearch:
    """A planning request that was checked. Made by `PlanSearch.of`."""

    model: CostModel
    chain: TierChain
    objective: Objective
    limits: Limits
    codecs: tuple[str, ...]
    allowed: Mask
    """By tier and layer: whether it may run there, a forced cut included."""
    allowed_unforced: Mask
    """By tier and layer: whether it may run there, a forced cut left out."""
    power: Power
    most_rows: int = LIMITS.rows
    """The table has at most so many rows."""

    @classmethod
    def of(
        cls,
        costs: Costs,
        links: Links,
        limits: Limits,
        codecs: Iterable[str] | None,
        objective: Objective | None = None,
        *,
        power: Power | None = None,
        most_rows: int = LIMITS.rows,
    ) -> PlanSearch:
        """The request, or UsageError or InfeasibleLimits. `power` replaces what the device draws by the costs."""
        objective = objective or Objective(latency=1.0)
        chain = parse_links(costs, links)
        if not costs.layers:
            raise UsageError("costs: there are no layers to plan")
        known = supported_codecs(costs, codecs, limits)
        model = CostModel(costs, chain.tiers, frozenset(known))
        try:
            unforced = allowed_tiers(costs, limits, chain.tiers, force=False)
            allowed = allowed_tiers(costs, limits, chain.tiers) if limits.forced else unforced
        except InfeasibleLimits as error:
            if not limits.needs_search:
                raise
            # Limits on sums may conflict with the others too: only the MILP finds the whole conflict.
            latency = {"latency": 1.0}
            problem = constrained.milp_problem(model, chain, latency, limits, power_of(costs, chain), chain.mean)
            raise problem.conflict() from error
        counts_energy = objective.energy or limits.energy_joules is not None
        drawn = (power or power_of(costs, chain)) if counts_energy else Power()
        if objective.energy:
            _check_joules(model, unforced)
        return cls(model, chain, objective, limits, known, allowed, unforced, drawn, most_rows)

    # ---- how it is solved --------------------------------------------------------------------------------------------

    @cached_property
    def scenarios(self) -> tuple[LinkScenario, ...]:
        """The states of the links whose weighted costs add up to the objective, for all objectives but throughput.

        The p95, if it counts, is the last one. It is exact where at most one link varies (`is_exact`).
        """
        scenarios = []
        if self.objective.latency or self.objective.energy:
            mean = LinkScenario(self.chain.mean, latency=self.objective.latency, energy=self.objective.energy)
            scenarios.append(mean)
        if self.objective.latency_p95:
            scenarios.append(LinkScenario(self.chain.at(P95), latency=self.objective.latency_p95))
        return tuple(scenarios)

    @property
    def needs_milp(self) -> bool:
        """Whether a limit or the objective is beyond a minimum cut."""
        return self.limits.needs_search or bool(self.objective.throughput)

    @property
    def is_exact(self) -> bool:
        """Whether the objective is the sum over the scenarios; else it is a p95 over several links (`tail_latency`)."""
        varying = self.chain.varying
        alone = not varying or (len(varying) == 1 and varying[0].moves_as_one)
        return not self.objective.latency_p95 or alone

    @cached_property
    def _mincut(self) -> MinCutProblem:
        return MinCutProblem(self.model)

    @cached_property
    def _milp(self) -> MilpProblem:
        if not self.is_exact:
            raise UsageError(
                "latency_p95 over several varying links cannot be planned under such limits: fix all but one"
            )
        weights = self.objective.weights
        return constrained.milp_problem(self.model, self.chain, weights, self.limits, self.power, self.links)

    # ---- what a row costs --------------------------------------------------------------------------------------------

    @property
    def links(self) -> tuple[Link, ...]:
        """The links that seconds are stated for: their means; where p95 alone counts and one link varies, its p95."""
        p95_alone = self.objective.latency_p95 and not self.objective.latency and not self.objective.energy
        return self.chain.at(P95) if p95_alone and self.is_exact else self.chain.mean

    @property
    def link(self) -> Link:
        """The first of the planned links, the device's."""
        return self.links[0]

    def row(self, solution: Solution) -> Row:
        """A solution as a row, its further links at the planned rates."""
        return _on_links(to_row(self.model, solution), self.links)

    def cost_row(self, solution: Solution) -> Row:
        """A solution as a row without names, its further links at the planned rates."""
        return _on_links(cost_row(self.model, solution), self.links)

    def seconds(self, row: Row) -> float:
        """Latency on the planned links, by the arithmetic of the device."""
        return plan_table.latency_s(_on_links(row, self.links), Conditions(link=self.link))

    def joules(self, row: Row) -> float | None:
        """Joules on the device on the planned links: the layers' alone unless energy is an objective or a limit."""
        if not self.objective.energy and self.limits.energy_joules is None:
            return row.device_joules
        return plan_table.energy_j(_on_links(row, self.links), Conditions(link=self.link), self.power)

    def memory(self, solution: Solution) -> Memory:
        """What a solution needs on the device, its fallback counted."""
        return memory_of(self.model, solution.tier_of, self.limits.fallback)

    def value(self, row: Row) -> float:
        """The objective: seconds, joules, or their weighted sum; of a stream, seconds of the slowest stage."""
        if self.objective.throughput:
            return plan_table.slowest_stage_s(_on_links(row, self.links), Conditions(link=self.link))
        if not self.is_exact:
            late_s = tail_latency.p95_s(row, self.seconds(row), self.links, self.chain.links)
            return self._value_in(self.scenarios[:-1], row) + self.objective.latency_p95 * late_s
        return self._value_in(self.scenarios, row)

    def _value_in(self, scenarios: Sequence[LinkScenario], row: Row) -> float:
        """The sum of what a row costs in each scenario."""
        return sum((_cost_in(_on_links(row, state.links), state, self.power) for state in scenarios), 0.0)

    # ---- the best cut ------------------------------------------------------------------------------------------------

    @cached_property
    def best(self) -> Row:
        """The best cut on the planned links."""
        return self.row(self.solution)

    @cached_property
    def solution(self) -> Solution:
        """The best cut as an assignment; no allowed cut is below its bound."""
        if self.needs_milp:
            return constrained.to_solution(self.model, self._milp.best())
        if not self.is_exact:
            *means, p95 = self.scenarios
            return tail_latency.best(self.chain, p95, lambda at: self.solutions([*means, at]), self._least)
        solutions = self.solutions(self.scenarios)
        best = self._least(solutions)
        return Solution(best.tier_of, best.compress, min(solution.lower_bound for solution in solutions))

    def solutions(
        self,
        scenarios: Sequence[LinkScenario],
        x: float | None = None,
        *,
        exact: bool = True,
        near: Iterable[Ints] = (),
    ) -> list[Solution]:
        """The cheapest assignments in the scenarios: the best for each furthest tier, and all-local where allowed.

        Their bounds count the round trips up to the furthest tier. `x` replaces the seconds per byte up the first link.
        `near` are assignments that may be good and speed the search up.
        """
        # A round trip is paid once by whatever crosses a link, which no arc can carry (it is no sum over layers). So
        # each furthest tier is solved by itself without round trips, these are added, and the best of all is taken:
        # an assignment that reaches less far than its tier allows is only overpriced there, and priced right below.
        prices, sizes = arc_prices(self.model, scenarios, self.power, x), self._byte_prices
        near = tuple(near)
        solutions: list[Solution] = []
        for reach in range(1, len(self.chain.tiers)):
            solved = self._one_kind_for_all(prices, sizes, reach, near, exact)
            if solved is None:
                solved = [self._solve(kind, prices[kind], sizes[kind], reach, near, exact) for kind in prices]
            trips = float(next(iter(prices.values())).reached[reach])
            feasible = (solution for solution in solved if solution.lower_bound < math.inf)
            solutions += [replace(solution, lower_bound=solution.lower_bound + trips) for solution in feasible]
        if self.allows(self.local.tier_of):
            solutions.append(replace(self.local, lower_bound=self._value_in(scenarios, self._local_row)))
        return solutions

    @cached_property
    def _byte_prices(self) -> dict[bool, ArcPrices]:
        return {kind: byte_prices(self.model, kind) for kind in self.model.transfers}

    def _solve(
        self, kind: bool, prices: ArcPrices, sizes: ArcPrices, reach: int, near: tuple[Ints, ...], exact: bool
    ) -> Solution:
        """The cheapest assignment by one kind of request; equals go to fewer bytes."""
        ties = (sizes,) if exact else ()
        return self._mincut.solve(kind, prices, self.allowed, reach, *ties, exact=exact, near=near)

    def _one_kind_for_all(
        self,
        prices: Mapping[bool, ArcPrices],
        sizes: Mapping[bool, ArcPrices],
        reach: int,
        near: tuple[Ints, ...],
        exact: bool,
    ) -> list[Solution] | None:
        """The cheapest assignment by one cut for both kinds of request, where that is possible; None where it is not.

        It is solved with each tensor's cheaper kind. That is a relaxation, since a request has one kind for all its
        tensors; where all that cross happen to choose the same kind, neither kind has anything better.
        """
        if len(prices) == 1:
            return None
        plain, compressed = prices[False].sending, prices[True].sending
        cheapest = np.minimum(plain, compressed)
        bytes_of = {kind: np.where(prices[kind].sending == cheapest, sizes[kind].sending, np.inf) for kind in prices}
        fewest = np.minimum(bytes_of[False], bytes_of[True])
        relaxed, tie = replace(prices[False], sending=cheapest), replace(sizes[False], sending=fewest)
        solution = self._solve(False, relaxed, tie, reach, near, exact)
        if solution.lower_bound == math.inf:
            return []
        crosses = np.array([self.model.crossing(solution.tier_of <= link)[0] for link in range(reach)])
        for kind in prices:
            if (bytes_of[kind][:reach][crosses] == fewest[:reach][crosses]).all():
                return [replace(solution, compress=kind)]
        return None

    def _least(self, solutions: Sequence[Solution]) -> Solution:
        """The best of some; equals go to fewer bytes, then to more layers nearer the device."""
        rows = [self.cost_row(solution) for solution in solutions]
        values = [self.value(row) for row in rows]
        limit = min(values) * (1 + 10 * TIE)
        equal = (place for place, value in enumerate(values) if value <= limit)
        return solutions[min(equal, key=lambda place: (total_bytes(rows[place]), int(solutions[place].tier_of.sum())))]

    def allows(self, tier_of: Ints, *, forced: bool = True) -> bool:
        """Whether every layer may run where this puts it; `forced=False` leaves a forced cut out."""
        allowed = self.allowed if forced else self.allowed_unforced
        return bool(allowed[tier_of, np.arange(len(tier_of))].all())

    # ---- the pure modes ----------------------------------------------------------------------------------------------

    @cached_property
    def local(self) -> Solution:
        """All layers on the device."""
        return Solution(np.zeros(len(self.model.layers), dtype=np.intp), False, 0.0)

    @cached_property
    def _local_row(self) -> Row:
        return self.cost_row(self.local)

    def all_on(self, tier: int) -> list[Solution]:
        """Every layer on one tier, by each kind of request."""
        kinds = self.model.transfers if tier else (False,)
        return [Solution(self.local.tier_of + tier, compress, 0.0) for compress in kinds]

    @cached_property
    def pure(self) -> tuple[float | None, float | None]:
        """The value of all-local and of all on one further tier, None where a layer cannot run there."""
        runs = allowed_tiers(self.model.costs, Limits(), self.chain.tiers)
        local = self._pure_value([0]) if runs[0].all() else None
        further = [tier for tier in range(1, len(runs)) if runs[tier].all()]
        return local, self._pure_value(further) if further else None

    @property
    def better_pure(self) -> float | None:
        """Value of the better pure mode of those that the limits allow; a forced cut is no limit."""
        tiers = [tier for tier, layers in enumerate(self.allowed_unforced) if layers.all()]
        return self._pure_value(tiers) if tiers else None

    def _pure_value(self, tiers: Iterable[int]) -> float:
        return min(self.value(self.cost_row(solution)) for tier in tiers for solution in self.all_on(tier))

    # ---- the switching table -----------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The table: every cut that is best at some uplink bandwidth without round trip, those that are best under
        sampled factors, the best one, and all-local.

        A forced cut stands alone, with all-local behind it as its fallback. A table that would outgrow a release
        loses the rows that are missed least.
        """
        rows = _unique(map(self.row, self._milp_table() if self.needs_milp else self._mincut_table()))
        return _named(rows, self.model.layers)

    def _mincut_table(self) -> list[Solution]:
        lines = [self._line_of(self.solution)]
        if not self.limits.forced:
            lines = [*self._lines, *map(self._line_of, self.sampled_factors.added)]
        if self._wants_local(lines) and self.allows(self.local.tier_of, forced=False):
            lines.append(self._line_of(self.local))
        if not self.limits.forced:
            lines.sort(key=lambda line: (line.item.reaches == 0, -line.b, line.a))
        return [line.item for line in lines]

    def _milp_table(self) -> list[Solution]:
        """The best of the planned link first where it was forced; all-local last, if memory and energy allow it."""
        solutions = [self.solution]
        if not self.limits.forced:
            others = self._milp.at_other_bandwidths(min(constrained.MAX_ROWS, self.most_rows - 2))
            solutions = constrained.table(self.model, self.solution, others)
        if self._wants_local(map(self._line_of, solutions)) and self._can_fall_back():
            solutions.append(self.local)
        return solutions

    def _can_fall_back(self) -> bool:
        return self.allows(self.local.tier_of, forced=False) and constrained.can_fall_back(
            self.model, self.local, self.limits, self.link, self.power
        )

    def _wants_local(self, lines: Iterable[Line[Solution]]) -> bool:
        """Whether all-local belongs beside these rows.

        As a fallback; or because one of them sends nothing up, so that it beats all-local without a round trip and may
        lose to it with one.
        """
        if self.limits.fallback != "none":
            return True
        return not self.limits.forced and any(line.item.reaches and not line.b for line in lines)

    @cached_property
    def sampled_factors(self) -> sensitivity.SensitivitySample:
        """What other server loads and device slow-downs ask for at the planned link."""
        has_fallback = self.limits.fallback != "none" and self.allows(self.local.tier_of)
        return sensitivity.sample(
            self.scenarios,
            solve=lambda scenarios: self.solutions(scenarios, exact=False),
            row_of=self.cost_row,
            cost=self._value_in,
            table=[line.item for line in self._lines],
            fallback=[self.local] if has_fallback else [],
            room=max(self.most_rows - 1 - len(self._lines), 0),
        )

    @cached_property
    def _lines(self) -> list[Line[Solution]]:
        """The best cut, and those of the envelope but for one that costs the same at every bandwidth."""
        best = self._line_of(self.solution)
        return [best, *(line for line in self._envelope if not _is_same_line(line, best))]

    @cached_property
    def _envelope(self) -> list[Line[Solution]]:
        """What is best at some uplink bandwidth without round trip, as many of them as a release holds."""
        return thinned([segment.line for segment in lower_envelope(self._explored())], self.most_rows - 2)

    def _explored(self) -> list[Line[Solution]]:
        """Every cut that is lowest at some x = 1/bandwidth (parametric search, see `lower_envelope.explore`)."""
        steep = [self._line_of(solution) for solution in self.solutions(self.scenarios, 0.0)]
        flat = [self._line_of(solution) for solution in self._fewest_bytes()]

        def lowest(x: float, *near: Line[Solution]) -> Line[Solution]:
            around = [line.item.tier_of for line in near]
            solutions = self.solutions(self.scenarios, x, exact=False, near=around)
            return min(map(self._line_of, solutions), key=lambda line: line.at(x))

        steepest, flattest = min(steep, key=lambda line: (line.a, line.b)), min(flat, key=lambda line: (line.b, line.a))
        return explore(lowest, steepest, flattest, self.most_rows)

    def _fewest_bytes(self) -> list[Solution]:
        """The assignments that send least up the first link; equals go to the best on an infinite uplink."""
        solutions = []
        for kind, tie in arc_prices(self.model, self.scenarios, self.power, 0.0).items():
            sizes = byte_prices(self.model, kind, first_link_up=True)
            for reach in range(1, len(self.chain.tiers)):
                solution = self._mincut.solve(kind, sizes, self.allowed, reach, tie)
                if math.isfinite(solution.lower_bound):
                    solutions.append(solution)
        return solutions

    def _line_of(self, solution: Solution) -> Line[Solution]:
        """A solution's value over x = 1/uplink bandwidth, at round trip 0 and the radio awake."""
        return self.line(self.cost_row(solution), solution, awake=True)

    def line(self, row: Row, item: Item, *, awake: bool = False) -> Line[Item]:
        """A row's value over x = 1/uplink bandwidth of the first link, the other rates as planned.

        `awake` leaves out the first link's round trip and waking the radio, which all rows but all-local pay.
        """
        power = msgspec.structs.replace(self.power, wake_joules=0.0) if awake else self.power
        fixed, slope = 0.0, 0.0
        for scenario in self.scenarios:
            first = scenario.links[0]
            endless = Link(
                up_bytes_per_s=math.inf,
                down_bytes_per_s=first.down_bytes_per_s,
                rtt_s=0.0 if awake else first.rtt_s,
            )
            fixed += _cost_in(_on_links(row, scenario.links), scenario.with_first_link(endless), power)
            slope += scenario.latency + scenario.energy * (power.idle_watts + power.radio_watts)
        return Line(fixed, row.up_bytes * slope, item)


def _on_links(row: Row, links: Sequence[Link]) -> Row:
    """The row with its seconds on further links at their rates."""
    if not row.hops:
        return row
    hops = [
        msgspec.structs.replace(
            hop, up_s=hop.up_bytes / link.up_bytes_per_s, down_s=hop.down_bytes / link.down_bytes_per_s
        )
        for hop, link in zip(row.hops, links[1:], strict=False)
    ]
    took_s = sum((hop.up_s + hop.down_s + link.rtt_s for hop, link in zip(hops, links[1:], strict=False)), 0.0)
    return msgspec.structs.replace(row, hops=tuple(hops), further_links_s=took_s)


def _cost_in(row: Row, scenario: LinkScenario, power: Power) -> float:
    """What a row costs in a scenario, by the arithmetic of the device. Its further links must be the scenario's."""
    now = Conditions(link=scenario.links[0], server_load=scenario.load, device_slowdown=scenario.slowdown)
    spent = scenario.latency * plan_table.latency_s(row, now) if scenario.latency else 0.0
    return spent + scenario.energy * plan_table.energy_j(row, now, power) if scenario.energy else spent


def power_of(costs: Costs, chain: TierChain) -> Power:
    """What the device draws: idle from the costs, busy as its layers do on average, the radio as its link names it."""
    device = chain.tiers[0]
    idle = costs.idle_watts.get(device, 0.0)
    known = [layer for layer in costs.layers if device in layer.joules and device in layer.seconds]
    seconds = sum(layer.seconds[device] for layer in known)
    busy = sum(layer.joules[device] for layer in known) / seconds if seconds else idle
    radio = chain.links[0].radio or Radio(up_mw_per_mbps=0.0, down_mw_per_mbps=0.0, base_mw=0.0)
    return radio.power(idle, busy)


def total_bytes(row: Row) -> int:
    """Bytes over all links, both directions."""
    return row.up_bytes + row.down_bytes + sum(hop.up_bytes + hop.down_bytes for hop in row.hops)


def cut_key(row: Row) -> tuple[object, ...]:
    """What distinguishes one cut from another: where its layers run, and by which codecs its tensors cross."""
    codecs = [tuple(sorted(row.codecs.items())), *(tuple(sorted(hop.codecs.items())) for hop in row.hops)]
    return row.layers, row.compress, tuple((hop.remote, hop.compress) for hop in row.hops), tuple(codecs)


def _check_joules(model: CostModel, allowed: Mask) -> None:
    unknown = np.flatnonzero(allowed[0] & np.isnan(model.joules))
    if len(unknown):
        name, device = model.layers[int(unknown[0])], model.tiers[0]
        raise UsageError(f"objective energy: layer {name!r} has no joules on {device!r} in the costs")


def _is_same_line(line: Line[Solution], other: Line[Solution]) -> bool:
    return line.b == other.b and math.isclose(line.a, other.a, rel_tol=10 * TIE)


def _unique(rows: Iterable[Row]) -> list[Row]:
    """Each cut once per kind of request."""
    return list({cut_key(row): row for row in rows}.values())


def _named(rows: list[Row], order: Sequence[str]) -> tuple[Row, ...]:
    """The rows with names, by their cuts (`row_name`); a second all-remote row is the compressed one."""
    named: dict[str, Row] = {}
    for row in rows:
        name = row.name or row_name(row, order)
        if name in named:
            compressed = name == REMOTE and (row.compress or any(hop.compress for hop in row.hops))
            name = "remote-zstd" if compressed else row_name(row, order)
        if name in named:  # differs in which codec each tensor has, or in what the further links carry
            name = f"{name}-{_short_digest(repr(cut_key(row)))}"
        named[name] = msgspec.structs.replace(row, name=name)
    return tuple(named.values())


def row_name(row: Row, order: Sequence[str]) -> str:
    """The name of a row by its cut alone, so that one cut has the same name in every table and release of a model.

    `cut-N` has N layers on the device, and `cut-N-M` has M before the next link. Lossy codecs and compression follow,
    as in `cut-6-int8-zstd`; and digits of a digest where the layers before a link are not the first in `order`.
    """
    beyond = (row.remote, *(hop.remote for hop in row.hops))
    counts = [len(order) - len(layers) for layers in beyond]
    parts = ["cut", *map(str, counts)]
    if any(tuple(order[count:]) != layers for count, layers in zip(counts, beyond, strict=True)):
        parts.append(_short_digest(repr(beyond)))
    codecs = {codec for tensors in (row.codecs, *(hop.codecs for hop in row.hops)) for codec in tensors.values()}
    parts += sorted({codec.partition("+")[0] for codec in codecs} - {RAW})
    parts += ["zstd"] * (row.compress or any(hop.compress for hop in row.hops))
    return "-".join(parts)


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:4]


def supported_codecs(costs: Costs, given: Iterable[str] | None, limits: Limits) -> tuple[str, ...]:
    """The codecs to plan with, UsageError for an unknown one.

    By default all lossless ones, and where loss is allowed all that were measured.
    """
    if given is not None and not isinstance(given, Iterable):
        raise UsageError(f"codecs: give some of {', '.join(CODECS)}, not {given!r}")
    known = tuple(dict.fromkeys((*CODECS, *_measured_codecs(costs)))) if limits.allows_loss else LOSSLESS
    wanted = tuple(dict.fromkeys(known if given is None else [given] if isinstance(given, str) else given))
    unknown = [codec for codec in wanted if codec not in known]
    if unknown or not wanted:
        lossy = [codec for codec in unknown if codec in LOSSY or codec in _measured_codecs(costs)]
        why = f"; {', '.join(lossy)} may lose accuracy and needs max_loss or max_changed in limits" if lossy else ""
        raise UsageError(f"codecs {unknown or 'none'} not supported; supported: {', '.join(known)}{why}")
    return wanted


def _measured_codecs(costs: Costs) -> list[str]:
    return [codec for tensor in costs.tensors.values() for codec in tensor.codecs]
