"""Slices of a model: which layers are never separated by any cut, and the files that each such group becomes.

Every cut of a switching table is a closed set of layers (with a layer come all it depends on), so layers that the same
cuts contain form an atom, and every cut is a union of atoms. Slices run in one order on any tier: a slice's inputs come
from the caller or earlier slices. The same model and cuts give the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edgesplit.errors import ModelRefused, UsageError
from edgesplit.input_spec import INPUT_LAYER, InputSpec
from edgesplit.limits import LIMITS
from edgesplit.plan import Plan, Row
from edgesplit.release.manifest import Slice, TensorSpec
from edgesplit_partitioner.ir.chunking import Bytes, slice_file
from edgesplit_partitioner.ir.graph import Layer, LayerGraph
from edgesplit_partitioner.ir.prepared_model import Boundary, PreparedModel


@dataclass(frozen=True, slots=True)
class CutSlice:
    """A slice as the manifest lists it, with its files' bytes."""

    slice: Slice
    runs: Mapping[str, Sequence[Bytes]]
    """The bytes of each file, as its chunks in order."""

    @property
    def files(self) -> dict[str, bytes]:
        """The bytes of each file, joined in memory: only for small slices."""
        return {file: b"".join(runs) for file, runs in self.runs.items()}

    def write(self, folder: Path) -> None:
        """Write the files into `folder`, which must exist."""
        for name, runs in self.runs.items():
            with (folder / name).open("wb") as file:
                file.writelines(runs)


def atoms(graph: LayerGraph, device_sets: Iterable[frozenset[str]]) -> list[tuple[str, ...]]:
    """Layers grouped by which of the device sets contain them, in an order in which the groups can run.

    The sets must be closed (with a layer come all it depends on), else UsageError. The input layer is always a group of
    its own.
    """
    sets = list(device_sets)
    for device_set in sets:
        _check_closed(graph, device_set)
    groups: dict[tuple[bool, ...], list[str]] = {}
    for layer in graph.layers:
        if layer.name != INPUT_LAYER or layer.nodes:
            groups.setdefault(tuple(layer.name in device_set for device_set in sets), []).append(layer.name)
    # Along a dependency the sets that contain a layer only become fewer, since each is closed. So a path between two
    # layers of one group never leaves it, and a group that another reads from is in more sets than the other.
    ordered = [tuple(groups[signature]) for signature in sorted(groups, key=lambda signature: -sum(signature))]
    first = [(layer.name,) for layer in graph.layers if layer.name == INPUT_LAYER and not layer.nodes]
    return first + ordered


def _check_closed(graph: LayerGraph, device_set: frozenset[str]) -> None:
    """UsageError where a layer is not of the model, or is in the set without a layer that it reads from."""
    writer = {tensor: layer.name for layer in graph.layers for tensor in layer.writes}
    unknown = device_set - {layer.name for layer in graph.layers}
    if unknown:
        raise UsageError(f"the model has no layers {sorted(unknown)[:5]}")
    for layer in graph.layers:
        if layer.name in device_set:
            for tensor in layer.reads:
                if writer.get(tensor, layer.name) not in device_set:
                    raise UsageError(
                        f"the layer {layer.name!r} cannot be on the device without {writer[tensor]!r}, which it reads"
                    )


def cut_slices(
    model: PreparedModel, graph: LayerGraph, atoms: Sequence[Sequence[str]], spec: InputSpec | None
) -> list[CutSlice]:
    """One slice per atom, in order. `graph` is the model's own, or the one that `with_input_layer` made with `spec`."""
    layers = {layer.name: layer for layer in graph.layers}
    shared = _shared_weights(graph)
    cut: list[CutSlice] = []
    for atom in atoms:
        members = [layers[name] for name in atom]
        boundary = _boundary(graph, members)
        if any(layer.name == INPUT_LAYER and not layer.nodes for layer in members):
            cut.append(_input_slice(members, boundary, spec))
            continue
        number = 1 + sum(made.slice.format != "input" for made in cut)
        cut.append(_model_slice(model, _slice_name(number, atom), members, boundary, shared))
    return cut


def _boundary(graph: LayerGraph, members: Sequence[Layer]) -> Boundary:
    """The tensors that a group of layers reads from outside, and those it writes that are used outside."""
    inside = {layer.name for layer in members}
    written = dict.fromkeys(tensor for layer in members for tensor in layer.writes)
    read = dict.fromkeys(tensor for layer in members for tensor in layer.reads if tensor not in written)
    used = set(graph.outputs)
    used.update(tensor for layer in graph.layers if layer.name not in inside for tensor in layer.reads)

    def spec(name: str) -> TensorSpec:
        return TensorSpec(name, graph.tensors[name].datatype, graph.tensors[name].shape)

    return Boundary(tuple(map(spec, read)), tuple(spec(name) for name in written if name in used))


