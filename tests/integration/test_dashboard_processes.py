"""The dashboard's views and events are the same in two controller processes on PostgreSQL."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import update

from edgesplit.controller_client import credentials
from edgesplit_controller.fleet.live_events import MAX_FOLLOWERS_OF_ONE
from edgesplit_controller.storage.tables.core import Device
from edgesplit_controller.storage.tables.operators import OperatorRow
from support.controller_process import PATIENCE_S
from support.dashboard_server import Dashboard
from support.postgres import Postgres

FOLLOWERS = 8
"""New connections, of which each is taken by any process."""
MAX_TOLD = 60
"""Events that a stream may tell after its reader's access ended, before the test gives up."""


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

    def __init__(
        self, dashboard: Dashboard, headers: dict[str, str] | None = None, context: ssl.SSLContext | None = None
    ) -> None:
        host, port = dashboard.url.removeprefix("https://").split(":")
        context = context or dashboard.up.shown("operator").client_context()
        self.connection = http.client.HTTPSConnection(host, int(port), timeout=PATIENCE_S, context=context)
        token = (dashboard.up.data / "operator.token").read_text().strip()
        self.connection.request(
            "GET", "/v1/events/stream", headers=headers or {"Authorization": f"Bearer {token}"}
        )  # fmt: skip
        self.answer = self.connection.getresponse()
        assert self.answer.status == 200, self.answer.status
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

    def is_ended(self) -> bool:
        """Whether the stream ends instead of telling one more event."""
        while line := self.answer.readline():
            if line.startswith(b"data:"):
                return False
        return True


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


def events_until_the_end(dashboard: Dashboard, follower: Follower) -> int:
    """The number of events that the stream still tells, while something changes before each."""
    for told in range(MAX_TOLD):
        with dashboard.database.write() as session:
            session.execute(update(Device).where(Device.name == dashboard.names[3]).values(link=f"link {told}"))
        if follower.is_ended():
            return told
    raise AssertionError(f"{MAX_TOLD} events were told after the end")


def test_a_stream_ends_with_the_session_though_devices_report(dashboard: Dashboard) -> None:
    """After logout, through whichever process, a stream that always has something to tell ends."""
    code = dashboard.up.ok("POST", "/v1/session/codes")["code"]
    host, port = dashboard.url.removeprefix("https://").split(":")
    context = dashboard.up.shown("operator").client_context()
    connection = http.client.HTTPSConnection(host, int(port), timeout=PATIENCE_S, context=context)
    connection.request("POST", "/v1/session", json.dumps({"code": code}), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    csrf = json.loads(answer.read())["csrf"]
    cookie = {"Cookie": answer.headers["Set-Cookie"].partition(";")[0]}
    streams = [Follower(dashboard, cookie) for _ in range(4)]
    connection.request("DELETE", "/v1/session", headers={**cookie, "X-CSRF-Token": csrf})
    assert connection.getresponse().status == 200
    for stream in streams:
        events_until_the_end(dashboard, stream)
        stream.connection.close()
    connection.close()


def test_a_stream_ends_with_the_operator_though_devices_report(dashboard: Dashboard) -> None:
    """A revoked operator's streams end, and so do those of one who comes back with another role."""
    for change in ("revoked", "promoted"):
        key, csr = credentials.new_certificate_request()
        body = {"name": change, "role": "viewer", "csr_pem": csr}
        person = credentials.from_reply(dashboard.up.ok("POST", "/v1/operators", body), key)
        headers = {"Authorization": f"Bearer {person.token}"}
        streams = [Follower(dashboard, headers, person.client_context()) for _ in range(2)]
        if change == "revoked":
            dashboard.up.ok("DELETE", f"/v1/operators/{change}")
        else:
            with dashboard.database.write() as session:
                session.execute(update(OperatorRow).where(OperatorRow.name == change).values(role="operator"))
        for stream in streams:
            events_until_the_end(dashboard, stream)
            stream.connection.close()


def test_one_operator_leaves_streams_to_the_others(dashboard: Dashboard) -> None:
    """Each process serves a bounded number of one operator's streams: beyond them it is told to close one."""
    key, csr = credentials.new_certificate_request()
    body = {"name": "greedy", "role": "viewer", "csr_pem": csr}
    person = credentials.from_reply(dashboard.up.ok("POST", "/v1/operators", body), key)
    headers, streams = {"Authorization": f"Bearer {person.token}"}, []
    with pytest.raises(AssertionError, match="429"):
        for _ in range(2 * MAX_FOLLOWERS_OF_ONE + 1):
            streams.append(Follower(dashboard, headers, person.client_context()))
    Follower(dashboard).connection.close()
    for stream in streams:
        stream.connection.close()


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
