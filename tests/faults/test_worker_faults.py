"""What a model does to its worker process, and what applications see of it: an answer, or a typed error in time."""

from __future__ import annotations

import os
import platform
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from edgesplit.errors import DeadlineExceeded, EdgeError, InferenceFailed, ModelRefused
from edgesplit.offload_client.pool import OffloadClient
from edgesplit.process.confinement import unavailable
from edgesplit.runtime import Timing
from edgesplit.runtime.options import EngineOptions
from edgesplit_agent.serving.engine import Engine, Settings
from edgesplit_agent.worker import process
from edgesplit_agent.worker.child import OOM_SCORE_ADJUSTMENT
from edgesplit_agent.worker.host import WorkerLost
from edgesplit_agent.worker.supervised_host import SupervisedHost
from edgesplit_agent.worker.tensor_allocator import TensorAllocator
from edgesplit_agent.worker.watchdog_policy import Bounds
from support import hostile_worker
from support.agent_engine import CLASS, ScriptedCloud, eventually
from support.device_storage import Machine, Source, imaginary_disks
from support.workers import (
    AWAY,
    BOUNDS,
    DEADLY,
    ENDLESS,
    GREEDY,
    LOCAL,
    SMALL,
    OneSlice,
    deadly,
    double,
    endless,
    greedy,
    hosted,
    is_there,
    loaded,
    run,
    signal_worker,
)

SEED = int(os.environ.get("EDGESPLIT_SEED", "5"))
KILLS = int(os.environ.get("EDGESPLIT_WORKER_KILLS", "3"))
only_where_it_traps = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="no other processor traps the division that this model dies of"
)


def test_a_killed_worker_is_replaced_and_the_request_answered(tmp_path: Path) -> None:
    """Killed between requests: the next one is answered by another process, and the loss is counted and told."""
    told: list[Exception] = []
    with hosted(tmp_path, double(), on_lost=lambda release, error: told.append(error)) as host:
        assert np.array_equal(run(host, SMALL), SMALL * 2)
        first = host.status()["pid"]
        signal_worker(host, signal.SIGKILL)
        eventually("the loss is seen", lambda: host.status()["lost"] == 1)
        assert np.array_equal(run(host, SMALL), SMALL * 2)
        assert host.status()["pid"] != first and "SIGKILL" in host.status()["last_lost"]
        assert [type(one) for one in told] == [WorkerLost] and not is_there(first)


def test_a_worker_killed_at_any_moment_loses_and_duplicates_no_answer(tmp_path: Path) -> None:
    """Requests from two threads while the worker is killed again and again: each gets its own answer or a typed error,
    once, and afterwards everything is answered again."""
    moments = random.Random(SEED)
    print("seed", SEED)
    results: list[object] = []
    over = threading.Event()
    with loaded(tmp_path, double()) as release:
        engine = Engine(CLASS, None)
        engine.serve("one", release)

        def ask(first: int) -> None:
            for number in range(first, 10**9, 2):
                if over.is_set():
                    return
                x = np.full((1, 4), number % 1000, np.float32)
                try:
                    answer = engine.infer("one", {"x": x}, deadline_s=30).outputs["y"]
                    results.append(bool(np.array_equal(answer, x * 2)))
                except Exception as error:
                    results.append(error)

        askers = [threading.Thread(target=ask, args=(one,)) for one in range(2)]
        for one in askers:
            one.start()
        for lost in range(1, KILLS + 1):
            host = release.host
            many = len(results) + moments.randrange(1, 40)
            eventually("requests go on", lambda many=many: len(results) >= many, 60)  # type: ignore[misc]
            signal_worker(host, signal.SIGKILL)  # type: ignore[arg-type]
            eventually("the loss is seen", lambda host=host, lost=lost: host.status()["lost"] >= lost, 60)  # type: ignore[misc]
        over.set()
        for one in askers:
            one.join(60)
            assert not one.is_alive()
        assert engine.infer("one", {"x": SMALL}, deadline_s=60).outputs["y"].tolist() == (SMALL * 2).tolist()
        engine.stop()
    assert False not in results and True in results
    assert all(isinstance(one, EdgeError) for one in results if one is not True)


