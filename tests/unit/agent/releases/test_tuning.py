"""Tuning of engine options: the decision over measured times, the cache of results, and slices merged into one
session."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest

from edgesplit.crypto.slice_encryption import SliceInMemory
from edgesplit.errors import InferenceFailed
from edgesplit.plan import Plan, Row
from edgesplit.release.manifest import Manifest, Slice
from edgesplit.runtime import Timing, run_slices
from edgesplit.runtime.loader import load_slices
from edgesplit.runtime.onnx import OnnxRuntime
from edgesplit.runtime.onnx_merge import CannotMerge, merge_graphs, mergeable_runs
from edgesplit.runtime.options import EngineOptions
from edgesplit_agent.releases.loaded_release import LoadedRelease, is_close
from edgesplit_agent.releases.tuner import Tuner
from edgesplit_agent.releases.tuning import (
    LEAST_RUNS,
    RUNS,
    TuningLimits,
    TuningResults,
    best_setup,
    environment_key,
    median_run_s,
)
from edgesplit_agent.worker.host import SliceRun
from edgesplit_agent.worker.session_merging import merges_of
from edgesplit_agent.worker.supervised_host import SupervisedHost
from edgesplit_agent.worker.watchdog_policy import Bounds
from edgesplit_partitioner.slicing import CutSlice, atoms, cut_slices
from support import onnx_models as tiny
from support.agent_engine import CLASS, LINK

FIRST = EngineOptions(threads=4)


def never() -> bool:
    return False


def measured(times: Mapping[str, float | None], otherwise: float | None = 1.0) -> Any:
    return lambda setup: times.get(str(setup), otherwise)


@pytest.mark.parametrize(
    ("times", "allowed", "best"),
    [
        ({}, TuningLimits(4), "4 threads, exact"),
        ({"1 thread, exact": 0.97, "4 threads, fast": 0.96}, TuningLimits(4), "4 threads, exact"),
        ({"1 thread, exact": 0.8}, TuningLimits(4), "1 thread, exact"),
        ({"1 thread, exact": 0.8, "2 threads, exact": 0.79}, TuningLimits(4), "1 thread, exact"),
        ({"1 thread, exact": 0.8, "2 threads, exact": 0.7}, TuningLimits(4), "2 threads, exact"),
        ({"1 thread, exact": 0.5}, TuningLimits(4, threads=4), "4 threads, exact"),
        ({"4 threads, fast": 0.7}, TuningLimits(4), "4 threads, fast"),
        ({"4 threads, fast": 0.7}, TuningLimits(4, optimise="exact"), "4 threads, exact"),
        ({"4 threads, fast": 0.7, "4 threads, fast, merged": 0.5}, TuningLimits(4), "4 threads, fast, merged"),
        ({"4 threads, fast": None, "4 threads, fast, merged": None}, TuningLimits(4), "4 threads, exact"),
        ({"4 threads, spinning, exact": 0.92}, TuningLimits(4), "4 threads, exact"),
        ({"4 threads, spinning, exact": 0.8}, TuningLimits(4), "4 threads, spinning, exact"),
        ({"4 threads, spinning, exact": 0.8}, TuningLimits(4, alone=False), "4 threads, exact"),
    ],
)
def test_options_faster_by_a_margin_are_selected(
    times: dict[str, float | None], allowed: TuningLimits, best: str
) -> None:
    """Noise changes nothing, the operator's choices hold, and spinning must gain more and be the only release."""
    assert str(best_setup(FIRST, allowed, measured(times), never)[0]) == best


def test_measuring_ends_with_its_budget() -> None:
    """The best options measured until then are used."""
    asked: list[EngineOptions] = []

    def measure(setup: EngineOptions) -> float:
        asked.append(setup)
        return 1.0 / len(asked)

    best, times = best_setup(FIRST, TuningLimits(8), measure, lambda: len(asked) >= 2)
    assert best == asked[1] and len(times) == 2


