"""What a worker process costs, and what tuning gains: the agent's way of running a model beside the plain ones.

A tiny model with a 600 KB input, in this process, and in a worker with the input copied and with it in shared memory
already; then a stack of convolutions cut into six slices, under each setup that tuning tries, beside the whole model in
one session. All taken in turn, medians of differences and ratios. No issue states a target for these.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from record import finish, make_parser

from edgesplit.plan import Link, Plan, Row
from edgesplit.release.manifest import Manifest, Slice, TensorSpec
from edgesplit.runtime import Timing
from edgesplit.runtime.onnx import OnnxRuntime
from edgesplit.runtime.options import EngineOptions
from edgesplit.shared_memory.segment import Segment
from edgesplit_agent.worker.host import SliceRun
from edgesplit_agent.worker.supervised_host import SupervisedHost
from edgesplit_agent.worker.watchdog_policy import Bounds

VALUES = 150 * 1024
LAYERS, CHANNELS, SIDE = 12, 32, 56
PARTS = 6
SETUPS = [
    EngineOptions(),
    EngineOptions(optimise="fast"),
    EngineOptions(optimise="fast", merge=True),
    EngineOptions(threads=2, optimise="fast", merge=True),
    EngineOptions(threads=4),
    EngineOptions(threads=4, spinning=True),
    EngineOptions(threads=4, optimise="fast", merge=True),
    EngineOptions(threads=4, optimise="fast", merge=True, spinning=True),
]


class UnsignedRelease:
    """Unsigned release of these slices in a folder: signatures are not checked by what is timed here."""

    digest = "b" * 64

    def __init__(self, folder: Path, graphs: Mapping[str, onnx.GraphProto]) -> None:
        self._folder = folder
        slices = tuple(
            Slice(name, "onnx", (name,), _specs(one.input), _specs(one.output)) for name, one in graphs.items()
        )
        for name, one in graphs.items():
            (folder / name).mkdir(parents=True)
            model = onnx.ModelProto(ir_version=8, opset_import=[helper.make_opsetid("", 17)], graph=one)
            (folder / name / "graph.onnx").write_bytes(model.SerializeToString())
        link = Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.01)
        self.plan = Plan(model="m@1", device_class="here", rows=(Row(name="local", device=tuple(graphs)),), link=link)
        self.manifest = Manifest(
            model="m@1", model_sha256="0" * 64, created="", input_spec=None, inputs=slices[0].inputs,
            outputs=slices[-1].outputs, slices=slices, plans={"here": self.plan},
        )  # fmt: skip

    def slice_folder(self, name: str) -> Path:
        """Folder of a slice's files."""
        return self._folder / name


def run_worker(shelf: UnsignedRelease, setup: EngineOptions) -> SupervisedHost:
    """Run the release in a worker process."""
    given: Any = shelf
    return SupervisedHost(given, shelf.plan, setup, Bounds(2**31))


def measure_hop(folder: Path, rounds: int) -> dict[str, Any]:
    """Microseconds of a run in this process and in a worker."""
    x, y = _value("x", (1, VALUES)), _value("y", (1,))
    graph = helper.make_graph([helper.make_node("ReduceMax", ["x"], ["y"], axes=[1], keepdims=0)], "g", [x], [y])
    shelf = UnsignedRelease(folder, {"s": graph})
    began = perf_counter()
    host = run_worker(shelf, EngineOptions())
    start_s = perf_counter() - began
    bare = OnnxRuntime().load(shelf.manifest.slices[0], folder / "s")
    own = np.random.default_rng(1).random((1, VALUES), np.float32)
    shared = np.frombuffer(Segment.create(VALUES * 4).memory, np.float32).reshape(1, VALUES)
    shared[:] = own
    ways: dict[str, Callable[[], object]] = {
        "in process": lambda: bare.run({"x": own}),
        "worker, copied": lambda: host.run(SliceRun(["s"], {"x": own}, perf_counter() + 10, 0.01), Timing()),
        "worker, shared": lambda: host.run(SliceRun(["s"], {"x": shared}, perf_counter() + 10, 0.01), Timing()),
    }
    times = time_in_turn(ways, rounds)
    status = _status(int(host.status()["pid"]))
    host.close()
    return {
        "microseconds": {name: round(1e6 * statistics.median(one), 1) for name, one in times.items()},
        "over_in_process": {
            name: round(1e6 * statistics.median([a - b for a, b in zip(one, times["in process"], strict=True)]), 1)
            for name, one in times.items()
        },
        "start_seconds": round(start_s, 3),
        "memory_kb": status,
    }


