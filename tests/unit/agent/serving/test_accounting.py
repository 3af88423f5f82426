"""Finished requests are recorded after their answers, in order, once, and a reader of the counts sees all of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edgesplit import Client
from edgesplit.errors import DeadlineExceeded, Dropped, InferenceFailed, UsageError
from edgesplit.http1.server import Request, Response, Server
from edgesplit.oip.report import Report
from edgesplit_agent.serving.accounting import RequestAccounting
from edgesplit_agent.serving.engine import Engine
from edgesplit_agent.serving.http_endpoint import Endpoint
from edgesplit_agent.serving.metrics import RequestMetrics
from edgesplit_agent.telemetry.release_health import ReleaseHealthTracker
from edgesplit_agent.telemetry.request_record import RequestRecord
from edgesplit_agent.telemetry.windows import TelemetryWindows
from support.agent_engine import CLASS, INPUT, LOCAL, RecordList, active, eventually, programs, record

LONG_S = 60.0


def test_record_is_delivered_after_the_answer() -> None:
    """Not while the request runs: the caller delivers it once the answer has been sent."""
    engine, kept = Engine(CLASS, None), RecordList()
    up_to_date = engine.observe(kept)
    engine.serve("tiny", active(LOCAL))
    answer = engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S, defer_accounting=True)
    assert kept.records == []
    engine.accounting.deliver()
    (finished,) = kept.records
    assert finished.outcome is answer.report and finished.model == "tiny" and finished.device_runs == (None,)
    assert finished.phases and finished.timing is not None and not finished.is_direct
    assert up_to_date() is kept and len(kept.records) == 1
    engine.stop()


def test_reading_delivers_queued_records() -> None:
    """Between an answer and the delivery of its record anything may be read: the reader delivers what is queued."""
    engine = Engine(CLASS, None)
    up_to_date = engine.observe(RecordList())
    engine.serve("tiny", active(LOCAL))
    for count in range(1, 4):
        engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S, defer_accounting=True)
        assert len(up_to_date().records) == count
    engine.stop()


def test_stop_delivers_queued_records() -> None:
    """Requests that were answered and not yet recorded are recorded by the stop."""
    engine, kept = Engine(CLASS, None), RecordList()
    engine.observe(kept)
    engine.serve("tiny", active(LOCAL))
    for _ in range(5):
        engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S, defer_accounting=True)
    assert kept.records == []
    engine.stop()
    assert len(kept.records) == 5


def test_answered_request_is_counted_before_the_next_read(socket_folder: Path) -> None:
    """Even while the answering thread is delayed before it delivers the record: reading delivers it."""
    engine = Engine(CLASS, None)
    up_to_date = engine.observe(RecordList())
    engine.serve("tiny", active(LOCAL))
    endpoint, may_deliver = Endpoint(engine, dict), threading.Event()

    def handle(request: Request) -> Response:
        response = endpoint(request)
        deliver = response.after
        return response if deliver is None else msgspec.structs.replace(response, after=lambda: delayed(deliver))

    def delayed(deliver: Callable[[], None]) -> None:
        may_deliver.wait(20)
        deliver()

    server = Server(handle, path=socket_folder / "a.sock")
    server.start()
    try:
        with Client(f"unix://{socket_folder / 'a.sock'}", lane=False, shared_memory=False) as client:
            client.infer("tiny", {"x": INPUT}, deadline_s=LONG_S)
            assert len(up_to_date().records) == 1
            reply = endpoint(Request("GET", "/v2/models/tiny/stats", headers={"host": "localhost"}))
            (statistics,) = json.loads(b"".join(reply.body))["model_stats"]
            assert statistics["inference_count"] == 1
    finally:
        may_deliver.set()
        server.stop(0.5)
        engine.stop()


def test_records_are_delivered_in_order_and_once() -> None:
    """Eight threads queue and deliver at once: each thread's records arrive in its order, none twice, none lost."""
    accounting, kept = RequestAccounting(), RecordList()
    accounting.add(kept)
    begin = threading.Barrier(8)

    def answer(thread: int) -> None:
        begin.wait(20)
        for number in range(500):
            accounting.finished(record(Report(release="r", row=str(number)), model=str(thread)))
            accounting.deliver()

    threads = [threading.Thread(target=answer, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    rows: dict[str, list[str]] = {}
    for entry in kept.records:
        assert isinstance(entry.outcome, Report)
        rows.setdefault(entry.model, []).append(entry.outcome.row)
    assert rows == {str(thread): [str(number) for number in range(500)] for thread in range(8)}


def test_run_that_fails_after_its_request_is_recorded_once() -> None:
    """Slices that hang past the deadline and fail in the end are the release's fault, and are counted once."""
    steps = programs()
    hanging, ended = threading.Event(), threading.Event()

    def run(tensors: Any) -> Any:
        hanging.set()
        ended.wait(20)
        raise InferenceFailed("the accelerator has gone")

    steps["a"].run = run  # type: ignore[method-assign]
    engine, kept = Engine(CLASS, None), RecordList()
    engine.observe(kept)
    engine.serve("tiny", active(LOCAL, steps=steps))
    with pytest.raises(DeadlineExceeded):
        engine.infer("tiny", {"x": INPUT}, deadline_s=0.2)
    assert hanging.is_set() and [entry.device_runs for entry in kept.records] == [()]
    ended.set()
    eventually("the run is recorded", lambda: len(kept.records) == 2)
    late = kept.records[1]
    assert late.outcome is None and [type(error) for error in late.device_runs] == [InferenceFailed]
    engine.stop()
    assert len(kept.records) == 2


def test_slice_times_are_learnt_once_per_record() -> None:
    """By the release and by the estimate of the device's speed."""
    engine, release = Engine(CLASS, None), active(LOCAL)
    engine.serve("tiny", release)
    for _ in range(3):
        answer = engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S)
        assert np.all(np.isfinite(answer.outputs["y"]))
    engine.stop()
    assert {name: runs for name, _, runs in release.learned()} == {"a": 3, "b": 3}


@pytest.mark.parametrize("error", [UsageError("the frame is not a whole JPEG"), Dropped("stale")])
def test_an_applications_error_was_counted_as_a_failure_of_the_model(error: Exception) -> None:
    """Neither in the fleet's figures nor for a gate; the agent's own metrics name it."""
    windows, health, metrics, release = TelemetryWindows(), ReleaseHealthTracker(), RequestMetrics(), active(LOCAL)
    health.reconcile({"tiny": release.digest}, 0.0)
    for observer in (windows, health, metrics):
        observer.finished(RequestRecord("tiny", release, error))
    assert windows.total == {} and health.to_telemetry(1.0)[0].failed == 0
    (counted,) = metrics.registry.series()
    assert counted.value == 1 and counted.labels[-1] in ("rejected", "dropped")


def test_record_without_an_outcome_is_no_request() -> None:
    """Runs on the device alone are not counted as requests."""
    windows, health, metrics, release = TelemetryWindows(), ReleaseHealthTracker(), RequestMetrics(), active(LOCAL)
    health.reconcile({"tiny": release.digest}, 0.0)
    for observer in (windows, health, metrics):
        observer.finished(RequestRecord("tiny", release, None, (InferenceFailed("gone"),)))
    assert windows.total == {} and health.to_telemetry(1.0)[0].failed == 0 and not list(metrics.registry.series())
