"""Slices in memory: loaded on demand, once, within a budget; the least recently used goes, never one that runs."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from edgesplit.errors import Busy, ModelRefused
from edgesplit.runtime import Tensor, Tensors
from edgesplit_offload.models.slice_cache import SESSION_BYTES, LoadableSlice, SliceCache, SliceKey

MB = 10**6


class EchoRunner:
    """A loaded slice that returns its inputs."""

    def run(self, tensors: Tensors) -> dict[str, Tensor]:
        return dict(tensors)


class LoadCounter:
    """Makes slices and counts how often each is loaded."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()
        self.fail: str = ""

    def piece(self, name: str, megabytes: int = 10) -> LoadableSlice:
        def load() -> EchoRunner:
            self.of[name] += 1
            if name == self.fail:
                raise ModelRefused(f"{name} cannot be loaded")
            return EchoRunner()

        return LoadableSlice(SliceKey("release", name), megabytes * MB, load)


def room_for(pieces: int) -> int:
    """Bytes for so many pieces of 10 MB and a bit."""
    return pieces * LoadCounter().piece("one").bytes + MB


def use(memory: SliceCache, *pieces: LoadableSlice) -> None:
    with memory.borrow(pieces) as programs:
        assert len(programs) == len(pieces)


def test_the_least_recently_used_slice_is_evicted_and_loaded_again_on_demand() -> None:
    """Room for two: the third takes the place of the one that was not used for longest."""
    loads, memory = LoadCounter(), SliceCache(room_for(2))
    a, b, c = (loads.piece(name) for name in "abc")
    for one in (a, b, a, c, a, b):
        use(memory, one)
        assert memory.bytes <= room_for(2)
    assert loads.of == {"a": 1, "b": 2, "c": 1}


def test_a_slice_in_use_is_never_evicted() -> None:
    """While two run there is no room for a third, which is refused as busy; afterwards there is."""
    loads, memory = LoadCounter(), SliceCache(room_for(2))
    a, b, c = (loads.piece(name) for name in "abc")
    with memory.borrow([a, b]):
        with pytest.raises(Busy), memory.borrow([c]):
            pass
        assert memory.has_loaded([a, b])
        use(memory, a)
    use(memory, c)
    assert memory.has_loaded([a, c])


def test_a_model_larger_than_the_budget_is_refused_with_what_to_do() -> None:
    """However little of it is loaded already; and nothing is loaded or let go for it."""
    loads, memory = LoadCounter(), SliceCache(room_for(2))
    a, b, c = (loads.piece(name) for name in "abc")
    use(memory, a)
    with pytest.raises(ModelRefused, match="--memory"), memory.borrow([a, b, c]):
        pass
    assert (memory.has_loaded([a]), loads.of) == (True, {"a": 1})


def test_a_slice_that_fails_to_load_takes_no_memory() -> None:
    """It is tried anew the next time."""
    loads, memory = LoadCounter(), SliceCache(room_for(1))
    loads.fail = "a"
    for _ in range(2):
        with pytest.raises(ModelRefused, match="cannot be loaded"):
            use(memory, loads.piece("a"))
    assert memory.bytes == 0
    loads.fail = ""
    use(memory, loads.piece("a"))
    assert loads.of["a"] == 3


def test_slices_are_evicted_by_release_or_by_name() -> None:
    """Slices of other releases, and others of the same release, stay."""
    loads, memory = LoadCounter(), SliceCache()
    a, b = loads.piece("a"), loads.piece("b")
    use(memory, a, b)
    memory.evict("another")
    memory.evict("release", {a.key})
    assert (memory.has_loaded([a]), memory.has_loaded([b])) == (False, True)
    memory.evict("release")
    assert memory.bytes == 0


def test_a_slice_evicted_in_use_stayed_loaded() -> None:
    """Its next use loads it again; its memory counts until its last user has finished."""
    loads, memory = LoadCounter(), SliceCache(room_for(2))
    a = loads.piece("a")
    with memory.borrow([a]):
        memory.evict("release")
        assert not memory.has_loaded([a])
        assert memory.bytes == a.bytes
        use(memory, a)
        assert memory.bytes == 2 * a.bytes
    assert (memory.bytes, loads.of["a"]) == (a.bytes, 2)


def test_concurrent_requests_load_a_slice_once() -> None:
    """While one thread loads it the others wait."""
    loads, memory = LoadCounter(), SliceCache(room_for(1))
    threads = [threading.Thread(target=use, args=(memory, loads.piece("a"))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads.of["a"] == 1
    assert memory.bytes == int(10 * MB * 1.3) + SESSION_BYTES


def test_concurrent_loads_never_exceed_the_memory_budget() -> None:
    """Threads use random slices of six where two have room: each is served or refused as busy, nothing else."""
    loads, memory = LoadCounter(), SliceCache(room_for(2))
    pieces = [loads.piece(name) for name in "abcdef"]
    outcomes: Counter[str] = Counter()
    most = [0]

    def work(seed: int) -> None:
        for step in range(60):
            try:
                with memory.borrow([pieces[(seed * 7 + step * 5) % 6]]):
                    most[0] = max(most[0], memory.bytes)
                    outcomes["served"] += 1
            except Busy:
                outcomes["busy"] += 1

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] <= room_for(2)
    assert outcomes["served"] > 0
    assert sum(outcomes.values()) == 240
    memory.evict("release")
    assert memory.bytes == 0
