"""A cost model as a mixed integer program: its variables, its rows, and one call of HiGHS (through scipy).

Variables, all 0 or 1:

1. `beyond[v, k]`: layer v runs beyond link k. Without further limits the program is a minimum cut over these, and its
   linear relaxation is integral.
2. One per tensor, link and transfer option (codec): the tensor crosses the link that way.
3. `crossed[k]`: any layer runs beyond link k.

Rows of the structure:

    beyond[v, k-1] - beyond[v, k] >= 0       tiers are passed in order; equal where v cannot run between the two links
    sum of options[t, k] >= beyond[r, k] - beyond[m, k]   t is sent where a reader r is beyond and its maker m is not
    beyond[r, k] - beyond[m, k] >= 0         nothing returns to a nearer tier inside the model
    crossed[k] - beyond[v, k] >= 0           for each v without readers, from which it follows for the other layers

Rows for memory use continuous variables and no large constants, see `_SolverCall._memory`.
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

from edgesplit.errors import EdgeError
from edgesplit_partitioner.arrays import Floats, Ints
from edgesplit_partitioner.formulation.cost_model import CostModel, TransferOption
from edgesplit_partitioner.formulation.cost_terms import CostTerm, Placement

_SCALE = 1e3
"""What goals and caps are scaled to: HiGHS distinguishes values to about 1e-6, so scaled ones to 1e-9 of themselves."""
_ROUNDING = 1e-12
"""Fraction of a sum that may be nothing but its rounding error."""
_CEILING = 1e4
"""Multiple of a goal's expected size to which every single price is lowered: HiGHS fails where the numbers of one
program differ by much more than 1e9."""
_MARGIN = 1e-3
"""Fraction below a ceiling at which an answer surely uses none of the prices that were lowered to it."""
_MAX_RESCALES = 100
"""How often a goal is solved again at another size, at most. Each time its size grows by `_CEILING`, and a double has
600 decades."""
_TIME_LIMIT = 1
"""Status of scipy's `milp` where its time limit was reached."""


class SearchStopped(EdgeError):
    """The search ended before any plan was found or shown to be impossible."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on the device: weights, with those of the whole model where `warm`, and the peak of live tensors."""

    warm: bool


Quantity = CostTerm | MemoryUse


@dataclass(frozen=True, slots=True)
class Goal:
    """What to minimise: a sum, and the greatest of some stages."""

    total: Quantity
    stages: tuple[CostTerm, ...] = ()


@dataclass(frozen=True, slots=True)
class Cap:
    """An upper bound on a quantity."""

    quantity: Quantity
    most: float


@dataclass(frozen=True, slots=True)
class StopCriteria:
    """When the solver stops: at this relative gap, or after this time."""

    mip_rel_gap: float = 1e-6
    time_limit_s: float = 60.0


@dataclass(frozen=True, slots=True)
class SolverAnswer:
    """The best placement found, and a bound that no placement's value is below."""

    placement: Placement
    bound: float
    value: float
    """Of the goal, with the solver's tolerances."""


@dataclass
class _Rows:
    """Rows of the program as they are added, low <= sum of value * variable <= high, in compressed sparse row form."""

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
        """These rows and some more as one constraint on so many variables."""
        starts = self.starts + [len(self.variables) + start for start in more.starts[1:]]
        parts = (np.array(self.values + more.values), np.array(self.variables + more.variables), np.array(starts))
        matrix = csr_array(parts, shape=(len(starts) - 1, columns))
        matrix.sum_duplicates()
        return LinearConstraint(matrix, np.array(self.low + more.low), np.array(self.high + more.high))


