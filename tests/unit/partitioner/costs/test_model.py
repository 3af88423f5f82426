"""The costs file: its fields, and refusals that name the wrong place."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgesplit.errors import UsageError
from edgesplit.plan import Link
from edgesplit_partitioner import Limits, load_costs, plan

GOOD: dict[str, Any] = {
    "format": "edgesplit.costs/1",
    "model": "m",
    "tiers": ["device", "cloud"],
    "inputs": {"i": {"bytes": 100}},
    "outputs": ["o"],
    "idle_watts": {"device": 1.0},
    "layers": [
        {
            "name": "a",
            "reads": ["i"],
            "writes": {"x": {"bytes": 50, "codecs": {"raw+zstd": {"bytes": 30, "encode_s": {"device": 0.001}}}}},
            "seconds": {"device": 0.1, "cloud": 0.01},
            "joules": {"device": 0.3},
            "weight_bytes": 5,
        },
        {"name": "b", "reads": ["x"], "writes": {"o": {"bytes": 5}}, "seconds": {"device": 0.2, "cloud": 0.02}},
    ],
}
LINKS = {"device-cloud": {"up_bytes_per_s": 1e3, "down_bytes_per_s": 1e3, "rtt_s": 0.01}}
NUMBERS: list[tuple[Any, ...]] = [
    ("inputs", "i", "bytes"),
    ("layers", 0, "writes", "x", "bytes"),
    ("layers", 0, "writes", "x", "codecs", "raw+zstd", "bytes"),
    ("layers", 0, "writes", "x", "codecs", "raw+zstd", "encode_s", "device"),
    ("layers", 0, "writes", "x", "codecs", "raw+zstd", "loss"),
    ("layers", 0, "seconds", "device"),
    ("layers", 0, "joules", "device"),
    ("layers", 0, "weight_bytes"),
    ("idle_watts", "device"),
]


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Good costs with one value replaced."""
    costs = copy.deepcopy(GOOD)
    place: Any = costs
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return costs


@pytest.mark.parametrize("path", NUMBERS, ids=lambda path: ".".join(map(str, path)))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, -0.5, "0.1", None, [], True, 10**30, 10**400])
def test_non_finite_numbers_are_refused(path: tuple[Any, ...], value: Any) -> None:
    """Neither from a mapping, where NaN once passed for seconds of encoding, nor from a file; the layer is named."""
    costs = changed(path, value)
    named = {"inputs": "'i'", "layers": "'a'|'x'", "idle_watts": "idle_watts"}[path[0]]
    with pytest.raises(UsageError, match=named):
        load_costs(costs)


def test_numpy_numbers_are_accepted() -> None:
    """Measurements made with numpy plan the same: costs, rates and limits."""
    costs = changed(("layers", 0, "seconds"), {"device": np.float64(0.1), "cloud": np.float32(0.01)})
    costs["inputs"]["i"]["bytes"] = np.int64(100)
    link = {"up_bytes_per_s": np.array([1e3, 2e3]), "down_bytes_per_s": np.float64(1e3), "rtt_s": 0}
    given = plan(load_costs(costs), {"device-cloud": link}, limits={"deadline_s": np.float64(9)})
    same = {"up_bytes_per_s": [1e3, 2e3], "down_bytes_per_s": 1e3, "rtt_s": 0.0}
    assert given.seconds == pytest.approx(plan(load_costs(GOOD), {"device-cloud": same}).seconds)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("layers", 0, "tires"), ["device"], "'tiers'"),
        (("layer",), [], "'layers'"),
        (("layers", 0, "writes", "x", "codec"), {}, "'codecs'"),
        (("layers", 0, "joules"), {"devise": 1.0}, "'device'"),
        (("layers", 0, "writes", "x", "codecs", "raw+zstd", "encode_s"), {"devise": 1.0}, "'device'"),
        (("idle_watts",), {"devise": 1.0}, "'device'"),
        (("basis",), {"clowd": "measured"}, "'cloud'"),
        (("layers", 0, "writes", "x", "codecs"), {"raw+zst": {"bytes": 1}}, "'raw\\+zstd'"),
        (("layers", 1, "reads"), ["y"], "nothing before it writes"),
        (("layers", 0, "reads"), ["o"], "cycle"),
        (("layers", 1, "name"), "a", "share the name 'a'"),
        (("layers", 1, "writes"), {"x": {"bytes": 1}}, "written twice"),
        (("layers",), [], "no layers"),
        (("format",), "edgesplit.costs/2", "costs/2"),
        (("layers", 1, "name"), "\ud800", "no name"),
        (("layers", 0, "writes", "x", "codecs"), {"raw+zstd": {"bytes": 1, "loss": 0.5}}, "lossless"),
    ],
)
def test_an_error_names_its_field_and_a_suggestion(path: tuple[Any, ...], value: Any, says: str) -> None:
    """Typos suggest the likely name; none is silently ignored."""
    with pytest.raises(UsageError, match=says):
        load_costs(changed(path, value))


