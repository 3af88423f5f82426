"""Rows of a family's table: a variant's rows under its name, and which rows can never be chosen.

A row is left out where another one, of a variant at least as accurate, exceeds it in no figure. Every objective grows
with every figure, so it can then be the best at no floor of accuracy, link, server load or slow-down.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import msgspec

from edgesplit.plan import Row, variant_name


def undominated(rows: Sequence[Row], needed: Callable[[Row], bool] = lambda row: False) -> tuple[Row, ...]:
    """The rows without those that another, at least as accurate, exceeds in no figure; of equals the first stays. Those
    that are `needed` stay in any case."""
    figures = [_figures(row) for row in rows]

    def is_dominated(place: int) -> bool:
        for other, theirs in enumerate(figures):
            if other == place or (rows[other].accuracy or 0.0) < (rows[place].accuracy or 0.0):
                continue
            # A link that only one of them crosses costs the other nothing.
            pairs = itertools.zip_longest(theirs, figures[place], fillvalue=0.0)
            if all(their <= own for their, own in pairs):
                equal = theirs == figures[place] and rows[other].accuracy == rows[place].accuracy
                if not equal or other < place:
                    return True
        return False

    return tuple(row for place, row in enumerate(rows) if needed(row) or not is_dominated(place))


def _figures(row: Row) -> tuple[float, ...]:
    """All that any objective counts of a row, none of which lowers it: work by place, bytes by link, joules, and which
    links are crossed. Joules that are not known are the same for all."""
    further_s = sum(hop.encode_s + hop.decode_s + hop.seconds for hop in row.hops)
    first = (
        row.device_s, row.encode_s, row.device_joules or 0.0, float(not row.is_local), row.up_bytes, row.down_bytes,
        row.decode_s + row.remote_s, row.decode_s + row.remote_s - further_s,
    )  # fmt: skip
    hops = [(1.0, hop.up_bytes, hop.down_bytes, hop.encode_s, hop.decode_s + hop.seconds) for hop in row.hops]
    return (*first, *itertools.chain(*hops))


def variant_row(row: Row, variant: str, accuracy: float) -> Row:
    """A variant's row as it stands in the family's table: its own names behind the variant's, and the accuracy."""

    def named(layers: Iterable[str]) -> tuple[str, ...]:
        return tuple(variant_name(variant, layer) for layer in layers)

    hops = tuple(msgspec.structs.replace(hop, remote=named(hop.remote)) for hop in row.hops)
    return msgspec.structs.replace(
        row, name=variant_name(variant, row.name), variant=variant, accuracy=accuracy,
        device=named(row.device), remote=named(row.remote), layers=named(row.layers), hops=hops,
    )  # fmt: skip
