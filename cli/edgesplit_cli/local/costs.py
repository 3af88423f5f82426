"""The costs of a model file without a controller: this machine is measured as the cloud; other tiers are predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgesplit.device_profile import load_profile
from edgesplit.errors import UsageError
from edgesplit.links import parse_link
from edgesplit_cli.local.model import MOST_SAMPLES, LocalModel, read_samples, sample_labels
from edgesplit_cli.progress import progress_text

if TYPE_CHECKING:
    from edgesplit_partitioner import Costs
    from edgesplit_partitioner.planner.cascade_calibration import FamilyAnswers


ANY_DEVICE = "generic-x86"
"""Requested of the controller where the device's profile is a local file that it does not have."""


def predict_costs(model: LocalModel, costs: Costs, profiles: Sequence[str], tiers: Sequence[str]) -> Costs:
    """A registered model's costs with its devices predicted here: the first profile is the device's, the others those
    of `tiers`. Each is a name or a file."""
    from edgesplit_partitioner.costs.build import costs_for_device, with_tier

    graph, model_format = model.loaded.graph, model.loaded.prepared.format
    result = costs_for_device(costs, graph, load_profile(profiles[0]), model_format)
    for name, profile in zip(tiers, profiles[1:], strict=True):
        result = with_tier(result, graph, name, load_profile(profile), model_format)
    return result


def _check_samples(samples: Sequence[Any], model: LocalModel) -> None:
    """UsageError for tensors that do not fit the model, before the runtime reports a less clear error."""
    from edgesplit.oip.protocol import check_tensors

    for number, sample in enumerate(samples, 1):
        if isinstance(sample, bytes):
            continue
        try:
            check_tensors(sample, model.loaded.prepared.inputs)
        except UsageError as error:
            raise UsageError(f"sample {number} of {len(samples)} does not fit {model.name}: {error}") from error


def _choosing_and_confirming(count: int) -> tuple[list[int], list[int]]:
    """Positions of the samples that choose codecs, and of those that confirm that few answers change: a fixed shuffle,
    because a folder may be sorted by class."""
    from edgesplit_controller.planning.planner_service import CHOOSING_SAMPLES
    from edgesplit_partitioner.profiling.codec_loss import SPLIT_SEED

    shuffled = np.random.default_rng(SPLIT_SEED).permutation(count)
    return sorted(map(int, shuffled[:CHOOSING_SAMPLES])), sorted(map(int, shuffled[CHOOSING_SAMPLES:]))


def count_changed_answers(
    model: LocalModel, costs: Costs, tensors: Sequence[str], samples: Path, answer: str, *, quiet: bool = False
) -> Costs:
    """The costs with the answers that lossy codecs change on these tensors, on the samples that `measure_costs` left.
    UsageError where `answer` does not say what an answer of this model is, and its outputs leave it open."""
    from edgesplit_controller.planning.planner_service import LocalMeasurer, answer_rule_of
    from edgesplit_partitioner.profiling.codecs import with_changes

    loaded = model.loaded
    rule = answer_rule_of(answer, loaded.prepared.outputs)
    every = read_samples(samples, loaded.spec, MOST_SAMPLES, inputs=[spec.name for spec in loaded.prepared.inputs])
    _, confirming = _choosing_and_confirming(len(every))
    chosen = {name: cost for name, cost in costs.tensors.items() if name in set(tensors)}
    with progress_text(f"comparing answers of {model.name}", quiet=quiet) as report:
        report(f"{len(chosen)} tensors, {len(confirming)} samples")
        measured = LocalMeasurer().changes(loaded, [every[position] for position in confirming], chosen, rule)
    changed = with_changes(chosen, measured)
    return costs.with_tensors(lambda name, cost: changed.get(name, cost))


def compare_at_exit(model: LocalModel, exit_output: str, samples: Path, *, quiet: bool = False) -> FamilyAnswers:
    """What the model answers to the samples by an early exit and by its final output."""
    from edgesplit_controller.model_registry.early_exits import answers_at_exit

    loaded = model.loaded
    every = read_samples(samples, loaded.spec, MOST_SAMPLES, inputs=[spec.name for spec in loaded.prepared.inputs])
    _check_samples(every, model)
    with progress_text(f"comparing answers of {model.name}", quiet=quiet) as report:
        report(f"{exit_output}, {len(every)} samples")
        return answers_at_exit(loaded, exit_output, every)


