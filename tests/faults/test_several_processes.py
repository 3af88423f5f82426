"""Several processes of one controller on PostgreSQL: any of them answers, each message counts once, and when one is
killed (the one that leads, one in the middle of a deployment, the database itself) devices are told what is stored."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from edgesplit.controller_client.client import ControllerClient
from edgesplit.mqtt import messages
from edgesplit.release.manifest import Signed, Statement
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.settings import find_free_port
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Desired
from edgesplit_controller.storage.tables.core import Device as Row
from edgesplit_controller.storage.tables.leases import LeaseRow
from support.controller_process import PATIENCE_S, Device, Up, enrolled, eventually, tiny_model
from support.mosquitto import ExternalMosquitto
from support.postgres import Postgres
from support.remote_inferences import answer, listen, received, reply

PROCESSES = 2
KILLS = int(os.environ.get("EDGESPLIT_PROCESS_KILLS", "1"))


class ControllerHarness:
    """A controller of several processes, and its database."""

    def __init__(self, folder: Path, postgres: Postgres) -> None:
        self.up = Up(folder / "data")
        self.postgres = postgres
        self.database = Database(postgres.database())
        url = self.database._engine.url.render_as_string(hide_password=False)
        self.settings = [f"database={url}", f"processes={PROCESSES}"]

    def start(self) -> None:
        assert self.up.start(*self.settings) == "ready"

    def further(self) -> dict[int, int]:
        """Numbers and process ids of the further processes that live."""
        files = (self.up.data / "processes").glob("*.pid")
        return {int(file.stem): int(file.read_text()) for file in files}

    def settled(self) -> None:
        """Wait until every process has its place again: as many leases as processes are held."""

        def whole() -> bool:
            with self.database.read() as session:
                held = session.scalars(select(LeaseRow.holder).where(LeaseRow.name.like("process %"))).all()
            pids = {int(one.split(":")[1]) for one in held if one}
            return set(self.further().values()) <= pids and len(self.further()) == PROCESSES - 1

        eventually("every process", whole)

    def stored(self, name: str) -> tuple[int, list[str], str]:
        """A device's counter, the releases that its stored statement names, and the release that it shall run."""
        with self.database.read() as session:
            row = session.get(Row, name)
            desired = session.scalars(select(Desired.release).where(Desired.device == name)).one()
        assert row is not None and row.statement is not None
        statement = messages.decode(messages.decode(row.statement, Signed).payload, Statement)
        return row.counter, [one.release for one in statement.releases], desired


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory, postgres: Postgres) -> Iterator[ControllerHarness]:
    made = ControllerHarness(tmp_path_factory.mktemp("several"), postgres)
    made.start()
    made.up.ok("POST", "/v1/models?name=tiny", tiny_model())
    yield made
    if made.up.process is not None and made.up.process.poll() is None:
        made.up.end()
    made.database.close()


def deploy(harness: ControllerHarness, name: str, partition: str) -> Any:
    return harness.up.ok("POST", "/v1/deployments", {"model": "tiny", "partition": partition, "to": [name]})


def telemetry(sequence: int) -> messages.Telemetry:
    return messages.Telemetry(
        session=1, sequence=sequence, emulated=False, up_bytes_per_s=1.0, rtt_s=0.1, remote_usable=True, models=()
    )


def until_told(device: Device, release: str) -> Statement:
    """The device's statements until one names that release; their counters only grow."""
    counter = 0
    while True:
        statement = device.statement()
        assert statement.counter >= counter
        counter = statement.counter
        if [one.release for one in statement.releases] == [release]:
            return statement


def test_each_telemetry_message_is_stored_by_exactly_one_process(harness: ControllerHarness, tmp_path: Path) -> None:
    """Telemetry is spread over the processes: each is kept by exactly one, none twice."""
    device = enrolled(harness.up, "counted", tmp_path)
    for number in range(60):
        device.say("telemetry", telemetry(number), qos=1)
    path = "/v1/telemetry/counted?newest=1000"
    eventually("all telemetry", lambda: len(harness.up.ok("GET", path)) >= 60)
    assert sorted(one["sequence"] for one in harness.up.ok("GET", path)) == list(range(60))
    assert harness.up.ok("GET", "/v1/devices/counted")["state"] in ("online", "stale")
    device.session.stop()


def test_each_inference_is_answered_to_the_process_that_asked(harness: ControllerHarness, tmp_path: Path) -> None:
    """Whichever process accepts the call: the device answers that one, and the caller gets its own answer."""
    device = enrolled(harness.up, "asked", tmp_path)
    eventually("it is online", lambda: harness.up.ok("GET", "/v1/devices/asked")["state"] == "online")
    listen(device)
    api, processes = ControllerClient.connect(harness.up.data), set[int]()

    def answer_one(value: float) -> None:
        job = received(device)
        processes.add(job.process)
        reply(device, job, *answer(job, value))

    def ask() -> bool:
        value = float(len(processes))
        answering = threading.Thread(target=answer_one, args=(value,))
        answering.start()
        response = api.infer("asked", "digits", {"x": b"question"}, deadline_s=20)
        answering.join(PATIENCE_S)
        assert response.outputs["y"].tolist() == [[value] * 4]
        return len(processes) == PROCESSES

    eventually("each process was asked", ask)
    device.session.stop()


