"""What an answer means by its model's output kind, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from edgesplit.client.answer import Answer
from edgesplit.lazy_import import np
from edgesplit.output_kind import OutputKind
from edgesplit.terminal_text import printable

MOST_LINES = 20
"""Boxes that are printed, at most."""


def reading_lines(answer: Answer) -> list[str]:
    """Labels, boxes, the share of a mask's classes, or an embedding's length, a line each; empty where the model has no
    output kind."""
    kind = answer.kind
    if kind is None:
        return []
    if kind.kind == "labels":
        return [_clean(", ".join(map(str, answer.labels)))]
    if kind.kind == "boxes":
        boxes = answer.boxes
        more = [f"… and {len(boxes) - MOST_LINES} more"] if len(boxes) > MOST_LINES else []
        return [*(_clean(str(box)) for box in boxes[:MOST_LINES]), *more] or [f"no box of {kind.threshold:g} or more"]
    if kind.kind == "mask":
        shares = ", ".join(f"{name} {share:.0%}" for name, share in _shares(answer, kind).items())
        height, width = answer.mask.shape
        return [_clean(f"mask {width}x{height}: {shares}")]
    return [f"embedding of {len(answer.embedding)} numbers"]


def reading_json(answer: Answer) -> dict[str, Any]:
    """The same for programs: `labels`, `boxes`, the shares of a `mask`, or the `embedding`."""
    kind = answer.kind
    if kind is None:
        return {}
    if kind.kind == "mask":
        return {"mask": _shares(answer, kind)}
    if kind.kind == "embedding":
        return {"embedding": answer.embedding.tolist()}
    found = answer.labels if kind.kind == "labels" else answer.boxes
    return {kind.kind: [printable(asdict(each)) for each in found]}


def _shares(answer: Answer, kind: OutputKind) -> dict[str, float]:
    """Share of a mask's pixels by the name of their class, the largest first."""
    classes, counts = np.unique(answer.mask, return_counts=True)
    order = np.argsort(-counts)
    return {kind.name_of(int(classes[at])): float(counts[at] / counts.sum()) for at in order}


def _clean(text: str) -> str:
    return str(printable(text))
