"""Trained models of the field, pushed and deployed to an emulated device, against their stored reference tensors."""

from __future__ import annotations

import numpy as np
import pytest

from support.edgesplit_processes import Cloud, eventually, relative_error
from support.reference_models import reference_file

CASES = [("squeezenet_fp32", "squeezenet_fp32.onnx__cat.npz"), ("yolox_nano", "yolox_nano.onnx__kite_and_cold.npz")]
TOLERANCE = 1e-4


@pytest.mark.parametrize(("name", "reference"), CASES, ids=[name for name, _ in CASES])
def test_a_deployed_model_gives_its_reference_tensors(cloud: Cloud, name: str, reference: str) -> None:
    """With `--partition auto` and with a cut forced inside, the outputs equal the stored tensors within 1e-4."""
    model, device = name.replace("_", "-"), f"pi-{name.replace('_', '-')}"
    cloud.edgectl("model", "push", str(reference_file("models", f"{name}.onnx")), "--name", model)
    agent = cloud.agent(device)
    layers = [layer["name"] for layer in cloud.json("model", "show", model)["layers"]]
    arrays = np.load(reference_file("ref", reference), allow_pickle=False)
    inputs = {key[3:]: arrays[key] for key in arrays.files if key.startswith("in:")}

    for partition in ("auto", layers[len(layers) // 3], layers[2 * len(layers) // 3]):
        cloud.edgectl("deploy", model, "--partition", partition, "--to", device, "--wait", "120")

        def answered(partition: str = partition) -> object | None:
            answer = agent.infer(model, inputs)
            return (
                answer if partition == "auto" or (not answer.report.fallback and answer.report.row != "local") else None
            )

        answer = eventually(f"an answer by {partition}", answered)
        for key in arrays.files:
            if key.startswith("out:"):
                assert relative_error(answer.outputs[key[4:]], arrays[key]) <= TOLERANCE
