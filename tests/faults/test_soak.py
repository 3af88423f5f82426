"""Full load with faults, between processes: a controller's offload server, an agent, and a link that does not hold.

`EDGESPLIT_SOAK_S` says how long: a few seconds in `make test`, an hour in `make soak`. Servers are killed in the first
half only; what is left of the second half's growth is a leak.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import monotonic
from urllib.parse import urlsplit

import pytest

from edgesplit.client.client import Client
from edgesplit.link_emulation import ShapedLink
from edgesplit.plan import Link
from support.edgesplit_processes import Agent, Cloud, eventually, frame_input, frames
from support.soak import Load, Sample, growth, named, tree

SOAK_S = float(os.environ.get("EDGESPLIT_SOAK_S", "6"))
LONG = SOAK_S >= 600
CLIENTS, DAWDLERS = 6, 4
RSS_BYTES = 8 * 2**20 if LONG else 256 * 2**20
"""A few seconds are all warming up and starting again: there only what runs away is seen."""
DESCRIPTORS = 16
FLAP_S = 2.0 if LONG else 0.4
GOOD = Link(up_bytes_per_s=2.5e6, down_bytes_per_s=2.5e6, rtt_s=0.004)
CRAWLING = Link(up_bytes_per_s=8_000, down_bytes_per_s=8_000, rtt_s=0.05)
DEAD = Link(up_bytes_per_s=0.0, down_bytes_per_s=0.0, rtt_s=0.004)
SEED = os.environ.get("EDGESPLIT_SEED", "1")


class Faults:
    """Breaks the link one way after the other, and in the first half kills the server too."""

    def __init__(self, link: ShapedLink, up: int, *, kills_end: float) -> None:
        self.counts = {"cut": 0, "dead": 0, "crawling": 0, "killed": 0}
        self._link, self._up, self._kills_end = link, up, kills_end
        self._dice = random.Random(f"{SEED}/soak")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """And leave everything whole."""
        self._stop.set()
        self._thread.join(30)
        self._link.restore()
        self._link.set_link(GOOD)

    def _run(self) -> None:
        kinds = ["killed", "cut", "dead", "crawling"]
        while not self._stop.wait(FLAP_S):
            kind = kinds[sum(self.counts.values()) % len(kinds)]
            if kind == "killed" and self.counts["killed"] and monotonic() > self._kills_end:
                kind = self._dice.choice(kinds[1:])
            self.counts[kind] += 1
            self._begin(kind)
            self._stop.wait(FLAP_S)
            self._link.restore()
            self._link.set_link(GOOD)

    def _begin(self, kind: str) -> None:
        if kind == "cut":
            self._link.cut()
        elif kind == "killed":
            for pid in named(tree(self._up), "edgesplit_offload"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            self._link.set_link(DEAD if kind == "dead" else CRAWLING)


@pytest.fixture
def link(cloud: Cloud) -> Iterator[ShapedLink]:
    parts = urlsplit(cloud.addresses["offload_url"])
    with ShapedLink(parts.hostname or "", parts.port or 0, GOOD) as shaped:
        yield shaped


@pytest.fixture
def agent(cloud: Cloud, link: ShapedLink) -> Agent:
    """A device as fast as this machine, whose plan sends everything to the cloud while that answers."""
    cloud.push_digits()
    claim = cloud.folder / "soaked.claim.json"
    cloud.edgectl("device", "claim", "soaked", "--profile", "raspberrypi4", "--link", "wifi", "--out", str(claim))
    made = Agent(cloud, "soaked", claim, "--offload", f"https://127.0.0.1:{link.port}", "--log-level", "error")
    made.process.argv.remove("--emulate")
    cloud.agents.append(made)
    made.start()
    cloud.edgectl("deploy", "digits", "--partition", "cloud", "--to", "soaked", "--wait", "90")
    return made


@pytest.mark.timeout(SOAK_S + 300)
def test_full_load_with_faults_leaks_nothing_and_loses_nothing(cloud: Cloud, agent: Agent, link: ShapedLink) -> None:
    """Every id has one outcome: the right answer, or a typed error. Afterwards the cloud is used again; memory and
    descriptors of both sides have stopped growing."""
    print(f"seed {SEED}, {SOAK_S:g} s")
    inputs = {str(number): frame_input(jpeg) for number, (jpeg, _) in enumerate(frames(6))}
    want = {name: agent.infer("digits", one).outputs for name, one in inputs.items()}
    up, device = cloud.process.pid, agent.process.pid
    assert up is not None and device is not None
    load = Load(agent.url, "digits", inputs, want)
    began = monotonic()
    faults = Faults(link, up, kills_end=began + SOAK_S / 2)
    load.start(CLIENTS, DAWDLERS, f"{SEED}/soak")
    sides = _watched(device, up, lambda: monotonic() > began + SOAK_S and _seen(load, faults))
    load.stop()
    faults.stop()
    told = {"outcomes": dict(load.account.outcomes), "faults": faults.counts, "growth": _growths(sides)}
    print(json.dumps(told))
    assert not load.account.wrong, load.account.wrong[:5]
    assert agent.process.is_running
    for side, grown in _growths(sides).items():
        assert grown["rss"] < RSS_BYTES and grown["descriptors"] < DESCRIPTORS, (side, told)
    with Client(agent.url) as client:
        eventually("the cloud is used again", lambda: _by_the_cloud(client, inputs["0"]))


def _by_the_cloud(client: Client, frame: dict[str, bytes]) -> bool:
    report = client.infer("digits", frame, deadline_s=5.0).report
    return report is not None and report.row != "local" and not report.fallback


def _seen(load: Load, faults: Faults) -> bool:
    """Each fault has been, and requests were answered by the cloud and without it."""
    outcomes = load.account.outcomes
    return all(faults.counts.values()) and outcomes["cloud"] > 0 and outcomes["local"] + outcomes["fallback"] > 0


def _watched(device: int, up: int, is_over: Callable[[], bool]) -> dict[str, list[Sample]]:
    """Samples of both sides until it is over."""
    sides: dict[str, list[Sample]] = {"agent": [], "offload": []}
    pause, clock = max(0.2, SOAK_S / 400), threading.Event()
    while not is_over() or len(sides["agent"]) < 8:
        clock.wait(pause)
        sides["agent"].append(Sample.of(tree(device)))
        sides["offload"].append(Sample.of(named(tree(up), "edgesplit_offload")))
    return sides


def _growths(sides: dict[str, list[Sample]]) -> dict[str, dict[str, float]]:
    return {
        side: {
            "rss": growth(samples, lambda one: one.rss_bytes),
            "descriptors": growth(samples, lambda one: one.descriptors),
        }
        for side, samples in sides.items()
    }
