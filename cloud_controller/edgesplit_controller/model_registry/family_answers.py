"""What the variants of a family answer to its samples: labels, scores, and which samples two variants answer
differently.

Every variant has an answer rule on its own outputs (`variant_rules`); that they mean the same is checked before
anything runs. Boxes are compared in their common form (`edgesplit.answers.detections`), in which devices give them too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from edgesplit.answers import detections
from edgesplit.answers.answer_rule import NUMBERS, AnswerRule, infer_answer_rule, parse_answer_rule
from edgesplit.answers.box_layouts import LAYOUTS
from edgesplit.answers.comparison import answers_differ, output_of, predicted_label
from edgesplit.answers.score import ScoreKind, score
from edgesplit.errors import UsageError
from edgesplit.release.manifest import TensorSpec
from edgesplit.runtime import Tensor, Tensors
from edgesplit_controller.job_progress import report_step
from edgesplit_controller.model_registry.golden import model_inputs, run_whole
from edgesplit_controller.model_registry.registry import LoadedModel
from edgesplit_partitioner.planner.cascade_calibration import (
    CLASS_SCORES,
    OUTPUT_SCORE,
    FamilyAnswers,
    VariantAnswers,
)

MOST_AT_A_TIME = 256
"""Samples whose outputs are in memory and on disk at once, at most."""
BYTES_AT_A_TIME = 128 * 2**20
"""Size of these outputs: those of a detector are large."""
VALUE_BYTES = 8
"""Size of an output's value, at most."""


