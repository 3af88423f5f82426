"""A question as a mixed integer program: its variables, its rows, and one call of HiGHS (through scipy).

Variables: `beyond[v, k]` says that layer v runs beyond link k (so the cut alone is a minimum cut and its relaxation is
whole); one variable per tensor, link and way of crossing; `crossed[k]` says that anything runs beyond link k. Rows for
memory use continuous variables and no large constants: see `_memory`.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from edgesplit_partitioner.formulation.cost_terms import Floats, Ints, Placement, Question, Tariff, Way

_SCALE = 1e3
"""HiGHS tells values and rows apart to about 1e-6; scaled to this they are told apart to 1e-9 of themselves."""


_ROUNDING = 1e-12
"""Part of a sum that may be nothing but its rounding."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on the device: weights, with those of the whole model where `warm`, and the peak of live tensors."""

    warm: bool


Quantity = Tariff | MemoryUse


@dataclass(frozen=True, slots=True)
class Goal:
    """What to make small: a sum, and the greatest of some others."""

    total: Quantity
    slowest: tuple[Tariff, ...] = ()


@dataclass(frozen=True, slots=True)
class Cap:
    """At most so much of a quantity."""

    quantity: Quantity
    most: float


@dataclass(frozen=True, slots=True)
class Effort:
    """When to stop searching."""

    mip_rel_gap: float = 1e-6
    time_limit_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Solved:
    """The best placement found, and a value that no placement is below."""

    placement: Placement
    bound: float
    value: float
    """As the solver has it."""


@dataclass
class _Rows:
    """Rows of the program as they are written: low <= sum of value * variable <= high."""

    variables: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, terms: Iterable[tuple[int, float]], low: float, high: float = np.inf) -> None:
        for variable, value in terms:
            self.variables.append(variable)
            self.values.append(value)
        self.starts.append(len(self.variables))
        self.low.append(low)
        self.high.append(high)

    def extended(self, more: _Rows, columns: int) -> LinearConstraint:
        starts = self.starts + [len(self.variables) + start for start in more.starts[1:]]
        parts = (np.array(self.values + more.values), np.array(self.variables + more.variables), np.array(starts))
        matrix = csr_array(parts, shape=(len(starts) - 1, columns))
        matrix.sum_duplicates()
        return LinearConstraint(matrix, np.array(self.low + more.low), np.array(self.high + more.high))


