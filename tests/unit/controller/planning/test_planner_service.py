"""The controller's smaller parts: settings and ports, limits, child processes, planning options, cached
measurements."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from sqlalchemy import select

from edgesplit.errors import Busy, EdgeError, InfeasibleLimits, LinkError, ModelRefused, NotFound, UsageError, kind_of
from edgesplit.links import parse_link
from edgesplit.plan import Plan
from edgesplit.process.supervised import SupervisedProcess
from edgesplit.release.manifest import TensorSpec
from edgesplit_controller.access.request_limits import BodyLimits, RateLimit
from edgesplit_controller.api.dispatch import MAX_JOBS_PER_OPERATOR, HeavyJobQueue
from edgesplit_controller.api.errors import status_of
from edgesplit_controller.api.request_parsing import parse_bindings
from edgesplit_controller.app.offload_process import offload_arguments
from edgesplit_controller.caller import set_current_operator
from edgesplit_controller.errors import Conflict, Unauthenticated, not_found
from edgesplit_controller.job_progress import report_step
from edgesplit_controller.model_registry.registry import Registry
from edgesplit_controller.planning.planner_service import (
    PlanningService,
    PlanOptions,
    SliceFactors,
    answer_rule_of,
    device_profile,
    link_of,
    slowest_link,
)
from edgesplit_controller.settings import Settings, await_port, url_host, with_ports
from edgesplit_controller.storage.blobs import BlobLost, BlobStore
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Measurement, Model
from edgesplit_partitioner import load_costs
from edgesplit_partitioner.costs.from_telemetry import FieldMeasurements, SliceMeasurement
from edgesplit_partitioner.profiling.machine_load import MachineLoad
from edgesplit_partitioner.profiling.slices import WholeSliceTimes
from support.counting_measure import BUSY, QUIET, CountingMeasure
from support.registry_harness import RegistryHarness, a_model, npz

PATIENCE_S = 30.0


def test_chosen_ports_are_remembered(tmp_path: Path) -> None:
    """Port 0 is chosen once per folder; a port that is given wins and changes nothing."""
    first = with_ports(Settings(data=tmp_path, api_port=0, mqtt_port=0, offload_port=0))
    again = with_ports(Settings(data=tmp_path, api_port=0, mqtt_port=0, offload_port=9))
    assert (again.api_port, again.mqtt_port, again.offload_port) == (first.api_port, first.mqtt_port, 9)
    assert len({first.api_port, first.mqtt_port, first.offload_port}) == 3
    (tmp_path / "ports.json").write_text("{")
    assert with_ports(Settings(data=tmp_path, api_port=0)).api_port > 0


def test_a_port_in_use_is_reported_with_its_option(tmp_path: Path) -> None:
    """One line with the option to change."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} on 127.0.0.1 is taken.*--offload-port"):
            await_port(Settings(data=tmp_path, offload_port=port), "offload_port", 0.0)
    await_port(Settings(data=tmp_path, offload_port=port), "offload_port", 0.0)


def test_hosts_decide_the_listen_address_and_the_advertised_one(tmp_path: Path) -> None:
    """Loopback alone unless a name is given by which devices reach the controller."""
    alone, named = Settings(data=tmp_path), Settings(data=tmp_path, hosts=("cloud.example", "10.0.0.1"))
    assert (alone.address, alone.host) == ("127.0.0.1", "127.0.0.1")
    assert (named.address, named.host, named.own_address) == ("0.0.0.0", "cloud.example", "127.0.0.1")
    assert {"cloud.example", "10.0.0.1", "localhost", "::1"} <= set(named.certificate_hosts)
    assert (url_host("::1"), url_host("a.b"), url_host("127.0.0.1")) == ("[::1]", "a.b", "127.0.0.1")


def test_the_offload_server_command_needs_the_controllers_folder(tmp_path: Path) -> None:
    """Every path in it lies in the folder; without a folder or a port the error has advice."""
    with pytest.raises(UsageError, match="up"):
        offload_arguments(tmp_path, port=1)
    (tmp_path / "offload").mkdir()
    (tmp_path / "offload" / "root.json").write_text("{}")
    with pytest.raises(UsageError, match="--port"):
        offload_arguments(tmp_path)
    words = offload_arguments(tmp_path, port=8500)
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given["--releases"] == str(tmp_path / "offload" / "releases") and given["--port"] == "8500"
    assert set(given) == {"--releases", "--root", "--cert", "--key", "--ca", "--host", "--port", "--revoked"}