class MilpModel:
    """The program of one kind of request, for any goal, caps and bounds on tiers."""

    def __init__(self, model: CostModel, *, compress: bool, lossy: bool) -> None:
        self.model = model
        self.compress = compress
        self._links = model.link_count
        self._first_option = len(model.layers) * self._links
        self._options: list[tuple[int, int, TransferOption]] = []
        self._options_of: dict[tuple[int, int], list[int]] = {}
        for number, (tensor, readers) in enumerate(zip(model.tensors.values(), model.readers, strict=True)):
            for link in range(self._links) if readers else ():
                options = model.transfer_options(tensor, link, compress=compress, lossy=lossy)
                start = self._first_option + len(self._options)
                self._options_of[number, link] = list(range(start, start + len(options)))
                self._options += [(number, link, option) for option in options]
        self._first_crossed = self._first_option + len(self._options)
        self._size = self._first_crossed + self._links
        self._base = self._structure()

    def solve(
        self,
        goal: Goal,
        caps: Sequence[Cap],
        lowest: Ints,
        highest: Ints,
        stop: StopCriteria,
        forbidden: Sequence[Placement] = (),
    ) -> SolverAnswer | None:
        """The placement that is least in `goal` with every layer between its lowest and highest tier.

        None where there is none; `forbidden` placements are left out. SearchStopped where neither was shown.
        """
        reference = self._reference(goal, lowest, highest)
        answer: SolverAnswer | None = None
        for _ in range(_MAX_RESCALES):
            ceiling = _CEILING * reference
            answer = _SolverCall(self, lowest, highest).minimise(goal, caps, forbidden, reference, ceiling, stop)
            # Prices above the ceiling were lowered to it, and none is negative. So an answer below the ceiling uses
            # none of these, and is the best by the true prices too; every other best is at least as large as this.
            if answer is None or not math.isfinite(ceiling):
                break
            if answer.value < ceiling * (1 - _MARGIN):
                # What is left of a sum that cancels is no size to scale by: HiGHS refuses the numbers that come of it.
                if answer.value <= _ROUNDING * reference or 1e-2 <= answer.value / reference <= 1e2:
                    break
                # The tolerances are absolute, so a goal whose size was guessed wrong is solved again at its own size.
                reference = answer.value
            else:
                reference = max(answer.value, ceiling)
        return answer

    def beyond(self, layer: int, link: int) -> int:
        """The variable that is 1 where a layer runs beyond a link."""
        return layer * self._links + link

    def terms(self, term: CostTerm, ceiling: float) -> tuple[Floats, float]:
        """A cost term as a value per variable, and a constant; by `lowered` prices."""
        # All-local is the constant; each link that a layer runs beyond adds the difference of its tiers and what its
        # outputs pay on the way down.
        layer = lowered(term.layer, ceiling)
        answers = lowered(np.outer(self.model.answer_bytes, term.down_byte), ceiling)
        steps = np.diff(layer, axis=0).T + answers
        options = lowered([term.of_transfer(option, link) for _, link, option in self._options], ceiling)
        return np.concatenate([steps.ravel(), options, lowered(term.crossed, ceiling)]), float(layer[0].sum())

    def leaving(self, tensor: int) -> list[int]:
        """The variables of which one is 1 where a tensor leaves the device."""
        return self._options_of.get((tensor, 0), [])

    def placement(self, values: Floats) -> Placement:
        """The placement that the variables of a solution stand for."""
        beyond = values[: self._first_option].reshape(-1, self._links) > 0.5
        tier_of = np.asarray(beyond.sum(axis=1), dtype=np.intp)
        transfers: dict[tuple[int, int], TransferOption] = {}
        for (tensor, link), variables in self._options_of.items():
            maker = int(self.model.maker[tensor])
            made = int(tier_of[maker]) if maker >= 0 else 0
            if made <= link < max(int(tier_of[reader]) for reader in self.model.readers[tensor]):
                chosen = max(variables, key=lambda variable: values[variable])
                transfers[tensor, link] = self._options[chosen - self._first_option][2]
        return Placement(tier_of, transfers, self.compress)

    @property
    def size(self) -> int:
        """Number of variables before goals and caps add theirs. All of them are 0 or 1."""
        return self._size

    def differs(self, placement: Placement) -> tuple[list[tuple[int, float]], float]:
        """A row that only other placements satisfy (a no-good cut): its terms and its least value."""
        ones: set[int] = set()
        for layer, tier in enumerate(placement.tier_of):
            ones.update(self.beyond(layer, link) for link in range(int(tier)))
        for (tensor, link), option in placement.transfers.items():
            variables = self._options_of[tensor, link]
            ones.update(variable for variable in variables if self._options[variable - self._first_option][2] == option)
        # A crossing that does not happen leaves its options free, so there the row counts only variables that are 1.
        layers = [(variable, 1.0) for variable in range(self._first_option) if variable not in ones]
        return [*layers, *((variable, -1.0) for variable in sorted(ones))], 1.0 - len(ones)

    def _structure(self) -> _Rows:
        """The rows that every goal and every cap share."""
        rows, model = _Rows(), self.model
        for layer in range(len(model.layers)):
            for link in range(1, self._links):
                # The difference is 1 exactly where the layer runs on tier `link`, between the two links.
                here = 0.0 if not model.can_run[link, layer] else np.inf
                rows.add([(self.beyond(layer, link - 1), 1.0), (self.beyond(layer, link), -1.0)], 0.0, here)
        for (tensor, link), options in self._options_of.items():
            maker = int(model.maker[tensor])
            made = [(self.beyond(maker, link), 1.0)] if maker >= 0 else []
            for reader in model.readers[tensor]:
                read = (self.beyond(reader, link), -1.0)
                # One option is paid for all readers: each reader has a row, and all of them name the same variables.
                rows.add([*((option, 1.0) for option in options), *made, read], 0.0)
                if made:
                    rows.add([(read[0], 1.0), (made[0][0], -1.0)], 0.0)
        # A layer's readers run at least as far as the layer does: the layers without readers are the furthest.
        read_on = {int(model.maker[tensor]) for tensor, readers in enumerate(model.readers) if readers}
        for layer in set(range(len(model.layers))) - read_on:
            for link in range(self._links):
                rows.add([(self._first_crossed + link, 1.0), (self.beyond(layer, link), -1.0)], 0.0)
        return rows

    def _reference(self, goal: Goal, lowest: Ints, highest: Ints) -> float:
        """About how large the goal is: the least, over the tiers, of running as much as possible there."""
        if isinstance(goal.total, MemoryUse):
            return float(self.model.weight_bytes.sum() + self.model.raw_bytes.sum()) or 1.0
        terms = [goal.total, *goal.stages]
        assignments = [np.clip(tier, lowest, highest) for tier in range(self._links + 1)]
        layers = np.arange(len(lowest))
        sizes = [sum(float(term.layer[tier_of, layers].sum()) for term in terms) for tier_of in assignments]
        return min((size for size in sizes if size > 0), default=1.0)


