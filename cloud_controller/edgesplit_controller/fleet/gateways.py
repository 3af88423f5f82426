"""Gateways: which devices are gateways, their addresses, which devices offload through which, and the releases that a
gateway keeps.

A gateway is a device that was claimed as one. The releases that it keeps are derived from what the devices behind it
shall run and report to run, as far as a plan of such a release has a tier between device and cloud; they are not
configured separately.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from edgesplit.links import parse_host_and_port, parse_link
from edgesplit.plan import Link
from edgesplit.release.manifest import Gateway
from edgesplit_controller.errors import Conflict, Unauthenticated, not_found
from edgesplit_controller.planning.planner_service import GatewayHop, link_of, slowest_link
from edgesplit_controller.storage.database import Database, record_event
from edgesplit_controller.storage.tables.core import Desired, Device, GatewayRouteRow, GatewayRow


class Gateways:
    """The gateways of one controller."""

    def __init__(self, database: Database, *, now: Callable[[], float], model_if_split: Callable[[str], str]) -> None:
        """`model_if_split` returns the model of a release if one of its plans has a tier between device and cloud,
        otherwise ""."""
        self._database = database
        self._now = now
        self._model_if_split = model_if_split

    # Operators' changes

    def register(self, name: str, address: str) -> None:
        """Make the device of this name, enrolled or not, a gateway that devices reach at HOST:PORT. Conflict if it is
        behind a gateway itself."""
        parse_host_and_port(address, "gateway")
        with self._database.write() as session:
            behind = session.get(GatewayRouteRow, name)
            if behind is not None and behind.gateway is not None:
                raise Conflict(f"{name} is behind a gateway itself: `edgectl device gateway {name} none` first")
            session.merge(GatewayRow(device=name, address=address))
            record_event(session, self._now(), "operator", "gateway.appointed", name, address=address)

    def assign(self, devices: Sequence[Device], gateway: str, link: str = "") -> list[str]:
        """Assign these devices to the gateway, or with `none` to the cloud; returns their names. `link`, if not empty,
        becomes the devices' link to that target."""
        if link:
            parse_link(link)
        with self._database.write() as session:
            if gateway != "none":
                self._check_enrolled(session, gateway)
                if gateways := sorted(device.name for device in devices if session.get(GatewayRow, device.name)):
                    raise Conflict(f"{gateways[0]} is a gateway: there is one tier between device and cloud, not two")
            for device in devices:
                session.merge(GatewayRouteRow(device=device.name, gateway=None if gateway == "none" else gateway))
                if link:
                    session.get_one(Device, device.name).link = link
                record_event(session, self._now(), "operator", "device.led", device.name, gateway=gateway)
        return sorted(device.name for device in devices)

    # Queries of planning and the API

    def address_of(self, name: str) -> str:
        """HOST:PORT at which devices reach the gateway of this name; empty if it is not a gateway."""
        with self._database.read() as session:
            row = session.get(GatewayRow, name)
            return row.address if row is not None else ""

    def by_device(self, names: Collection[str] | None = None) -> dict[str, Device]:
        """The gateway of each device that has one which is enrolled and not revoked; for the devices in `names`, or for
        all."""
        with self._database.read() as session:
            assigned = session.scalars(select(GatewayRouteRow).where(GatewayRouteRow.gateway.is_not(None)))
            selected = [row for row in assigned if names is None or row.device in names]
            by_device = {row.device: session.get(Device, row.gateway) for row in selected}
            return {name: gateway for name, gateway in by_device.items() if gateway is not None and not gateway.revoked}

    def check_is_gateway(self, name: str) -> None:
        """Raise Unauthenticated unless the device of this name may have a gateway's server certificate."""
        with self._database.read() as session:
            device = session.get(Device, name)
            if device is None or device.revoked or session.get(GatewayRow, name) is None:
                raise Unauthenticated(
                    f"{name} is no gateway: `edgectl device claim {name} --replace --gateway HOST:PORT` makes it one"
                )

    # Content of statements

    def gateway_of(self, session: Session, device: Device) -> Gateway | None:
        """The gateway that this device shall offload to; None while the gateway is not enrolled or is revoked."""
        if not _has_gateways(session):
            return None
        behind = session.get(GatewayRouteRow, device.name)
        row = session.get(GatewayRow, behind.gateway) if behind is not None and behind.gateway is not None else None
        enrolled = session.get(Device, row.device) if row is not None else None
        if row is None or enrolled is None or enrolled.revoked:
            return None
        return Gateway(row.device, row.address)

    def releases_kept_by(self, session: Session, device: Device) -> list[tuple[str, str]]:
        """Model and release of what the devices behind this gateway shall run, or report to run instead."""
        if not _has_gateways(session) or session.get(GatewayRow, device.name) is None:
            return []
        behind = (
            select(Device)
            .join(GatewayRouteRow, GatewayRouteRow.device == Device.name)
            .where(GatewayRouteRow.gateway == device.name)
        )
        releases: set[tuple[str, str]] = set()
        for device_behind in session.scalars(behind):
            reported = {model["model"]: model["release"] for model in (device_behind.reported or {}).get("models", [])}
            for row in session.scalars(select(Desired).where(Desired.device == device_behind.name)):
                releases |= {(row.model, row.release), (row.model, reported.get(row.model, ""))}
        kept = [(model, release) for model, release in releases if release]
        return sorted((model, release) for model, release in kept if self._model_if_split(release) == model)

    def affected_devices(self, session: Session) -> Iterable[Device]:
        """Gateways, and devices that are or were behind one, without revoked ones."""
        named = [*session.scalars(select(GatewayRow.device)), *session.scalars(select(GatewayRouteRow.device))]
        living = select(Device).where(Device.name.in_(named), Device.revoked.is_(None)).order_by(Device.name)
        return session.scalars(living).all()

    def _check_enrolled(self, session: Session, name: str) -> None:
        enrolled = session.get(Device, name)
        if session.get(GatewayRow, name) is None:
            names = session.scalars(select(GatewayRow.device)).all()
            if names:
                raise not_found("gateway", name, names)
            raise Conflict(f"{name[:63]} is no gateway: claim one with `edgectl device claim NAME --gateway HOST:PORT`")
        if enrolled is None or enrolled.revoked:
            raise Conflict(f"the gateway {name} has not enrolled yet: start its agent with its claim")


