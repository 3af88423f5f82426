"""The table of the Neurosurgeon paper made anew by our planner, and what its 44 of 48 measured: plans from predictions.

First part: the paper's eight networks (`paper_networks`) on a TK1-like CPU and GPU, over Wi-Fi, LTE and 3G, for latency
and for energy: the best cut of each, compared with trying every cut on the same costs, and swept over server load and
bandwidth. Second part: models that this machine can time, on a device that is this machine throttled: plans made from
predicted costs, scored on measured ones.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from html import escape
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import msgspec
from paper_networks import NETWORKS, Network, PaperLayer
from record import Target, finish, make_parser
from trained import Skipped, TrainedModel, left_out, load_models, scale_to_whole

from edgesplit.device_profile import DeviceProfile, load_profile
from edgesplit.input_spec import INPUT_LAYER
from edgesplit.plan import Conditions, Link, latency_s
from edgesplit_partitioner import Costs, load_costs, plan
from edgesplit_partitioner.calibration.calibrate import calibrate
from edgesplit_partitioner.costs.build import build_costs
from edgesplit_partitioner.costs.predict import predict_intervals
from edgesplit_partitioner.formulation.radio_energy import RADIOS, Radio
from edgesplit_partitioner.profiling.layers import TensorMeasurements, measure_input, measure_layers, measure_samples

ROOT = Path(__file__).parent.parent
MEGABIT = 125_000.0
LINKS = {
    # JointDNN (arXiv 1801.08618), table 3, Mbit/s up and down. No round trip: the paper charges bytes over bandwidth.
    "wifi": Link(up_bytes_per_s=18.88 * MEGABIT, down_bytes_per_s=54.97 * MEGABIT, rtt_s=0.0, name="wifi"),
    "lte": Link(up_bytes_per_s=5.85 * MEGABIT, down_bytes_per_s=13.76 * MEGABIT, rtt_s=0.0, name="lte"),
    "3g": Link(up_bytes_per_s=1.1 * MEGABIT, down_bytes_per_s=2.0275 * MEGABIT, rtt_s=0.0, name="3g"),
}
ROUND_TRIPS_S = {"wifi": 0.005, "lte": 0.06, "3g": 0.15}
"""Round-trip times in seconds, assumed. The second part scores plans with them, as requests incur them, and once more
without, as the paper does."""
ROUNDS = 4
SLOWDOWNS = (4.0, 8.0, 16.0, 32.0)
"""Slow-down factors of the throttled device relative to this machine, which is the server."""
OPTIMAL, WORST = 47 / 48, 0.02
EXACT = 1e-9


@dataclass(frozen=True, slots=True)
class Processor:
    """A processor's rates, by which a layer's time is bounded."""

    flops_per_s: float
    bytes_per_s: float
    overhead_s: float
    """Overhead per layer in seconds, assumed."""

    def seconds(self, layer: PaperLayer) -> float:
        """Roofline: the slower of arithmetic and memory, plus the overhead."""
        return max(layer.flops / self.flops_per_s, layer.moved / self.bytes_per_s) + self.overhead_s


# Jetson TK1: four Cortex-A15 at 2.3 GHz (73.6 GFLOP/s with NEON), 192 Kepler cores at 852 MHz (327 GFLOP/s): NVIDIA's
# Tegra K1 reference. Assumed: 16 % of both for arithmetic, and 0.9 and 4.2 GB/s for reading weights, with which
# AlexNet's largest layer takes 45 % of the network's time on the device, as the paper says. TK1-like, not a TK1.
DEVICES = {
    "CPU": Processor(flops_per_s=0.16 * 73.6e9, bytes_per_s=0.9e9, overhead_s=2e-5),
    "GPU": Processor(flops_per_s=0.16 * 327e9, bytes_per_s=4.2e9, overhead_s=1e-4),
}
# Tesla K40: 4.29 TFLOP/s and 288 GB/s (NVIDIA, board specification); a quarter and a half of them assumed.
SERVER = Processor(flops_per_s=0.25 * 4.29e12, bytes_per_s=0.5 * 288e9, overhead_s=5e-5)
IDLE_WATTS = 1.6  # whole board, nothing to do: elinux.org, Jetson TK1 Power
BUSY_WATTS = {"CPU": 7.0, "GPU": 7.0}  # assumed: between 3 W (light use) and 17 W (flat out), NVIDIA's developer forum


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the table."""

    network: str
    processor: str
    link: str
    objective: str
    cut: str
    """`input` is all-remote; the last layer's name is all-local; else the last layer on the device."""
    kind: str
    """`remote`, `local` or `split`."""
    value: float
    """Seconds, or joules of the device."""
    tried: float
    """The least value of all cuts, by trying every cut."""
    gain: float
    """Ratio by which the plan is better than the better of all-local and all-remote."""
    over_remote: float
    """Ratio by which the plan is better than sending everything, which the paper compares with."""

    @property
    def agrees(self) -> bool:
        """Whether the plan equals the best of all cuts."""
        return abs(self.value - self.tried) <= EXACT * abs(self.tried)


