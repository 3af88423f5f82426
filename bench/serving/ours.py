"""Makes our release of a suffix: prepared, cut, signed, and laid out for the offload server as the controller does."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from edgesplit.oip import protocol as oip
from edgesplit.plan import Link, Plan, Row
from edgesplit.release.manifest import Manifest, encode_manifest
from edgesplit.release_store import write_release
from edgesplit_controller.tuf.repository import Repository
from edgesplit_partitioner.model_loader import prepare_model
from edgesplit_partitioner.slicing import atoms, cut_slices

DEVICE_CLASS = "bench"
_LINK = Link(up_bytes_per_s=1e8, down_bytes_per_s=1e8, rtt_s=0.001)


@dataclass(frozen=True)
class ServedRelease:
    """Paths that the offload server needs, and the name under which the model is requested."""

    releases: Path
    root: Path
    model: str


def release(model_file: Path, folder: Path) -> ServedRelease:
    """The whole model as one remote slice, for batch size one, as devices send them."""
    prepared = prepare_model(model_file.read_bytes(), {"batch": 1})
    layers = frozenset(layer.name for layer in prepared.graph.layers)
    (cut,) = cut_slices(prepared, prepared.graph, atoms(prepared.graph, [frozenset(), layers]), None)
    slices = (cut.slice.name,)
    sends, receives = (tuple(spec.name for spec in ends) for ends in (prepared.inputs, prepared.outputs))
    rows = (Row(name="local", device=slices), Row(name="remote", remote=slices, sends=sends, receives=receives))
    name = f"{model_file.stem}@1"
    manifest = Manifest(
        model=name,
        model_sha256=hashlib.sha256(model_file.read_bytes()).hexdigest(),
        created="2025-01-01T00:00:00Z",
        input_spec=None,
        inputs=prepared.inputs,
        outputs=prepared.outputs,
        slices=(cut.slice,),
        plans={DEVICE_CLASS: Plan(model=name, device_class=DEVICE_CLASS, rows=rows, link=_LINK)},
    )
    repository, raw = Repository(folder / "repository"), encode_manifest(manifest)
    digest = repository.add_release(raw)
    chunks = {
        chunk.sha256: bytes(run)
        for file in cut.slice.files
        for chunk, run in zip(file.chunks, cut.runs[file.name], strict=True)
    }
    root = folder / "root.json"
    root.write_bytes(repository.root_bytes)
    write_release(
        folder / "releases", digest, raw, repository.proof(digest), chunks.__getitem__,
        bootstrap_root=repository.root_bytes,
    )  # fmt: skip
    return ServedRelease(folder / "releases", root, oip.remote_name(digest, DEVICE_CLASS, "remote"))
