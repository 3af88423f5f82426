"""What operators' requests may do on a device: nothing of its applications, and no output that must stay there."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from edgesplit.errors import MalformedMessage, NotFound, UsageError
from edgesplit.oip import protocol as oip
from edgesplit.oip.options import InferOptions, to_parameters
from edgesplit.oip.report import from_parameters
from edgesplit.release.privacy_floor import PrivacyFloor
from edgesplit.runtime import Tensor
from edgesplit_agent.releases.loaded_release import plan_for
from edgesplit_agent.serving.device_queue import DeviceQueue
from edgesplit_agent.serving.engine import Engine
from edgesplit_agent.serving.queue_policy import FairShares, QueueEntry
from edgesplit_agent.serving.remote_requests import RemoteRequests
from edgesplit_agent.worker.host import InProcess
from support.agent_engine import CLASS, DIGEST, EXPECTED, INPUT, LOCAL, Loaded, active, eventually, manifest, programs

FAR = 1e9


def ask(engine: Engine, request: oip.InferRequest, model: str = "tiny") -> oip.InferResponse:
    buffers, length = oip.encode_request(request)
    answer = RemoteRequests(engine, PrivacyFloor()).answer(model, b"".join(buffers), length, 5.0)
    return oip.decode_response(*answer)


@pytest.fixture()
def engine() -> Engine:
    made = Engine(CLASS, None)
    made.serve("tiny", active(LOCAL))
    return made


def test_an_operators_answer_has_the_statistics_of_a_local_one(engine: Engine) -> None:
    """Row, times and id; the version may be named."""
    answer = ask(engine, oip.InferRequest({"x": INPUT}, id="7"), "tiny@1")
    report = from_parameters(dict(answer.parameters))
    assert np.array_equal(answer.outputs["y"], EXPECTED) and answer.id == "7"
    assert report is not None and report.row == "local" and report.release == DIGEST and report.latency_s > 0


@pytest.mark.parametrize("model", ["other", "tiny@2", "", "@", "tiny@1@1"])
def test_a_model_that_does_not_run_is_named(engine: Engine, model: str) -> None:
    """With those that do."""
    with pytest.raises(NotFound, match="here"):
        ask(engine, oip.InferRequest({"x": INPUT}), model)


def test_an_output_that_must_stay_on_the_device_is_not_sent() -> None:
    """An answer is data, too: nothing is run for it."""
    described = manifest(LOCAL, private_tensors=("y",))
    release = Loaded(DIGEST, described, plan_for(described, CLASS), InProcess(programs()))
    engine = Engine(CLASS, None)
    engine.serve("tiny", release)
    with pytest.raises(UsageError, match="may never leave this device"):
        ask(engine, oip.InferRequest({"x": INPUT}))
    assert release.programs["a"].runs == 0


def test_an_operator_is_not_given_an_applications_answer(engine: Engine) -> None:
    """Neither the last good one of its stream, nor the one to a request with the same id."""
    id_ = "urn:uuid:8a5d4a3a-9d3e-4b6f-8f0a-0c1d2e3f4a5b"
    options = InferOptions(stale_ok_s=60.0)
    engine.infer("tiny", {"x": INPUT + 1}, request_id=id_, options=options)
    answer = ask(engine, oip.InferRequest({"x": INPUT}, id=id_, parameters=to_parameters(options)))
    assert np.array_equal(answer.outputs["y"], EXPECTED)
    report = from_parameters(dict(answer.parameters))
    assert report is not None and not report.stale


def test_a_body_that_is_no_request_is_malformed(engine: Engine) -> None:
    """Also one that refers to memory of this device."""
    requests = RemoteRequests(engine, PrivacyFloor())
    shared = b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","parameters":{"shared_memory_region":"r",'
    for body in (b"", b"{}", b'{"inputs":', shared + b'"shared_memory_byte_size":16}}]}'):
        with pytest.raises((MalformedMessage, UsageError)):
            requests.answer("tiny", body, None, 5.0)


def test_applications_have_precedence_over_an_operators_request() -> None:
    """Whatever its deadline and its model's share: it has the processor only while no other request waits."""
    application, operator = QueueEntry("m", InferOptions(), FAR), QueueEntry("n", InferOptions(), 0.0)
    background = QueueEntry("n", InferOptions(), 0.0, is_background=True)
    shares = FairShares()
    shares.end("m", 100.0)
    assert shares.next([application, operator]) is operator
    assert shares.next([application, background]) is application
    assert shares.next([background]) is background


def test_an_operators_request_waits_until_applications_are_done(engine: Engine) -> None:
    """In the engine's own queue: the application's request that came later runs first."""
    release = engine.serving["tiny"]
    assert isinstance(release, Loaded)
    first = release.programs["a"]
    first.may_run.clear()
    running, operator, application = (INPUT + np.float32(number) for number in (0, 100, 200))

    def run(x: Tensor, *, background: bool) -> threading.Thread:
        def infer() -> None:
            engine.infer("tiny", {"x": x}, deadline_s=20.0, background=background)

        thread = threading.Thread(target=infer)
        thread.start()
        return thread

    queue: DeviceQueue = engine.queue
    threads = [run(running, background=False)]
    assert first.entered.wait(20)
    threads.append(run(operator, background=True))
    eventually("the operator's request waits", lambda: len(queue._waiting) == 1)
    threads.append(run(application, background=False))
    eventually("both wait", lambda: len(queue._waiting) == 2)
    first.may_run.set()
    for thread in threads:
        thread.join(20)
    assert [x[0, 0] for x in first.inputs[-3:]] == [x[0, 0] for x in (running, application, operator)]