CHILD = """
import os, sys, time
print("starting", file=sys.stderr)
print("listening on x", flush=True)
time.sleep(600)
"""


def child(folder: Path, program: str) -> SupervisedProcess:
    command = [sys.executable, "-c", program]
    return SupervisedProcess(
        "server", command, ready_line="listening on", log_file=folder / "log", pid_file=folder / "pid"
    )


def test_a_child_process_that_dies_is_restarted(tmp_path: Path) -> None:
    """Killed, it comes back under another pid; stopped, it does not."""
    server = child(tmp_path, CHILD)
    server.start()
    first = int((tmp_path / "pid").read_text())
    os.kill(first, signal.SIGKILL)
    ticks = threading.Event()
    for _ in range(int(PATIENCE_S / 0.05)):
        if (second := int((tmp_path / "pid").read_text())) != first:
            break
        ticks.wait(0.05)
    assert second != first and server.restarts == 1
    server.stop()
    assert not (tmp_path / "pid").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


def test_a_child_that_cannot_start_is_reported_with_its_last_output(tmp_path: Path) -> None:
    """One line with the reason, and no process left."""
    with pytest.raises(UsageError, match="the server does not start: no such release"):
        child(tmp_path, "import sys; sys.exit('no such release')").start()


def test_calls_are_rate_limited_per_address() -> None:
    """A burst, then the rate; other addresses have their own."""
    now = [0.0]
    limit = RateLimit(per_s=2.0, burst=3, now=lambda: now[0])
    assert [limit.allow("a") for _ in range(4)] == [True, True, True, False]
    assert limit.allow("b")
    now[0] += 0.5
    assert [limit.allow("a"), limit.allow("a")] == [True, False]
    limit.refund("a")
    limit.refund("never seen")
    assert [limit.allow("a"), limit.allow("a")] == [True, False]


@pytest.mark.parametrize(
    ("path", "declared", "parts", "status"),
    [
        ("/v1/plans", b"10", [b"x" * 10], 200),
        ("/v1/plans", b"11", [b"x" * 11], 413),
        ("/v1/plans", b"ten", [b"x"], 413),
        ("/v1/plans", None, [b"x" * 6, b"x" * 6], 413),
        ("/v1/models", b"100", [b"x" * 100], 200),
    ],
)
def test_request_body_limits_depend_on_the_path(
    path: str, declared: bytes | None, parts: list[bytes], status: int
) -> None:
    """By the declared length, and by the received bytes."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def talk() -> int:
        left = list(parts)
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": left.pop(0) if left else b"", "more_body": bool(left)}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-length", declared)] if declared is not None else []
        bounds = BodyLimits(app, default=10, by_suffix={"/v1/models": 100})
        await bounds({"type": "http", "path": path, "headers": headers}, receive, send)
        return int(sent[0]["status"])

    assert asyncio.run(talk()) == status


def test_heavy_jobs_of_an_operator_run_one_at_a_time_in_a_bounded_queue() -> None:
    """Order is kept, errors are raised in the caller, and a job beyond the limit is refused with a retry hint."""
    heavy = HeavyJobQueue()
    gate, ran = threading.Event(), []

    def work(number: int) -> int:
        gate.wait(PATIENCE_S)
        ran.append(number)
        if number == 1:
            raise UsageError("one")
        return number

    async def talk() -> list[Any]:
        waiting = [asyncio.create_task(heavy.run(work, number)) for number in range(16)]
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await heavy.run(work, 99)
        gate.set()
        return await asyncio.gather(*waiting, return_exceptions=True)

    answers = asyncio.run(talk())
    assert ran == list(range(16)) and answers[0] == 0 and isinstance(answers[1], UsageError)


def test_what_a_long_call_does_was_not_known() -> None:
    """Its operator, and nobody else, sees it queued and then by its step; outside of a call a step is reported to
    nobody."""
    heavy = HeavyJobQueue()
    reported, gate = threading.Event(), threading.Event()

    def work() -> None:
        report_step("timing each layer")
        reported.set()
        gate.wait(PATIENCE_S)

    async def submit(operator: str, path: str) -> None:
        set_current_operator(operator)
        await heavy.run(work, path=path)

    async def talk() -> None:
        calls = [asyncio.create_task(submit("alice", path)) for path in ("/v1/a", "/v1/b")]
        await asyncio.sleep(0)
        assert await asyncio.to_thread(reported.wait, PATIENCE_S)
        first, second = (job.to_dict() for job in heavy.jobs_of("alice"))
        assert (first["path"], first["state"], first["step"]) == ("/v1/a", "running", "timing each layer")
        assert (second["path"], second["state"]) == ("/v1/b", "queued") and heavy.jobs_of("bob") == []
        gate.set()
        await asyncio.gather(*calls)

    report_step("nothing")
    asyncio.run(talk())
    assert heavy.jobs_of("alice") == []


def test_one_operators_push_delayed_the_pushes_of_all_others() -> None:
    """A job that does not end holds back its own operator's next one only; the operators after it take turns."""
    heavy = HeavyJobQueue(lanes=2)
    gate, all_queued = threading.Event(), threading.Event()
    ran: list[str] = []

    def endless() -> None:
        gate.wait(PATIENCE_S)
        ran.append("mallory 0")

    def brief(name: str) -> None:
        all_queued.wait(PATIENCE_S)
        ran.append(name)

    async def submit(operator: str, work: Callable[..., None], *arguments: str) -> None:
        set_current_operator(operator)
        await heavy.run(work, *arguments)

    async def talk() -> None:
        slow = [asyncio.create_task(submit("mallory", endless))]
        slow.append(asyncio.create_task(submit("mallory", brief, "mallory 1")))
        await asyncio.sleep(0)
        names = ["alice 0", "alice 1", "alice 2", "bob 0"]
        jobs = [asyncio.create_task(submit(name.split()[0], brief, name)) for name in names]
        await asyncio.sleep(0)
        all_queued.set()
        await asyncio.gather(*jobs)
        assert heavy.waiting == 2 and not any(name.startswith("mallory") for name in ran)
        gate.set()
        await asyncio.gather(*slow)

    asyncio.run(talk())
    assert ran.index("bob 0") < ran.index("alice 2"), ran
    assert [name for name in ran if name.startswith("alice")] == ["alice 0", "alice 1", "alice 2"]
    assert ran[-2:] == ["mallory 0", "mallory 1"] and heavy.waiting == 0


