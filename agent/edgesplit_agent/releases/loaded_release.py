"""A release that can answer on this device: its plan's usable rows, and the slices they run here, loaded once.

The agent keeps its own floor: a row that would send what may never leave is not a row here, whatever the plan says.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from edgesplit.errors import InferenceFailed, MalformedMessage, TrustError, UsageError
from edgesplit.foreign_server import ForeignServer
from edgesplit.identifiers import ModelRef
from edgesplit.lazy_import import later
from edgesplit.oip import protocol as oip
from edgesplit.plan import Plan, Row
from edgesplit.release import boundary_codecs
from edgesplit.release.manifest import Compiled, Golden, Manifest, TensorSpec
from edgesplit.release.privacy_floor import Floor, breach
from edgesplit.release_store import Release
from edgesplit.runtime import Tensor, Tensors, Timing
from edgesplit.runtime.providers import GONE
from edgesplit_agent.worker.host import Host, Job, StartHost

if TYPE_CHECKING:
    import numpy as np
else:
    np = later("numpy")

log = logging.getLogger(__name__)

RELATIVE_TOLERANCE = 1e-3
"""Golden answers were made on another processor: bits differ there, by far less than this."""
SMOOTHING = 0.3


class Leases:
    """How many hold on to something, and whether it shall go once nobody does. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = 0
        self._ending = False

    def take(self) -> None:
        """One more holds on to it."""
        with self._lock:
            self._held += 1

    def give_back(self) -> bool:
        """One fewer. True where it shall go now."""
        with self._lock:
            self._held -= 1
            return self._ending and not self._held

    def end(self) -> bool:
        """It shall go. True where it can at once."""
        with self._lock:
            self._ending = True
            return not self._held


