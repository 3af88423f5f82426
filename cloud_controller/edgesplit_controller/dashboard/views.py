"""What a page of the dashboard shows, read from the parts of a controller. Changes nothing."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import msgspec
from sqlalchemy import and_, func, not_, select
from sqlalchemy.orm import Session

from edgesplit.errors import EdgeError
from edgesplit.plan import Conditions, Link, Plan, cost
from edgesplit.release.manifest import Manifest
from edgesplit_controller.controller import Controller
from edgesplit_controller.fleet.rows import shown_event, shown_model
from edgesplit_controller.fleet.table import fleet_rows
from edgesplit_controller.planning.curves import curves
from edgesplit_controller.planning.planner_service import Wish
from edgesplit_controller.storage.database import Desired, Device, Event, Model, Release
from edgesplit_controller.storage.tables.device_state import HeardRow

NEWEST_RELEASES = 12
MOST_VERSIONS = 1_000


def fleet(controller: Controller, *, names: Collection[str] = ()) -> dict[str, Any]:
    """A line per device, and by when a silent one is stale."""
    return {
        "now": time.time(),
        "stale_after_s": controller.devices.stale_after_s,
        "devices": fleet_rows(controller.database, controller.devices, names=names),
        "releases": _versions(controller),
    }


def _versions(controller: Controller) -> dict[str, str]:
    """Of the newest releases: `name@version` by digest, for devices name models without their versions."""
    named = select(Release.digest, Model.name, Model.version).join(Model, Model.id == Release.model_id)
    with controller.database.read() as session:
        rows = session.execute(named.order_by(Release.created.desc()).limit(MOST_VERSIONS)).all()
    return {row.digest: f"{row.name}@{row.version}" for row in rows}


def device_curves(controller: Controller, name: str) -> list[dict[str, Any]]:
    """For each model wanted of a device, its class's plan by the release that runs there, else by the one wanted."""
    device = controller.devices.get(name)
    told: dict[str, Any] = device.telemetry or {}
    windows = {window["model"].partition("@")[0]: window for window in told.get("models", [])}
    running = {one["model"].partition("@")[0]: one["release"] for one in (device.reported or {}).get("models", [])}
    with controller.database.read() as session:
        wanted = session.scalars(select(Desired).where(Desired.device == name).order_by(Desired.model)).all()
    found = []
    for row in wanted:
        digest = running.get(row.model) or row.release
        manifest = _manifest(controller, digest)
        plan = manifest.plans.get(device.device_class) if manifest is not None else None
        if manifest is None or plan is None:
            continue
        here = _link(plan, told)
        window = windows.get(row.model)
        now = _now(plan, here, window["row"], told["at"]) if here is not None and window is not None else None
        found.append({"model": manifest.model, "release": digest, "curves": curves(plan, here), "now": now})
    return found


def _link(plan: Plan, told: dict[str, Any]) -> Link | None:
    """The link as the device measures it; None where it has not."""
    up, rtt_s = told.get("up_bytes_per_s", 0.0), told.get("rtt_s", 0.0)
    return msgspec.structs.replace(plan.link, up_bytes_per_s=up, rtt_s=rtt_s) if up > 0 else None


def _now(plan: Plan, here: Link, row: str, at: float) -> dict[str, Any]:
    """The point on the curves at which a device is: its row at its bandwidth, as the plan predicts it."""
    known = next((one for one in plan.rows if one.name == row), None)
    predicted = cost(known, Conditions(link=here), plan.weights, plan.power) if known is not None else None
    return {"up_bytes_per_s": here.up_bytes_per_s, "rtt_s": here.rtt_s, "row": row, "seconds": predicted, "at": at}


def device_events(controller: Controller, name: str, newest: int) -> list[dict[str, Any]]:
    """The newest events about one device, oldest first."""
    controller.devices.get(name)
    with controller.database.read() as session:
        about = select(Event).where(Event.subject == name).order_by(Event.id.desc()).limit(newest)
        return [shown_event(row) for row in reversed(session.scalars(about).all())]


def model(controller: Controller, reference: str) -> dict[str, Any]:
    """A model, its newest releases first, each with its plans over bandwidth."""
    found = controller.registry.get(reference)
    with controller.database.read() as session:
        of_model = select(Release).where(Release.model_id == found.id).order_by(Release.created.desc())
        releases = session.scalars(of_model.limit(NEWEST_RELEASES)).all()
        digests = [row.digest for row in releases]
        wanted = _wanted(session, digests, controller.devices.groups)
    shown = [(row, _manifest(controller, row.digest)) for row in releases]
    return {
        **shown_model(found),
        "layers": len(found.shown["layers"]),
        "releases": [
            {"release": row.digest, "created": row.created, **wanted[row.digest], **_shown_release(manifest)}
            for row, manifest in shown
            if manifest is not None
        ],
    }


def _wanted(session: Session, digests: Collection[str], groups: Collection[str] | None) -> dict[str, dict[str, int]]:
    """By release, the devices that shall run it, and how many of them are emulated or simulated."""
    emulated = and_(HeardRow.emulated, not_(HeardRow.simulated))
    counts = [func.count(), func.count().filter(HeardRow.simulated), func.count().filter(emulated)]
    asked = select(Desired.release, *counts).outerjoin(HeardRow, HeardRow.device == Desired.device)
    if groups is not None:
        mine = select(Device.name).where(Device.group.in_(groups))
        asked = asked.where(Desired.device.in_(mine))
    found = {digest: {"devices": 0, "simulated": 0, "emulated": 0} for digest in digests}
    for row in session.execute(asked.where(Desired.release.in_(digests)).group_by(Desired.release)):
        found[row[0]] = {"devices": int(row[1]), "simulated": int(row[2]), "emulated": int(row[3])}
    return found


def _shown_release(manifest: Manifest) -> dict[str, Any]:
    return {
        "encrypted": manifest.is_encrypted,
        "recut_of": manifest.recut_of,
        "slices": len(manifest.slices),
        "bytes": sum(manifest.chunk_list().values()),
        "plans": [curves(plan) for _, plan in sorted(manifest.plans.items())],
    }


def _manifest(controller: Controller, digest: str) -> Manifest | None:
    """None where it is lost: a page shows what there is."""
    try:
        return controller.releasing.manifest(digest)
    except EdgeError:
        return None


def picture(controller: Controller, reference: str, device_class: str, link: str, wish: Wish) -> bytes:
    """Heavy. A plan as a picture (SVG)."""
    from edgesplit_partitioner.presentation.picture import svg  # it imports matplotlib

    return svg(controller.plan(reference, device_class, link, wish))
