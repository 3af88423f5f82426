"""The remote half of a row, ready to run: its slices, for single requests or for batches.

Rows of several plans and codecs that leave the same slices to this server share one remote half, and so may batch their
requests.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from time import perf_counter
from typing import Protocol

import numpy as np

from edgesplit.crypto.slice_encryption import SliceInMemory, SliceSource
from edgesplit.errors import EdgeError, InferenceFailed, ModelRefused, UsageError
from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import Manifest, Slice, TensorSpec
from edgesplit.runtime import Program, Runtime, Tensor, run_slices
from edgesplit.runtime.loader import load_slice
from edgesplit_offload.models import batch_benefit
from edgesplit_offload.models.batch_graph import batched_source
from edgesplit_offload.models.slice_cache import LoadableSlice, SliceCache, SliceKey
from edgesplit_offload.scheduling.run_times import BatchBenefit, RunTimes

log = logging.getLogger(__name__)

FORWARD_S, FORWARD_S_PER_BYTE = 100e-6, 1.5e-9
"""Cost of forwarding a request to another process, fixed and per byte: messages, wake-ups, and a socket that copies
twice (docs/decisions/0034)."""
Tensors = Mapping[str, Tensor]


class OpenRelease(Protocol):
    """A release whose manifest is trusted: `edgesplit.release_store.StoredRelease`, or a test double."""

    @property
    def manifest(self) -> Manifest:
        """The release's manifest."""
        ...

    @property
    def digest(self) -> str:
        """The release's digest, which is its name."""
        ...

    def slice_folder(self, name: str) -> SliceSource:
        """The slice's verified files: their folder, or memory if they are encrypted."""
        ...