def test_one_operator_could_fill_the_queue_of_all() -> None:
    """Beyond its own share an operator is refused; another is not."""
    heavy = HeavyJobQueue(lanes=1)
    gate = threading.Event()

    async def submit(operator: str) -> None:
        set_current_operator(operator)
        await heavy.run(gate.wait, PATIENCE_S)

    async def talk() -> None:
        waiting = [asyncio.create_task(submit("mallory")) for _ in range(MAX_JOBS_PER_OPERATOR)]
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="of your"):
            await submit("mallory")
        waiting.append(asyncio.create_task(submit("alice")))
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*waiting)

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (UsageError("x"), 400, "UsageError"),
        (NotFound("x"), 404, "NotFound"),
        (Conflict("x"), 409, "UsageError"),
        (Unauthenticated("x"), 401, "UsageError"),
        (InfeasibleLimits("x"), 409, "InfeasibleLimits"),
        (ModelRefused("x"), 422, "ModelRefused"),
        (Busy("x"), 429, "Busy"),
        (LinkError("x"), 503, "LinkError"),
        (BlobLost("x"), 500, "EdgeError"),
        (EdgeError("x"), 500, "EdgeError"),
    ],
    ids=lambda one: str(one) if not isinstance(one, EdgeError) else type(one).__name__,
)
def test_each_error_kind_maps_to_a_status_and_an_sdk_name(error: EdgeError, status: int, kind: str) -> None:
    """Internal subclasses map to the nearest kind that the SDK exports."""
    assert (status_of(error), kind_of(error)) == (status, kind)


def test_dimension_bindings_are_parsed_or_refused() -> None:
    """DIM=N, split at the last `=`."""
    assert parse_bindings(["batch=1", "a=b=3"]) == {"batch": 1, "a=b": 3}
    for wrong in ("batch", "=1", "batch=", "batch=x", "batch=0", "batch=-1", "batch=1e3"):
        with pytest.raises(UsageError):
            parse_bindings([wrong])


