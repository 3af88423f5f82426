"""Neighbouring ONNX slices as one graph, made from their bytes alone: devices have no `onnx` package.

Slices of one release are cut from one graph, so their tensors' names fit each other; weights stay where they are, in
each slice's own signed file, by a location that names the slice. What cannot be put together without doubt (other
operator sets, one name for two things) is a `CannotMerge`, and the slices run one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from edgesplit.errors import EdgeError, TrustError
from edgesplit.release import onnx_graph

IR_VERSION, GRAPH, OPSETS, FUNCTIONS = 1, 7, 8, 25
NODE, NAME, INITIALIZER, INPUT, OUTPUT, SPARSE = 1, 2, 5, 11, 12, 15
EXTERNAL_DATA = 13
_KEY, _VALUE = 1, 2


class CannotMerge(EdgeError):
    """These slices must run one by one."""


def merged(graphs: Mapping[str, bytes], outputs: Collection[str]) -> bytes:
    """One model of the slices in `graphs` (by name, in the order in which they run), that gives `outputs`.

    Its inputs are all that no slice before gives; a weight in `weights.bin` of slice `s` is at `s/weights.bin`.
    """
    try:
        parts = {name: onnx_graph.read_graph(raw) for name, raw in graphs.items()}
        return _merged(parts, outputs)
    except TrustError as error:
        raise CannotMerge(f"not graphs as slices have them: {error}") from error


def _merged(parts: Mapping[str, onnx_graph.SliceGraph], outputs: Collection[str]) -> bytes:
    first = next(iter(parts.values()))
    if any(one.opsets != first.opsets for one in parts.values()):
        raise CannotMerge("they are of several operator sets")
    if any(one.sparse_initializers for one in parts.values()):
        raise CannotMerge("they hold sparse weights")
    given = {onnx_graph.value_name(raw): raw for one in parts.values() for raw in one.outputs}
    taken = {onnx_graph.value_name(raw): raw for one in parts.values() for raw in one.inputs}
    missing = sorted(set(outputs) - set(given))
    if missing:
        raise CannotMerge(f"none of them gives {missing[0][:80]!r}")
    weights = _by_name(
        (
            (onnx_graph.tensor_name(raw), _relocated(raw, name))
            for name, one in parts.items()
            for raw in one.initializers
        ),
        "weight",
    )
    functions = _by_name(((bytes(raw), raw) for one in parts.values() for raw in one.functions), "function")
    graph = [_part(NODE, raw) for one in parts.values() for raw in one.nodes]
    graph += [_part(NAME, b"merged"), *(_part(INITIALIZER, raw) for raw in weights.values())]
    graph += [_part(INPUT, raw) for name, raw in taken.items() if name not in given]
    graph += [_part(OUTPUT, given[name]) for name in outputs]
    model = [_number(IR_VERSION, max(one.ir_version for one in parts.values())), _part(GRAPH, b"".join(graph))]
    model += [_part(OPSETS, _part(1, domain.encode()) + _number(2, version)) for domain, version in first.opsets]
    return b"".join([*model, *(_part(FUNCTIONS, raw) for raw in functions.values())])


def _by_name(found: Iterable[tuple[str | bytes, bytes | memoryview]], what: str) -> dict[str | bytes, bytes]:
    """Each once; CannotMerge where two differ under one name."""
    kept: dict[str | bytes, bytes] = {}
    for name, raw in found:
        if kept.setdefault(name, bytes(raw)) != raw:
            raise CannotMerge(f"two different {what}s have the name {str(name)[:80]!r}")
    return kept


def _relocated(raw: memoryview, slice_name: str) -> bytes:
    """The initializer, its data looked for in that slice's folder if they lie outside of the graph."""
    made = []
    for number, value in onnx_graph.fields(raw):
        if isinstance(value, int):
            made.append(_number(number, value))
        elif number != EXTERNAL_DATA:
            made.append(_part(number, value))
        else:
            entry = {part: bytes(text) for part, text in onnx_graph.fields(value) if not isinstance(text, int)}
            if entry.get(_KEY) == b"location":
                entry[_VALUE] = f"{slice_name}/".encode() + entry[_VALUE]
            made.append(_part(number, b"".join(_part(part, text) for part, text in entry.items())))
    return b"".join(made)


def _part(number: int, raw: bytes | memoryview) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(raw)) + raw


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def neighbours(order: Sequence[str], mergeable: Collection[str]) -> list[tuple[str, ...]]:
    """The longest runs of two or more mergeable slices in this order."""
    runs: list[list[str]] = [[]]
    for name in order:
        if name in mergeable:
            runs[-1].append(name)
        elif runs[-1]:
            runs.append([])
    return [tuple(run) for run in runs if len(run) > 1]
