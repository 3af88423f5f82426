"""Export of remote halves of releases as ordinary models, for foreign servers.

They are read from the offload server's folder and verified as the offload server verifies them. A remote half has the
name under which devices request it (`oip.remote_name`); it contains the release's digest, so halves of different
releases never collide. An encrypted release is exported only if the operator allows it to be stored in clear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import select

from edgesplit import identifiers
from edgesplit.crypto.slice_encryption import SliceInMemory, needed_keys
from edgesplit.errors import ModelRefused, NotFound, UsageError
from edgesplit.oip import protocol as oip
from edgesplit.plan import Plan, Row
from edgesplit.release.manifest import Manifest, Slice, remote_slices
from edgesplit.release_store import StoredRelease, open_release
from edgesplit_controller.errors import not_found
from edgesplit_controller.model_registry.registry import Registry
from edgesplit_controller.releases.build import ReleaseBuilder
from edgesplit_controller.releases.content_keys import ContentKeys
from edgesplit_controller.storage.database import Database, record_event
from edgesplit_controller.storage.tables.core import ReleaseRow as Made
from edgesplit_controller.tuf.repository import Repository
from edgesplit_partitioner.onnx_format.export import SlicePart, check_exportable, merge_slices, wire_signature

SHORTEST_PREFIX = 6
"""Digits of a digest that suffice to name a release."""


class Exporter:
    """Exports of one controller's releases."""

    def __init__(
        self, database: Database, registry: Registry, releasing: ReleaseBuilder, repository: Repository,
        content_keys: ContentKeys, *, offload_releases: Path, now: Callable[[], float],
    ) -> None:  # fmt: skip
        self._database = database
        self._registry = registry
        self._releasing = releasing
        self._repository = repository
        self._content_keys = content_keys
        self._folder = offload_releases
        self._now = now

    def remote_halves(self, reference: str) -> dict[str, Any]:
        """Every remote half of a release, named by its digest (or a prefix), or by a model (its newest release), as
        JSON: its name, or why it cannot be exported."""
        digest = self._digest(reference)
        manifest = self._releasing.manifest(digest)
        _refuse_family(manifest)
        rows = [
            {
                "device_class": device_class, "row": row.name, "split_after": row.split_after,
                "name": oip.remote_name(digest, device_class, row.name), **_half_view(manifest, row),
            }
            for device_class, plan in manifest.plans.items()
            for row in plan.rows
            if not row.is_local
        ]  # fmt: skip
        return {"release": digest, "model": manifest.model, "encrypted": manifest.is_encrypted, "halves": rows}

    def export_half(self, reference: str, device_class: str, row_name: str, *, decrypt: bool = False) -> bytes:
        """Heavy (run in the job queue). One remote half as an ONNX file. UsageError for an encrypted release without
        `decrypt`."""
        digest = self._digest(reference)
        manifest = self._releasing.manifest(digest)
        _refuse_family(manifest)
        row = _row(_plan(manifest, device_class), row_name)
        check_exportable(manifest, row)
        if manifest.is_encrypted and not decrypt:
            raise UsageError(
                f"release {digest[:12]} is encrypted, and no foreign server decrypts: its far half would lie there in"
                " clear. Say --decrypt if it may"
            )
        release = self._open(digest, manifest)
        parts = [_part(release, piece) for piece in manifest.slices if piece.name in row.remote]
        raw: bytes = merge_slices(manifest, row, parts, f"{manifest.model} {row_name}").SerializeToString(
            deterministic=True
        )
        with self._database.write() as session:
            detail = {"row": row_name, "device_class": device_class, "decrypted": manifest.is_encrypted}
            record_event(session, self._now(), "operator", "release.exported", digest, **detail)
        return raw

    def _open(self, digest: str, manifest: Manifest) -> StoredRelease:
        """The release from the offload server's folder, verified; NotFound if it is not there."""
        if not (self._folder / digest).is_dir():
            raise NotFound(f"release {digest[:12]} is not stored any more: deploy it again")
        release = open_release(self._folder, digest, self._repository.root_bytes)
        needed = needed_keys(manifest, remote_slices(manifest), golden=False)
        return replace(release, keys=self._content_keys.keys_for(manifest, needed))

    def _digest(self, reference: str) -> str:
        """Digest of the release named by a prefix, or of the model's newest release."""
        known = [release.digest for release in self._releasing.all()]
        if len(reference) >= SHORTEST_PREFIX and set(reference) <= set("0123456789abcdef"):
            matches = [digest for digest in known if digest.startswith(reference)]
            if len(matches) == 1:
                return identifiers.sha256_hex(matches[0])
            if matches:
                raise UsageError(f"{len(matches)} releases begin with {reference}: give more of it")
        model = self._registry.get(reference)
        with self._database.read() as session:
            query = select(Made.digest).where(Made.model_id == model.id).order_by(Made.created.desc())
            digest = session.scalars(query.limit(1)).first()
        if digest is None:
            raise NotFound(f"{model.ref} was never released: `edgectl deploy {model.name}` does that")
        return str(digest)


def _refuse_family(manifest: Manifest) -> None:
    """UsageError for a family: its devices ask edgesplit's own server, so no other one would ever be asked."""
    if manifest.family:
        models = " or ".join(variant.model for variant in manifest.family)
        raise UsageError(
            f"{manifest.model} is a family, whose remote halves only edgesplit's own server runs: deploy {models} with"
            " `--offload URL`, and export that"
        )


def _half_view(manifest: Manifest, row: Row) -> dict[str, Any]:
    """Input and output tensors of a remote half, or why it cannot be exported."""
    try:
        check_exportable(manifest, row)
        inputs, outputs = wire_signature(manifest, row)
    except ModelRefused as refusal:
        return {"refusal": str(refusal)}
    return {"refusal": "", "inputs": msgspec.to_builtins(inputs), "outputs": msgspec.to_builtins(outputs)}


def _plan(manifest: Manifest, device_class: str) -> Plan:
    plan = manifest.plans.get(device_class)
    if plan is None:
        raise not_found("device class", device_class, manifest.plans)
    return plan


def _row(plan: Plan, name: str) -> Row:
    try:
        return plan.row(name)
    except KeyError:
        raise not_found("row", name, (row.name for row in plan.rows)) from None


def _part(release: StoredRelease, slice_spec: Slice) -> SlicePart:
    """The slice's files, verified, and decrypted if they are encrypted."""
    source = release.slice_folder(slice_spec.name)
    if isinstance(source, SliceInMemory):
        with source:
            return SlicePart(
                slice_spec, source.read("graph.onnx"), source.read("weights.bin") if _has_weights(slice_spec) else b""
            )
    weights = (source / "weights.bin").read_bytes() if _has_weights(slice_spec) else b""
    return SlicePart(slice_spec, (source / "graph.onnx").read_bytes(), weights)


def _has_weights(slice_spec: Slice) -> bool:
    return any(file.name == "weights.bin" for file in slice_spec.files)