def test_an_unknown_name_suggests_similar_or_all_names() -> None:
    """Three at most, or all names, or that there is none."""
    assert "did you mean digits?" in str(not_found("model", "digit", ["digits", "faces"]))
    assert "there is: digits, faces" in str(not_found("model", "xyzzy", ["faces", "digits"]))
    assert "no model yet" in str(not_found("model", "digits", []))


@pytest.mark.parametrize(
    ("wish", "limits"),
    [
        (PlanOptions(), {}),
        (PlanOptions(partition="device"), {"force": "device"}),
        (PlanOptions(partition="cloud", limits={"keep_first": 1}), {"force": "cloud", "keep_first": 1}),
        (PlanOptions(partition="conv1"), {"force_after": "conv1"}),
        (PlanOptions(limits={"force": "cloud"}), {"force": "cloud"}),
    ],
    ids=str,
)
def test_a_partition_option_maps_to_a_planner_limit(wish: PlanOptions, limits: dict[str, Any]) -> None:
    """The option's spelling on the left, the planner's limit on the right."""
    assert wish.planner_limits() == limits


def test_a_partition_conflicts_with_a_forced_cut() -> None:
    """Only one of the two can be given."""
    with pytest.raises(UsageError):
        PlanOptions(partition="conv1", limits={"force": "cloud"}).planner_limits()


def test_the_link_is_the_operators_then_the_devices_then_the_default() -> None:
    """A class of several devices is planned for the slowest of their links."""
    assert link_of("lte", "3g").name == "lte" and link_of("", "3g").name == "3g" and link_of("", "").name == "wifi"
    assert slowest_link([parse_link("wifi"), parse_link("3g"), parse_link("lte")]).name == "3g"


def test_a_device_profile_is_a_shipped_name_and_never_a_path() -> None:
    """A path would name a file of the controller's machine."""
    assert device_profile("raspberrypi4").name == "raspberrypi4"
    for wrong in ("rasberrypi4", "./x.yaml", "/etc/passwd", ""):
        with pytest.raises(NotFound):
            device_profile(wrong)


def test_a_plan_uses_whole_slice_times_measured_once_per_table(tmp_path: Path) -> None:
    """This machine's seconds are those of the chosen slices; asked again, nothing is measured again."""
    bench, measure = RegistryHarness(tmp_path), CountingMeasure()
    model: Model = bench.push(a_model())
    planning = PlanningService(bench.database, bench.registry, now=lambda: 1.0, measure=measure)
    costs = planning.costs(model, "raspberrypi4")
    wish = PlanOptions(partition="cloud")

    first = planning.plan(model, "raspberrypi4", parse_link("lte"), wish)
    assert len(measure.slices_asked) == 1
    assert first.row.remote_s == pytest.approx(0.5 * sum(layer.seconds["cloud"] for layer in costs.layers))

    again = planning.plan(model, "raspberrypi4", parse_link("lte"), wish)
    assert again == first and len(measure.slices_asked) == 1
    assert "slices measured whole" in planning.describe(model, "raspberrypi4", "lte", wish)["basis"]["cloud"]

    planning.profile(model)
    planning.plan(model, "raspberrypi4", parse_link("lte"), wish)
    assert len(measure.slices_asked) == 3


def test_a_profile_was_no_costs_file_and_measured_no_slice_whole(tmp_path: Path) -> None:
    """What `edgectl profile --json` writes is what `edgectl plan` reads; the slices that plans choose are in it, and
    this machine's seconds are theirs."""
    bench, measure = RegistryHarness(tmp_path), CountingMeasure()
    model: Model = bench.push(a_model())
    planning = PlanningService(bench.database, bench.registry, now=lambda: 1.0, measure=measure)
    told = planning.profile(model, device_class="raspberrypi4")
    costs = load_costs(told)

    assert costs.device_class == "raspberrypi4" and "slices measured whole" in costs.basis["cloud"]
    assert [layer.seconds["cloud"] for layer in costs.layers] == pytest.approx([0.0005] * 4)
    assert [layer["p95_s"] for layer in told["layers"]] == [0.002] * 4
    assert told["slices"][0]["p95_s"] == 0.002 and told["notes"] == []
    (groups,) = measure.slices_asked
    assert {name for group in groups for name in group} == {layer.name for layer in costs.layers}


