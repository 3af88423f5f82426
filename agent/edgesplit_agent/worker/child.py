"""The worker's own process: opens slices, runs them where it is told to, and does nothing else.

It gives up what it does not need before it opens anything, ignores the signals that are meant for the agent, and ends
with it. Nothing here waits for time: the agent ends what takes too long.
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
from edgesplit.process.lifecycle import end_with_parent, gain_no_privileges
from edgesplit.release.manifest import Slice
from edgesplit.runtime import Program, Runtime, Tensor, Tensors, Timing, execute
from edgesplit.runtime.dispatch import EngineByFormat
from edgesplit.runtime.emulated import EmulatedRuntime
from edgesplit.runtime.input_decoder import InputProgram
from edgesplit.runtime.options import Setup
from edgesplit.runtime.providers import sift
from edgesplit_agent.worker.direct_child import ChildLanes
from edgesplit_agent.worker.ipc import (
    TEXT,
    Channel,
    Desk,
    Failed,
    Forget,
    Give,
    Kind,
    Map,
    Open,
    Opened,
    Ran,
    Room,
    Run,
    Take,
    TooSmall,
    ToWorker,
)
from edgesplit_agent.worker.session_merging import Merged, Steps, run_steps, steps
from edgesplit_agent.worker.tensor_refs import Memory, get, packed, put, room_for

NICER = 2
"""The agent, which decides and answers, goes before."""
MOST_FILES = 4_096
LAST_WORDS = 3
"""Exit code of a worker that was told something it does not understand."""


def main(arguments: Sequence[str]) -> int:
    """Serve the agent `arguments[1]` on the socket that is descriptor `arguments[0]` until it hangs up."""
    end_with_parent(int(arguments[1]), signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # whoever stops the agent stops its workers through it
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr)
    confine()
    channel: Channel[ToWorker] = Channel(socket.socket(fileno=int(arguments[0])), ToWorker)  # type: ignore[arg-type]
    try:
        Child(channel).serve()
    except (EOFError, ConnectionError):
        return 0
    except MalformedMessage as error:
        print(error, file=sys.stderr)
        return LAST_WORDS
    return 0


def confine() -> None:
    """Give up what running a model does not take: new privileges, core dumps (tensors are private), writing files."""
    gain_no_privileges()
    os.nice(NICER)
    for what, most in (
        (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, MOST_FILES),
    ):  # fmt: skip
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def limit_memory(size: int) -> None:
    """Let the kernel refuse what this process reserves beyond so many bytes more than it has now (the engine's threads
    reserve much that they never touch). Files that are mapped do not count."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    size += int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    most = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def uses_accelerator(setup: Setup) -> bool:
    """Whether one will be tried: their drivers reserve memory by the gigabyte, and only what is held counts then."""
    if not setup.providers:
        return False
    import onnxruntime

    return bool(sift(setup.providers, onnxruntime.get_available_providers())[0])


