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

from record import Target, arguments, finish
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
from serving.running import Running, Sample, in_process
from serving.suffixes import SUFFIXES, Suffix

IN_PROCESS = "in-process"
EXACTLY = "in-process, exact"
IN_BATCHES = f"in-process, batches of {LARGEST_BATCH}"
FAR_BEHIND = ("KServe", "MLServer", "BentoML", "LitServe")
"""No target is about them: they are asked every third round."""

SETTLE_S = 0.5
Samples = dict[str, dict[int, list[Sample]]]
"""By contender and wire, and connections: one for each round."""


def main() -> None:
    """The script."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    options = _options()
    results: dict[str, Any] = {"workers": WORKERS, "rounds": options.rounds, "seconds": options.seconds}
    environments, missing = _environments(options)
    measured: dict[str, Samples] = {}
    for suffix in SUFFIXES:
        if not options.only or suffix.name in options.only:
            measured[suffix.name] = _suffix(suffix, environments, missing, options)
            results[suffix.name] = _as_json(measured[suffix.name])
            _show(suffix, measured[suffix.name])
    results["not measured"] = missing
    results["contenders"] = {name: one.version() for name, one in environments.items()}
    for name, reason in missing.items():
        print(f"not measured: {name}: {reason}")
    if options.table is not None:
        options.table.write_text(_tables(measured), encoding="utf-8")
    finish(results, _targets(measured), options.json)


def _options() -> argparse.Namespace:
    parser = arguments(__doc__)
    names = [one.name for one in SUFFIXES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="SUFFIX", help=f"of {', '.join(names)}")
    known = [one.name for one in CONTENDERS]
    parser.add_argument("--beside", nargs="*", choices=known, metavar="SERVER", help=f"of {', '.join(known)}")
    parser.add_argument("--rounds", type=int, default=3, help="turns of all servers (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.8, help="of load each turn (default %(default)s)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the tables of docs/benchmarks.md there")
    options = parser.parse_args()
    if options.rounds < 1 or options.seconds <= 0:
        parser.error("--rounds and --seconds begin above 0")
    return options


def _environments(options: argparse.Namespace) -> tuple[dict[str, Environment], dict[str, str]]:
    """Those that could be made, and why the others could not."""
    found: dict[str, Environment] = {}
    missing: dict[str, str] = {}
    for name in dict.fromkeys(one.environment for one in _chosen(options) if one.environment):
        environment = Environment(name)
        try:
            environment.make()
            found[name] = environment
        except NotMeasured as reason:
            missing |= {one.name: str(reason) for one in CONTENDERS if one.environment == name}
    return found, missing


def _chosen(options: argparse.Namespace) -> list[Contender]:
    beside = options.beside
    return [one for one in CONTENDERS if beside is None or one.name.startswith(OURS) or one.name in beside]


def _suffix(
    suffix: Suffix, environments: Mapping[str, Environment], missing: dict[str, str], options: argparse.Namespace
) -> Samples:
    """All servers of one suffix, round by round."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        model = suffix.write(Path(place) / f"{suffix.name}.onnx")
        servers = []
        for contender in _chosen(options):
            if contender.name in missing or (contender.suffixes and suffix.name not in contender.suffixes):
                continue
            try:
                folder = Path(place) / str(len(servers))
                folder.mkdir()
                server = Running(contender, Job(suffix, model, folder), environments.get(contender.environment))
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


def _settle(server: Running, connections: int, missing: dict[str, str]) -> None:
    """Load that is not counted: every process of the server has the model afterwards."""
    for wire in server.wires:
        try:
            server.load(wire, connections, SETTLE_S)
        except NotMeasured as reason:
            missing[f"{server.name} {wire}".strip()] = str(reason)


def _round(
    servers: Sequence[Running], turn: int, connections: int, samples: Samples, missing: dict[str, str], seconds: float
) -> None:
    """Every server once, the first of them another one each turn."""
    for place in range(len(servers)):
        server = servers[(place + turn) % len(servers)]
        if turn % 3 and server.name in FAR_BEHIND:
            continue
        for wire in server.wires:
            name = f"{server.name} {wire}".strip()
            try:
                sample = server.load(wire, connections, seconds)
                samples.setdefault(name, {}).setdefault(connections, []).append(sample)
            except NotMeasured as reason:
                missing[f"{name}, {connections} connections"] = str(reason)