class BusyMachine:
    """A planning service on a machine whose load and speed a test sets."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        harness, self.measure = RegistryHarness(folder), CountingMeasure()
        self.model: Model = harness.push(a_model())
        self.now, self.is_quiet = 1_000.0, True
        self.planning = PlanningService(harness.database, harness.registry, now=lambda: self.now, measure=self.measure)
        monkeypatch.setattr(
            "edgesplit_controller.planning.planner_service.is_quiet", lambda seconds, wait: self.is_quiet
        )

    def set(self, load: MachineLoad, layer_s: float) -> None:
        self.measure.load, self.measure.layer_s = load, layer_s

    def layer_s(self) -> float:
        """Seconds of the first layer that plans use."""
        return self.planning.costs(self.model, "raspberrypi4").layers[0].seconds["cloud"]

    def remeasure(self, after_s: float = 3_600.0) -> None:
        self.now += after_s
        self.planning.remeasure_busy(lambda seconds: None)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BusyMachine:
    return BusyMachine(tmp_path, monkeypatch)


def test_times_of_a_busy_machine_flipped_a_plan(machine: BusyMachine) -> None:
    """89 ms under load for 8.9: the plan says so, and once the machine is quiet they are replaced by themselves."""
    machine.set(BUSY, 0.010)
    basis = machine.planning.describe(machine.model, "raspberrypi4", "lte", PlanOptions())["basis"]["cloud"]
    assert "which was busy" in basis and "other work 63%" in basis and "measured again" in basis

    machine.set(QUIET, 0.001)
    machine.is_quiet = False
    machine.remeasure()
    assert machine.layer_s() == 0.010
    machine.is_quiet = True
    machine.remeasure()
    assert machine.layer_s() == 0.001
    assert "busy" not in machine.planning.costs(machine.model, "raspberrypi4").basis["cloud"]
    assert not (machine.planning._slice_factors(machine.model)).busy
    machine.set(QUIET, 0.002)
    machine.remeasure()
    assert machine.layer_s() == 0.001


def test_a_busy_measurement_never_replaces_a_quiet_one(machine: BusyMachine) -> None:
    """Not even on request; of two busy ones the faster stays, and a quiet one replaces both."""
    machine.set(QUIET, 0.001)
    assert machine.layer_s() == 0.001
    machine.set(BUSY, 0.010)
    told = machine.planning.profile(machine.model)
    assert [layer["median_s"] for layer in told["layers"]] == [0.001] * 4
    assert "busy" not in told["measurement"]


def test_of_two_busy_measurements_the_faster_stays(machine: BusyMachine) -> None:
    """Other work only adds time."""
    for layer_s, kept_s in ((0.010, 0.010), (0.020, 0.010), (0.005, 0.005)):
        machine.set(BUSY, layer_s)
        told = machine.planning.profile(machine.model)
        assert told["layers"][0]["median_s"] == kept_s
        assert "the machine was busy" in told["measurement"]
    machine.set(QUIET, 0.007)
    machine.planning.profile(machine.model)
    assert machine.layer_s() == 0.007


def test_measuring_again_backs_off_on_a_machine_that_stays_busy(machine: BusyMachine) -> None:
    """After a minute, then after four, then after sixteen."""
    machine.set(BUSY, 0.010)
    machine.layer_s()
    counts = []
    for after_s in (30.0, 40.0, 120.0, 180.0):
        machine.remeasure(after_s)
        counts.append(machine.measure.asked.count("layers"))
    assert counts == [1, 2, 2, 3]


def test_measurements_of_an_earlier_version_are_used_and_taken_again(machine: BusyMachine) -> None:
    """They say nothing of the machine: they hold until there is a quiet one."""
    machine.layer_s()
    with machine.planning._database.write() as session:
        row = session.scalars(select(Measurement).filter_by(kind="layers")).one()
        row.content = {"layers": row.content["layers"]}
    machine.set(BUSY, 0.010)
    assert machine.layer_s() == 0.001
    machine.remeasure()
    assert machine.layer_s() == 0.001
    machine.set(QUIET, 0.002)
    machine.remeasure(90_000.0)
    assert machine.layer_s() == 0.002


def test_slices_timed_on_a_busy_machine_make_no_tier_slower() -> None:
    """Twice the sum of their layers, for other work: they count as that sum until they are measured again."""
    factors = SliceFactors().with_measurement("a", [["conv"]], WholeSliceTimes(factor=2.0, is_busy=True))
    assert factors.factors == {"a": 1.0} and factors.busy == {"a": [["conv"]]}
    quiet = factors.with_measurement("a", [["conv"]], WholeSliceTimes(factor=1.2))
    assert quiet.factors == {"a": 1.2} and not quiet.busy


def test_what_devices_measured_at_work_replaces_the_prediction(tmp_path: Path) -> None:
    """The next plan for their class has their seconds, and no other class's."""
    bench, measure = RegistryHarness(tmp_path), CountingMeasure()
    model: Model = bench.push(a_model())
    planning = PlanningService(bench.database, bench.registry, now=lambda: 1.0, measure=measure)
    layers = planning.costs(model, "raspberrypi4").layers
    names, seconds = tuple(layer.name for layer in layers), 3.0 * sum(layer.seconds["device"] for layer in layers)
    told = FieldMeasurements(link=parse_link("wifi"), device=(SliceMeasurement(names, seconds),), devices=2)
    planning.at_work = lambda asked, device_class: told if device_class == "raspberrypi4" else None

    planned = planning.plan(model, "raspberrypi4", parse_link("lte"), PlanOptions(partition="device"))
    assert planned.row.device_s == pytest.approx(seconds)
    basis = planning.describe(model, "raspberrypi4", "lte", PlanOptions())["basis"]["device"]
    assert basis == "measured: at work, on 2 of raspberrypi4"
    assert planning.costs(model, "raspberrypi5").basis["device"].startswith("predicted")


