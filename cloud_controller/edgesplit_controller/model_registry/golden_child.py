"""The child of `golden`: runs a whole model once on given tensors, with nothing loaded but the runtime.

python -m edgesplit_controller.model_registry.golden_child FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import Slice
from edgesplit.runtime import Tensor, Tensors
from edgesplit.runtime.dispatch import EngineByFormat

SLICE, INPUTS, OUTPUTS = "slice.json", "inputs", "outputs"


def main(folder: Path) -> None:
    """The child's whole work."""
    whole = msgspec.json.decode((folder / SLICE).read_bytes(), type=Slice)
    outputs = EngineByFormat(threads=1).load(whole, folder).run(load(folder / INPUTS))
    save(folder / OUTPUTS, {one.name: outputs[one.name] for one in whole.outputs})


def save(path: Path, tensors: Tensors) -> None:
    """Tensors under their names, as the body of a request."""
    parts, json_bytes = oip.encode_request(oip.InferRequest(inputs=tensors))
    path.write_bytes(b"".join((json_bytes.to_bytes(8, "big"), *parts)))


def load(path: Path) -> dict[str, Tensor]:
    """What `save` wrote."""
    raw = path.read_bytes()
    return dict(oip.decode_request(raw[8:], int.from_bytes(raw[:8], "big")).inputs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