class Program:
    """The program of one kind of request, for any goal, caps and bounds on tiers."""

    def __init__(self, question: Question, *, compress: bool, lossy: bool) -> None:
        self.question = question
        self.compress = compress
        layers, self._links = len(question.costs.layers), len(question.links)
        self._first_way = layers * self._links
        self._ways: list[tuple[int, int, Way]] = []
        self._way_of: dict[tuple[int, int], list[int]] = {}
        for tensor, readers in enumerate(question.readers):
            for link in range(self._links) if readers else ():
                ways = question.ways(tensor, link, compress, lossy)
                start = self._first_way + len(self._ways)
                self._way_of[tensor, link] = list(range(start, start + len(ways)))
                self._ways += [(tensor, link, way) for way in ways]
        self._first_crossed = self._first_way + len(self._ways)
        self._size = self._first_crossed + self._links
        self._base = self._structure()

    def solve(
        self,
        goal: Goal,
        caps: Sequence[Cap],
        lowest: Ints,
        highest: Ints,
        effort: Effort,
        barred: Sequence[Placement] = (),
    ) -> Solved | None:
        """The placement that is least in `goal` with every layer between its lowest and highest tier; None where there
        is none. TimeoutError where neither was shown in time. `barred` placements are left out.
        """
        reference = self._reference(goal, lowest, highest)
        found = _Attempt(self, lowest, highest).minimise(goal, caps, barred, reference, effort)
        for _ in range(3):
            # What is left of a sum that cancels is no size to scale by: HiGHS refuses the numbers that come of it.
            if found is None or found.value <= _ROUNDING * reference or 1e-2 <= found.value / reference <= 1e2:
                break
            reference = found.value
            found = _Attempt(self, lowest, highest).minimise(goal, caps, barred, reference, effort)
        return found

    def beyond(self, layer: int, link: int) -> int:
        """The variable that says that a layer runs beyond a link."""
        return layer * self._links + link

    def terms(self, tariff: Tariff) -> tuple[Floats, float]:
        """A tariff as a value per variable, and a constant."""
        question = self.question
        steps = np.diff(tariff.layer, axis=1) + np.outer(question.answer_bytes, tariff.down_byte)
        ways = [tariff.way(way, link) for _, link, way in self._ways]
        return np.concatenate([steps.ravel(), ways, tariff.crossed]), float(tariff.layer[:, 0].sum())

    def sending(self, tensor: int) -> list[int]:
        """The variables of which one is 1 where a tensor leaves the device."""
        return self._way_of.get((tensor, 0), [])

    def placement(self, values: Floats) -> Placement:
        """What a solution's variables say."""
        beyond = values[: self._first_way].reshape(-1, self._links) > 0.5
        tier = np.asarray(beyond.sum(axis=1), dtype=np.intp)
        ways: dict[tuple[int, int], Way] = {}
        for (tensor, link), variables in self._way_of.items():
            maker = int(self.question.maker[tensor])
            made = int(tier[maker]) if maker >= 0 else 0
            if made <= link < max(int(tier[reader]) for reader in self.question.readers[tensor]):
                chosen = max(variables, key=lambda variable: values[variable])
                ways[tensor, link] = self._ways[chosen - self._first_way][2]
        return Placement(tier, ways, self.compress)

    @property
    def size(self) -> int:
        """How many variables it has before goals and caps add theirs. All of them are 0 or 1."""
        return self._size

    def differs(self, placement: Placement) -> tuple[list[tuple[int, float]], float]:
        """A row that only other placements satisfy: its terms and its least value."""
        ones: set[int] = set()
        for layer, tier in enumerate(placement.tier):
            ones.update(self.beyond(layer, link) for link in range(int(tier)))
        for (tensor, link), way in placement.ways.items():
            ones.update(one for one in self._way_of[tensor, link] if self._ways[one - self._first_way][2] == way)
        # A crossing that does not happen leaves its ways free, so only what is 1 may be asked to change there.
        layers = [(int(one), 1.0) for one in range(self._first_way) if one not in ones]
        return [*layers, *((one, -1.0) for one in sorted(ones))], 1.0 - len(ones)

    def _structure(self) -> _Rows:
        rows, question = _Rows(), self.question
        for layer in range(len(question.costs.layers)):
            for link in range(1, self._links):
                same = 0.0 if not question.may_run[layer, link] else np.inf
                rows.add([(self.beyond(layer, link - 1), 1.0), (self.beyond(layer, link), -1.0)], 0.0, same)
        for (tensor, link), ways in self._way_of.items():
            maker = int(question.maker[tensor])
            back = [(self.beyond(maker, link), 1.0)] if maker >= 0 else []
            for reader in question.readers[tensor]:
                there = (self.beyond(reader, link), -1.0)
                rows.add([*((way, 1.0) for way in ways), *back, there], 0.0)
                if back:
                    rows.add([(there[0], 1.0), (back[0][0], -1.0)], 0.0)
        read_on = {int(question.maker[tensor]) for tensor, readers in enumerate(question.readers) if readers}
        for layer in set(range(len(question.costs.layers))) - read_on:
            for link in range(self._links):
                rows.add([(self._first_crossed + link, 1.0), (self.beyond(layer, link), -1.0)], 0.0)
        return rows

    def _reference(self, goal: Goal, lowest: Ints, highest: Ints) -> float:
        """About how large the goal is: the least, over the tiers, of running as much as may be there."""
        if isinstance(goal.total, MemoryUse):
            return float(self.question.weight_bytes.sum() + self.question.raw_bytes.sum()) or 1.0
        tariffs = [goal.total, *goal.slowest]
        reach = [np.clip(tier, lowest, highest) for tier in range(self._links + 1)]
        rows = np.arange(len(lowest))
        found = [sum(float(tariff.layer[rows, tier].sum()) for tariff in tariffs) for tier in reach]
        return min((one for one in found if one > 0), default=1.0)


