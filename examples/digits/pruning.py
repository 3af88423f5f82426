"""The trained network with fewer channels: weights out of digits.onnx, and which channels inside its blocks to keep.

Only channels that one block makes and the same block reads are taken away, so every tensor between blocks keeps its
shape. A channel's importance is the product of the norms of the weights that make it and of those that read it: what
it can contribute at most, up to a constant.
"""

from __future__ import annotations

import onnx
import torch
from network import DigitFinder, InvertedResidual, Widths
from onnx import numpy_helper
from torch import Tensor, nn


def load(model: onnx.ModelProto) -> DigitFinder:
    """The network that was exported as `model`; its normalisations are part of the convolutions already."""
    network = without_norms(DigitFinder())
    weights = {
        weight.name: torch.from_numpy(numpy_helper.to_array(weight).copy()) for weight in model.graph.initializer
    }
    network.load_state_dict(weights)
    return network


def without_norms(network: DigitFinder) -> DigitFinder:
    """The network with a bias in each convolution in place of the normalisation after it."""
    for block in list(network.modules()):
        convolution = getattr(block, "conv", None)
        if isinstance(convolution, nn.Conv2d):
            convolution.bias = nn.Parameter(torch.zeros(convolution.out_channels))
            block.norm = nn.Identity()
    return network


def prune(whole: DigitFinder, widths: Widths) -> DigitFinder:
    """A copy that keeps the most important channels of each block, as many as `widths` says."""
    small = without_norms(DigitFinder(widths))
    state = whole.state_dict()
    for name, block in whole.named_modules():
        if isinstance(block, InvertedResidual):
            _keep_channels(state, f"{name}.expand", f"{name}.filter", [f"{name}.project"], _width(name, widths))
    # The head's second convolution makes the channels that are pooled; the classifier reads them.
    _keep_channels(state, "head.widen", "head.filter", ["head.mix"], widths.head)
    kept = _most_important(_norm(state["head.mix.conv.weight"], 0) * _norm(state["classify.weight"], 1), widths.head)
    for key in ("head.mix.conv.weight", "head.mix.conv.bias"):
        state[key] = state[key][kept]
    state["classify.weight"] = state["classify.weight"][:, kept]
    small.load_state_dict(state)
    return small


def _width(block: str, widths: Widths) -> int:
    return widths.early if block.startswith("early") else widths.trunk


def _keep_channels(state: dict[str, Tensor], maker: str, middle: str, readers: list[str], width: int) -> None:
    """Take channels away from `maker`, the depthwise `middle` and the inputs of `readers`."""
    importance = _norm(state[f"{maker}.conv.weight"], 0) * _norm(state[f"{middle}.conv.weight"], 0)
    for reader in readers:
        importance = importance * _norm(state[f"{reader}.conv.weight"], 1)
    kept = _most_important(importance, width)
    for key in (f"{maker}.conv.weight", f"{maker}.conv.bias", f"{middle}.conv.weight", f"{middle}.conv.bias"):
        state[key] = state[key][kept]
    for reader in readers:
        state[f"{reader}.conv.weight"] = state[f"{reader}.conv.weight"][:, kept]


def _norm(weight: Tensor, channel_axis: int) -> Tensor:
    return weight.transpose(0, channel_axis).flatten(1).norm(dim=1)


def _most_important(importance: Tensor, width: int) -> Tensor:
    return importance.argsort(descending=True, stable=True)[:width].sort().values
