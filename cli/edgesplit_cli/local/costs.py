"""A model file's costs without a controller: measured here, which stands for the cloud; the rest is predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from edgesplit.device_profile import load_profile
from edgesplit.errors import UsageError
from edgesplit.links import parse_link
from edgesplit_cli.local.model import LocalModel, labels_of, read_samples
from edgesplit_cli.output import console

if TYPE_CHECKING:
    from edgesplit_partitioner import Costs


ANY_DEVICE = "generic-x86"
"""Asked of the controller where the device's profile is a file that it does not have."""


def costs_by(model: LocalModel, costs: Costs, profiles: Sequence[str], tiers: Sequence[str]) -> Costs:
    """A registered model's costs with its devices predicted here: the first profile is the device's, the others those
    of `tiers`. Each is a name or a file."""
    from edgesplit_partitioner.costs.build import for_device, with_tier

    graph, model_format = model.loaded.graph, model.loaded.prepared.format
    made = for_device(costs, graph, load_profile(profiles[0]), model_format)
    for name, profile in zip(tiers, profiles[1:], strict=True):
        made = with_tier(made, graph, name, load_profile(profile), model_format)
    return made


def _check(samples: Sequence[Any], model: LocalModel) -> None:
    """Tensors fit the model, before the runtime blames the model for them."""
    from edgesplit.oip.protocol import check_tensors

    for number, sample in enumerate(samples, 1):
        if isinstance(sample, bytes):
            continue
        try:
            check_tensors(sample, model.loaded.prepared.inputs)
        except UsageError as error:
            raise UsageError(f"sample {number} of {len(samples)} does not fit {model.name}: {error}") from error


def measured_costs(
    model: LocalModel,
    device: str,
    tiers: Sequence[tuple[str, str]] = (),
    *,
    samples: Path | None = None,
    lossy: bool = False,
    quiet: bool = False,
) -> Costs:
    """Costs for the device profile `device` (a name or a file) and for `tiers`, each a name and a device profile.

    `samples` price what travels; with `lossy` the lossy codecs are measured on them too.
    """
    from edgesplit_controller.planning.planner_service import ASSUMED_LINK, FEW_SAMPLES, HERE, TIERS, MeasureHere
    from edgesplit_partitioner import plan
    from edgesplit_partitioner.costs.build import build_costs, with_tier
    from edgesplit_partitioner.profiling.codecs import CodecMeasures, with_codecs
    from edgesplit_partitioner.profiling.slices import Cuts, believed
    from edgesplit_partitioner.slicing import atoms

    profile, loaded = load_profile(device), model.loaded
    further = [(name, load_profile(given)) for name, given in tiers]
    given: list[Any] = list(read_samples(samples, loaded.spec))
    _check(given, model)
    if lossy and len(given) < 2:
        raise UsageError(f"--allow-loss: {FEW_SAMPLES.format(len(given))}; give them by --samples")
    here = MeasureHere()
    with console(quiet=quiet).status(Text(f"measuring {model.name} on this machine")) as status:
        times = here.layers(loaded, [one for one in given if isinstance(one, bytes)])
        status.update(Text(f"measuring what {model.name} sends"))
        tensors = here.samples(loaded, given)
        codecs = CodecMeasures()
        if lossy:
            status.update(Text(f"measuring what lossy codecs do to {model.name}"))
            codecs = here.codecs(loaded, given, labels_of(samples, loaded.spec))
    costs = build_costs(
        model.name,
        loaded.graph,
        profile=profile,
        cloud_s={name: time.median_s for name, time in times.items()},
        tensors=with_codecs(tensors.tensors, codecs),
        frame_bytes=tensors.frame_bytes,
        model_format=loaded.prepared.format,
    )

    def cuts_of(one: Costs) -> Cuts:
        made = plan(one, {TIERS: parse_link(ASSUMED_LINK)})
        return tuple(frozenset(row.layers) for row in made.table.rows)

    medians = {name: time.median_s for name, time in times.items()}
    with console(quiet=quiet).status(f"measuring slices of {model.name} whole"):
        costs = believed(
            costs, HERE, cuts_of, lambda cuts: here.slices(loaded, atoms(loaded.graph, cuts), medians).factor
        )
    for name, beyond in further:
        costs = with_tier(costs, loaded.graph, name, beyond, loaded.prepared.format)
    return costs
