"""The ladder of ../shared/models, one task in five sizes, on its 500 labelled photographs: outputs, computed once and
kept in out/ladder."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from record import models_folder
from trained import REPOSITORY

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.runtime.tflite import invoke, open_interpreter

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
    digest = hashlib.sha256(model.path.read_bytes()).hexdigest()[:16]
    kept = CACHE / f"{digest}-{brightness:g}.npy"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.save(kept, _run(model, brightness), allow_pickle=False)
    return [{OUTPUT: row} for row in np.load(kept, allow_pickle=False)]


def _run(model: LadderModel, brightness: float) -> npt.NDArray[Any]:
    interpreter, _ = open_interpreter(model.path)
    name = interpreter.get_input_details()[0]["name"]
    rows = []
    for path, _ in photographs():
        pixels = np.round(np.asarray(_middle_square(path, model.side), np.float32) * np.float32(brightness))
        values = pixels / np.float32(127.5) - 1 if model.is_float else pixels.astype(np.uint8)
        rows.append(next(iter(invoke(interpreter, {name: values[None]}).values())).copy())
    return np.stack(rows)


def _middle_square(path: Path, side: int) -> Image.Image:
    """The largest square in the middle of a photograph, scaled to the model's input."""
    photograph = Image.open(path).convert("RGB")
    edge = min(photograph.size)
    left, top = (photograph.width - edge) // 2, (photograph.height - edge) // 2
    square = photograph.crop((left, top, left + edge, top + edge))
    return square.resize((side, side), Image.Resampling.BILINEAR)
