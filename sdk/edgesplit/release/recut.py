"""Recuts: verification that a manifest signed by the planner's key is the same model as a given release, only cut
elsewhere.

`check_recut` compares the two manifests and the model's signed fingerprint; `check_recut_slice` examines the files of
one slice. Both are pure, raise TrustError, and are repeated at installation and at each load, on the device and on the
offload server. Each side has only its own slices: by the manifest every layer is in exactly one slice, and by its files
a slice contains exactly its layers' operators, so the files of other slices need not be examined.

Equal operators with equal tensor names are the same computation, because a graph names each tensor once and everything
is wired by name; so tensors named in `private_tensors` and `sends` keep their meaning
(docs/decisions/0015-planner-role.md).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from edgesplit.errors import TrustError
from edgesplit.limits import LIMITS
from edgesplit.plan import Plan, Row, remote_half_beyond
from edgesplit.release.boundary_codecs import LOSSY
from edgesplit.release.fingerprint import (
    Fingerprint,
    LayerFingerprint,
    embedded_weight_digest,
    external_weight_digest,
    sha256_of,
    sparse_weight_digest,
)
from edgesplit.release.manifest import Manifest, Slice, SliceFile
from edgesplit.release.onnx_graph import SliceGraph, read_external_weight, read_graph, sparse_name, tensor_name

GRAPH, WEIGHTS = "graph.onnx", "weights.bin"
UNCHANGED_FIELDS: Final = (
    "model",
    "model_sha256",
    "input_spec",
    "inputs",
    "outputs",
    "golden",
    "lineage",
    "output_kind",
)
"""Manifest fields that a recut must have in common with its base."""

ReadFile = Callable[[Slice, SliceFile], bytes | mmap.mmap]
"""Returns the bytes of a slice's file as the runtime will get them: mapped from disk, or decrypted."""


def check_recut(recut: Manifest, base: Manifest, fingerprint: Fingerprint | None) -> None:
    """TrustError unless `recut` is `base` cut elsewhere, with privacy limits at least as strict.

    The caller must have verified that the release key signed `base` and `fingerprint`. The slices' files are checked by
    `check_recut_slice`.
    """
    if base.recut_of:
        raise TrustError("a recut of a recut: its base must be a release that the release key signed")
    if base.family or recut.family:
        raise TrustError("a family is not cut elsewhere by the planner: that needs the release key")
    for name in UNCHANGED_FIELDS:
        if getattr(recut, name) != getattr(base, name):
            raise TrustError(f"a recut may not change the release's {name}: that needs the release key")
    if recut.fingerprint is not None:
        raise TrustError("a recut may not bring a fingerprint of its own")
    if not recut.plans:
        raise TrustError("a recut without a plan")
    _check_slices(recut, base, fingerprint)
    if unencrypted := [
        slice_.name for slice_ in recut.slices if slice_.files and slice_.encryption is None and base.is_encrypted
    ]:
        raise TrustError(f"the slice {unencrypted[0]!r} of a recut is in clear, and its base is encrypted")
    _check_order(recut)
    _check_compiled(recut, base)
    for device_class, plan in recut.plans.items():
        _check_plan(device_class, plan, recut, base)


def check_recut_slice(slice_: Slice, base: Manifest, fingerprint: Fingerprint | None, read: ReadFile) -> None:
    """TrustError unless the slice's files are the base's own, or contain exactly its layers as listed in the
    fingerprint."""
    if slice_ in base.all_slices:
        return
    if fingerprint is None:
        raise TrustError(_unknown_slice_message(slice_))
    files: dict[str, SliceFile] = {file.name: file for file in slice_.files}
    graph = read_graph(_read_file(slice_, files, GRAPH, read))
    _check_graph(slice_, graph, fingerprint)
    _check_weights(slice_, graph, fingerprint, files, read)


# Slices, by the manifest


