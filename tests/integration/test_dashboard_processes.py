"""The dashboard's views and events are the same in two controller processes on PostgreSQL."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import update

from edgesplit_controller.storage.tables.core import Device
from support.controller_process import PATIENCE_S
from support.dashboard_server import Dashboard
from support.postgres import Postgres

FOLLOWERS = 8
"""New connections, of which each is taken by any process."""


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory, postgres: Postgres) -> Iterator[Dashboard]:
    """Two processes, and a few devices that are made up."""
    folder = tmp_path_factory.mktemp("growing")
    running = Dashboard.start(folder, "processes=2", database=postgres.database())
    try:
        running.fill(40, folder)
        yield running
    finally:
        running.stop()


class Follower:
    """One page's stream, on a connection of its own."""

    def __init__(self, dashboard: Dashboard) -> None:
        host, port = dashboard.url.removeprefix("https://").split(":")
        context = dashboard.up.shown("operator").client_context()
        self.connection = http.client.HTTPSConnection(host, int(port), timeout=PATIENCE_S, context=context)
        token = (dashboard.up.data / "operator.token").read_text().strip()
        self.connection.request("GET", "/v1/events/stream", headers={"Authorization": f"Bearer {token}"})
        self.answer = self.connection.getresponse()
        assert self.answer.status == 200
        self.hears("hello", "")

    def hears(self, kind: str, subject: str) -> None:
        """Wait for that event; the line's own patience is what ends it."""
        event = ""
        while line := self.answer.readline().decode().strip() or " ":
            if line.startswith("event:"):
                event = line.removeprefix("event:").strip()
            elif line.startswith("data:") and event == kind:
                told = json.loads(line.removeprefix("data:"))
                if subject in ("", told.get("subject")):
                    return


def test_a_page_shows_changes_made_by_any_process(dashboard: Dashboard) -> None:
    """A device's row that another process writes, and a rollout that one of them is told to end."""
    followers = [Follower(dashboard) for _ in range(FOLLOWERS)]
    name = dashboard.names[2]
    with dashboard.database.write() as session:
        session.execute(update(Device).where(Device.name == name).values(group="moved"))
    for follower in followers:
        follower.hears("device", name)
    dashboard.up.ok("POST", f"/v1/rollouts/{dashboard.deployment}/abort")
    for follower in followers:
        follower.hears("rollout", str(dashboard.deployment))
        follower.connection.close()


def test_every_view_is_the_same_whichever_process_answers(dashboard: Dashboard, tmp_path: Path) -> None:
    """Fleet, model, history and proposals, asked over and over on new connections; parts name both processes."""
    name = dashboard.names[0]
    for path in (
        f"/v1/views/models/{dashboard.model}", f"/v1/devices/{name}/history?span=month",
        f"/v1/models/{dashboard.model}/history?span=day", "/v1/rollouts", "/v1/proposals",
    ):  # fmt: skip
        answers = {json.dumps(dashboard.up.ok("GET", path), sort_keys=True) for _ in range(FOLLOWERS)}
        assert len(answers) == 1, path
    assert len(dashboard.up.ok("GET", "/v1/views/fleet")["devices"]) == 41
    parts = {one["name"]: one for one in dashboard.up.ok("GET", "/v1/components")}
    assert parts["processes"]["text"].startswith("2 processes run") and "PostgreSQL" in parts["database"]["text"]
    assert parts["broker"]["state"] == "good"
