"""The data of the dashboard's pages, read from the parts of a controller. Changes nothing."""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import reduce
from operator import add
from typing import Any

import msgspec
from sqlalchemy import and_, func, not_, select
from sqlalchemy.orm import Session

from edgesplit.cascade import score_text
from edgesplit.errors import EdgeError
from edgesplit.plan import Conditions, Link, Plan, cost
from edgesplit.release.lineage import Lineage
from edgesplit.release.manifest import Manifest
from edgesplit_controller.controller import Controller
from edgesplit_controller.fleet.audits import UNSURE, AnswerAudits, audits_view, sums_of
from edgesplit_controller.fleet.rows import event_to_dict, model_to_dict
from edgesplit_controller.fleet.table import fleet_rows
from edgesplit_controller.history.buckets import DAY_S, Span
from edgesplit_controller.model_registry.families import FamilyDocument, family_of
from edgesplit_controller.planning.curves import curves
from edgesplit_controller.storage.tables.core import Desired, Device, Event, Model, ReleaseRow
from edgesplit_controller.storage.tables.device_state import DeviceSessionRow, RunningRow
from edgesplit_partitioner.bounds.binomial import lower_share, upper_share

NEWEST_RELEASES = 12
"""Releases on a model's page."""
YOUNG_S = 7_200.0
"""A history that is younger, in seconds, is shown by minute."""
MOST_VERSIONS = 1_000
"""Releases of which the fleet page shows the version."""


def fleet(controller: Controller, *, names: Collection[str] = ()) -> dict[str, Any]:
    """A row per device, the time, and the seconds of silence after which a device is stale."""
    return {
        "now": time.time(),
        "stale_after_s": controller.devices.stale_after_s,
        "devices": fleet_rows(controller.database, controller.devices, names=names),
        "releases": _versions(controller),
    }


def _versions(controller: Controller) -> dict[str, str]:
    """`name@version` by digest of the newest releases, because devices report models without their versions."""
    query = select(ReleaseRow.digest, Model.name, Model.version).join(Model, Model.id == ReleaseRow.model_id)
    with controller.database.read() as session:
        rows = session.execute(query.order_by(ReleaseRow.created.desc()).limit(MOST_VERSIONS)).all()
    return {row.digest: f"{row.name}@{row.version}" for row in rows}


def trend(controller: Controller) -> dict[str, Any]:
    """Devices that report, requests, fallbacks and p95 of all models over the last 24 hours by hour; by minute while
    there is less than two hours of it."""
    now, groups = time.time(), controller.devices.groups
    span: Span = "hour"
    buckets = controller.roll_up.fleet_history(span, now - DAY_S, now, groups)
    if not buckets or buckets[0]["at"] > now - YOUNG_S:
        span = "minute"
        buckets = controller.roll_up.fleet_history(span, now - YOUNG_S, now, groups)
    return {"span": span, "buckets": buckets}


def device_curves(controller: Controller, name: str) -> list[dict[str, Any]]:
    """For each model that a device shall run: its class's plan over bandwidth, of the release that runs there or else
    of the desired one, and the present operating point."""
    device = controller.devices.get(name)
    telemetry: dict[str, Any] = device.telemetry or {}
    windows = {window["model"].partition("@")[0]: window for window in telemetry.get("models", [])}
    running = {
        reported_model["model"].partition("@")[0]: reported_model["release"]
        for reported_model in (device.reported or {}).get("models", [])
    }
    with controller.database.read() as session:
        wanted = session.scalars(select(Desired).where(Desired.device == name).order_by(Desired.model)).all()
    result = []
    for row in wanted:
        digest = running.get(row.model) or row.release
        manifest = _manifest(controller, digest)
        plan = manifest.plans.get(device.device_class) if manifest is not None else None
        if manifest is None or plan is None:
            continue
        measured_link = _measured_link(plan, telemetry)
        window = windows.get(row.model)
        now = (
            _operating_point(plan, measured_link, window["row"], telemetry["at"])
            if measured_link is not None and window is not None
            else None
        )
        result.append({"model": manifest.model, "release": digest, "curves": curves(plan, measured_link), "now": now})
    return result


def _measured_link(plan: Plan, telemetry: dict[str, Any]) -> Link | None:
    """The link as the device measured it; None if it has not."""
    up, rtt_s = telemetry.get("up_bytes_per_s", 0.0), telemetry.get("rtt_s", 0.0)
    return msgspec.structs.replace(plan.link, up_bytes_per_s=up, rtt_s=rtt_s) if up > 0 else None


def _operating_point(plan: Plan, link: Link, row: str, at: float) -> dict[str, Any]:
    """The device's operating point on the curves: its row, its bandwidth, and the latency predicted there."""
    plan_row = next((candidate for candidate in plan.rows if candidate.name == row), None)
    predicted = cost(plan_row, Conditions(link=link), plan.weights, plan.power) if plan_row is not None else None
    return {"up_bytes_per_s": link.up_bytes_per_s, "rtt_s": link.rtt_s, "row": row, "seconds": predicted, "at": at}


def device_events(controller: Controller, name: str, newest: int) -> list[dict[str, Any]]:
    """The newest events about one device, oldest first."""
    controller.devices.get(name)
    with controller.database.read() as session:
        about = select(Event).where(Event.subject == name).order_by(Event.id.desc()).limit(newest)
        return [event_to_dict(row) for row in reversed(session.scalars(about).all())]


