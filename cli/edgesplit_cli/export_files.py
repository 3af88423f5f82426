"""Files by which Triton and KServe serve an ONNX model: a model repository, and the manifest that refers to it.

    FOLDER/NAME/config.pbtxt        the model's inputs and outputs, in Triton's text format
    FOLDER/NAME/1/model.onnx        the model, as version 1: another release is another model

Shapes include the batch dimension (`max_batch_size: 0`): a device sends one inference as the slices take it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgesplit.atomic_files import write_durably
from edgesplit.errors import ModelRefused

CONFIG, VERSION, MODEL = "config.pbtxt", "1", "model.onnx"
SERVICE_FILE = "inference-service.yaml"
MAX_SERVICE_NAME = 50
"""A label of a host name has at most 63 characters, and KServe appends some."""
RELEASE_ANNOTATION = "edgesplit/release"


def write_model(folder: Path, name: str, config: str, model: bytes) -> Path:
    """Write one model of a repository; returns its folder. The configuration is written last, since it makes the model
    valid."""
    home = folder / name
    (home / VERSION).mkdir(parents=True, exist_ok=True)
    write_durably(home / VERSION / MODEL, model)
    write_durably(home / CONFIG, config.encode())
    return home


def triton_config(
    name: str, inputs: Sequence[Mapping[str, Any]], outputs: Sequence[Mapping[str, Any]], instances: int = 0
) -> str:
    """The configuration of one model for Triton's onnxruntime backend, with `instances` on the CPU; 0 leaves it to
    Triton."""
    parts = [f'name: "{_quoted(name)}"', 'backend: "onnxruntime"', "max_batch_size: 0"]
    parts += [_tensor_config("input", tensor) for tensor in inputs] + [
        _tensor_config("output", tensor) for tensor in outputs
    ]
    if instances:
        parts.append(f"instance_group [ {{ kind: KIND_CPU count: {instances} }} ]")
    return "\n".join(parts) + "\n"


def _tensor_config(kind: str, tensor: Mapping[str, Any]) -> str:
    if not tensor["shape"]:
        raise ModelRefused(f"the {kind} {tensor['name']!r} is a number without dimensions, which Triton does not take")
    dims = ", ".join(map(str, tensor["shape"]))
    return f'{kind} [ {{ name: "{_quoted(tensor["name"])}" data_type: TYPE_{tensor["datatype"]} dims: [ {dims} ] }} ]'


def _quoted(text: str) -> str:
    """The text as a string of protobuf's text format."""
    plain = {ord('"'): '\\"', ord("\\"): "\\\\"}
    return "".join(
        plain.get(byte, chr(byte)) if 0x20 <= byte < 0x7F else f"\\{byte:03o}" for byte in text.encode("utf-8")
    )


def inference_service(release: str, model: str, storage: str, *, namespace: str = "") -> str:
    """KServe's manifest for the repository at `storage`: its Triton runtime, Open Inference Protocol version 2."""
    import yaml

    metadata: dict[str, Any] = {"name": service_name(model, release)}
    if namespace:
        metadata["namespace"] = namespace
    metadata["annotations"] = {RELEASE_ANNOTATION: release}
    predictor = {
        "model": {
            "modelFormat": {"name": "triton"},
            "runtime": "kserve-tritonserver",
            "protocolVersion": "v2",
            "storageUri": storage,
        }
    }
    service = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": metadata,
        "spec": {"predictor": predictor},
    }
    text: str = yaml.safe_dump(service, sort_keys=False)
    return text


def service_name(model: str, release: str) -> str:
    """A host name label that identifies model and release."""
    hint = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    hint = hint if hint[:1].isalpha() else f"m-{hint}"
    return f"{hint[: MAX_SERVICE_NAME - 13].rstrip('-')}-{release[:12]}"