def costs_of(net: Network, processor: str) -> Costs:
    """Costs of a network on one of the device's processors and on the server."""
    device, tensor, rows = DEVICES[processor], "input", []
    for layer in net.layers:
        seconds = {"device": device.seconds(layer), "cloud": SERVER.seconds(layer)}
        rows.append(
            {
                "name": layer.name,
                "reads": [tensor],
                "writes": {f"{layer.name}:0": {"bytes": layer.bytes}},
                "seconds": seconds,
                "joules": {"device": BUSY_WATTS[processor] * seconds["device"]},
                "weight_bytes": layer.weight_bytes,
            }
        )
        tensor = f"{layer.name}:0"
    given = {"model": net.name, "tiers": ["device", "cloud"], "inputs": {"input": {"bytes": net.input_bytes}}}
    return load_costs(given | {"outputs": [tensor], "layers": rows, "idle_watts": {"device": IDLE_WATTS}})


def cells() -> Iterator[Cell]:
    """Results for every network, processor and link: latency, energy of the transfer alone, energy with promotion and
    tail."""
    for make in NETWORKS:
        net = make()
        for processor in DEVICES:
            costs = costs_of(net, processor)
            for link in LINKS:
                yield cell(net, costs, processor, link, "latency", None)
                radio = RADIOS[link]
                short = msgspec.structs.replace(radio, promotion_s=0.0, tail_s=0.0)
                yield cell(net, costs, processor, link, "energy", short)
                yield cell(net, costs, processor, link, "energy with tail", radio)


def cell(net: Network, costs: Costs, processor: str, link: str, objective: str, radio: Radio | None) -> Cell:
    """The planner's plan, compared with every cut."""
    given = msgspec.structs.asdict(LINKS[link]) | {"radio": radio}
    result = plan(costs, {"device-cloud": given}, objective=objective.split()[0])
    tried = [reference_value(net, processor, LINKS[link], radio, place) for place in range(len(net.layers) + 1)]
    here = len(result.cut["device"])
    cut = "input" if here == 0 else net.layers[here - 1].name
    kind = "remote" if here == 0 else "local" if here == len(net.layers) else "split"
    gain = min(tried[0], tried[-1]) / result.value
    value, least = result.value, min(tried)
    return Cell(net.name, processor, link, objective, cut, kind, value, least, gain, tried[0] / value)


def reference_value(net: Network, processor: str, link: Link, radio: Radio | None, device_layers: int) -> float:
    """Seconds, or joules where there is a radio, with the first `place` layers on the device, computed from the
    definition without the planner."""
    device_s = sum(DEVICES[processor].seconds(layer) for layer in net.layers[:device_layers])
    joules = BUSY_WATTS[processor] * device_s
    if device_layers == len(net.layers):
        return device_s if radio is None else joules
    sent = net.input_bytes if device_layers == 0 else net.layers[device_layers - 1].bytes
    up_s, down_s = sent / link.up_bytes_per_s, net.layers[-1].bytes / link.down_bytes_per_s
    remote_s = sum(SERVER.seconds(layer) for layer in net.layers[device_layers:])
    if radio is None:
        return device_s + up_s + remote_s + down_s
    moving_w = {
        "up": radio.up_mw_per_mbps * link.up_bytes_per_s / MEGABIT + radio.base_mw,
        "down": radio.down_mw_per_mbps * link.down_bytes_per_s / MEGABIT + radio.base_mw,
    }
    joules += IDLE_WATTS * (up_s + remote_s + down_s)
    joules += (up_s * moving_w["up"] + down_s * moving_w["down"]) / 1000
    return joules + (radio.promotion_s * radio.promotion_mw + radio.tail_s * radio.tail_mw) / 1000


