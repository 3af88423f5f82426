"""How slices are run on this machine: what an operator chooses, and what is found out by measurement."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from edgesplit.msgspec_warmup import settle

Optimise = Literal["exact", "fast"]
"""`exact`: slice by slice as they were cut, the whole model's bits on one machine. `fast`: engines may fuse further,
across neighbouring slices too; outputs differ in their last digits
(`edgesplit_agent.releases.loaded_release.RELATIVE_TOLERANCE`)."""
MOST_THREADS = 256


class Setup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of every engine of one release."""

    threads: Annotated[int, msgspec.Meta(ge=1, le=MOST_THREADS)] = 1
    spinning: bool = False
    """Threads that wait for work keep their core: quicker alone, ruinous beside others."""
    optimise: Optimise = "exact"
    merge: bool = False
    """Neighbouring slices run as one session, where that can be made."""
    providers: tuple[str, ...] = ()
    """Accelerators of onnxruntime to try first, by their short names in order; the CPU follows always."""

    def __str__(self) -> str:
        """For people: `4 threads, spinning, fast, merged`."""
        said = [f"{self.threads} thread{'s' * (self.threads != 1)}", *["spinning"] * self.spinning, self.optimise]
        return ", ".join([*said, *["merged"] * self.merge, *self.providers])


settle(__name__)
