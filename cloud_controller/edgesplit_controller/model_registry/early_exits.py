"""What a model answers to samples by an early exit and by its final output, from which the exit's threshold is fixed.

Both are outputs of one run of the whole model. Labels are not needed: the whole model's answer stands for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from edgesplit.answers.answer_rule import AnswerRule, infer_answer_rule
from edgesplit.answers.comparison import predicted_label
from edgesplit.answers.score import probabilities
from edgesplit.cascade import EXIT, WHOLE
from edgesplit.errors import UsageError
from edgesplit.lazy_import import np
from edgesplit.release.manifest import TensorSpec
from edgesplit.runtime import Tensors
from edgesplit_controller.job_progress import report_step
from edgesplit_controller.model_registry.family_answers import output_spec, scores_by_kind
from edgesplit_controller.model_registry.golden import model_inputs, run_whole
from edgesplit_controller.model_registry.registry import LoadedModel
from edgesplit_partitioner.planner.cascade_calibration import FamilyAnswers, VariantAnswers
from edgesplit_partitioner.planner.early_exit import check_exit

SAMPLES_AT_A_TIME = 256
"""Samples that are in memory and on disk at once."""


def answers_at_exit(loaded: LoadedModel, exit_output: str, samples: Sequence[bytes | Tensors]) -> FamilyAnswers:
    """Heavy. The model's answers to the samples, those of `EXIT` and of `WHOLE`. UsageError where `exit_output` is no
    early exit of the model, or its values mean something else than those of the final output."""
    final = check_exit(loaded.graph.layers, loaded.graph.outputs, exit_output)
    rule, exit_rule = _rules(output_spec(loaded, final), output_spec(loaded, exit_output))
    outputs: list[Tensors] = []
    for start in range(0, len(samples), SAMPLES_AT_A_TIME):
        report_step(f"comparing {exit_output} with {final}: {start} of {len(samples)} samples")
        some = [samples[at] for at in range(start, min(start + SAMPLES_AT_A_TIME, len(samples)))]
        whole = run_whole(loaded.prepared, [model_inputs(loaded, sample) for sample in some])
        outputs += [{name: answer[name] for name in (exit_output, final)} for answer in whole]
    if _all_probabilities(exit_rule, outputs) != _all_probabilities(rule, outputs):
        raise UsageError(
            f"one of {exit_output} and {final} gives probabilities and the other one does not, so an application could"
            " not read an early answer: end both with the same layer"
        )
    answers = {EXIT: _answers(exit_rule, outputs), WHOLE: _answers(rule, outputs)}
    return FamilyAnswers(answer=rule.to_text(), truth=answers[WHOLE].labels, variants=answers)


def _answers(rule: AnswerRule, outputs: Sequence[Tensors]) -> VariantAnswers:
    scores = {kind: tuple(values) for kind, values in scores_by_kind(rule, outputs).items()}
    return VariantAnswers(labels=tuple(predicted_label(rule, out) for out in outputs), scores=scores)


def _rules(final: TensorSpec, early: TensorSpec) -> tuple[AnswerRule, AnswerRule]:
    """What the answers of both outputs are. UsageError where they are no classes, or not the same ones."""
    rules = [infer_answer_rule([spec]) for spec in (final, early)]
    if rules[0] is None or rules[1] is None:
        wrong = final if rules[0] is None else early
        raise UsageError(
            f"{wrong.name} {list(wrong.shape)} has not one number for each class: early exits are of classifiers"
        )
    if (_count(early), early.datatype) != (_count(final), final.datatype):
        raise UsageError(
            f"{early.name} has {_count(early)} classes of {early.datatype} and {final.name} {_count(final)} of"
            f" {final.datatype}: an early answer stands for the whole one, so both must have the same"
        )
    return rules[0], rules[1]


def _count(spec: TensorSpec) -> int:
    return math.prod(max(1, length) for length in spec.shape)


def _all_probabilities(rule: AnswerRule, outputs: Sequence[Tensors]) -> bool:
    """Whether all outputs are probabilities."""
    name = rule.outputs[0]
    likely = ((probabilities(rule, output), np.asarray(output[name]).reshape(-1)) for output in outputs)
    return all(
        given is None or values.dtype.kind in "iu" or np.allclose(given, values, rtol=1e-3, atol=1e-6)
        for given, values in likely
    )
