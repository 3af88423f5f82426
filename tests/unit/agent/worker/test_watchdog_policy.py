"""Worker processes: the watchdog's decisions, and the memory and messages between them and the agent."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.errors import Busy, InferenceFailed, MalformedMessage, ModelRefused
from edgesplit.plan import Row
from edgesplit.process.memory import default_memory, machine_memory
from edgesplit.release.manifest import Slice, TensorSpec
from edgesplit.runtime import Timing
from edgesplit_agent.worker.dataflow import dataflow_of
from edgesplit_agent.worker.host import SliceRun
from edgesplit_agent.worker.ipc import RunResult, SharedBuffer, SharedTensor
from edgesplit_agent.worker.proc_stats import read_process_stats
from edgesplit_agent.worker.process import read_outputs, record_times
from edgesplit_agent.worker.tensor_allocator import MIN_SEGMENT_BYTES, TensorAllocator
from edgesplit_agent.worker.tensor_refs import pack, packed_bytes, read_tensor, write_tensors
from edgesplit_agent.worker.watchdog_policy import (
    STARVED_FACTOR,
    Bounds,
    ProcessStats,
    Task,
    check_interval_s,
    restart_after_s,
    run_limit_s,
    watchdog_verdict,
)
from support import hostile_worker
from support.agent_engine import eventually, manifest
from support.workers import SMALL, double, hosted, is_there, run

LIMIT = 2**30
TASK = Task(since=100.0, limit_s=1.0, description="computed")


def stats(*, stopped: bool = False, cpu_s: float = 0.0, memory: int = 0) -> ProcessStats:
    return ProcessStats(stopped, cpu_s, memory)


@pytest.mark.parametrize(
    ("task", "what", "now", "goes"),
    [
        (None, stats(), 1e9, ""),
        (None, stats(stopped=True), 1e9, ""),
        (TASK, stats(cpu_s=5), 100.9, ""),
        (TASK, stats(cpu_s=0.9), 101.1, "exceeded its time limit"),
        (TASK, stats(stopped=True), 101.1, "was stopped"),
        (TASK, stats(cpu_s=0.1), 101.1, ""),
        (TASK, stats(cpu_s=0.1), 100 + STARVED_FACTOR, "exceeded its time limit"),
        (None, stats(memory=LIMIT + 1), 0.0, "its limit is"),
        (None, stats(memory=LIMIT), 0.0, ""),
    ],
)
def test_watchdog_decides_which_workers_to_kill(task: Task | None, what: ProcessStats, now: float, goes: str) -> None:
    """A worker that computes or is stopped beyond its limit is killed; one that gets no processor time is waited for
    longer; an idle one is left alone; too much memory is a reason at any time."""
    said = watchdog_verdict(task, what, 0.0, now, LIMIT)
    assert goes in said and bool(said) == bool(goes)


@pytest.mark.parametrize(
    ("expected_s", "left_s", "limit_s"),
    [(None, 2.0, 30.0), (0.01, 10.0, 1.0), (0.01, 1.0, 0.5), (1.0, 2.0, 8.0), (0.01, 0.1, 0.08)],
)
def test_run_limit_follows_from_past_times_and_time_left(
    expected_s: float | None, left_s: float, limit_s: float
) -> None:
    """Half of what is left, so that another answer finds time; never less than a few times what it takes."""
    assert run_limit_s(Bounds(LIMIT), expected_s, left_s) == pytest.approx(limit_s)


def test_worker_restarts_back_off() -> None:
    """A single loss causes no pause; repeated losses a growing, bounded one."""
    pauses = [restart_after_s(losses) for losses in range(1, 60)]
    assert pauses[0] == 0.0 and pauses[1] > 0 and pauses == sorted(pauses) and pauses[-1] == 30.0


def test_idle_workers_are_checked_rarely() -> None:
    """And busy ones often: an idle device is not woken ten times a second for it."""
    assert check_interval_s(None, 0.0) == 1.0
    assert check_interval_s(TASK, 100.0) <= 0.1 and check_interval_s(TASK, 200.0) > 0


def test_process_stats_are_read_from_proc(tmp_path: Path) -> None:
    """Of a process that runs, of one with a bracket in its name, and of none."""
    mine = read_process_stats(os.getpid())
    assert mine is not None and not mine.is_stopped and mine.memory_bytes > 10**6
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (a) Z (b) T 1 " + " ".join(["0"] * 9) + " 200 100 0")
    (tmp_path / "7" / "status").write_text("Name:\tx\nRssAnon:\t10 kB\nRssFile:\t99 kB\nRssShmem:\t5 kB\n")
    found = read_process_stats(7, tmp_path)
    assert found is not None and found.is_stopped and found.memory_bytes == 15 * 1024 and found.cpu_s > 0
    assert read_process_stats(8, tmp_path) is None


def test_cgroup_memory_limit_counts(tmp_path: Path) -> None:
    """In a container the group's limit counts; `max` is none."""
    folder = tmp_path / "sys" / "fs" / "cgroup"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text("max\n")
    whole = machine_memory(tmp_path)
    (folder / "memory.max").write_text("1000000\n")
    assert machine_memory(tmp_path) == 1_000_000 < whole
    assert default_memory(10**10) == 5 * 10**9 and default_memory(10**6) >= 2**28