def measure_setups(folder: Path, rounds: int) -> dict[str, float]:
    """Time of six slices in a worker under each setup, relative to the whole model in exact mode on one thread of this
    process."""
    shelf, whole = make_stack(folder)
    x = {"t0": np.random.default_rng(2).random((1, CHANNELS, SIDE, SIDE), np.float32)}
    bare = OnnxRuntime().load(whole, folder / "whole")
    hosts = {str(setup): run_worker(shelf, setup) for setup in SETUPS}
    job = SliceRun(shelf.plan.rows[0].device, x, expected_s=1.0)
    ways: dict[str, Callable[[], object]] = {"whole": lambda: bare.run(x)}
    ways |= {name: (lambda host=host: host.run(job, Timing())) for name, host in hosts.items()}  # type: ignore[misc]
    times = time_in_turn(ways, rounds)
    for host in hosts.values():
        host.close()
    return {
        name: round(statistics.median([a / b for a, b in zip(one, times["whole"], strict=True)]), 3)
        for name, one in times.items()
    }


def make_stack(folder: Path) -> tuple[UnsignedRelease, Slice]:
    """Convolutions and ReLUs, as six slices of a release and as one whole model."""
    rng = np.random.default_rng(3)
    nodes, weights = [], []
    for layer in range(LAYERS):
        value = (rng.random((CHANNELS, CHANNELS, 3, 3), np.float32) - np.float32(0.5)) / np.float32(CHANNELS)
        weights.append(numpy_helper.from_array(value, f"w{layer}"))
        nodes.append(helper.make_node("Conv", [f"t{layer}", f"w{layer}"], [f"c{layer}"], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"c{layer}"], [f"t{layer + 1}"]))

    def part(first: int, last: int) -> onnx.GraphProto:
        shape = (1, CHANNELS, SIDE, SIDE)
        ends = [_value(f"t{first}", shape)], [_value(f"t{last}", shape)]
        return helper.make_graph(nodes[2 * first : 2 * last], "g", *ends, weights[first:last])

    step = LAYERS // PARTS
    shelf = UnsignedRelease(folder, {f"s{at:02}": part(at, at + step) for at in range(0, LAYERS, step)})
    whole = UnsignedRelease(folder, {"whole": part(0, LAYERS)})
    return shelf, whole.manifest.slices[0]


def time_in_turn(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, measured one after the other in every round; the first two rounds are not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, call in ways.items():
            start = perf_counter()
            call()
            if number >= 2:
                times[name].append(perf_counter() - start)
    return times


def _specs(values: Any) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(value.name, "FP32", tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim))
        for value in values
    )


def _value(name: str, shape: tuple[int, ...]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _status(pid: int) -> dict[str, int]:
    """Memory of the worker: its own, memory-mapped files, and its proportional share of both."""
    wanted = {"RssAnon": "status", "RssFile": "status", "Pss": "smaps_rollup"}
    figures = {}
    for name, file in wanted.items():
        lines = Path(f"/proc/{pid}/{file}").read_text(encoding="utf-8").splitlines()
        figures[name] = next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    return figures


def main() -> int:
    """Measure, print, write."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=300, help="of the hop; a tenth of that for the setups")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgesplit-worker-") as folder:
        results = {
            "hop, 600 KB input": measure_hop(Path(folder) / "hop", options.rounds),
            "six slices, times the whole's": measure_setups(Path(folder) / "stack", max(5, options.rounds // 10)),
        }
    for name, one in results.items():
        print(name)
        for key, value in one.items():
            print(f"  {key}: {value}")
    finish(results, [], options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