@dataclass(frozen=True, eq=False)
class ActiveRelease:
    """One release, ready to answer. Requests hold on to theirs, so a new release never changes one that runs."""

    digest: str
    manifest: Manifest
    plan: Plan
    host: Host
    emulated: bool = False
    measured_s: dict[str, float] = field(default_factory=dict)
    """Seconds by slice as they were here, smoothed."""
    runs: dict[str, int] = field(default_factory=dict)
    """By slice, how many runs `measured_s` was learnt from."""
    gone: dict[str, str] = field(default_factory=dict)
    """Compiled slices that failed in a run, and how: until the release is loaded again their twins run."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    _leases: Leases = field(default_factory=Leases)

    def lease(self) -> None:
        """A request may run slices of it, until it gives this back."""
        self._leases.take()

    def give_back(self) -> None:
        """That request is done."""
        if self._leases.give_back():
            self.host.close()

    def retire(self) -> None:
        """It serves no more: what runs for it ends with the last request that began with it."""
        if self._leases.end():
            self.host.close()

    @cached_property
    def model(self) -> str:
        """The model's name, without its version."""
        return ModelRef.parse(self.manifest.model).name

    @cached_property
    def version(self) -> str:
        """The version of the model."""
        return self.manifest.model.partition("@")[2] or "1"

    @cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What an application gives."""
        return self.manifest.inputs

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What it gets."""
        return self.manifest.outputs

    @cached_property
    def passed(self) -> frozenset[str]:
        """Inputs that are outputs too."""
        return frozenset({spec.name for spec in self.inputs} & {spec.name for spec in self.outputs})

    @cached_property
    def decoding(self) -> frozenset[str]:
        """The slices that decode what an application gives."""
        return frozenset(one.name for one in self.manifest.slices if one.format == "input")

    @cached_property
    def only_row(self) -> Row | None:
        """The row that answers every request, where the plan has but one, and it is the device's alone."""
        rows = self.plan.rows
        return rows[0] if len(rows) == 1 and rows[0].is_local else None

    def order(self, names: Collection[str]) -> list[str]:
        """These slices, in an order in which they can run."""
        wanted = set(names)
        order = [one.name for one in self.manifest.slices if one.name in wanted]
        compiled = next((one for one in self.manifest.compiled if self._stands_for(one, wanted)), None)
        if compiled is None:
            return order
        first = min(order.index(name) for name in compiled.covers)
        order.insert(first, compiled.slice.name)
        return [name for name in order if name not in compiled.covers]

    def _stands_for(self, compiled: Compiled, wanted: set[str]) -> bool:
        """Whether that slice runs here, and does all of these but what decodes the input."""
        work = {one.name for one in self.manifest.slices if one.name in wanted and one.format != "input"}
        here = compiled.slice.name in self.host.slices and compiled.slice.name not in self.gone
        return here and set(compiled.covers) == work

    def run(
        self, order: Sequence[str], tensors: Tensors, timing: Timing | None = None, until: float = math.inf
    ) -> dict[str, Tensor]:
        """Run these slices in order; the tensors with all that anybody may need of what they gave.

        Nobody waits longer than `until` (of perf_counter): DeadlineExceeded. WorkerLost where the process that ran them
        has ended; InferenceFailed where they cannot run; UsageError where the application's input is at fault.
        """
        with self._lock:
            known = [self.measured_s.get(name) for name in order]
        expected_s = None if None in known else sum(one or 0.0 for one in known)
        timing = timing if timing is not None else Timing()
        try:
            return self.host.run(Job(order, tensors, until, expected_s, self.predicted_s(order)), timing)
        except InferenceFailed as failure:
            twins = self._without_the_accelerator(order, failure)
            if twins is None:
                raise
            return self.host.run(Job(twins, tensors, until), timing)

    def _without_the_accelerator(self, order: Sequence[str], failure: InferenceFailed) -> list[str] | None:
        """The same by the compiled slice's twins on the CPU, which run from now on; None where none was among them."""
        compiled = next((one for one in self.manifest.compiled if one.slice.name in order), None)
        if compiled is None:
            return None
        log.error("%s: %s, the CPU runs instead: %s", self.manifest.model, GONE, failure)
        self.gone[compiled.slice.name] = f"{compiled.slice.name}: {GONE}, the CPU runs instead: {failure}"
        here = (*(name for name in order if name != compiled.slice.name), *compiled.covers)
        return self.order(here)

    @property
    def trouble(self) -> str:
        """Why it runs otherwise than it should: workers that are lost, an accelerator that is gone. Empty where it
        does not."""
        status = self.host.status()
        said = [*self.gone.values(), *status.get("notes", ())]
        if status.get("lost_in_a_row"):
            said.append(f"{status['lost_in_a_row']} workers lost in a row, the last {status['last_lost']}")
        return "; ".join(said)

    def tail(self, row: Row) -> list[str] | None:
        """What is left to run here after `row`'s own slices, if the device finishes alone; None where it cannot."""
        local = self.plan.local
        return None if local is None else self.order(set(local.device) - set(row.device))

    def receives(self, row: Row) -> tuple[TensorSpec, ...]:
        """What the cloud must send back for this row."""
        by_name = {spec.name: spec for one in self.manifest.slices for spec in one.outputs}
        by_name.update({spec.name: spec for spec in self.manifest.outputs})
        return tuple(by_name[name] for name in row.receives)

    def predicted_s(self, names: Collection[str]) -> float:
        """What the plan says these slices take on this class of device."""
        return sum(self.plan.slice_s.get(name, 0.0) for name in names)

    def learn(self, timing: Timing) -> None:
        """Take in what slices took."""
        with self._lock:
            for name, seconds in timing.seconds.items():
                old = self.measured_s.get(name, seconds)
                self.measured_s[name] = old + SMOOTHING * (seconds - old)
                self.runs[name] = self.runs.get(name, 0) + 1

    def learnt(self) -> list[tuple[str, float, int]]:
        """By slice, its smoothed seconds and the runs that these were learnt from."""
        with self._lock:
            return [(name, seconds, self.runs.get(name, 0)) for name, seconds in self.measured_s.items()]


