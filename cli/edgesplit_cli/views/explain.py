"""The reasons for a plan as sentences and tables, from `edgesplit_partitioner.presentation.explain`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from edgesplit_cli.commands.options.plan_limits import in_flags
from edgesplit_cli.output import console, headed, ms, rate, size, table

if TYPE_CHECKING:
    from edgesplit_partitioner.presentation.explain import Bind, Change, Choice, Explanation, Move

MOST_MOVES = 3
LEAST_S = 5e-5
"""What is shown as 0.1 ms; less is not shown."""
PARTS = ("device", "encode", "link", "decode", "remote")


def print_reasons(reasons: Explanation) -> None:
    """All of it, on standard output."""
    out = console()
    for line in sentences(reasons):
        why, question, rest = line.partition("? ")
        out.print(headed(why + question, rest) if question else line)
    moves = [*reasons.inward[:MOST_MOVES], *reasons.outward[:MOST_MOVES]]
    if moves:
        parts = [part for part in PARTS if any(abs(move.split.get(part, 0.0)) >= LEAST_S for move in moves)]
        forbidden = not all(move.allowed for move in moves)
        columns = ("layer", "moved to", ">more", *(f">{part}\nms" for part in parts), *(("",) if forbidden else ()))
        rows = [_move(reasons, move, parts, forbidden) for move in moves]
        out.print(table(columns, rows, title="one layer elsewhere"))
    if reasons.changes:
        rows = [(_condition(change), cut_told(reasons.tiers, change.to)) for change in reasons.changes]
        out.print(table(("the choice changes", "to"), rows, title="all else as planned"))


def sentences(reasons: Explanation) -> Iterator[str]:
    """Why this cut, what would be next, and which limits bind."""
    tiers, best = reasons.tiers, reasons.best
    parts = [(f"{part} {ms(best.split[part])}") for part in PARTS if best.split.get(part, 0.0) >= LEAST_S]
    total = f": {' + '.join(parts)}" if len(parts) > 1 else ""
    value = f" ({worded(reasons.objective)} {valued(reasons, best.value)})" if reasons.objective != "latency" else ""
    took = f"{ms(best.seconds)} ms{value}{total}"
    sent = f"with {size(best.bytes)} over the link{'s' if len(tiers) > 2 else ''}, answers included"
    yield f"Why {cut_told(tiers, best)}? It takes {took}, {sent if best.bytes else 'and sends nothing'}."
    yield from _pure(reasons)
    if reasons.next_best is not None:
        more = reasons.next_best.value - best.value
        sure = "" if reasons.next_exact else " Not every other cut was tried."
        yield (
            f"Next best is {cut_told(tiers, reasons.next_best)}: {valued(reasons, reasons.next_best.value)}, "
            f"{added(reasons, more)}{_share(more, best.value)}.{sure}"
        )
    for bind in reasons.limits:
        yield _bind(reasons, bind)
    if not reasons.limits:
        yield "No limit was set."


def _pure(reasons: Explanation) -> Iterator[str]:
    named = (
        ("All on the device", reasons.all_local),
        (f"All on {' or '.join(reasons.tiers[1:])}", reasons.all_remote),
    )
    told = [
        f"{name} {'takes ' + valued(reasons, value) if value is not None else 'is not possible'}"
        for name, value in named
    ]
    yield f"{told[0]}; {told[1][0].lower()}{told[1][1:]}."


def _bind(reasons: Explanation, bind: Bind) -> str:
    limit = limit_told(bind.limit)
    if not bind.binds:
        return f"The limit {limit} does not bind: the plan would be as good without it."
    return (
        f"The limit {limit} binds: without it {cut_told(reasons.tiers, bind.without)} would take "
        f"{valued(reasons, bind.without.value)}, so it costs {added(reasons, bind.costs).removeprefix('+')}"
        f"{_share(bind.costs, bind.without.value)}."
    )


def limit_told(limit: str) -> str:
    """A limit as the command line spells it."""
    return in_flags(limit)


def cut_told(tiers: Sequence[str], choice: Choice) -> str:
    """A cut in a few words: by the last layer on each tier that has some."""
    full = [tier for tier in tiers if choice.cut.get(tier)]
    if len(full) == 1:
        return f"all on {'the device' if full[0] == tiers[0] else full[0]}"
    if len(tiers) == 2:
        return f"the cut after {choice.last[tiers[0]]}"
    parts = [
        f"{tier} up to {choice.last[tier]}" if tier in choice.last and tier != full[-1] else f"{tier} the rest"
        for tier in full
    ]
    return ", ".join(parts)


def valued(reasons: Explanation, value: float) -> str:
    """A value of the objective with its unit."""
    return f"{ms(value)} ms" if reasons.unit == "s" else f"{value:.4g} {reasons.unit}".strip()


def worded(objective: str) -> str:
    """What the plan wants least of, for people."""
    return {"latency_p95": "p95", "throughput": "slowest stage"}.get(objective, objective)


def added(reasons: Explanation, value: float) -> str:
    """The same as a difference."""
    return f"{value * 1000:+.1f} ms" if reasons.unit == "s" else f"{value:+.4g} {reasons.unit}".strip()


def _share(more: float, of: float) -> str:
    return f" ({more / of:+.0%})" if of else ""


def _move(reasons: Explanation, move: Move, parts: Sequence[str], noted: bool) -> tuple[str, ...]:
    split = (f"{move.split.get(part, 0.0) * 1000:+.1f}" for part in parts)
    note = "" if move.allowed else "forbidden"
    return (move.layer, move.target, added(reasons, move.more), *split, *((note,) if noted else ()))


def _condition(change: Change) -> str:
    """As in `uplink below 2.3 Mbit/s`."""
    side = "above" if change.rises else "below"
    if change.subject == "uplink":
        return f"uplink {side} {rate(change.at)}"
    if change.subject == "round trip":
        return f"round trip {side} {ms(change.at)} ms"
    return f"{change.subject} {side} {change.at:.3g}x"
