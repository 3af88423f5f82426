"""A controller that runs, with a model, its release and a fleet made up around them, and a way in for a browser."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from edgesplit_controller.history.rollup import RollUp
from edgesplit_controller.storage.database import Database
from support.browser import Browser
from support.controller_process import Up, enrolled, tiny_model
from support.sample_fleet import CLASSES, CUTS, Cut, make_fleet, make_history, make_past, make_proposal, want

MODEL = "people"


@dataclass
class Dashboard:
    """The controller behind the pages, and its database, which tests write to as another process would."""

    up: Up
    database: Database
    settings: Sequence[str] = ()
    release: str = ""
    model: str = ""
    deployment: int = 0
    names: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, folder: Path, *settings: str, database: str = "") -> Dashboard:
        """A controller with nothing in it; `settings` as in `stale_after_s=600`, `database` a URL of PostgreSQL."""
        up = Up(folder / "data")
        every = (*settings, *([f"database={database}"] if database else []))
        assert up.start(*every) == "ready"
        return cls(up, Database(database or f"sqlite:///{up.data / 'controller.db'}"), every)

    def restart(self) -> None:
        """Start it again, after it has ended somehow."""
        assert self.up.start(*self.settings) == "ready"

    def fill(
        self,
        devices: int,
        folder: Path,
        *,
        raw: bytes | None = None,
        classes: Sequence[str] = ("raspberrypi4",),
        partition: str = "auto",
    ) -> None:
        """A model, deployed to a device of each class that came over the broker, and a fleet on paper beside them."""
        pushed = self.up.call("POST", f"/v1/models?name={MODEL}", raw or tiny_model())[1]
        self.model = pushed["model"]
        for number, name in enumerate(classes, 1):
            came = enrolled(self.up, f"cam-{number}", folder / "devices", group="doors", device_class=name)
            came.session.stop()
        body = {"model": self.model, "to": ["all"], "link": "lte", "partition": partition}
        made = self.up.ok("POST", "/v1/deployments", body)
        self.release, self.deployment = made["release"], made["deployment"]
        cuts = self.cuts(classes[0]) if raw else CUTS
        one = {"model": self.model, "release": self.release, "cuts": cuts}
        self.names = make_fleet(self.database, devices, classes=classes if raw else CLASSES, **one)
        want(self.database, self.names, MODEL, self.release, self.deployment)
        if self.names:
            first = self.class_of(self.names[0])
            cuts = self.cuts(first) if raw else CUTS
            make_history(self.database, self.names[0], self.model, self.release, cuts)
            make_past(self.database, self.names[0], self.model)
            while RollUp(self.database, now=time.time).step():
                pass

    def propose(self, device_class: str) -> int:
        """A proposal on paper for a few devices of that class; its number."""
        few = [name for name in self.names[:60] if self.class_of(name) == device_class][:8]
        one = {"model": self.model, "release": self.release, "device_class": device_class}
        return make_proposal(self.database, few, **one)

    def class_of(self, name: str) -> str:
        """The device class of that device."""
        return str(self.up.ok("GET", f"/v1/devices/{name}")["device_class"])

    def cuts(self, device_class: str) -> list[Cut]:
        """The rows of the plan for that class."""
        shown = self.up.ok("GET", f"/v1/views/models/{self.model}")["releases"][0]["plans"]
        plan = next(plan for plan in shown if plan["device_class"] == device_class)
        return [Cut(row["name"], row["device_s"], row["remote_s"], row["up_bytes"]) for row in plan["rows"]]

    @property
    def url(self) -> str:
        """Where the pages are."""
        return str(self.up.addresses["api_url"])

    def page(self, *parts: str) -> str:
        """The address of a page."""
        return f"{self.url}/#/{'/'.join(quote(part, safe='') for part in parts)}"

    def sign_in(self, browser: Browser) -> None:
        """As the owner, by a one-time code."""
        code = self.up.ok("POST", "/v1/session/codes")["code"]
        browser.open("about:blank")
        browser.open(f"{self.url}/#login={code}")
        browser.shows("Sign out")

    def stop(self) -> None:
        """End it."""
        self.database.close()
        self.up.end()
