"""The far half of a row, as what runs: its slices, by themselves or for several requests stacked.

Rows of several plans and codecs that leave the same slices to this side share one half, and so do their requests' runs.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from time import perf_counter
from typing import Protocol

import numpy as np

from edgesplit.crypto.slice_encryption import SliceInMemory, SliceSource
from edgesplit.errors import EdgeError, InferenceFailed, ModelRefused, UsageError
from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import Manifest, Slice, TensorSpec
from edgesplit.runtime import Program, Runtime, Tensor, execute
from edgesplit.runtime.loader import load_slice
from edgesplit_offload.models.batch_benefit import apart, joined, keeps_apart, measured, noise, stackable
from edgesplit_offload.models.batch_graph import source_of_many
from edgesplit_offload.models.slice_cache import Key, Memory, Piece
from edgesplit_offload.scheduling.run_times import Pace

log = logging.getLogger(__name__)

HOP_S, HOP_S_PER_BYTE = 100e-6, 1.5e-9
"""What it takes to have another process run a request: messages and waking up, and a socket that copies twice."""
Tensors = Mapping[str, Tensor]


class OpenRelease(Protocol):
    """A release whose manifest is trusted: `edgesplit.release_store.Release`, or a test's own."""

    @property
    def manifest(self) -> Manifest:
        """What it promises."""
        ...

    @property
    def digest(self) -> str:
        """Its name."""
        ...

    def slice_folder(self, name: str) -> SliceSource:
        """That slice's verified files: their folder, or memory where they are encrypted."""
        ...


