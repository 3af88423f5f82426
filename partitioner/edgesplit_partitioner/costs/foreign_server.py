"""Adaptation of costs to a third-party inference server as offload target: it decodes no pictures and no packed
codecs, and at most undoes gzip.

The input layer therefore stays on the device, and the tensor behind it is the largest part that can be offloaded.
Triton undoes gzip; other servers are not known to undo any compression. Costs of gzip are estimated from zstd's
measured seconds by fixed factors: on boundaries half of whose numbers are zero, zlib at its fastest level produces 2 %
more bytes than zstd at its fastest, compresses a fifth as fast and decompresses a third as fast (x86-64, zlib 1.3,
zstandard 0.25; docs/decisions/0026-foreign-servers.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from edgesplit.errors import ModelRefused
from edgesplit.foreign_server import ForeignServer
from edgesplit.input_spec import INPUT_LAYER
from edgesplit.release.boundary_codecs import PACKED, ZSTD_SUFFIX, split_codec_name
from edgesplit.release.manifest import SliceFormat
from edgesplit_partitioner.costs.model import CodecCost, Costs, TensorCost

GZIP_BYTES_FACTOR, GZIP_ENCODE_FACTOR, GZIP_DECODE_FACTOR = 1.02, 5.1, 3.1
"""Factors from zstd to gzip: bytes, seconds of compression, seconds of decompression."""


def costs_for_foreign_server(costs: Costs, server: ForeignServer) -> Costs:
    """The same model's costs with that server as offload target."""
    adapted = costs.with_tensors(lambda _, tensor: _adapt_tensor(tensor, server))
    layers = (
        msgspec.structs.replace(layer, tiers=costs.tiers[:1]) if layer.name == INPUT_LAYER else layer
        for layer in adapted.layers
    )
    return msgspec.structs.replace(adapted, layers=tuple(layers))


def check_servable(model: str, kind: SliceFormat) -> None:
    """ModelRefused for a model in a format that no foreign server runs: all but ONNX."""
    if kind != "onnx":
        raise ModelRefused(
            f"{model} is {kind.upper()}, and servers that are not ours run ONNX: push it so, or leave --offload out"
        )


def adapt_limits(limits: Mapping[str, Any], costs: Costs) -> dict[str, Any]:
    """The limits with `force: cloud` replaced by `force_after` the input layer, which such a server cannot run;
    unchanged otherwise."""
    if limits.get("force") != "cloud" or all(layer.name != INPUT_LAYER for layer in costs.layers):
        return dict(limits)
    others = {name: value for name, value in limits.items() if name != "force"}
    return {**others, "force_after": INPUT_LAYER}


def _adapt_tensor(tensor: TensorCost, server: ForeignServer) -> TensorCost:
    decodable = {name: codec for name, codec in tensor.codecs.items() if split_codec_name(name)[0] not in PACKED}
    tensor = msgspec.structs.replace(tensor, codecs=decodable)
    if not server.accepts_gzip:
        uncompressed = {name: codec for name, codec in tensor.codecs.items() if not name.endswith(ZSTD_SUFFIX)}
        return msgspec.structs.replace(tensor, codecs=uncompressed)
    return msgspec.structs.replace(
        tensor,
        codecs={
            name: _gzip_cost(codec, tensor.codecs.get(name.removesuffix(ZSTD_SUFFIX)))
            if name.endswith(ZSTD_SUFFIX)
            else codec
            for name, codec in tensor.codecs.items()
        },
    )


def _gzip_cost(packed: CodecCost, plain: CodecCost | None) -> CodecCost:
    """The codec's cost with gzip in place of zstd. `plain` is the same codec uncompressed; what `packed` takes beyond
    it is compression."""
    return msgspec.structs.replace(
        packed,
        bytes=round(packed.bytes * GZIP_BYTES_FACTOR),
        encode_s=_scale_compression_s(packed.encode_s, plain.encode_s if plain else {}, GZIP_ENCODE_FACTOR),
        decode_s=_scale_compression_s(packed.decode_s, plain.decode_s if plain else {}, GZIP_DECODE_FACTOR),
    )


def _scale_compression_s(packed: Mapping[str, float], plain: Mapping[str, float], factor: float) -> dict[str, float]:
    """Seconds by tier with the compression's share, which is `packed` minus `plain`, multiplied by the factor."""
    # A compressed codec's seconds are those of the codec itself plus those of zstd; only the latter are scaled.
    codec_s = {tier: min(seconds, plain.get(tier, 0.0)) for tier, seconds in packed.items()}
    return {tier: codec_s[tier] + factor * (seconds - codec_s[tier]) for tier, seconds in packed.items()}
