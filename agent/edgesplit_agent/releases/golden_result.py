"""What the golden inputs showed of a release on this device, beyond that its outputs are the expected ones: how many
answers are right, and how many are those of the model that it stands in for. Counts only: rollout gates judge them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgesplit.answers.answer_rule import infer_answer_rule
from edgesplit.answers.comparison import predicted_label
from edgesplit.release.manifest import GoldenExample, TensorSpec
from edgesplit.runtime import Tensor


@dataclass(frozen=True, slots=True)
class GoldenResult:
    """The golden inputs gave the expected outputs; of those that say what the answer should be, how many did."""

    labelled: int = 0
    """Golden inputs whose class is known."""
    right: int = 0
    compared: int = 0
    """Golden inputs with an answer to compare with."""
    agreeing: int = 0


def golden_result(
    goldens: Sequence[GoldenExample], answers: Sequence[Mapping[str, Tensor]], outputs: Sequence[TensorSpec]
) -> GoldenResult:
    """Count the answers of a release with these `outputs` to its golden inputs. Nothing is counted where an answer is
    no class."""
    rule = infer_answer_rule(outputs)
    if rule is None:
        return GoldenResult()
    given = [(golden, predicted_label(rule, answer)) for golden, answer in zip(goldens, answers, strict=True)]
    labelled = [label == golden.label for golden, label in given if isinstance(golden.label, int)]
    compared = [label == golden.answer for golden, label in given if isinstance(golden.answer, int)]
    return GoldenResult(len(labelled), sum(labelled), len(compared), sum(compared))