def test_options_stay_if_the_first_measurement_fails() -> None:
    """Initial options that fail are an error of the release, not of the tuning."""
    assert best_setup(FIRST, TuningLimits(8), lambda setup: None, never) == (FIRST, {})


def test_measurement_is_three_to_nine_runs_after_a_warm_up() -> None:
    """At least three, at most nine, and no more once they have taken long."""
    runs: list[int] = []
    clock = iter(range(10_000))
    assert median_run_s(lambda: runs.append(1), lambda: float(next(clock))) == 1.0
    assert len(runs) == 1 + LEAST_RUNS
    runs.clear()
    assert median_run_s(lambda: runs.append(1), lambda: 0.0) == 0.0
    assert len(runs) == 1 + RUNS


def test_tuned_options_are_cached_per_machine_and_engine(tmp_path: Path) -> None:
    """After a restart too; not for another version of the engine, nor against what the operator has set now."""
    memory = TuningResults(tmp_path / "tuning.json", "here")
    best = EngineOptions(threads=2, optimise="fast", merge=True)
    memory.store("a" * 64, best, {"1 thread, exact": 0.2})
    again = TuningResults(tmp_path / "tuning.json", "here")
    assert again.setup_of("a" * 64, TuningLimits(4)) == best
    assert again.setup_of("b" * 64, TuningLimits(4)) is None
    assert again.setup_of("a" * 64, TuningLimits(4, optimise="exact")) is None
    assert again.setup_of("a" * 64, TuningLimits(4, threads=3)) is None
    assert TuningResults(tmp_path / "tuning.json", "another engine").setup_of("a" * 64, TuningLimits(4)) is None
    assert "onnxruntime" in environment_key()


def test_options_tuned_under_load_are_tuned_again_when_idle(tmp_path: Path) -> None:
    """Times measured beside other load select too few threads; while the machine is busy nothing is measured twice."""
    memory, allowed = TuningResults(tmp_path / "tuning.json"), TuningLimits(4)
    assert memory.is_due("release", allowed, 3.0)
    memory.store("release", EngineOptions(), {}, 3.0)
    assert not memory.is_due("release", allowed, 2.0)
    assert memory.is_due("release", allowed, 0.1)
    memory.store("release", EngineOptions(threads=2), {}, 0.1)
    assert not memory.is_due("release", allowed, 0.1)
    assert memory.setup_of("release", allowed) == EngineOptions(threads=2)


@pytest.mark.parametrize(
    "spoilt", [b"", b"{", b'{"a": {"where": "here", "setup": {"threads": 100000}, "seconds": {}}}']
)
def test_corrupt_tuning_cache_is_ignored(tmp_path: Path, spoilt: bytes) -> None:
    """And is written anew; one that grows drops its oldest entries."""
    (tmp_path / "tuning.json").write_bytes(spoilt)
    memory = TuningResults(tmp_path / "tuning.json", "here")
    assert memory.setup_of("a", TuningLimits(4)) is None
    for number in range(40):
        memory.store(str(number), FIRST, {})
    assert memory.setup_of("39", TuningLimits(4)) == FIRST and memory.setup_of("0", TuningLimits(4)) is None


# Slices as one session


def cut(name: str, folder: Path) -> tuple[Any, list[CutSlice], Manifest]:
    """A model of the partitioner's tests, cut after each layer, in folders as a release has them."""
    model = tiny.prepared(name)
    layers = [layer.name for layer in model.graph.layers]
    prefixes = [frozenset(layers[:count]) for count in range(1, len(layers))]
    slices = cut_slices(model, model.graph, atoms(model.graph, prefixes), None)
    tiny.write_slices(folder, slices)
    return model, slices, tiny.manifest_of(model, slices)


