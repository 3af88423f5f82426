"""Database rows as the API returns them: plain values."""

from __future__ import annotations

from typing import Any

import msgspec

from edgesplit.release.lineage import Lineage, sentences
from edgesplit_controller.storage.tables.core import ClaimRow, Deployment, Event, FloodRow, Model


def model_to_dict(model: Model) -> dict[str, Any]:
    """A model with its description."""
    return {
        "model": model.ref, "name": model.name, "version": model.version, "sha256": model.sha256,
        "optimised_sha256": model.optimised_sha256, "bytes": model.bytes, "input": model.input_text or None,
        "bindings": model.bindings, "created_at": model.created, **model.shown, **lineage_to_dict(model),
    }  # fmt: skip


def lineage_to_dict(model: Model) -> dict[str, Any]:
    """The lineage of a version that stands in for another, with its sentences; empty for others."""
    if model.lineage is None:
        return {}
    lineage = msgspec.convert(model.lineage, Lineage)
    return {"lineage": {**model.lineage, "method": lineage.method, "sentences": sentences(lineage)}}


def deployment_to_dict(row: Deployment) -> dict[str, Any]:
    """A deployment with its options."""
    return {
        "id": row.id, "release": row.release, "model": row.model, "targets": row.targets, "devices": row.devices,
        "created": row.created, **row.options,
    }  # fmt: skip


def limit_deployment(deployment: dict[str, Any], names: frozenset[str]) -> dict[str, Any] | None:
    """A deployment limited to devices with these names; None if it has none of them."""
    visible = [name for name in deployment["devices"] if name in names]
    if len(visible) == len(deployment["devices"]):
        return deployment
    return {**deployment, "devices": visible, "targets": visible} if visible else None


def flood_to_dict(flood: FloodRow) -> dict[str, Any]:
    """When a device last flooded, and until when it is quarantined."""
    return {"at": flood.at, "times": flood.times, "dropped": flood.dropped, "held_until": flood.held_until}


def claim_to_dict(claim: ClaimRow) -> dict[str, Any]:
    """An open claim, in the form of a device."""
    return {
        "name": claim.device, "state": "claimed", "device_class": claim.device_class, "group": claim.group,
        "labels": claim.labels, "link": claim.link, "expires": claim.expires, "emulated": False, "desired": [],
        "models": [], "telemetry": None, "last_seen": None, "session": None, "local_url": None,
    }  # fmt: skip


def event_to_dict(row: Event) -> dict[str, Any]:
    """An event."""
    return {
        "id": row.id,
        "at": row.at,
        "actor": row.who,
        "action": row.what,
        "subject": row.subject,
        "detail": row.detail,
    }
