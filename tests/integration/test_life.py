"""A life in one test: push, deploy, undeploy, remove, collect, with a real controller, broker, offload server and
agents; afterwards nothing of the model is left anywhere but in the audit trail."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from support.edgesplit_processes import Agent, Cloud, FurtherProcess, eventually, frame_input, frames
from support.postgres import Postgres
from support.s3_server import Bucket

RULES = ("--keep-releases", "0", "--keep-history", "0s", "--keep-unused", "0s")
OTHER_CACHE_BYTES = 64 * 2**10
"""Bound of the cache of a process that does not collect."""
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
class Life:
    """An installation that keeps nothing that is unused."""

    first: Cloud
    """The process that has broker and offload server, and collects."""
    other: Cloud
    """The process that gets the other half of the calls; the first one, where there is one only."""
    database: str
    """URL of the database."""
    names: Callable[[], list[str]]
    """Names of all that is stored as blobs, uploads in progress too."""


@contextmanager
def life_on_files_and_sqlite(folder: Path, _request: pytest.FixtureRequest) -> Iterator[Life]:
    """One process."""
    cloud = Cloud(folder, *RULES)
    cloud.start()
    try:
        database = f"sqlite:///{cloud.data / 'controller.db'}"
        yield Life(cloud, cloud, database, lambda: files_in(cloud.data / "blobs"))
    finally:
        cloud.stop()


@contextmanager
def life_on_s3_mock_and_postgresql(folder: Path, request: pytest.FixtureRequest) -> Iterator[Life]:
    """Two processes with folders, and so caches, of their own. The store is moto's mock of S3, no real one."""
    postgres: Postgres = request.getfixturevalue("postgres")
    bucket: Bucket = request.getfixturevalue("s3_mock_bucket")
    url = postgres.database()
    options = (*RULES, "--blobs", bucket.url, "--database", url.replace("postgresql+psycopg://", "postgresql://"))
    first = Cloud(folder / "first", *options)
    first.start()
    try:
        other = FurtherProcess(first, folder / "other", *options, "--blob-cache", str(OTHER_CACHE_BYTES))
        other.start()
        try:
            yield Life(first, other, url, lambda: [*bucket.names(), *bucket.uploads()])
        finally:
            other.stop()
    finally:
        first.stop()


INSTALLATIONS = {
    "files and SQLite": life_on_files_and_sqlite,
    "two processes on an S3 mock and PostgreSQL": life_on_s3_mock_and_postgresql,
}


@pytest.fixture(params=INSTALLATIONS)
def life(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Life]:
    """Each combination of blob store and database in turn."""
    with INSTALLATIONS[request.param](tmp_path, request) as life:
        yield life


def test_nothing_is_left_of_a_model_after_its_life(life: Life) -> None:
    """Pushed, deployed, used by two devices, undeployed in two stages, removed and collected: no blob, row, signed
    list, copy on the offload server, retained message or file of a device is left. While it runs, nothing of it goes.
    """
    cloud, other = life.first, life.other
    devices = [cloud.agent(name) for name in ("cam-1", "cam-2")]
    cloud.push_digits()
    release = other.json("deploy", "digits", "--partition", "cloud", "--to", "all", "--wait", "60")["release"]
    jpeg = frames(1)[0][0]
    for device in devices:
        eventually("an answer with the offload server's help", lambda d=device: remote_answer(d, jpeg))
    assert life.names() and offload_models(cloud) and mentions(life, release)
    assert all(left_on(device, release) for device in devices)
    assert len(retained(cloud, release.encode())) >= len(devices)

    refusal = other.edgectl("model", "remove", "digits", code=2)
    assert "digits is deployed to cam-1, cam-2" in refusal and "edgectl undeploy digits --from cam-1" in refusal
    for process in (cloud, other):
        kept = process.json("gc")["kept"]
        assert [(entry["name"], entry["reason"]) for entry in kept] == [(release, "digits is deployed to cam-1, cam-2")]
    for device in devices:
        eventually("an answer with its help after the collection", lambda d=device: remote_answer(d, jpeg))

    shown = cloud.edgectl("undeploy", "digits", "--all", "--dry-run")
    assert "cam-1" in shown and release[:16] in shown and "nothing was changed" in shown
    cloud.edgectl("undeploy", "digits", "--all", "--canary", "1", "--wait", "60")
    for device in devices:
        with pytest.raises(NotFound):
            device.infer("digits", frame_input(jpeg))
    assert "runs on none of these devices" in other.edgectl("undeploy", "digits", "--all", code=2)

    going = other.json("gc", "--dry-run")
    assert [entry["name"] for entry in going["releases"]] == [release]
    assert release in str(other.json("release", "list"))
    assert "removed digits@1 and 1 release" in other.edgectl("model", "remove", "digits")
    eventually("every blob is collected", lambda: cloud.json("gc")["waiting"] == 0)

    assert life.names() == [] and files_in(cloud.data / "cache") == []
    if other is not cloud:  # a process that did not collect may have copies until its cache is full
        copies = files_in(other.data / "cache")
        assert sum((other.data / "cache" / name).stat().st_size for name in copies) <= OTHER_CACHE_BYTES * 17 // 16
    assert not list((cloud.data / "offload" / "releases").iterdir())
    assert not list((cloud.data / "tuf" / "targets").glob("*/*.json"))
    eventually("no row is about it", lambda: not mentions(life, release))
    eventually("the offload server has closed it", lambda: not offload_models(cloud))
    eventually("no message about it is retained", lambda: not retained(cloud, release.encode(), b"digits"))
    for device in devices:
        eventually(f"nothing is left on {device.name}", lambda d=device: not left_on(d, release))

    other.push_digits()
    assert [model["model"] for model in cloud.json("model", "list")] == ["digits@2"]
    other.edgectl("device", "remove", "cam-1", "--force", "--yes")
    eventually("nothing is retained of a removed device", lambda: not retained(cloud, b"cam-1"))


def files_in(folder: Path) -> list[str]:
    """Files below a folder, without lock files."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return sorted(str(path.relative_to(folder)) for path in files)


def remote_answer(device: Agent, jpeg: bytes) -> bool:
    """Whether a request is answered with the offload server's help."""
    report = device.infer("digits", frame_input(jpeg)).report
    return not report.fallback and report.row != "local"


def mentions(life: Life, release: str) -> set[str]:
    """Tables with a row that names the release or the model, besides the history."""
    database = Database(life.database, migrated=False)
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