def _check_slices(recut: Manifest, base: Manifest, fingerprint: Fingerprint | None) -> None:
    unchanged = [slice_ for slice_ in recut.slices if slice_ in base.slices]
    if len(unchanged) == len(recut.slices) == len(base.slices):
        return  # the same slices, only in other plans: no fingerprint is needed
    new = [slice_ for slice_ in recut.slices if slice_ not in base.slices]
    if fingerprint is None:
        raise TrustError(_unknown_slice_message(new[0]) if new else "a recut leaves slices of its base out")
    layers = {layer.name: layer for layer in fingerprint.layers}
    layer_names = [name for slice_ in recut.slices for name in slice_.layers]
    # Every layer of the fingerprint is in exactly one slice, and each new slice lists its layers in the model's order.
    if len(set(layer_names)) != len(layer_names) or set(layer_names) != layers.keys():
        raise TrustError("a recut's slices do not hold every layer of the model exactly once")
    kinds = {(slice_.format, slice_.kernels) for slice_ in base.slices if slice_.format != "input"}
    for slice_ in new:
        own_layers = set(slice_.layers)
        if list(slice_.layers) != [name for name in layers if name in own_layers]:
            raise TrustError(f"the slice {slice_.name!r} of a recut lists its layers in another order than the model")
        _check_slice_entry(slice_, [layers[name] for name in slice_.layers], fingerprint, kinds)


def _unknown_slice_message(slice_: Slice) -> str:
    return (
        f"the slice {slice_.name!r} is none of the release it is a recut of, which may only be used in other plans:"
        " another cut of this model needs the release key"
    )


def _check_slice_entry(
    slice_: Slice, layers: Iterable[LayerFingerprint], fingerprint: Fingerprint, kinds: Collection[tuple[str, str]]
) -> None:
    """Check that the slice's manifest entry (files, tensors) follows from its layers."""
    files = [file.name for file in slice_.files]
    same_kind = slice_.format == "onnx" and (slice_.format, slice_.kernels) in kinds and slice_.encryption is None
    if not same_kind or files not in ([GRAPH], [GRAPH, WEIGHTS]):
        raise TrustError(
            f"the slice {slice_.name!r} of a recut has no file, or another format or other kernels than the base's"
        )
    if slice_.files[0].bytes > LIMITS.graph_bytes:
        graph_bytes = slice_.files[0].bytes
        raise TrustError(f"the slice {slice_.name!r}: a graph of {graph_bytes} bytes, at most {LIMITS.graph_bytes}")
    own_layers = list(layers)
    writes = {name for layer in own_layers for name in layer.writes}
    reads = {name for layer in own_layers for name in layer.reads} - writes
    input_names, output_names = [spec.name for spec in slice_.inputs], [spec.name for spec in slice_.outputs]
    if (
        sorted(input_names) != sorted(reads)
        or len(set(output_names)) != len(output_names)
        or not writes.issuperset(output_names)
    ):
        raise TrustError(f"the slice {slice_.name!r} takes or gives other tensors than its layers do")
    specs = {part.spec.name: part.spec for part in fingerprint.tensors}
    if any(specs.get(spec.name) != spec for spec in (*slice_.inputs, *slice_.outputs)):
        raise TrustError(f"the slice {slice_.name!r} declares a tensor differently than the model")


def _check_order(recut: Manifest) -> None:
    """Each tensor is written once, before it is read; no slice writes an input of the model."""
    available = {spec.name for spec in recut.inputs}
    for slice_ in recut.slices:
        input_names, output_names = {spec.name for spec in slice_.inputs}, {spec.name for spec in slice_.outputs}
        if not input_names <= available or output_names & available:
            raise TrustError(
                f"the slice {slice_.name!r} of a recut reads a tensor before it is written, or writes one twice"
            )
        available |= output_names
    if not {spec.name for spec in recut.outputs} <= available:
        raise TrustError("a recut's slices do not compute the model's outputs")