def _no_server(job: Job, connections: int, samples: Samples, missing: dict[str, str], seconds: float) -> None:
    """The most that the machine gives: one thread for one connection, else one for each core."""
    threads = min(connections, WORKERS)
    ways: dict[str, dict[str, Any]] = {IN_PROCESS: {}, EXACTLY: {"exact": True}}
    if job.suffix.batches and threads > 1:
        ways[IN_BATCHES] = {"batch": LARGEST_BATCH}
    for name, way in ways.items():
        try:
            sample = in_process(job, threads, seconds, **way)
            samples.setdefault(name, {}).setdefault(connections, []).append(sample)
        except NotMeasured as reason:
            missing[f"{name}, {connections} connections"] = str(reason)


def _rate(samples: Samples, name: str, connections: int) -> float:
    taken = samples.get(name, {}).get(connections)
    return statistics.median(one.requests_per_s for one in taken) if taken else math.nan


def _alone_s(samples: Samples, name: str) -> float:
    taken = samples.get(name, {}).get(1)
    return statistics.median(one.median_s for one in taken) if taken else math.nan


def _as_json(samples: Samples) -> dict[str, Any]:
    return {
        name: {
            str(connections): {
                "requests_per_s": round(statistics.median(one.requests_per_s for one in taken), 1),
                "each_round": [round(one.requests_per_s, 1) for one in taken],
                "median_ms": round(1e3 * statistics.median(one.median_s for one in taken), 4),
                "refused": sum(one.refused for one in taken),
            }
            for connections, taken in by_connections.items()
        }
        for name, by_connections in samples.items()
    }


def _show(suffix: Suffix, samples: Samples) -> None:
    """A table: milliseconds alone, and requests per second, the least and the most of the rounds behind them."""
    heads = "".join(f"{f'{connections} conn.':>28}" for connections in suffix.connections)
    print(f"\n{suffix.name:32}{'ms alone':>10}{heads}")
    for name, by_connections in samples.items():
        cells = ""
        for connections in suffix.connections:
            rates = [one.requests_per_s for one in by_connections.get(connections, [])]
            shown = f"{statistics.median(rates):,.0f}/s ({min(rates):,.0f}-{max(rates):,.0f})" if rates else "-"
            cells += f"{shown:>28}"
        print(f"{name:32}{1e3 * _alone_s(samples, name):10.2f}{cells}")
    print(flush=True)


def _tables(measured: Mapping[str, Samples]) -> str:
    """Markdown: a table for each suffix, best first."""
    parts = []
    for suffix in (one for one in SUFFIXES if one.name in measured):
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
    """As issue 5 has them; a figure that is missing is a miss."""
    none: Samples = {}
    identity, small, large, dense = (measured.get(one.name, none) for one in SUFFIXES)
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
    """Our best rate over the other's, each at the connections where it is best."""
    return _best(samples, [OURS]) / _best(samples, _triton(other))


def _with_batching(samples: Samples) -> float:
    """At its best over at its best, round by round, and the median of that: both servers run the same code on a suffix
    that gains nothing, so what differs is the machine's mood."""
    ours, other = _bests(samples, OURS), _bests(samples, OURS_UNBATCHED)
    ratios = [one / beside for one, beside in zip(ours, other, strict=False) if beside]
    return statistics.median(ratios) if ratios else math.nan


def _bests(samples: Samples, name: str) -> list[float]:
    """Of each round the best rate, whatever the connections."""
    rounds = zip(*samples.get(name, {}).values(), strict=False)
    return [max(one.requests_per_s for one in taken) for taken in rounds]


def _best(samples: Samples, names: Sequence[str]) -> float:
    return _most(_rate(samples, name, connections) for name in names for connections in samples.get(name, {}))


def _triton(name: str) -> list[str]:
    return [f"{name} HTTP", f"{name} gRPC"]


def _most(values: Any) -> float:
    return max((one for one in values if not math.isnan(one)), default=math.nan)


def _least(values: Any) -> float:
    return min((one for one in values if not math.isnan(one)), default=math.nan)


if __name__ == "__main__":
    main()
