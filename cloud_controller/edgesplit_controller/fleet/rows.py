"""Rows of the database as the API shows them: plain values, named once."""

from __future__ import annotations

from typing import Any

from edgesplit_controller.storage.database import ClaimRow, Deployment, Event, Flood, Model


def shown_model(model: Model) -> dict[str, Any]:
    """A model with what people ask of it."""
    return {
        "model": model.ref,
        "name": model.name,
        "version": model.version,
        "sha256": model.sha256,
        "optimised_sha256": model.optimised_sha256,
        "bytes": model.bytes,
        "input": model.input_text or None,
        "bindings": model.bindings,
        "created_at": model.created,
        **model.shown,
    }


def shown_deployment(row: Deployment) -> dict[str, Any]:
    """A deployment with the options it was made with."""
    return {
        "id": row.id,
        "release": row.release,
        "model": row.model,
        "targets": row.targets,
        "devices": row.devices,
        "created": row.created,
        **row.options,
    }


def narrowed(deployment: dict[str, Any], names: frozenset[str]) -> dict[str, Any] | None:
    """A deployment as it is shown to who may know of these devices only; None where none of them is in it."""
    mine = [name for name in deployment["devices"] if name in names]
    if len(mine) == len(deployment["devices"]):
        return deployment
    return {**deployment, "devices": mine, "targets": mine} if mine else None


def shown_flood(flood: Flood) -> dict[str, Any]:
    """When a device last flooded, and until when it is held off."""
    return {"at": flood.at, "times": flood.times, "dropped": flood.dropped, "held_until": flood.held_until}


def shown_claim(claim: ClaimRow) -> dict[str, Any]:
    """A device that was claimed and has not come yet."""
    return {
        "name": claim.device,
        "state": "claimed",
        "device_class": claim.device_class,
        "group": claim.group,
        "labels": claim.labels,
        "link": claim.link,
        "expires": claim.expires,
        "emulated": False,
        "desired": [],
        "models": [],
        "telemetry": None,
        "last_seen": None,
        "session": None,
        "local_url": None,
    }


def shown_event(row: Event) -> dict[str, Any]:
    """Who did what to what, and when."""
    return {"id": row.id, "at": row.at, "who": row.who, "what": row.what, "subject": row.subject, "detail": row.detail}
