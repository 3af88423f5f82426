"""Merging of neighbouring ONNX slices into one graph, on the level of bytes: devices have no `onnx` package.

Slices of one release are cut from one graph, so their tensors' names match; weights stay in each slice's own signed
file, referred to by a location with the slice's name. Slices that cannot be merged safely (different operator sets, one
name for two things) raise `CannotMerge`, and run one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from edgesplit.errors import EdgeError, TrustError
from edgesplit.release import onnx_graph
from edgesplit.release.protobuf import encode_field, iter_fields

IR_VERSION, GRAPH, OPSETS, FUNCTIONS = 1, 7, 8, 25
NODE, NAME, INITIALIZER, INPUT, OUTPUT, SPARSE = 1, 2, 5, 11, 12, 15
EXTERNAL_DATA = 13
_KEY, _VALUE = 1, 2


class CannotMerge(EdgeError):
    """These slices cannot be merged and must run one by one."""


def merge_graphs(graphs: Mapping[str, bytes], outputs: Collection[str]) -> bytes:
    """Merge the slices in `graphs` (by name, in execution order) into one model with these outputs.

    Its inputs are all tensors that no slice produces; a weight in `weights.bin` of slice `s` gets the location
    `s/weights.bin`.
    """
    try:
        parts = {name: onnx_graph.read_graph(raw) for name, raw in graphs.items()}
        return _merge(parts, outputs)
    except TrustError as error:
        raise CannotMerge(f"not graphs of slices: {error}") from error


def _merge(parts: Mapping[str, onnx_graph.SliceGraph], outputs: Collection[str]) -> bytes:
    first = next(iter(parts.values()))
    if any(graph_part.opsets != first.opsets for graph_part in parts.values()):
        raise CannotMerge("they use different operator sets")
    if any(graph_part.sparse_initializers for graph_part in parts.values()):
        raise CannotMerge("they contain sparse weights")
    produced = {onnx_graph.value_name(raw): raw for graph_part in parts.values() for raw in graph_part.outputs}
    consumed = {onnx_graph.value_name(raw): raw for graph_part in parts.values() for raw in graph_part.inputs}
    missing = sorted(set(outputs) - set(produced))
    if missing:
        raise CannotMerge(f"no slice returns {missing[0][:80]!r}")
    # Slices of one model may share weights and functions: each is taken once, if all copies are equal.
    weights = _unique_by_name(
        (
            (onnx_graph.tensor_name(raw), _with_relocated_data(raw, name))
            for name, graph_part in parts.items()
            for raw in graph_part.initializers
        ),
        "weight",
    )
    raw_functions = ((bytes(raw), raw) for part in parts.values() for raw in part.functions)
    functions = _unique_by_name(raw_functions, "function")
    graph = [encode_field(NODE, raw) for graph_part in parts.values() for raw in graph_part.nodes]
    graph += [encode_field(NAME, b"merged"), *(encode_field(INITIALIZER, raw) for raw in weights.values())]
    # Tensors that one slice produces and another consumes become internal; only the others remain inputs.
    graph += [encode_field(INPUT, raw) for name, raw in consumed.items() if name not in produced]
    graph += [encode_field(OUTPUT, produced[name]) for name in outputs]
    model = [
        encode_field(IR_VERSION, max(graph_part.ir_version for graph_part in parts.values())),
        encode_field(GRAPH, b"".join(graph)),
    ]
    model += [
        encode_field(OPSETS, encode_field(1, domain.encode()) + encode_field(2, version))
        for domain, version in first.opsets
    ]
    return b"".join([*model, *(encode_field(FUNCTIONS, raw) for raw in functions.values())])


def _unique_by_name(items: Iterable[tuple[str | bytes, bytes | memoryview]], kind: str) -> dict[str | bytes, bytes]:
    """Each item once by name; CannotMerge where two items with one name differ."""
    unique: dict[str | bytes, bytes] = {}
    for name, raw in items:
        if unique.setdefault(name, bytes(raw)) != raw:
            raise CannotMerge(f"two different {kind}s have the name {str(name)[:80]!r}")
    return unique


def _with_relocated_data(raw: memoryview, slice_name: str) -> bytes:
    """The initializer with the location of its external data, if any, moved to the slice's folder."""
    encoded_fields = []
    for number, value in iter_fields(raw):
        if number == EXTERNAL_DATA and not isinstance(value, int):
            entry = {part: bytes(text) for part, text in iter_fields(value) if not isinstance(text, int)}
            if entry.get(_KEY) == b"location":
                entry[_VALUE] = f"{slice_name}/".encode() + entry[_VALUE]
            encoded = b"".join(encode_field(part, text) for part, text in entry.items())
            encoded_fields.append(encode_field(number, encoded))
        else:
            encoded_fields.append(encode_field(number, value))
    return b"".join(encoded_fields)


def mergeable_runs(order: Sequence[str], mergeable: Collection[str]) -> list[tuple[str, ...]]:
    """The longest runs of two or more mergeable slices in this order."""
    runs: list[list[str]] = [[]]
    for name in order:
        if name in mergeable:
            runs[-1].append(name)
        elif runs[-1]:
            runs.append([])
    return [tuple(run) for run in runs if len(run) > 1]