class _SolverCall:
    """One call of the solver: the program's rows with those of a goal and its caps."""

    def __init__(self, program: MilpModel, lowest: Ints, highest: Ints) -> None:
        self.program = program
        self.rows = _Rows()
        self.integral = [1.0] * program.size
        links = np.arange(program._links)
        size = len(self.integral)
        self.low, self.high = [0.0] * size, [1.0] * size
        beyond = slice(0, program._first_option)
        self.low[beyond] = list((lowest[:, None] > links).astype(float).ravel())
        self.high[beyond] = list((highest[:, None] > links).astype(float).ravel())

    def minimise(
        self,
        goal: Goal,
        caps: Sequence[Cap],
        forbidden: Sequence[Placement],
        reference: float,
        ceiling: float,
        stop: StopCriteria,
    ) -> SolverAnswer | None:
        """The least of the goal by `lowered` prices, scaled by `reference`, about how large it is."""
        for cap in caps:
            self._cap(cap)
        for placement in forbidden:
            self.rows.add(*self.program.differs(placement))
        scale = _SCALE / reference
        objective, constant = self._objective(goal, scale, ceiling)
        objective = np.concatenate([objective, np.zeros(len(self.integral) - len(objective))])
        result = self._solve(objective, stop, presolve=True)
        if result.x is None and "error" in result.message.lower():
            # HiGHS 1.11 now and then fails on rows that hold with equality (status 4), not so without its presolve.
            result = self._solve(objective, stop, presolve=False)
        if result.x is None and "infeasible" in result.message.lower():
            return None
        if result.x is None:
            raise SearchStopped(stopped_text(result.status, result.message, stop))
        dual = result.mip_dual_bound if result.mip_dual_bound is not None else result.fun
        placement = self.program.placement(result.x)
        return SolverAnswer(placement, dual / scale + constant, float(result.fun) / scale + constant)

    def _solve(self, values: Floats, stop: StopCriteria, *, presolve: bool) -> Any:
        """HiGHS's result for the rows added so far."""
        with _stdout_to_stderr():
            return milp(
                c=values,
                integrality=np.array(self.integral),
                bounds=Bounds(np.array(self.low), np.array(self.high)),
                constraints=self.program._base.extended(self.rows, len(self.integral)),
                options={
                    "mip_rel_gap": stop.mip_rel_gap,
                    "time_limit": math.ceil(stop.time_limit_s),
                    "presolve": presolve,
                },
            )

    def _objective(self, goal: Goal, scale: float, ceiling: float) -> tuple[Floats, float]:
        """A value per variable so far, and what is added outside the program."""
        if isinstance(goal.total, MemoryUse):
            terms, constant = self._memory(goal.total, scale, ceiling)
            return self._dense(terms), constant
        values, constant = self.program.terms(goal.total, ceiling)
        objective = np.concatenate([values * scale, np.zeros(len(self.integral) - len(values))])
        if goal.stages:
            # The greatest of the stages is linear: a variable that is at least each of them, and is minimised.
            slowest = self._continuous()
            for stage in goal.stages:
                values, stage_constant = self.program.terms(stage, ceiling)
                terms = [(int(i), -values[i] * scale) for i in np.flatnonzero(values)]
                self.rows.add([(slowest, 1.0), *terms], stage_constant * scale)
            objective = np.concatenate([objective, np.zeros(len(self.integral) - len(objective))])
            objective[slowest] = 1.0
        return objective, constant

    def _cap(self, cap: Cap) -> None:
        """The row that keeps a quantity at its cap, scaled so that the cap is as large as `_SCALE`.

        A price of twice the cap breaks it as surely as a larger one: by `lowered` prices the row means the same.
        """
        scale, ceiling = (_SCALE / cap.most, 2 * cap.most) if cap.most > 0 else (_SCALE, 0.0)
        if isinstance(cap.quantity, MemoryUse):
            terms, constant = self._memory(cap.quantity, scale, ceiling)
        else:
            values, constant = self.program.terms(cap.quantity, ceiling)
            terms = [(int(i), float(values[i]) * scale) for i in np.flatnonzero(values)]
        self.rows.add(terms, -np.inf, (cap.most - constant) * scale)

    def _memory(self, use: MemoryUse, scale: float, ceiling: float) -> tuple[list[tuple[int, float]], float]:
        """Weights and peak as terms and a constant outside the scale, by `lowered` bytes; what the peak needs goes into
        rows.

        At each step of the stored order the peak is at least: what is made on the device by then and still to be read,
        and what was last read before and is sent. A step whose layer runs elsewhere holds no more than the one before
        it, so no row needs to be switched off by a large constant. What is sent and read no more is summed along the
        steps. `cost_terms.peak_bytes` counts the same for a given assignment.
        """
        model, program = self.program.model, self.program
        raw_bytes, weight_bytes = lowered(model.raw_bytes, ceiling), lowered(model.weight_bytes, ceiling)
        peak = self._continuous()
        # The variable that is the sum of what was last read before and is sent; None while nothing can be.
        waiting: int | None = None
        made_at, done_at = _lifetimes(model)
        alive: dict[int, float] = {}
        for step in range(len(model.layers) + 1):
            leaving = [(tensor, alive.pop(tensor)) for tensor in done_at[step]]
            sent = [(option, size) for tensor, size in leaving for option in program.leaving(tensor) if size]
            if sent:
                before = [] if waiting is None else [(waiting, 1.0)]
                after = self._continuous()
                self.rows.add([*before, *sent, (after, -1.0)], 0.0, 0.0)
                waiting = after
            alive.update((tensor, float(raw_bytes[tensor]) * scale) for tensor in made_at[step])
            # peak >= waiting + sum of size * (1 - beyond[maker]): the ones are the constant on the right.
            terms, constant = [(peak, 1.0)], 0.0
            for tensor, size in alive.items():
                maker = int(model.maker[tensor])
                constant += size
                if maker >= 0:
                    terms.append((program.beyond(maker, 0), size))
            self.rows.add(terms if waiting is None else [*terms, (waiting, -1.0)], constant)
        weights = [] if use.warm else list(enumerate(weight_bytes))
        stays = [(program.beyond(layer, 0), -float(size) * scale) for layer, size in weights if size]
        return [(peak, 1.0), *stays], float(weight_bytes.sum())

    def _continuous(self) -> int:
        """A new continuous variable of at least 0."""
        self.integral.append(0.0)
        self.low.append(0.0)
        self.high.append(np.inf)
        return len(self.integral) - 1

    def _dense(self, terms: list[tuple[int, float]]) -> Floats:
        """Terms as a value per variable."""
        values = np.zeros(len(self.integral))
        for variable, value in terms:
            values[variable] += value
        return values


