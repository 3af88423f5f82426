"""Fingerprint of a model, independent of its cut: digests of its layers with their operators, its tensors and its
weights.

The release key signs it with a model's first release. A recut of that release is the same model if its slices contain
these layers, each once, and in them these operators and weights, byte for byte (`edgesplit.release.recut`). It contains
digests only: of an operator's bytes as in the ONNX file, and of a weight's name, type, shape and data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from edgesplit.decoding import decode_json
from edgesplit.errors import TrustError
from edgesplit.limits import LIMITS
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.release.manifest import FingerprintFile, TensorSpec

FORMAT: Final = "edgesplit.fingerprint/1"


class LayerFingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layer: the tensors that it reads and writes, and the digests of its operators."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    nodes: tuple[str, ...]
    """Each operator once. An operator that depends on weights only may be in several layers; the input layer has none.
    """


class TensorFingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor between layers."""

    spec: TensorSpec
    declared: str
    """Digest of its declaration (ONNX ValueInfoProto) as an input or output of a slice."""


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fingerprint of one ONNX model."""

    format: Literal["edgesplit.fingerprint/1"] = FORMAT
    ir_version: int
    opsets: tuple[tuple[str, int], ...]
    """Domain and version of each operator set."""
    functions: tuple[str, ...]
    """Digests of the model's own functions, in its order."""
    layers: tuple[LayerFingerprint, ...]
    """In the planner's order."""
    tensors: tuple[TensorFingerprint, ...]
    weights: tuple[str, ...]
    """Digests by `external_weight_digest`, `embedded_weight_digest` and `sparse_weight_digest`, sorted."""


def sha256_of(raw: bytes | memoryview) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(raw).hexdigest()


def external_weight_digest(name: str, data_type: int, dims: Sequence[int], data_sha256: str) -> str:
    """Digest of a weight whose data are in a weights file. `data_type` is ONNX's number."""
    return sha256_of(msgspec.json.encode(["beside", name, data_type, [*dims], data_sha256]))


def embedded_weight_digest(raw: bytes | memoryview) -> str:
    """Digest of a weight that is embedded in the graph, by its bytes there (ONNX TensorProto)."""
    return sha256_of(b"inside\n" + bytes(raw))


def sparse_weight_digest(raw: bytes | memoryview) -> str:
    """Digest of a sparse weight, by its bytes in the graph (ONNX SparseTensorProto)."""
    return sha256_of(b"sparse\n" + bytes(raw))


def encode_fingerprint(fingerprint: Fingerprint) -> bytes:
    """Encode a fingerprint deterministically: the same model gives the same bytes."""
    return msgspec.json.encode(fingerprint, order="deterministic")


def fingerprint_file(raw: bytes) -> FingerprintFile:
    """The manifest's entry for these bytes."""
    return FingerprintFile(sha256_of(raw), len(raw))


def decode_fingerprint(raw: bytes, signed: FingerprintFile) -> Fingerprint:
    """Decode a fingerprint, if `raw` are the bytes that were signed; TrustError otherwise."""
    if len(raw) > LIMITS.fingerprint_bytes or fingerprint_file(raw) != signed:
        raise TrustError("the model's fingerprint is not the one that was signed with its release")
    return decode_json(raw, Fingerprint, "the model's fingerprint", error=TrustError)


warm_up_structs(__name__)
