"""A simulated fleet at a real controller with PostgreSQL and mosquitto on this machine: how it scales.

Devices are simulated (the agent's decisions, no runtime), their MQTT sessions, certificates and mutual TLS are real;
they run in processes beside the controller and take most of the machine. Connects them all, weighs the controller while
they only send telemetry, deploys a release to all of them, kills the broker, and asks the API all the while.
"""

from __future__ import annotations

import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from record import Target, finish, make_parser

from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import EdgeError
from edgesplit.process.lifecycle import die_with_starting_thread, raise_open_file_limit
from edgesplit_agent.control.mqtt_uplink import TelemetrySchedule
from edgesplit_cli.demo.scenario import INPUT_SPEC
from edgesplit_simulation.real_controller import RealFleet
from support.postgres import Postgres

ROOT = Path(__file__).parents[1]
DIGITS = ROOT / "examples" / "digits" / "digits.onnx"
TELEMETRY_S = {1_000: 10.0, 10_000: 60.0}
"""Telemetry interval in seconds by number of devices, as `edgectl up --telemetry-every` advises."""
SETTLE_S = 10.0
STEADY_S = 60.0
TIMEOUT_S = 900.0
"""Seconds after which a phase counts as failed."""
BACK_S = 60.0
PER_MINUTE = 1_000.0
TICK = os.sysconf("SC_CLK_TCK")
PAGES = {"api: health": "/v1/health", "api: one device": "/v1/devices/fleet-00001", "api: rollouts": "/v1/rollouts"}


# ---- the devices, in processes of their own -------------------------------------------------------------------------


def worker(data: Path, folder: Path, first: int, devices: int, rhythm_s: float, pipe: Any) -> None:
    """Process that holds so many simulated devices; reports at intervals how many are connected and how many run the
    requested release."""
    raise_open_file_limit()
    fleet = RealFleet(
        folder, ControllerClient.connect(data), devices=devices, first=first, prefix="fleet", seed=first,
        telemetry_schedule=TelemetrySchedule(rhythm_s, rhythm_s), group="fleet",
    )  # fmt: skip
    release, started = "", False
    marked: dict[str, int] = {}
    logging.disable(logging.ERROR)
    with fleet:
        fleet.enrol()
        pipe.send({"enrolled": devices})
        while True:
            while pipe.poll(0.0 if started else None):
                command, value = pipe.recv()
                if command == "stop":
                    return
                if command == "start":
                    fleet.start()
                    started = True
                elif command == "mark":
                    marked = {name: device.session_number for name, device in fleet.devices.items()}
                else:
                    release = value
            fleet.hub.run(0.25)
            again = sum(
                device.is_connected and device.session_number > marked.get(device.name, 0)
                for device in fleet.devices.values()
            )
            pipe.send({"connected": fleet.connected, "running": fleet.count_serving("digits", release), "again": again})


@dataclass
class Workers:
    """The processes that hold the simulated devices."""

    pipes: list[Any]
    counts: list[dict[str, int]] = field(default_factory=list)
    """The latest counts that each process reported."""

    def send(self, command: str, value: str = "") -> None:
        for pipe in self.pipes:
            pipe.send((command, value))

    def total(self, kind: str) -> int:
        """Sum of the latest count of that kind over all processes."""
        for number, pipe in enumerate(self.pipes):
            while pipe.poll():
                self.counts[number].update(pipe.recv())
        return sum(counts.get(kind, 0) for counts in self.counts)

    def wait_until(self, kind: str, count: int, timeout_s: float = TIMEOUT_S) -> float | None:
        """Seconds until the count of that kind reaches `count`; None where that does not happen within `timeout_s`."""
        began = time.monotonic()
        while self.total(kind) < count:
            if time.monotonic() - began > timeout_s:
                return None
            time.sleep(0.05)
        return time.monotonic() - began


