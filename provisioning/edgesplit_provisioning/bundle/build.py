"""Builds a release bundle from the controller's API. Every file is compared with its digest before it is written, so
that errors that a device would refuse surface here."""

from __future__ import annotations

import hashlib
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import LinkError, UsageError
from edgesplit.limits import LIMITS
from edgesplit.mqtt.messages import FetchChunks
from edgesplit.release.bundle_format import (
    FOLDERS,
    KIT_FOLDER,
    BundledRelease,
    BundleIndex,
    chunk_path,
    encode_index,
    statement_path,
)
from edgesplit.release.manifest import Manifest, decode_manifest, release_digest
from edgesplit_provisioning.bundle.writer import Sink

CHUNKS_PER_REQUEST = 64
"""Chunks requested at once: at 128 KiB each, 8 MiB."""
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleRequest:
    """What a release bundle shall contain."""

    devices: tuple[str, ...]
    models: tuple[str, ...] = ()
    valid_s: int = 0
    kit: Mapping[str, Path] = field(default_factory=dict)
    """Files of the agent's installer, by name; empty without one."""
    kit_for: str = ""


def make_bundle(api: ControllerClient, request: BundleRequest, sink: Sink, progress: Progress) -> BundleIndex:
    """Write the release bundle for `request` to `sink`; returns its index. `progress` receives bytes done and bytes in
    all."""
    body = {"devices": list(request.devices), "models": list(request.models), "valid_s": request.valid_s}
    answer = api.post("/v1/release-bundles", body)
    files = {_checked_path(path): b64decode(text) for path, text in answer["files"].items()}
    files |= {statement_path(name): b64decode(text) for name, text in answer["statements"].items()}
    chunk_indices = {entry["release"]: entry["chunks"] for entry in answer["releases"]}
    manifests = {release: _manifest(files, release) for release in chunk_indices}
    needs = {release: _needed_chunks(manifests[release], indices) for release, indices in chunk_indices.items()}
    lacking = {
        release: {sha256: size for sha256, size in need.items() if not sink.has(chunk_path(sha256), size, sha256)}
        for release, need in needs.items()
    }
    kit = {f"{KIT_FOLDER}/{name}": file for name, file in request.kit.items()}
    chunk_bytes = sum({sha256: size for need in lacking.values() for sha256, size in need.items()}.values())
    kit_bytes = sum(file.stat().st_size for file in kit.values())
    sink.begin(chunk_bytes + kit_bytes + sum(map(len, files.values())))
    for path, raw in files.items():
        sink.put(path, raw)
    for path, file in kit.items():
        sink.put_file(path, file)
    _put_chunks(api, sink, manifests, lacking, lambda done: progress(done, chunk_bytes))
    index = BundleIndex(
        controller=api.url, created=answer["created"], valid_until=answer["valid_until"],
        limited_by=answer["limited_by"],
        devices=answer["devices"], kit=request.kit_for,
        releases=tuple(
            BundledRelease(release=release, model=manifests[release].model, bytes=sum(need.values()))
            for release, need in needs.items()
        ),
    )  # fmt: skip
    chunks = {chunk_path(sha256) for need in needs.values() for sha256 in need}
    sink.finish({*files, *chunks, *kit}, encode_index(index))
    return index


def _checked_path(text: str) -> str:
    """Validate a path that the controller names: only files that a bundle may have are accepted."""
    parts = text.split("/")
    if parts[0] not in FOLDERS[:2] or not all(part and part[0].isalnum() for part in parts) or "\\" in text:
        raise LinkError(f"the controller's answer has an unexpected file: {text[:80]!r}")
    return text


def _manifest(files: Mapping[str, bytes], release: str) -> Manifest:
    """The manifest of a release, from `targets/releases` or `targets/recuts`. LinkError where it is missing."""
    for folder in ("releases", "recuts"):
        raw = files.get(f"targets/{folder}/{release}.json")
        if raw is not None and release_digest(raw) == release:
            return decode_manifest(raw)
    raise LinkError(f"the controller's answer lacks the manifest of release {release[:12]}")


def _needed_chunks(manifest: Manifest, indices: Sequence[int]) -> dict[str, int]:
    """Size by SHA-256 of the chunks at these indices of the manifest's chunk list."""
    listed = list(manifest.chunk_list().items())
    try:
        return dict(listed[index] for index in indices)
    except IndexError as error:
        raise LinkError("the controller names a chunk that the release does not have") from error


def _put_chunks(
    api: ControllerClient, sink: Sink, manifests: Mapping[str, Manifest], lacking: Mapping[str, Mapping[str, int]],
    progress: Callable[[int], None],
) -> None:  # fmt: skip
    written: set[str] = set()
    done = 0
    progress(0)
    for release, need in lacking.items():
        indices = {sha256: index for index, sha256 in enumerate(manifests[release].chunk_list())}
        new = {sha256: size for sha256, size in need.items() if sha256 not in written}
        for sha256, data in _download_chunks(api, release, indices, new):
            sink.put(chunk_path(sha256), data)
            done += len(data)
            progress(done)
        written.update(new)


def _download_chunks(
    api: ControllerClient, release: str, indices: Mapping[str, int], need: Mapping[str, int]
) -> Iterator[tuple[str, bytes]]:
    """Download these chunks in batches; each is compared with its digest. LinkError on a mismatch."""
    wanted = sorted(need, key=lambda sha256: indices[sha256])
    for batch in _batches(wanted, indices):
        fetch = FetchChunks.from_indexes(release, [indices[sha256] for sha256 in batch])
        raw = api.download(f"/v1/release-bundles/{release}/chunks", first=fetch.first, bitmap=fetch.bitmap.hex())
        if len(raw) != sum(need[sha256] for sha256 in batch):
            raise LinkError(f"the chunks of release {release[:12]} arrive incomplete: try again")
        start = 0
        for sha256 in batch:
            data = raw[start : start + need[sha256]]
            start += need[sha256]
            if hashlib.sha256(data).hexdigest() != sha256:
                raise LinkError(f"chunk {sha256[:12]} does not match its signed digest: try again")
            yield sha256, data


def _batches(wanted: Sequence[str], indices: Mapping[str, int]) -> Iterator[list[str]]:
    """Split chunk digests into batches: at most `CHUNKS_PER_REQUEST` each, and within the reach of one request's
    bitmap."""
    batch: list[str] = []
    for sha256 in wanted:
        is_out_of_reach = batch and indices[sha256] - indices[batch[0]] >= 8 * LIMITS.bitmap_bytes
        if is_out_of_reach or len(batch) >= CHUNKS_PER_REQUEST:
            yield batch
            batch = []
        batch.append(sha256)
    if batch:
        yield batch


def check_target(to: Path) -> None:
    """UsageError where `to` exists and is of the wrong kind: a folder named .tar, or a file without."""
    if to.suffix == ".tar" and to.is_dir():
        raise UsageError(f"{to} is a folder: name a file, or a folder without .tar")
    if to.suffix != ".tar" and to.exists() and not to.is_dir():
        raise UsageError(f"{to} is a file: name a folder (a stick's), or a file that ends in .tar")
