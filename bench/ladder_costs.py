"""The ladder as variants of a family: accuracies on the photographs, seconds predicted on boards by the planner."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ladder import LADDER, RULE, LadderModel, ladder_outputs, photographs
from PIL import Image
from trained import QUALITY

from edgesplit.answers.comparison import is_right
from edgesplit.device_profile import load_profile
from edgesplit.input_spec import parse_input_spec
from edgesplit_partitioner.costs.build import build_costs
from edgesplit_partitioner.costs.predict import as_servers_run, predict_intervals
from edgesplit_partitioner.ir.graph import LayerGraph
from edgesplit_partitioner.ir.prepared_model import PreparedModel
from edgesplit_partitioner.model_loader import prepare_model
from edgesplit_partitioner.onnx_format.model import with_input_layer
from edgesplit_partitioner.planner.family import Variant

RUNGS = {
    f"{model.name.replace('.', '')}-{model.side}": model for model in (LadderModel("v1_0.25", 128), *LADDER.values())
}
"""The five models by the name of their variant."""
FRAME_PIXELS = 256


@dataclass(frozen=True)
class Rung:
    """A variant with which photographs it gets right, and what planning it needs."""

    name: str
    model: Any
    graph: Any
    is_right: Sequence[bool]

    @property
    def accuracy(self) -> float:
        """Share of the photographs that it gets right."""
        return sum(self.is_right) / len(self.is_right)


def rung(name: str) -> Rung:
    """A variant of the ladder, with which of all photographs it gets right."""
    file = RUNGS[name]
    model = prepare_model(file.path.read_bytes(), {})
    pixels = "mean=127.5 std=127.5" if file.is_float else "uint8"
    spec = parse_input_spec(f"image/jpeg {FRAME_PIXELS}x{FRAME_PIXELS} nhwc {pixels}")
    graph, _ = with_input_layer(model, spec)
    outputs = zip(ladder_outputs(file), photographs(), strict=True)
    return Rung(name, model, graph, [is_right(RULE, answer, label) for answer, (_, label) in outputs])


def median_frame_bytes() -> int:
    """Size of a photograph as a camera would send it."""
    sizes = []
    for path, _ in photographs():
        file = io.BytesIO()
        Image.open(path).convert("RGB").resize((FRAME_PIXELS, FRAME_PIXELS)).save(file, "JPEG", quality=QUALITY)
        sizes.append(len(file.getvalue()))
    return int(median(sizes))


def variant_of(rung: Rung, board: str, frame_bytes: int) -> Variant:
    """The variant with predicted seconds on a board and on this kind of server; boundaries travel raw."""
    return predicted_variant(rung.name, rung.model, rung.graph, rung.accuracy, board, frame_bytes)


def predicted_variant(
    name: str, model: PreparedModel, graph: LayerGraph, accuracy: float, board: str, frame_bytes: int
) -> Variant:
    """A model as a variant, its seconds predicted on a board and on this kind of server; boundaries travel raw."""
    server = as_servers_run(load_profile("generic-x86"), model.format)
    cloud_s = {layer: one.seconds for layer, one in predict_intervals(graph, server, model.format).items()}
    costs = build_costs(
        name, graph, profile=load_profile(board), cloud_s=cloud_s, tensors={}, frame_bytes=frame_bytes,
        model_format=model.format,
    )  # fmt: skip
    return Variant(name, costs, accuracy)
