"""A controller that runs, with a model, its release and a fleet made up around them, and a way in for a browser."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from browser import Browser
from controller_world import Up, enrolled, tiny_model
from edgesplit_controller.database import Database
from made_fleet import make_fleet, make_history, want

MODEL = "people"
ROWS = ("local", "remote")


@dataclass
class Dashboard:
    """The controller behind the pages, and its database, which tests write to as another process would."""

    up: Up
    database: Database
    release: str = ""
    model: str = ""
    deployment: int = 0
    names: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, folder: Path) -> Dashboard:
        """A controller with nothing in it."""
        up = Up(folder / "data")
        assert up.start() == "ready"
        return cls(up, Database(f"sqlite:///{up.data / 'controller.db'}"))

    def fill(self, devices: int, folder: Path) -> None:
        """A model, deployed to one device that came over the broker, and a fleet on paper beside it."""
        pushed = self.up.call("POST", f"/v1/models?name={MODEL}", tiny_model())[1]
        self.model = pushed["model"]
        enrolled(self.up, "cam-1", folder / "devices", group="doors").session.stop()
        made = self.up.ok("POST", "/v1/deployments", {"model": self.model, "to": ["cam-1"], "link": "lte"})
        self.release, self.deployment = made["release"], made["deployment"]
        self.names = make_fleet(self.database, devices, model=self.model, release=self.release, rows=ROWS)
        want(self.database, self.names, MODEL, self.release, self.deployment)
        if self.names:
            make_history(self.database, self.names[0], self.model, self.release, {0.0: "local", 4.0: "remote"})

    @property
    def url(self) -> str:
        """Where the pages are."""
        return str(self.up.told["api_url"])

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
