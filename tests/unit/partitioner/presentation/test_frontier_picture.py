"""The picture of a family's plan."""

from __future__ import annotations

import io
import re
from typing import Any

from edgesplit_partitioner.presentation.frontier_picture import render_frontier

PLAN: dict[str, Any] = {
    "model": "numerals@1",
    "accuracies": {"student": 0.93, "digits": 0.97},
    "variants": {"student": {"seconds": 0.0031}, "digits": {"seconds": 0.0178}},
    "frontier": [{"variant": "student", "accuracy": 0.93}, {"variant": "digits", "accuracy": 0.97}],
    "best": {"row": "digits:remote", "seconds": 0.0178, "accuracy": 0.97},
    "deadline_s": 0.06,
    "least_accuracy": 0.9,
}


def test_milliseconds_were_drawn_as_tex_over_each_other() -> None:
    """A logarithmic axis named its powers of ten in TeX, which an SVG shows as it is written."""
    render_frontier(PLAN, drawn := io.BytesIO(), "svg")
    texts = re.findall(r">([^<>]+)</text>", drawn.getvalue().decode())
    assert {"student", "digits", "deadline", "least accuracy", "5", "10", "20", "50"} <= set(texts)
    assert not any("$" in text or "\\" in text for text in texts)


def test_a_cascade_is_a_point_of_its_own() -> None:
    """Under its name, at its mean; without one there is none."""
    way = {"name": "student, then digits", "accuracy": 0.96, "figures": {"seconds": 0.008}}
    render_frontier({**PLAN, "cascade": {"way": way}}, drawn := io.BytesIO(), "svg")
    assert {"student, then digits", "cascade, mean"} <= set(re.findall(r">([^<>]+)</text>", drawn.getvalue().decode()))
    render_frontier({**PLAN, "cascade": None}, without := io.BytesIO(), "svg")
    assert b"cascade, mean" not in without.getvalue()