class Child:
    """What is open, and the memory that is shared."""

    def __init__(self, channel: Channel[ToWorker]) -> None:
        self._channel = channel
        self._taken: dict[str, tuple[Slice, SliceSource | None]] = {}
        self._programs: dict[str, Program] = {}
        self._memory: dict[int, Memory] = {}
        self._engine = EngineByFormat()
        self._notes = self._engine.notes
        self._merged: list[Merged] = []
        self._steps: dict[tuple[tuple[str, ...], tuple[str, ...]], Steps] = {}
        self._asked = Open(Setup())
        self._limited = False
        self._lanes = ChildLanes(channel.fileno(), self._run_for_lane)

    def serve(self) -> None:
        """Until the agent hangs up: EOFError."""
        while True:
            if self._lanes.turn():
                self._do(*self._channel.receive_files())

    def _do(self, message: ToWorker, files: list[int]) -> None:
        """What the agent says."""
        if isinstance(message, Run):
            self._answer(message.number, lambda: self._run(message))
        elif isinstance(message, Map):
            self._map(message, files)
        elif isinstance(message, Forget):
            for number in message.segments:
                self._memory.pop(number, None)
        elif isinstance(message, Take):
            self._take(message, files)
        elif isinstance(message, Open):
            self._answer(0, lambda: self._open(message))
        elif isinstance(message, Desk):
            self._lanes.furnish(files)
        else:
            raise MalformedMessage("more room for nothing")

    def _answer(self, number: int, do: Callable[[], Ran | Opened]) -> None:
        """What it gives, or why it cannot be: whatever a model does short of ending this process."""
        try:
            answer: Ran | Opened | Failed = do()
        except (EOFError, ConnectionError):
            raise
        except UsageError as error:
            answer = _failed(number, "usage", error)
        except ModelRefused as error:
            answer = _failed(number, "refused", error)
        except MemoryError as error:
            answer = _failed(number, "memory", error)
        except Exception as error:
            answer = _failed(number, "failed", error)
        self._channel.send(answer)

    def _map(self, message: Map, files: list[int]) -> None:
        for file in files:
            self._memory[message.segment] = np.frombuffer(mmap.mmap(file, message.bytes), np.uint8)
            os.close(file)

    def _take(self, message: Take, files: list[int]) -> None:
        if message.slice.format == "input":
            source: SliceSource | None = None
        elif message.files:
            source = SliceInMemory.of(message.slice.name, dict(zip(message.files, files, strict=True)))
        else:
            source = Path(message.folder)
        self._taken[message.slice.name] = (message.slice, source)

    def _open(self, ask: Open) -> Opened:
        """Everything taken, anew. What lies in memory stays there: another setup may be tried."""
        self._programs, self._merged = {}, []
        self._steps.clear()
        if ask.memory_bytes and not self._limited and not uses_accelerator(ask.setup):
            self._limited = True
            limit_memory(ask.memory_bytes)
        engine = EngineByFormat(setup=ask.setup)
        runtime: Runtime = engine if ask.slice_s is None else EmulatedRuntime(engine, ask.slice_s)
        programs: dict[str, Program] = {}
        refused: dict[str, str] = {}
        for name, (slice_, source) in self._taken.items():
            try:
                programs[name] = _program(ask, slice_, source, runtime)
            except ModelRefused as refusal:
                if name not in ask.optional:
                    raise
                refused[name] = str(refusal)[:TEXT]
        self._programs, self._engine, self._asked, self._notes = programs, engine, ask, engine.notes
        self._merged = self._merge(ask, engine)
        return Opened(tuple(programs), refused, engine.notes, len(self._merged))

    def _merge(self, ask: Open, engine: EngineByFormat) -> list[Merged]:
        """Those of the merges that can be made."""
        made = []
        for one in ask.merges if ask.setup.merge else ():
            parts = [
                (slice_, source) for slice_, source in map(self._taken.__getitem__, one.order) if source is not None
            ]
            program = engine.load_merged(parts, one.outputs)
            if program is not None:
                made.append(Merged(one, program))
        return made

    def _run(self, ask: Run) -> Ran:
        tensors = {one.name: get(one, self._memory[one.segment]) for one in ask.inputs}
        timing = Timing()
        live = self._execute(ask.order, ask.wants, tensors, timing)
        found = {name: live[name] for name in ask.wants}
        need = room_for({name: packed(one) for name, one in found.items()})
        room = ask.room
        if need > room.bytes:
            room = self._more_room(ask.number, need)
        memory = self._memory[room.segment][room.offset : room.offset + room.bytes]
        placed = put(found, room, memory)
        return Ran(ask.number, placed, timing.seconds, timing.late, self._engine.notes)

    def _execute(
        self, order: tuple[str, ...], wants: tuple[str, ...], tensors: Tensors, timing: Timing
    ) -> Mapping[str, Tensor]:
        """These slices' tensors, those wanted among them. InferenceFailed."""
        if self._merged:
            key = (order, wants)
            planned = self._steps.get(key)
            if planned is None:
                slices = {name: slice_ for name, (slice_, _) in self._taken.items()}
                planned = self._steps[key] = steps(order, wants, slices, self._merged)
            live = run_steps(planned, self._programs, tensors, timing, self._asked.shares)
        else:
            live = execute(self._programs, order, tensors, timing)
        for name in wants:
            if name not in live:
                raise InferenceFailed(f"no tensor {name!r} came of {', '.join(order)}")
        return live

    def _run_for_lane(
        self, order: tuple[str, ...], wants: tuple[str, ...], tensors: Tensors, timing: Timing
    ) -> Mapping[str, Tensor]:
        live = self._execute(order, wants, tensors, timing)
        if self._asked.setup.providers and self._engine.notes != self._notes and self._lanes.words is not None:
            self._lanes.words.note()
        return live

    def _more_room(self, number: int, need: int) -> Room:
        self._channel.send(TooSmall(number, need))
        while True:
            message, files = self._channel.receive_files()
            if isinstance(message, Map):
                self._map(message, files)
            elif isinstance(message, Give) and message.number == number and message.room.bytes >= need:
                return message.room
            elif isinstance(message, Give) and message.number == number:
                raise InferenceFailed(f"there is no room for its outputs, {need} bytes")
            else:
                raise EOFError


def _program(ask: Open, slice_: Slice, source: SliceSource | None, runtime: Runtime) -> Program:
    if source is not None:
        return runtime.load(slice_, source)
    if ask.input_spec is None:
        raise ModelRefused(f"slice {slice_.name} decodes the input, but the release has no input spec")
    program = InputProgram(ask.input_spec)
    return runtime.wrap(slice_.name, program) if isinstance(runtime, EmulatedRuntime) else program


def _failed(number: int, kind: Kind, error: Exception) -> Failed:
    text = str(error) if isinstance(error, EdgeError) else f"{type(error).__name__}: {error}"
    return Failed(number, kind, text[:TEXT])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
