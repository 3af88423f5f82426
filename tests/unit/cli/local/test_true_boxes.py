"""Boxes that somebody drew, in a JSON file beside each sample."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgesplit.errors import UsageError
from edgesplit_cli.local.true_boxes import EXAMPLE, boxes_of


def test_the_file_beside_a_sample_says_what_it_shows(tmp_path: Path) -> None:
    """An empty list is a frame that shows nothing; no file is a frame of which nothing is known."""
    (tmp_path / "a.json").write_text(EXAMPLE)
    (tmp_path / "b.json").write_text("[]")
    assert boxes_of(tmp_path / "a.jpg") == [{"box": (0.1, 0.2, 0.5, 0.9), "label": 3}]
    assert boxes_of(tmp_path / "b.jpg") == [] and boxes_of(tmp_path / "c.npz") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "should list what the frame shows, as in"),
        ('[{"box": [0.1, 0.2, 0.5], "label": 3}]', "should list what the frame shows"),
        ('[{"box": [10, 20, 50, 90], "label": 3}]', "parts of the frame's width and height, from 0 to 1"),
        ('[{"box": [0.5, 0.2, 0.1, 0.9], "label": 3}]', "is no box: left, top, right and bottom"),
        ('[{"box": [0.1, 0.2, 0.5, 0.9], "class": 3}]', "unknown field"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str, says: str) -> None:
    """With an example of what it should contain; pixels are not parts."""
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UsageError, match=says) as error:
        boxes_of(tmp_path / "a.jpg")
    assert str(tmp_path / "a.json") in str(error.value) and EXAMPLE in str(error.value)
