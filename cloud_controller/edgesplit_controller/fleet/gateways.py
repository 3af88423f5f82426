"""Gateways: which devices are one, where devices reach them, who offloads through whom, and what they keep for these.

A gateway is a device that was claimed as one. What it keeps follows from what the devices behind it shall run and say
they run, as far as a plan of that release knows a gateway: nobody decides it apart from that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from edgesplit.links import host_and_port, parse_link
from edgesplit.plan import Link
from edgesplit.release.manifest import Gateway
from edgesplit_controller.errors import Conflict, Forbidden, unknown
from edgesplit_controller.planning.planner_service import Through, link_of, slowest
from edgesplit_controller.storage.database import Behind, Database, Desired, Device, GatewayRow, record


class Tiers(Protocol):
    """What a statement says of gateways."""

    def reached_by(self, session: Session, device: Device) -> Gateway | None:
        """The gateway that this device shall offload to."""
        ...

    def kept_by(self, session: Session, device: Device) -> list[tuple[str, str]]:
        """Model and release of all that this device shall keep for those behind it."""
        ...

    def concerned(self, session: Session) -> Iterable[Device]:
        """Devices whose statement may say something of gateways."""
        ...


class NoGateways:
    """An installation of two tiers."""

    def reached_by(self, _session: Session, _device: Device) -> Gateway | None:
        """Nobody."""
        return None

    def kept_by(self, _session: Session, _device: Device) -> list[tuple[str, str]]:
        """Nothing."""
        return []

    def concerned(self, _session: Session) -> Iterable[Device]:
        """Nobody."""
        return ()


class Gateways:
    """The gateways of one controller."""

    def __init__(self, database: Database, *, now: Callable[[], float], split_of: Callable[[str], str]) -> None:
        """`split_of`: the model of which that release is, where a plan of it has a tier between device and cloud."""
        self._database = database
        self._now = now
        self._split_of = split_of

    # What operators say

    def appoint(self, name: str, address: str) -> None:
        """The device of that name, enrolled or still to come, is a gateway that devices reach at HOST:PORT."""
        host_and_port(address, "gateway")
        with self._database.write() as session:
            behind = session.get(Behind, name)
            if behind is not None and behind.gateway is not None:
                raise Conflict(f"{name} is behind a gateway itself: `edgectl device gateway {name} none` first")
            session.merge(GatewayRow(device=name, address=address))
            record(session, self._now(), "operator", "gateway.appointed", name, address=address)

    def lead(self, devices: Sequence[Device], gateway: str, link: str = "") -> list[str]:
        """Let these devices offload through that gateway, or with `none` to the cloud again; their names.

        `link` is from now on the device's own: to the gateway, or to the cloud.
        """
        if link:
            parse_link(link)
        with self._database.write() as session:
            if gateway != "none":
                self._living(session, gateway)
                if amiss := sorted(one.name for one in devices if session.get(GatewayRow, one.name)):
                    raise Conflict(f"{amiss[0]} is a gateway: there is one tier between device and cloud, not two")
            for device in devices:
                session.merge(Behind(device=device.name, gateway=None if gateway == "none" else gateway))
                if link:
                    session.get_one(Device, device.name).link = link
                record(session, self._now(), "operator", "device.led", device.name, gateway=gateway)
        return sorted(device.name for device in devices)

    # What planning and people ask

    def address(self, name: str) -> str:
        """Where devices reach the gateway of that name; empty for who is none."""
        with self._database.read() as session:
            row = session.get(GatewayRow, name)
            return row.address if row is not None else ""

    def of(self, names: Collection[str] | None = None) -> dict[str, Device]:
        """By device, the living gateway that it is behind; of those named, or of all."""
        with self._database.read() as session:
            led = session.scalars(select(Behind).where(Behind.gateway.is_not(None)))
            found = {row.device: session.get(Device, row.gateway) for row in led}
            wanted = {name: one for name, one in found.items() if names is None or name in names}
            return {name: one for name, one in wanted.items() if one is not None and not one.revoked}

    def check_serves(self, name: str) -> None:
        """Forbidden unless the device of that name may have a gateway's server certificate."""
        with self._database.read() as session:
            device = session.get(Device, name)
            if device is None or device.revoked or session.get(GatewayRow, name) is None:
                raise Forbidden(
                    f"{name} is no gateway: `edgectl device claim {name} --replace --gateway HOST:PORT` makes it one"
                )

    # What statements say

    def reached_by(self, session: Session, device: Device) -> Gateway | None:
        """The gateway that this device shall offload to: none while it is not enrolled, or revoked."""
        if not _there_are_any(session):
            return None
        behind = session.get(Behind, device.name)
        row = session.get(GatewayRow, behind.gateway) if behind is not None and behind.gateway is not None else None
        there = session.get(Device, row.device) if row is not None else None
        return Gateway(row.device, row.address) if row is not None and there is not None and not there.revoked else None

    def kept_by(self, session: Session, device: Device) -> list[tuple[str, str]]:
        """Model and release of what the devices behind this gateway shall run, or say they run in its stead."""
        if not _there_are_any(session) or session.get(GatewayRow, device.name) is None:
            return []
        behind = select(Device).join(Behind, Behind.device == Device.name).where(Behind.gateway == device.name)
        found: set[tuple[str, str]] = set()
        for one in session.scalars(behind):
            said = {model["model"]: model["release"] for model in (one.reported or {}).get("models", [])}
            for row in session.scalars(select(Desired).where(Desired.device == one.name)):
                found |= {(row.model, row.release), (row.model, said.get(row.model, ""))}
        return sorted((model, release) for model, release in found if release and self._split_of(release) == model)

    def concerned(self, session: Session) -> Iterable[Device]:
        """Gateways, and devices that are or were behind one."""
        named = [*session.scalars(select(GatewayRow.device)), *session.scalars(select(Behind.device))]
        living = select(Device).where(Device.name.in_(named), Device.revoked.is_(None)).order_by(Device.name)
        return session.scalars(living).all()

    def _living(self, session: Session, name: str) -> None:
        there = session.get(Device, name)
        if session.get(GatewayRow, name) is None:
            known = session.scalars(select(GatewayRow.device)).all()
            raise (
                unknown("gateway", name, known)
                if known
                else Conflict(
                    f"{name[:63]} is no gateway: claim one with `edgectl device claim NAME --gateway HOST:PORT`"
                )
            )
        if there is None or there.revoked:
            raise Conflict(f"the gateway {name} has not enrolled yet: start its agent with its claim")


