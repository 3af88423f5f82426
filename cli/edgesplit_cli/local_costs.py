"""A model file's costs without a controller: measured here, which stands for the cloud; the rest is predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from edgesplit.profiles import load_profile
from edgesplit_cli.local_model import LocalModel, labels_of, read_samples
from edgesplit_cli.show import console

if TYPE_CHECKING:
    from edgesplit_partitioner import Costs


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
    from edgesplit_controller.planning import MeasureHere
    from edgesplit_partitioner import edgetpu
    from edgesplit_partitioner.build_costs import build_costs, with_tier
    from edgesplit_partitioner.measure_codecs import CodecMeasures, with_codecs

    profile, loaded = load_profile(device), model.loaded
    further = [(name, load_profile(given)) for name, given in tiers]
    given: list[Any] = list(read_samples(samples, loaded.spec))
    here = MeasureHere()
    with console(quiet=quiet).status(Text(f"measuring {model.name} on this machine")) as status:
        times = here.layers(loaded, [one for one in given if isinstance(one, bytes)])
        status.update(Text(f"measuring what {model.name} sends"))
        tensors = here.samples(loaded, given)
        codecs = CodecMeasures()
        if lossy and len(given) > 1:
            status.update(Text(f"measuring what lossy codecs do to {model.name}"))
            codecs = here.codecs(loaded, given, labels_of(samples, loaded.spec))
    costs = build_costs(
        model.name,
        loaded.graph,
        profile=profile,
        cloud_s={name: time.median_s for name, time in times.items()},
        tensors=with_codecs(tensors.tensors, codecs),
        frame_bytes=tensors.frame_bytes,
        basis=edgetpu.basis(profile, loaded.prepared.format),
    )
    for name, beyond in further:
        costs = with_tier(costs, loaded.graph, name, beyond)
    return costs
