"""A signed world with a real model in it: a release, other cuts of it, and a thief who has the planner's key."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import onnx
from tuf.api.metadata import TargetFile

from edgesplit.plan import Link, Plan, Row
from edgesplit.release import manifest as release
from edgesplit.release.fingerprint import encode_fingerprint, fingerprint_file
from edgesplit.release.manifest import Chunk, GoldenExample, Manifest
from edgesplit.trust.verification import recut_path
from edgesplit_controller.tuf.repository import Repository
from edgesplit_partitioner.ir.chunking import slice_file, split_into_chunks
from edgesplit_partitioner.ir.graph import LayerGraph
from edgesplit_partitioner.slicing import CutSlice, atoms, cut_slices, to_release_plan
from support import onnx_models as tiny
from support.signed_repository import TrustHarness
from support.slice_chunks import chunk_bytes

CLASS = "pi4"
LINK = Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.04)
GOLDEN = (b"a golden request", b"a golden response")


def chunk_of(data: bytes) -> Chunk:
    return Chunk(hashlib.sha256(data).hexdigest(), len(data))


@dataclass(frozen=True)
class CutRelease:
    """A release with the bytes of its slices' files."""

    manifest: Manifest
    cut: tuple[CutSlice, ...]
    golden: tuple[bytes, bytes] = GOLDEN

    @property
    def raw(self) -> bytes:
        return release.encode_manifest(self.manifest)

    @property
    def digest(self) -> str:
        return release.release_digest(self.raw)

    @property
    def chunks(self) -> dict[str, bytes]:
        runs = {name: bytes(run) for name, run in chunk_bytes(self.cut).items()}
        return {**runs, **{chunk_of(data).sha256: data for data in self.golden}}

    def with_(self, **changes: Any) -> CutRelease:
        """Its manifest with these fields in place of its own."""
        return replace(self, manifest=msgspec.structs.replace(self.manifest, **changes))

    def with_plan(self, device_class: str = CLASS, **changes: Any) -> CutRelease:
        plans = self.manifest.plans
        changed = msgspec.structs.replace(plans[CLASS], device_class=device_class, **changes)
        return self.with_(plans={**({} if device_class == CLASS else plans), device_class: changed})

    def with_rows(self, change: Callable[[Row], Row]) -> CutRelease:
        return self.with_plan(rows=tuple(change(row) for row in self.manifest.plans[CLASS].rows))

    def with_slice(self, place: int, **changes: Any) -> CutRelease:
        """One slice described otherwise; its files stay."""
        cut = [*self.cut]
        cut[place] = replace(cut[place], slice=msgspec.structs.replace(cut[place].slice, **changes))
        return replace(self, cut=tuple(cut)).with_(slices=tuple(one.slice for one in cut))

    def with_files(self, place: int, **files: bytes) -> CutRelease:
        """One slice's files with these in place of its own (`graph`, `weights`), rightly described."""
        whole = {**self.cut[place].files, **{NAMES[name]: data for name, data in files.items()}}
        described = tuple(slice_file(name, split_into_chunks(data)) for name, data in whole.items())  # type: ignore[arg-type]
        changed = self.with_slice(place, files=described)
        cut = [*changed.cut]
        cut[place] = replace(cut[place], runs={name: split_into_chunks(data) for name, data in whole.items()})
        return replace(changed, cut=tuple(cut))

    def with_graph(self, place: int, change: Callable[[onnx.ModelProto], object]) -> CutRelease:
        """One slice's graph after `change`, rightly described."""
        model = onnx.load_model_from_string(self.cut[place].files["graph.onnx"])
        change(model)
        return self.with_files(place, graph=model.SerializeToString(deterministic=True))


NAMES = {"graph": "graph.onnx", "weights": "weights.bin"}


