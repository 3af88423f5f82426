"""A life in one test: push, deploy, undeploy, remove, collect, with a real controller, broker, offload server and
agents; afterwards nothing of the model is left anywhere but in the audit trail."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from edgesplit.errors import NotFound
from edgesplit.mqtt.session import Session
from edgesplit.trust.identity import Credentials
from edgesplit_controller.messaging.broker import CONTROLLERS
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.schema import known_tables
from support.edgesplit_processes import Agent, Cloud, eventually, frame_input, frames

RULES = ("--keep-releases", "0", "--keep-history", "0s", "--keep-unused", "0s")
HISTORY = {
    "events",
    "audit",
    "telemetry",
    "deployments",
    "rollouts",
    "rollout_stages",
    "rollout_devices",
    "removed_models",
}
"""Tables that may name a removed model: the audit trail, raw messages for their 30 days, the newest rollout, whose
number is not used again, and the number of the removed version."""


@dataclass(frozen=True)
class Storage:
    """Where a controller keeps blobs and rows."""

    name: str
    options: tuple[str, ...]
    """Options of `edgectl up`."""
    blobs: Callable[[Cloud], list[str]]
    """The blobs that are stored, by digest."""
    database: Callable[[Cloud], str]
    """URL of the database."""


def blobs_in_folder(cloud: Cloud) -> list[str]:
    return sorted(file.name for file in (cloud.data / "blobs").glob("[0-9a-f][0-9a-f]/*"))


def sqlite_url(cloud: Cloud) -> str:
    return f"sqlite:///{cloud.data / 'controller.db'}"


@pytest.fixture(params=["files and SQLite"])
def storage(request: pytest.FixtureRequest) -> Storage:
    """Each combination of blob store and database in turn."""
    return {"files and SQLite": Storage("files and SQLite", (), blobs_in_folder, sqlite_url)}[request.param]


@pytest.fixture
def life(storage: Storage, tmp_path: Path) -> Iterator[Cloud]:
    """A controller that keeps nothing that is unused."""
    cloud = Cloud(tmp_path, *RULES, *storage.options)
    cloud.start()
    yield cloud
    cloud.stop()


def test_nothing_is_left_of_a_model_after_its_life(life: Cloud, storage: Storage) -> None:
    """Pushed, deployed, used by two devices, undeployed in two stages, removed and collected: no blob, row, signed
    list, copy on the offload server, retained message or file of a device is left. While it runs, nothing of it goes.
    """
    devices = [life.agent(name) for name in ("cam-1", "cam-2")]
    life.push_digits()
    release = life.json("deploy", "digits", "--partition", "cloud", "--to", "all", "--wait", "60")["release"]
    jpeg = frames(1)[0][0]
    for device in devices:
        eventually("an answer with the offload server's help", lambda d=device: remote_answer(d, jpeg))
    assert offload_models(life) and mentions(storage, life, release)
    assert all(left_on(device, release) for device in devices) and len(retained(life, release.encode())) >= len(devices)

    refusal = life.edgectl("model", "remove", "digits", code=2)
    assert "digits is deployed to cam-1, cam-2" in refusal and "edgectl undeploy digits --from cam-1" in refusal
    kept = life.json("gc")["kept"]
    assert [(entry["name"], entry["reason"]) for entry in kept] == [(release, "digits is deployed to cam-1, cam-2")]
    assert all(remote_answer(device, jpeg) for device in devices)

    shown = life.edgectl("undeploy", "digits", "--all", "--dry-run")
    assert "cam-1" in shown and release[:16] in shown and "nothing was changed" in shown
    life.edgectl("undeploy", "digits", "--all", "--canary", "1", "--wait", "60")
    for device in devices:
        with pytest.raises(NotFound):
            device.infer("digits", frame_input(jpeg))
    assert "runs on none of these devices" in life.edgectl("undeploy", "digits", "--all", code=2)

    going = life.json("gc", "--dry-run")
    assert [entry["name"] for entry in going["releases"]] == [release] and release in str(life.json("release", "list"))
    assert "removed digits@1 and 1 release" in life.edgectl("model", "remove", "digits")
    eventually("every blob is collected", lambda: life.json("gc")["waiting"] == 0)

    assert storage.blobs(life) == [] and not list((life.data / "blobs" / "incoming").iterdir())
    assert not list((life.data / "offload" / "releases").iterdir())
    assert not list((life.data / "tuf" / "targets").glob("*/*.json"))
    eventually("no row is about it", lambda: not mentions(storage, life, release))
    eventually("the offload server has closed it", lambda: not offload_models(life))
    eventually("no message about it is retained", lambda: not retained(life, release.encode(), b"digits"))
    for device in devices:
        eventually(f"nothing is left on {device.name}", lambda d=device: not left_on(d, release))

    life.push_digits()
    assert [model["model"] for model in life.json("model", "list")] == ["digits@2"]
    life.edgectl("device", "remove", "cam-1", "--force", "--yes")
    eventually("nothing is retained of a removed device", lambda: not retained(life, b"cam-1"))


def remote_answer(device: Agent, jpeg: bytes) -> bool:
    """Whether a request is answered with the offload server's help."""
    report = device.infer("digits", frame_input(jpeg)).report
    return not report.fallback and report.row != "local"


