"""What `edgectl infer` tells of an answer by its output kind, and draws."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from edgesplit.client.answer import Answer, Source
from edgesplit.client.model_interface import ModelInterface
from edgesplit.errors import UsageError
from edgesplit.input_spec import InputSpec, parse_input_spec
from edgesplit.output_kind import OutputKind
from edgesplit_cli.local.drawing import draw, drawn
from edgesplit_cli.views.reading import reading_json, reading_lines

NAMES = ("background", "cat", "dog\x1b[31m")
SPEC = msgspec.structs.replace(parse_input_spec("image/png 60x40"), tensor="x", tensor_width=20, tensor_height=20)
LABELS = OutputKind(kind="labels", outputs=("y",), names=NAMES)
BOXES = OutputKind(kind="boxes", outputs=("s", "b"), layout="scores+boxes", threshold=0.5, names=NAMES[1:])
MASK = OutputKind(kind="mask", outputs=("m",), names=NAMES)
EMBEDDING = OutputKind(kind="embedding", outputs=("y",))
OUTPUTS = {
    "y": np.array([[0.1, 0.7, 0.2]], np.float32), "s": np.array([[[0.0, 0.9], [0.0, 0.1]]], np.float32),
    "b": np.array([[[0.25, 0.25, 0.75, 0.75], [0, 0, 1, 1]]], np.float32),
    "m": np.repeat(np.array([[0] * 15 + [1] * 5], np.int64), 20, axis=0)[None],
}  # fmt: skip


def answer_of(kind: OutputKind | None, spec: InputSpec | None = SPEC) -> Answer:
    """An answer of a model of that kind to a black picture."""
    Image.new("RGB", (60, 40)).save(frame := io.BytesIO(), "PNG")
    interface = ModelInterface(input_spec=spec, output_kind=kind)
    return Answer(OUTPUTS, None, "1", source=Source(lambda: interface, frame.getvalue()))


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        (None, []), (LABELS, ["cat 0.70, dog"]), (BOXES, ["cat 0.90 at 15,10,45,30"]),
        (msgspec.structs.replace(BOXES, threshold=0.95), ["no box of 0.95 or more"]),
        (MASK, ["mask 60x40: background 75%, cat 25%"]), (EMBEDDING, ["embedding of 3 numbers"]),
    ],
)  # fmt: skip
def test_an_answer_in_words(kind: OutputKind | None, lines: list[str]) -> None:
    """A line for each thing that was found; control characters of names do not reach the terminal."""
    found = reading_lines(answer_of(kind))
    assert len(found) == len(lines) and all(wanted in line for wanted, line in zip(lines, found, strict=True))
    assert "\x1b" not in "".join(found)


def test_an_answer_for_programs() -> None:
    """The same under the kind's name."""
    assert reading_json(answer_of(None)) == {}
    (box,) = reading_json(answer_of(BOXES))["boxes"]
    assert (box["name"], box["left"], box["bottom"]) == ("cat", 15.0, 30.0)
    assert reading_json(answer_of(MASK)) == {"mask": {"background": 0.75, "cat": 0.25}}
    assert reading_json(answer_of(LABELS))["labels"][0]["index"] == 1
    assert len(reading_json(answer_of(EMBEDDING))["embedding"]) == 3


def test_a_drawing_has_the_picture_and_what_was_found(tmp_path: Path) -> None:
    """A box's outline at its place, a mask's colour on its pixels, a label in the corner; the rest is as it was."""
    box, mask, label = (np.asarray(drawn(answer_of(kind))).max(axis=2) for kind in (BOXES, MASK, LABELS))
    assert box[30, 20] > 100 and box[10, 44] > 100 and box[5, 5] == 0 and box[35, 50] == 0
    assert (mask[:, 45:] > 50).all() and not mask[:, :45].any()
    assert label[:14, :30].max() > 100 and not label[30:].any()
    draw(answer_of(BOXES), tmp_path / "a.jpg")
    with Image.open(tmp_path / "a.jpg") as written:
        assert written.size == (60, 40)


@pytest.mark.parametrize(
    ("kind", "spec", "why"),
    [(None, SPEC, "has no output kind"), (EMBEDDING, SPEC, "an embedding"), (BOXES, None, "takes no pictures")],
)
def test_what_cannot_be_drawn_says_why(kind: OutputKind | None, spec: InputSpec | None, why: str) -> None:
    """Before a file is written."""
    with pytest.raises(UsageError, match=why):
        drawn(answer_of(kind, spec))
