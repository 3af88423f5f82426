"""The text of an output kind, as it is typed, and the kind that a model's outputs look like.

labels[:OUTPUT]                        the most likely classes
boxes:LAYOUT[:THRESHOLD[:OVERLAP]]     boxes with a score of at least THRESHOLD (0.35), less those that overlap (0.5)
mask[:OUTPUT]                          a class for each pixel
embedding[:OUTPUT]                     a vector of length 1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from edgesplit.answers.answer_rule import NUMBERS, infer_answer_rule, parse_answer_rule
from edgesplit.answers.box_layouts import LAYOUTS, box_outputs
from edgesplit.errors import UsageError
from edgesplit.output_kind import DEFAULT_OVERLAP, OutputKind
from edgesplit.release.manifest import TensorSpec

DEFAULT_SCORE = 0.35
"""Least score of a box, where none is given: boxes are shown to a person, who sees what is doubtful."""
LEAST_MASK_SIDE = 16
"""Rows and columns of a mask, at least: smaller planes are features as often."""
PROPOSED_LAYOUTS = ("ssd", "yolox", "yolov8", "scores+boxes")


def parse_output_kind(text: str, outputs: Sequence[TensorSpec], names: Sequence[str] = ()) -> OutputKind:
    """Parse a kind (grammar in the module's docstring) for a model with these outputs; UsageError says what fits."""
    kind, _, rest = text.strip().partition(":")
    try:
        if kind == "labels":
            rule = parse_answer_rule(f"class:{rest}" if rest else "class", outputs)
            return OutputKind(kind="labels", outputs=rule.outputs, names=tuple(names))
        if kind == "boxes":
            return _boxes(rest, outputs, names, text)
        if kind == "mask":
            return OutputKind(kind="mask", outputs=(_chosen(rest, outputs, is_mask, "mask"),), names=tuple(names))
        if kind == "embedding":
            return OutputKind(kind="embedding", outputs=(_chosen(rest, outputs, _is_vector, "embedding"),))
    except ValueError as error:
        raise UsageError(f"output {text[:80]!r}: {error}") from error
    raise UsageError(
        f"output {text[:80]!r}: give labels, boxes:LAYOUT[:THRESHOLD[:OVERLAP]] ({', '.join(LAYOUTS)}), mask or"
        " embedding, each with :OUTPUT where several fit"
    )


def _boxes(rest: str, outputs: Sequence[TensorSpec], names: Sequence[str], text: str) -> OutputKind:
    layout, *numbers = rest.split(":")
    if len(numbers) > 2:
        raise UsageError(f"output {text[:80]!r}: two numbers at most, as in boxes:yolox:0.35:0.5")
    try:
        threshold = float(numbers[0]) if numbers else DEFAULT_SCORE
        overlap = float(numbers[1]) if len(numbers) > 1 else DEFAULT_OVERLAP
    except ValueError as error:
        raise UsageError(f"output {text[:80]!r}: not a number, as in boxes:yolox:0.35:0.5") from error
    chosen = box_outputs(layout, outputs)
    return OutputKind(
        kind="boxes", outputs=chosen, layout=layout, threshold=threshold, overlap=overlap, names=tuple(names)
    )


def _chosen(name: str, outputs: Sequence[TensorSpec], fits: Callable[[TensorSpec], bool], what: str) -> str:
    """The output of this name, or the only one that fits."""
    fitting = [spec.name for spec in outputs if fits(spec)]
    if name in fitting or (not name and len(fitting) == 1):
        return name or fitting[0]
    given = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in outputs)
    if not fitting:
        raise UsageError(f"no output can be {'an' if what == 'embedding' else 'a'} {what} (the model's: {given})")
    choice = " or ".join(f"{what}:{each}" for each in fitting)
    raise UsageError(f"several outputs can be it, or {name!r} cannot: give {choice}")


def is_mask(spec: TensorSpec) -> bool:
    """Whether a tensor can be a class for each pixel: [1, C, H, W] or [1, H, W, C] scores, or [1, H, W] numbers."""
    if spec.datatype not in NUMBERS or spec.shape[:1] != (1,) or len(spec.shape) not in (3, 4):
        return False
    sides = spec.shape[1:] if len(spec.shape) == 3 or not planes_first(spec.shape) else spec.shape[2:]
    return min(sides[:2]) >= LEAST_MASK_SIDE


def planes_first(shape: Sequence[int]) -> bool:
    """Whether the classes of a mask of four dimensions come before its rows: there are fewer classes than columns."""
    return shape[1] <= shape[3]


def _is_vector(spec: TensorSpec) -> bool:
    return spec.datatype in ("FP32", "FP16") and math.prod(spec.shape) == max(spec.shape, default=0) >= 2


def likely_kind(outputs: Sequence[TensorSpec], *, is_picture: bool) -> str:
    """The text of the kind that the outputs look like, without their names; empty where nothing is known of it.

    A vector of an output called after an embedding is one; others with one number per class are labels.
    """
    for layout in PROPOSED_LAYOUTS if is_picture else ():
        if fits_layout(layout, outputs):
            return f"boxes:{layout}"
    if len(outputs) == 1 and "embed" in outputs[0].name.lower() and _is_vector(outputs[0]):
        return "embedding"
    if infer_answer_rule(outputs) is not None:
        return "labels"
    masks = [spec for spec in outputs if is_mask(spec)]
    return "mask" if is_picture and len(masks) == 1 == len(outputs) else ""


def fits_layout(layout: str, outputs: Sequence[TensorSpec]) -> bool:
    """Whether the outputs are most likely boxes of that layout. YOLO's two are each other's transpose, and numbers of
    classes may pass for numbers of cells: there are more cells than values of a cell."""
    try:
        names = box_outputs(layout, outputs)
    except UsageError:
        return False
    _, second, third = next(spec.shape for spec in outputs if spec.name == names[0]) if "yolo" in layout else (1, 0, 0)
    return second >= third if layout == "yolox" else third >= second
