"""What a model consists of, whatever its cut: its layers with their operators, its tensors and its weights, by digest.

The release key signs it with a model's first release. A recut of that release is the same model if its slices hold
these layers, each once, and in them these operators and weights, byte for byte (`edgesplit.release.recut`). Only
digests are here: of an operator's bytes as an ONNX file holds them, and of a weight's name, type, shape and data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from edgesplit.errors import TrustError
from edgesplit.limits import LIMITS
from edgesplit.msgspec_warmup import settle
from edgesplit.release.manifest import AnatomyFile, TensorSpec

FORMAT: Final = "edgesplit.anatomy/1"


class LayerParts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layer: the tensors that it takes and gives, and its operators' digests."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    nodes: tuple[str, ...]
    """Each once. An operator that depends on weights alone may be in several layers; the input layer has none."""


class TensorPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor between layers."""

    spec: TensorSpec
    declared: str
    """Digest of its declaration (ONNX ValueInfoProto) where a slice takes or gives it."""


class Anatomy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of one ONNX model."""

    format: Literal["edgesplit.anatomy/1"] = FORMAT
    ir_version: int
    opsets: tuple[tuple[str, int], ...]
    """Domain and version of each operator set."""
    functions: tuple[str, ...]
    """Digests of the model's own functions, in its order."""
    layers: tuple[LayerParts, ...]
    """In the planner's order."""
    tensors: tuple[TensorPart, ...]
    weights: tuple[str, ...]
    """Digests by `weight_beside`, `weight_inside` and `sparse_weight`, sorted."""


def digest(raw: bytes | memoryview) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(raw).hexdigest()


def weight_beside(name: str, data_type: int, dims: Sequence[int], data_sha256: str) -> str:
    """The digest of a weight whose data lie in a weights file. `data_type` is ONNX's number."""
    return digest(msgspec.json.encode(["beside", name, data_type, [*dims], data_sha256]))


def weight_inside(raw: bytes | memoryview) -> str:
    """The digest of a weight that lies in the graph, by its bytes there (ONNX TensorProto)."""
    return digest(b"inside\n" + bytes(raw))


def sparse_weight(raw: bytes | memoryview) -> str:
    """The digest of a sparse weight, by its bytes in the graph (ONNX SparseTensorProto)."""
    return digest(b"sparse\n" + bytes(raw))


def encode_anatomy(anatomy: Anatomy) -> bytes:
    """Its bytes; the same model gives the same."""
    return msgspec.json.encode(anatomy, order="deterministic")


def anatomy_file(raw: bytes) -> AnatomyFile:
    """What a manifest says of these bytes."""
    return AnatomyFile(digest(raw), len(raw))


def decode_anatomy(raw: bytes, signed: AnatomyFile) -> Anatomy:
    """The anatomy in `raw`, if these are the bytes that were signed; TrustError if not."""
    if len(raw) > LIMITS.anatomy_bytes or anatomy_file(raw) != signed:
        raise TrustError("the model's anatomy is not the one that was signed with its release")
    try:
        return msgspec.json.decode(raw, type=Anatomy)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TrustError(f"the model's anatomy: {error}") from error


settle(__name__)