class RemoteHalf:
    """The remote half of a row: slices of a release in the order in which they run. Thread-safe."""

    def __init__(
        self,
        release: OpenRelease,
        remote: Sequence[str],
        ends: tuple[Sequence[TensorSpec], Sequence[TensorSpec]],
        runtime: Runtime,
        cache: SliceCache,
        wide: Runtime | None = None,
    ) -> None:
        """`remote` names the slices, `ends` are the specifications of inputs and outputs. `wide`: an engine with
        several threads for batches, used if it gives the same bits."""
        self.run_times = RunTimes()
        self.is_measured = False
        """Whether its batching benefit has been measured."""
        self.kind = hashlib.sha256(f"{release.digest} {remote}".encode()).hexdigest()[:32]
        """Identifies requests that may be batched with these, in all processes."""
        self.digest = release.digest
        self._release = release
        self._order = tuple(remote)
        self._inputs, self._outputs = ends
        self._runtime = runtime
        self._wide = wide
        self._cache = cache
        self._measure_once = threading.Lock()
        self._lock = threading.Lock()
        self._unloads = self._unloads_at_claim = 0
        self._slices = [release.manifest.slice(name) for name in remote]
        self._single = [self._loadable(slice_) for slice_ in self._slices]
        self._batched: list[LoadableSlice] | None = None

    @property
    def worth_forwarding(self) -> bool:
        """Whether batching in another process saves more than forwarding the request costs."""
        # docs/decisions/0034: the core seconds saved per request against the cost of forwarding its tensors.
        return (
            self.run_times.max_batch > 1
            and self.run_times.saved_s > FORWARD_S + FORWARD_S_PER_BYTE * self._request_bytes
        )

    @cached_property
    def _request_bytes(self) -> int:
        """Bytes of the tensors of one request and its answer; only meaningful for fixed shapes."""
        specs = (*self._inputs, *self._outputs)
        return sum(math.prod(spec.shape) * oip.DTYPES[spec.datatype].itemsize for spec in specs)

    @property
    def is_loaded(self) -> bool:
        """Whether it could run at once."""
        return self._cache.has_loaded(self._batched or self._single)

    def load(self) -> None:
        """Load the slices that are not loaded; raises what loading raises."""
        with self._cache.borrow(self._batched or self._single):
            pass

    @property
    def has_room(self) -> bool:
        """Whether there is memory for it without evicting anything."""
        return self._cache.has_room(self._batched or self._single)

    def warm_up(self) -> None:
        """Load it and, if random inputs are possible, run it once, because an engine's first run is slow."""
        self.load()
        if all(spec.datatype != "BYTES" and -1 not in spec.shape for spec in self._inputs):
            with suppress(InferenceFailed, UsageError):  # an input decoder rejects random bytes
                self.run([batch_benefit.random_inputs(self._inputs, np.random.default_rng(0))])

    def unload(self) -> None:
        """Evict its slices. The next request loads them again; a measurement in progress does not."""
        with self._lock:
            self._unloads += 1
            self._evict([*self._single, *(self._batched or ())])

    def run(self, requests: Sequence[Tensors]) -> list[Tensors]:
        """All outputs by name, for each of the inputs: in one run if batching is enabled."""
        together = self._batched  # read once: measuring may replace it in another thread
        with self._cache.borrow(together or self._single) as programs:
            if together is None or len(requests) == 1:
                return [self._outputs_of(programs, inputs) for inputs in requests]
            return list(batch_benefit.unstack(self._outputs_of(programs, batch_benefit.stack(requests)), len(requests)))

    def claim_measurement(self) -> bool:
        """True for exactly one caller, which must see to it that `measure` is called."""
        is_first = self._measure_once.acquire(blocking=False)
        if is_first:
            self._unloads_at_claim = self._unloads
        return is_first

    def measure(self, clock: Callable[[], float]) -> None:
        """Measure whether batching pays, and enable it if so. `clock` times the runs. A half that is unloaded meanwhile
        stays unloaded: it is measured again after its next request."""
        try:
            self._measure(clock)
        finally:
            with self._lock:
                self.is_measured = not self._is_unloaded_since_claim
            if not self.is_measured:
                self._measure_once.release()

    def _measure(self, clock: Callable[[], float]) -> None:
        specs = [spec for slice_ in self._slices for spec in (*slice_.inputs, *slice_.outputs)]
        if any(slice_.format != "onnx" for slice_ in self._slices) or not batch_benefit.is_stackable(
            [*specs, *self._inputs, *self._outputs]
        ):
            return
        together = [self._loadable(slice_, stacked=True) for slice_ in self._slices]
        wide = [self._loadable(slice_, stacked=True, wide=True) for slice_ in self._slices]
        batched, seconds = self._single, None
        try:
            with ExitStack() as borrowed:
                with self._lock:
                    if self._is_unloaded_since_claim:
                        return
                    alone = borrowed.enter_context(self._cache.borrow(self._single))
                gain = self._try_batching(alone, together, clock)
                if gain is not None:
                    seconds = self._try_wide(alone, wide)
                    batched = together if seconds is None else wide
            with self._lock:
                if self._is_unloaded_since_claim:
                    batched = self._single
                elif gain is not None:
                    self._batched = batched
                    self.run_times.enable_batching(gain)
                    if seconds is not None:
                        self.run_times.replace_times(seconds)
        finally:
            for pieces in (self._single, together, wide):
                if pieces is not batched:
                    self._evict(pieces)

    @property
    def _is_unloaded_since_claim(self) -> bool:
        return self._unloads != self._unloads_at_claim

    def _try_wide(self, single: Mapping[str, Program], loadable: list[LoadableSlice]) -> Mapping[int, float] | None:
        """Run times of batches with several threads, if these give the same bits. No gain is required: the batcher has
        the cores for it, and all requests of a batch wait for the whole of it."""
        if self._wide is None:
            return None
        try:
            with self._cache.borrow(loadable) as batched:
                run = partial(self._outputs_of, batched)
                if batch_benefit.is_batchable(self._inputs, partial(self._outputs_of, single), run):
                    return batch_benefit.measure_benefit(self._inputs, run, run, perf_counter, typical=min).seconds
        except EdgeError as error:
            log.info("stacks run by one thread each: %s", error)
        return None

    def _try_batching(
        self, single: Mapping[str, Program], loadable: list[LoadableSlice], clock: Callable[[], float]
    ) -> BatchBenefit | None:
        """The benefit of batching, if it pays and gives the same bits."""
        name = f"{self._release.digest[:12]} {'+'.join(self._order)[:80]}"
        with self._cache.borrow(loadable) as batched:
            run_one, run_many = partial(self._outputs_of, single), partial(self._outputs_of, batched)
            if not batch_benefit.is_batchable(self._inputs, run_one, run_many):
                log.info("%s: runs one request at a time: a batch does not give the same bits", name)
                return None
            gain = batch_benefit.measure_benefit(self._inputs, run_one, run_many, clock)
        if gain.max_batch == 1:
            log.info("%s: runs one request at a time: batching does not pay", name)
            return None
        log.info(
            "%s: up to %d requests share a run, which answers %.1f times as many", name, gain.max_batch,
            gain.throughput_ratio,
        )  # fmt: skip
        return gain

    def _evict(self, pieces: Sequence[LoadableSlice]) -> None:
        self._cache.evict(self._release.digest, {piece.key for piece in pieces})

    def _loadable(self, slice_: Slice, *, stacked: bool = False, wide: bool = False) -> LoadableSlice:
        """The slice as a cacheable entry: its files are verified when it is loaded."""

        def load() -> Program:
            log.info(
                "loading slice %s of release %s%s", slice_.name, self._release.digest[:12], " for stacks" * stacked
            )
            if not stacked:
                return load_slice(self._release.manifest, slice_, self._release.slice_folder, self._runtime)
            source = self._release.slice_folder(slice_.name)
            batched = batched_source(source)
            if isinstance(source, SliceInMemory):
                source.close()
            if batched is None:
                raise ModelRefused(f"slice {slice_.name} takes one input at a time")
            with batched:
                return (self._wide if wide and self._wide is not None else self._runtime).load(slice_, batched)

        return LoadableSlice(SliceKey(self._release.digest, slice_.name, stacked, wide), slice_.bytes, load)

    def _outputs_of(self, programs: Mapping[str, Program], inputs: Tensors) -> dict[str, Tensor]:
        live = run_slices(programs, self._order, inputs)
        return {spec.name: live[spec.name] for spec in self._outputs}
