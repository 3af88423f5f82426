"""What an engine does when its cloud goes, and what a stream gains by pipelining: the engine alone, slices that sleep.

An application asks ten times a second. The offload server, a process of its own, is killed, stopped (it accepts and is
silent), cut off by a link that lets nothing through, or hangs with its health page alive. Measured: how long after that
the breaker opens, the worst of all runs, with a fallback and without one. Then a stream: the device's part and the
cloud's take 20 ms each; frames one after the other beside eight under way. The slices' times are made up; no device is
claimed.
"""

from __future__ import annotations

import logging
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter, sleep

import numpy as np
from record import Target, finish, make_parser

from edgesplit.errors import EdgeError
from edgesplit.http1.server import Request, Response, Server
from edgesplit.link_emulation import ShapedLink
from edgesplit.offload_client.pool import OffloadClient
from edgesplit.oip import protocol as oip
from edgesplit.plan import Link, Plan, Row
from edgesplit.release.manifest import Manifest, Slice, TensorSpec
from edgesplit.runtime import Tensor, Tensors
from edgesplit_agent.releases.loaded_release import LoadedRelease, plan_for
from edgesplit_agent.serving.engine import Engine
from edgesplit_agent.worker.host import InProcess

CLASS = "none"
SPECS = {name: TensorSpec(name, "FP32", (1, 64)) for name in ("x", "h", "y")}
LOCAL = Row(name="local", device=("a", "b"), device_s=5.0)
CUT = Row(name="cut-1", device=("a",), remote=("b",), sends=("h",), receives=("y",), up_bytes=300)
FRAME = {"x": np.ones((1, 64), np.float32)}
GOOD = Link(up_bytes_per_s=2.5e6, down_bytes_per_s=2.5e6, rtt_s=0.004)
DEAD = Link(up_bytes_per_s=0.0, down_bytes_per_s=0.0, rtt_s=0.004)
PERIOD_S = 0.1
DEADLINE_S = 2.0
RUNS = 5
STAGE_S = 0.02
FRAMES = 60
TIMEOUT_S = 20.0
"""Seconds to wait for the circuit breaker to open."""


@dataclass
class Sleeper:
    """A slice that sleeps for `seconds` and passes its tensor on."""

    source: str
    target: str
    seconds: float = 0.001

    def run(self, tensors: Tensors) -> dict[str, Tensor]:
        sleep(self.seconds)
        return {self.target: tensors[self.source]}


def release(*rows: Row, seconds: float = 0.001) -> LoadedRelease:
    slices = (
        Slice("a", "onnx", ("a",), (SPECS["x"],), (SPECS["h"],)),
        Slice("b", "onnx", ("b",), (SPECS["h"],), (SPECS["y"],)),
    )
    plan = Plan(model="m@1", device_class=CLASS, rows=rows, link=GOOD, slice_s={"a": seconds, "b": seconds})
    manifest = Manifest(
        model="m@1", model_sha256="0" * 64, created="2026-01-01T00:00:00Z", input_spec=None,
        inputs=(SPECS["x"],), outputs=(SPECS["y"],), slices=slices, plans={CLASS: plan},
    )  # fmt: skip
    programs = {"a": Sleeper("x", "h", seconds), "b": Sleeper("h", "y", seconds)}
    return LoadedRelease("a" * 64, manifest, plan_for(manifest, CLASS), InProcess(programs))


def serve(seconds: float) -> None:
    """The offload server's process: prints its port on the first line; SIGUSR1 makes every later inference hang."""
    hanging = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: hanging.set())

    def answer(request: Request) -> Response:
        if not request.path.endswith("/infer"):
            return Response(200, {"edgesplit-seconds": "0"})
        if hanging.is_set():
            sleep(TIMEOUT_S)
        query = oip.decode_request(request.body, oip.header_length(request.headers))
        sleep(seconds)
        name = request.path.split("/")[3]
        body, length = oip.encode_response(oip.InferResponse(model=name, outputs={"y": query.inputs["h"]}, id=query.id))
        return Response(200, {oip.HEADER_LENGTH: str(length), "edgesplit-seconds": f"{seconds}"}, body)

    server = Server(answer)
    server.start()
    print(server.port, flush=True)
    while True:
        signal.pause()


