"""A trained network as one ONNX file: normalisation folded, fixed shapes, names of the Python modules."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx
import torch
from network import FRAME_PX
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

OPSET = 17


def to_onnx(network: nn.Module) -> onnx.ModelProto:
    """`image` (1, 3, 128, 128) RGB in 0..1 to `probabilities` (1, 10), checked."""
    ready = nn.Sequential(_folded(network), nn.Softmax(dim=1)).eval()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "digits.onnx"
        torch.onnx.export(
            ready,
            (torch.zeros(1, 3, FRAME_PX, FRAME_PX),),
            file,
            opset_version=OPSET,
            input_names=["image"],
            output_names=["probabilities"],
            dynamo=False,  # the older exporter keeps module names and writes one small file
        )
        exported = onnx.load(file)
    model = onnx.shape_inference.infer_shapes(_named(exported), strict_mode=True)
    onnx.checker.check_model(model, full_check=True)
    return model


def _folded(network: nn.Module) -> nn.Module:
    """A copy in which each normalisation has become part of the convolution before it."""
    folded = copy.deepcopy(network).eval()
    for block in list(folded.modules()):
        convolution, norm = getattr(block, "conv", None), getattr(block, "norm", None)
        if isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            block.conv = fuse_conv_bn_eval(convolution, norm)
            block.norm = nn.Identity()
    return folded


def _named(model: onnx.ModelProto) -> onnx.ModelProto:
    """`/0/trunk1/trunk1.3/expand/relu/Relu` becomes `trunk1.3.expand.relu`; outputs are called like nodes."""
    kept = {value.name for value in (*model.graph.input, *model.graph.output)}
    renamed = {weight.name: weight.name.removeprefix("0.") for weight in model.graph.initializer}
    for node in model.graph.node:
        node.name = _plain(node.name)
        renamed |= {output: node.name for output in node.output if output not in kept}
    for weight in model.graph.initializer:
        weight.name = renamed[weight.name]
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
    del model.graph.value_info[:]
    model.graph.name = "digits"
    return model


def _plain(path: str) -> str:
    """A module path of the exporter, `/0/trunk1/trunk1.3/Add`, as Python writes it: `trunk1.3.add`."""
    return ".".join(_parts(path.strip("/").split("/")))


def _parts(path: list[str]) -> Iterator[str]:
    *modules, operator = path
    for module, inner in zip(modules, [*modules[1:], ""], strict=True):
        if module not in ("0", "1") and not inner.startswith(f"{module}."):
            yield module
    if operator in ("Add", "Softmax"):  # operators that are no module of the network have no name of their own
        yield operator.lower()
