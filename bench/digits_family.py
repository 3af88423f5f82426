"""The digits family of examples/digits, the whole model and its two students, on 600 labelled frames of held-out
digits: outputs, computed once and kept in out/digits, and seconds predicted on boards."""

from __future__ import annotations

import functools
import hashlib
import sys
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
from ladder_costs import predicted_variant
from trained import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "examples" / "digits"))

from samples import DEFAULT_COUNT, DEFAULT_SEED, samples

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.answers.comparison import is_right
from edgesplit.input_spec import parse_input_spec
from edgesplit_partitioner.ir.prepared_model import PreparedModel
from edgesplit_partitioner.model_loader import prepare_model
from edgesplit_partitioner.onnx_format.model import with_input_layer
from edgesplit_partitioner.planner.family import Variant
from edgesplit_partitioner.profiling.layers import feeds_for

CACHE = REPOSITORY / "out" / "digits"
FILES = {name: REPOSITORY / "examples" / "digits" / f"{name}.onnx" for name in ("student", "pruned", "digits")}
OUTPUT = "probabilities"
RULE = AnswerRule("class", (OUTPUT,))
CLASSES = 10
SPEC = "image/jpeg 128x128 scale=1/255"


@functools.cache
def digit_samples() -> list[tuple[bytes, int]]:
    """The frames as JPEGs with their labels, three of each held-out digit; the same in each run."""
    return samples(DEFAULT_COUNT, DEFAULT_SEED)


def digit_outputs(name: str, brightness: float = 1.0) -> list[dict[str, npt.NDArray[Any]]]:
    """The model's outputs for each frame, whose pixels are multiplied by `brightness`."""
    digest = hashlib.sha256(FILES[name].read_bytes()).hexdigest()[:16]
    kept = CACHE / f"{digest}-{brightness:g}.npy"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.save(kept, _run(name, brightness), allow_pickle=False)
    return [{OUTPUT: row} for row in np.load(kept, allow_pickle=False)]


def _run(name: str, brightness: float) -> npt.NDArray[Any]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(FILES[name], options, providers=["CPUExecutionProvider"])
    _, spec = with_input_layer(_model(name), parse_input_spec(SPEC))
    rows = []
    for jpeg, _ in digit_samples():
        feeds = {tensor: pixels * np.float32(brightness) for tensor, pixels in feeds_for(jpeg, spec).items()}
        rows.append(session.run([OUTPUT], feeds)[0])
    return np.stack(rows)


def _model(name: str) -> PreparedModel:
    return prepare_model(FILES[name].read_bytes(), {})


def digit_truth() -> tuple[int, ...]:
    """The label of each frame."""
    return tuple(label for _, label in digit_samples())


def digit_frame_bytes() -> int:
    """Size of a frame."""
    return int(median(len(jpeg) for jpeg, _ in digit_samples()))


def digit_variant(name: str, board: str, frame_bytes: int) -> Variant:
    """A model of the family with predicted seconds on a board and on this kind of server; boundaries travel raw."""
    model = _model(name)
    graph, _ = with_input_layer(model, parse_input_spec(SPEC))
    rights = [is_right(RULE, one, label) for one, label in zip(digit_outputs(name), digit_truth(), strict=True)]
    return predicted_variant(name, model, graph, sum(rights) / len(rights), board, frame_bytes)
