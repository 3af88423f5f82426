"""Hints of an ONNX file: its producer and its metadata."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from edgesplit_partitioner.ir.hints import Hints, parse_names

MOST_KEYS = 100
MOST_VALUE_BYTES = 2_000


def hints_of(model: onnx.ModelProto, bound: Mapping[str, int]) -> Hints:
    """The hints of a model, of whose free dimensions `bound` got a length that nobody gave."""
    properties = {entry.key: entry.value for entry in model.metadata_props[:MOST_KEYS]}
    short = {key: value for key, value in properties.items() if len(value) <= MOST_VALUE_BYTES}
    names = next((parse_names(properties[key]) for key in ("names", "labels", "classes") if key in properties), ())
    return Hints(model.producer_name[:80].lower(), short, names, dict(bound))