def _check_compiled(recut: Manifest, base: Manifest) -> None:
    unchanged = {slice_.name for slice_ in recut.slices if slice_ in base.slices}
    for compiled in recut.compiled:
        if compiled not in base.compiled or not unchanged.issuperset(compiled.covers):
            raise TrustError(f"the compiled slice {compiled.slice.name!r} is not the base's, over the base's slices")


# Plans


def _check_plan(device_class: str, plan: Plan, recut: Manifest, base: Manifest) -> None:
    """The plan must be at least as strict as the base's plan for this device class; if the base has none, as strict as
    all of its plans."""
    base_plan = base.plans.get(device_class)
    reference_plans = list(base.plans.values()) if base_plan is None else [base_plan]
    if plan.device_class != device_class or plan.model not in {reference.model for reference in base.plans.values()}:
        raise TrustError(f"the plan for {device_class!r} is for another device class or model")
    if unprotected := {name for reference in reference_plans for name in reference.private_tensors} - set(
        plan.private_tensors
    ):
        raise TrustError(
            f"the plan for {device_class!r} lets {sorted(unprotected)[0]!r} leave the device, which its base forbids"
        )
    if movable := {layer for reference in reference_plans for layer in reference.required_local_layers} - set(
        plan.required_local_layers
    ):
        raise TrustError(
            f"the plan for {device_class!r} lets layer {sorted(movable)[0]!r} run elsewhere, which its base forbids"
        )
    if plan.offload not in {reference.offload for reference in reference_plans}:
        raise TrustError(
            f"the plan for {device_class!r} sends to {plan.offload or 'the enrolled server'!r}, which its base does not"
        )
    if plan.local is None and all(reference.local is not None for reference in reference_plans):
        raise TrustError(f"the plan for {device_class!r} has no local row, which its base has")
    lossless = not all(_allows_loss(reference) for reference in reference_plans)
    for row in plan.rows:
        codecs = {*row.codecs.values(), *(codec for hop in row.hops for codec in hop.codecs.values())}
        if lossless and codecs & set(LOSSY):
            raise TrustError(f"row {row.name!r} for {device_class!r} loses precision, which its base does not allow")
        _check_row(row, recut)


def _allows_loss(plan: Plan) -> bool:
    """True if the operator allowed the plan to lose precision."""
    try:
        return any(float(plan.limits.get(limit, "0")) > 0 for limit in ("max_loss", "max_changed"))
    except ValueError:
        return False


def _check_row(row: Row, recut: Manifest) -> None:
    """The row sends exactly the tensors that its remote half needs, and receives only model outputs. That it keeps the
    plan's earliest cut on the device is checked by every reader of a manifest."""
    by_name = {slice_.name: slice_ for slice_ in recut.slices}
    local_slices, remote_slices = [by_name[name] for name in row.device], [by_name[name] for name in row.remote]
    made_locally, made_remotely = (
        {spec.name for slice_ in half for spec in slice_.outputs} for half in (local_slices, remote_slices)
    )
    needed_remotely = {spec.name for slice_ in remote_slices for spec in slice_.inputs} - made_remotely
    if set(row.sends) != needed_remotely or len(set(row.sends)) != len(row.sends):
        raise TrustError(f"row {row.name!r} of a recut sends other tensors than its remote half takes")
    if not set(row.receives) <= made_remotely & {spec.name for spec in recut.outputs}:
        raise TrustError(f"row {row.name!r} of a recut receives tensors that its remote half does not return")
    model_inputs = {spec.name for spec in recut.inputs}
    if not {spec.name for slice_ in local_slices for spec in slice_.inputs} <= made_locally | model_inputs:
        raise TrustError(f"row {row.name!r} of a recut needs tensors on the device that are computed elsewhere")
    # The remainder beyond the next link must satisfy the same rules, link by link.
    if row.hops:
        _check_row(remote_half_beyond(row), recut)


