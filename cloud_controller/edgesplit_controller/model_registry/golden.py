"""Golden pairs of a release: sample requests with the answers of the whole model, by which a device verifies that the
slices it assembled give the same answers.

The model runs in a child process (`golden_child`), not optimised further and on one thread, as a device in exact mode
runs its slices. A crash of the child is reported as ModelRefused and does not end the controller. Bodies too large for
a chunk are left out; a release without golden pairs is still valid.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from edgesplit.answers.answer_rule import infer_answer_rule
from edgesplit.answers.comparison import predicted_label
from edgesplit.errors import ModelRefused, UsageError
from edgesplit.input_spec import FRAME, prepare
from edgesplit.limits import LIMITS
from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import EncryptionInfo, GoldenExample, TensorSpec, chunk_of
from edgesplit.runtime import Tensor, Tensors
from edgesplit_controller.model_registry.golden_child import INPUTS, OUTPUTS, SLICE, load, save
from edgesplit_controller.model_registry.registry import LoadedModel
from edgesplit_partitioner.ir.prepared_model import PreparedModel, whole_model_chunks, whole_model_slice
from edgesplit_partitioner.profiling.layers import synthetic_frame
from edgesplit_partitioner.sandbox.child_process import run_child
from edgesplit_partitioner.sandbox.limits import folder_bytes, measurement_limits

LIMIT_S = 300.0
"""Time limit of the child process."""
MOST_PAIRS = 2
"""Golden pairs of one release."""
MOST_JUDGED = 100
"""Golden pairs of a release that rollout gates judge by its answers: devices fetch and run all of them."""


@dataclass(frozen=True, slots=True)
class GoldenPair:
    """Body of an inference request, and of the whole model's response; for rollout gates also what the answer should
    be."""

    request: bytes
    response: bytes
    label: int | None = None
    """The class that the sample shows."""
    answer: int | None = None
    """The class that the base of a variant answers, or the whole model of others."""

    def to_example(self, encryption: EncryptionInfo | None = None) -> GoldenExample:
        """The pair as a manifest lists it."""
        return GoldenExample(
            chunk_of(self.request), chunk_of(self.response), encryption,
            label=msgspec.UNSET if self.label is None else self.label,
            answer=msgspec.UNSET if self.answer is None else self.answer,
        )  # fmt: skip


def golden_pairs(
    loaded: LoadedModel, samples: Sequence[bytes | Tensors], model: str, outputs: Collection[str] = ()
) -> list[GoldenPair]:
    """Up to `MOST_PAIRS` samples (a synthetic one where there is none) with the whole model's responses, as far as both
    bodies fit into a chunk; with all outputs, or those that are named."""
    chosen = list(samples[:MOST_PAIRS]) or [synthetic_sample(loaded)]
    return [answered.pair for answered in _answered(loaded, chosen, model, outputs)]


def judged_pairs(
    loaded: LoadedModel, samples: Sequence[tuple[bytes | Tensors, int | None]], model: str, base: LoadedModel | None
) -> list[GoldenPair]:
    """Samples with their class and with the class that `base` answers (`loaded` itself, or None: no answers), as far as
    the bodies fit into a chunk. UsageError where an answer is no class, or no sample fits."""
    base_rule = infer_answer_rule((base or loaded).prepared.outputs)
    if base_rule is None or infer_answer_rule(loaded.prepared.outputs) is None:
        raise UsageError("gates of accuracy and agreement need a model with one output of classes")
    found = _answered(loaded, [sample for sample, _ in samples], model)
    if not found:
        raise UsageError(
            f"gates of accuracy and agreement need samples of at most {LIMITS.chunk_bytes} bytes: `edgectl profile"
            f" {model} --samples FOLDER` stores some"
        )
    labelled = [replace(answered.pair, label=samples[answered.at][1]) for answered in found]
    if base is None:
        return labelled
    expected: Sequence[Mapping[str, Tensor]] = [answered.outputs for answered in found]
    if base is not loaded:
        expected = run_whole(base.prepared, [model_inputs(base, samples[answered.at][0]) for answered in found])
    return [
        replace(pair, answer=predicted_label(base_rule, outputs))
        for pair, outputs in zip(labelled, expected, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Answered:
    """A sample that fits into a golden pair."""

    at: int
    """Index of the sample."""
    pair: GoldenPair
    outputs: Mapping[str, Tensor]


def _answered(
    loaded: LoadedModel, samples: Sequence[bytes | Tensors], model: str, named: Collection[str] = ()
) -> list[_Answered]:
    """The samples whose request and response fit into a chunk, with the whole model's outputs, or those named."""
    requests = {
        at: _joined(oip.encode_request(oip.InferRequest(inputs=request_inputs(loaded, sample), id="golden"))[0])
        for at, sample in enumerate(samples)
    }
    fitting = [at for at, request in requests.items() if len(request) <= LIMITS.chunk_bytes]
    if not fitting:
        return []
    answered = []
    results = run_whole(loaded.prepared, [model_inputs(loaded, samples[at]) for at in fitting])
    for at, found in zip(fitting, results, strict=True):
        outputs = {name: value for name, value in found.items() if not named or name in named}
        response = _joined(oip.encode_response(oip.InferResponse(model=model, outputs=outputs, id="golden"))[0])
        if len(response) <= LIMITS.chunk_bytes:
            answered.append(_Answered(at, GoldenPair(requests[at], response), outputs))
    return answered