@pytest.mark.parametrize("name", ["chain", "captured", "quantised", "state"])
def test_merged_slices_give_the_chains_answer(name: str, tmp_path: Path) -> None:
    """All slices of a model as one session, from the slices' own files: bit-identical to the whole where nothing is
    fused."""
    model, slices, manifest = cut(name, tmp_path)
    feeds = tiny.feeds_of(model)
    whole = tiny.run_whole(model.raw, feeds)
    outputs = [spec.name for spec in manifest.outputs]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    parts = [(part.slice, tmp_path / part.slice.name) for part in slices]
    got = OnnxRuntime(optimise="exact").load_merged(parts, outputs).run(feeds)
    assert tiny.same_bits(got, whole)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_merged_encrypted_slices_stay_in_memory(tmp_path: Path) -> None:
    """Merged from memory files, without a folder."""
    model, slices, manifest = cut("chain", tmp_path)
    feeds = tiny.feeds_of(model)
    parts: list[tuple[Slice, SliceInMemory]] = []
    for part in slices:
        memory = SliceInMemory(part.slice.name)
        for file, data in part.files.items():
            memory.add(file, [bytes(data)])
        parts.append((part.slice, memory))
    outputs = [spec.name for spec in manifest.outputs]
    got = OnnxRuntime(optimise="fast").load_merged(parts, outputs).run(feeds)
    assert all(is_close(got[name], value) for name, value in tiny.run_whole(model.raw, feeds).items())
    for _, memory in parts:
        memory.close()


@pytest.mark.parametrize("spoilt", [b"", b"\x00", b"\xff" * 40])
def test_malformed_slices_are_not_merged(spoilt: bytes) -> None:
    """Such bytes are left to the engine's own reader, slice by slice."""
    good = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], []), ir_version=8).SerializeToString()
    with pytest.raises(CannotMerge):
        merge_graphs({"a": good, "b": spoilt}, [])


def test_merged_runs_are_the_longest_of_two_or_more_slices() -> None:
    """A slice of another engine ends a run."""
    assert mergeable_runs("abXcdeYf", "abcdef") == [("a", "b"), ("c", "d", "e")]
    assert mergeable_runs("", "a") == [] and mergeable_runs("a", "a") == []


class Shelf:
    """What `open_release` would return, of a model cut after each layer."""

    digest = "e" * 64

    def __init__(self, folder: Path, name: str = "chain") -> None:
        self.folder = folder
        self.model, self.slices, made = cut(name, folder)
        names = tuple(part.slice.name for part in self.slices)
        half = len(names) // 2
        sends = tuple(spec.name for spec in made.slices[half].inputs)
        rows = (
            Row(name="local", device=names),
            Row(name="cut-1", device=names[:half], remote=names[half:], sends=sends),
        )
        self.plan = Plan(model=made.model, device_class=CLASS, rows=rows, link=LINK)
        self.manifest = msgspec.structs.replace(made, plans={CLASS: self.plan})

    def slice_folder(self, name: str) -> Path:
        return self.folder / name


def test_each_rows_runs_are_merged_within_the_memory_bound(tmp_path: Path) -> None:
    """The local row first; the merged session also outputs what leaves the device and what the remaining slices
    need."""
    shelf = Shelf(tmp_path)
    found = merges_of(shelf.manifest, shelf.plan, 10**9)
    assert [choice.order for choice in found] == [row.device for row in shelf.plan.rows]
    assert found[0].outputs == tuple(spec.name for spec in shelf.manifest.outputs)
    assert set(shelf.plan.rows[1].sends) <= set(found[1].outputs)
    assert merges_of(shelf.manifest, shelf.plan, 0) == ()