def model(controller: Controller, reference: str) -> dict[str, Any]:
    """A model with its newest releases, each with its plans over bandwidth."""
    stored = controller.registry.get(reference)
    family = family_of(stored)
    with controller.database.read() as session:
        of_model = select(ReleaseRow).where(ReleaseRow.model_id == stored.id).order_by(ReleaseRow.created.desc())
        releases = session.scalars(of_model.limit(NEWEST_RELEASES)).all()
        digests = [row.digest for row in releases]
        device_counts = _device_counts(session, digests, controller.devices.groups)
        audits = _audits_by_release(session, stored.name, digests, controller.devices.groups)
    with_manifests = [(row, _manifest(controller, row.digest)) for row in releases]
    return {
        **model_to_dict(stored),
        "layers": len(stored.shown["layers"]), "family": None if family is None else _family_to_dict(family),
        "variants": [_variant_to_dict(variant) for variant in controller.registry.variants_of(_base_of(stored))],
        "releases": [
            {
                "release": row.digest, "created": row.created, **device_counts[row.digest],
                **_release_to_dict(manifest), "audits": audits.get(row.digest),
            }
            for row, manifest in with_manifests
            if manifest is not None
        ],
    }  # fmt: skip


def _audits_by_release(
    session: Session, name: str, digests: Collection[str], groups: Collection[str] | None
) -> dict[str, dict[str, Any]]:
    """By release, the sums over visible devices of what they counted of changed answers, and how many devices did."""
    query = select(RunningRow.release, RunningRow.audits).where(
        RunningRow.model == name, RunningRow.release.in_(digests)
    )
    if groups is not None:
        query = query.where(RunningRow.device.in_(select(Device.name).where(Device.group.in_(groups))))
    sums: dict[str, list[AnswerAudits]] = {}
    for release, stored in session.execute(query):
        if (of_device := sums_of(stored, release)) is not None:
            sums.setdefault(release, []).append(of_device)
    return {
        release: {**audits_view(reduce(add, every)), "audited_devices": len(every)} for release, every in sums.items()
    }


def _base_of(model: Model) -> str:
    """The model that this one stands in for, or itself."""
    return model.ref if model.lineage is None else str(model.lineage["base"])


def _variant_to_dict(variant: Model) -> dict[str, Any]:
    """One row of the table of versions that stand in for the same model."""
    lineage = msgspec.convert(variant.lineage, Lineage)
    seen = lineage.evidence
    return {
        "model": variant.ref, "bytes": variant.bytes, "method": lineage.method, "samples": seen.samples,
        "changed_at_most": seen.changed_at_most, "accuracy": msgspec.to_builtins(seen.accuracy_variant),
        "accuracy_base": msgspec.to_builtins(seen.accuracy_base),
    }  # fmt: skip


def _device_counts(
    session: Session, digests: Collection[str], groups: Collection[str] | None
) -> dict[str, dict[str, int]]:
    """By release, the number of devices that shall run it, and how many of them are emulated or simulated."""
    emulated = and_(DeviceSessionRow.emulated, not_(DeviceSessionRow.simulated))
    counts = [func.count(), func.count().filter(DeviceSessionRow.simulated), func.count().filter(emulated)]
    query = select(Desired.release, *counts).outerjoin(DeviceSessionRow, DeviceSessionRow.device == Desired.device)
    if groups is not None:
        visible = select(Device.name).where(Device.group.in_(groups))
        query = query.where(Desired.device.in_(visible))
    result = {digest: {"devices": 0, "simulated": 0, "emulated": 0} for digest in digests}
    for row in session.execute(query.where(Desired.release.in_(digests)).group_by(Desired.release)):
        result[row[0]] = {"devices": int(row[1]), "simulated": int(row[2]), "emulated": int(row[3])}
    return result


def _release_to_dict(manifest: Manifest) -> dict[str, Any]:
    return {
        "encrypted": manifest.is_encrypted,
        "recut_of": manifest.recut_of,
        "slices": len(manifest.slices),
        "bytes": sum(manifest.chunk_list().values()),
        "cascades": [
            {
                "device_class": device_class,
                **msgspec.to_builtins(plan.cascade),
                "score": score_text(plan.cascade),
                "promise": plan.cascade.changed.text,
            }
            for device_class, plan in sorted(manifest.plans.items())
            if plan.cascade is not None
        ],
        "plans": [curves(plan) for _, plan in sorted(manifest.plans.items())],
    }


def _family_to_dict(family: FamilyDocument) -> list[dict[str, Any]]:
    """The variants of a family, each with its accuracy on the labelled samples, or with its agreement with the
    reference, and the interval, 90 % sure."""
    return [
        {
            "name": variant.name, "model": variant.model, "samples": family.samples, "reference": family.reference,
            "accuracy": {
                "share": family.accuracy(variant),
                "at_least": lower_share(variant.right, family.samples, UNSURE / 2),
                "at_most": upper_share(variant.right, family.samples, UNSURE / 2),
            },
        }
        for variant in family.variants
    ]  # fmt: skip


def _manifest(controller: Controller, digest: str) -> Manifest | None:
    """The manifest; None if it is lost, so that the page shows the rest."""
    try:
        return controller.release_builder.manifest(digest)
    except EdgeError:
        return None