def test_a_deployment_stored_by_a_killed_process_is_published_by_another(
    harness: ControllerHarness, tmp_path: Path
) -> None:
    """SIGKILL of further processes while a deployment goes through one: the address answers all the time, and what is
    stored is whole and reaches the device. What nobody published, whoever leads finds and confirms."""
    device = enrolled(harness.up, "survivor", tmp_path)
    for round_ in range(KILLS):
        harness.settled()
        partition = ["conv1", "device"][round_ % 2]
        began, done = threading.Event(), threading.Event()

        def work(partition: str = partition, began: threading.Event = began, done: threading.Event = done) -> None:
            began.set()
            try:
                deploy(harness, "survivor", partition)
            except (OSError, AssertionError):
                pass  # its process was killed: it may have been done or not
            finally:
                done.set()

        thread = threading.Thread(target=work)
        thread.start()
        began.wait(PATIENCE_S)
        for pid in harness.further().values():
            os.kill(pid, signal.SIGKILL)
        assert done.wait(PATIENCE_S)
        thread.join()
        assert harness.up.call("GET", "/v1/health", token=None)[0] == 200
    last = deploy(harness, "survivor", "cloud")["release"]
    until_told(device, last)
    counter, told, desired = harness.stored("survivor")
    assert told == [desired] == [last]
    with harness.database.write() as session:
        row = session.get(Row, "survivor")
        assert row is not None
        row.published = 0  # as its process leaves it that is killed between storing and publishing
    assert device.statement().counter == counter

    def confirmed() -> bool:
        with harness.database.read() as session:
            found = session.get(Row, "survivor")
            return found is not None and found.published == found.counter

    eventually("it is confirmed", confirmed)
    device.session.stop()


def test_a_database_that_restarts_under_load_loses_nothing_that_was_answered(
    harness: ControllerHarness, tmp_path: Path
) -> None:
    """PostgreSQL is killed while deployments are made: no half deployment, and all goes on by itself."""
    device = enrolled(harness.up, "patient", tmp_path)
    answered: list[str] = []
    ending = threading.Event()

    def work() -> None:
        partitions = ["conv1", "device", "cloud"]
        while not ending.is_set():
            partitions.append(partitions.pop(0))
            wish = {"model": "tiny", "partition": partitions[0], "to": ["patient"]}
            status, answer = harness.up.call("POST", "/v1/deployments", wish)
            assert status in (200, 429, 503), answer
            if status == 200:
                answered.append(answer["release"])

    thread = threading.Thread(target=work)
    thread.start()
    eventually("the first deployment", lambda: answered)
    harness.postgres.kill()
    before = len(answered)
    harness.postgres.start()
    eventually("deployments again", lambda: len(answered) > before + 1)
    ending.set()
    thread.join()
    device.say("telemetry", telemetry(7), qos=1)
    eventually("telemetry again", lambda: harness.up.ok("GET", "/v1/telemetry/patient?newest=10"))
    counter, told, desired = harness.stored("patient")
    assert told == [desired] == [answered[-1]]
    assert until_told(device, answered[-1]).counter <= counter
    device.session.stop()


def test_another_machine_takes_over_when_the_leading_one_is_killed(tmp_path: Path, postgres: Postgres) -> None:
    """Two controllers with database, folder and broker in common: the one that leads is killed, and the other hears a
    device that comes, and revokes it for good."""
    first = ControllerHarness(tmp_path, postgres)
    broker = ExternalMosquitto(Authority(first.up.data / "keys"))
    broker.start()
    assert broker.process is not None
    hup = f'cp "$EDGESPLIT_CRL" {broker.folder}/revoked.pem && kill -HUP {broker.process.pid}'
    elsewhere = [first.settings[0], f"broker=mqtts://127.0.0.1:{broker.port}", f"on_revocation={hup}"]
    second = Up(first.up.data)
    try:
        assert first.up.start(*elsewhere) == "ready"
        port = find_free_port("127.0.0.1")
        assert second.start(*elsewhere, "join=1", f"api_port={port}") == "ready"

        first.up.end(signal.SIGKILL)
        told = {**first.up.addresses, "api_url": f"https://127.0.0.1:{port}"}
        (first.up.data / "controller.json").write_text(json.dumps(told))  # where the load balancer sends us now

        late = enrolled(second, "late", tmp_path)
        eventually("the new one is heard", lambda: second.ok("GET", "/v1/devices/late")["state"] == "online")
        late.vanish_on_loss()
        assert second.call("DELETE", "/v1/devices/late")[0] == 200
        eventually("its session ends", lambda: not late.session.connected)
        late.session.stop()
    finally:
        for up in (first.up, second):
            if up.process is not None and up.process.poll() is None:
                up.end()
        broker.stop()
        first.database.close()