def test_merged_release_gives_equal_answers_and_per_slice_times(tmp_path: Path) -> None:
    """In a worker: every row's tensors, each slice's share of the time; a part of a row runs slice by slice."""
    shelf: Any = Shelf(tmp_path)
    feeds = tiny.feeds_of(shelf.model)
    programs = load_slices(shelf.manifest, shelf.slice_folder, OnnxRuntime())
    host = SupervisedHost(shelf, shelf.plan, EngineOptions(optimise="fast", merge=True), Bounds(2**29))
    assert host.merged == 2
    for row in shelf.plan.rows:
        timing = Timing()
        got = host.run(SliceRun(row.device, feeds), timing)
        want = run_slices(programs, row.device, feeds)
        names = row.sends or [spec.name for spec in shelf.manifest.outputs]
        assert all(is_close(got[name], want[name]) for name in names)
        assert set(timing.seconds) == set(row.device)
    first = shelf.plan.rows[0].device[0]
    assert host.run(SliceRun([first], feeds), Timing()).keys() > feeds.keys()
    host.close()


def test_release_is_tuned_once(tmp_path: Path) -> None:
    """By real measurements, whatever they give on this machine: the answers stay right, the next start reuses the
    result, and the plan has its seconds."""
    shelf: Any = Shelf(tmp_path)
    feeds = tiny.feeds_of(shelf.model)
    whole = tiny.run_whole(shelf.model.raw, feeds)
    tuner = Tuner(TuningResults(tmp_path / "tuning.json"), TuningLimits(2), load=lambda: 0.0)
    host = SupervisedHost(shelf, shelf.plan, EngineOptions(), Bounds(2**29))
    planned = dict.fromkeys(shelf.plan.rows[0].device, 1.0)
    release = LoadedRelease(shelf.digest, shelf.manifest, msgspec.structs.replace(shelf.plan, slice_s=planned), host)
    checks: list[None] = []

    def check() -> None:
        checks.append(None)
        got = release.run(shelf.plan.rows[0].device, feeds)
        if not all(is_close(got[name], value) for name, value in whole.items()):
            raise InferenceFailed("other outputs")

    tuner.tune(release, feeds, check)
    check()
    tried = len(checks)
    assert tried > 3 and host.status()["lost"] == 0
    tuner.tune(release, feeds, check)
    assert len(checks) == tried
    assert tuner.setup_of(shelf.digest, EngineOptions()) == host.setup
    assert tuner.setup_of("f" * 64, EngineOptions(threads=3)) == EngineOptions(threads=3)

    tuner.price(release)
    assert release.plan.basis == "measured" and release.plan.slice_s.keys() == planned.keys()
    assert all(0.0 < seconds < 1.0 for seconds in release.plan.slice_s.values())
    host.close()


def test_options_that_fail_golden_inputs_are_not_selected(tmp_path: Path) -> None:
    """Every candidate fails its golden inputs: the initial options stay, and the release is served."""
    shelf: Any = Shelf(tmp_path)
    feeds = tiny.feeds_of(shelf.model)
    host = SupervisedHost(shelf, shelf.plan, EngineOptions(), Bounds(2**29))
    release = LoadedRelease(shelf.digest, shelf.manifest, shelf.plan, host)

    def check() -> None:
        if host.setup != EngineOptions():
            raise InferenceFailed("other outputs")

    Tuner(TuningResults(tmp_path / "tuning.json"), TuningLimits(2)).tune(release, feeds, check)
    assert host.setup == EngineOptions()
    assert release.run(shelf.plan.rows[0].device, feeds)
    host.close()


def test_spinning_ends_with_a_second_release(tmp_path: Path) -> None:
    """And a release that does not spin is left alone."""
    shelf: Any = Shelf(tmp_path)
    host = SupervisedHost(shelf, shelf.plan, EngineOptions(threads=2, spinning=True), Bounds(2**29))
    release = LoadedRelease(shelf.digest, shelf.manifest, shelf.plan, host)
    Tuner.stop_spinning(release)
    assert host.setup == EngineOptions(threads=2)
    Tuner.stop_spinning(release)
    assert release.run(shelf.plan.rows[0].device, tiny.feeds_of(shelf.model))
    host.close()
