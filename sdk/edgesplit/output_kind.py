"""`OutputKind`: what a model's outputs are to a person: labels, boxes, a mask or an embedding.

It is declared when the model is pushed and travels with its releases. The outputs themselves stay as the model gives
them, bit for bit; `edgesplit.answers.reading` makes labels and boxes of them where they are asked for.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from edgesplit.msgspec_warmup import warm_up_structs

Kind = Literal["labels", "boxes", "mask", "embedding"]
DEFAULT_OVERLAP = 0.5
"""Intersection over union from which two boxes of one class are one thing."""
MOST_NAMES = 10_000
Name = Annotated[str, Meta(max_length=200)]


class OutputKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a model's outputs are, and the numbers by which they are read."""

    kind: Kind
    outputs: Annotated[tuple[str, ...], Meta(min_length=1, max_length=8)]
    """The outputs that are read, for `boxes` in the order of the layout."""
    layout: str = ""
    """`boxes`: how the outputs describe boxes (`edgesplit.answers.box_layouts`)."""
    threshold: float = 0.0
    """`boxes`: least score of a box, between 0 and 1."""
    overlap: float = DEFAULT_OVERLAP
    """`boxes`: of two boxes of one class with at least this intersection over union, only the one with the higher score
    is kept."""
    names: Annotated[tuple[Name, ...], Meta(max_length=MOST_NAMES)] = ()
    """Names of the classes, by index; empty where they have none."""

    def __post_init__(self) -> None:
        """ValueError, which msgspec reports as a field that is wrong, where the fields do not belong together."""
        if (self.kind == "boxes") != bool(self.layout):
            raise ValueError("boxes, and nothing else, have a layout")
        if not 0.0 <= self.threshold <= 1.0 or not 0.0 < self.overlap <= 1.0:
            raise ValueError(f"a threshold of {self.threshold} or an overlap of {self.overlap} is not between 0 and 1")

    def name_of(self, index: int) -> str:
        """The name of a class, or its index where it has none."""
        known = self.names[index] if 0 <= index < len(self.names) else ""
        return known or str(index)

    def to_text(self) -> str:
        """The kind as it is typed, without its names."""
        if self.kind == "boxes":
            overlap = "" if self.overlap == DEFAULT_OVERLAP else f":{self.overlap:g}"
            return f"boxes:{self.layout}:{self.threshold:g}{overlap}"
        return f"{self.kind}:{self.outputs[0]}"


warm_up_structs(__name__)