def plan_for(manifest: Manifest, device_class: str, floor: Floor | None = None) -> Plan:
    """This class's plan, without the rows that this device must not or cannot run; TrustError where none is left."""
    plan = manifest.plans.get(device_class)
    if plan is None:
        raise UsageError(f"the release has no plan for {device_class!r}, only for {sorted(manifest.plans)}")
    outputs = {spec.name for one in manifest.slices for spec in one.outputs} | {spec.name for spec in manifest.outputs}
    barred = {row.name: _barred(row, plan, manifest, floor or Floor(), outputs) for row in plan.rows}
    rows = tuple(row for row in plan.rows if not barred[row.name])
    for name, why in barred.items():
        if why:
            log.warning("row %s of %s is not used here: %s", name, manifest.model, why)
    if not rows:
        name, why = next(iter(barred.items()))
        raise TrustError(f"no row of the plan can run here; {name}: {why}")
    return msgspec.structs.replace(plan, rows=rows)


def _barred(row: Row, plan: Plan, manifest: Manifest, floor: Floor, known: Collection[str]) -> str:
    """Why this device does not run the row; empty where it does."""
    strange = sorted(set(row.codecs.values()) - set(boundary_codecs.CODECS)) or sorted(set(row.receives) - set(known))
    if row.compress and plan.offload and not ForeignServer.parse(plan.offload).unpacks_gzip:
        return f"it is sent compressed, which {plan.offload} is not known to undo"
    return breach(row, plan, manifest, floor) or (f"it needs {strange[0]!r}, unknown here" if strange else "")


def load(release: Release, device_class: str, start: StartHost, floor: Floor | None = None) -> ActiveRelease:
    """The release, loaded for this class of device. Each file's digest is checked now. TrustError, ModelRefused."""
    plan = plan_for(release.manifest, device_class, floor)
    host = start(release, plan)
    return ActiveRelease(release.digest, release.manifest, plan, host, host.emulated)


def check_golden(active: ActiveRelease, golden: Golden, chunk: Callable[[str], bytes]) -> dict[str, Tensor]:
    """Run one golden input on the device alone; its outputs. InferenceFailed where they are not the whole model's.

    Where the plan leaves no way to answer alone there is nothing to compare, and loading was the test: no outputs.
    """
    local = active.plan.local
    if local is None:
        return {}
    request = oip.decode_request(*with_header_length(chunk(golden.request.sha256)))
    expected = oip.decode_response(*with_header_length(chunk(golden.response.sha256)))
    timing = Timing()
    live = active.run(active.order(local.device), request.inputs, timing)
    active.learn(timing)
    for name, want in expected.outputs.items():
        if name not in live or not close(live[name], want):
            raise InferenceFailed(f"golden input: output {name!r} is not what the whole model gave")
    return {name: live[name] for name in expected.outputs}


def golden_inputs(golden: Golden, chunk: Callable[[str], bytes]) -> Tensors:
    """What a golden request carries."""
    return oip.decode_request(*with_header_length(chunk(golden.request.sha256))).inputs


def close(got: Tensor, want: Tensor) -> bool:
    """Equal within what another processor's arithmetic explains; never where the answer has become NaN."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if not np.issubdtype(want.dtype, np.floating):
        return bool(np.array_equal(got, want))
    scale = float(np.max(np.abs(want))) if want.size else 0.0
    return bool(np.allclose(got, want, rtol=RELATIVE_TOLERANCE, atol=RELATIVE_TOLERANCE * scale, equal_nan=True))


def with_header_length(body: bytes) -> tuple[bytes, int | None]:
    """The body with the length of its JSON part: what its tensors' own sizes leave of it."""
    try:
        head, _ = json.JSONDecoder().raw_decode(body.decode("latin-1"))
        tensors = [*head.get("inputs", ()), *head.get("outputs", ())]
        sizes = [int(tensor.get("parameters", {}).get("binary_data_size", 0)) for tensor in tensors]
    except (ValueError, TypeError, AttributeError) as error:
        raise MalformedMessage(f"golden body: {error}") from error
    return body, len(body) - sum(sizes) if any(sizes) else None
