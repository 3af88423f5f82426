"""The remote half of one row as one ordinary ONNX model, which any Open Inference Protocol server with onnxruntime
runs.

Its inputs are what devices send by that row: a tensor that travels by a lossy codec arrives encoded, with its companion
tensors, and operators in front of the slices' own decode it as `edgesplit.release.boundary_codecs` does. Its outputs
are what the row receives. Weights are inside the file. The caller verifies the slices' signatures; nothing is verified
here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx

from edgesplit.errors import ModelRefused
from edgesplit.plan import Row
from edgesplit.release import boundary_codecs
from edgesplit.release.manifest import Manifest, Slice, TensorSpec
from edgesplit_partitioner.ir.chunking import Bytes
from edgesplit_partitioner.onnx_format import archive, nodes
from edgesplit_partitioner.onnx_format.slices import declaration

MAX_EXPORT_BYTES = 2_000_000_000
"""Maximum total size of the slices in bytes: protobuf holds no more than 2 GiB in one file, and some of it is not
weights."""
STANDARD_OPSET = 17
"""Version of ONNX's own operator set that decoding imports where no slice imports any."""
SERVERS = "Triton and KServe"
"""Servers that an error message names as the ones that run an export."""


@dataclass(frozen=True, slots=True)
class SlicePart:
    """One slice of the remote half: its entry in the manifest and the contents of its files."""

    slice: Slice
    graph: bytes
    weights: Bytes = b""


def check_exportable(manifest: Manifest, row: Row) -> None:
    """Raise ModelRefused, with what to do instead, where the row's remote half cannot be exported as ONNX: it has none,
    has a codec that is not known here, is TFLite, decodes camera frames, or is larger than an ONNX file may be."""
    if row.is_local:
        raise ModelRefused(f"row {row.name!r} has no remote half: the device runs all of it")
    if unknown := set(row.codecs.values()) - set(boundary_codecs.CODECS):
        raise ModelRefused(f"row {row.name!r} needs codecs {sorted(unknown)}, which are not known here")
    if packed := set(row.codecs.values()) & set(boundary_codecs.PACKED):
        raise ModelRefused(
            f"row {row.name!r} sends by {sorted(packed)[0]}, which no operator of ONNX decodes: `edgectl deploy …"
            " --offload URL` plans without it"
        )
    slice_of_format = {entry.format: entry.name for entry in manifest.slices if entry.name in row.remote}
    if "tflite" in slice_of_format:
        raise ModelRefused(
            f"row {row.name!r} of {manifest.model} is TFLite, which no onnxruntime runs, and that is what {SERVERS} run"
            " models on: `edgectl offload serve` finishes it, or push the model as ONNX"
        )
    if "input" in slice_of_format:
        raise ModelRefused(
            f"row {row.name!r} sends the encoded picture, which only edgesplit's own server decodes: `edgectl deploy"
            " … --offload URL` plans with that done on the device"
        )
    size = sum(entry.bytes for entry in manifest.slices if entry.name in row.remote)
    if size > MAX_EXPORT_BYTES:
        raise ModelRefused(
            f"the remote half of row {row.name!r} has {size} bytes, and an ONNX file holds 2 GB: cut later"
        )


def remote_signature(manifest: Manifest, row: Row) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The inputs and the outputs of the row's remote half, as its slices declare them; ModelRefused where the row names
    a tensor that no slice has."""
    specs = {spec.name: spec for entry in manifest.slices for spec in (*entry.inputs, *entry.outputs)}
    try:
        return tuple(specs[name] for name in row.sends), tuple(specs[name] for name in row.receives)
    except KeyError as error:
        raise ModelRefused(f"row {row.name!r} names the tensor {error}, which no slice has") from error


def wire_signature(manifest: Manifest, row: Row) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The inputs and the outputs of the row's remote half as they travel: inputs encoded by the row's codecs."""
    inputs, outputs = remote_signature(manifest, row)
    encoded = (boundary_codecs.wire_specs(spec, row.codecs.get(spec.name, boundary_codecs.RAW)) for spec in inputs)
    return tuple(spec_on_wire for specs in encoded for spec_on_wire in specs), outputs


