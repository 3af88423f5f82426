"""Our offload server beside Triton, KServe, MLServer, BentoML, LitServe, floors of a few lines, and no server at all.

The same ONNX suffix behind each, the same client before each, all servers of one suffix up at once and asked turn by
turn, so that a busy moment hits all of them. Triton is the server binary of the `nvidia-pytriton` wheel with its Python
backend, the only one in it; of its two protocols the better one counts. Servers other than ours live in virtual
environments under `out/bench-env`, made at the first run; one that cannot be had is "not measured", with the reason.
"""

from __future__ import annotations

import argparse
import math
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from record import Target, finish, make_parser
from serving.contenders import (
    CONTENDERS,
    LARGEST_BATCH,
    OURS,
    OURS_UNBATCHED,
    TRITON,
    TRITON_BATCHER,
    WORKERS,
    Contender,
    Job,
)
from serving.environments import Environment, NotMeasured
from serving.running import RunningServer, Sample, measure_in_process
from serving.suffixes import SUFFIXES, Suffix

IN_PROCESS = "in-process"
EXACTLY = "in-process, exact"
IN_BATCHES = f"in-process, batches of {LARGEST_BATCH}"
RARELY_MEASURED = ("KServe", "MLServer", "BentoML", "LitServe")
"""Contenders that no target is about: they are measured in every third round only."""

SETTLE_S = 0.5
Samples = dict[str, dict[int, list[Sample]]]
"""Samples by contender and wire, and by connections: one for each round."""


def main() -> None:
    """Measure every suffix, print the tables and targets, write the results."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    options = _options()
    results: dict[str, Any] = {"workers": WORKERS, "rounds": options.rounds, "seconds": options.seconds}
    environments, missing = _environments(options)
    measured: dict[str, Samples] = {}
    for suffix in SUFFIXES:
        if not options.only or suffix.name in options.only:
            measured[suffix.name] = _suffix(suffix, environments, missing, options)
            results[suffix.name] = _as_json(measured[suffix.name])
            _print_table(suffix, measured[suffix.name])
    results["not measured"] = missing
    results["contenders"] = {name: one.version() for name, one in environments.items()}
    for name, reason in missing.items():
        print(f"not measured: {name}: {reason}")
    if options.table is not None:
        options.table.write_text(_tables(measured), encoding="utf-8")
    finish(results, _targets(measured), options.json)


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    names = [suffix.name for suffix in SUFFIXES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="SUFFIX", help=f"of {', '.join(names)}")
    known = [contender.name for contender in CONTENDERS]
    parser.add_argument("--beside", nargs="*", choices=known, metavar="SERVER", help=f"of {', '.join(known)}")
    parser.add_argument("--rounds", type=int, default=3, help="turns of all servers (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.8, help="of load each turn (default %(default)s)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the tables of docs/benchmarks.md there")
    options = parser.parse_args()
    if options.rounds < 1 or options.seconds <= 0:
        parser.error("--rounds and --seconds begin above 0")
    return options


def _environments(options: argparse.Namespace) -> tuple[dict[str, Environment], dict[str, str]]:
    """The virtual environments that could be made, and the reasons why the others could not."""
    made: dict[str, Environment] = {}
    missing: dict[str, str] = {}
    for name in dict.fromkeys(
        contender.environment for contender in _selected_suffixes(options) if contender.environment
    ):
        environment = Environment(name)
        try:
            environment.make()
            made[name] = environment
        except NotMeasured as reason:
            missing |= {contender.name: str(reason) for contender in CONTENDERS if contender.environment == name}
    return made, missing


def _selected_suffixes(options: argparse.Namespace) -> list[Contender]:
    beside = options.beside
    return [
        contender
        for contender in CONTENDERS
        if beside is None or contender.name.startswith(OURS) or contender.name in beside
    ]


def _suffix(
    suffix: Suffix, environments: Mapping[str, Environment], missing: dict[str, str], options: argparse.Namespace
) -> Samples:
    """Measure all servers of one suffix, round by round."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        model = suffix.write(Path(place) / f"{suffix.name}.onnx")
        servers: list[RunningServer] = []
        for contender in _selected_suffixes(options):
            if contender.name in missing or (contender.suffixes and suffix.name not in contender.suffixes):
                continue
            try:
                folder = Path(place) / str(len(servers))
                folder.mkdir()
                server = RunningServer(contender, Job(suffix, model, folder), environments.get(contender.environment))
                stack.callback(server.stop)
                server.wait()
                servers.append(server)
            except NotMeasured as reason:
                missing[f"{contender.name}, {suffix.name}"] = str(reason)
        samples: Samples = {}
        for server in servers:
            _settle(server, max(suffix.connections), missing)
        for turn in range(options.rounds):
            print(f"{suffix.name}: round {turn + 1} of {options.rounds}", file=sys.stderr, flush=True)
            for connections in suffix.connections:
                _round(servers, turn, connections, samples, missing, options.seconds)
                _no_server(Job(suffix, model, Path(place)), connections, samples, missing, options.seconds)
        return samples