def test_unknown_fields_are_ignored() -> None:
    """Later versions may add fields."""
    assert load_costs(changed(("layers", 0, "comment"), "first")) == load_costs(GOOD)


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"[" * 10**6, b'{"a":' * 10**5, b'{"model":"\xff"}', json.dumps(GOOD).encode("utf-16"), b"{}x"],
    ids=["empty", "null", "nested lists", "nested objects", "not UTF-8", "UTF-16", "more behind it"],
)
def test_an_invalid_costs_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """With an error of the SDK, whatever is in it."""
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="costs"):
        load_costs(path)


@pytest.mark.parametrize("source", [None, 3, [], b"{}", "a\0b"])
def test_costs_must_be_a_path_or_a_mapping(source: Any) -> None:
    """Any other type is an error of the SDK, with no traceback of the standard library."""
    with pytest.raises(UsageError, match="costs"):
        load_costs(source)


@pytest.mark.parametrize(
    "ask",
    [
        lambda costs: plan(costs, LINKS, objective=3),
        lambda costs: plan(costs, LINKS, objective={1: 1}),
        lambda costs: plan(costs, LINKS, objective={"latency": 10**400}),
        lambda costs: plan(costs, LINKS, limits=[]),
        lambda costs: plan(costs, LINKS, limits={1: 2}),
        lambda costs: plan(costs, LINKS, limits={"deadline_s": float("inf")}),
        lambda costs: plan(costs, LINKS, limits=Limits(keep_first=-1)),
        lambda costs: plan(costs, LINKS, codecs=3),
        lambda costs: plan(costs, LINKS, codecs=("raw", "fp16")),
        lambda costs: plan(costs, {"device-cloud": Link(up_bytes_per_s=1e-320, down_bytes_per_s=1.0, rtt_s=0.0)}),
        lambda costs: plan(GOOD, LINKS),
    ],
)
def test_planning_arguments_of_wrong_type_are_refused(ask: Callable[[Any], Any]) -> None:
    """Objectives, limits, codecs and links of the wrong type are usage errors."""
    with pytest.raises(UsageError):
        ask(load_costs(GOOD))


def test_a_custom_codec_counts_where_loss_is_allowed() -> None:
    """Any name that is no typo of a known one; never without an allowance."""
    link = {"device-cloud": {"up_bytes_per_s": 1e3, "down_bytes_per_s": 1e3, "rtt_s": 0.0}}
    own = {"int2+zstd": {"bytes": 1, "loss": 0.01}}
    costs = load_costs(changed(("layers", 0, "writes", "x", "codecs"), own))
    assert all("int2+zstd" not in row.codecs.values() for row in plan(costs, link).table.rows)
    allowed = plan(costs, link, limits={"max_loss": 0.02})
    assert "int2+zstd" in allowed.codecs
