"""Entry point of the worker process: opens slices, runs them on request, and does nothing else.

It drops privileges before it opens anything, ignores the signals meant for the agent, and ends with the agent. Nothing
here has a timeout: the agent kills what takes too long.
"""

from __future__ import annotations

import logging
import mmap
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from edgesplit.crypto.slice_encryption import SliceInMemory, SliceSource
from edgesplit.errors import EdgeError, InferenceFailed, MalformedMessage, ModelRefused, UsageError
from edgesplit.process.confinement import cut_off_network, give_way_when_memory_is_short, lower_limit
from edgesplit.process.lifecycle import end_with_parent, forbid_core_dumps, gain_no_privileges
from edgesplit.release.manifest import Slice
from edgesplit.runtime import Program, Runtime, Tensor, Tensors, Timing, run_slices
from edgesplit.runtime.dispatch import DispatchingRuntime
from edgesplit.runtime.emulated import EmulatedRuntime
from edgesplit.runtime.input_decoder import InputProgram
from edgesplit.runtime.options import EngineOptions
from edgesplit.runtime.providers import select_available
from edgesplit_agent.worker import ipc
from edgesplit_agent.worker.direct.child import WorkerLanes
from edgesplit_agent.worker.session_merging import MergedSession, Steps, plan_steps, run_steps
from edgesplit_agent.worker.tensor_refs import Memory, pack, packed_bytes, read_tensor, write_tensors

NICE_INCREMENT = 2
"""Increment of the nice value: the agent, which decides and answers, has priority."""
OOM_SCORE_ADJUSTMENT = 500
"""When the machine's memory runs out, the kernel ends this process rather than the agent, which starts another."""
MAX_FILES = 4_096
"""Maximum number of open descriptors."""
EXIT_BAD_MESSAGE = 3
"""Exit code after a message that could not be understood."""


def main(arguments: Sequence[str]) -> int:
    """Serve the agent with process id `arguments[1]` on the socket descriptor `arguments[0]` until it closes."""
    end_with_parent(int(arguments[1]), signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the agent ends its workers itself when it stops
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr)
    drop_privileges()
    channel: ipc.Channel[ipc.ToWorker] = ipc.Channel(socket.socket(fileno=int(arguments[0])), ipc.ToWorker)  # type: ignore[arg-type]
    try:
        WorkerServer(channel).serve()
    except (EOFError, ConnectionError):
        return 0
    except MalformedMessage as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_MESSAGE
    return 0


def drop_privileges() -> None:
    """Drop what running a model does not need: new privileges, core dumps (tensors are private), writing files, the
    network and the memory of other processes. The agent limits memory (`limit_memory`) and time (its watchdog)."""
    gain_no_privileges()
    os.nice(NICE_INCREMENT)
    give_way_when_memory_is_short(OOM_SCORE_ADJUSTMENT)
    forbid_core_dumps()
    lower_limit(resource.RLIMIT_FSIZE, 0)
    lower_limit(resource.RLIMIT_NOFILE, MAX_FILES)
    cut_off_network()


def limit_memory(size: int) -> None:
    """Limit the memory that this process may reserve to `size` bytes more than now; mapped files do not count.

    The amount reserved now is added because the engine's threads reserve much that they never touch.
    """
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    size += int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    limit = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def uses_accelerator(setup: EngineOptions) -> bool:
    """Whether an accelerator will be tried: accelerator drivers reserve memory by the gigabyte, so reservations cannot
    be limited and only the memory in use is watched."""
    if not setup.providers:
        return False
    import onnxruntime

    return bool(select_available(setup.providers, onnxruntime.get_available_providers())[0])