def test_a_stopped_worker_is_killed_and_the_request_answered(tmp_path: Path) -> None:
    """SIGSTOP: nothing ends by itself, and still the request is answered in its time."""
    with loaded(tmp_path, double()) as release:
        engine = Engine(CLASS, None)
        engine.serve("one", release)
        engine.infer("one", {"x": SMALL}, deadline_s=60)
        stopped = release.host.status()["pid"]
        os.kill(stopped, signal.SIGSTOP)
        assert np.array_equal(engine.infer("one", {"x": SMALL}, deadline_s=60).outputs["y"], SMALL * 2)
        assert "was stopped" in release.host.status()["last_lost"] and not is_there(stopped)
        engine.stop()


def test_a_model_that_never_returns_is_killed_and_the_next_request_answered(tmp_path: Path) -> None:
    """Its request fails with a typed error, twice tried; what others ask is answered."""
    with loaded(tmp_path, endless()) as release:
        engine = Engine(CLASS, None)
        engine.serve("one", release)
        assert np.array_equal(engine.infer("one", {"x": SMALL}, deadline_s=60).outputs["y"], SMALL)
        with pytest.raises(WorkerLost, match="exceeded its time limit"):
            engine.infer("one", {"x": ENDLESS}, deadline_s=60)
        eventually("both losses are seen", lambda: release.host.status()["lost"] == 2)
        assert np.array_equal(engine.infer("one", {"x": SMALL}, deadline_s=60).outputs["y"], SMALL)
        engine.stop()


def test_a_request_to_a_hung_model_fails_at_its_deadline(tmp_path: Path) -> None:
    """The deadline is nearer than the limit: a typed error at the deadline, and the process is killed all the same."""
    with hosted(tmp_path, endless(), bounds=Bounds(2**29, first_run_s=0.5)) as host:
        began = perf_counter()
        with pytest.raises(DeadlineExceeded):
            run(host, ENDLESS, within_s=0.2, expected_s=None)
        assert perf_counter() - began >= 0.2
        eventually("it is killed though nobody waits", lambda: host.status()["lost"] == 1)
        assert np.array_equal(run(host, SMALL), SMALL)


def test_a_worker_that_answers_late_stays_in_use(tmp_path: Path) -> None:
    """A worker that was late but did answer lives on, and the next request gets its own answer."""
    with hosted(
        tmp_path,
        double(),
    ) as host:
        pid = host.status()["pid"]
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded):
            run(host, SMALL, within_s=0.05, expected_s=None)
        os.kill(pid, signal.SIGCONT)
        assert np.array_equal(run(host, SMALL + 1), (SMALL + 1) * 2)
        assert host.status()["pid"] == pid and host.status()["lost"] == 0


def test_a_model_cannot_allocate_beyond_its_memory_limit(tmp_path: Path) -> None:
    """2 GB under a limit of half a GB: the kernel refuses it, the request fails, and the next is answered."""
    with hosted(tmp_path, greedy()) as host:
        assert np.array_equal(run(host, SMALL), SMALL)
        with pytest.raises(InferenceFailed):
            run(host, GREEDY)
        assert np.array_equal(run(host, SMALL), SMALL)


def test_a_worker_that_holds_more_than_its_limit_is_killed() -> None:
    """Whatever way it came by it: 1 MB is less than any process has."""
    worker = process.Worker("worker", Bounds(2**20), TensorAllocator(2**20))
    while worker.check():
        pass
    assert "its limit is 1 MB" in worker.end_reason and not is_there(worker.pid)


def test_workers_end_with_their_agent() -> None:
    """Killed without a chance to tidy up: the kernel ends them."""
    script = (
        "import sys; from edgesplit_agent.worker.process import Worker;"
        "from edgesplit_agent.worker.watchdog_policy import Bounds;"
        "from edgesplit_agent.worker.tensor_allocator import TensorAllocator;"
        "print(Worker('w', Bounds(2**30), TensorAllocator(2**20)).pid, flush=True); sys.stdin.read()"
    )
    agent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None and agent.stdin is not None
    worker = int(agent.stdout.readline())
    assert is_there(worker)
    agent.kill()
    agent.wait()
    agent.stdin.close()
    agent.stdout.close()
    eventually("the worker has ended", lambda: not is_there(worker))


def test_lost_workers_leave_no_descriptors_and_no_shared_memory(tmp_path: Path) -> None:
    """No descriptors and no shared memory, whatever many are lost."""
    with hosted(tmp_path, double()) as host:
        held: list[int] = []
        for lost in range(1, 4):
            assert np.array_equal(run(host, SMALL), SMALL * 2)
            held.append(len(os.listdir("/proc/self/fd")))
            signal_worker(host, signal.SIGKILL)
            eventually("the loss is seen", lambda lost=lost: host.status()["lost"] == lost)  # type: ignore[misc]
        assert max(held[1:]) <= held[0] + 1


