"""Float models compressed by each method with all of their layers, for the other benchmarks: made once and kept in
out/compressed, with the answers that each variant changes on the half of the samples that chose nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import onnxruntime
from record import models_folder
from trained import REPOSITORY, TrainedModel

from edgesplit.answers.answer_rule import AnswerRule, infer_answer_rule, parse_answer_rule
from edgesplit.errors import ModelRefused
from edgesplit_partitioner.compression.compress import Compressor
from edgesplit_partitioner.compression.gate import GateTerms
from edgesplit_partitioner.compression.recipe import AppliedMethod
from edgesplit_partitioner.compression.trials import Progress

CACHE = REPOSITORY / "out" / "compressed"
RULES: Mapping[str, str] = {
    "yolox_nano": "boxes:yolox:0.5", "ultraface_rfb_320": "boxes:scores+boxes:0.7", "gesture_mlp": "close:0",
    "silero_vad_16k": "close:0.1", "dtln_1": "close:0.1", "dtln_2": "close:0.1", "dtln_1.tflite": "close:0.1",
    "dtln_2.tflite": "close:0.1",
}  # fmt: skip
"""When an answer has changed, where it is not the most likely class."""
BINDINGS: Mapping[str, Mapping[str, int]] = {
    "silero_vad_16k": {"batch": 1, "sequence": 576},
    "gesture_mlp": {"batch": 1},
}
METHODS: tuple[AppliedMethod, ...] = get_args(AppliedMethod)
WIDE_ALLOWANCE = 0.5
"""Of changed answers, by which a variant with all layers is kept to be measured: few samples are enough for it."""


@dataclass(frozen=True, slots=True)
class Compressed:
    """A variant of a model, with what the samples that chose nothing say of it."""

    model: str
    method: str
    file: str
    """Path of the variant; empty where it changes too much to be kept."""
    samples: int
    changed: int
    size: float
    """Bytes, relative to the base."""

    @property
    def path(self) -> Path:
        """Its file."""
        return CACHE / self.file


def file_of(name: str) -> Path:
    """The file of a reference model, or of the project's own."""
    if name == "digits":
        return REPOSITORY / "examples" / "digits" / "digits.onnx"
    return models_folder() / "models" / (name if name.endswith(".tflite") else f"{name}.onnx")


def rule_of(model: TrainedModel) -> AnswerRule | None:
    """What an answer of the model is."""
    given = RULES.get(model.name)
    return parse_answer_rule(given, model.model.outputs) if given else infer_answer_rule(model.model.outputs)


def compressor_of(model: TrainedModel, rule: AnswerRule, progress: Progress | None = None) -> Compressor:
    """Makes variants of the model on its samples."""
    return Compressor(
        file_of(model.name), model.samples, rule, spec=model.spec, bindings=BINDINGS.get(model.name), progress=progress
    )


def keep_variants(model: TrainedModel, compressor: Compressor) -> list[Compressed]:
    """Make the model's variant by each method that applies to it, with all layers, and keep them."""
    CACHE.mkdir(parents=True, exist_ok=True)
    made = []
    for method in METHODS:
        try:
            wide = GateTerms(least_agreement=1.0 - WIDE_ALLOWANCE)
            result = compressor.compress(method, wide, out_folder=CACHE, limit_s=0.0)
        except ModelRefused:
            continue
        name = ""
        if result.path is not None:
            name = f"{_key(model)}-{method}{result.path.suffix}"
            result.path.rename(CACHE / name)
        evidence, size = result.evidence, result.variant_bytes / result.base_bytes
        made.append(Compressed(model.name, method, name, evidence.samples, evidence.changed, size))
    _index(model).write_text(json.dumps([asdict(variant) for variant in made], indent=1) + "\n", encoding="utf-8")
    return made


def kept_variants(model: TrainedModel, compressor: Callable[[], Compressor]) -> list[Compressed]:
    """The model's variants as they were kept; made where they were not."""
    if not _index(model).is_file():
        with compressor() as opened:
            return keep_variants(model, opened)
    return [Compressed(**variant) for variant in json.loads(_index(model).read_text(encoding="utf-8"))]


def _index(model: TrainedModel) -> Path:
    return CACHE / f"{_key(model)}.json"


def _key(model: TrainedModel) -> str:
    """The model's name with a digest of its file, the number of its samples and the runtime that compresses it."""
    made_from = f"{len(model.samples)} {onnxruntime.__version__}".encode()
    digest = hashlib.sha256(file_of(model.name).read_bytes() + made_from).hexdigest()[:12]
    return f"{model.name}-{digest}"
