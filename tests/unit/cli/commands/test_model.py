"""`edgectl model` and `edgectl profile` as text: what was stored, how it is fed, and the rows that matter."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result

from edgesplit.controller_client.client import ControllerClient
from edgesplit.input_spec import parse_input_spec
from edgesplit_cli.commands import model as commands
from edgesplit_cli.main import cli
from support import onnx_models as tiny

IMAGENET = "image/jpeg 640x480 rgb scale=1/255 mean=0.485,0.456,0.406 std=0.229,0.224,0.225"


def described(spec: str = "", bindings: dict[str, int] | None = None, inputs: int = 1) -> dict[str, Any]:
    """A model as the API describes it."""
    frame = {"name": "frame", "datatype": "UINT8", "shape": [-1]}
    tensors = [{"name": f"x{number}", "datatype": "FP32", "shape": [1, 3]} for number in range(inputs)]
    return {
        "model": "net@2", "sha256": "ab" * 32, "created": True, "input": spec, "bindings": bindings or {},
        "layers": [{"name": "conv", "operator": "Conv", "weight_bytes": 4, "output_bytes": 4}],
        "inputs": [frame] if spec else tensors,
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 10]}],
        "input_spec": msgspec.to_builtins(parse_input_spec(spec)) if spec else None,
    }  # fmt: skip


class OneModel(ControllerClient):
    """A controller with one model."""

    def __init__(self, model: dict[str, Any], measured: dict[str, Any] | None = None) -> None:
        self._model, self._measured = model, measured
        self.samples: list[dict[str, str]] = []

    def upload(self, path: str, file: IO[bytes], size: int, progress: Any = None, **query: Any) -> Any:
        """Stored."""
        return self._model

    def get(self, path: str, **query: Any) -> Any:
        """The model, and no jobs."""
        return [] if path == "/v1/jobs" else self._model

    def post(self, path: str, body: Any = None, **query: Any) -> Any:
        """Samples are kept, a measurement is answered."""
        if path.endswith("/samples"):
            self.samples += body["samples"]
        return self._measured


def edgectl(controller: OneModel, monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> Result:
    """The command against that controller."""
    monkeypatch.setattr(commands, "connect", lambda _: controller)
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def measurement(layers: int) -> dict[str, Any]:
    """What `profile` returns for a model of so many layers, the last the slowest."""
    times = [{"name": f"layer-{n}", "operator": "Conv", "median_s": n / 1e3, "p95_s": n / 1e3} for n in range(layers)]
    slices = [{"layers": [f"layer-{n}"], "median_s": 1e-3, "p95_s": 1e-3, "summed_s": 1e-3} for n in range(layers)]
    codecs = [
        {"tensor": f"t-{n}", "codec": "int8", "raw_bytes": 1000 * n, "bytes": 250 * n, "zstd_bytes": 200 * n,
         "encode_s": 1e-4, "decode_s": 1e-4, "loss": 0.0, "confirmed_loss": 0.0, "accuracy": None, "accuracy_raw": None}
        for n in range(layers)
    ]  # fmt: skip
    return {"model": "net@2", "where": "local", "layers": times, "slices": slices, "codecs": codecs, "notes": []}


def test_push_said_neither_inputs_nor_what_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs, outputs, the input spec and the bindings as they were understood, and the next commands."""
    file = tmp_path / "net.onnx"
    file.write_bytes(tiny.chain())
    found = edgectl(OneModel(described(IMAGENET, {"batch": 1})), monkeypatch, "model", "push", file, "--name", "net")
    assert found.exit_code == 0, found.output
    lines = [" ".join(line.split()) for line in found.output.splitlines()]
    for line in ("input frame UINT8 [-1]", "output y FP32 [1, 10]", f"--input {IMAGENET}", "--bind batch=1"):
        assert line in lines
    assert "next: edgectl plan net --device PROFILE" in lines[-1] and "edgectl deploy net --to DEVICE" in lines[-1]
    assert "warning" not in found.output