def build_release(
    model: str = "chain",
    *sets: Iterable[str],
    private_tensors: Sequence[str] = ("image",),
    required_local_layers: Sequence[str] = (),
    recut_of: str = "",
    golden: tuple[bytes, bytes] = GOLDEN,
) -> CutRelease:
    """That model of `onnx_models`, cut so that each of these sets of layers can be on the device."""
    prepared = tiny.prepared(model)
    graph = prepared.graph
    device_sets = [frozenset(one) for one in sets]
    cut = cut_slices(prepared, graph, atoms(graph, device_sets), None)
    every = frozenset(layer.name for layer in graph.layers)
    rows = [row_of(graph, f"cut-{place}", one) for place, one in enumerate(device_sets, 1)]
    table = Plan(
        model="tiny@1",
        device_class=CLASS,
        rows=(*rows, row_of(graph, "local", every)),
        link=LINK,
        private_tensors=tuple(private_tensors),
        required_local_layers=tuple(required_local_layers),
    )
    fingerprint = encode_fingerprint(fingerprint_for(model))
    manifest = msgspec.structs.replace(
        tiny.manifest_of(prepared, cut),
        plans={CLASS: to_release_plan(table, cut, {})},
        golden=(GoldenExample(*map(chunk_of, golden)),),
        fingerprint=None if recut_of else fingerprint_file(fingerprint),
        recut_of=recut_of,
    )
    return CutRelease(manifest, tuple(cut), golden)


def fingerprint_for(model: str) -> Any:
    prepared = tiny.prepared(model)
    return prepared.fingerprint(prepared.graph)


def row_of(graph: LayerGraph, name: str, here: frozenset[str]) -> Row:
    """The row with these layers on the device."""
    far = [layer for layer in graph.layers if layer.name not in here]
    made_far = {tensor for layer in far for tensor in layer.writes}
    needed = dict.fromkeys(tensor for layer in far for tensor in layer.reads if tensor not in made_far)
    receives = tuple(tensor for tensor in graph.outputs if tensor in made_far)
    return Row(name=name, layers=tuple(sorted(here)), sends=tuple(needed), receives=receives)


class RecutHarness(TrustHarness):
    """A repository with one release of the chain model, cut after its second layer; raw input and the first layer stay
    on the device."""

    model = "chain"

    def __init__(self, folder: Path, **plan: Any) -> None:
        super().__init__(folder)
        self.layers = [layer.name for layer in tiny.prepared(self.model).graph.layers]
        self.kept: dict[str, Any] = {"required_local_layers": self.layers[:1], **plan}
        self.base = build_release(self.model, self.layers[:2], **self.kept)
        self.publish(self.base)

    def publish(self, one: CutRelease) -> str:
        """Sign with the release key."""
        self.repository.add_fingerprint(encode_fingerprint(fingerprint_for(self.model)))
        return self.repository.add_release(one.raw)

    def recut(self, *after: int, **plan: Any) -> CutRelease:
        """The base cut after these numbers of layers."""
        sets = [self.layers[:count] for count in after or (4,)]
        return build_release(self.model, *sets, recut_of=self.base.digest, **{**self.kept, **plan})

    def steal(self, raw: bytes, path: str = "") -> str:
        """What a thief does: sign whatever it is with the planner's key, and publish it; returns its digest."""
        return self.sign_by_planner(self.repository, self.folder / "repository", raw, path)

    @staticmethod
    def sign_by_planner(repository: Repository, folder: Path, raw: bytes, path: str = "") -> str:
        digest = release.release_digest(raw)
        path = path or recut_path(digest)
        file = folder / "targets" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(raw)
        store = repository.store
        with store.exclusive():
            published = store.published()
            published.planner.targets[path] = TargetFile.from_data(path, raw, ["sha256"])
            store.publish(repository.signer.publish(published, planner=published.planner))
        return digest

    @staticmethod
    def encoded(fingerprint: Any) -> bytes:
        return encode_fingerprint(fingerprint)

    def stolen_proof(self, one: CutRelease) -> dict[str, bytes]:
        """What lies beside that release once the thief has signed it."""
        if one.digest not in self.repository.recuts():
            self.steal(one.raw)
        return self.repository.proof(one.digest)


def plant(folder: Path, one: CutRelease, proof: Mapping[str, bytes]) -> None:
    """The release as files, written by nobody who checks."""
    home = folder / one.digest
    files = {"manifest.json": one.raw, **{f"proof/{name}": raw for name, raw in proof.items()}}
    files |= {f"slices/{cut.slice.name}/{name}": raw for cut in one.cut for name, raw in cut.files.items()}
    for name, raw in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(raw)
