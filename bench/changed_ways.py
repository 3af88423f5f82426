"""Ways to answer under an allowance of changed answers, beside the unchanged model's own cuts: compressed variants that
pass the gate, cascades, and lossy codecs. Each kind makes a promise of its own, 90 % sure; they are not combined, and
repeating answers of still frames is not counted.

- Variants, with all layers: fp16, int8-dynamic and int8 are tested in this order, from the strictest to the laxest, and
  testing stops at the first whose bound exceeds the allowance, so that one error probability covers all of them. The
  samples are those of the half that chose nothing (`compressed`).
- Cascades: a compressed variant of the model, or where JPEG frames are given a smaller model of its task, answers
  where its margin reaches a threshold (`planner.cascade_calibration`); all pairs share one error probability.
- Codecs: those that the planner confirms under `max_changed` (`planner.changed_answers`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import digits_family
import ladder
import numpy as np
import numpy.typing as npt
from compressed import Compressed, compressor_of, file_of, kept_variants, rule_of
from digits_family import digit_outputs, digit_truth
from ladder import ladder_outputs, photograph_outputs, photographs
from ladder_costs import RUNGS
from trained import Skipped, TrainedModel, load_models

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.answers.comparison import predicted_label
from edgesplit.answers.score import UNSURE, score
from edgesplit.errors import InfeasibleLimits
from edgesplit.input_spec import parse_input_spec
from edgesplit_partitioner.bounds.binomial import trials_needed, upper_share
from edgesplit_partitioner.ir.graph import LayerGraph
from edgesplit_partitioner.ir.prepared_model import PreparedModel
from edgesplit_partitioner.model_loader import prepare_model
from edgesplit_partitioner.onnx_format.model import with_input_layer
from edgesplit_partitioner.planner.cascade_calibration import (
    CalibratedCascade,
    Candidate,
    CascadeRequest,
    FamilyAnswers,
    VariantAnswers,
    calibrate,
)

DELTA = 0.1
ORDER = ("fp16", "int8-dynamic", "int8")
"""From the strictest method to the laxest."""
SAMPLES_TO_COMPRESS: Mapping[str, int] = {
    "squeezenet_fp32": 500, "mobilenet_v1_0.25_224_float.tflite": 500, "yolox_nano": 500, "ultraface_rfb_320": 500,
    "gesture_mlp": 300, "gesture_mlp.tflite": 300, "silero_vad_16k": 300, "dtln_1": 300, "dtln_2": 300,
    "dtln_1.tflite": 300, "dtln_2.tflite": 300, "mnist_cnn": 50, "resnet8_cifar10_float.tflite": 50,
}  # fmt: skip
"""Of the float models: samples by which variants are made and judged, half of them each."""
SQUEEZENET_MEAN = np.array([104, 117, 123], np.float32)


@dataclass(frozen=True, slots=True)
class VariantModel:
    """A compressed variant that passed, or a smaller model that answers first."""

    name: str
    model: PreparedModel
    graph: LayerGraph


@dataclass(frozen=True, slots=True)
class CascadeWay:
    """A cascade that keeps its promise."""

    first: VariantModel
    calibrated: CalibratedCascade

    @property
    def escalated(self) -> float:
        """Share of the frames that the whole model answers."""
        return 1.0 - self.calibrated.choice.stay_share


@dataclass(frozen=True, slots=True)
class TaskAnswers:
    """Answers to the same labelled frames, the whole model's under the name `WHOLE`."""

    rule: AnswerRule
    truth: tuple[int, ...]
    variants: Mapping[str, VariantAnswers]
    firsts: tuple[VariantModel, ...]


WHOLE = "whole"


def passing_variants(model: TrainedModel, allowed: float) -> tuple[list[VariantModel], str]:
    """The compressed variants that pass at this allowance, and why others do not, in words."""
    if model.name not in SAMPLES_TO_COMPRESS:
        return [], "quantised or in half floats already" if model.name != "digits" else "no variant was compressed"
    found = {variant.method: variant for variant in variants_of(model.name)}
    passing = []
    for method in ORDER:
        if method not in found:
            continue
        variant = found[method]
        if variant.samples < trials_needed(allowed, DELTA):
            return passing, f"too few samples: {variant.samples} confirm"
        if upper_share(variant.changed, variant.samples, DELTA) > allowed or not variant.file:
            return passing, f"{method} changes {variant.changed} of {variant.samples}"
        passing.append(_opened(variant, model))
    return passing, ""


@cache
def variants_of(name: str) -> tuple[Compressed, ...]:
    """The model's variants by each method, made where they were not kept."""
    model = next(found for found in load_models(SAMPLES_TO_COMPRESS[name], [name], tflite=True) if _is_wanted(found))
    assert isinstance(model, TrainedModel)
    rule = rule_of(model)
    assert rule is not None, name
    return tuple(kept_variants(model, lambda: compressor_of(model, rule)))


def _is_wanted(found: TrainedModel | Skipped) -> bool:
    return isinstance(found, TrainedModel) and found.spec is None


def _opened(variant: Compressed, model: TrainedModel) -> VariantModel:
    prepared = _prepared(variant.path)
    graph = prepared.graph if model.spec is None else with_input_layer(prepared, model.spec)[0]
    return VariantModel(variant.method, prepared, graph)


@cache
def _prepared(file: Path) -> PreparedModel:
    return prepare_model(file.read_bytes(), {})