@only_where_it_traps
def test_a_crashing_model_ends_only_its_own_process(tmp_path: Path) -> None:
    """SIGFPE inside a kernel: a typed error for who asked for it, answers for all others."""
    with hosted(tmp_path, deadly()) as host:
        assert np.array_equal(run(host, SMALL), SMALL)
        with pytest.raises(WorkerLost, match="SIGFPE"):
            run(host, DEADLY)
        assert np.array_equal(run(host, SMALL), SMALL)


def test_the_cloud_answers_while_the_worker_hangs_if_a_row_needs_no_device_slice(tmp_path: Path) -> None:
    """The worker never comes to an end: the row that needs nothing of this device answers in its place."""
    cloud = ScriptedCloud()
    cloud.steps = {"a": _Adds(), "b": _Nothing()}  # type: ignore[dict-item]
    cloud.start()
    with loaded(tmp_path, endless(), LOCAL, AWAY) as release:
        engine = Engine(CLASS, OffloadClient(cloud.server.url), settings=Settings(idle_probe_s=3600.0))
        engine.serve("one", release)
        release.run(["s"], {"x": SMALL})  # now it is known what a run takes
        release.learn(Timing(seconds={"s": 0.01}))
        answer = engine.infer("one", {"x": ENDLESS}, deadline_s=60)
        assert np.array_equal(answer.outputs["y"], ENDLESS + 1) and answer.report.row == "remote"
        eventually("the loss is seen", lambda: release.host.status()["lost"] == 1)
        engine.stop()
    cloud.stop()


