"""Engine options of one machine: chosen by an operator, or found by the tuner's measurements."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from edgesplit.msgspec_warmup import warm_up_structs

Optimise = Literal["exact", "fast"]
"""`exact`: slice by slice as they were cut; gives the whole model's bits on one machine. `fast`: engines may fuse
further, also across neighbouring slices; outputs differ in their last digits
(`edgesplit_agent.releases.loaded_release.RELATIVE_TOLERANCE`)."""
MAX_THREADS = 256


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of every engine of one release."""

    threads: Annotated[int, msgspec.Meta(ge=1, le=MAX_THREADS)] = 1
    spinning: bool = False
    """Idle threads spin on their core: faster alone, very slow beside other load."""
    optimise: Optimise = "exact"
    merge: bool = False
    """Run neighbouring slices as one session, where possible."""
    providers: tuple[str, ...] = ()
    """Short names of onnxruntime's accelerators to try first, in order; the CPU is always the last."""

    def __str__(self) -> str:
        """For display: `4 threads, spinning, fast, merged`."""
        words = [f"{self.threads} thread{'s' * (self.threads != 1)}", *["spinning"] * self.spinning, self.optimise]
        return ", ".join([*words, *["merged"] * self.merge, *self.providers])


warm_up_structs(__name__)