def merge_slices(manifest: Manifest, row: Row, parts: Sequence[SlicePart], name: str) -> onnx.ModelProto:
    """The row's remote slices, given in the manifest's order, as one ONNX model called `name`."""
    inputs, outputs = remote_signature(manifest, row)
    model = onnx.ModelProto(producer_name="edgesplit")
    model.graph.name = name
    weights: dict[str, onnx.TensorProto] = {}
    for part in parts:
        _append_slice(model, part, weights)
    model.graph.initializer.extend(weights.values())
    model.graph.input.extend(declaration(wire_spec) for wire_spec in wire_signature(manifest, row)[0])
    decoder_nodes: list[onnx.NodeProto] = []
    for spec in inputs:
        codec = row.codecs.get(spec.name, boundary_codecs.RAW)
        if codec in boundary_codecs.lossy_codecs(spec.datatype):
            decoder_nodes += _decoder_nodes(model, spec, codec)
    model.graph.output.extend(declaration(wire_spec) for wire_spec in outputs)
    slice_nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*decoder_nodes, *slice_nodes])
    return model


def _append_slice(model: onnx.ModelProto, part: SlicePart, weights: dict[str, onnx.TensorProto]) -> None:
    """Append one slice's operators and weights to `model`; a weight that several slices use is stored once."""
    proto = onnx.ModelProto.FromString(part.graph)
    model.ir_version = max(model.ir_version, proto.ir_version)
    model.graph.node.extend(proto.graph.node)
    for tensor in proto.graph.initializer:
        weights.setdefault(tensor.name, _with_data_inline(tensor, part))
    sparse_names = {sparse.values.name for sparse in model.graph.sparse_initializer}
    model.graph.sparse_initializer.extend(
        sparse for sparse in proto.graph.sparse_initializer if sparse.values.name not in sparse_names
    )
    functions = {(function.domain, function.name) for function in model.functions}
    model.functions.extend(
        function for function in proto.functions if (function.domain, function.name) not in functions
    )
    _import_opsets(model, proto.opset_import, part.slice.name)


def _import_opsets(model: onnx.ModelProto, imports: Iterable[onnx.OperatorSetIdProto], slice_name: str) -> None:
    versions = {opset.domain: opset.version for opset in model.opset_import}
    for imported in imports:
        if versions.setdefault(imported.domain, imported.version) != imported.version:
            raise ModelRefused(f"slice {slice_name} means another version of the operators {imported.domain!r}")
        if all(imported.domain != present.domain for present in model.opset_import):
            model.opset_import.add(domain=imported.domain, version=imported.version)


def _with_data_inline(tensor: onnx.TensorProto, part: SlicePart) -> onnx.TensorProto:
    """The weight with its bytes inside the message instead of in the slice's weights file."""
    if not archive.is_external(tensor):
        return tensor
    _, offset, length = archive.external_location(tensor)
    data = memoryview(part.weights)[offset : offset + length]
    if len(data) != length:
        raise ModelRefused(f"slice {part.slice.name}: its weights file is cut short")
    return onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=bytes(data))


def _decoder_nodes(model: onnx.ModelProto, spec: TensorSpec, codec: str) -> list[onnx.NodeProto]:
    """The nodes that decode a tensor from its form on the wire, with operators that every operator-set version has.

    The encoded tensor and the slices' tensor have the same name, so the slices' reads are renamed to the decoded one.
    """
    tensor, decoded = spec.name, f"{spec.name}:decoded"
    nodes.rename_reads(model.graph, tensor, decoded)
    _import_standard_opset(model)
    target_type = nodes.ELEMENT_TYPES[spec.datatype]
    if codec == boundary_codecs.FP16:
        return [onnx.helper.make_node("Cast", [tensor], [decoded], to=target_type)]
    # int8, int6: value = (quantised - zero point) * scale, computed in float32, as `boundary_codecs` does.
    values, zero_point, shifted, scaled = (f"{decoded}:{step}" for step in ("values", "zero", "above", "scaled"))
    float32 = onnx.TensorProto.FLOAT
    return [
        onnx.helper.make_node("Cast", [tensor], [values], to=float32),
        onnx.helper.make_node("Cast", [boundary_codecs.zero_point_name(tensor)], [zero_point], to=float32),
        onnx.helper.make_node("Sub", [values, zero_point], [shifted]),
        onnx.helper.make_node("Mul", [shifted, boundary_codecs.scale_name(tensor)], [scaled]),
        onnx.helper.make_node("Cast", [scaled], [decoded], to=target_type),
    ]


def _import_standard_opset(model: onnx.ModelProto) -> None:
    """Import ONNX's own operator set, which decoding needs, where all slices use operators of other domains alone."""
    if all(opset.domain not in ("", "ai.onnx") for opset in model.opset_import):
        model.opset_import.add(domain="", version=STANDARD_OPSET)