def measure_costs(
    model: LocalModel, device: str, tiers: Sequence[tuple[str, str]] = (), *, samples: Path | None = None,
    lossy: bool = False, max_changed: float | None = None, quiet: bool = False,
) -> Costs:  # fmt: skip
    """Costs for the device profile `device` (a name or a file) and for `tiers`, each a name and a device profile.

    `samples` determine the size of what is sent; with `lossy` the lossy codecs are measured on them too. With
    `max_changed`, the share of answers that may change, on some of them: the others are kept to confirm it.
    """
    from edgesplit_controller.planning.planner_service import (
        ASSUMED_LINK,
        CHOOSING_SAMPLES,
        FEW_SAMPLES,
        HERE,
        TIERS,
        LocalMeasurer,
        measured_basis,
    )
    from edgesplit_partitioner import plan
    from edgesplit_partitioner.costs.build import build_costs, with_tier
    from edgesplit_partitioner.planner.changed_answers import check_samples
    from edgesplit_partitioner.profiling.codecs import CodecMeasurements, with_codecs
    from edgesplit_partitioner.profiling.slices import Cuts, corrected_by_slices
    from edgesplit_partitioner.slicing import atoms

    profile, loaded = load_profile(device), model.loaded
    extra_tiers = [(name, load_profile(tier_device)) for name, tier_device in tiers]
    names = [spec.name for spec in loaded.prepared.inputs]
    sample_inputs: list[Any]
    if max_changed is None:
        sample_inputs, labels = (
            list(read_samples(samples, loaded.spec, inputs=names)),
            sample_labels(samples, loaded.spec),
        )
    else:
        every = read_samples(samples, loaded.spec, MOST_SAMPLES, inputs=names)
        every_label = sample_labels(samples, loaded.spec, MOST_SAMPLES)
        choosing, confirming = _choosing_and_confirming(len(every))
        check_samples(len(confirming), CHOOSING_SAMPLES, max_changed)
        sample_inputs = [every[position] for position in choosing]
        labels = [every_label[position] for position in choosing] if every_label else []
    _check_samples(sample_inputs, model)
    if lossy and len(sample_inputs) < 2:
        raise UsageError(f"--allow-loss: {FEW_SAMPLES.format(len(sample_inputs))}; give them by --samples")
    here = LocalMeasurer()
    with progress_text(f"measuring {model.name} on this machine", quiet=quiet) as report:
        report("each layer")
        measured = here.layers(loaded, [sample for sample in sample_inputs if isinstance(sample, bytes)])
        times = measured.times
        report("what it sends")
        tensors = here.samples(loaded, sample_inputs)
        codecs = CodecMeasurements()
        if lossy:
            report("what lossy codecs do to its answers")
            codecs = here.codecs(loaded, sample_inputs, labels)
    costs = build_costs(
        model.name, loaded.graph, profile=profile, cloud_s={name: time.median_s for name, time in times.items()},
        tensors=with_codecs(tensors.tensors, codecs), frame_bytes=tensors.frame_bytes,
        model_format=loaded.prepared.format,
        basis={HERE: measured_basis(measured.load, "run this again when it is quiet")},
    )  # fmt: skip

    def cuts_of(estimate: Costs) -> Cuts:
        planned = plan(estimate, {TIERS: parse_link(ASSUMED_LINK)})
        return tuple(frozenset(row.layers) for row in planned.table.rows)

    medians = {name: time.median_s for name, time in times.items()}
    with progress_text(f"measuring slices of {model.name} whole", quiet=quiet):
        costs = corrected_by_slices(
            costs, HERE, cuts_of, lambda cuts: here.slices(loaded, atoms(loaded.graph, cuts), medians).factor
        )
    for name, tier_profile in extra_tiers:
        costs = with_tier(costs, loaded.graph, name, tier_profile, loaded.prepared.format)
    return costs
