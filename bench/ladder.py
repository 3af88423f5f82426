"""The ladder of ../shared/models, one task in five sizes, on its 500 labelled photographs: outputs, computed once and
kept in out/ladder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
from PIL import Image
from record import models_folder
from trained import REPOSITORY

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.runtime.tflite import invoke, open_interpreter

Pixels = npt.NDArray[np.float32]
CACHE = REPOSITORY / "out" / "ladder"
OUTPUT = "classes"
RULE = AnswerRule("class", (OUTPUT,), labels=(-1, *range(1000)))
"""Class 0 of the 1,001 is the background, which is never an answer."""


@dataclass(frozen=True, slots=True)
class LadderModel:
    """One model of the ladder; its input is square."""

    name: str
    side: int
    """Pixels."""
    is_float: bool = False

    @property
    def path(self) -> Path:
        """Its file, which may be missing."""
        kind = "float" if self.is_float else "quant"
        return models_folder() / "models" / f"mobilenet_{self.name}_{self.side}_{kind}.tflite"

    def values(self, pixels: Pixels) -> npt.NDArray[Any]:
        """Its input for pixels [side, side, RGB] from 0 to 255."""
        return pixels[None] / np.float32(127.5) - 1 if self.is_float else pixels[None].astype(np.uint8)


LADDER = {
    model.name: model
    for model in (
        LadderModel("v1_0.25", 224, is_float=True),
        LadderModel("v1_0.5", 160),
        LadderModel("v1_0.75", 192),
        LadderModel("v2_1.0", 224),
    )
}


def photograph_labels() -> Path:
    """The file with the photographs' classes, which may be missing."""
    return models_folder() / "inputs" / "photos" / "labels.json"


def photographs() -> list[tuple[Path, int]]:
    """The labelled photographs with their classes, 0 to 999."""
    labels: dict[str, int] = json.loads(photograph_labels().read_text(encoding="utf-8"))
    return [(photograph_labels().parent / name, label) for name, label in sorted(labels.items())]


def ladder_outputs(model: LadderModel, brightness: float = 1.0) -> list[dict[str, npt.NDArray[Any]]]:
    """The model's outputs for each photograph, whose pixels are multiplied by `brightness`."""
    return photograph_outputs(model.path, model.side, model.values, brightness)


def photograph_outputs(
    file: Path, side: int, values: Callable[[Pixels], npt.NDArray[Any]], brightness: float = 1.0
) -> list[dict[str, npt.NDArray[Any]]]:
    """The outputs of a model, ONNX or TFLite, with one square input that `values` makes of pixels [side, side, RGB]
    from 0 to 255."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    kept = CACHE / f"{digest}-{brightness:g}.npy"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        run = _onnx_model(file) if file.suffix == ".onnx" else _tflite_model(file)
        rows = []
        for path, _ in photographs():
            pixels = np.round(np.asarray(_middle_square(path, side), np.float32) * np.float32(brightness))
            rows.append(run(values(pixels)))
        np.save(kept, np.stack(rows), allow_pickle=False)
    return [{OUTPUT: row} for row in np.load(kept, allow_pickle=False)]


def _tflite_model(file: Path) -> Callable[[npt.NDArray[Any]], npt.NDArray[Any]]:
    interpreter, _ = open_interpreter(file)
    name = interpreter.get_input_details()[0]["name"]
    return lambda values: next(iter(invoke(interpreter, {name: values}).values())).copy()


def _onnx_model(file: Path) -> Callable[[npt.NDArray[Any]], npt.NDArray[Any]]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda values: np.asarray(session.run(None, {name: values})[0])


def _middle_square(path: Path, side: int) -> Image.Image:
    """The largest square in the middle of a photograph, scaled to the model's input."""
    photograph = Image.open(path).convert("RGB")
    edge = min(photograph.size)
    left, top = (photograph.width - edge) // 2, (photograph.height - edge) // 2
    square = photograph.crop((left, top, left + edge, top + edge))
    return square.resize((side, side), Image.Resampling.BILINEAR)