class _Attempt:
    """One call of the solver: the program's rows with those of a goal and its caps."""

    def __init__(self, program: Program, lowest: Ints, highest: Ints) -> None:
        self.program = program
        self.rows = _Rows()
        self.integral = [1.0] * program.size
        links = np.arange(program._links)
        size = len(self.integral)
        self.low, self.high = [0.0] * size, [1.0] * size
        beyond = slice(0, program._first_way)
        self.low[beyond] = list((lowest[:, None] > links).astype(float).ravel())
        self.high[beyond] = list((highest[:, None] > links).astype(float).ravel())

    def minimise(
        self, goal: Goal, caps: Sequence[Cap], barred: Sequence[Placement], reference: float, effort: Effort
    ) -> Solved | None:
        """The least of the goal, scaled by about how large it is."""
        for cap in caps:
            self._cap(cap)
        for placement in barred:
            self.rows.add(*self.program.differs(placement))
        scale = _SCALE / reference
        objective, constant = self._objective(goal, scale)
        objective = np.concatenate([objective, np.zeros(len(self.integral) - len(objective))])
        found = self._solved(objective, effort, presolve=True)
        if found.x is None and "error" in found.message.lower():
            # HiGHS 1.11 now and then fails on rows that hold with equality (status 4), not so without its presolve.
            found = self._solved(objective, effort, presolve=False)
        if found.x is None and "infeasible" in found.message.lower():
            return None
        if found.x is None:
            raise TimeoutError(f"nothing found within {effort.time_limit_s:g} s: {found.message}")
        dual = found.mip_dual_bound if found.mip_dual_bound is not None else found.fun
        placement = self.program.placement(found.x)
        return Solved(placement, dual / scale + constant, float(found.fun) / scale + constant)

    def _solved(self, values: Floats, effort: Effort, *, presolve: bool) -> Any:
        """What HiGHS says to the rows as they are."""
        with _own_words_aside():
            return milp(
                c=values,
                integrality=np.array(self.integral),
                bounds=Bounds(np.array(self.low), np.array(self.high)),
                constraints=self.program._base.extended(self.rows, len(self.integral)),
                options={
                    "mip_rel_gap": effort.mip_rel_gap,
                    "time_limit": math.ceil(effort.time_limit_s),
                    "presolve": presolve,
                },
            )

    def _objective(self, goal: Goal, scale: float) -> tuple[Floats, float]:
        """A value per variable so far, and what is added outside the program."""
        if isinstance(goal.total, MemoryUse):
            terms, constant = self._memory(goal.total, scale)
            return self._dense(terms), constant
        values, constant = self.program.terms(goal.total)
        objective = np.concatenate([values * scale, np.zeros(len(self.integral) - len(values))])
        if goal.slowest:
            slowest = self._continuous()
            for tariff in goal.slowest:
                one, alone = self.program.terms(tariff)
                terms = [(int(i), -one[i] * scale) for i in np.flatnonzero(one)]
                self.rows.add([(slowest, 1.0), *terms], alone * scale)
            objective = np.concatenate([objective, np.zeros(len(self.integral) - len(objective))])
            objective[slowest] = 1.0
        return objective, constant

    def _cap(self, cap: Cap) -> None:
        scale = _SCALE / cap.most if cap.most > 0 else 1.0
        if isinstance(cap.quantity, MemoryUse):
            terms, constant = self._memory(cap.quantity, scale)
        else:
            values, constant = self.program.terms(cap.quantity)
            terms = [(int(i), float(values[i]) * scale) for i in np.flatnonzero(values)]
        self.rows.add(terms, -np.inf, (cap.most - constant) * scale)

    def _memory(self, use: MemoryUse, scale: float) -> tuple[list[tuple[int, float]], float]:
        """Weights and peak as terms and a constant outside the scale; what the peak needs goes into rows.

        At each step of the stored order the peak is at least: what is made on the device by then and still to be read,
        and what was last read before and is sent. A step whose layer runs elsewhere holds no more than the one before
        it, so no row needs to be switched off. What is sent and done with is summed along the steps.
        """
        question, program = self.program.question, self.program
        peak = self._continuous()
        held: int | None = None
        born, done = _lives(question)
        alive: dict[int, float] = {}
        for step in range(len(question.costs.layers) + 1):
            leaving = [(tensor, alive.pop(tensor)) for tensor in done[step]]
            sent = [(way, size) for tensor, size in leaving for way in program.sending(tensor) if size]
            if sent:
                before = [] if held is None else [(held, 1.0)]
                after = self._continuous()
                self.rows.add([*before, *sent, (after, -1.0)], 0.0, 0.0)
                held = after
            alive.update((tensor, float(question.raw_bytes[tensor]) * scale) for tensor in born[step])
            terms, constant = [(peak, 1.0)], 0.0
            for tensor, size in alive.items():
                maker = int(question.maker[tensor])
                constant += size
                if maker >= 0:
                    terms.append((program.beyond(maker, 0), size))
            self.rows.add(terms if held is None else [*terms, (held, -1.0)], constant)
        weights = [] if use.warm else list(enumerate(question.weight_bytes))
        stays = [(program.beyond(layer, 0), -float(size) * scale) for layer, size in weights if size]
        return [(peak, 1.0), *stays], float(question.weight_bytes.sum())

    def _continuous(self) -> int:
        self.integral.append(0.0)
        self.low.append(0.0)
        self.high.append(np.inf)
        return len(self.integral) - 1

    def _dense(self, terms: list[tuple[int, float]]) -> Floats:
        values = np.zeros(len(self.integral))
        for variable, value in terms:
            values[variable] += value
        return values


@contextmanager
def _own_words_aside() -> Iterator[None]:
    """Standard output goes to standard error: HiGHS 1.12 prints a line when it repairs a solution, asked or not.

    Only in the main thread, where a command's output is at stake; other threads leave what all share alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
    except (OSError, ValueError, AttributeError):
        yield
        return
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _lives(question: Question) -> tuple[list[list[int]], list[list[int]]]:
    """By step (0 is the start, layer v runs at v + 1): the tensors that are new, and those last read the step before.

    An output stays to the end; an input that nothing reads or answers with takes no room.
    """
    layers = len(question.costs.layers)
    born: list[list[int]] = [[] for _ in range(layers + 2)]
    done: list[list[int]] = [[] for _ in range(layers + 2)]
    for tensor, readers in enumerate(question.readers):
        maker = int(question.maker[tensor])
        if maker < 0 and not readers and not question.is_output[tensor]:
            continue
        born[maker + 1].append(tensor)
        if not question.is_output[tensor]:
            done[max((maker, *readers)) + 2].append(tensor)
    return born, done
