"""May this manifest call itself another cut of that release? What the planner's key can say, and nothing else.

`check_recut` compares two manifests and the signed anatomy of the model; `check_slice` looks into the files of one
slice. Both are pure, raise TrustError, and are repeated at installation and at each load, on the device and on the
offload server. Each side holds only its own slices: every layer is in exactly one slice by the manifest, and a slice
holds exactly its layers' operators by its files, so whoever runs slices needs no look at those of others.

Equal operators with equal tensor names are the same computation, for a graph names each tensor once and everything is
wired by name; so what `never_leaves` and `sends` name means what it meant (docs/decisions/0015-planner-role.md).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from edgesplit.errors import TrustError
from edgesplit.limits import LIMITS
from edgesplit.plan import Plan, Row, far_half
from edgesplit.release.boundary_codecs import LOSSY
from edgesplit.release.fingerprint import Anatomy, LayerParts, digest, sparse_weight, weight_beside, weight_inside
from edgesplit.release.manifest import Manifest, Slice, SliceFile
from edgesplit.release.onnx_graph import SliceGraph, read_graph, read_pointer, sparse_name, tensor_name

GRAPH, WEIGHTS = "graph.onnx", "weights.bin"
SAME: Final = ("model", "model_sha256", "input_spec", "inputs", "outputs", "golden")
"""What a recut has exactly as its base."""

ReadFile = Callable[[Slice, SliceFile], bytes | mmap.mmap]
"""The bytes of a slice's file as the runtime will get them: mapped from disk, or decrypted."""


def check_recut(recut: Manifest, base: Manifest, anatomy: Anatomy | None) -> None:
    """TrustError unless `recut` is `base` cut elsewhere, with privacy limits at least as strict.

    Whether the release key signed `base`, and `anatomy` with it, is the caller's to know. What is in the slices' files
    is `check_slice`'s.
    """
    if base.recut_of:
        raise TrustError("a recut of a recut: its base must be a release that the release key signed")
    for name in SAME:
        if getattr(recut, name) != getattr(base, name):
            raise TrustError(f"a recut may not change the release's {name}: that needs the release key")
    if recut.anatomy is not None:
        raise TrustError("a recut may not bring an anatomy of its own")
    if not recut.plans:
        raise TrustError("a recut without a plan")
    _check_slices(recut, base, anatomy)
    if bare := [one.name for one in recut.slices if one.files and one.sealed is None and base.is_encrypted]:
        raise TrustError(f"the slice {bare[0]!r} of a recut is in clear, and its base is encrypted")
    _check_order(recut)
    _check_compiled(recut, base)
    for device_class, plan in recut.plans.items():
        _check_plan(device_class, plan, recut, base)


def check_slice(one: Slice, base: Manifest, anatomy: Anatomy | None, read: ReadFile) -> None:
    """TrustError unless the slice's files are the base's own, or hold exactly its layers as the anatomy lists them."""
    if one in base.every_slice:
        return
    if anatomy is None:
        raise TrustError(_needs_anatomy(one))
    files: dict[str, SliceFile] = {file.name: file for file in one.files}
    graph = read_graph(_read(one, files, GRAPH, read))
    _check_graph(one, graph, anatomy)
    _check_weights(one, graph, anatomy, files, read)


# Slices, by the manifest


def _check_slices(recut: Manifest, base: Manifest, anatomy: Anatomy | None) -> None:
    own = [one for one in recut.slices if one in base.slices]
    if len(own) == len(recut.slices) == len(base.slices):
        return
    fresh = [one for one in recut.slices if one not in base.slices]
    if anatomy is None:
        raise TrustError(_needs_anatomy(fresh[0]) if fresh else "a recut leaves slices of its base out")
    layers = {layer.name: layer for layer in anatomy.layers}
    held = [name for one in recut.slices for name in one.layers]
    if len(set(held)) != len(held) or set(held) != layers.keys():
        raise TrustError("a recut's slices do not hold every layer of the model exactly once")
    kinds: set[tuple[str, str]] = {(one.format, one.kernels) for one in base.slices if one.format != "input"}
    for one in fresh:
        here = set(one.layers)
        if list(one.layers) != [name for name in layers if name in here]:
            raise TrustError(f"the slice {one.name!r} of a recut lists its layers in another order than the model")
        _check_described(one, [layers[name] for name in one.layers], anatomy, kinds)