class FarHalf:
    """These slices of a release, in the order in which they run. Thread-safe."""

    def __init__(
        self,
        release: OpenRelease,
        remote: Sequence[str],
        ends: tuple[Sequence[TensorSpec], Sequence[TensorSpec]],
        runtime: Runtime,
        memory: Memory,
        wide: Runtime | None = None,
    ) -> None:
        """`wide`: runs stacks by several threads, where that gives the same bits."""
        self.pace = Pace()
        self.is_measured = False
        """Is it known whether its requests gain by company?"""
        self.kind = hashlib.sha256(f"{release.digest} {remote}".encode()).hexdigest()[:32]
        """By which all processes know requests that may share runs with these."""
        self.digest = release.digest
        self._release = release
        self._order = tuple(remote)
        self._inputs, self._outputs = ends
        self._runtime = runtime
        self._wide = wide
        self._memory = memory
        self._asked = threading.Lock()
        self._slices = [release.manifest.slice(name) for name in remote]
        self._alone = [self._piece(one) for one in self._slices]
        self._together: list[Piece] | None = None

    @property
    def travels(self) -> bool:
        """Is company worth handing a request to another process?"""
        return self.pace.most > 1 and self.pace.saves_s > HOP_S + HOP_S_PER_BYTE * self._bytes

    @cached_property
    def _bytes(self) -> int:
        """Of the tensors that a request brings and takes away; known of those that may be stacked."""
        return sum(math.prod(one.shape) * oip.DTYPES[one.datatype].itemsize for one in (*self._inputs, *self._outputs))

    @property
    def is_loaded(self) -> bool:
        """Could it run at once?"""
        return self._memory.has(self._together or self._alone)

    def load(self) -> None:
        """Load what is not loaded; whatever loading raises."""
        with self._memory.lent(self._together or self._alone):
            pass

    @property
    def fits(self) -> bool:
        """Is there memory for it without letting anything go?"""
        return self._memory.has_room(self._together or self._alone)

    def warm(self) -> None:
        """Load it and, where noise makes an input, run it once: the first run of an engine is a slow one."""
        self.load()
        if all(spec.datatype != "BYTES" and -1 not in spec.shape for spec in self._inputs):
            with suppress(InferenceFailed, UsageError):  # what decodes frames takes no noise
                self.run([noise(self._inputs, np.random.default_rng(0))])

    def unload(self) -> None:
        """Let go of its memory, as far as it does not run just now. The next request loads it again."""
        self._let_go([*self._alone, *(self._together or ())])

    def run(self, given: Sequence[Tensors]) -> list[Tensors]:
        """What each of these inputs gives: every output by name. All in one run where that was found worth it."""
        together = self._together
        with self._memory.lent(together or self._alone) as programs:
            if together is None or len(given) == 1:
                return [self._outputs_of(programs, one) for one in given]
            return list(apart(self._outputs_of(programs, joined(given)), len(given)))

    def first_asked(self) -> bool:
        """True once: whoever hears it sees to it that `measure` is called."""
        return self._asked.acquire(blocking=False)

    def measure(self, clock: Callable[[], float]) -> None:
        """Find out whether requests had better share runs, and let them from now on if so."""
        try:
            self._measure(clock)
        finally:
            self.is_measured = True

    def _measure(self, clock: Callable[[], float]) -> None:
        ends = [spec for one in self._slices for spec in (*one.inputs, *one.outputs)]
        if any(one.format != "onnx" for one in self._slices) or not stackable([*ends, *self._inputs, *self._outputs]):
            return
        together = [self._piece(one, stacked=True) for one in self._slices]
        try:
            with self._memory.lent(self._alone) as alone, self._memory.lent(together) as many:
                self._try(alone, many, together, clock)
            if self._together is not None:
                self._widen()
        finally:
            kept = self._together or self._alone
            for pieces in (self._alone, together):
                if pieces is not kept:
                    self._let_go(pieces)

    def _widen(self) -> None:
        """Run stacks by several threads from now on, if they give the same bits so. Whether it is worth it is not
        asked: who gathers stacks has the cores for them, and all in a stack wait for the whole of it."""
        if self._wide is None:
            return
        wide = [self._piece(one, stacked=True, wide=True) for one in self._slices]
        try:
            with self._memory.lent(self._alone) as alone, self._memory.lent(wide) as many:
                run = partial(self._outputs_of, many)
                if keeps_apart(self._inputs, partial(self._outputs_of, alone), run):
                    self.pace.take(measured(self._inputs, run, run, perf_counter, typical=min).seconds)
                    self._together = wide
        except EdgeError as error:
            log.info("stacks run by one thread each: %s", error)
        finally:
            if self._together is not wide:
                self._let_go(wide)

    def _try(
        self,
        alone: Mapping[str, Program],
        many: Mapping[str, Program],
        together: list[Piece],
        clock: Callable[[], float],
    ) -> None:
        name = f"{self._release.digest[:12]} {'+'.join(self._order)[:80]}"
        run_one, run_many = partial(self._outputs_of, alone), partial(self._outputs_of, many)
        if not keeps_apart(self._inputs, run_one, run_many):
            log.info("%s: runs one request at a time: together they would not give the same bits", name)
            return
        gain = measured(self._inputs, run_one, run_many, clock)
        if gain.most == 1:
            log.info("%s: runs one request at a time: nothing is gained by more", name)
            return
        log.info("%s: up to %d requests share a run, which answers %.1f times as many", name, gain.most, gain.times)
        self._together = together
        self.pace.allow(gain)

    def _let_go(self, pieces: Sequence[Piece]) -> None:
        self._memory.let_go(self._release.digest, {one.key for one in pieces})

    def _piece(self, one: Slice, *, stacked: bool = False, wide: bool = False) -> Piece:
        """The slice as it is loaded: its files are verified at that moment."""

        def load() -> Program:
            log.info("loading slice %s of release %s%s", one.name, self._release.digest[:12], " for stacks" * stacked)
            if not stacked:
                return load_slice(self._release.manifest, one, self._release.slice_folder, self._runtime)
            source = self._release.slice_folder(one.name)
            stack = source_of_many(source)
            if isinstance(source, SliceInMemory):
                source.close()
            if stack is None:
                raise ModelRefused(f"slice {one.name} takes one input at a time")
            with stack:
                return (self._wide if wide and self._wide is not None else self._runtime).load(one, stack)

        return Piece(Key(self._release.digest, one.name, stacked, wide), one.bytes, load)

    def _outputs_of(self, programs: Mapping[str, Program], given: Tensors) -> dict[str, Tensor]:
        live = execute(programs, self._order, given)
        return {spec.name: live[spec.name] for spec in self._outputs}
