"""Seconds of each layer on a device that is not here, from its profile's rates.

A roofline per operator: the slower of its arithmetic (by the rate of its class) and its bytes (by the memory's
rate), plus the runtime's overhead. Never one FLOP/s figure: depthwise and dense convolutions differ by more than ten
times. Figures are means of the published benchmarks behind the profiles; docs/device-profiles.md shows the error.
"""

from __future__ import annotations

from edgesplit.profiles import DeviceProfile
from edgesplit_partitioner.graph import Layer, LayerGraph, OperatorClass, Work

FUSIBLE_MAIN: frozenset[OperatorClass] = frozenset({"conv", "depthwise", "gemm"})
"""After one of these, the layer's elementwise operators work on what is still in the cache."""


def predict_layers(graph: LayerGraph, profile: DeviceProfile) -> dict[str, float]:
    """Seconds by layer on a device of this profile."""
    return {layer.name: layer_s(layer, profile) for layer in graph.layers}


def predict_joules(seconds: dict[str, float], profile: DeviceProfile) -> dict[str, float]:
    """Joules by layer: the board's active watts for as long as the layer takes."""
    return {name: profile.active_watts.value * layer_seconds for name, layer_seconds in seconds.items()}


def layer_s(layer: Layer, profile: DeviceProfile) -> float:
    """The sum over the layer's operators; those fused into the main one cost only their arithmetic."""
    seconds = 0.0
    fused = False
    for work in layer.work:
        if fused and work.operator == "elementwise":
            seconds += arithmetic_s(work, profile)
        else:
            seconds += operator_s(work, profile)
        fused = fused or work.operator in FUSIBLE_MAIN
    return seconds


def operator_s(work: Work, profile: DeviceProfile) -> float:
    """One operator that is not fused into another."""
    overhead_s = profile.operator_overhead_s.value
    arithmetic, memory = arithmetic_s(work, profile), memory_s(work, profile)
    if work.operator == "input":  # decoding, then resizing and scaling: one after the other
        return arithmetic + memory + overhead_s
    return max(arithmetic, memory) + overhead_s


def arithmetic_s(work: Work, profile: DeviceProfile) -> float:
    """Seconds of its operations alone, by the rate of its class."""
    rates, factor = profile.rates, profile.runtime_factor.value
    if work.operator == "input":
        return work.flops / rates.jpeg_pixels_per_s.value
    if work.operator == "conv":
        return work.flops * factor / rates.dense_conv_flops_per_s.value
    if work.operator == "depthwise":
        return work.flops / rates.depthwise_flops_per_s.value
    if work.operator == "gemm":
        return work.flops * factor / rates.gemm_flops_per_s.value
    return work.flops / rates.elementwise_per_s.value


def memory_s(work: Work, profile: DeviceProfile) -> float:
    """Seconds to move its bytes."""
    return work.bytes_moved / profile.rates.memory_bytes_per_s.value