def test_the_costs_that_the_command_line_plans_with_were_sums_over_layers(tmp_path: Path) -> None:
    """`edgectl plan MODEL` gets this machine's seconds as chosen slices take them whole; measured once."""
    bench, measure = RegistryHarness(tmp_path), CountingMeasure()
    model: Model = bench.push(a_model())
    planning = PlanningService(bench.database, bench.registry, now=lambda: 1.0, measure=measure)
    whole = planning.costs(model, "raspberrypi4", tiers={"edge": "jetson-nano"}, whole=True)

    assert [layer.seconds["cloud"] for layer in whole.layers] == pytest.approx([0.0005] * 4)
    assert planning.costs(model, "raspberrypi4", tiers={"edge": "jetson-nano"}, whole=True) == whole
    assert len(measure.slices_asked) == 1


def test_a_model_is_measured_again_only_for_new_samples_or_on_request(tmp_path: Path) -> None:
    """Plans reuse the measurements, also after a restart; `profile` measures again."""
    bench, measure = RegistryHarness(tmp_path), CountingMeasure()
    model: Model = bench.push(a_model())
    planning = PlanningService(bench.database, bench.registry, now=lambda: 1.0, measure=measure)
    made = planning.plan(model, "raspberrypi4", parse_link("lte"), PlanOptions(partition="conv"))
    planning.costs(model, "jetson-nano")
    assert measure.asked == ["layers", "0 samples"]
    assert made.table.model == "small@1" and made.row.split_after == "conv"

    database = Database(f"sqlite:///{tmp_path / 'controller.db'}")
    registry = Registry(database, BlobStore(tmp_path / "blobs"), now=lambda: 1.0)
    again = PlanningService(database, registry, now=lambda: 1.0, measure=measure)
    again.costs(registry.get("small"), "raspberrypi4")
    assert measure.asked == ["layers", "0 samples"]

    assert {layer["name"] for layer in again.profile(model)["layers"]} == {"conv", "pool", "flatten", "classify"}
    assert measure.asked == ["layers", "0 samples", "layers", "0 samples"]


