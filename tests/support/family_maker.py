"""A family of two small models as a controller makes it, with invented measurements of time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgesplit.links import parse_link
from edgesplit_controller.model_registry.families import Families, Sample, VariantRequest, family_of
from edgesplit_controller.model_registry.golden import run_whole
from edgesplit_controller.planning.family_planning import FamilyPlanning
from edgesplit_controller.planning.planner_service import PlanOptions
from edgesplit_controller.releases.family_build import BuiltFamily, build_family
from edgesplit_controller.storage.tables.core import Model
from support.registry_harness import a_model
from support.release_maker import CLASS, ReleaseMaker

COUNT = 30


class FamilyMaker(ReleaseMaker):
    """Two models of five classes, `small` and `large`, and samples that `large` always gets right."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.large = self._push(a_model(seed=1, width=256), "large")
        self.families = Families(self.database, self.registry._blobs, self.registry, now=self.clock)
        rng = np.random.default_rng(3)
        images = [{"image": rng.standard_normal((1, 3, 16, 16)).astype(np.float32)} for _ in range(COUNT)]
        prepared = self.registry.load(self.large).prepared
        self.samples: Sequence[Sample] = [
            (image, int(run_whole(prepared, [image])[0]["scores"].argmax())) for image in images[:3]
        ] * (COUNT // 3)

    def _push(self, raw: bytes, name: str) -> Model:
        part = self.registry._blobs.incoming_file()
        part.write_bytes(raw)
        return self.registry.push(part, name)

    def create(self, *models: str, labels: Sequence[int] = ()) -> Model:
        variants = [VariantRequest(model=model) for model in models[:-1]]
        return self.families.create(
            "birds", [*variants, VariantRequest(model=models[-1], labels=tuple(labels))], self.samples
        )

    def build(self, family: Model, **options: object) -> BuiltFamily:
        """The family's release for one device class, unsigned."""
        document = family_of(family)
        assert document is not None
        planning = FamilyPlanning(self.planning, self.registry)
        planned = planning.plan(
            family.ref, document, CLASS, parse_link("wifi"), PlanOptions(**options),  # type: ignore[arg-type]
            answers=self.families.answers(family),
        )  # fmt: skip
        return build_family(family, document, self.registry, {CLASS: planned})
