"""Samples from files and folders: those of the model's input type are read, and errors name their file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import UsageError
from edgesplit.input_spec import InputSpec, parse_input_spec
from edgesplit_cli.local.model import file_labels, read_samples, sample_files, sample_labels
from edgesplit_cli.sample_upload import send_samples

SPEC = msgspec.structs.replace(parse_input_spec("image/jpeg 16x16"), tensor="x", tensor_width=16, tensor_height=16)


class RecordingController(ControllerClient):
    """A controller that knows one model and keeps what is posted."""

    def __init__(self, spec: InputSpec | None) -> None:
        self.spec = spec
        self.posted: list[dict[str, Any]] = []

    def get(self, path: str, **query: object) -> Any:
        """The model."""
        return {"input_spec": msgspec.to_builtins(self.spec)}

    def post(self, path: str, body: Any = None) -> Any:
        """Kept."""
        self.posted += body["samples"]


def picture(place: Path) -> Path:
    """A JPEG."""
    Image.new("RGB", (16, 16), "gray").save(place, "JPEG")
    return place


def test_a_sample_folder_is_filtered_by_the_models_input(tmp_path: Path) -> None:
    """Notes and archives beside pictures are ignored, locally and for the controller."""
    picture(tmp_path / "a.jpg")
    picture(tmp_path / "b.JPEG")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "labels.json").write_text(json.dumps({"a.jpg": 3}))
    np.savez(tmp_path / "c.npz", x=np.zeros(3))
    controller = RecordingController(SPEC)

    assert len(read_samples(tmp_path, SPEC)) == 2
    assert send_samples(controller, "m", tmp_path) == 2
    assert [set(sample) for sample in controller.posted] == [{"frame", "label"}, {"frame"}]
    tensors = RecordingController(None)
    assert send_samples(tensors, "m", tmp_path) == 1 and set(tensors.posted[0]) == {"tensors"}


def test_a_broken_sample_was_refused_without_its_name(tmp_path: Path) -> None:
    """Of a hundred pictures one is broken: the error now names it."""
    picture(tmp_path / "a.jpg")
    whole = picture(tmp_path / "torn.jpg").read_bytes()
    (tmp_path / "torn.jpg").write_bytes(whole[: len(whole) // 2])

    for read in (lambda: read_samples(tmp_path, SPEC), lambda: send_samples(RecordingController(SPEC), "m", tmp_path)):
        with pytest.raises(UsageError, match=r"torn\.jpg: the frame is not a whole JPEG"):
            read()
    for torn in (b"PK", b"PK\x03\x04torn", b""):
        (tmp_path / "torn.npz").write_bytes(torn)
        with pytest.raises(UsageError, match=r"torn\.npz"):
            send_samples(RecordingController(None), "m", tmp_path)


def test_an_empty_sample_folder_is_refused_with_the_expected_type(tmp_path: Path) -> None:
    """A folder of files of another type counts as empty."""
    np.savez(tmp_path / "c.npz", x=np.zeros(3))

    with pytest.raises(UsageError, match=r"no \.jpeg or \.jpg in .*, and the model takes image/jpeg"):
        read_samples(tmp_path, SPEC)
    (tmp_path / "c.npz").unlink()
    with pytest.raises(UsageError, match=r"takes tensors"):
        send_samples(RecordingController(None), "m", tmp_path)


def test_sub_folders_named_by_class_give_labels(tmp_path: Path) -> None:
    """Their names are the classes; labels.json is for the files beside it, and other folders are none."""
    picture(tmp_path / "a.jpg")
    (tmp_path / "labels.json").write_text(json.dumps({"a.jpg": 3, "b.jpg": 4}))
    for folder in ("7", "12", "notes"):
        (tmp_path / folder).mkdir()
        picture(tmp_path / folder / "b.jpg")

    files = sample_files(tmp_path, SPEC)

    assert [file.parent.name for file in files[1:]] == ["12", "7"]
    assert file_labels(tmp_path, files) == [3, 12, 7] == sample_labels(tmp_path, SPEC)
    assert file_labels(tmp_path / "7", sample_files(tmp_path / "7", SPEC)) == [None]