# Shared memory

TENSORS = st.one_of(
    st.tuples(st.sampled_from(["<f4", "<i8", "?", "<f2", "u1"]), st.lists(st.integers(0, 4), max_size=3)).map(
        lambda kind: np.ones(kind[1], np.dtype(kind[0]))
    ),
    st.lists(st.binary(max_size=6), max_size=4).map(lambda texts: np.array([*texts, b""], object)),
)


@given(st.lists(TENSORS, max_size=4))
def test_tensors_round_trip_through_shared_memory(tensors: list[np.ndarray]) -> None:
    """Every type and shape, empty ones and text too."""
    named = {f"t{number}": one for number, one in enumerate(tensors)}
    memory = np.zeros(4096, np.uint8)
    need = packed_bytes({name: pack(one) for name, one in named.items()})
    placed = write_tensors(named, SharedBuffer(1, 64, need), memory[64:])
    for place in placed:
        found = read_tensor(place, memory[64 : 64 + need], 64)
        wanted = named[place.name]
        assert found.dtype == wanted.dtype and found.shape == wanted.shape and np.array_equal(found, wanted)


NUMBERS = st.integers(-(2**63), 2**62) | st.integers(0, 300)


@given(NUMBERS, NUMBERS, st.sampled_from(["FP32", "BYTES", "INT8", "x"]), st.lists(st.integers(0, 2**62), max_size=4))
def test_tensor_descriptions_cannot_read_beyond_their_memory(
    offset: int, size: int, datatype: str, shape: list[int]
) -> None:
    """A description is refused, or lies in the memory entirely."""
    memory = np.full(256, 255, np.uint8)
    try:
        found = read_tensor(SharedTensor("t", 1, offset, size, datatype, tuple(shape)), memory)
    except MalformedMessage:
        return
    assert found.nbytes <= 256 or datatype == "BYTES"


@pytest.mark.parametrize("mood", hostile_worker.OUTPUTS)
def test_worker_outputs_must_lie_where_requested(mood: str) -> None:
    """A hostile worker's descriptions: of other tensors, of other places, larger than they are, of no type."""
    good = SharedTensor("y", 1, 64, 16, "FP32", (1, 4))
    memory = np.zeros(128, np.uint8)
    assert set(read_outputs((good,), ("y",), SharedBuffer(1, 64, 128), memory)) == {"y"}
    changed = hostile_worker.OUTPUTS[mood]
    spoilt = () if changed is None else (msgspec.structs.replace(good, **changed),)
    for placed in (spoilt, (good, *spoilt), (good, good)):
        if placed != (good,):
            with pytest.raises(MalformedMessage):
                read_outputs(placed, ("y",), SharedBuffer(1, 64, 128), memory)


@pytest.mark.parametrize("mood", hostile_worker.SECONDS)
def test_worker_times_are_validated(mood: str) -> None:
    """Neither negative nor NaN, nor of slices that were not requested."""
    with pytest.raises(MalformedMessage):
        record_times(RunResult(1, (), hostile_worker.SECONDS[mood]), SliceRun(["s"], {}), Timing())


