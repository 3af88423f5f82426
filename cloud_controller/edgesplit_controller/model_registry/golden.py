"""Golden inputs: what the whole model answers, so that a device can tell whether what it put together answers the same.

The model runs in a child process (`golden_run`), not optimised further, on one
thread: as exact slices run it. A child that crashes is the model's refusal, not our end. Bodies too large for a
chunk are left out; a release without golden inputs is still a release.
"""

from __future__ import annotations

import os
import subprocess
import sys
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
from edgesplit_partitioner.ir.prepared_model import PreparedModel, whole_runs, whole_slice
from edgesplit_partitioner.profiling.layers import stand_in_frame
from edgesplit_partitioner.sandbox.exit_status import check_not_interrupted

LIMIT_S = 300.0
MOST = 2


@dataclass(frozen=True, slots=True)
class GoldenPair:
    """A request's body, and that of the whole model's answer."""

    request: bytes
    response: bytes


def golden_pairs(loaded: LoadedModel, samples: Sequence[bytes | Tensors], model: str) -> list[GoldenPair]:
    """Up to `MOST` samples (a made-up one where there is none) with the whole model's answers, if they fit a chunk."""
    pairs = []
    for given in list(samples[:MOST]) or [made_up(loaded)]:
        request = _joined(oip.encode_request(oip.InferRequest(inputs=as_inputs(loaded, given), id="golden"))[0])
        if len(request) > LIMITS.chunk_bytes:
            continue
        outputs = run_whole(loaded.prepared, first_tensors(loaded, given))
        response = _joined(oip.encode_response(oip.InferResponse(model=model, outputs=outputs, id="golden"))[0])
        if len(response) <= LIMITS.chunk_bytes:
            pairs.append(GoldenPair(request, response))
    return pairs


def made_up(loaded: LoadedModel) -> bytes | Tensors:
    """A stand-in's frame, or seeded noise: the same at every call."""
    return stand_in_frame(loaded.spec) if loaded.spec is not None else noise(loaded.prepared.inputs)


def as_inputs(loaded: LoadedModel, given: bytes | Tensors) -> Tensors:
    """What an application would send."""
    if isinstance(given, bytes):
        return {FRAME: np.frombuffer(given, np.uint8), **_beside_the_frame(loaded)}
    return given


def first_tensors(loaded: LoadedModel, given: bytes | Tensors) -> Tensors:
    """What the model without its input layer reads."""
    if not isinstance(given, bytes):
        return given
    if loaded.spec is None:
        raise ModelRefused("a frame for a model without an input spec")
    return {loaded.spec.tensor: prepare(loaded.spec, given), **_beside_the_frame(loaded)}


def noise(specs: Iterable[TensorSpec]) -> dict[str, Tensor]:
    """Seeded noise for these tensors, zeros where they hold whole numbers; open lengths are 1."""
    source = np.random.default_rng(0)
    made: dict[str, Tensor] = {}
    for spec in specs:
        lengths, dtype = [max(length, 1) for length in spec.shape], oip.DTYPES[spec.datatype]
        made[spec.name] = source.random(lengths).astype(dtype) if dtype.kind == "f" else np.zeros(lengths, dtype)
    return made


def _beside_the_frame(loaded: LoadedModel) -> dict[str, Tensor]:
    """The inputs that the input spec does not feed."""
    fed = loaded.spec.tensor if loaded.spec else ""
    return noise(spec for spec in loaded.prepared.inputs if spec.name != fed)


def run_whole(model: PreparedModel, inputs: Tensors) -> dict[str, Tensor]:
    """The whole model's outputs, from a child process; ModelRefused if it cannot give them."""
    with tempfile.TemporaryDirectory(prefix="edgesplit-golden-") as name:
        folder = Path(name)
        for file, runs in whole_runs(model).items():
            with (folder / file).open("wb") as target:
                target.writelines(runs)
        (folder / SLICE).write_bytes(msgspec.json.encode(whole_slice(model)))
        save(folder / INPUTS, inputs)
        command = [sys.executable, "-m", "edgesplit_controller.model_registry.golden_child", str(folder)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        try:
            child = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ModelRefused(f"the model does not answer within {LIMIT_S:.0f} s") from error
        if child.returncode:
            check_not_interrupted(child.returncode)
            last = (child.stderr.decode("utf-8", "replace").strip().splitlines() or [f"status {child.returncode}"])[-1]
            raise ModelRefused(f"the runtime cannot run this model: {last[:300]}")
        return load(folder / OUTPUTS)


def _joined(parts: Iterable[bytes | memoryview]) -> bytes:
    return b"".join(parts)