def sweeps() -> dict[str, int]:
    """Violations of monotony: a busier server must not make a plan faster or more remote, more bandwidth must not make
    it slower."""
    breaks = {"server load": 0, "bandwidth": 0}
    for make in NETWORKS:
        net = make()
        for processor in DEVICES:
            costs = costs_of(net, processor)
            loaded = [_plan_at(_loaded(costs, 1.3**step), LINKS["wifi"]) for step in range(25)]
            breaks["server load"] += sum(
                later[0] < before[0] * (1 - EXACT) or later[1] < before[1]
                for before, later in itertools.pairwise(loaded)
            )
            rates = [msgspec.structs.replace(LINKS["wifi"], up_bytes_per_s=1e4 * 1.4**step) for step in range(25)]
            wider = [_plan_at(costs, link) for link in rates]
            breaks["bandwidth"] += sum(
                later[0] > before[0] * (1 + EXACT) or later[2] < before[2]
                for before, later in itertools.pairwise(wider)
            )
    return breaks


def _plan_at(costs: Costs, link: Link) -> tuple[float, int, int]:
    """Seconds, layers on the device, and bytes sent up, of the plan for this link."""
    result = plan(costs, {"device-cloud": link})
    return result.seconds, len(result.cut["device"]), result.row.up_bytes


def _loaded(costs: Costs, factor: float) -> Costs:
    layers = tuple(
        msgspec.structs.replace(layer, seconds={**layer.seconds, "cloud": layer.seconds["cloud"] * factor})
        for layer in costs.layers
    )
    return msgspec.structs.replace(costs, layers=layers)


@dataclass(frozen=True, slots=True)
class Score:
    """A plan made from predicted costs, scored on measured ones."""

    model: str
    slower: float
    link: str
    cut: str
    best: str
    round_trip: bool
    off: float
    """Latency above that of the best cut, relative to it."""


def scores(profile: DeviceProfile, count: int, runs: int) -> Iterator[Score | Skipped]:
    """Scores of every model that can be timed here, on each speed and link."""
    for model in load_models(count):
        if isinstance(model, Skipped):
            yield model
            continue
        measured, intervals = _measured_layers(model, runs), predict_intervals(model.graph, profile)
        predicted = {name: prediction.seconds for name, prediction in intervals.items()}
        print(
            f"{model.name} ({model.given}): layers predicted {sum(predicted.values()):.6f} s, "
            f"measured {sum(measured.values()):.6f} s"
        )
        sizes = measure_samples(model.model, model.graph, spec=model.spec, samples=model.samples)
        for slower in SLOWDOWNS:
            made, true = (_throttled(model, profile, sizes, took, slower) for took in (predicted, measured))
            yield from (_score(made, true, slower, link, trip) for link in LINKS for trip in (True, False))


def _measured_layers(model: TrainedModel, runs: int) -> dict[str, float]:
    """Seconds of each layer: the median of the least disturbed round, since others use the machine too, scaled so that
    they sum to the time of the whole model without a profiler."""
    rounds = [measure_layers(model.model, model.model.graph, runs=runs, inputs=_tensors(model)) for _ in range(ROUNDS)]
    best = min(rounds, key=lambda times: sum(took.median_s for took in times.values()))
    seconds = scale_to_whole(model, {name: took.median_s for name, took in best.items()}, runs, ROUNDS)
    if model.spec is not None:
        frames = [frame for frame in model.samples if isinstance(frame, bytes)]
        seconds[INPUT_LAYER] = min(measure_input(model.spec, frames).median_s for _ in range(ROUNDS))
    return seconds


