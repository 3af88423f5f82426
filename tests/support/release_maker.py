"""Releases as a controller makes them, with invented measurements."""

from __future__ import annotations

from pathlib import Path

import msgspec

from edgesplit.links import parse_link
from edgesplit.release.manifest import Manifest
from edgesplit_controller.planning.planner_service import PlanningService, PlanOptions
from edgesplit_controller.releases.build import ReleaseBuilder
from edgesplit_controller.releases.content_keys import ContentKeys
from edgesplit_controller.storage.tables.core import Model
from edgesplit_controller.tuf.repository import Repository
from support.counting_measure import CountingMeasure
from support.registry_harness import RegistryHarness, a_model

CLASS = "raspberrypi4"


class ReleaseMaker:
    """A controller's part that makes releases, with invented measurements."""

    def __init__(self, folder: Path, raw: bytes | None = None, database_url: str = "") -> None:
        self.folder = folder
        bench = RegistryHarness(folder, database_url)
        self.model: Model = bench.push(raw or a_model())
        self.now = 1_750_000_000.0
        self.repository = Repository(folder / "tuf", now=self.clock)
        self.database, self.registry = bench.database, bench.registry
        self.planning = PlanningService(self.database, self.registry, now=self.clock, measure=CountingMeasure())
        self.releasing = ReleaseBuilder(
            self.database,
            bench.blobs,
            self.registry,
            self.planning,
            self.repository,
            offload_releases=folder / "offload",
            content_keys=ContentKeys(b"s" * 32),
            now=self.clock,
        )

    def clock(self) -> float:
        self.now += 1
        return self.now

    def release(self, partition: str, *, recut: bool = False, device: str = CLASS, **wish: object) -> Made:
        """As the controller deploys it."""
        asked = msgspec.convert({"partition": partition, **wish}, PlanOptions)
        by_planner = recut or not self.repository.signs_releases
        digest, manifest = self.releasing.prepare(self.model, {device: parse_link("wifi")}, asked, recut=by_planner)
        self.releasing.publish(self.model, digest, asked)
        return digest, manifest

    def lose_the_release_key(self) -> None:
        self.repository.keys.retire("targets", ())


Made = tuple[str, Manifest]
