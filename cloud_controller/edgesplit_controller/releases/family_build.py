"""Release of a family: every variant cut by itself, one plan per device class over all of them, weights stored once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from edgesplit.plan import Plan
from edgesplit.release.manifest import (
    GoldenExample,
    Manifest,
    ReleaseVariant,
    chunk_of,
)
from edgesplit_controller.job_progress import report_step
from edgesplit_controller.model_registry.families import FamilyDocument, ruled_variant
from edgesplit_controller.model_registry.family_answers import RuledVariant, output_spec
from edgesplit_controller.model_registry.golden import GoldenPair, golden_pairs
from edgesplit_controller.model_registry.registry import Registry
from edgesplit_controller.storage.tables.core import Model
from edgesplit_partitioner.family_slicing import own_table, to_family_plan, variant_slices
from edgesplit_partitioner.planner.family import FamilyResult
from edgesplit_partitioner.slicing import CutSlice, atoms, cut_sets, cut_slices


@dataclass(frozen=True)
class BuiltFamily:
    """An undated manifest with what it names."""

    manifest: Manifest
    contents: list[CutSlice]
    pairs: list[GoldenPair]


def build_family(
    model: Model, family: FamilyDocument, registry: Registry, planned: Mapping[str, FamilyResult]
) -> BuiltFamily:
    """The release of a family from its plans by device class. Variants that are in no plan's table are left out."""
    tables = {device_class: result.table for device_class, result in planned.items()}
    used = {row.variant for table in tables.values() for row in table.rows}
    cuts: dict[str, list[CutSlice]] = {}
    entries: list[ReleaseVariant] = []
    pairs: list[GoldenPair] = []
    first: RuledVariant | None = None
    for variant in family.variants:
        stored, ruled = registry.get(variant.model), ruled_variant(variant, registry)
        first, loaded = first or ruled, ruled.loaded
        if variant.name not in used:
            continue
        report_step(f"cutting {stored.ref} into slices")
        own = [own_table(table, variant.name) for table in tables.values()]
        sets = {layers for table in own for layers in cut_sets(table)}
        pieces = atoms(loaded.graph, sorted(sets, key=lambda layers: (len(layers), sorted(layers))))
        cuts[variant.name] = cut_slices(loaded.prepared, loaded.graph, pieces, loaded.spec)
        report_step(f"running {stored.ref} on golden inputs")
        golden = golden_pairs(
            loaded, registry.samples(stored, 2), model.name, {*ruled.rule.outputs, *_score_outputs(tables)}
        )  # fmt: skip
        pairs += golden
        entries.append(ReleaseVariant(
            name=variant.name, model=stored.ref, model_sha256=stored.sha256, accuracy=family.accuracy(variant),
            least_accuracy=variant.least_accuracy, samples=family.samples, outputs=ruled.rule.outputs,
            answer=ruled.rule.to_text() if ruled.rule.kind == "boxes" else "",
            input_spec=loaded.spec, labels=variant.labels, golden=len(golden),
        ))  # fmt: skip
    assert first is not None
    plans = {}
    for device_class, result in planned.items():
        layer_s = {
            name: {layer.name: layer.seconds.get("device", 0.0) for layer in result.variants[name].costs.layers}
            for name in cuts
        }  # fmt: skip
        plans[device_class] = to_family_plan(tables[device_class], cuts, layer_s)
    contents = [one for name, cut in cuts.items() for one in variant_slices(name, cut)]
    manifest = Manifest(
        model=model.ref, model_sha256=model.sha256, created="", input_spec=first.loaded.spec,
        inputs=tuple(output_spec(first.loaded, name) for name in first.loaded.graph.inputs),
        outputs=first.family_outputs,
        slices=tuple(one.slice for one in contents), plans=plans, golden=tuple(_golden(pair) for pair in pairs),
        variants=tuple(entries),
    )  # fmt: skip
    return BuiltFamily(manifest, contents, pairs)


def _score_outputs(tables: Mapping[str, Plan]) -> Iterator[str]:
    """Outputs by which cascades tell how sure an answer is: a device checks them like the others."""
    cascades = (table.cascade for table in tables.values())
    return (cascade.score_output for cascade in cascades if cascade is not None and cascade.score_output)


def _golden(pair: GoldenPair) -> GoldenExample:
    return GoldenExample(request=chunk_of(pair.request), response=chunk_of(pair.response))
