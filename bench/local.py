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
from record import Target, arguments, finish, percentile

from edgesplit import Answer, AsyncClient, Client
from edgesplit.errors import EdgeError
from edgesplit_cli.demo.processes import Child

INPUT = (1, 3, 224, 224)
"""Of floats: 602,112 bytes."""
WIDTHS = (48, 96, 128)
ROUNDS = 300
WARM_UP = 20
PATIENCE_S = 120.0
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
    """The application's own session, as it would open it: all optimisations on."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


class World:
    """A controller, and one agent that serves the model by itself."""

    def __init__(self, folder: Path, model: Path, threads: int) -> None:
        self._folder = folder
        self._model = model
        self._threads = threads
        self._data = folder / "cloud"
        self.socket = folder / "device" / "agent.sock"
        ports = ["--api-port", "0", "--mqtt-port", "0", "--offload-port", "0"]
        self._up = Child("up", [*self._edgectl, "up", *ports], folder / "up.log")
        self._agent: Child | None = None

    @property
    def _edgectl(self) -> list[str]:
        return [sys.executable, "-m", "edgesplit_cli.main", "--data", str(self._data)]

    def start(self) -> str:
        """Bring the model to the agent; the URL of its local endpoint."""
        self._up.start()
        until("the controller answers", lambda: self._told("device", "list") is not None)
        self._told("model", "push", str(self._model), "--name", MODEL)
        claim = self._folder / "claim.json"
        self._told("device", "claim", "bench", "--profile", "raspberrypi4", "--out", str(claim))
        argv = [sys.executable, "-m", "edgesplit_agent.main", "run", "--data", str(self.socket.parent)]
        argv += ["--claim", str(claim), "--port", "0", "--threads", str(self._threads), "--health-seconds", "0.1"]
        self._agent = Child("agent", argv, self._folder / "agent.log")
        self._agent.start()
        until("the device is online", lambda: "online" in (self._told("device", "list") or ""))
        self._told("deploy", MODEL, "--partition", "device", "--to", "bench", "--wait", "60")
        url = json.loads((self.socket.parent / "agent.json").read_text())["url"]
        with Client(url) as client:
            until("the model is there", lambda: MODEL in client.models())
        return str(url)

    def _told(self, *words: str) -> str | None:
        """What `edgectl` prints; None where it fails."""
        done = subprocess.run([*self._edgectl, *words], capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else None

    def stop(self) -> None:
        """End all processes."""
        for child in (self._agent, self._up):
            if child is not None:
                child.stop()


def until(what: str, holds: Callable[[], object]) -> None:
    """Wait until `holds`; a benchmark that cannot begin says why."""
    end = monotonic() + PATIENCE_S
    while True:
        try:
            if holds():
                return
        except (EdgeError, OSError, KeyError, ValueError):
            pass
        if monotonic() > end:
            raise SystemExit(f"never came: {what}")
        sleep(0.05)


Way = Callable[[Image], tuple[Image, float]]
"""A call: its answer, and the seconds that the runtime took of it by the agent's own report."""


@dataclass
class Taken:
    """One way's calls, in seconds."""

    whole: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)
    """What the runtime took of each."""


def in_turn(ways: Mapping[str, Way], rounds: int) -> dict[str, Taken]:
    """Every round takes each way once, beginning with another one each time."""
    rng = np.random.default_rng(11)
    names, taken = list(ways), {name: Taken() for name in ways}
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


def measured(url: str, socket: Path, model: Path, threads: int, rounds: int) -> dict[str, Taken]:
    """All ways, once they agree."""
    session, loop = bare(model, threads), asyncio.new_event_loop()
    through_memory, through_http = Client(f"unix://{socket}"), Client(url)
    through_socket = Client(f"unix://{socket}", shared_memory=False)
    no_lane = Client(f"unix://{socket}", lane=False)
    no_lane_socket = Client(f"unix://{socket}", shared_memory=False, lane=False)
    asynchronous = AsyncClient(f"unix://{socket}")

    def told(answer: Answer) -> tuple[Image, float]:
        return answer.outputs["scores"], answer.report.device_s if answer.report is not None else 0.0

    def asked(client: Client) -> Way:
        return lambda image: told(client.infer(MODEL, {"image": image}, deadline_s=30.0))

    def asked_async(image: Image) -> tuple[Image, float]:
        return told(loop.run_until_complete(asynchronous.infer(MODEL, {"image": image}, deadline_s=30.0)))

    def run_here(image: Image) -> tuple[Image, float]:
        began = perf_counter()
        scores = session.run(None, {"image": image})[0]
        return scores, perf_counter() - began

    ways: dict[str, Way] = {
        "bare": run_here,
        "shared memory": asked(through_memory),
        "unix socket": asked(through_socket),
        "shared memory, no lane": asked(no_lane),
        "unix socket, no lane": asked(no_lane_socket),
        "http": asked(through_http),
        "async, shared memory": asked_async,
    }
    image = np.random.default_rng(3).random(INPUT, np.float32)
    for name, way in ways.items():
        np.testing.assert_allclose(way(image)[0], run_here(image)[0], rtol=1e-3, atol=1e-3, err_msg=name)
    try:
        return in_turn(ways, rounds)
    finally:
        for client in (through_memory, through_socket, no_lane, no_lane_socket, through_http):
            client.close()
        loop.run_until_complete(asynchronous.close())
        loop.close()


def row(name: str, taken: Taken, base: Taken) -> dict[str, Any]:
    """One way's figures, in milliseconds. `over`: the median of what it took more than bare in the same round;
    `outside`: the median of what it took more than the runtime did, wherever that ran."""
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
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=1, help="of the runtime, on both sides")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgesplit-local-", dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        model = folder / "local.onnx"
        onnx.save(network(), str(model))
        world = World(folder, model, options.threads)
        try:
            taken = measured(world.start(), world.socket, model, options.threads, options.rounds)
        finally:
            world.stop()
    rows = [row(way, calls, taken["bare"]) for way, calls in taken.items()]
    print(f"{'way':22} {'p50 ms':>8} {'p95 ms':>8} {'over ms':>8} {'over':>7} {'outside the run, ms':>20}")
    for one in rows:
        figures = f"{one['p50_ms']:8.3f} {one['p95_ms']:8.3f} {one['over_ms']:8.3f} {one['over_share']:7.1%}"
        print(f"{one['way']:22} {figures} {one['outside_ms']:20.3f}")
    by_name = {one["way"]: one for one in rows}
    allowed_ms = max(0.150, 0.03 * by_name["bare"]["p50_ms"])
    targets = [
        Target("Client by shared memory, over bare session.run (ms)", by_name["shared memory"]["over_ms"], allowed_ms),
        Target("Client by the Unix socket, over bare session.run (ms)", by_name["unix socket"]["over_ms"], 0.5),
    ]
    finish({"input_bytes": 4 * int(np.prod(INPUT)), "threads": options.threads, "ways": rows}, targets, options.json)


if __name__ == "__main__":
    main()
