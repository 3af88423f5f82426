"""Far halves of releases as ordinary models, for servers that are not ours.

They are read where the offload server reads them, verified as it verifies them. A half's name is the one that devices
ask for (`oip.remote_name`): it carries the release's digest, so halves of different releases never meet. An encrypted
release is exported only where the operator says that it may lie in clear.
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
from edgesplit.release_store import Release, open_release
from edgesplit_controller.errors import unknown
from edgesplit_controller.model_registry.registry import Registry
from edgesplit_controller.releases.build import Releasing, Repository
from edgesplit_controller.releases.content_keys import ContentKeys
from edgesplit_controller.storage.database import Database, record
from edgesplit_controller.storage.database import Release as Made
from edgesplit_partitioner.onnx_format.export import Part, check_exportable, merged, wire_ends

SHORTEST_PREFIX = 6
"""Digits of a digest that name a release."""


class Exporting:
    """What foreign servers can be given, of one controller's releases."""

    def __init__(
        self,
        database: Database,
        registry: Registry,
        releasing: Releasing,
        repository: Repository,
        content_keys: ContentKeys,
        *,
        offload_releases: Path,
        now: Callable[[], float],
    ) -> None:
        self._database = database
        self._registry = registry
        self._releasing = releasing
        self._repository = repository
        self._content_keys = content_keys
        self._folder = offload_releases
        self._now = now

    def halves(self, reference: str) -> dict[str, Any]:
        """Every far half of a release, named by (the beginning of) its digest, or a model's newest: what it is called,
        and why it cannot be exported where it cannot."""
        digest = self._digest(reference)
        manifest = self._releasing.manifest(digest)
        rows = [
            {
                "device_class": device_class,
                "row": row.name,
                "after": row.after,
                "name": oip.remote_name(digest, device_class, row.name),
                **_told(manifest, row),
            }
            for device_class, plan in manifest.plans.items()
            for row in plan.rows
            if not row.is_local
        ]
        return {"release": digest, "model": manifest.model, "encrypted": manifest.is_encrypted, "halves": rows}

    def half(self, reference: str, device_class: str, row_name: str, *, decrypt: bool = False) -> bytes:
        """Heavy. One of them as an ONNX file. UsageError for an encrypted release without `decrypt`."""
        digest = self._digest(reference)
        manifest = self._releasing.manifest(digest)
        row = _row(_plan(manifest, device_class), row_name)
        check_exportable(manifest, row)
        if manifest.is_encrypted and not decrypt:
            raise UsageError(
                f"release {digest[:12]} is encrypted, and no foreign server decrypts: its far half would lie there in"
                " clear. Say --decrypt if it may"
            )
        release = self._open(digest, manifest)
        parts = [_part(release, one) for one in manifest.slices if one.name in row.remote]
        raw: bytes = merged(manifest, row, parts, f"{manifest.model} {row_name}").SerializeToString(deterministic=True)
        with self._database.write() as session:
            what = {"row": row_name, "device_class": device_class, "decrypted": manifest.is_encrypted}
            record(session, self._now(), "operator", "release.exported", digest, **what)
        return raw

    def _open(self, digest: str, manifest: Manifest) -> Release:
        """As the offload server opens it; NotFound where it is not on its shelf."""
        if not (self._folder / digest).is_dir():
            raise NotFound(f"release {digest[:12]} is not kept here any more: deploy it again")
        release = open_release(self._folder, digest, self._repository.root_bytes)
        needed = needed_keys(manifest, remote_slices(manifest), golden=False)
        return replace(release, keys=self._content_keys.keys_for(manifest, needed))

    def _digest(self, reference: str) -> str:
        """Of the release that is named so, or the newest of the model."""
        known = [one.digest for one in self._releasing.all()]
        if len(reference) >= SHORTEST_PREFIX and set(reference) <= set("0123456789abcdef"):
            found = [digest for digest in known if digest.startswith(reference)]
            if len(found) == 1:
                return identifiers.sha256_hex(found[0])
            if found:
                raise UsageError(f"{len(found)} releases begin with {reference}: give more of it")
        model = self._registry.get(reference)
        with self._database.read() as session:
            newest = select(Made.digest).where(Made.model_id == model.id).order_by(Made.created.desc())
            digest = session.scalars(newest.limit(1)).first()
        if digest is None:
            raise NotFound(f"{model.ref} was never released: `edgectl deploy {model.name}` does that")
        return str(digest)


def _told(manifest: Manifest, row: Row) -> dict[str, Any]:
    """What travels to and from the half, or why it cannot be exported."""
    try:
        check_exportable(manifest, row)
        inputs, outputs = wire_ends(manifest, row)
    except ModelRefused as refusal:
        return {"refusal": str(refusal)}
    return {"refusal": "", "inputs": msgspec.to_builtins(inputs), "outputs": msgspec.to_builtins(outputs)}


def _plan(manifest: Manifest, device_class: str) -> Plan:
    plan = manifest.plans.get(device_class)
    if plan is None:
        raise unknown("device class", device_class, manifest.plans)
    return plan


def _row(plan: Plan, name: str) -> Row:
    try:
        return plan.row(name)
    except KeyError:
        raise unknown("row", name, (row.name for row in plan.rows)) from None


def _part(release: Release, one: Slice) -> Part:
    """The slice's files, verified and, where they are encrypted, in clear."""
    source = release.slice_folder(one.name)
    if isinstance(source, SliceInMemory):
        with source:
            return Part(one, source.read("graph.onnx"), source.read("weights.bin") if _has_weights(one) else b"")
    weights = (source / "weights.bin").read_bytes() if _has_weights(one) else b""
    return Part(one, (source / "graph.onnx").read_bytes(), weights)


def _has_weights(one: Slice) -> bool:
    return any(file.name == "weights.bin" for file in one.files)