def _tensors(model: TrainedModel) -> Mapping[str, Any] | None:
    first = model.samples[0]
    return first if isinstance(first, Mapping) else None


def _throttled(
    model: TrainedModel, profile: DeviceProfile, sizes: TensorMeasurements, seconds: Mapping[str, float], slower: float
) -> Costs:
    """Costs with this machine as the server, and `slower` times slower as the device."""
    return build_costs(
        f"{model.name} ({model.given})",
        model.graph,
        profile=profile,
        cloud_s=seconds,
        device_s={name: took * slower for name, took in seconds.items()},
        tensors=sizes.tensors,
        frame_bytes=sizes.frame_bytes,
    )


def _score(made: Costs, true: Costs, slower: float, link: str, trip: bool) -> Score:
    now = msgspec.structs.replace(LINKS[link], rtt_s=ROUND_TRIPS_S[link] if trip else 0.0)
    links = {"device-cloud": now}
    chosen, best = plan(made, links), plan(true, links)
    placed = frozenset(chosen.row.layers)
    seconds = {layer.name: layer.seconds for layer in true.layers}
    row = msgspec.structs.replace(
        chosen.row,
        device_s=sum(took["device"] for name, took in seconds.items() if name in placed),
        remote_s=sum(took["cloud"] for name, took in seconds.items() if name not in placed),
    )
    off = latency_s(row, Conditions(link=now)) / best.seconds - 1
    cuts = chosen.row.split_after or "input", best.row.split_after or "input"
    return Score(true.model, slower, link, *cuts, round_trip=trip, off=max(off, 0.0))


def table(every: Sequence[Cell], objective: str) -> list[list[str]]:
    """Text of the table as the paper prints it: a row per processor and link, a column per network."""
    names = list(dict.fromkeys(cell.network for cell in every))
    cells = {(cell.processor, cell.link, cell.network): cell for cell in every if cell.objective == objective}
    rows = [["", "", *names]]
    for processor in DEVICES:
        rows += [[processor, link, *(cells[processor, link, name].cut for name in names)] for link in LINKS]
    return rows


