"""The far half of one row as one ordinary ONNX model, which any Open Inference Protocol server with onnxruntime runs.

Its inputs are what devices send by that row: a tensor that travels by a lossy codec comes encoded, with its companions,
and operators before the slices' own undo it as `edgesplit.release.boundary_codecs` does. Its outputs are what the row
receives. Weights
are inside the file. Where the slices came from, and whether they may be believed, is the caller's to know.
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

LARGEST_BYTES = 2_000_000_000
"""Protobuf holds no more than 2 GiB in one file; some of it is not weights."""
STANDARD_OPERATORS = 17
_ONNX_TYPES = {name: number for number, name in nodes.DATATYPES.items()}
SERVERS = "Triton and KServe"


@dataclass(frozen=True, slots=True)
class Part:
    """One slice's files."""

    slice: Slice
    graph: bytes
    weights: Bytes = b""


def check_exportable(manifest: Manifest, row: Row) -> None:
    """ModelRefused, saying what would do, where the row's far half is not ONNX alone."""
    if row.is_local:
        raise ModelRefused(f"row {row.name!r} has no far half: the device answers alone")
    if foreign := set(row.codecs.values()) - set(boundary_codecs.CODECS):
        raise ModelRefused(f"row {row.name!r} needs codecs {sorted(foreign)}, which are not known here")
    kinds = {one.format: one.name for one in manifest.slices if one.name in row.remote}
    if "tflite" in kinds:
        raise ModelRefused(
            f"row {row.name!r} of {manifest.model} is TFLite, which no onnxruntime runs, and that is what {SERVERS} run"
            " models on: `edgectl offload serve` finishes it, or push the model as ONNX"
        )
    if "input" in kinds:
        raise ModelRefused(
            f"row {row.name!r} sends the picture as the camera gives it, and decoding it is ours: `edgectl deploy"
            " … --offload URL` plans with that done on the device"
        )
    size = sum(one.bytes for one in manifest.slices if one.name in row.remote)
    if size > LARGEST_BYTES:
        raise ModelRefused(f"the far half of row {row.name!r} has {size} bytes, and an ONNX file holds 2 GB: cut later")


def ends_of(manifest: Manifest, row: Row) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """What the row's far half takes, as its slices take it, and what it gives back."""
    specs = {spec.name: spec for one in manifest.slices for spec in (*one.inputs, *one.outputs)}
    try:
        return tuple(specs[name] for name in row.sends), tuple(specs[name] for name in row.receives)
    except KeyError as error:
        raise ModelRefused(f"row {row.name!r} names the tensor {error}, which no slice has") from error


def wire_ends(manifest: Manifest, row: Row) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The same as they travel: inputs by the row's codecs."""
    inputs, outputs = ends_of(manifest, row)
    sent = (boundary_codecs.wire_specs(spec, row.codecs.get(spec.name, boundary_codecs.RAW)) for spec in inputs)
    return tuple(one for specs in sent for one in specs), outputs


def merged(manifest: Manifest, row: Row, parts: Sequence[Part], name: str) -> onnx.ModelProto:
    """These slices, which are the row's far ones in the manifest's order, as one model called `name`."""
    inputs, outputs = ends_of(manifest, row)
    model = onnx.ModelProto(producer_name="edgesplit")
    model.graph.name = name
    weights: dict[str, onnx.TensorProto] = {}
    for part in parts:
        _add(model, part, weights)
    model.graph.initializer.extend(weights.values())
    model.graph.input.extend(declaration(one) for one in wire_ends(manifest, row)[0])
    decoding: list[onnx.NodeProto] = []
    for spec in inputs:
        codec = row.codecs.get(spec.name, boundary_codecs.RAW)
        if codec in boundary_codecs.lossy_codecs(spec.datatype):
            decoding += _decoder(model, spec, codec)
    model.graph.output.extend(declaration(one) for one in outputs)
    own = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*decoding, *own])
    return model


def _add(model: onnx.ModelProto, part: Part, weights: dict[str, onnx.TensorProto]) -> None:
    """One slice's operators and weights; a weight that several slices use is there once."""
    proto = onnx.ModelProto.FromString(part.graph)
    model.ir_version = max(model.ir_version, proto.ir_version)
    model.graph.node.extend(proto.graph.node)
    for tensor in proto.graph.initializer:
        weights.setdefault(tensor.name, _inside(tensor, part))
    known = {one.values.name for one in model.graph.sparse_initializer}
    model.graph.sparse_initializer.extend(one for one in proto.graph.sparse_initializer if one.values.name not in known)
    functions = {(one.domain, one.name) for one in model.functions}
    model.functions.extend(one for one in proto.functions if (one.domain, one.name) not in functions)
    _import_opsets(model, proto.opset_import, part.slice.name)


def _import_opsets(model: onnx.ModelProto, imports: Iterable[onnx.OperatorSetIdProto], slice_name: str) -> None:
    known = {one.domain: one.version for one in model.opset_import}
    for one in imports:
        if known.setdefault(one.domain, one.version) != one.version:
            raise ModelRefused(f"slice {slice_name} means another version of the operators {one.domain!r}")
        if all(one.domain != there.domain for there in model.opset_import):
            model.opset_import.add(domain=one.domain, version=one.version)


def _inside(tensor: onnx.TensorProto, part: Part) -> onnx.TensorProto:
    """The weight with its bytes in it."""
    if not archive.is_external(tensor):
        return tensor
    _, offset, length = archive.external(tensor)
    data = memoryview(part.weights)[offset : offset + length]
    if len(data) != length:
        raise ModelRefused(f"slice {part.slice.name}: its weights file is cut short")
    return onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=bytes(data))


def _decoder(model: onnx.ModelProto, spec: TensorSpec, codec: str) -> list[onnx.NodeProto]:
    """What makes the tensor of what travels, by operators that every version has. Both have its name on their side, so
    the slices read it by another."""
    tensor, plain = spec.name, f"{spec.name}:decoded"
    _rename_reads(model.graph, tensor, plain)
    _use_standard_operators(model)
    to = _ONNX_TYPES[spec.datatype]
    if codec == boundary_codecs.FP16:
        return [onnx.helper.make_node("Cast", [tensor], [plain], to=to)]
    values, zero, above, scaled = (f"{plain}:{step}" for step in ("values", "zero", "above", "scaled"))
    single = onnx.TensorProto.FLOAT
    return [
        onnx.helper.make_node("Cast", [tensor], [values], to=single),
        onnx.helper.make_node("Cast", [boundary_codecs.zero_point_name(tensor)], [zero], to=single),
        onnx.helper.make_node("Sub", [values, zero], [above]),
        onnx.helper.make_node("Mul", [above, boundary_codecs.scale_name(tensor)], [scaled]),
        onnx.helper.make_node("Cast", [scaled], [plain], to=to),
    ]


def _use_standard_operators(model: onnx.ModelProto) -> None:
    """Slices of other domains' operators alone do not import ONNX's own, which decoding needs."""
    if all(one.domain not in ("", "ai.onnx") for one in model.opset_import):
        model.opset_import.add(domain="", version=STANDARD_OPERATORS)


def _rename_reads(graph: onnx.GraphProto, old: str, new: str) -> None:
    """In every node, and where a subgraph gives what it captured."""
    for one in nodes.all_graphs(graph):
        for node in one.node:
            for place, read in enumerate(node.input):
                if read == old:
                    node.input[place] = new
        for output in one.output:
            if output.name == old:
                output.name = new