@contextmanager
def fleet_of(data: Path, folder: Path, devices: int, processes: int, rhythm_s: float) -> Iterator[Workers]:
    """Start the devices, divided among processes; stops them at the end."""
    spawn, pipes, running = get_context("spawn"), [], []
    share = -(-devices // processes)
    for first in range(1, devices + 1, share):
        ours, theirs = spawn.Pipe()
        part = min(share, devices - first + 1)
        process = spawn.Process(target=worker, args=(data, folder, first, part, rhythm_s, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        running.append(process)
    try:
        yield Workers(pipes, [{} for _ in pipes])
    finally:
        for process in running:
            process.kill()


# ---- what is looked at ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """Processor time and memory of some processes at one moment."""

    cpu_s: float
    rss_bytes: int

    @classmethod
    def of(cls, pids: Sequence[int]) -> Usage:
        cpu, rss = 0.0, 0
        for pid in pids:
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue
            cpu += (int(fields[11]) + int(fields[12])) / TICK
            rss += 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return cls(cpu, rss)


def process_tree(pid: int) -> list[int]:
    """Process ids of a process and all its descendants."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    pids = [pid]
    for descendant in pids:
        pids += [child for child, parent in parents.items() if parent == descendant]
    return pids


def named(pids: Sequence[int], word: str) -> list[int]:
    """Those of the process ids whose program has that name."""
    matching = []
    for pid in pids:
        try:
            if word in Path(f"/proc/{pid}/comm").read_text():
                matching.append(pid)
        except OSError:
            continue
    return matching


class ApiLoad:
    """A thread that requests the API's pages in turn and records how long each takes, by the phase that was running."""

    def __init__(self, api: ControllerClient) -> None:
        self.meanwhile = "idle"
        self.took: dict[tuple[str, str], list[float]] = {}
        self.failed = 0
        self._api = api
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)

    def p95_s(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for (page, meanwhile), seconds in sorted(self.took.items()):
            ranked = sorted(seconds)
            found.setdefault(page, {})[meanwhile] = ranked[min(len(ranked) - 1, int(0.95 * len(ranked)))]
        return found

    def _ask(self) -> None:
        pages = {**PAGES, "dashboard: the fleet's page": self._fleet_page()}
        while not self._stop.is_set():
            for page, path in pages.items():
                began, meanwhile = time.perf_counter(), self.meanwhile
                try:
                    self._api.get(path)
                    self.took.setdefault((page, meanwhile), []).append(time.perf_counter() - began)
                except EdgeError:
                    self.failed += 1
                self._stop.wait(0.05)

    def _fleet_page(self) -> str:
        """Path of the data behind the dashboard's first page where this controller has it, else of the device list."""
        for path in ("/v1/fleet", "/v1/devices?limit=100", "/v1/devices"):
            try:
                self._api.get(path)
            except EdgeError:
                continue
            return path
        return "/v1/devices"


# ---- the run --------------------------------------------------------------------------------------------------------


@contextmanager
def controller(folder: Path, database: str, rhythm_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """Run `edgectl up` on a database, with the broker that it starts itself."""
    data = folder / "cloud"
    ports = ["--api-port", "0", "--mqtt-port", "0", "--offload-port", "0", "--no-offload"]
    ports += ["--telemetry-every", f"{rhythm_s:g}s"]
    command = [sys.executable, "-m", "edgesplit_cli.main", "--data", str(data), "up", *ports]
    with (folder / "up.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--database", database],
            stdout=log,
            stderr=log,
            preexec_fn=die_with_starting_thread(signal.SIGTERM),
        )
        try:
            wait_for(lambda: bool(ControllerClient.connect(data).get("/v1/health")), "the controller answers")
            yield process
        finally:
            process.terminate()
            process.wait(60)


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        try:
            if condition():
                return
        except EdgeError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"never came: {what}")


def push(data: Path) -> None:
    words = ["model", "push", str(DIGITS), "--name", "digits", "--input", INPUT_SPEC]
    subprocess.run(
        [sys.executable, "-m", "edgesplit_cli.main", "--data", str(data), *words], check=True, capture_output=True
    )


def measure(devices: int, processes: int, folder: Path, database: str) -> dict[str, Any]:
    """One complete run of all phases."""
    rhythm_s = next((seconds for most, seconds in TELEMETRY_S.items() if devices <= most), max(TELEMETRY_S.values()))
    results: dict[str, Any] = {"devices": devices, "simulated": True, "telemetry_every_s": rhythm_s}
    data = folder / "cloud"
    with (
        controller(folder, database, rhythm_s) as up,
        fleet_of(data, folder / "fleet", devices, processes, rhythm_s) as fleet,
    ):
        push(data)
        results["enrol_s"] = fleet.wait_until("enrolled", devices)
        say(f"enrolled in {results['enrol_s']} s")
        brokers = named(process_tree(up.pid), "mosquitto")
        others = [pid for pid in process_tree(up.pid) if pid not in brokers]
        empty = Usage.of(others)
        asking = ApiLoad(ControllerClient.connect(data))
        try:
            results |= phases(fleet, devices, data, others, brokers, empty, asking)
        finally:
            asking.stop()
        results["p95_s"] = asking.p95_s()
        results["calls_that_failed"] = asking.failed
    return results


def phases(
    fleet: Workers, devices: int, data: Path, others: list[int], brokers: list[int], empty: Usage, asking: ApiLoad
) -> dict[str, Any]:
    """Connect all devices, measure them at rest, deploy a release, restart the broker."""
    found: dict[str, Any] = {}
    asking.meanwhile = "connecting"
    fleet.send("start")
    found["connect_s"] = fleet.wait_until("connected", devices)
    found["connected"] = fleet.total("connected")
    say(f"connected {found['connected']} in {found['connect_s']} s")
    asking.meanwhile = "telemetry"
    time.sleep(SETTLE_S)
    before = {"controller": Usage.of(others), "broker": Usage.of(brokers)}
    time.sleep(STEADY_S)
    after = {"controller": Usage.of(others), "broker": Usage.of(brokers)}
    for group in before:
        found[f"{group}_cpu_cores"] = (after[group].cpu_s - before[group].cpu_s) / STEADY_S
        found[f"{group}_cpu_ms_per_device_and_minute"] = found[f"{group}_cpu_cores"] * 60e3 / devices
    found["controller_bytes_per_device"] = (after["controller"].rss_bytes - empty.rss_bytes) / devices
    found["broker_bytes_per_device"] = after["broker"].rss_bytes / devices
    say(f"controller {found['controller_cpu_cores']:.2f} cores, broker {found['broker_cpu_cores']:.2f}")
    asking.meanwhile = "deploying"
    began = time.monotonic()
    release = ControllerClient.connect(data).post("/v1/deployments", {"model": "digits", "to": ["group=fleet"]})[
        "release"
    ]
    found["plan_cut_sign_and_tell_s"] = time.monotonic() - began
    began, weighed = time.monotonic(), Usage.of(others)
    fleet.send("release", release)
    took = fleet.wait_until("running", devices)
    found["reach_s"] = None if took is None else time.monotonic() - began
    found["reached"] = fleet.total("running")
    found["reached_per_minute"] = None if found["reach_s"] is None else devices / found["reach_s"] * 60.0
    found["controller_cpu_ms_per_device_reached"] = 1e3 * (Usage.of(others).cpu_s - weighed.cpu_s) / devices
    say(f"reached {found['reached']} in {found['reach_s']} s")
    asking.meanwhile = "broker restarted"
    weighed = Usage.of(others)
    fleet.send("mark")
    time.sleep(1.0)
    began = time.monotonic()
    for pid in brokers:
        os.kill(pid, signal.SIGKILL)
    found["back_s"] = fleet.wait_until("again", devices)
    took = max(1e-3, time.monotonic() - began)
    found["controller_cpu_cores_while_they_come_back"] = (Usage.of(others).cpu_s - weighed.cpu_s) / took
    say(f"all back in {found['back_s']} s")
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=max(1, min(8, (os.cpu_count() or 2) - 1)))
    parser.add_argument("--repeats", type=int, default=1)
    chosen = parser.parse_args()
    raise_open_file_limit()
    postgres, runs = Postgres(), []
    try:
        for _ in range(chosen.repeats):
            with tempfile.TemporaryDirectory(prefix="edgesplit-fleet-") as folder:
                runs.append(measure(chosen.devices, chosen.processes, Path(folder), postgres.database()))
    finally:
        postgres.stop()

    def median(name: str) -> float | None:
        values = [one[name] for one in runs if one.get(name) is not None]
        return statistics.median(values) if len(values) == len(runs) else None

    targets = [
        Target("10,000 simulated devices connected", median("connected"), 10_000, at_least=True),
        Target("a deployment reaches devices per minute", median("reached_per_minute"), PER_MINUTE, at_least=True),
        Target("broker restarted: seconds until all are back", median("back_s"), BACK_S),
    ]
    finish({"runs": runs}, targets, chosen.json)


if __name__ == "__main__":
    main()