def _settle(server: RunningServer, connections: int, missing: dict[str, str]) -> None:
    """Apply load that is not counted, so that every process of the server has loaded the model."""
    for wire in server.wires:
        try:
            server.load(wire, connections, SETTLE_S)
        except NotMeasured as reason:
            missing[f"{server.name} {wire}".strip()] = str(reason)


def _round(
    servers: Sequence[RunningServer],
    turn: int,
    connections: int,
    samples: Samples,
    missing: dict[str, str],
    seconds: float,
) -> None:
    """Measure every server once, beginning with another one each round."""
    for place in range(len(servers)):
        server = servers[(place + turn) % len(servers)]
        if turn % 3 and server.name in RARELY_MEASURED:
            continue
        for wire in server.wires:
            name = f"{server.name} {wire}".strip()
            try:
                sample = server.load(wire, connections, seconds)
                samples.setdefault(name, {}).setdefault(connections, []).append(sample)
            except NotMeasured as reason:
                missing[f"{name}, {connections} connections"] = str(reason)


def _no_server(job: Job, connections: int, samples: Samples, missing: dict[str, str], seconds: float) -> None:
    """The upper bound on this machine: inferences without a server, on one thread for one connection, else on one per
    core."""
    threads = min(connections, WORKERS)
    ways: dict[str, dict[str, Any]] = {IN_PROCESS: {}, EXACTLY: {"exact": True}}
    if job.suffix.gains_from_batching and threads > 1:
        ways[IN_BATCHES] = {"batch": LARGEST_BATCH}
    for name, way in ways.items():
        try:
            sample = measure_in_process(job, threads, seconds, **way)
            samples.setdefault(name, {}).setdefault(connections, []).append(sample)
        except NotMeasured as reason:
            missing[f"{name}, {connections} connections"] = str(reason)


def _rate(samples: Samples, name: str, connections: int) -> float:
    taken = samples.get(name, {}).get(connections)
    return statistics.median(sample.requests_per_s for sample in taken) if taken else math.nan


def _alone_s(samples: Samples, name: str) -> float:
    taken = samples.get(name, {}).get(1)
    return statistics.median(sample.median_s for sample in taken) if taken else math.nan


def _as_json(samples: Samples) -> dict[str, Any]:
    return {
        name: {
            str(connections): {
                "requests_per_s": round(statistics.median(sample.requests_per_s for sample in taken), 1),
                "each_round": [round(sample.requests_per_s, 1) for sample in taken],
                "median_ms": round(1e3 * statistics.median(sample.median_s for sample in taken), 4),
                "refused": sum(sample.refused for sample in taken),
            }
            for connections, taken in by_connections.items()
        }
        for name, by_connections in samples.items()
    }


def _print_table(suffix: Suffix, samples: Samples) -> None:
    """Print a table: milliseconds of a single request, and requests per second, with the least and the most of the
    rounds."""
    heads = "".join(f"{f'{connections} conn.':>28}" for connections in suffix.connections)
    print(f"\n{suffix.name:32}{'ms alone':>10}{heads}")
    for name, by_connections in samples.items():
        cells = ""
        for connections in suffix.connections:
            rates = [sample.requests_per_s for sample in by_connections.get(connections, [])]
            shown = f"{statistics.median(rates):,.0f}/s ({min(rates):,.0f}-{max(rates):,.0f})" if rates else "-"
            cells += f"{shown:>28}"
        print(f"{name:32}{1e3 * _alone_s(samples, name):10.2f}{cells}")
    print(flush=True)


