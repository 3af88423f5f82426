"""The answer rule: which part of a model's outputs is its answer, and so when the answers of two models differ.

class[:OUTPUT]            the most likely class of one output
boxes:LAYOUT[:THRESHOLD]  the boxes of a detector whose score is at least THRESHOLD (0.5)
close:TOLERANCE[:OUTPUT,…] all outputs, or those named, to a part TOLERANCE of their largest absolute value
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from edgesplit.answers.box_layouts import LAYOUTS, box_outputs
from edgesplit.errors import UsageError
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.release.manifest import TensorSpec

AnswerKind = Literal["class", "boxes", "close"]
DEFAULT_THRESHOLD = 0.5
"""Least score of a box, where none is given."""
MOST_LABELS = 100_000
"""Classes that a map of labels may have."""
NUMBERS = ("FP16", "FP32", "FP64", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
"""Data types of outputs that can be compared."""


class AnswerRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What of a model's outputs is its answer."""

    kind: AnswerKind
    outputs: tuple[str, ...]
    """`class`: the output with a number for each class. `boxes`: the outputs in the layout's order. `close`: those that
    are compared."""
    layout: str = ""
    """`boxes`: how the outputs describe boxes, one of `LAYOUTS`."""
    threshold: float = 0.0
    """`boxes`: least score of a box that counts, between 0 and 1."""
    tolerance: float = 0.0
    """`close`: allowed difference, as a part of the output's largest absolute value."""
    labels: tuple[int, ...] = ()
    """Label of each class index of this model, by which it is compared with others; empty: the index itself. A class
    with a negative label is never an answer (the background of a network with 1,001 classes)."""

    def __post_init__(self) -> None:
        """ValueError, which msgspec reports as a field that is wrong, where the fields do not belong together."""
        if not self.outputs:
            raise ValueError("an answer rule names the outputs that it reads")
        if self.kind == "boxes" and self.layout not in LAYOUTS:
            raise ValueError(f"layout {self.layout[:40]!r} is none of {', '.join(LAYOUTS)}")
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"a threshold of {self.threshold} is not between 0 and 1")
        if not 0.0 <= self.tolerance < math.inf:
            raise ValueError(f"a tolerance of {self.tolerance} is not 0 or more")
        if len(self.labels) > MOST_LABELS:
            raise ValueError(f"{len(self.labels)} labels, at most {MOST_LABELS}")

    def label_of(self, index: int) -> int:
        """Label of a class index; UsageError where the map does not have it."""
        if not self.labels:
            return index
        if not 0 <= index < len(self.labels):
            raise UsageError(f"the map of labels has {len(self.labels)} classes, and the model answered class {index}")
        return self.labels[index]

    def to_text(self) -> str:
        """The rule as `parse_answer_rule` reads it; of `close` for a model that has no other outputs."""
        if self.kind == "class":
            return f"class:{self.outputs[0]}"
        if self.kind == "boxes":
            return f"boxes:{self.layout}:{self.threshold:.12g}"
        return f"close:{self.tolerance:.12g}"


def parse_answer_rule(text: str, outputs: Sequence[TensorSpec]) -> AnswerRule:
    """Parse a rule (grammar in the module's docstring) for a model with these outputs; UsageError says what fits."""
    kind, _, rest = text.strip().partition(":")
    if kind == "class":
        return _class_rule(rest, outputs)
    if kind == "boxes":
        layout, least = _layout_and_threshold(rest, text)
        return AnswerRule("boxes", box_outputs(layout, outputs), layout=layout, threshold=least)
    if kind == "close":
        return _close_rule(rest, text, outputs)
    raise UsageError(
        f"answer {text[:80]!r}: give class, class:OUTPUT, boxes:LAYOUT[:THRESHOLD] ({', '.join(LAYOUTS)}) or close:0.01"
    )


def rule_of_boxes(text: str, outputs: Sequence[str], labels: Sequence[int] = ()) -> AnswerRule:
    """The rule `boxes:LAYOUT[:THRESHOLD]` for outputs that are named in the layout's order already; UsageError where it
    is another rule, or the layout is unknown."""
    kind, _, rest = text.partition(":")
    layout, least = _layout_and_threshold(rest, text)
    if kind != "boxes" or layout not in LAYOUTS or not outputs:
        raise UsageError(f"answer {text[:80]!r}: no boxes in a layout that is known here ({', '.join(LAYOUTS)})")
    return AnswerRule("boxes", tuple(outputs), layout=layout, threshold=least, labels=tuple(labels))


def infer_answer_rule(outputs: Sequence[TensorSpec]) -> AnswerRule | None:
    """The rule of a classifier: one output, all of whose dimensions but one are 1 (or a batch of -1), with at least two
    classes. None for any other model: what its answer is must be said."""
    if len(outputs) != 1 or not _has_classes(outputs[0]):
        return None
    return AnswerRule("class", (outputs[0].name,))


def _layout_and_threshold(rest: str, text: str) -> tuple[str, float]:
    layout, _, threshold = rest.partition(":")
    least = _number(threshold, text) if threshold else DEFAULT_THRESHOLD
    if not 0.0 <= least <= 1.0:
        raise UsageError(f"answer {text[:80]!r}: the least score of a box is between 0 and 1, as in boxes:yolox:0.5")
    return layout, least


def _close_rule(rest: str, text: str, outputs: Sequence[TensorSpec]) -> AnswerRule:
    part, _, named = rest.partition(":")
    names = tuple(name.strip() for name in named.split(",")) if named else tuple(spec.name for spec in outputs)
    of_model = {spec.name: spec for spec in outputs}
    if unknown := [name for name in names if name not in of_model]:
        raise UsageError(f"answer {text[:80]!r}: no output {unknown[0]!r}, only {', '.join(of_model)}")
    if not names or any(of_model[name].datatype not in NUMBERS for name in names):
        raise UsageError(f"answer {text[:80]!r}: outputs that are not numbers have no distance")
    tolerance = _number(part, text)
    if tolerance < 0.0:
        raise UsageError(f"answer {text[:80]!r}: a tolerance is 0 or more, as in close:0.01")
    return AnswerRule("close", names, tolerance=tolerance)


def _class_rule(name: str, outputs: Sequence[TensorSpec]) -> AnswerRule:
    fitting = [spec.name for spec in outputs if _has_classes(spec)]
    if name in fitting or (not name and len(fitting) == 1):
        return AnswerRule("class", (name or fitting[0],))
    given = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in outputs)
    if not fitting:
        raise UsageError(f"no output has one number for each class (the model's: {given}): give boxes:… or close:0.01")
    wrong = f"output {name!r} has not one number for each class" if name else "several outputs may be the classes"
    raise UsageError(f"{wrong}: give {' or '.join(f'class:{output}' for output in fitting)}")


def _has_classes(spec: TensorSpec) -> bool:
    """Whether the tensor can have one number for each of at least two classes."""
    lengths = [length for length in (spec.shape[1:] if spec.shape[:1] == (-1,) else spec.shape) if length != 1]
    return spec.datatype in NUMBERS and len(lengths) == 1 and lengths[0] >= 2


def _number(part: str, text: str) -> float:
    try:
        number = float(part)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"answer {text[:80]!r}: {part[:40]!r} is not a number, as in close:0.01 or boxes:yolox:0.5")
    return number


warm_up_structs(__name__)