def test_lossy_codecs_are_measured_only_when_a_loss_is_allowed(tmp_path: Path) -> None:
    """Once, on two samples at least; again when a label comes. A plan without an allowance stays lossless."""
    bench, measure = RegistryHarness(tmp_path), CountingMeasure()
    model = bench.push(a_model())
    planning = PlanningService(bench.database, bench.registry, now=lambda: 1.0, measure=measure)
    lossy = PlanOptions(limits={"max_loss": 0.005})
    archives = [npz(image=np.full((1, 3, 16, 16), value, np.float32)) for value in range(2)]
    bench.registry.add_samples(model, tensors=archives[:1])
    with pytest.raises(UsageError, match=r"two samples at least.*not 1"):
        planning.plan(model, "raspberrypi4", parse_link("3g"), lossy)
    assert "two samples at least" in planning.profile(model, codecs=True)["notes"][0]
    bench.registry.add_samples(model, tensors=archives[1:])
    planning.plan(model, "raspberrypi4", parse_link("3g"), PlanOptions())
    assert not [asked for asked in measure.asked if "codecs" in asked]

    made = planning.plan(model, "raspberrypi4", parse_link("3g"), lossy)
    planning.plan(model, "raspberrypi4", parse_link("lte"), lossy)
    assert [asked for asked in measure.asked if "codecs" in asked] == ["codecs on 2 samples, labels [None, None]"]
    used = {codec for row in made.table.rows for codec in row.codecs.values()}
    assert used <= {"raw", "int8"} and made.limits.max_loss == 0.005
    lossless = planning.plan(model, "raspberrypi4", parse_link("3g"), PlanOptions())
    assert not {codec for row in lossless.table.rows for codec in row.codecs.values()} - {"raw"}

    bench.registry.add_samples(model, tensors=archives, labels={archives[0]: 1})
    told = planning.profile(model, codecs=True)["codecs"]
    assert measure.asked[-1] == "codecs on 2 samples, labels [1, None]"
    assert {message["codec"] for message in told} == {"int8"} and all(
        message["confirmed_loss"] == 0.001 for message in told
    )


def test_changed_answers_are_confirmed_on_the_samples_that_choose_nothing(tmp_path: Path) -> None:
    """Too few samples are refused before anything is measured. Answers are compared on all but the first 16, for the
    tensors that the plan would send lossy, once; the row has the promise, and an answer that outputs leave open must be
    said."""
    bench, measure = RegistryHarness(tmp_path), CountingMeasure()
    model = bench.push(a_model())
    planning = PlanningService(bench.database, bench.registry, now=lambda: 1.0, measure=measure)
    options = PlanOptions(limits={"max_changed": 0.05, "force_after": "conv"})
    archives = [npz(image=np.full((1, 3, 16, 16), value, np.float32)) for value in range(66)]
    bench.registry.add_samples(model, tensors=archives[:60])
    with pytest.raises(UsageError, match=r"it takes 45 .*there are 44 beside the 16"):
        planning.plan(model, "raspberrypi4", parse_link("3g"), options)
    assert measure.asked == []
    bench.registry.add_samples(model, tensors=archives)

    made = planning.plan(model, "raspberrypi4", parse_link("3g"), options)
    planning.describe(model, "raspberrypi4", "3g", options)

    compared = [asked for asked in measure.asked if asked.startswith("changes")]
    assert len(compared) == 1 and "on 50 samples" in compared[0]
    assert made.row.changed is not None and made.row.changed.samples == 50
    assert set(made.row.codecs.values()) == {"int8"} and made.table.limits["max_changed"] == "0.05"
    assert (
        msgspec.json.decode(msgspec.json.encode(made.table), type=Plan).row(made.row.name).changed == made.row.changed
    )

    close = msgspec.structs.replace(options, answer="close:0.1")
    planning.plan(model, "raspberrypi4", parse_link("3g"), close)
    assert measure.asked[-1].startswith("changes of close:0.1")
    assert close.as_options()["answer"] == "close:0.1" and "answer" not in options.as_options()
    measure.changed = 20
    bench.registry.add_samples(model, tensors=[npz(image=np.full((1, 3, 16, 16), 99.0, np.float32))])
    refused = planning.plan(model, "raspberrypi4", parse_link("3g"), options)
    assert refused.row.changed is None and not set(refused.row.codecs.values()) - {"raw"}
    with pytest.raises(UsageError, match="give --answer"):
        answer_rule_of("", [TensorSpec("a", "FP32", (1, 4)), TensorSpec("b", "FP32", (1, 4))])


@pytest.mark.parametrize("host", ["hub.local", "hub", "10.0.0.2", "fe80::1", "bücher.example", "_edge.local", "hub."])
def test_resolvable_names_and_addresses_are_accepted_as_host(host: str) -> None:
    """Whatever a device can look up or dial."""
    assert Settings(data=Path("d"), hosts=(host,)).host == host


@pytest.mark.parametrize("host", ["", "https://hub", "hub:8443", "10.0.0.256", "a b", "-x.local", "a..b", "x" * 300])
def test_an_unreachable_host_name_is_refused(host: str) -> None:
    """Before certificates are issued for it and claims carry it."""
    with pytest.raises(UsageError, match="--host"):
        Settings(data=Path("d"), hosts=(host,))