# Slices, by their files


def _read_file(slice_: Slice, files: Mapping[str, SliceFile], name: str, read: ReadFile) -> memoryview:
    if name not in files:
        raise TrustError(f"the slice {slice_.name!r} has no {name}")
    raw = memoryview(read(slice_, files[name]))
    if len(raw) != files[name].bytes:
        raise TrustError(f"{slice_.name}/{name}: {len(raw)} bytes instead of {files[name].bytes}")
    return raw


def _check_graph(slice_: Slice, graph: SliceGraph, fingerprint: Fingerprint) -> None:
    """The slice's operators are those of its layers, each once; its inputs and outputs are declared as in the model."""
    if graph.ir_version != fingerprint.ir_version or not set(graph.opsets) <= set(fingerprint.opsets):
        raise TrustError(
            f"the slice {slice_.name!r} uses other operator sets or another version of ONNX than the model"
        )
    if len({domain for domain, _ in graph.opsets}) != len(graph.opsets):
        raise TrustError(f"the slice {slice_.name!r} names an operator set twice")
    if tuple(map(sha256_of, graph.functions)) != fingerprint.functions:
        raise TrustError(f"the slice {slice_.name!r} has other functions than the model")
    layers = {layer.name: layer for layer in fingerprint.layers}
    expected = {node for name in slice_.layers for node in layers[name].nodes}
    actual = [sha256_of(node) for node in graph.nodes]
    if len(actual) != len(set(actual)) or set(actual) != expected:
        raise TrustError(f"the slice {slice_.name!r} holds other operators than its layers do in the model")
    declared = {part.spec.name: part.declared for part in fingerprint.tensors}
    for specs, declarations in ((slice_.inputs, graph.inputs), (slice_.outputs, graph.outputs)):
        if [declared.get(spec.name) for spec in specs] != [sha256_of(declaration) for declaration in declarations]:
            raise TrustError(f"the slice {slice_.name!r} declares other inputs or outputs than the manifest says")


def _check_weights(
    slice_: Slice, graph: SliceGraph, fingerprint: Fingerprint, files: Mapping[str, SliceFile], read: ReadFile
) -> None:
    """Every weight is the model's under its name, and occurs once; no weight has the name of a computed tensor."""
    known = frozenset(fingerprint.weights)
    weights_file = _read_file(slice_, files, WEIGHTS, read) if WEIGHTS in files else memoryview(b"")
    names = [_verified_weight_name(raw, known, weights_file) for raw in graph.initializers]
    for raw in graph.sparse_initializers:
        if sparse_weight_digest(raw) not in known:
            raise TrustError(f"the slice {slice_.name!r} has a sparse weight that is not the model's")
        names.append(sparse_name(raw))
    if len(set(names)) != len(names) or {part.spec.name for part in fingerprint.tensors} & set(names):
        raise TrustError(f"the slice {slice_.name!r} has a weight twice, or one with the name of a computed tensor")


def _verified_weight_name(raw: memoryview, known: frozenset[str], weights_file: memoryview) -> str:
    """Name of the initializer; TrustError if it is not one of the model's."""
    # A weight embedded in the graph is compared by its bytes; one in the weights file by name, type, shape and the
    # digest of the data that the graph refers to. Its offset is free, because weights files differ between cuts.
    if embedded_weight_digest(raw) in known:
        return tensor_name(raw)
    pointer = read_external_weight(raw)
    end = pointer.offset + pointer.length
    if pointer.location != WEIGHTS or end > len(weights_file):
        raise TrustError(f"the weight {pointer.name[:80]!r} is not in the slice's weights file")
    data = sha256_of(weights_file[pointer.offset : end])
    if external_weight_digest(pointer.name, pointer.data_type, pointer.dims, data) not in known:
        raise TrustError(f"the weight {pointer.name[:80]!r} is not the model's")
    return pointer.name
