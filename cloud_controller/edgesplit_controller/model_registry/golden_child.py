"""Child process of `golden`: runs a whole model on given tensors, importing nothing but the runtime.

python -m edgesplit_controller.model_registry.golden_child FOLDER
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import Slice
from edgesplit.runtime import Tensor, Tensors
from edgesplit.runtime.dispatch import DispatchingRuntime
from edgesplit_partitioner.sandbox.child_process import child_main

SLICE, INPUTS, OUTPUTS = "slice.json", "inputs", "outputs"
"""Files of the model, and the beginnings of those of each run: a number follows."""


def main(folder: Path) -> None:
    """Run the slice in `folder` on each of the inputs saved there, and save its outputs."""
    model = msgspec.json.decode((folder / SLICE).read_bytes(), type=Slice)
    loaded = DispatchingRuntime(threads=1).load(model, folder)
    for inputs in sorted(folder.glob(f"{INPUTS}-*")):
        outputs = loaded.run(load(inputs))
        number = inputs.name.removeprefix(f"{INPUTS}-")
        save(folder / f"{OUTPUTS}-{number}", {output.name: outputs[output.name] for output in model.outputs})


def save(path: Path, tensors: Tensors) -> None:
    """Write tensors as the body of an OIP inference request, preceded by the length of its JSON part."""
    parts, json_bytes = oip.encode_request(oip.InferRequest(inputs=tensors))
    path.write_bytes(b"".join((json_bytes.to_bytes(8, "big"), *parts)))


def load(path: Path) -> dict[str, Tensor]:
    """Read the tensors written by `save`."""
    raw = path.read_bytes()
    return dict(oip.decode_request(raw[8:], int.from_bytes(raw[:8], "big")).inputs)


if __name__ == "__main__":
    child_main(main)
