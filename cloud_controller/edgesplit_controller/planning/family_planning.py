"""Plans of families: the costs of every variant on a device class, and one table of them."""

from __future__ import annotations

from dataclasses import dataclass

from edgesplit.errors import UsageError
from edgesplit.plan import Link
from edgesplit_controller.model_registry.families import FamilyDocument
from edgesplit_controller.model_registry.registry import Registry
from edgesplit_controller.planning.planner_service import (
    EDGE,
    GatewayHop,
    PlanningService,
    PlanOptions,
    links_through,
)
from edgesplit_partitioner.planner.cascade_calibration import FamilyAnswers
from edgesplit_partitioner.planner.family import FamilyResult, Variant, plan_family


@dataclass(frozen=True)
class FamilyPlanning:
    """Plans the families of one registry."""

    planning: PlanningService
    registry: Registry

    def plan(
        self, ref: str, family: FamilyDocument, device_class: str, link: Link, options: PlanOptions,
        gateway: GatewayHop | None = None, answers: FamilyAnswers | None = None,
    ) -> FamilyResult:  # fmt: skip
        """The joint plan for one device class and its first link. `answers` are needed where the options ask for a
        cascade. UsageError for what a family cannot be asked for."""
        if options.partition != "auto" or options.offload:
            raise UsageError(
                f"{ref} is a family: its cut is not forced, and no third-party server runs its remote halves"
            )
        tiers = {EDGE: gateway.device_class} if gateway else {}
        variants = [
            Variant(
                variant.name,
                self.planning.costs(self.registry.get(variant.model), device_class, tiers=tiers),
                family.accuracy(variant),
            )
            for variant in family.variants
        ]  # fmt: skip
        return plan_family(
            ref, variants, links_through(link, gateway), objective=options.family_objective, limits=options.limits,
            codecs=options.codecs, least_accuracy=options.least_accuracy, cascade=options.cascade, answers=answers,
            reference=family.reference,
        )  # fmt: skip