def draw_tables(every: Sequence[Cell]) -> str:
    """The tables as one SVG: colour shows remote, split or local; the number is the gain over the better pure mode."""
    colours = {"remote": "#9ecae1", "split": "#fdae6b", "local": "#a1d99b"}
    objectives = list(dict.fromkeys(cell.objective for cell in every))
    width, height, left, top = 92, 38, 120, 70
    names = list(dict.fromkeys(cell.network for cell in every))
    lines = [(processor, link) for processor in DEVICES for link in LINKS]
    block = top + height * len(lines) + 20
    size = left + width * len(names) + 20, block * len(objectives) + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for number, objective in enumerate(objectives):
        base = block * number + top
        parts.append(f'<text x="10" y="{base - 38}" font-size="16">Best cut for {escape(objective)}</text>')
        for column, name in enumerate(names):
            x = left + width * column + width / 2
            parts.append(f'<text x="{x}" y="{base - 10}" text-anchor="middle" font-weight="bold">{name}</text>')
        for place, (processor, link) in enumerate(lines):
            y = base + height * place
            parts.append(f'<text x="10" y="{y + 23}">{processor}, {escape(link)}</text>')
            for column, name in enumerate(names):
                cell = next(
                    cell
                    for cell in every
                    if (cell.network, cell.processor, cell.link, cell.objective) == (name, processor, link, objective)
                )
                x = left + width * column
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{width - 3}" height="{height - 3}" fill="{colours[cell.kind]}"/>'
                    f'<text x="{x + width / 2}" y="{y + 16}" text-anchor="middle">{escape(cell.cut)}</text>'
                    f'<text x="{x + width / 2}" y="{y + 30}" text-anchor="middle" font-size="10">'
                    f"{cell.gain:.2f}x</text>"
                )
    legend = "Blue: all remote. Orange: split. Green: all local. The number is the gain over the better pure mode."
    basis = "Predicted: a roofline with the rates of TK1-like processors, not measured on one."
    parts.append(f'<text x="10" y="{size[1] - 30}">{legend}</text><text x="10" y="{size[1] - 12}">{basis}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Run both parts, print and write the results."""
    parser = make_parser(__doc__)
    parser.add_argument("--svg", type=Path, default=ROOT / "out/neurosurgeon.svg", help="where the table is drawn")
    parser.add_argument("--profile", type=Path, help="a profile calibrated on this machine, instead of calibrating")
    parser.add_argument("--minutes", type=float, default=2.0, help="of calibration")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--first-part", action="store_true", help="only the paper's table: nothing is measured")
    given = parser.parse_args()
    results, targets = first_part(given.svg)
    if not given.first_part:
        more, further = second_part(_profile(given.profile, given.minutes), given.samples, given.runs)
        results, targets = results | more, targets + further
    finish(results, targets, given.json)


def _profile(path: Path | None, minutes: float) -> DeviceProfile:
    if path:
        return load_profile(path)
    base, today = load_profile("generic-x86"), date.today().isoformat()
    return calibrate("here", base=base, minutes=minutes, threads=1, today=today)


def first_part(svg: Path) -> tuple[dict[str, Any], list[Target]]:
    """The table, printed and drawn, and the sweeps."""
    every = list(cells())
    for objective in dict.fromkeys(cell.objective for cell in every):
        print(f"\n{objective}")
        for line in table(every, objective):
            print("".join(text.ljust(11) for text in line))
    svg.parent.mkdir(parents=True, exist_ok=True)
    svg.write_text(draw_tables(every), encoding="utf-8")
    breaks = sweeps()
    print(f"\ndrawn in {svg}; {sum(cell.kind == 'split' for cell in every)} of {len(every)} cells are split")
    remote = [cell.over_remote for cell in every if cell.objective == "latency"]
    print(f"latency over all-remote: mean {sum(remote) / len(remote):.2f}x, largest {max(remote):.2f}x")
    targets = [
        Target("cells that differ from trying every cut", sum(not cell.agrees for cell in every), 0),
        Target("breaks of monotony over server load", breaks["server load"], 0),
        Target("breaks of monotony over bandwidth", breaks["bandwidth"], 0),
    ]
    return {"cells": [msgspec.to_builtins(cell) for cell in every], "breaks": breaks}, targets


def second_part(profile: DeviceProfile, samples: int, runs: int) -> tuple[dict[str, Any], list[Target]]:
    """Plans from predicted costs, scored on measured ones."""
    results = list(scores(profile, samples, runs))
    every = [result for result in results if isinstance(result, Score)]
    skipped = [result for result in results if isinstance(result, Skipped)]
    missing = left_out(skipped)
    without, judged = (
        _summarise([cell for cell in every if not cell.round_trip]),
        [cell for cell in every if cell.round_trip],
    )
    summed = _summarise(judged)
    share = summed["optimal"] / len(judged) if judged else None
    targets = [
        Target("share of plans from predictions that are optimal (47 of 48)", share, OPTIMAL, True, missing),
        Target("largest loss of a plan from predictions", summed["worst"], WORST, left_out=missing),
    ]
    scored = {
        "scores": [msgspec.to_builtins(cell) for cell in every],
        "left_out": [model.name for model in skipped],
    }
    return scored | {"with_round_trips": summed, "without_round_trips": without}, targets


def _summarise(every: Sequence[Score]) -> dict[str, Any]:
    """Print the scores with their misses, and return them as figures."""
    misses = [cell for cell in every if cell.off > EXACT]
    trips = "with" if every and every[0].round_trip else "without"
    print(f"{len(every) - len(misses)} of {len(every)} plans from predictions are optimal, {trips} round trips")
    for score in misses:
        where = f"{score.model}, device {score.slower:g}x slower, {score.link}"
        print(f"  not optimal: {where}: after {score.cut} instead of {score.best}, {score.off:.2%} slower")
    worst = max((cell.off for cell in every), default=None)
    return {"plans": len(every), "optimal": len(every) - len(misses), "worst": worst}


if __name__ == "__main__":
    main()