class WorkerServer:
    """The open slices, the mapped memory and the lanes of this worker."""

    def __init__(self, channel: ipc.Channel[ipc.ToWorker]) -> None:
        self._channel = channel
        self._sources: dict[str, tuple[Slice, SliceSource | None]] = {}
        self._programs: dict[str, Program] = {}
        self._memory: dict[int, Memory] = {}
        self._engine = DispatchingRuntime()
        self._open_notes = self._engine.notes
        self._merged: list[MergedSession] = []
        self._steps: dict[tuple[tuple[str, ...], tuple[str, ...]], Steps] = {}
        self._open_request = ipc.OpenSlices(EngineOptions())
        self._limited = False
        self._lanes = WorkerLanes(channel.fileno(), self._run_for_lane)

    def serve(self) -> None:
        """Handle messages until the agent closes the connection: EOFError."""
        while True:
            if self._lanes.serve_one():
                self._handle(*self._channel.receive_files())

    def _handle(self, message: ipc.ToWorker, files: list[int]) -> None:
        """Handle one message from the agent."""
        if isinstance(message, ipc.RunRequest):
            self._answer(message.number, lambda: self._run(message))
        elif isinstance(message, ipc.MapSegment):
            self._map_segment(message, files)
        elif isinstance(message, ipc.UnmapSegments):
            for number in message.segments:
                self._memory.pop(number, None)
        elif isinstance(message, ipc.AddSlice):
            self._add_slice(message, files)
        elif isinstance(message, ipc.OpenSlices):
            self._answer(0, lambda: self._open(message))
        elif isinstance(message, ipc.PrepareLanes):
            self._lanes.connect_agent(files)
        else:
            raise MalformedMessage("an output buffer that was not requested")

    def _answer(self, number: int, action: Callable[[], ipc.RunResult | ipc.Opened]) -> None:
        """Send the result of `action`, or the failure that it raised: everything short of the end of this process."""
        try:
            answer: ipc.RunResult | ipc.Opened | ipc.Failed = action()
        except (EOFError, ConnectionError):
            raise
        except UsageError as error:
            answer = _failure(number, "usage", error)
        except ModelRefused as error:
            answer = _failure(number, "refused", error)
        except MemoryError as error:
            answer = _failure(number, "memory", error)
        except Exception as error:
            answer = _failure(number, "failed", error)
        self._channel.send(answer)

    def _map_segment(self, message: ipc.MapSegment, files: list[int]) -> None:
        for file in files:
            self._memory[message.segment] = np.frombuffer(mmap.mmap(file, message.bytes), np.uint8)
            os.close(file)

    def _add_slice(self, message: ipc.AddSlice, files: list[int]) -> None:
        if message.slice.format == "input":
            source: SliceSource | None = None
        elif message.files:
            source = SliceInMemory.from_descriptors(message.slice.name, dict(zip(message.files, files, strict=True)))
        else:
            source = Path(message.folder)
        self._sources[message.slice.name] = (message.slice, source)

    def _open(self, request: ipc.OpenSlices) -> ipc.Opened:
        """Open all added slices anew. The sources stay, so that another setup may be tried."""
        self._programs, self._merged = {}, []
        self._steps.clear()
        if request.memory_bytes and not self._limited and not uses_accelerator(request.setup):
            self._limited = True
            limit_memory(request.memory_bytes)
        engine = DispatchingRuntime(setup=request.setup)
        runtime: Runtime = engine if request.slice_s is None else EmulatedRuntime(engine, request.slice_s)
        programs: dict[str, Program] = {}
        refused: dict[str, str] = {}
        for name, (slice_, source) in self._sources.items():
            try:
                programs[name] = _load_program(request, slice_, source, runtime)
            except ModelRefused as refusal:
                if name not in request.optional:
                    raise
                refused[name] = str(refusal)[: ipc.MAX_TEXT]
        self._programs, self._engine, self._open_request, self._open_notes = programs, engine, request, engine.notes
        self._merged = self._merge(request, engine)
        return ipc.Opened(tuple(programs), refused, engine.notes, len(self._merged))

    def _merge(self, request: ipc.OpenSlices, engine: DispatchingRuntime) -> list[MergedSession]:
        """The requested merged sessions that can be opened."""
        sessions = []
        for merge in request.merges if request.setup.merge else ():
            sources = map(self._sources.__getitem__, merge.order)
            parts = [(slice_, source) for slice_, source in sources if source is not None]
            program = engine.load_merged(parts, merge.outputs)
            if program is not None:
                sessions.append(MergedSession(merge, program))
        return sessions

    def _run(self, request: ipc.RunRequest) -> ipc.RunResult:
        tensors = {ref.name: read_tensor(ref, self._memory[ref.segment]) for ref in request.inputs}
        timing = Timing()
        live = self._execute(request.order, request.wants, tensors, timing)
        outputs = {name: live[name] for name in request.wants}
        needed_bytes = packed_bytes({name: pack(ref) for name, ref in outputs.items()})
        buffer = request.room
        if needed_bytes > buffer.bytes:
            buffer = self._request_buffer(request.number, needed_bytes)
        memory = self._memory[buffer.segment][buffer.offset : buffer.offset + buffer.bytes]
        placed = write_tensors(outputs, buffer, memory)
        return ipc.RunResult(request.number, placed, timing.seconds, timing.overruns, self._engine.notes)

    def _execute(
        self, order: tuple[str, ...], wants: tuple[str, ...], tensors: Tensors, timing: Timing
    ) -> Mapping[str, Tensor]:
        """The slices' tensors, including those in `wants`. Raises InferenceFailed."""
        if self._merged:
            key = (order, wants)
            planned = self._steps.get(key)
            if planned is None:
                slices = {name: slice_ for name, (slice_, _) in self._sources.items()}
                planned = self._steps[key] = plan_steps(order, wants, slices, self._merged)
            live = run_steps(planned, self._programs, tensors, timing, self._open_request.shares)
        else:
            live = run_slices(self._programs, order, tensors, timing)
        for name in wants:
            if name not in live:
                raise InferenceFailed(f"the slices {', '.join(order)} returned no tensor {name!r}")
        return live

    def _run_for_lane(
        self, order: tuple[str, ...], wants: tuple[str, ...], tensors: Tensors, timing: Timing
    ) -> Mapping[str, Tensor]:
        live = self._execute(order, wants, tensors, timing)
        if (
            self._open_request.setup.providers
            and self._engine.notes != self._open_notes
            and self._lanes.state is not None
        ):
            self._lanes.state.signal_change()
        return live

    def _request_buffer(self, number: int, needed_bytes: int) -> ipc.SharedBuffer:
        """Request a larger output buffer from the agent. InferenceFailed where it grants none."""
        self._channel.send(ipc.BufferTooSmall(number, needed_bytes))
        while True:
            message, files = self._channel.receive_files()
            if isinstance(message, ipc.MapSegment):
                self._map_segment(message, files)
            elif isinstance(message, ipc.GrantBuffer) and message.number == number:
                if message.room.bytes >= needed_bytes:
                    return message.room
                raise InferenceFailed(f"there is no room for its outputs, {needed_bytes} bytes")
            else:  # a violation of the protocol: end this process
                raise EOFError


def _load_program(request: ipc.OpenSlices, slice_: Slice, source: SliceSource | None, runtime: Runtime) -> Program:
    if source is not None:
        return runtime.load(slice_, source)
    spec = request.input_specs.get(slice_.name)
    if spec is None:
        raise ModelRefused(f"slice {slice_.name} decodes the input, but the release has no input spec")
    program = InputProgram(spec)
    return runtime.wrap(slice_.name, program) if isinstance(runtime, EmulatedRuntime) else program


def _failure(number: int, kind: ipc.FailureKind, error: Exception) -> ipc.Failed:
    text = str(error) if isinstance(error, EdgeError) else f"{type(error).__name__}: {error}"
    return ipc.Failed(number, kind, text[: ipc.MAX_TEXT])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
