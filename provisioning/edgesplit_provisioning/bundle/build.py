"""A bundle from a controller's answers. Everything that comes is compared with its digest before it is written: what a
device would refuse is found here."""

from __future__ import annotations

import hashlib
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from edgesplit.errors import LinkError, UsageError
from edgesplit.limits import LIMITS
from edgesplit.mqtt.messages import FetchChunks
from edgesplit.release.bundle_format import FOLDERS, KIT, Carried, Index, chunk_path, encode_index, statement_path
from edgesplit.release.manifest import Manifest, decode_manifest, release_digest
from edgesplit_provisioning.bundle.writer import Sink

AT_ONCE = 64
"""Chunks in one answer: 8 MiB."""
Progress = Callable[[int, int], None]


class Controller(Protocol):
    """What is needed of the controller's API."""

    url: str

    def post(self, path: str, body: Mapping[str, Any] | None = None, **query: Any) -> Any: ...
    def download(self, path: str, **query: Any) -> bytes: ...


class Kit(Protocol):
    """What is needed of `edgesplit_provisioning.kit.Kit`."""

    @property
    def files(self) -> Mapping[str, Path]: ...
    @property
    def bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked for."""

    devices: tuple[str, ...]
    models: tuple[str, ...] = ()
    valid_s: int = 0
    kit: Kit | None = None
    kit_for: str = ""


def make_bundle(api: Controller, wish: Wish, to: Sink, progress: Progress) -> Index:
    """Write the bundle; what it says of itself."""
    body = {"devices": list(wish.devices), "models": list(wish.models), "valid_s": wish.valid_s}
    papers = api.post("/v1/offline/papers", body)
    files = {_path(path): b64decode(text) for path, text in papers["files"].items()}
    files |= {statement_path(name): b64decode(text) for name, text in papers["statements"].items()}
    manifests = {one["release"]: _manifest(files, one["release"]) for one in papers["releases"]}
    needs = {one["release"]: _needs(manifests[one["release"]], one["chunks"]) for one in papers["releases"]}
    lacking = {
        release: {sha256: size for sha256, size in need.items() if not to.has(chunk_path(sha256), size, sha256)}
        for release, need in needs.items()
    }
    to.begin(_bytes_to_write(lacking, files, wish.kit))
    for path, raw in files.items():
        to.put(path, raw)
    kit_names = _put_kit(to, wish.kit)
    _put_chunks(api, to, manifests, lacking, progress)
    index = Index(
        controller=api.url, made=papers["made"], valid_until=papers["valid_until"], limited_by=papers["limited_by"],
        devices=papers["devices"], kit=wish.kit_for,
        releases=tuple(
            Carried(release=release, model=manifests[release].model, bytes=sum(need.values()))
            for release, need in needs.items()
        ),
    )  # fmt: skip
    chunks = {chunk_path(sha256) for need in needs.values() for sha256 in need}
    to.finish({*files, *chunks, *kit_names}, encode_index(index))
    return index


def _path(text: str) -> str:
    """A path of ours: an answer names no other file."""
    parts = text.split("/")
    if parts[0] not in FOLDERS[:2] or not all(part and part[0].isalnum() for part in parts) or "\\" in text:
        raise LinkError(f"the controller answers with a file that no bundle has: {text[:80]!r}")
    return text


def _manifest(files: Mapping[str, bytes], release: str) -> Manifest:
    for folder in ("releases", "recuts"):
        raw = files.get(f"targets/{folder}/{release}.json")
        if raw is not None and release_digest(raw) == release:
            return decode_manifest(raw)
    raise LinkError(f"the controller's answer lacks the manifest of release {release[:12]}")


def _needs(manifest: Manifest, places: Sequence[int]) -> dict[str, int]:
    """Size by digest of the chunks at these places."""
    listed = list(manifest.chunk_list().items())
    try:
        return dict(listed[place] for place in places)
    except IndexError as error:
        raise LinkError("the controller names a chunk that the release does not have") from error


def _bytes_to_write(lacking: Mapping[str, Mapping[str, int]], files: Mapping[str, bytes], kit: Kit | None) -> int:
    chunks = {sha256: size for need in lacking.values() for sha256, size in need.items()}
    return sum(chunks.values()) + sum(map(len, files.values())) + (kit.bytes if kit is not None else 0)


def _put_kit(to: Sink, kit: Kit | None) -> list[str]:
    files = kit.files if kit is not None else {}
    for name, file in files.items():
        to.put_file(f"{KIT}/{name}", file)
    return [f"{KIT}/{name}" for name in files]


def _put_chunks(
    api: Controller,
    to: Sink,
    manifests: Mapping[str, Manifest],
    lacking: Mapping[str, Mapping[str, int]],
    progress: Progress,
) -> None:
    total = sum({sha256: size for need in lacking.values() for sha256, size in need.items()}.values())
    written: set[str] = set()
    done = 0
    progress(0, total)
    for release, need in lacking.items():
        places = {sha256: place for place, sha256 in enumerate(manifests[release].chunk_list())}
        new = {sha256: size for sha256, size in need.items() if sha256 not in written}
        for sha256, data in _fetched(api, release, places, new):
            to.put(chunk_path(sha256), data)
            done += len(data)
            progress(done, total)
        written.update(new)


def _fetched(
    api: Controller, release: str, places: Mapping[str, int], need: Mapping[str, int]
) -> Iterator[tuple[str, bytes]]:
    """Those chunks, some of them in each call, compared with their digests."""
    wanted = sorted(need, key=lambda sha256: places[sha256])
    for some in _batches(wanted, places):
        asked = FetchChunks.of(release, [places[sha256] for sha256 in some])
        raw = api.download(f"/v1/offline/{release}/chunks", first=asked.first, bitmap=asked.bitmap.hex())
        if len(raw) != sum(need[sha256] for sha256 in some):
            raise LinkError(f"the chunks of release {release[:12]} do not come whole: try again")
        at = 0
        for sha256 in some:
            data = raw[at : at + need[sha256]]
            at += need[sha256]
            if hashlib.sha256(data).hexdigest() != sha256:
                raise LinkError(f"chunk {sha256[:12]} does not come as it was signed: try again")
            yield sha256, data


def _batches(wanted: Sequence[str], places: Mapping[str, int]) -> Iterator[list[str]]:
    """As many as one request may name, and no further apart than its bits reach."""
    batch: list[str] = []
    for sha256 in wanted:
        if batch and (len(batch) >= AT_ONCE or places[sha256] - places[batch[0]] >= 8 * LIMITS.bitmap_bytes):
            yield batch
            batch = []
        batch.append(sha256)
    if batch:
        yield batch


def check_target(to: Path) -> None:
    """UsageError where what is there is somebody else's."""
    if to.suffix == ".tar" and to.is_dir():
        raise UsageError(f"{to} is a folder: name a file, or a folder without .tar")
    if to.suffix != ".tar" and to.exists() and not to.is_dir():
        raise UsageError(f"{to} is a file: name a folder (a stick's), or a file that ends in .tar")
