"""What the local endpoint adds: a real agent beside bare `session.run` in the application's own process.

One model of a few milliseconds with a 600 KB input, the same threads on both sides, calls of all ways taken in turn:
bare, `Client` with shared memory and over the Unix socket with plain bodies, both by lanes and without, over HTTP, and
`AsyncClient`. The agent is the real process, behind a real controller, with the model deployed to run on the device
alone; nothing is emulated.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from record import Target, finish, make_parser, percentile

from edgesplit import Answer, AsyncClient, Client
from edgesplit.errors import EdgeError
from edgesplit_cli.demo.processes import DemoProcess

INPUT = (1, 3, 224, 224)
"""Shape of the float32 input: 602,112 bytes."""
WIDTHS = (48, 96, 128)
ROUNDS = 300
WARM_UP = 20
TIMEOUT_S = 120.0
MODEL = "bench-local"
Image = npt.NDArray[np.float32]


def network() -> onnx.ModelProto:
    """Three strided convolutions, a mean and a classifier of 1,000 classes."""
    rng = np.random.default_rng(7)
    nodes, weights, last, channels = [], [], "image", 3
    for at, width in enumerate(WIDTHS):
        kernel = rng.normal(0, 0.1, (width, channels, 3, 3)).astype(np.float32)
        weights.append(numpy_helper.from_array(kernel, f"kernel{at}"))
        nodes.append(helper.make_node("Conv", [last, f"kernel{at}"], [f"c{at}"], strides=[2, 2], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"c{at}"], [f"r{at}"]))
        last, channels = f"r{at}", width
    weights.append(numpy_helper.from_array(rng.normal(0, 0.1, (channels, 1000)).astype(np.float32), "classes"))
    nodes.append(helper.make_node("GlobalAveragePool", [last], ["mean"]))
    nodes.append(helper.make_node("Flatten", ["mean"], ["flat"]))
    nodes.append(helper.make_node("MatMul", ["flat", "classes"], ["scores"]))
    ends = [("image", INPUT), ("scores", (1, 1000))]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in ends]
    graph = helper.make_graph(nodes, "local", [infos[0]], [infos[1]], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def bare(model: Path, threads: int) -> onnxruntime.InferenceSession:
    """An onnxruntime session as an application would open it, with all optimisations."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


class World:
    """A controller, and one agent that serves the model on the device alone."""

    def __init__(self, folder: Path, model: Path, threads: int) -> None:
        self._folder = folder
        self._model = model
        self._threads = threads
        self._data = folder / "cloud"
        self.socket = folder / "device" / "agent.sock"
        ports = ["--api-port", "0", "--mqtt-port", "0", "--offload-port", "0"]
        self._up = DemoProcess("up", [*self._edgectl, "up", *ports], folder / "up.log")
        self._agent: DemoProcess | None = None

    @property
    def _edgectl(self) -> list[str]:
        return [sys.executable, "-m", "edgesplit_cli.main", "--data", str(self._data)]

    def start(self) -> str:
        """Deploy the model to the agent; returns the URL of its local endpoint."""
        self._up.start()
        wait_until("the controller answers", lambda: self._edgectl_output("device", "list") is not None)
        self._edgectl_output("model", "push", str(self._model), "--name", MODEL)
        claim = self._folder / "claim.json"
        self._edgectl_output("device", "claim", "bench", "--profile", "raspberrypi4", "--out", str(claim))
        argv = [sys.executable, "-m", "edgesplit_agent.main", "run", "--data", str(self.socket.parent)]
        argv += ["--claim", str(claim), "--port", "0", "--threads", str(self._threads), "--health-seconds", "0.1"]
        self._agent = DemoProcess("agent", argv, self._folder / "agent.log")
        self._agent.start()
        wait_until("the device is online", lambda: "online" in (self._edgectl_output("device", "list") or ""))
        self._edgectl_output("deploy", MODEL, "--partition", "device", "--to", "bench", "--wait", "60")
        url = json.loads((self.socket.parent / "agent.json").read_text())["url"]
        with Client(url) as client:
            wait_until("the model is there", lambda: MODEL in client.models())
        return str(url)

    def _edgectl_output(self, *words: str) -> str | None:
        """Standard output of an `edgectl` command; None where it fails."""
        done = subprocess.run([*self._edgectl, *words], capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else None

    def stop(self) -> None:
        """Stop all processes."""
        for child in (self._agent, self._up):
            if child is not None:
                child.stop()


def wait_until(what: str, condition: Callable[[], object]) -> None:
    """Wait until `condition` returns true; raises SystemExit with `what` in its message after `TIMEOUT_S`."""
    end = monotonic() + TIMEOUT_S
    while True:
        try:
            if condition():
                return
        except (EdgeError, OSError, KeyError, ValueError):
            pass
        if monotonic() > end:
            raise SystemExit(f"never came: {what}")
        sleep(0.05)


CallPath = Callable[[Image], tuple[Image, float]]
"""A way of calling the model: its output, and the seconds that the runtime took by the agent's own report."""


@dataclass
class CallTimes:
    """Seconds of one way's calls."""

    whole: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)
    """Seconds that the runtime took, by call."""