def _input_slice(members: Sequence[Layer], boundary: Boundary, spec: InputSpec | None) -> CutSlice:
    if spec is None or len(members) != 1:
        raise UsageError("the input layer is a slice of its own, and needs its input spec")
    return CutSlice(Slice(INPUT_LAYER, "input", (INPUT_LAYER,), boundary.inputs, boundary.outputs), {})


def _model_slice(
    model: PreparedModel, name: str, members: Sequence[Layer], boundary: Boundary, shared: Collection[str]
) -> CutSlice:
    contents = model.slice_files(members, boundary, shared)
    listed = [slice_file(file, runs) for file, runs in contents.items()]
    for file in listed:
        if file.bytes > LIMITS.slice_bytes:
            raise ModelRefused(f"the slice {name} has {file.bytes} bytes of {file.name}, at most {LIMITS.slice_bytes}")
    described = Slice(
        name=name,
        format=model.format,
        layers=tuple(layer.name for layer in members),
        inputs=boundary.inputs,
        outputs=boundary.outputs,
        files=tuple(listed),
        kernels=model.kernels,
    )
    return CutSlice(described, {str(name): runs for name, runs in contents.items()})


def _slice_name(number: int, atom: Sequence[str]) -> str:
    """`s01-` and the first layer's name, reduced to the characters and length that a slice's name may have."""
    hint = re.sub(r"[^a-z0-9._-]+", "-", atom[0].lower()).strip("-._")[:40].strip("-._")
    return f"s{number:02d}-{hint}" if hint else f"s{number:02d}"


def _shared_weights(graph: LayerGraph) -> set[str]:
    """Weights that several layers use."""
    seen: set[str] = set()
    shared: set[str] = set()
    for layer in graph.layers:
        shared.update(seen.intersection(layer.weights))
        seen.update(layer.weights)
    return shared


def to_release_plan(table: Plan, slices: Sequence[CutSlice], slice_seconds: Mapping[str, float]) -> Plan:
    """The table of a release: rows of slices in place of layers. `slice_seconds` are the device's, by slice."""
    rows = tuple(_release_row(row, [cut.slice for cut in slices]) for row in table.rows)
    return msgspec.structs.replace(table, rows=rows, slice_s=dict(slice_seconds))


def _release_row(row: Row, slices: Sequence[Slice]) -> Row:
    """The row with slices in place of layers."""
    here = set(row.layers)
    device = tuple(slice_.name for slice_ in slices if here.issuperset(slice_.layers))
    remote = _beyond(row, row.sends, here, slices)
    hops = tuple(
        msgspec.structs.replace(hop, remote=_beyond(row, hop.sends, before, slices))
        for hop, before in zip(row.hops, _layers_before(row), strict=True)
    )
    return msgspec.structs.replace(row, device=device, remote=remote, hops=hops, layers=())


def cut_sets(table: Plan) -> tuple[frozenset[str], ...]:
    """For each link of each row the set of layers before it, each set once: the argument of `atoms`."""
    sets = (before for row in table.rows for before in (frozenset(row.layers), *map(frozenset, _layers_before(row))))
    return tuple(dict.fromkeys(sets))


def _layers_before(row: Row) -> list[set[str]]:
    """By link beyond the first, the layers of a row that run before it."""
    return [{*row.layers, *row.remote} - set(hop.remote) for hop in row.hops]


def _beyond(row: Row, sends: Sequence[str], here: Collection[str], slices: Sequence[Slice]) -> tuple[str, ...]:
    """Names of the slices beyond a link, when the layers `here` run before it.

    UsageError where a slice has layers on both sides, or where these slices take other tensors than the link carries:
    the slices were then cut for another table or another model.
    """
    inside = set(here)
    remote = [slice_ for slice_ in slices if inside.isdisjoint(slice_.layers)]
    if any(not inside.isdisjoint(slice_.layers) and not inside.issuperset(slice_.layers) for slice_ in slices):
        raise UsageError(f"row {row.name!r} divides a slice: these slices were cut for another table")
    made = {tensor.name for slice_ in remote for tensor in slice_.outputs}
    needed = {tensor.name for slice_ in remote for tensor in slice_.inputs} - made
    if needed != set(sends):
        raise UsageError(f"row {row.name!r} sends {sorted(sends)}, but its remote slices take {sorted(needed)}")
    return tuple(slice_.name for slice_ in remote)