def lowered(prices: Floats | Sequence[float], ceiling: float) -> Floats:
    """Prices of at most `ceiling`; where that is 0, 1 for each price above 0."""
    given = np.asarray(prices, dtype=np.float64)
    return np.minimum(given, ceiling) if ceiling > 0 else np.sign(given)


def stopped_text(status: int, message: str, stop: StopCriteria) -> str:
    """Why the solver returned no plan, by the status and message of scipy's `milp`, and what to do."""
    if status == _TIME_LIMIT:
        return (
            f"no plan was found within {stop.time_limit_s:g} s, and none was shown to be impossible ({message}): "
            "plan with fewer codecs, tiers or limits"
        )
    return (
        f"the solver failed, not for lack of time (status {status}: {message}): plan with another limit or link, and "
        "report this with the costs"
    )


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect standard output to standard error: HiGHS 1.12 prints a line when it repairs a solution, even silenced.

    Only in the main thread, where a command's output is at stake: the file descriptor is shared by all threads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        sys.stdout.flush()
        stdout = os.dup(1)
        os.dup2(2, 1)
    except (OSError, ValueError, AttributeError):
        yield
        return
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _lifetimes(model: CostModel) -> tuple[list[list[int]], list[list[int]]]:
    """By step (0 is the start, layer v runs at v + 1): tensors that are new, and those last read the step before.

    An output stays to the end; an input that nothing reads or returns takes no room.
    """
    made_at: list[list[int]] = [[] for _ in range(len(model.layers) + 2)]
    done_at: list[list[int]] = [[] for _ in range(len(model.layers) + 2)]
    for tensor, readers in enumerate(model.readers):
        maker = int(model.maker[tensor])
        if maker < 0 and not readers and not model.is_output[tensor]:
            continue
        made_at[maker + 1].append(tensor)
        if not model.is_output[tensor]:
            done_at[max((maker, *readers)) + 2].append(tensor)
    return made_at, done_at