def time_in_turn(ways: Mapping[str, CallPath], rounds: int) -> dict[str, CallTimes]:
    """Time all ways: every round calls each way once, and begins with another one each time."""
    rng = np.random.default_rng(11)
    names, taken = list(ways), {name: CallTimes() for name in ways}
    for turn in range(WARM_UP + rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            image = rng.random(INPUT, np.float32)
            began = perf_counter()
            _, running_s = ways[name](image)
            whole_s = perf_counter() - began
            if turn >= WARM_UP:
                taken[name].whole.append(whole_s)
                taken[name].running.append(running_s)
    return taken


def measure(url: str, socket: Path, model: Path, threads: int, rounds: int) -> dict[str, CallTimes]:
    """Times of all ways, after checking that their outputs agree."""
    session, loop = bare(model, threads), asyncio.new_event_loop()
    through_memory, through_http = Client(f"unix://{socket}"), Client(url)
    through_socket = Client(f"unix://{socket}", shared_memory=False)
    no_lane = Client(f"unix://{socket}", lane=False)
    no_lane_socket = Client(f"unix://{socket}", shared_memory=False, lane=False)
    asynchronous = AsyncClient(f"unix://{socket}")

    def with_run_time(answer: Answer) -> tuple[Image, float]:
        return answer.outputs["scores"], answer.report.device_s if answer.report is not None else 0.0

    def sync_path(client: Client) -> CallPath:
        return lambda image: with_run_time(client.infer(MODEL, {"image": image}, deadline_s=30.0))

    def async_path(image: Image) -> tuple[Image, float]:
        return with_run_time(loop.run_until_complete(asynchronous.infer(MODEL, {"image": image}, deadline_s=30.0)))

    def run_here(image: Image) -> tuple[Image, float]:
        began = perf_counter()
        scores = session.run(None, {"image": image})[0]
        return scores, perf_counter() - began

    ways: dict[str, CallPath] = {
        "bare": run_here,
        "shared memory": sync_path(through_memory),
        "unix socket": sync_path(through_socket),
        "shared memory, no lane": sync_path(no_lane),
        "unix socket, no lane": sync_path(no_lane_socket),
        "http": sync_path(through_http),
        "async, shared memory": async_path,
    }
    image = np.random.default_rng(3).random(INPUT, np.float32)
    for name, way in ways.items():
        np.testing.assert_allclose(way(image)[0], run_here(image)[0], rtol=1e-3, atol=1e-3, err_msg=name)
    try:
        return time_in_turn(ways, rounds)
    finally:
        for client in (through_memory, through_socket, no_lane, no_lane_socket, through_http):
            client.close()
        loop.run_until_complete(asynchronous.close())
        loop.close()


def row(name: str, taken: CallTimes, base: CallTimes) -> dict[str, Any]:
    """One way's figures in milliseconds. `over`: the median of its time above that of the bare session in the same
    round; `outside`: the median of its time above that of the runtime, in whichever process that ran."""
    over = statistics.median(mine - bare_s for mine, bare_s in zip(taken.whole, base.whole, strict=True))
    outside = statistics.median(whole - running for whole, running in zip(taken.whole, taken.running, strict=True))
    return {
        "way": name,
        "p50_ms": 1e3 * statistics.median(taken.whole),
        "p95_ms": 1e3 * percentile(taken.whole, 0.95),
        "over_ms": 1e3 * over,
        "over_share": over / statistics.median(base.whole),
        "outside_ms": 1e3 * outside,
    }


def main() -> None:
    """Measure, print, write."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=1, help="of the runtime, on both sides")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgesplit-local-", dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        model = folder / "local.onnx"
        onnx.save(network(), str(model))
        world = World(folder, model, options.threads)
        try:
            taken = measure(world.start(), world.socket, model, options.threads, options.rounds)
        finally:
            world.stop()
    rows = [row(way, calls, taken["bare"]) for way, calls in taken.items()]
    print(f"{'way':22} {'p50 ms':>8} {'p95 ms':>8} {'over ms':>8} {'over':>7} {'outside the run, ms':>20}")
    for row_ in rows:
        figures = f"{row_['p50_ms']:8.3f} {row_['p95_ms']:8.3f} {row_['over_ms']:8.3f} {row_['over_share']:7.1%}"
        print(f"{row_['way']:22} {figures} {row_['outside_ms']:20.3f}")
    by_name = {row["way"]: row for row in rows}
    allowed_ms = max(0.150, 0.03 * by_name["bare"]["p50_ms"])
    targets = [
        Target("Client by shared memory, over bare session.run (ms)", by_name["shared memory"]["over_ms"], allowed_ms),
        Target("Client by the Unix socket, over bare session.run (ms)", by_name["unix socket"]["over_ms"], 0.5),
    ]
    finish({"input_bytes": 4 * int(np.prod(INPUT)), "threads": options.threads, "ways": rows}, targets, options.json)


if __name__ == "__main__":
    main()