@pytest.mark.parametrize(
    ("spec", "values"),
    [("image/jpeg 8x8 scale=255", "from 0 to 65025"), ("image/jpeg 8x8", "from 0 to 255"),
     ("image/jpeg 8x8 mean=0.485,0.456,0.406 std=0.229,0.224,0.225", "to 1136.36"),
     ("audio/pcm16 16k scale=1", "from -32768 to 32768")],
)  # fmt: skip
def test_a_scale_of_255_or_none_was_accepted_in_silence(
    spec: str, values: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is stored, and a warning names the values that it would get."""
    file = tmp_path / "net.onnx"
    file.write_bytes(tiny.chain())
    found = edgectl(OneModel(described(spec)), monkeypatch, "model", "push", file, "--name", "net", "--input", spec)
    assert found.exit_code == 0 and "warning: with this --input" in found.stderr and values in found.stderr


def test_push_help_has_the_whole_input_grammar() -> None:
    """Each word of a specification, also those that an ImageNet model needs."""
    text = CliRunner().invoke(cli, ["model", "push", "--help"]).output
    for words in ("mean=A,B,C", "std=A,B,C", "bilinear", "PNG", "qN", "gray", "nhwc", "uint8", "audio/pcm16", "bgr",
                  "image/raw", "letterbox", "crop[=PART]", "pad=N", "--preset", "--output", "--labels"):  # fmt: skip
        assert words in text, words


@pytest.mark.parametrize(("spec", "bindings"), [(IMAGENET, {}), ("", {"batch": 4})])
def test_model_show_left_out_input_spec_and_bindings(
    spec: str, bindings: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are printed; without a specification it says that the model takes tensors."""
    text = edgectl(OneModel(described(spec, bindings)), monkeypatch, "model", "show", "net").output
    assert (spec or "none: the model takes tensors") in text and ("batch=4" in text) == bool(bindings)


def test_profile_printed_a_table_of_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rows of each table, the slowest layers first, and how many there are; `--all` prints them in order."""
    short = edgectl(OneModel(described(), measurement(40)), monkeypatch, "profile", "net").output
    assert len(short.splitlines()) < 45 and short.count("… and 30 more; --all prints all of them") == 3
    assert short.index("layer-39") < short.index("layer-30") and "layer-29  " not in short.partition("sum of")[0]
    whole = edgectl(OneModel(described(), measurement(40)), monkeypatch, "profile", "net", "--all").output
    assert "--all" not in whole and whole.index("layer-0 ") < whole.index("layer-39")
    few = edgectl(OneModel(described(), measurement(3)), monkeypatch, "profile", "net").output
    assert "--all" not in few


def test_npy_samples_are_sent_for_the_only_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `infer` takes them; for several inputs it says what to give."""
    np.save(tmp_path / "a.npy", np.ones((1, 3), np.float32))
    controller = OneModel(described(), measurement(1))
    assert edgectl(controller, monkeypatch, "profile", "net", "--samples", tmp_path / "a.npy").exit_code == 0
    assert edgectl(controller, monkeypatch, "profile", "net", "--samples", tmp_path).exit_code == 0
    (first, _) = controller.samples
    with np.load(io.BytesIO(base64.b64decode(first["tensors"]))) as arrays:
        assert arrays["x0"].tolist() == [[1, 1, 1]]
    two = edgectl(OneModel(described(inputs=2)), monkeypatch, "profile", "net", "--samples", tmp_path / "a.npy")
    assert "the model has the inputs ['x0', 'x1']: give an .npz with each" in str(two.exception)


def test_a_picture_as_sample_of_a_tensor_model_was_said_to_be_a_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was pushed without --input: that is the reason, and what to do."""
    picture = tmp_path / "a.jpg"
    picture.write_bytes(b"\xff\xd8\xff\xe0")
    found = edgectl(OneModel(described()), monkeypatch, "profile", "net", "--samples", picture)
    assert "a.jpg: the model takes tensors (.npz, .npy), because it was pushed without --input" in str(found.exception)


def test_a_push_without_input_proposes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was seen, and what to type; one that asks is not offered by `auto`."""
    file = tmp_path / "net.onnx"
    file.write_bytes(tiny.chain())
    words = "image/jpeg 640x480 bgr nchw letterbox-topleft"
    proposal = {"input": words, "output": "boxes:yolox", "reason": "1×3×416×416 float: looks like a picture; boxes"}
    for question, ending in (
        ("", "or --input auto to take this"),
        ("how were pixels scaled?", "how were pixels scaled?"),
    ):
        model = {**described(), "proposal": {**proposal, "question": question}, "batches": {"N": 1}}
        output = edgectl(OneModel(model), monkeypatch, "model", "push", file, "--name", "net").output
        text = " ".join(output.split())
        assert f"looks like a picture; boxes: push again with --input '{words}' --output 'boxes:yolox'" in text
        assert ending in text and ("auto" in text) == (not question)
        assert "--bind N=1, as nobody gave it" in text


def test_labels_are_sent_before_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One name in a line; an empty file is refused."""
    file, names = tmp_path / "net.onnx", tmp_path / "names.txt"
    file.write_bytes(tiny.chain())
    names.write_text("cat\n\ndog\n\n")
    seen: dict[str, Any] = {}

    class Sent(OneModel):
        def post(self, path: str, body: Any = None, **query: Any) -> Any:
            seen[path] = body
            return {"names": "ab" * 32}

        def upload(self, path: str, file: IO[bytes], size: int, progress: Any = None, **query: Any) -> Any:
            seen[path] = query
            return self._model

    kind = {"kind": "labels", "outputs": ["y"], "names": ["cat", "", "dog"]}
    model = {**described(), "output": "labels:y", "output_kind": kind}
    options = ("--name", "net", "--preset", "imagenet", "--labels", names)
    found = edgectl(Sent(model), monkeypatch, "model", "push", file, *options)
    assert found.exit_code == 0, found.output
    assert "--output labels:y, 3 names" in " ".join(found.output.split())
    assert seen["/v1/class-names"] == {"names": ["cat", "", "dog"]}
    assert (seen["/v1/models"]["names"], seen["/v1/models"]["preset"]) == ("ab" * 32, "imagenet")
    names.write_text("\n")
    assert "it has no names" in str(edgectl(Sent(model), monkeypatch, "model", "push", file, *options).exception)