@contextmanager
def cloud(seconds: float) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run the offload server's process; yields the process and its port, and kills it at the end."""
    with subprocess.Popen(
        [sys.executable, __file__, "--serve", str(seconds)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@contextmanager
def engine_behind(link: ShapedLink, loaded: LoadedRelease) -> Iterator[Engine]:
    engine = Engine(CLASS, OffloadClient(f"http://127.0.0.1:{link.port}"))
    engine.serve("m", loaded)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def ask(engine: Engine) -> str:
    """Run one frame through the engine; returns the name of the row that computed the result, or of the error's
    class."""
    try:
        return engine.infer("m", FRAME, deadline_s=DEADLINE_S).report.row
    except EdgeError as error:
        return type(error).__name__


Fault = Callable[["subprocess.Popen[str]", ShapedLink], None]
FAULTS: dict[str, Fault] = {
    "killed": lambda process, link: process.kill(),
    "stopped": lambda process, link: os.kill(process.pid, signal.SIGSTOP),
    "link at 0": lambda process, link: link.set_link(DEAD),
    "inference hangs": lambda process, link: os.kill(process.pid, signal.SIGUSR1),
}


def opens_after_s(fault: Fault, *rows: Row) -> float:
    """Seconds from the fault until the circuit breaker is open."""
    with cloud(0.001) as (process, port), ShapedLink("127.0.0.1", port, GOOD) as link:
        with engine_behind(link, release(*rows)) as engine, ThreadPoolExecutor(64) as application:
            while ask(engine) != CUT.name:
                sleep(PERIOD_S)
            requests = [application.submit(ask, engine) for _ in range(3)]
            [request.result() for request in requests]
            fault(process, link)
            began = perf_counter()
            while engine.breaker.is_allowing and perf_counter() - began < TIMEOUT_S:
                application.submit(ask, engine)
                until = perf_counter() + PERIOD_S
                while engine.breaker.is_allowing and perf_counter() < until:
                    sleep(0.001)
            took = perf_counter() - began
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
            process.kill()
        return took


def rate(in_flight: int) -> float:
    """Frames per second with so many in flight."""
    with (
        cloud(STAGE_S) as (_, port),
        ShapedLink("127.0.0.1", port, GOOD) as link,
        engine_behind(link, release(CUT, seconds=STAGE_S)) as engine,
        ThreadPoolExecutor(in_flight) as application,
    ):
        list(application.map(lambda _: ask(engine), range(2 * in_flight)))
        began = perf_counter()
        rows = list(application.map(lambda _: ask(engine), range(FRAMES)))
        assert set(rows) == {CUT.name}, rows
        return FRAMES / (perf_counter() - began)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--serve", type=float, help="be the offload server; used by this script itself")
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
    logging.disable(logging.WARNING)
    opened: dict[str, dict[str, float]] = {}
    for name, fault in FAULTS.items():
        for kind, rows in (("with a fallback", (LOCAL, CUT)), ("without one", (CUT,))):
            took = [opens_after_s(fault, *rows) for _ in range(RUNS)]
            opened[f"{name}, {kind}"] = {"median_s": round(statistics.median(took), 3), "worst_s": round(max(took), 3)}
            print(f"{name}, {kind}: breaker open after {opened[f'{name}, {kind}']}")
    one, eight = statistics.median(rate(1) for _ in range(3)), statistics.median(rate(8) for _ in range(3))
    print(f"frames/s: one after the other {one:.1f}, eight under way {eight:.1f}, slowest stage {1 / STAGE_S:.0f}")
    worst = max(figures["worst_s"] for figures in opened.values())
    stream = {"one_after_the_other_per_s": one, "eight_under_way_per_s": eight, "slowest_stage_per_s": 1 / STAGE_S}
    finish({"breaker": opened, "stream": stream}, [Target("breaker opens, worst, s", worst, 1.0)], options.json)


if __name__ == "__main__":
    main()
