"""The reasons for a plan as sentences and tables, from `edgesplit_partitioner.presentation.explain`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from edgesplit.quantities import format_size
from edgesplit_cli.options.plan_limits import to_options
from edgesplit_cli.output import bold_head, console, ms, rate, table

if TYPE_CHECKING:
    from edgesplit_partitioner.presentation.explain import CutChange, CutSummary, Explanation, LayerMove, LimitCost

MAX_MOVES = 3
MIN_SHOWN_S = 5e-5
"""Shorter times would be shown as 0.0 ms and are left out."""
PARTS = ("device", "encode", "link", "decode", "remote")


def print_reasons(reasons: Explanation) -> None:
    """Print all reasons on standard output."""
    out = console()
    for line in sentences(reasons):
        why, question, rest = line.partition("? ")
        out.print(bold_head(why + question, rest) if question else line)
    moves = [*reasons.inward[:MAX_MOVES], *reasons.outward[:MAX_MOVES]]
    if moves:
        parts = [part for part in PARTS if any(abs(move.split.get(part, 0.0)) >= MIN_SHOWN_S for move in moves)]
        forbidden = not all(move.allowed for move in moves)
        columns = ("layer", "moved to", ">more", *(f">{part}\nms" for part in parts), *(("",) if forbidden else ()))
        rows = [_move_row(reasons, move, parts, forbidden) for move in moves]
        out.print(table(columns, rows, title="one layer elsewhere"))
    if reasons.changes:
        rows = [(_condition_text(change), cut_text(reasons.tiers, change.to)) for change in reasons.changes]
        out.print(table(("the choice changes", "to"), rows, title="all else as planned"))


def sentences(reasons: Explanation) -> Iterator[str]:
    """Why this cut, what the next best is, and which limits bind."""
    tiers, best = reasons.tiers, reasons.best
    parts = [(f"{part} {ms(best.split[part])}") for part in PARTS if best.split.get(part, 0.0) >= MIN_SHOWN_S]
    total = f": {' + '.join(parts)}" if len(parts) > 1 else ""
    value = (
        f" ({objective_text(reasons.objective)} {value_text(reasons, best.value)})"
        if reasons.objective != "latency"
        else ""
    )
    duration = f"{ms(best.seconds)} ms{value}{total}"
    sent = f"with {format_size(best.bytes)} over the link{'s' if len(tiers) > 2 else ''}, answers included"
    yield f"Why {cut_text(tiers, best)}? It takes {duration}, {sent if best.bytes else 'and sends nothing'}."
    if reasons.changed is not None:
        yield f"Its codecs change answers: {reasons.changed.text}."
    yield from _baselines(reasons)
    if reasons.next_best is not None:
        more = reasons.next_best.value - best.value
        caveat = "" if reasons.next_exact else " Not every other cut was tried."
        yield (
            f"Next best is {cut_text(tiers, reasons.next_best)}: {value_text(reasons, reasons.next_best.value)}, "
            f"{difference_text(reasons, more)}{_relative_text(more, best.value)}.{caveat}"
        )
    for bind in reasons.limits:
        yield _bind_text(reasons, bind)
    if not reasons.limits:
        yield "No limit was set."


def _baselines(reasons: Explanation) -> Iterator[str]:
    named = (("All on the device", reasons.all_local), (f"All on {' or '.join(reasons.tiers[1:])}", reasons.all_remote))
    parts = [
        f"{name} {'takes ' + value_text(reasons, value) if value is not None else 'is not possible'}"
        for name, value in named
    ]
    yield f"{parts[0]}; {parts[1][0].lower()}{parts[1][1:]}."


def _bind_text(reasons: Explanation, bind: LimitCost) -> str:
    limit = to_options(bind.limit)
    if not bind.binds:
        return f"The limit {limit} does not bind: the plan would be as good without it."
    return (
        f"The limit {limit} binds: without it {cut_text(reasons.tiers, bind.without)} would take "
        f"{value_text(reasons, bind.without.value)}, so it costs"
        f" {difference_text(reasons, bind.costs).removeprefix('+')}"
        f"{_relative_text(bind.costs, bind.without.value)}."
    )


def cut_text(tiers: Sequence[str], choice: CutSummary) -> str:
    """A cut in a few words, by the last layer on each tier."""
    full = [tier for tier in tiers if choice.cut.get(tier)]
    if len(full) == 1:
        return f"all on {'the device' if full[0] == tiers[0] else full[0]}"
    if len(tiers) == 2:
        return f"the cut after {choice.last[tiers[0]]}"
    return ", ".join(
        f"{tier} up to {choice.last[tier]}" if tier in choice.last and tier != full[-1] else f"{tier} the rest"
        for tier in full
    )


def value_text(reasons: Explanation, value: float) -> str:
    """A value of the objective with its unit."""
    return f"{ms(value)} ms" if reasons.unit == "s" else f"{value:.4g} {reasons.unit}".strip()


def objective_text(objective: str) -> str:
    """The objective's name as displayed."""
    return {"latency_p95": "p95", "throughput": "slowest stage"}.get(objective, objective)


def difference_text(reasons: Explanation, value: float) -> str:
    """A difference of two values of the objective, with sign and unit."""
    return f"{value * 1000:+.1f} ms" if reasons.unit == "s" else f"{value:+.4g} {reasons.unit}".strip()


def _relative_text(more: float, of: float) -> str:
    return f" ({more / of:+.0%})" if of else ""


def _move_row(reasons: Explanation, move: LayerMove, parts: Sequence[str], noted: bool) -> tuple[str, ...]:
    split = (f"{move.split.get(part, 0.0) * 1000:+.1f}" for part in parts)
    note = "" if move.allowed else "forbidden"
    return (move.layer, move.target, difference_text(reasons, move.more), *split, *((note,) if noted else ()))


def _condition_text(change: CutChange) -> str:
    """A condition such as `uplink below 2.3 Mbit/s`."""
    side = "above" if change.rises else "below"
    if change.subject == "uplink":
        return f"uplink {side} {rate(change.at)}"
    if change.subject == "round trip":
        return f"round trip {side} {ms(change.at)} ms"
    return f"{change.subject} {side} {change.at:.3g}x"
