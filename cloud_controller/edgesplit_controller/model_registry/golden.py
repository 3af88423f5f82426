"""Golden pairs of a release: sample requests with the answers of the whole model, by which a device verifies that the
slices it assembled give the same answers.

The model runs in a child process (`golden_child`), not optimised further and on one thread, as a device in exact mode
runs its slices. A crash of the child is reported as ModelRefused and does not end the controller. Bodies too large for
a chunk are left out; a release without golden pairs is still valid.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from edgesplit.errors import ModelRefused
from edgesplit.input_spec import FRAME, prepare
from edgesplit.limits import LIMITS
from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import TensorSpec
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


@dataclass(frozen=True, slots=True)
class GoldenPair:
    """Body of an inference request, and of the whole model's response."""

    request: bytes
    response: bytes


def golden_pairs(loaded: LoadedModel, samples: Sequence[bytes | Tensors], model: str) -> list[GoldenPair]:
    """Up to `MOST_PAIRS` samples (a synthetic one where there is none) with the whole model's responses, as far as both
    bodies fit into a chunk."""
    pairs = []
    for sample in list(samples[:MOST_PAIRS]) or [synthetic_sample(loaded)]:
        request = _joined(oip.encode_request(oip.InferRequest(inputs=request_inputs(loaded, sample), id="golden"))[0])
        if len(request) > LIMITS.chunk_bytes:
            continue
        outputs = run_whole(loaded.prepared, model_inputs(loaded, sample))
        response = _joined(oip.encode_response(oip.InferResponse(model=model, outputs=outputs, id="golden"))[0])
        if len(response) <= LIMITS.chunk_bytes:
            pairs.append(GoldenPair(request, response))
    return pairs


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


def run_whole(model: PreparedModel, inputs: Tensors) -> dict[str, Tensor]:
    """The whole model's outputs, computed in a child process; ModelRefused if it fails or does not end within
    `LIMIT_S`."""
    with tempfile.TemporaryDirectory(prefix="edgesplit-golden-") as name:
        folder = Path(name)
        for file, runs in whole_model_chunks(model).items():
            with (folder / file).open("wb") as target:
                target.writelines(runs)
        (folder / SLICE).write_bytes(msgspec.json.encode(whole_model_slice(model)))
        save(folder / INPUTS, inputs)
        limits = measurement_limits(folder_bytes(folder), folder, LIMIT_S)
        run_child("edgesplit_controller.model_registry.golden_child", folder, limits=limits, limit_s=LIMIT_S)
        return load(folder / OUTPUTS)


def _joined(parts: Iterable[bytes | memoryview]) -> bytes:
    return b"".join(parts)
