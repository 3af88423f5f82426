"""Invented measurements for the planning service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit_controller.model_registry.registry import LoadedModel
from edgesplit_controller.planning.planner_service import LayerMeasurement
from edgesplit_partitioner.costs.model import CodecCost, TensorCost
from edgesplit_partitioner.profiling.codec_loss import CodecLoss
from edgesplit_partitioner.profiling.codecs import AnswerChanges, CodecMeasurement, CodecMeasurements
from edgesplit_partitioner.profiling.layers import TensorMeasurements
from edgesplit_partitioner.profiling.machine_load import MachineLoad
from edgesplit_partitioner.profiling.ort_profile import LayerTime
from edgesplit_partitioner.profiling.slices import SliceTime, WholeSliceTimes

QUIET = MachineLoad(others=0.0, rounds=3)
BUSY = MachineLoad(others=0.63, spread=1.4, rounds=3)


@dataclass
class CountingMeasure:
    """Returns invented measurements and counts the calls."""

    asked: list[str] = field(default_factory=list)
    slices_asked: list[list[Sequence[str]]] = field(default_factory=list)
    load: MachineLoad = QUIET
    layer_s: float = 0.001
    changed: int = 0
    """Answers that int8 changes on every tensor."""

    def layers(self, loaded: LoadedModel, frames: Sequence[bytes]) -> LayerMeasurement:
        self.asked.append("layers")
        times = {layer.name: LayerTime(self.layer_s, 2 * self.layer_s) for layer in loaded.graph.layers}
        return LayerMeasurement(times, self.load)

    def samples(self, loaded: LoadedModel, samples: Sequence[Any]) -> TensorMeasurements:
        self.asked.append(f"{len(samples)} samples")
        sizes = {name: TensorCost(bytes=tensor.bytes) for name, tensor in loaded.graph.tensors.items()}
        return TensorMeasurements(tensors=sizes, frame_bytes=0, count=len(samples), basis="invented")

    def slices(
        self, loaded: LoadedModel, groups: Sequence[Sequence[str]], layer_s: Mapping[str, float]
    ) -> WholeSliceTimes:
        self.slices_asked.append([*groups])
        one = SliceTime(layers=tuple(groups[0]), median_s=0.001, p95_s=0.002, summed_s=0.002)
        return WholeSliceTimes(slices=(one,), factor=0.5, is_busy=self.load.is_busy)

    def codecs(self, loaded: LoadedModel, samples: Sequence[Any], labels: Sequence[int | None]) -> CodecMeasurements:
        self.asked.append(f"codecs on {len(samples)} samples, labels {list(labels)}")
        lost = CodecLoss(error=0.001, changed=0.0)
        cost = CodecCost(bytes=5, encode_s={"cloud": 0.0}, decode_s={"cloud": 0.0}, loss=0.001, confirmed_loss=0.001)
        one = CodecMeasurement(cost=cost, packed=cost, chosen=lost, confirmed=lost)
        return CodecMeasurements({name: {"int8": one} for name in loaded.graph.tensors}, len(samples))

    def changes(
        self, loaded: LoadedModel, samples: Sequence[Any], tensors: Mapping[str, TensorCost], rule: AnswerRule
    ) -> AnswerChanges:
        self.asked.append(f"changes of {rule.to_text()} on {len(samples)} samples, {', '.join(sorted(tensors))}")
        changed = {name: {"int8": self.changed} for name in tensors}
        return AnswerChanges(tensors=changed, count=len(samples))