def _needs_anatomy(one: Slice) -> str:
    return (
        f"the slice {one.name!r} is none of the release it is a recut of, which can only be put into other tables:"
        " another cut of this model needs the release key"
    )


def _check_described(one: Slice, layers: Iterable[LayerParts], anatomy: Anatomy, kinds: set[tuple[str, str]]) -> None:
    """What the manifest says of the slice is what its layers make of it."""
    files = [file.name for file in one.files]
    same_kind = one.format == "onnx" and (one.format, one.kernels) in kinds and one.sealed is None
    if not same_kind or files not in ([GRAPH], [GRAPH, WEIGHTS]):
        raise TrustError(f"the slice {one.name!r} of a recut does not run as its base's slices do")
    if one.files[0].bytes > LIMITS.graph_bytes:
        raise TrustError(f"the slice {one.name!r}: a graph of {one.files[0].bytes} bytes, at most {LIMITS.graph_bytes}")
    held = list(layers)
    writes = {name for layer in held for name in layer.writes}
    reads = {name for layer in held for name in layer.reads} - writes
    takes, gives = [spec.name for spec in one.inputs], [spec.name for spec in one.outputs]
    if sorted(takes) != sorted(reads) or len(set(gives)) != len(gives) or not writes.issuperset(gives):
        raise TrustError(f"the slice {one.name!r} takes or gives other tensors than its layers do")
    specs = {part.spec.name: part.spec for part in anatomy.tensors}
    if any(specs.get(spec.name) != spec for spec in (*one.inputs, *one.outputs)):
        raise TrustError(f"the slice {one.name!r} says of a tensor what the model does not")


def _check_order(recut: Manifest) -> None:
    """Each tensor has one writer, before its readers; an application's tensors are written by nobody."""
    there = {spec.name for spec in recut.inputs}
    for one in recut.slices:
        takes, gives = {spec.name for spec in one.inputs}, {spec.name for spec in one.outputs}
        if not takes <= there or gives & there:
            raise TrustError(f"the slice {one.name!r} of a recut reads what is not there yet, or writes what is")
        there |= gives
    if not {spec.name for spec in recut.outputs} <= there:
        raise TrustError("a recut's slices do not compute the model's outputs")


def _check_compiled(recut: Manifest, base: Manifest) -> None:
    own = {one.name for one in recut.slices if one in base.slices}
    for compiled in recut.compiled:
        if compiled not in base.compiled or not own.issuperset(compiled.covers):
            raise TrustError(f"the compiled slice {compiled.slice.name!r} is not the base's, over the base's slices")


# Plans


def _check_plan(device_class: str, plan: Plan, recut: Manifest, base: Manifest) -> None:
    """The plan keeps what the base's plan of that class keeps; if the base has none of that class, what each of its
    plans keeps."""
    known = base.plans.get(device_class)
    models = list(base.plans.values()) if known is None else [known]
    if plan.device_class != device_class or plan.model not in {one.model for one in base.plans.values()}:
        raise TrustError(f"the plan for {device_class!r} says it is for something else")
    if loose := {name for one in models for name in one.never_leaves} - set(plan.never_leaves):
        raise TrustError(
            f"the plan for {device_class!r} lets {sorted(loose)[0]!r} leave the device, which its base forbids"
        )
    if early := {layer for one in models for layer in one.earliest_cut} - set(plan.earliest_cut):
        raise TrustError(
            f"the plan for {device_class!r} lets layer {sorted(early)[0]!r} run elsewhere, which its base forbids"
        )
    if plan.offload not in {one.offload for one in models}:
        raise TrustError(
            f"the plan for {device_class!r} sends to {plan.offload or 'the enrolled server'!r}, which its base does not"
        )
    if plan.local is None and all(one.local is not None for one in models):
        raise TrustError(f"the plan for {device_class!r} leaves the device no way to answer alone, which its base does")
    lossless = not all(_may_lose(one) for one in models)
    for row in plan.rows:
        codecs = {*row.codecs.values(), *(codec for hop in row.hops for codec in hop.codecs.values())}
        if lossless and codecs & set(LOSSY):
            raise TrustError(f"row {row.name!r} for {device_class!r} loses precision, which its base does not allow")
        _check_row(row, recut)


def _may_lose(plan: Plan) -> bool:
    """Did the operator allow the plan some loss of precision?"""
    try:
        return float(plan.limits.get("max_loss", "0")) > 0
    except ValueError:
        return False