def _has_gateways(session: Session) -> bool:
    """Whether the installation has gateways; cached for the transaction, in which no other writer can add one. Most
    fleets have none."""
    if "gateways" not in session.info:
        session.info["gateways"] = bool(session.scalar(select(exists(select(GatewayRow.device)))))
    return bool(session.info["gateways"])


def gateway_tier_by_class(devices: Iterable[Device], gateways: Mapping[str, Device]) -> dict[str, GatewayHop]:
    """The gateway tier that each device class is planned with: the gateways' profile, and the slowest of their uplinks.
    Classes without a gateway are left out.

    Conflict if devices of one class have gateways of different profiles, or only some have one: a release has one plan
    per class.
    """
    by_class: dict[str, dict[str, list[Device]]] = {}
    for device in devices:
        gateway = gateways.get(device.name)
        by_profile = by_class.setdefault(device.device_class, {})
        by_profile.setdefault(gateway.device_class if gateway else "", []).append(device)
    result = {}
    for device_class, by_profile in sorted(by_class.items()):
        if len(by_profile) > 1:
            routes = (f"{members[0].name} {_route_text(profile)}" for profile, members in sorted(by_profile.items()))
            summary = "; ".join(routes)
            raise Conflict(
                f"a release has one plan for {device_class}, and {summary}: deploy to each of them separately"
            )
        (profile,) = by_profile
        if profile:
            uplinks: list[Link] = [link_of(gateways[members.name].link) for members in by_profile[profile]]
            result[device_class] = GatewayHop(profile, slowest_link(uplinks))
    return result


def _route_text(profile: str) -> str:
    return f"is behind a gateway of the profile {profile}" if profile else "has no gateway"
