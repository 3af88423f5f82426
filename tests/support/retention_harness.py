"""What ends: real releases with invented measurements, devices at the level of messages, and a collector whose clock is
two days ahead, so that every file is old."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from sqlalchemy import select

from edgesplit.mqtt.messages import ModelState, Reported
from edgesplit.release.manifest import decode_manifest
from edgesplit.release_store import stored_releases
from edgesplit_controller.fleet.devices import Devices
from edgesplit_controller.releases.director import Director
from edgesplit_controller.retention.collector import Collector
from edgesplit_controller.retention.references import referenced_blobs
from edgesplit_controller.retention.removal import Removal
from edgesplit_controller.retention.rules import DAY_S, RetentionRules
from edgesplit_controller.rollout.engine import Rollouts, RolloutSpec
from edgesplit_controller.rollout.request import RolloutRequest
from edgesplit_controller.rollout.states import NOTHING
from edgesplit_controller.storage.blobs import BlobStore
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Device, ReleaseRow
from edgesplit_controller.tuf.repository import Repository
from support.registry_harness import a_model
from support.release_maker import ReleaseMaker

AHEAD_S = 2 * DAY_S


class RetentionHarness(ReleaseMaker):
    """A model, releases of it, devices, removal and garbage collection on one folder."""

    ticks = 0

    def __init__(self, folder: Path, database_url: str = "") -> None:
        super().__init__(folder, database_url=database_url)
        self.blobs = BlobStore(folder / "blobs")
        self.devices = Devices(self.database, stale_after_s=1e9, now=self.clock)
        director = Director(self.database, self.repository.sign_statement, statement_s=86_400, now=self.clock)
        self.rollouts = Rollouts(self.database, director, now=self.clock, announce=lambda names: None)
        self.removal = Removal(self.database, self.releasing, now=self.clock)

    def clock(self) -> float:
        self.ticks += 1
        return time.time() + AHEAD_S + self.ticks

    def collector(self, **rules: Any) -> Collector:
        """A collector under these rules; without any it keeps nothing that is unused."""
        keep = RetentionRules(**{"releases": 0, "versions": 0, "history_s": 0.0, "unused_s": 0.0, **rules})
        return Collector(
            self.database, self.blobs, self.releasing, Repository(self.folder / "tuf", now=self.clock),
            offload_releases=self.folder / "offload", rules=keep, now=self.clock,
        )  # fmt: skip

    def push(self, seed: int, name: str = "small") -> str:
        """Another version, or another model; its reference."""
        part = self.blobs.incoming_file()
        part.write_bytes(a_model(seed))
        return self.registry.push(part, name).ref

    def device(self, name: str) -> None:
        """An enrolled device that is online."""
        with self.database.write() as session:
            session.add(Device(
                name=name, device_class="raspberrypi4", group="", labels={}, link="", enrolled=1.0, session=1,
                certificate_serial="", public_key_sha256="", alive=True, last_seen=self.clock(),
            ))  # fmt: skip

    def roll_out(self, release: str, *names: str, **asked: Any) -> int:
        """Begin a rollout of a release, or of `NOTHING`."""
        model = self.model.name if release == NOTHING else self.model.ref
        spec = RolloutSpec(release, model, self.devices.select(names), names, request=RolloutRequest(**asked))
        return self.rollouts.create(spec).number

    def report(self, name: str, running: str = "", desired: str = "") -> None:
        """The device reports on its newest statement, and the rollouts take their next step."""
        counter = self.devices.get(name).counter
        states = (ModelState(self.model.name, running, desired, "running"),) if running or desired else ()
        self.devices.ingest([(name, Reported(1, counter, states))])
        while self.rollouts.step_all():
            pass

    def runs(self, release: str, *names: str) -> int:
        """Devices that got a release and run it; the rollout's number."""
        number = self.roll_out(release, *names)
        for name in names:
            self.report(name, release, release)
        return number

    def undeploy(self, *names: str) -> int:
        """Devices lose the model and say so; the rollout's number."""
        number = self.roll_out(NOTHING, *names)
        for name in names:
            self.report(name)
        return number

    def stored(self) -> set[str]:
        """Digests of all blobs."""
        return {blob.sha256 for blob in self.blobs.list_blobs()}

    def releases(self) -> list[str]:
        """Digests of all releases, oldest first."""
        return [row.digest for row in self.releasing.all()]

    def check_whole(self) -> None:
        """Everything that a row refers to is there."""
        check_whole(self.folder)


def check_whole(folder: Path) -> None:
    """Everything that a row refers to is there, byte for byte: blobs, the signed lists, the offload server's copies."""
    database, blobs, repository = database_in(folder), BlobStore(folder / "blobs"), Repository(folder / "tuf")
    with database.read() as session:
        for sha256 in referenced_blobs(session, lambda digest: decode_manifest(blobs.get(digest)), blobs.get):
            blobs.get(sha256)
        digests = set(session.scalars(select(ReleaseRow.digest)))
    database.close()
    assert digests <= {*repository.releases(), *repository.recuts()}
    assert digests <= set(stored_releases(folder / "offload"))
    for digest in digests:
        assert repository.manifest(digest) == (folder / "offload" / digest / "manifest.json").read_bytes()


def database_in(folder: Path) -> Database:
    """The database of a harness."""
    return Database(f"sqlite:///{folder / 'controller.db'}")