# ---- cascades -----------------------------------------------------------------------------------------------------


def cascades(model: TrainedModel, allowed: float) -> tuple[list[CascadeWay], str]:
    """The cascades that keep this allowance, and why there are none, in words."""
    answers = _answers_of(model)
    if answers is None or not answers.firsts:
        return [], "no smaller model of its task on the same input"
    request = CascadeRequest(changed=allowed)
    family = FamilyAnswers(answer=answers.rule.to_text(), truth=answers.truth, variants=dict(answers.variants))
    candidates = [Candidate(first.name, WHOLE, "margin") for first in answers.firsts]
    try:
        found = calibrate(family, candidates, request, len(candidates))
    except InfeasibleLimits as error:
        return [], str(error)
    ways = [
        CascadeWay(first, calibrated)
        for first, calibrated in zip(answers.firsts, found, strict=True)
        if calibrated.choice.threshold is not None
    ]
    return ways, "" if ways else "no frame stays in a cascade"


def whole_accuracy(model: TrainedModel) -> float | None:
    """Share of the labelled frames that the whole model answers right; None without labels or other models."""
    answers = _answers_of(model)
    if answers is None:
        return None
    return float(np.mean(np.array(answers.variants[WHOLE].labels) == np.array(answers.truth)))


def variant_accuracy(model: TrainedModel, method: str) -> float | None:
    """The same of a compressed variant."""
    answers = _answers_of(model)
    if answers is None or method not in answers.variants:
        return None
    return float(np.mean(np.array(answers.variants[method].labels) == np.array(answers.truth)))


_ANSWERS: dict[tuple[str, str], TaskAnswers | None] = {}


def _answers_of(model: TrainedModel) -> TaskAnswers | None:
    key = (model.name, model.given)
    if key not in _ANSWERS:
        _ANSWERS[key] = _find_answers(model)
    return _ANSWERS[key]


def _find_answers(model: TrainedModel) -> TaskAnswers | None:
    """The answers of the model, of its variants and of smaller models of its task; None where it has no such task."""
    if model.name == "digits":
        return _digits_answers(model)
    if model.name == "squeezenet_fp32":
        rule = AnswerRule("class", (ladder.OUTPUT,))
        smaller = ("v1_025-128", "v1_025-224", "v1_05-160")
        own: Callable[[Any], Any] = lambda file: photograph_outputs(file, 224, squeezenet_values)  # noqa: E731
    elif model.name.startswith("mobilenet_v1_") and model.model.kernels != "edgetpu":
        name = next(name for name, rung in RUNGS.items() if rung.path.name == model.name)
        rule, rung = ladder.RULE, RUNGS[name]
        smaller = tuple(other for other in ("v1_025-128", "v1_025-224", "v1_05-160") if _is_smaller(other, name))
        own = lambda file: photograph_outputs(file, rung.side, rung.values)  # noqa: E731
    else:
        return None
    variants = {WHOLE: _variant_answers(rule, own(file_of(model.name)))}
    firsts = []
    for variant in variants_of(model.name) if model.name in SAMPLES_TO_COMPRESS else ():
        if variant.file:
            variants[variant.method] = _variant_answers(rule, own(variant.path))
            if variant.method != "fp16":  # it takes as long as the whole model
                firsts.append(_opened(variant, model))
    for name in smaller if model.spec is not None else ():
        variants[name] = _variant_answers(ladder.RULE, ladder_outputs(RUNGS[name]))
        firsts.append(_smaller_model(name, model))
    return TaskAnswers(rule, tuple(label for _, label in photographs()), variants, tuple(firsts))


def _is_smaller(name: str, than: str) -> bool:
    return list(RUNGS).index(name) < list(RUNGS).index(than)


def squeezenet_values(pixels: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """SqueezeNet's input for pixels [side, side, RGB]."""
    return np.ascontiguousarray((pixels[:, :, ::-1] - SQUEEZENET_MEAN).transpose(2, 0, 1)[None])


def _digits_answers(model: TrainedModel) -> TaskAnswers:
    rule = digits_family.RULE
    variants = {WHOLE: _variant_answers(rule, digit_outputs("digits"))}
    firsts = []
    for name in ("student", "pruned"):
        variants[name] = _variant_answers(rule, digit_outputs(name))
        prepared = _prepared(digits_family.FILES[name])
        assert model.spec is not None
        firsts.append(VariantModel(name, prepared, with_input_layer(prepared, model.spec)[0]))
    return TaskAnswers(rule, digit_truth(), variants, tuple(firsts))


def _smaller_model(name: str, model: TrainedModel) -> VariantModel:
    """A model of the ladder that takes the frames of another one."""
    assert model.spec is not None
    rung = RUNGS[name]
    prepared = _prepared(rung.path)
    pixels = "mean=127.5 std=127.5" if rung.is_float else "uint8"
    spec = parse_input_spec(f"image/jpeg {model.spec.width}x{model.spec.height} nhwc {pixels}")
    return VariantModel(name, prepared, with_input_layer(prepared, spec)[0])


def _variant_answers(rule: AnswerRule, outputs: Sequence[Mapping[str, npt.NDArray[Any]]]) -> VariantAnswers:
    margins = [score("margin", rule, output) for output in outputs]
    return VariantAnswers(
        labels=tuple(predicted_label(rule, output) for output in outputs),
        scores={"margin": tuple(None if margin == UNSURE else margin for margin in margins)},
    )