def test_memory_is_freed_with_its_last_view() -> None:
    """A view of a view holds it; after that the same memory is allocated again, and neighbours are joined."""
    room = TensorAllocator(MIN_SEGMENT_BYTES)
    first, second = room.allocate(1000), room.allocate(MIN_SEGMENT_BYTES // 2)
    view = first.memory[64:128].view(np.float32).reshape(4, 4)
    place = first.segment, first.offset
    del first
    with pytest.raises(Busy):
        room.allocate(MIN_SEGMENT_BYTES - 512)
    del view, second
    gc.collect()
    again = room.allocate(MIN_SEGMENT_BYTES)
    assert (again.segment, again.offset) == place


def test_unused_memory_is_released_for_other_sizes() -> None:
    """It does not pile up: unused memory is released when more is needed at once."""
    room = TensorAllocator(8 * MIN_SEGMENT_BYTES)
    for size in (1, 2, 3, 4, 3, 2, 1):
        room.allocate(size * MIN_SEGMENT_BYTES)
    assert room.held_bytes <= 8 * MIN_SEGMENT_BYTES


def test_shared_memory_cannot_be_shrunk_under_its_reader() -> None:
    """A worker that tries, or its model, gets an error; otherwise the agent would get a bus error."""
    room = TensorAllocator(2**21)
    with pytest.raises(PermissionError):
        os.ftruncate(room.allocate(100).segment.descriptor, 0)


# What goes in and comes out


def chain(*links: tuple[str, str]) -> tuple[Slice, ...]:
    return tuple(
        Slice(f"s{number}", "onnx", (f"l{number}",), (_spec(source),), (_spec(target),))
        for number, (source, target) in enumerate(links)
    )


def _spec(name: str) -> TensorSpec:
    return TensorSpec(name, "FP32", (1, 1000))


def test_run_outputs_only_what_others_need() -> None:
    """Outputs of the model, and what slices that do not run here read; what only neighbours read stays inside."""
    made = msgspec.structs.replace(
        manifest(Row(name="local")), slices=chain(("x", "a"), ("a", "b"), ("b", "c"), ("c", "y"))
    )
    assert dataflow_of(made, ["s0", "s1", "s2", "s3"]).returns == ("y",)
    half = dataflow_of(made, ["s0", "s1", "s2"])
    assert half.reads == ("x",) and half.returns == ("c",) and half.room_bytes == 4032
    assert dataflow_of(made, ["s3"]).reads == ("c",)


# A worker that does as it should


def test_large_tensors_are_not_copied_between_runs(tmp_path: Path) -> None:
    """One run's output lies where the next one reads it, and an answer that is kept is not overwritten."""
    with hosted(tmp_path, double()) as host:
        answers = [run(host, SMALL + number) for number in range(20)]
        assert all(np.array_equal(y, (SMALL + number) * 2) for number, y in enumerate(answers))


def test_worker_ends_with_the_last_reference_to_its_release(tmp_path: Path) -> None:
    """A replaced release keeps its process until its last request is done, and no longer."""
    with hosted(tmp_path, double()) as host:
        pid = host.status()["pid"]
        host.close()
        eventually("it has ended", lambda: not is_there(pid))
        with pytest.raises(InferenceFailed):
            run(host, SMALL, within_s=1)


def test_closed_host_releases_its_resources(tmp_path: Path) -> None:
    """Its descriptors and its memory are released at once, not by the garbage collector."""
    held = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        with hosted(tmp_path, double()) as host:
            run(host, SMALL)
        del host
        eventually("all is given back", lambda: len(os.listdir("/proc/self/fd")) <= held)
    finally:
        gc.enable()


def test_unreadable_model_is_refused_with_the_engines_error(tmp_path: Path) -> None:
    """As in the agent's own process."""
    from onnx import helper

    with pytest.raises(ModelRefused, match="Surprise"), hosted(tmp_path, [helper.make_node("Surprise", ["x"], ["y"])]):
        pass


def test_missing_input_is_a_failed_inference(tmp_path: Path) -> None:
    """And the worker keeps running."""
    with hosted(tmp_path, double()) as host:
        with pytest.raises(InferenceFailed, match="lacks its inputs"):
            host.run(SliceRun(["s"], {}), Timing())
        assert np.array_equal(run(host, SMALL), SMALL * 2) and host.status()["lost"] == 0