def synthetic_sample(loaded: LoadedModel) -> bytes | Tensors:
    """A synthetic sample: a stand-in frame, or seeded noise. The same at every call."""
    return synthetic_frame(loaded.spec) if loaded.spec is not None else noise(loaded.prepared.inputs)


def request_inputs(loaded: LoadedModel, sample: bytes | Tensors) -> Tensors:
    """The tensors of the request that an application would send for this sample."""
    if isinstance(sample, bytes):
        return {FRAME: np.frombuffer(sample, np.uint8), **_other_inputs(loaded)}
    return sample


def model_inputs(loaded: LoadedModel, sample: bytes | Tensors) -> Tensors:
    """The input tensors of the model without its input layer. ModelRefused for a frame where the model has no input
    spec."""
    if not isinstance(sample, bytes):
        return sample
    if loaded.spec is None:
        raise ModelRefused("a frame for a model without an input spec")
    return {loaded.spec.tensor: prepare(loaded.spec, sample), **_other_inputs(loaded)}


def noise(specs: Iterable[TensorSpec]) -> dict[str, Tensor]:
    """Seeded noise for these tensors, zeros for integer tensors; open dimensions have length 1."""
    rng = np.random.default_rng(0)
    tensors: dict[str, Tensor] = {}
    for spec in specs:
        lengths, dtype = [max(length, 1) for length in spec.shape], oip.DTYPES[spec.datatype]
        tensors[spec.name] = rng.random(lengths).astype(dtype) if dtype.kind == "f" else np.zeros(lengths, dtype)
    return tensors


def _other_inputs(loaded: LoadedModel) -> dict[str, Tensor]:
    """Noise for the inputs that the input spec does not feed."""
    frame_tensor = loaded.spec.tensor if loaded.spec else ""
    return noise(spec for spec in loaded.prepared.inputs if spec.name != frame_tensor)


def run_whole(model: PreparedModel, samples: Sequence[Tensors]) -> list[dict[str, Tensor]]:
    """The whole model's outputs for each sample, computed in a child process; ModelRefused if it fails or does not end
    within `LIMIT_S`."""
    with tempfile.TemporaryDirectory(prefix="edgesplit-golden-") as name:
        folder = Path(name)
        for file, runs in whole_model_chunks(model).items():
            with (folder / file).open("wb") as target:
                target.writelines(runs)
        (folder / SLICE).write_bytes(msgspec.json.encode(whole_model_slice(model)))
        for number, inputs in enumerate(samples):
            save(folder / f"{INPUTS}-{number:04}", inputs)
        limits = measurement_limits(folder_bytes(folder), folder, LIMIT_S)
        run_child("edgesplit_controller.model_registry.golden_child", folder, limits=limits, limit_s=LIMIT_S)
        return [load(folder / f"{OUTPUTS}-{number:04}") for number in range(len(samples))]


def _joined(parts: Iterable[bytes | memoryview]) -> bytes:
    return b"".join(parts)
