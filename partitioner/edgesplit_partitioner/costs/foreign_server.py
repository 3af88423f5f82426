"""Costs where a server that is not ours finishes: it decodes no pictures, and compression is what it understands.

So the input layer stays on the device and the tensor behind it is what travels at the most. Triton undoes gzip, others
are not known to undo anything. What gzip costs is figured from zstd's measured seconds, by two factors: on boundaries
half of whose numbers are zero, zlib at its fastest makes 2 % more bytes than zstd at its, packs a fifth as fast and
unpacks a third as fast (x86-64, zlib 1.3, zstandard 0.25; docs/decisions/0026-foreign-servers.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from edgesplit.errors import ModelRefused
from edgesplit.foreign_server import ForeignServer
from edgesplit.input_spec import INPUT_LAYER
from edgesplit.release.manifest import SliceFormat
from edgesplit_partitioner.costs.model import CodecCost, Costs, TensorCost

PACKED = "+zstd"
GZIP_BYTES, GZIP_ENCODES, GZIP_DECODES = 1.02, 5.1, 3.1
"""Beside zstd: bytes, seconds of packing, seconds of unpacking."""


def foreign_costs(costs: Costs, server: ForeignServer) -> Costs:
    """The same model's costs with that server beyond the link."""
    device = costs.tiers[0]
    layers = tuple(
        msgspec.structs.replace(
            layer,
            writes={name: _tensor(one, server) for name, one in layer.writes.items()},
            tiers=(device,) if layer.name == INPUT_LAYER else layer.tiers,
        )
        for layer in costs.layers
    )
    inputs = {name: _tensor(one, server) for name, one in costs.inputs.items()}
    return msgspec.structs.replace(costs, inputs=inputs, layers=layers)


def check_servable(model: str, kind: SliceFormat) -> None:
    """ModelRefused for a model that no foreign server runs."""
    if kind != "onnx":
        raise ModelRefused(
            f"{model} is {kind.upper()}, and servers that are not ours run ONNX: push it so, or leave --offload out"
        )


def possible(limits: Mapping[str, Any], costs: Costs) -> dict[str, Any]:
    """Everything in the cloud means, where such a server finishes: all but the decoding of pictures."""
    if limits.get("force") != "cloud" or all(layer.name != INPUT_LAYER for layer in costs.layers):
        return dict(limits)
    kept = {name: value for name, value in limits.items() if name != "force"}
    return {**kept, "force_after": INPUT_LAYER}


def _tensor(tensor: TensorCost, server: ForeignServer) -> TensorCost:
    if not server.unpacks_gzip:
        plain = {name: one for name, one in tensor.codecs.items() if not name.endswith(PACKED)}
        return msgspec.structs.replace(tensor, codecs=plain)
    return msgspec.structs.replace(
        tensor,
        codecs={
            name: _by_gzip(one, tensor.codecs.get(name.removesuffix(PACKED))) if name.endswith(PACKED) else one
            for name, one in tensor.codecs.items()
        },
    )


def _by_gzip(packed: CodecCost, plain: CodecCost | None) -> CodecCost:
    """Packing is what the codec takes beyond its own, plain form."""
    return msgspec.structs.replace(
        packed,
        bytes=round(packed.bytes * GZIP_BYTES),
        encode_s=_longer(packed.encode_s, plain.encode_s if plain else {}, GZIP_ENCODES),
        decode_s=_longer(packed.decode_s, plain.decode_s if plain else {}, GZIP_DECODES),
    )


def _longer(packed: Mapping[str, float], plain: Mapping[str, float], factor: float) -> dict[str, float]:
    own = {tier: min(seconds, plain.get(tier, 0.0)) for tier, seconds in packed.items()}
    return {tier: own[tier] + factor * (seconds - own[tier]) for tier, seconds in packed.items()}