def _check_row(row: Row, recut: Manifest) -> None:
    """The row sends what its far half takes and no more, and gets back answers alone. That it keeps the plan's earliest
    cut on the device, every reader of a manifest checks."""
    by_name = {one.name: one for one in recut.slices}
    here, there = [by_name[name] for name in row.device], [by_name[name] for name in row.remote]
    made_here, made_there = ({spec.name for one in half for spec in one.outputs} for half in (here, there))
    needed_there = {spec.name for one in there for spec in one.inputs} - made_there
    if set(row.sends) != needed_there or len(set(row.sends)) != len(row.sends):
        raise TrustError(f"row {row.name!r} of a recut sends other tensors than its far half takes")
    if not set(row.receives) <= made_there & {spec.name for spec in recut.outputs}:
        raise TrustError(f"row {row.name!r} of a recut gets back what is no answer of its far half")
    given = {spec.name for spec in recut.inputs}
    if not {spec.name for one in here for spec in one.inputs} <= made_here | given:
        raise TrustError(f"row {row.name!r} of a recut needs on the device what is computed elsewhere")
    if row.hops:
        _check_row(far_half(row), recut)


# Slices, by their files


def _read(one: Slice, files: Mapping[str, SliceFile], name: str, read: ReadFile) -> memoryview:
    if name not in files:
        raise TrustError(f"the slice {one.name!r} has no {name}")
    raw = memoryview(read(one, files[name]))
    if len(raw) != files[name].bytes:
        raise TrustError(f"{one.name}/{name}: {len(raw)} bytes instead of {files[name].bytes}")
    return raw


def _check_graph(one: Slice, graph: SliceGraph, anatomy: Anatomy) -> None:
    """The slice's operators are its layers', each once; it declares its ends as the model does."""
    if graph.ir_version != anatomy.ir_version or not set(graph.opsets) <= set(anatomy.opsets):
        raise TrustError(f"the slice {one.name!r} gives its operators another meaning than the model does")
    if len({domain for domain, _ in graph.opsets}) != len(graph.opsets):
        raise TrustError(f"the slice {one.name!r} names an operator set twice")
    if tuple(map(digest, graph.functions)) != anatomy.functions:
        raise TrustError(f"the slice {one.name!r} has other functions than the model")
    layers = {layer.name: layer for layer in anatomy.layers}
    wanted = {node for name in one.layers for node in layers[name].nodes}
    found = [digest(node) for node in graph.nodes]
    if len(found) != len(set(found)) or set(found) != wanted:
        raise TrustError(f"the slice {one.name!r} holds other operators than its layers do in the model")
    declared = {part.spec.name: part.declared for part in anatomy.tensors}
    for specs, ends in ((one.inputs, graph.inputs), (one.outputs, graph.outputs)):
        if [declared.get(spec.name) for spec in specs] != [digest(end) for end in ends]:
            raise TrustError(f"the slice {one.name!r} declares other inputs or outputs than the manifest says")


def _check_weights(
    one: Slice, graph: SliceGraph, anatomy: Anatomy, files: Mapping[str, SliceFile], read: ReadFile
) -> None:
    """Every weight is the model's under that name, once, and none is called like a tensor that is computed."""
    known = frozenset(anatomy.weights)
    beside = _read(one, files, WEIGHTS, read) if WEIGHTS in files else memoryview(b"")
    bearers = [_weight(raw, known, beside) for raw in graph.initializers]
    for raw in graph.sparse_initializers:
        if sparse_weight(raw) not in known:
            raise TrustError(f"the slice {one.name!r} has a sparse weight that is not the model's")
        bearers.append(sparse_name(raw))
    if len(set(bearers)) != len(bearers) or {part.spec.name for part in anatomy.tensors} & set(bearers):
        raise TrustError(f"the slice {one.name!r} has a weight twice, or one in a tensor's place")


def _weight(raw: memoryview, known: frozenset[str], beside: memoryview) -> str:
    """The name of that initializer; TrustError if it is not one of the model."""
    if weight_inside(raw) in known:
        return tensor_name(raw)
    pointer = read_pointer(raw)
    end = pointer.offset + pointer.length
    if pointer.location != WEIGHTS or end > len(beside):
        raise TrustError(f"the weight {pointer.name[:80]!r} is not in the slice's weights file")
    data = digest(beside[pointer.offset : end])
    if weight_beside(pointer.name, pointer.data_type, pointer.dims, data) not in known:
        raise TrustError(f"the weight {pointer.name[:80]!r} is not the model's")
    return pointer.name
