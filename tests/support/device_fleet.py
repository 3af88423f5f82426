"""Devices in a database, which speak when a test says so, with a clock that is set by hand."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from edgesplit.mqtt.messages import Birth, ModelState, Reported, Telemetry, TelemetryWindow
from edgesplit_controller.fleet.device_view import device_to_dict
from edgesplit_controller.fleet.devices import Devices
from edgesplit_controller.fleet.listing import Listing, ListingQuery
from edgesplit_controller.fleet.overview import FleetOverview
from edgesplit_controller.history.rollup import RollUp
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Deployment, Desired, Device, Model, ReleaseRow

NOW = 1_800_000_000.0
STALE_S = 10.0
RELEASE, OTHER = "a" * 64, "b" * 64


@cache
def _new() -> bytes:
    """A new database, as a file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "new.db"
        Database(f"sqlite:///{file}").close()
        return file.read_bytes()


def new_url(folder: Path) -> str:
    """The URL of a new database in that folder: made once, and copied."""
    file = folder / "controller.db"
    file.write_bytes(_new())
    return f"sqlite:///{file}"


def add_release(session: Session, digest: str) -> None:
    """A release of the model `m`, version 1, whose row has the id 1."""
    session.add(Model(
        id=1, name="m", version=1, sha256="", optimised_sha256="", bytes=0, input_text="", bindings={}, shown={},
        created=0.0,
    ))  # fmt: skip
    session.flush()
    session.add(ReleaseRow(digest=digest, model_id=1, created=0.0, options={}))
    session.flush()


class FleetHarness:
    """A database of devices that speak when a test says so."""

    def __init__(self, url: str) -> None:
        self.now = NOW
        self.database = Database(url)
        self.devices = Devices(self.database, stale_after_s=STALE_S, now=lambda: self.now)
        self.listing = Listing(self.database, stale_after_s=STALE_S, now=lambda: self.now)
        self.fleet = FleetOverview(self.database, stale_after_s=STALE_S, now=lambda: self.now)
        self.rolling = RollUp(self.database, now=lambda: self.now)

    def add(self, *names: str, group: str = "door", **more: Any) -> None:
        with self.database.write() as session:
            session.add_all(
                Device(**{
                    "name": name, "device_class": "pi4", "group": group, "labels": {"site": "oslo"}, "link": "",
                    "certificate_serial": name, "public_key_sha256": "", "enrolled": NOW, "revoked": None,
                    "counter": 0, "statement": None, "last_seen": None, "birth": None, "reported": None,
                    "telemetry": None, **more,
                })
                for name in names
            )  # fmt: skip

    def put(self, *rows: Any) -> None:
        with self.database.write() as session:
            session.add_all(rows)

    def want(self, *names: str) -> None:
        """These devices shall run the model `m`."""
        with self.database.write() as session:
            add_release(session, RELEASE)
            session.add(Deployment(
                id=1, release=RELEASE, model="m@1", targets=[], devices=list(names), options={}, created=0.0
            ))  # fmt: skip
            session.flush()
            session.add_all(Desired(device=name, model="m", release=RELEASE, deployment=1) for name in names)

    def birth(self, *names: str, session: int = 1) -> None:
        self.devices.ingest([(name, Birth(session, 0.5, "0.2", "pi4", True, "http://x")) for name in names])

    def report(self, name: str, *models: ModelState, session: int = 1, number: int = 1, **more: Any) -> None:
        self.devices.ingest([(name, Reported(session, 7, models, report_number=number, **more))])

    def tell(self, name: str, sequence: int = 0, *windows: TelemetryWindow, session: int = 1, **more: Any) -> Any:
        return self.devices.ingest([(name, telemetry(session, sequence, *windows, **more))])

    def shown(self, name: str) -> dict[str, Any]:
        device = self.devices.get(name)
        return device_to_dict(device, self.devices.state(device), self.listing.page_of_device(device), self.now)

    def page(self, **asked: Any) -> list[str]:
        page = self.listing.page(ListingQuery(**asked))
        return sorted([*(device.name for device in page.devices), *(claim.device for claim in page.claims)])


def telemetry(session: int, sequence: int, *windows: TelemetryWindow, **more: Any) -> Telemetry:
    return Telemetry(
        session=session, sequence=sequence, emulated=True, up_bytes_per_s=1e6, rtt_s=0.01, remote_usable=True,
        models=windows, **more,
    )  # fmt: skip


def window(row: str = "cut-1", requests: int = 10, **more: Any) -> TelemetryWindow:
    return TelemetryWindow(model="m", release=RELEASE, row=row, requests=requests, **more)


def runs(state: str = "running", detail: str = "", release: str = RELEASE) -> ModelState:
    return ModelState("m", release, RELEASE, state, detail)  # type: ignore[arg-type]
