"""`edgectl model compress` and `push --variant-of`: what is sent, what is said, and what is refused before anything is
sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from edgesplit.controller_client.client import ControllerClient
from edgesplit_cli import sample_upload
from edgesplit_cli.commands import compress as compress_command
from edgesplit_cli.commands import model as model_commands
from edgesplit_cli.main import cli
from support import onnx_models as tiny

BASE = {
    "model": "net@1", "name": "net", "sha256": "ab" * 32, "bytes": 1000, "input": "", "bindings": {}, "layers": [],
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3]}], "outputs": [], "input_spec": None, "variants": [],
}  # fmt: skip
SENTENCES = ["made from net@1 by int8", "at most 1 % of answers differ"]
VARIANT = {
    **BASE,
    "model": "net@2",
    "bytes": 280,
    "created": True,
    "lineage": {"base": "net@1", "sentences": SENTENCES},
}
KEEP = ["--keep-agreement", "99%"]


class OneModel(ControllerClient):
    """A controller with one model, which takes everything."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, Any]] = []

    def get(self, path: str, **query: Any) -> Any:
        """The model, and no jobs."""
        return [] if path == "/v1/jobs" else BASE

    def post(self, path: str, body: Any = None, **query: Any) -> Any:
        """Kept; a set is named, a compression passes."""
        self.posted.append((path, body))
        return {"set": "cd" * 32} if path.endswith("/sample-sets") else VARIANT

    def upload(self, path: str, file: IO[bytes], size: int, progress: Any = None, **query: Any) -> Any:
        """Kept, and passes."""
        self.posted.append((path, query))
        return VARIANT


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> OneModel:
    made = OneModel()
    for module in (model_commands, compress_command):
        monkeypatch.setattr(module, "connect", lambda _, timeout_s=0.0: made)
    return made


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    """Seventy samples in sub-folders named by class."""
    for number in range(70):
        folder = tmp_path / "samples" / str(number % 2)
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / f"{number}.npz", x=np.full((1, 3), number, np.float32))
    return tmp_path / "samples"


def edgectl(*arguments: str | Path) -> Result:
    """The command."""
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_every_sample_is_sent_with_its_class_and_named_as_a_set(controller: OneModel, samples: Path) -> None:
    """In requests of bounded size; the compression names the set, and its sentences are printed."""
    found = edgectl(
        "model", "compress", "net", "--method", "int8", "--samples", samples, "--keep-accuracy", "0.5pp", *KEEP
    )
    assert found.exit_code == 0, found.output
    batches = [body["samples"] for path, body in controller.posted if path == "/v1/models/net%401/samples"]
    assert [len(batch) for batch in batches] == [sample_upload.BATCH_SAMPLES, 70 - sample_upload.BATCH_SAMPLES]
    assert sorted({sample["label"] for batch in batches for sample in batch}) == [0, 1]
    (_, named), (path, request) = controller.posted[-2:]
    assert len(set(named["samples"])) == 70
    assert path == "/v1/models/net%401/compress" and request == {
        "method": "int8", "samples": "cd" * 32, "allowed_accuracy_loss": 0.005, "least_agreement": 0.99,
    }  # fmt: skip
    assert "stored net@2  280 B, 28% of net@1" in found.output and all(said in found.output for said in SENTENCES)
    whole = edgectl("model", "compress", "net", "--samples", samples, *KEEP, "--json")
    assert json.loads(whole.stdout) == VARIANT


def test_a_variant_is_pushed_with_the_set_that_judges_it(controller: OneModel, samples: Path, tmp_path: Path) -> None:
    """Without a name of its own; the answer's rule goes with it."""
    file = tmp_path / "small.onnx"
    file.write_bytes(tiny.chain())
    found = edgectl(
        "model", "push", file, "--variant-of", "net@1", "--samples", samples, *KEEP, "--answer", "close:0.1"
    )
    assert found.exit_code == 0, found.output
    path, query = controller.posted[-1]
    assert path == "/v1/models/net%401/variants" and query["samples"] == "cd" * 32 and query["name"] is None
    assert query["least_agreement"] == 0.99 and query["answer"] == "close:0.1"
    assert SENTENCES[0] in found.output and "edgectl plan net@2" in found.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compress", "net", *KEEP], "--samples"),
        (["compress", "net", "--samples", "."], "say what must be kept"),
        (["compress", "net", "--samples", ".", "--keep-accuracy", "0.5%"], "as in 0.5pp"),
        (["compress", "net", "--samples", ".", "--keep-agreement", "0.99"], "as in"),
        (["push", "FILE"], "--name"),
        (["push", "FILE", "--name", "net", *KEEP], "go with --variant-of"),
        (["push", "FILE", "--variant-of", "net", *KEEP], "--samples"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_before_anything_is_sent(
    words: list[str], said: str, controller: OneModel, tmp_path: Path
) -> None:
    """As wrong usage."""
    file = tmp_path / "small.onnx"
    file.write_bytes(tiny.chain())
    found = edgectl("model", *(str(file) if word == "FILE" else word for word in words))
    assert found.exit_code != 0 and said in f"{found.output}{found.exception}" and not controller.posted
