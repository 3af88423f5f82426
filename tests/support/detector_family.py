"""A family of two small detectors as a controller makes it, with invented measurements of time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgesplit.links import parse_link
from edgesplit_controller.model_registry.families import Families, VariantRequest, family_of
from edgesplit_controller.model_registry.family_answers import Sample, TrueBox, Truth
from edgesplit_controller.planning.family_planning import FamilyPlanning
from edgesplit_controller.planning.planner_service import PlanOptions
from edgesplit_controller.releases.family_build import BuiltFamily, build_family
from edgesplit_controller.storage.tables.core import Model
from edgesplit_partitioner.planner.family import FamilyResult
from support.detectors import INPUT, LARGE, SMALL, Picture, draw_pictures, large_detector, small_detector
from support.registry_harness import a_model
from support.release_maker import CLASS, ReleaseMaker

COUNT = 60


class DetectorFamily(ReleaseMaker):
    """Models `near` and `far`, and pictures whose boxes `far` always finds."""

    def __init__(self, folder: Path, *, with_score: bool = False) -> None:
        super().__init__(folder)
        self.push(small_detector(with_score=with_score), "near")
        self.push(large_detector(), "far")
        self.families = Families(self.database, self.registry._blobs, self.registry, now=self.clock)
        self.pictures: Sequence[Picture] = draw_pictures(COUNT, seed=11)

    def push(self, raw: bytes, name: str, input_text: str = INPUT) -> Model:
        part = self.registry._blobs.incoming_file()
        part.write_bytes(raw)
        return self.registry.push(part, name, input_text)

    def samples(self, *, labelled: bool) -> list[Sample]:
        """The pictures, with what they show or without."""

        def truth(picture: Picture) -> Truth:
            return tuple(TrueBox(box, label) for box, label in picture.boxes) if labelled else None

        return [(picture.jpeg, truth(picture)) for picture in self.pictures]

    def create(self, *, labelled: bool = True, near: str = SMALL, far: str = LARGE, **options: str) -> Model:
        variants = [VariantRequest(model="near", answer=near), VariantRequest(model="far", answer=far)]
        return self.families.create("dets", variants, self.samples(labelled=labelled), **options)

    def plan(self, family: Model, **options: object) -> FamilyResult:
        """Its plan for one device class."""
        document = family_of(family)
        assert document is not None
        return FamilyPlanning(self.planning, self.registry).plan(
            family.ref, document, CLASS, parse_link("wifi"), PlanOptions(**options),  # type: ignore[arg-type]
            answers=self.families.answers(family),
        )  # fmt: skip

    def build(self, family: Model, **options: object) -> BuiltFamily:
        """Its release for one device class, unsigned."""
        document = family_of(family)
        assert document is not None
        return build_family(family, document, self.registry, {CLASS: self.plan(family, **options)})

    def push_twin(self) -> Model:
        """Another classifier with the inputs and classes of `self.model`."""
        return self.push(a_model(seed=5), "twin", "")

    def softer_detector(self) -> bytes:
        """A detector of the shape of `near`, which confuses other colours."""
        return small_detector(seed=9)