def _there_are_any(session: Session) -> bool:
    """Asked once in a writer's transaction, which nobody adds one beside: most fleets have none."""
    if "gateways" not in session.info:
        session.info["gateways"] = bool(session.scalar(select(exists(select(GatewayRow.device)))))
    return bool(session.info["gateways"])


def through_by_class(devices: Iterable[Device], gateways: Mapping[str, Device]) -> dict[str, Through]:
    """The gateway that each device class is planned through, by its profile, over the slowest of their uplinks; nothing
    for a class without. Conflict where devices of one class take different ways: a release has one plan for them."""
    ways: dict[str, dict[str, list[Device]]] = {}
    for device in devices:
        there = gateways.get(device.name)
        ways.setdefault(device.device_class, {}).setdefault(there.device_class if there else "", []).append(device)
    found = {}
    for device_class, by_profile in sorted(ways.items()):
        if len(by_profile) > 1:
            told = "; ".join(f"{one[0].name} {_way(profile)}" for profile, one in sorted(by_profile.items()))
            raise Conflict(f"a release has one plan for {device_class}, and {told}: deploy to each of them separately")
        (profile,) = by_profile
        if profile:
            uplinks: list[Link] = [link_of(gateways[one.name].link) for one in by_profile[profile]]
            found[device_class] = Through(profile, slowest(uplinks))
    return found


def _way(profile: str) -> str:
    return f"is behind a gateway of the profile {profile}" if profile else "has no gateway"