class TrueBox(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that a frame shows."""

    box: tuple[float, float, float, float]
    """Left, top, right, bottom, as parts of the frame's width and height."""
    label: int


Truth = int | tuple[TrueBox, ...] | None
"""What a sample shows: a class, boxes, or nothing that is known."""
Sample = tuple["bytes | Tensors", Truth]
"""A frame or tensors, with what it shows."""
Comparable = int | Mapping[str, Tensor]
"""An answer as it is compared: a label, boxes in their common form, or the outputs."""


@dataclass(frozen=True, slots=True)
class RuledVariant:
    """A variant with what its answers are."""

    name: str
    ref: str
    """`name@version` of its model."""
    loaded: LoadedModel
    rule: AnswerRule
    """On its own outputs, with its own labels."""

    @property
    def family_outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs of a family that this variant is the first of."""
        if self.rule.kind == "boxes":
            return (detections.SPEC,)
        return tuple(output_spec(self.loaded, name) for name in self.rule.outputs)

    @property
    def family_rule(self) -> AnswerRule:
        """What an answer of such a family is, on its outputs."""
        return detections.RULE if self.rule.kind == "boxes" else msgspec.structs.replace(self.rule, labels=())

    def comparable(self, outputs: Tensors) -> Comparable:
        """An answer as it is compared."""
        if self.rule.kind == "class":
            return predicted_label(self.rule, outputs)
        if self.rule.kind == "boxes":
            return detections.to_detections(self.rule, outputs)
        return {name: output_of(outputs, name) for name in self.rule.outputs}

    def differs(self, ours: Comparable, other: RuledVariant, theirs: Comparable) -> bool:
        """Whether two answers that are no classes differ."""
        assert not isinstance(ours, int) and not isinstance(theirs, int)
        if self.rule.kind == "boxes":
            return answers_differ(detections.RULE, ours, theirs)
        return answers_differ(self.rule, ours, theirs, their_rule=other.rule)


def output_spec(loaded: LoadedModel, name: str) -> TensorSpec:
    """Specification of one of the model's tensors."""
    tensor = loaded.graph.tensors[name]
    return TensorSpec(name, tensor.datatype, tensor.shape)


def variant_rule(variant: str, loaded: LoadedModel, text: str, labels: Sequence[int]) -> AnswerRule:
    """What the variant's answers are, by the rule that was named, or by its outputs. UsageError where these leave it
    open."""
    outputs = [output_spec(loaded, name) for name in loaded.graph.outputs]
    if text:
        try:
            rule = parse_answer_rule(text, outputs)
        except UsageError as error:
            raise UsageError(f"{variant}: {error}") from error
        rule = parse_answer_rule(rule.to_text(), outputs) if rule.kind == "boxes" else rule  # as devices will read it
    else:
        inferred = infer_answer_rule([spec for spec in outputs if _count(spec) > 1])
        if inferred is None:
            raise UsageError(
                f"{variant}: its outputs ({', '.join(spec.name for spec in outputs)}) are not one classification: say"
                " when two answers are the same, by the answer rule class:OUTPUT, boxes:LAYOUT or close:0.01 (layouts:"
                f" {', '.join(LAYOUTS)})"
            )
        rule = inferred
    if labels and rule.kind == "close":
        raise UsageError(f"{variant}: answers by {rule.to_text()} have no classes that labels could name")
    return msgspec.structs.replace(rule, labels=tuple(labels))


def check_same_meaning(variants: Sequence[RuledVariant]) -> None:
    """UsageError, which names both, where the answers of two variants may mean different things."""
    first = variants[0]
    for other in variants[1:]:
        if other.rule.kind != first.rule.kind:
            raise UsageError(
                f"the outputs of {first.name} and {other.name} mean different things: {first.rule.to_text()} and"
                f" {other.rule.to_text()}"
            )
    if first.rule.kind == "close":
        _check_shapes(variants)
        return
    count = _classes_of(first)
    for one in variants:
        labels, classes = one.rule.labels, _classes_of(one)
        if labels and ((classes and len(labels) != classes) or (count and max(labels) >= count)):
            raise UsageError(
                f"{one.name} has {classes or 'unnamed'} classes, and {len(labels)} labels were given, each to be one of"
                f" the {count} of {first.name}"
            )
        if not labels and classes and count and classes != count:
            raise UsageError(
                f"the outputs of {first.name} and {one.name} mean different things: {count} and {classes} classes. Give"
                f" the label of each class of {one.name}, -1 for none"
            )


def _check_shapes(variants: Sequence[RuledVariant]) -> None:
    first = variants[0]
    for one in variants[1:]:
        ours, theirs = ([(spec.datatype, spec.shape) for spec in each.family_outputs] for each in (first, one))
        if ours != theirs:
            raise UsageError(
                f"the outputs of {first.name} and {one.name} mean different things: {_described(first)} and"
                f" {_described(one)}; values can be close only where there are as many"
            )


def _described(variant: RuledVariant) -> str:
    return ", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in variant.family_outputs)


def check_truth(kind: str, truth: Sequence[Truth]) -> bool:
    """Whether the samples have labels. UsageError where only some have, or they are of another kind than answers."""
    known = [one for one in truth if one is not None]
    if known and kind == "close":
        raise UsageError("answers by close:… are not compared with labels: leave these out")
    wanted = int if kind == "class" else tuple
    if any(not isinstance(one, wanted) for one in known):
        raise UsageError(f"the samples' labels are no {'classes' if kind == 'class' else 'boxes'}, as the answers are")
    if known and len(known) < len(truth):
        raise UsageError(f"{len(truth) - len(known)} of {len(truth)} samples have no label: give all or none")
    return bool(known)


def family_answers(variants: Sequence[RuledVariant], samples: Sequence[Sample], reference: str) -> FamilyAnswers:
    """Heavy. The answers of all variants to the samples; by those of `reference` where the samples have no labels, ""
    where they have."""
    measured = [_Measured(variant) for variant in variants]
    is_class = variants[0].rule.kind == "class"
    differing = {one.name: {other.name: list[int]() for other in variants[at + 1 :]} for at, one in enumerate(variants)}
    for numbers in _batches(variants, len(samples)):
        answers = [_answer(one, samples, numbers) for one in measured]
        if is_class:
            continue
        for (one, ours), (other, theirs) in itertools.combinations(zip(variants, answers, strict=True), 2):
            compared = zip(numbers, ours, theirs, strict=True)
            differing[one.name][other.name] += [
                number for number, mine, yours in compared if one.differs(mine, other, yours)
            ]  # fmt: skip
        for judged, given in zip(() if reference else measured, () if reference else answers, strict=True):
            shown = (samples[number][1] for number in numbers)
            judged.right += [_is_true(answer, truth) for answer, truth in zip(given, shown, strict=True)]
    if is_class:
        labels = next((each.labels for each in measured if each.variant.name == reference), None)
        truth = [label for _, label in samples if isinstance(label, int)] if labels is None else labels
    else:
        truth = []
    found = FamilyAnswers(
        answer=variants[0].family_rule.to_text(), truth=tuple(truth), reference=reference,
        variants={each.variant.name: each.to_answers() for each in measured},
        differing={} if is_class else {
            name: {other: tuple(indices) for other, indices in pairs.items()} for name, pairs in differing.items()
        },
    )  # fmt: skip
    return _compared_with(found, len(samples)) if reference and not is_class else found


def _compared_with(answers: FamilyAnswers, samples: int) -> FamilyAnswers:
    """The answers, of which those are right that the reference gives too."""
    variants = {}
    for name, given in answers.variants.items():
        pairs = (answers.differing[name].get(answers.reference), answers.differing[answers.reference].get(name))
        others = set(next((pair for pair in pairs if pair is not None), ()))
        variants[name] = msgspec.structs.replace(given, right=tuple(number not in others for number in range(samples)))
    return msgspec.structs.replace(answers, variants=variants)


@dataclass
class _Measured:
    """A variant's answers, as far as they are known."""

    variant: RuledVariant
    labels: list[int] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    scores: dict[str, list[float | None]] = field(default_factory=dict)

    def to_answers(self) -> VariantAnswers:
        scores = {kind: tuple(values) for kind, values in self.scores.items()}
        return VariantAnswers(labels=tuple(self.labels), right=tuple(self.right), scores=scores)


def _answer(measured: _Measured, samples: Sequence[Sample], numbers: range) -> list[Comparable]:
    """Run a variant on the samples with these numbers; keep labels and scores, and return its answers."""
    variant = measured.variant
    report_step(f"running {variant.ref} on samples {numbers.start + 1} to {numbers.stop} of {len(samples)}")
    inputs = [model_inputs(variant.loaded, samples[number][0]) for number in numbers]
    outputs = run_whole(variant.loaded.prepared, inputs)
    for kind, values in scores_by_kind(variant.rule, outputs, score_outputs(variant)).items():
        measured.scores.setdefault(kind, []).extend(values)
    answers = [variant.comparable(one) for one in outputs]
    if variant.rule.kind == "class":
        measured.labels += [label for label in answers if isinstance(label, int)]
    return answers


def score_outputs(variant: RuledVariant) -> tuple[str, ...]:
    """The model's outputs of one number that are no part of the answer: each may tell how sure it is."""
    others = [output_spec(variant.loaded, name) for name in variant.loaded.graph.outputs]
    return tuple(
        spec.name
        for spec in others
        if spec.name not in variant.rule.outputs and spec.datatype in NUMBERS and _count(spec) == 1
    )


def scores_by_kind(
    rule: AnswerRule, outputs: Sequence[Tensors], named: Sequence[str] = ()
) -> dict[str, list[float | None]]:
    """Every score that a rule's answers have, of each of these; and the outputs that are one."""
    own: Sequence[ScoreKind] = {"class": CLASS_SCORES, "boxes": ("boxes",)}.get(rule.kind, ())
    found = {str(kind): [_finite(score(kind, rule, one)) for one in outputs] for kind in own}
    return found | {
        OUTPUT_SCORE + name: [_finite(score("output", rule, one, name)) for one in outputs] for name in named
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _is_true(answer: Comparable, truth: Truth) -> bool:
    """Whether boxes are those that the sample shows."""
    assert isinstance(truth, tuple) and not isinstance(answer, int)
    shown = detections.true_detections([one.box for one in truth], [one.label for one in truth])
    return not answers_differ(detections.RULE, shown, answer)


def _batches(variants: Sequence[RuledVariant], samples: int) -> Iterator[range]:
    """Samples by number, as many at a time as memory allows."""
    most = max(
        sum(VALUE_BYTES * _count(output_spec(one.loaded, name)) for name in one.loaded.graph.outputs)
        for one in variants
    )
    size = min(MOST_AT_A_TIME, max(1, BYTES_AT_A_TIME // most))
    return (range(start, min(start + size, samples)) for start in range(0, samples, size))


def _classes_of(variant: RuledVariant) -> int:
    """Number of classes; 0 where its outputs do not say."""
    specs = [output_spec(variant.loaded, name) for name in variant.rule.outputs]
    return _count(specs[0]) if variant.rule.kind == "class" else LAYOUTS[variant.rule.layout].classes(specs)


def _count(spec: TensorSpec) -> int:
    """Number of values; a free dimension counts as one."""
    return math.prod(max(1, length) for length in spec.shape)
