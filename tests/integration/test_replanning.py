"""A link that fades while a real agent works and comes back: the controller follows with other tables, by itself."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from edgesplit.errors import EdgeError
from edgesplit.link_emulation import ShapedLink
from edgesplit.links import parse_link
from edgesplit.release.manifest import Manifest, decode_manifest
from support.edgesplit_processes import Agent, Cloud, eventually, frame_input, frames

ASSUMED, FADED = "wifi", "0.4mbit/5ms"
PROFILE = "raspberrypi3b+"
PATIENCE_S = 180.0
WISH = ("--objective", "energy", "--deadline", "140ms")
"""Alone a Raspberry Pi 3 is in time; over Wi-Fi it saves joules by asking the cloud, over the faded link it is late."""
POLICY = {"model": "digits", "mode": "auto", "least_devices": 1, "observe_s": 8.0, "cool_down_s": 0.0}
LOCAL = frozenset({"local"})


def test_automatic_replanning_follows_a_link_that_degrades_and_recovers(cloud: Cloud) -> None:
    """An emulated device at work, whose link a proxy throttles. With the policy `auto` the controller notices, says why
    and of whose measurements, and rolls out another cut that the planner signed: the device answers alone, and fetched
    no weight. That table has no row that leaves the device, and still the link is measured: when it is as before, the
    controller notices that too, and the device asks the cloud again."""
    cloud.push_digits()
    link = ShapedLink("127.0.0.1", cloud.addresses["offload_port"], parse_link(ASSUMED))
    with link, behind(cloud, link.port) as agent:
        made = cloud.json("deploy", "digits", "--to", agent.name, *WISH, "--wait", "120")
        cloud.api.post("/v1/replan-policies", POLICY)
        first, before = manifest_of(agent, made["release"]), delivered(agent)
        assert rows_of(first) != LOCAL
        with at_work(agent):
            link.set_link(parse_link(FADED))
            stays = running(cloud, agent, lambda rows: rows == LOCAL)
            alone = eventually("a table that stays on the device", stays, PATIENCE_S)
            told = proposals(cloud)
            eventually("an answer alone", lambda: agent.infer("digits", a_frame()).report.row == "local")
            fetched = delivered(agent) - before

            link.set_link(parse_link(ASSUMED))
            leaves = running(cloud, agent, lambda rows: rows != LOCAL)
            eventually("a table with the cloud in it", leaves, PATIENCE_S)

    assert any(factor_of_uplink(one) < 0.3 for one in told)  # the first that noticed; others may have followed it
    assert any(one["broken_limits"]["now"] > one["broken_limits"]["then"] for one in told)
    (last,) = [one for one in told if one["result"] == alone]
    assert (last["state"], last["decided_by"], last["basis"], last["measured_devices"]) == (
        "applied",
        "replan",
        "emulated",
        1,
    )
    listed = {one["release"]: one for one in cloud.api.get("/v1/releases")}[alone]
    assert listed["signed_by"] == "planner"
    assert fetched < sum(first.chunk_sizes().values()) - sum(graphs_of(first).values())


@contextmanager
def behind(cloud: Cloud, offload_port: int) -> Iterator[Agent]:
    """An emulated device that reaches the offload server at that port."""
    claim = cloud.folder / "live.claim.json"
    cloud.edgectl("device", "claim", "live", "--profile", PROFILE, "--link", ASSUMED, "--out", str(claim))
    agent = Agent(cloud, "live", claim, "--hedge", "never", "--offload", f"127.0.0.1:{offload_port}")
    agent.start()
    try:
        yield agent
    finally:
        agent.process.stop()


@contextmanager
def at_work(agent: Agent) -> Iterator[None]:
    """Its application asks without a pause."""
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            try:
                agent.infer("digits", a_frame())
            except EdgeError:
                over.wait(0.1)  # it switches releases, or this machine is too busy for the request's deadline

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)


def running(cloud: Cloud, agent: Agent, wanted: Callable[[frozenset[str]], bool]) -> Callable[[], str]:
    """Let the controller look, as it does every minute by itself; the release that runs, if its rows are as wanted.
    Tables in between do not count: a busy machine's seconds drift, too."""

    def look() -> str:
        cloud.api.post("/v1/drift/inspect", {})
        models = cloud.api.get(f"/v1/devices/{agent.name}").get("models") or []
        here = [one["release"] for one in models if one["state"] == "running"]
        return next((one for one in here if wanted(rows_of(manifest_of(agent, one)))), "")

    return look


def proposals(cloud: Cloud) -> list[dict[str, Any]]:
    """All that there were."""
    return list(cloud.api.get("/v1/proposals"))


def factor_of_uplink(proposal: dict[str, Any]) -> float:
    """Measured against what the plan assumed; 1 where it did not drift."""
    return next((float(one["factor"]) for one in proposal["drift"] if one["quantity"] == "uplink"), 1.0)


def manifest_of(agent: Agent, release: str) -> Manifest:
    """Of a release that the device has."""
    return decode_manifest((agent.data / "releases" / release / "manifest.json").read_bytes())


def rows_of(manifest: Manifest) -> frozenset[str]:
    """Of the device's table."""
    return frozenset(row.name for row in manifest.plans[PROFILE].rows)


def graphs_of(manifest: Manifest) -> dict[str, int]:
    """Bytes of every chunk that holds no weight."""
    sizes = manifest.chunk_sizes()
    files = (file for piece in manifest.slices for file in piece.files[:1])
    return {one.sha256: sizes[one.sha256] for file in files for one in file.chunks}


def delivered(agent: Agent) -> int:
    """Bytes of chunks that the device fetched so far."""
    argv = [sys.executable, "-m", "edgesplit_agent.main", "status", "--data", str(agent.data)]
    told = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout
    return int(json.loads(told)["delivery"]["chunk_bytes"])


def a_frame() -> dict[str, Any]:
    """One picture as a request's input."""
    return frame_input(frames(1)[0][0])
