"""Runs contenders' servers and the load client as processes: start, wait until ready, measure, kill as a group."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgesplit.process.lifecycle import die_with_starting_thread

from . import wires
from .contenders import Contender, Job, ServerCommand
from .environments import Environment, NotMeasured

LOAD = Path(__file__).parent / "load.py"
IN_PROCESS = Path(__file__).parent / "programs" / "in_process.py"
START_S = 90.0
"""Seconds within which a server must be ready."""
ANSWER_S = 90.0
"""Seconds within which a server must give its first correct response."""
CLIENTS = 4
"""Number of client processes, so that the client does not limit the rate."""
WARM_S = 0.25


@dataclass(frozen=True)
class Sample:
    """One measurement of one contender under one load."""

    requests_per_s: float
    median_s: float
    refused: int


class RunningServer:
    """One contender with one model: its server process, and the wires by which requests reach it."""

    def __init__(self, contender: Contender, job: Job, environment: Environment | None) -> None:
        self.name = contender.name
        prepared = contender.prepare(job, environment)
        self._client = str(environment.python) if environment else sys.executable
        self._log = job.folder / "server.log"
        self._kept = job.folder / "answer"
        self._expected = job.suffix.expected_output(job.model)
        self._process = _spawn(prepared, self._log)
        answer_bytes = 4 * (job.suffix.output_shape[0] + 1) * 2
        self._jobs = {
            wire: {
                "protocol": request.protocol, "host": "127.0.0.1", "port": port, "answer_bytes": answer_bytes,
                "request": str(wires.write(request, job.folder / f"request-{number}")),
            }
            for number, (wire, (port, request)) in enumerate(prepared.requests.items())
        }  # fmt: skip

    @property
    def wires(self) -> Sequence[str]:
        """Names of the wires."""
        return list(self._jobs)

    def wait(self) -> None:
        """Wait until the server responds correctly on every wire; NotMeasured where it does not."""
        deadline = time.monotonic() + START_S
        for job in self._jobs.values():
            once = {**job, "connections": 1, "seconds": 0.0, "warm_s": 0.0, "keep": str(self._kept)}
            while True:
                try:
                    run_clients([self._client, str(LOAD)], once, 1)
                    break
                except NotMeasured as error:
                    if self._process.poll() is not None or time.monotonic() > deadline:
                        raise NotMeasured(f"{self.name}: {error}; its log ends: {self._tail()}") from None
                    time.sleep(0.2)
            self._check()

    def _check(self) -> None:
        """Check the stored response against the suffix's result."""
        got = wires.parse_tensor(self._kept.read_bytes(), self._expected.size)
        if got is None or not np.allclose(got, self._expected.ravel(), rtol=1e-3, atol=1e-4):
            raise NotMeasured(f"{self.name}: its answer is not the model's")

    def load(self, wire: str, connections: int, seconds: float) -> Sample:
        """Measure with so many connections, each of which sends its next request as soon as it has a response."""
        job = {**self._jobs[wire], "connections": connections, "seconds": seconds, "warm_s": WARM_S}
        return run_clients([self._client, str(LOAD)], job, min(connections, CLIENTS))

    def stop(self) -> None:
        """Kill the server's process group and the processes that have left it (BentoML's workers do)."""
        family = _descendants(self._process.pid)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def _tail(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-300:].replace("\n", " | ")


def measure_in_process(job: Job, threads: int, seconds: float, *, batch: int = 1, exact: bool = False) -> Sample:
    """Measure `session.run` on so many threads, without any server; `exact`: operator by operator, as slices run that
    must give the whole model's bits."""
    sample = job.folder / "sample.npy"
    if not sample.exists():
        np.save(sample, job.suffix.sample())
    what = {"model": str(job.model), "sample": str(sample), "batch": batch, "exact": exact}
    what |= {"connections": threads, "seconds": seconds, "warm_s": WARM_S}
    return run_clients([sys.executable, str(IN_PROCESS)], what, 1)


def run_clients(argv: Sequence[str], job: Mapping[str, Any], processes: int) -> Sample:
    """Run the client in so many processes that begin together; NotMeasured where one of them reports a problem."""
    shares = [len(range(number, job["connections"], processes)) for number in range(processes)]
    pipe = subprocess.PIPE
    clients = [subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in shares]
    killed_at = time.monotonic() + ANSWER_S
    try:
        for client, share in zip(clients, shares, strict=True):
            _send_line(client, json.dumps({**job, "connections": share}))
        for client in clients:
            if client.stdout is None or client.stdout.readline() != "ready\n":
                raise NotMeasured(_last_line(client))
        for client in clients:
            _send_line(client, "go")
        reports = []
        for client in clients:
            out, _ = client.communicate(timeout=max(1.0, killed_at - time.monotonic()))
            reports.append(json.loads(out or '{"problem": "the client ended early"}'))
    except (subprocess.TimeoutExpired, BrokenPipeError) as error:
        raise NotMeasured(f"the client got no answer: {type(error).__name__}") from error
    finally:
        for client in clients:
            client.kill()
            client.communicate()
    if problem := next((report["problem"] for report in reports if report["problem"]), ""):
        raise NotMeasured(problem[:300])
    latencies = sorted(latency_s for part in reports for latency_s in part["latencies_s"])
    median = latencies[len(latencies) // 2] if latencies else float("nan")
    return Sample(
        len(latencies) / job["seconds"] if job["seconds"] else 0.0, median, sum(p["refused"] for p in reports)
    )


def _send_line(client: subprocess.Popen[str], line: str) -> None:
    assert client.stdin is not None
    client.stdin.write(line + "\n")
    client.stdin.flush()


def _last_line(client: subprocess.Popen[str]) -> str:
    _, errors = client.communicate(timeout=10)
    return (errors.strip().splitlines() or ["the client ended early"])[-1][:300]


def _descendants(pid: int) -> list[int]:
    """Process ids of the descendants of a process."""
    descendants: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, listed.read_text(encoding="ascii").split()):
                descendants += [child, *_descendants(child)]
    return descendants


def _spawn(prepared: ServerCommand, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            prepared.argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            env={**os.environ, **prepared.environment}, cwd=prepared.folder,
            preexec_fn=die_with_starting_thread(signal.SIGKILL),
        )  # fmt: skip