class _Adds:
    def run(self, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": tensors["x"] + np.float32(1)}


class _Nothing:
    def run(self, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {}


def test_a_worker_could_reach_the_network_and_outlived_the_agent_when_memory_was_short(tmp_path: Path) -> None:
    """A model in a worker has no sockets to others, leaves no core file, writes no file, and goes before the agent."""
    with hosted(tmp_path, double()) as host:
        folder = Path(f"/proc/{host.status()['pid']}")
        status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line)
        limits = (folder / "limits").read_text()
        assert int((folder / "oom_score_adj").read_text()) >= OOM_SCORE_ADJUSTMENT
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == ("0" if any(item.what == "network" for item in unavailable()) else "2")
    assert re.search(r"Max core file size\s+0\s+0", limits) and re.search(r"Max file size\s+0\s+0", limits)


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Workers are hostile ones from now on."""
    monkeypatch.setattr(process, "MODULE", "hostile_worker")
    monkeypatch.setenv("PYTHONPATH", str(Path(hostile_worker.__file__).parent), prepend=os.pathsep)
    return monkeypatch


@pytest.mark.parametrize(
    "mood", [*hostile_worker.RAW, "parts without an end", "times of strangers", "answers another question", "nothing"]
)
def test_messages_of_a_hostile_worker_are_checked(hostile: pytest.MonkeyPatch, tmp_path: Path, mood: str) -> None:
    """A model that has taken over its process gets that process killed, and nothing more."""
    hostile.setenv("EDGESPLIT_HOSTILE", mood)
    with hosted(tmp_path, double()) as host:
        pid = host.status()["pid"]
        with pytest.raises(WorkerLost, match="violated the protocol"):
            run(host, SMALL)
        assert not is_there(pid)


def test_descriptors_sent_by_a_worker_are_closed(hostile: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Descriptors beside an answer do not fill the agent's table of them."""
    hostile.setenv("EDGESPLIT_HOSTILE", "sends files")
    with hosted(tmp_path, double()) as host:
        run(host, SMALL)
        held = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            assert np.array_equal(run(host, SMALL), SMALL * 2)
        assert len(os.listdir("/proc/self/fd")) <= held + 3  # of other tests' workers, one may just be starting


@pytest.mark.parametrize("mood", hostile_worker.LOADS)
def test_a_worker_that_is_lost_twice_while_it_loads_refuses_the_release(
    hostile: pytest.MonkeyPatch, tmp_path: Path, mood: str
) -> None:
    """It is never served, and the reason says how it ended."""
    hostile.setenv("EDGESPLIT_HOSTILE", mood)
    with pytest.raises(ModelRefused, match=r"SIGSEGV|violated the protocol"), hosted(tmp_path, double()):
        pass


def test_a_worker_that_is_lost_once_while_it_loads_is_tried_again(hostile: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What kills one process in its first moments may be the machine's doing: the release is served."""
    hostile.setenv("EDGESPLIT_HOSTILE", "dies once while it loads")
    hostile.setenv("EDGESPLIT_MARK", str(tmp_path / "mark"))
    with hosted(tmp_path, double()) as host:
        assert np.array_equal(run(host, SMALL), SMALL * 2)
        assert host.status()["starts"] == 2


def test_a_release_that_is_replaced_lives_until_its_last_request_is_done(tmp_path: Path) -> None:
    """A request that began with it is answered by it; then its process ends, whoever still remembers its errors."""
    with loaded(tmp_path / "1", double()) as old, loaded(tmp_path / "2", double()) as new:
        engine = Engine(CLASS, None)
        engine.serve("one", old)
        pid = old.host.status()["pid"]
        old.lease()
        engine.serve("one", new)
        assert np.array_equal(old.run(["s"], {"x": SMALL})["y"], SMALL * 2)
        old.end_lease()
        eventually("its process ends", lambda: not is_there(pid))
        assert np.array_equal(engine.infer("one", {"x": SMALL}, deadline_s=60).outputs["y"], SMALL * 2)
        engine.drop("one")
        eventually("the last one ends too", lambda: not is_there(new.host.status()["pid"] or pid))
        engine.stop()


# Activation


@pytest.fixture
def device() -> Iterator[Device]:
    with imaginary_disks() as folder:
        yield Device(folder)


class Device:
    """The agent's real parts on a folder, with a worker process for each release."""

    def __init__(self, folder: Path) -> None:
        self.source = Source(folder / "repository")
        (folder / "device").mkdir()
        self._folder = folder / "device"
        self.machine: Machine | None = None

    def boot(self) -> Machine:
        """Start it; it serves what was said last."""
        self.machine = Machine(self._folder, self.source, start=self._start)
        return self.machine.boot().settle()

    def _start(self, release: Any, plan: Any) -> SupervisedHost:
        assert self.machine is not None
        return SupervisedHost(release, plan, EngineOptions(), BOUNDS, on_lost=self.machine.updater.on_device_run)

    def serves(self, made: OneSlice) -> Machine:
        self.source.add(made)
        self.source.say(made)
        machine = self.boot()
        assert machine.running == made.digest and machine.failed_requests() == []
        return machine


@only_where_it_traps
def test_a_release_that_kills_its_worker_on_its_golden_input_never_serves(device: Device) -> None:
    """What ran goes on answering, in its own process; the new one is refused with its reason."""
    good, bad = OneSlice(1, double()), OneSlice(2, deadly(), golden=DEADLY)
    machine = device.serves(good)
    device.source.add(bad)
    machine.offer(device.source.say(bad)).settle()
    assert machine.running == good.digest and machine.failed_requests() == []
    assert machine.state.state == "failed" and "SIGFPE" in machine.state.detail
    machine.off()


def test_a_release_that_never_answers_its_golden_input_never_serves(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed within its limit; the update goes on with what ran."""
    good, bad = OneSlice(1, double()), OneSlice(2, endless(), golden=ENDLESS)
    machine = device.serves(good)
    monkeypatch.setattr(sys.modules[__name__], "BOUNDS", Bounds(2**29, first_run_s=0.3))
    device.source.add(bad)
    machine.offer(device.source.say(bad)).settle()
    assert machine.running == good.digest and machine.failed_requests() == []
    assert machine.state.state == "failed" and "exceeded its time limit" in machine.state.detail
    machine.off()


@only_where_it_traps
def test_a_release_on_trial_that_kills_its_workers_is_rolled_back(device: Device) -> None:
    """It passes its golden inputs and dies of what applications really ask: what ran before answers again."""
    good, bad = OneSlice(1, double()), OneSlice(2, deadly())
    machine = device.serves(good)
    device.source.add(bad)
    machine.offer(device.source.say(bad)).settle(lambda now: now.running == bad.digest)
    while machine.running == bad.digest and machine.failed_requests(x=DEADLY):
        machine.settle(lambda now: True)
        machine.step()
    assert machine.running == good.digest and machine.failed_requests() == []
    machine.settle()
    assert machine.state.state == "rolled back"
    machine.off()
