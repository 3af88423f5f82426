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
from record import arguments, finish

from edgesplit.plan import Link, Plan, Row
from edgesplit.release.manifest import Manifest, Slice, TensorSpec
from edgesplit.runtime import Timing
from edgesplit.runtime.onnx import OnnxRuntime
from edgesplit.runtime.options import Setup
from edgesplit.shared_memory.segment import Segment
from edgesplit_agent.worker.host import Job
from edgesplit_agent.worker.supervised_host import Hosted
from edgesplit_agent.worker.watchdog_policy import Bounds

VALUES = 150 * 1024
LAYERS, CHANNELS, SIDE = 12, 32, 56
PARTS = 6
SETUPS = [
    Setup(),
    Setup(optimise="fast"),
    Setup(optimise="fast", merge=True),
    Setup(threads=2, optimise="fast", merge=True),
    Setup(threads=4),
    Setup(threads=4, spinning=True),
    Setup(threads=4, optimise="fast", merge=True),
    Setup(threads=4, optimise="fast", merge=True, spinning=True),
]


class Shelf:
    """A release of these slices, which nobody signed: what is timed here does not look."""

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
        """Where its files are."""
        return self._folder / name


def hosted(shelf: Shelf, setup: Setup) -> Hosted:
    """The release in a worker."""
    given: Any = shelf
    return Hosted(given, shelf.plan, setup, Bounds(2**31))


def hop(folder: Path, rounds: int) -> dict[str, Any]:
    """Microseconds that a run takes in this process, and in a worker."""
    x, y = _value("x", (1, VALUES)), _value("y", (1,))
    graph = helper.make_graph([helper.make_node("ReduceMax", ["x"], ["y"], axes=[1], keepdims=0)], "g", [x], [y])
    shelf = Shelf(folder, {"s": graph})
    began = perf_counter()
    host = hosted(shelf, Setup())
    start_s = perf_counter() - began
    bare = OnnxRuntime().load(shelf.manifest.slices[0], folder / "s")
    own = np.random.default_rng(1).random((1, VALUES), np.float32)
    shared = np.frombuffer(Segment.made(VALUES * 4).memory, np.float32).reshape(1, VALUES)
    shared[:] = own
    ways: dict[str, Callable[[], object]] = {
        "in process": lambda: bare.run({"x": own}),
        "worker, copied": lambda: host.run(Job(["s"], {"x": own}, perf_counter() + 10, 0.01), Timing()),
        "worker, shared": lambda: host.run(Job(["s"], {"x": shared}, perf_counter() + 10, 0.01), Timing()),
    }
    times = in_turn(ways, rounds)
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


def setups(folder: Path, rounds: int) -> dict[str, float]:
    """What six slices in a worker take under each setup, as a part of the whole model exact on one thread in here."""
    shelf, whole = stack(folder)
    x = {"t0": np.random.default_rng(2).random((1, CHANNELS, SIDE, SIDE), np.float32)}
    bare = OnnxRuntime().load(whole, folder / "whole")
    hosts = {str(setup): hosted(shelf, setup) for setup in SETUPS}
    job = Job(shelf.plan.rows[0].device, x, expected_s=1.0)
    ways: dict[str, Callable[[], object]] = {"whole": lambda: bare.run(x)}
    ways |= {name: (lambda host=host: host.run(job, Timing())) for name, host in hosts.items()}  # type: ignore[misc]
    times = in_turn(ways, rounds)
    for host in hosts.values():
        host.close()
    return {
        name: round(statistics.median([a / b for a, b in zip(one, times["whole"], strict=True)]), 3)
        for name, one in times.items()
    }


def stack(folder: Path) -> tuple[Shelf, Slice]:
    """Convolutions and ReLUs, in six slices of a release, and whole."""
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
    shelf = Shelf(folder, {f"s{at:02}": part(at, at + step) for at in range(0, LAYERS, step)})
    whole = Shelf(folder, {"whole": part(0, LAYERS)})
    return shelf, whole.manifest.slices[0]


def in_turn(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, taken one after the other in every round; two rounds before do not count."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, way in ways.items():
            start = perf_counter()
            way()
            if number >= 2:
                times[name].append(perf_counter() - start)
    return times


def _specs(values: Any) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(one.name, "FP32", tuple(dim.dim_value for dim in one.type.tensor_type.shape.dim)) for one in values
    )


def _value(name: str, shape: tuple[int, ...]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _status(pid: int) -> dict[str, int]:
    """The worker's own memory, what of files it maps, and its share of all that."""
    wanted = {"RssAnon": "status", "RssFile": "status", "Pss": "smaps_rollup"}
    found = {}
    for name, file in wanted.items():
        lines = Path(f"/proc/{pid}/{file}").read_text(encoding="utf-8").splitlines()
        found[name] = next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    return found


def main() -> int:
    """Measure, print, write."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=300, help="of the hop; a tenth of that for the setups")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgesplit-worker-") as folder:
        results = {
            "hop, 600 KB input": hop(Path(folder) / "hop", options.rounds),
            "six slices, times the whole's": setups(Path(folder) / "stack", max(5, options.rounds // 10)),
        }
    for name, one in results.items():
        print(name)
        for key, value in one.items():
            print(f"  {key}: {value}")
    finish(results, [], options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