def _tables(measured: Mapping[str, Samples]) -> str:
    """The results as Markdown: a table for each suffix, best first."""
    parts = []
    for suffix in (suffix for suffix in SUFFIXES if suffix.name in measured):
        samples = measured[suffix.name]
        heads = [f"{connections} connection{'s' * (connections > 1)}, /s" for connections in suffix.connections]
        lines = [f"| {suffix.name} | alone, ms | {' | '.join(heads)} |", f"|---|---:|{'---:|' * len(heads)}"]
        for name in sorted(samples, key=lambda name: -_best(samples, [name])):
            alone = _alone_s(samples, name)
            cells = ["-" if math.isnan(alone) else f"{1e3 * alone:.2f}"]
            rates = [_rate(samples, name, connections) for connections in suffix.connections]
            cells += ["-" if math.isnan(rate) else f"{rate:,.0f}" for rate in rates]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _targets(measured: Mapping[str, Samples]) -> list[Target]:
    """The targets of issue 5; a figure that is missing is a miss."""
    none: Samples = {}
    identity, small, large, dense = (measured.get(suffix.name, none) for suffix in SUFFIXES)
    ours_s, nobody_s = _alone_s(identity, OURS), _alone_s(identity, IN_PROCESS)
    triton_s = _least(_alone_s(identity, wire) for wire in _triton(TRITON))
    at_8 = _most(_rate(identity, wire, 8) for wire in _triton(TRITON))
    return [
        _target("alone: overhead over in-process, part of Triton's", (ours_s - nobody_s) / (triton_s - nobody_s), 0.5),
        _target("identity at 8 connections, over Triton", _rate(identity, OURS, 8) / at_8, 2.0, at_least=True),
        _target("1 ms suffix at its best, over Triton", _over(small, TRITON), 1.2, at_least=True),
        _target("10 ms suffix at its best, over Triton", _over(large, TRITON), 1.0, at_least=True),
        _target("full connections at their best, over Triton's batcher", _over(dense, TRITON_BATCHER), 1.3, True),
        _target("1 ms suffix at its best, batching over none (3 % is noise)", _with_batching(small), 0.97, True),
        _target("10 ms suffix at its best, batching over none (3 % is noise)", _with_batching(large), 0.97, True),
    ]


def _target(name: str, measured: float, target: float, at_least: bool = False) -> Target:
    return Target(name, None if math.isnan(measured) else measured, target, at_least)


def _over(samples: Samples, other: str) -> float:
    """Ratio of our best rate to the other server's best rate, each at the connections where it is best."""
    return _best(samples, [OURS]) / _best(samples, _triton(other))


def _with_batching(samples: Samples) -> float:
    """Median over the rounds of the ratio of both best rates: on a suffix that gains nothing from batching both servers
    run the same code, so that what differs is disturbance by other load."""
    ours, other = _best_rates(samples, OURS), _best_rates(samples, OURS_UNBATCHED)
    ratios = [pair / beside for pair, beside in zip(ours, other, strict=False) if beside]
    return statistics.median(ratios) if ratios else math.nan


def _best_rates(samples: Samples, name: str) -> list[float]:
    """The best rate of each round, over all numbers of connections."""
    rounds = zip(*samples.get(name, {}).values(), strict=False)
    return [max(sample.requests_per_s for sample in taken) for taken in rounds]


def _best(samples: Samples, names: Sequence[str]) -> float:
    return _most(_rate(samples, name, connections) for name in names for connections in samples.get(name, {}))


def _triton(name: str) -> list[str]:
    return [f"{name} HTTP", f"{name} gRPC"]


def _most(values: Any) -> float:
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def _least(values: Any) -> float:
    return min((value for value in values if not math.isnan(value)), default=math.nan)


if __name__ == "__main__":
    main()
