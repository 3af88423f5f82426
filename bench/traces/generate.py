"""Generates the synthetic uplink traces in this folder, in mahimahi's format, from a seed. They are not recordings.

`bench/adapt.py` takes recordings too (mahimahi's `*.up`, or any file in its format), by path. The traces imitate a rate
whose logarithm wanders (an autoregressive walk at steps of 100 ms), fades to almost nothing, and schedules.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

SEED = 5
STEP_MS = 100
BITS = 1500 * 8


def wander(rng: random.Random, seconds: float, median_mbps: float, spread: float, memory_s: float) -> Iterator[float]:
    """Yield a rate in Mbit/s for each step: the logarithm's correlation decays within `memory_s`."""
    retention = math.exp(-STEP_MS / 1e3 / memory_s)
    deviation = rng.gauss(0, 1)
    for _ in range(int(seconds * 1e3 / STEP_MS)):
        deviation = retention * deviation + math.sqrt(1 - retention**2) * rng.gauss(0, 1)
        yield median_mbps * math.exp(spread * deviation)


def faded(rng: random.Random, rates: Iterator[float], every_s: float, longest_s: float, to: float) -> Iterator[float]:
    """Yield the rates with fades: on average one in `every_s`, half a second to `longest_s` long."""
    left_ms = 0.0
    for rate in rates:
        if left_ms <= 0 and rng.random() < STEP_MS / 1e3 / every_s:
            left_ms = rng.uniform(500, longest_s * 1e3)
        left_ms -= STEP_MS
        yield min(rate, to) if left_ms > 0 else rate


def lte_driving(rng: random.Random) -> Iterator[float]:
    """Deep fades between cells, and a rate that halves and doubles within seconds."""
    return faded(rng, wander(rng, 60, 3.0, 0.7, 2.0), every_s=9, longest_s=4, to=0.03)


def lte_parked(rng: random.Random) -> Iterator[float]:
    """Stationary: a good rate with little variation."""
    return wander(rng, 24, 6.0, 0.15, 5.0)


def wifi_walk(rng: random.Random) -> Iterator[float]:
    """Away from the access point and back, with people in between."""
    steps = faded(rng, wander(rng, 30, 1.0, 0.3, 0.5), every_s=8, longest_s=1.0, to=0.1)
    for place, rate in enumerate(steps):
        yield rate * 14.0 * math.exp(-3.5 * math.sin(math.pi * place * STEP_MS / 30_000) ** 2)


def umts_bursts(rng: random.Random) -> Iterator[float]:
    """A slow rate with scheduling: some hundred milliseconds of service, then none."""
    serving, left_ms = True, 0
    for rate in wander(rng, 60, 1.6, 0.4, 3.0):
        if left_ms <= 0:
            serving, left_ms = not serving, rng.choice((200, 300, 400, 600))
        left_ms -= STEP_MS
        yield rate if serving else 0.05


def flapping(rng: random.Random) -> Iterator[float]:
    """10 Mbit/s and 100 kbit/s, alternating every two seconds."""
    for place in range(240):
        yield 10.0 if place // 20 % 2 == 0 else 0.1


TRACES = {
    "lte-driving": lte_driving,
    "lte-parked": lte_parked,
    "wifi-walk": wifi_walk,
    "umts-bursts": umts_bursts,
    "flapping": flapping,
}


def moments_ms(rates: list[float]) -> list[int]:
    """Milliseconds at which each packet may leave: evenly within a step, with the remainder carried into the next
    step."""
    edges = [0.0]
    for rate in rates:
        edges.append(edges[-1] + rate * 1e6 * STEP_MS / 1e3 / BITS)
    moments = []
    for step, (before, after) in enumerate(pairwise(edges)):
        for packet in range(math.floor(before) + 1, math.floor(after) + 1):
            moments.append(step * STEP_MS + math.ceil((packet - before) / (after - before) * STEP_MS))
    return moments


def main() -> None:
    """Write all traces."""
    for name, make in TRACES.items():
        rng = random.Random(f"{SEED} {name}")
        moments = moments_ms(list(make(rng)))
        Path(__file__).with_name(f"{name}.up").write_text("\n".join(map(str, moments)) + "\n", "ascii")


if __name__ == "__main__":
    main()