def mentions(storage: Storage, cloud: Cloud, release: str) -> set[str]:
    """Tables with a row that names the release or the model, besides the history."""
    database = Database(storage.database(cloud), migrated=False)
    found = set()
    with database.read() as session:
        for table in known_tables().sorted_tables:
            rows = session.execute(select(table)).all()
            if any(release in str(tuple(row)) or "digits" in str(tuple(row)) for row in rows):
                found.add(str(table.name))
    database.close()
    return {name for name in found - HISTORY if not name.startswith("audit")}


def offload_models(cloud: Cloud) -> list[Any]:
    """The models that the offload server has open."""
    keys = cloud.data / "keys"
    shown = Credentials(keys / "operator.key", keys / "operator.pem", cloud.data / "ca.pem")
    host, port = cloud.addresses["offload_url"].removeprefix("https://").split(":")
    connection = http.client.HTTPSConnection(host, int(port), timeout=20, context=shown.client_context())
    try:
        connection.request("POST", "/v2/repository/index", b"{}")
        listed: list[Any] = json.loads(connection.getresponse().read())
        return listed
    finally:
        connection.close()


def retained(cloud: Cloud, *words: bytes) -> list[str]:
    """Topics of the messages that the broker gives to a new subscriber and that contain one of these words."""
    found: dict[str, bytes] = {}
    came = threading.Event()

    def on_message(topic: str, payload: bytes, _correlation: bytes | None) -> None:
        found[topic] = payload
        came.set()

    name = CONTROLLERS[-1]
    tls = Authority(cloud.data / "keys").issue_client(name).client_context()
    session = Session(cloud.addresses["mqtt_host"], cloud.addresses["mqtt_port"], name, tls, on_message=on_message)
    session.subscribe(["edgesplit/v1/+/desired", "edgesplit/v1/+/reported", "edgesplit/v1/+/birth"], qos=1)
    session.start()
    assert session.wait_connected(20)
    while came.wait(1.0):  # retained messages come at once after the subscription
        came.clear()
    session.stop()
    # An empty payload is no retained message, but the clearing of one, which came in between.
    kept = {topic: payload for topic, payload in found.items() if payload}
    return [
        topic for topic, payload in kept.items() if any(word in payload or word in topic.encode() for word in words)
    ]


def left_on(device: Agent, release: str) -> list[Path]:
    """Files of a device that belong to the release, or name it or its model."""
    state = device.data / "current.json"
    named = [state] if release in state.read_text() or "digits" in state.read_text() else []
    folders = (device.data / "releases", device.data / "chunks")
    return named + [file for folder in folders if folder.is_dir() for file in folder.rglob("*") if file.is_file()]
