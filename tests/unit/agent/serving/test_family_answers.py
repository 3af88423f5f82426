"""What an engine answers for a family: which variant, never below the floor, the stronger one's where it is in time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from edgesplit.errors import DeadlineExceeded, InfeasibleLimits, LinkError, UsageError
from edgesplit.oip import protocol as oip
from edgesplit.oip.options import InferOptions, to_parameters
from edgesplit.oip.report import Report, from_parameters
from edgesplit.plan import Plan, Row
from edgesplit.release.manifest import Manifest, Slice
from edgesplit.release.privacy_floor import PrivacyFloor
from edgesplit_agent.releases.loaded_release import LoadedRelease, plan_for
from edgesplit_agent.serving.engine import Engine
from edgesplit_agent.serving.remote_requests import RemoteRequests
from edgesplit_agent.worker.host import InProcess
from support.agent_engine import CLASS, INPUT, LINK, LOCAL, ScriptedCloud, Step, X, Y, eventually, unavailable, world

LONG_S = 20.0
SMALL = Row(name="small:local", device=("small.s01",), device_s=0.005, variant="small", accuracy=0.6)
LARGE = Row(
    name="large:remote", remote=("large.s01",), sends=("x",), receives=("y",), up_bytes=300, variant="large",
    accuracy=0.9,
)  # fmt: skip
BY_SMALL, BY_LARGE = -INPUT, (INPUT + 1) * 2
"""The scripted cloud computes the second."""


@contextmanager
def family(least_accuracy: float = 0.0, deadline_s: float = 0.0) -> Iterator[tuple[Engine, ScriptedCloud, Step]]:
    """An engine that serves a small variant here and a large one in the cloud."""
    slices = (
        Slice("small.s01", "onnx", ("small:a",), (X,), (Y,)),
        Slice("large.s01", "onnx", ("large:a",), (X,), (Y,)),
    )
    plan = Plan(
        model="birds@1", device_class=CLASS, rows=(LARGE, SMALL), link=LINK, objective="accuracy",
        slice_s={"small.s01": 0.005}, least_accuracy=least_accuracy, deadline_s=deadline_s,
    )  # fmt: skip
    manifest = Manifest(
        model="birds@1", model_sha256="0" * 64, created="2026-01-01T00:00:00Z", input_spec=None, inputs=(X,),
        outputs=(Y,), slices=slices, plans={CLASS: plan},
    )  # fmt: skip
    small = Step("x", "y", lambda x: -x)
    with world(LOCAL, margin_s=0.02) as (engine, cloud, _):
        engine.serve(
            "birds", LoadedRelease("b" * 64, manifest, plan_for(manifest, CLASS), InProcess({"small.s01": small}))
        )
        yield engine, cloud, small


def test_the_answer_names_its_variant() -> None:
    """With its accuracy; the strong one answers while the cloud does."""
    with family() as (engine, _, small):
        answer = engine.infer("birds", {"x": INPUT}, deadline_s=LONG_S)
        report = answer.report
        assert (report.variant, report.accuracy, report.row) == ("large", 0.9, "large:remote")
        assert np.array_equal(answer.outputs["y"], BY_LARGE) and small.runs == 0


def test_a_cloud_that_fails_leaves_the_local_variant() -> None:
    """The answer says that it was the small one, and that this was a fallback."""
    with family() as (engine, cloud, _):
        cloud.script = unavailable
        answer = engine.infer("birds", {"x": INPUT}, deadline_s=LONG_S)
        assert (answer.report.variant, answer.report.accuracy, answer.report.fallback) == ("small", 0.6, True)
        assert np.array_equal(answer.outputs["y"], BY_SMALL)


def test_a_silent_cloud_is_waited_for_until_the_deadline_demands_the_small_one() -> None:
    """No early hedge: its answer would be the weaker one."""
    with family() as (engine, cloud, _):
        cloud.script = cloud.hold
        report = engine.infer("birds", {"x": INPUT}, deadline_s=1.0).report
        assert (report.variant, report.cause) == ("small", "timeout")
        assert engine.hedge_budget.counts["by_choice"] == 0


def test_the_weaker_answer_waits_for_the_stronger() -> None:
    """Both were in time: the device had finished first, and the large one's answer is returned."""
    with family() as (engine, cloud, small):
        cloud.script = cloud.hold
        small.may_run.clear()

        def let_both_answer() -> None:
            eventually("the small one runs", small.entered.is_set)
            small.may_run.set()
            eventually("it has answered", lambda: small.runs == 1)
            cloud.let_go.set()

        helper = threading.Thread(target=let_both_answer)
        helper.start()
        options = InferOptions(hedge="never")
        report = engine.infer("birds", {"x": INPUT}, deadline_s=2.0, options=options).report
        helper.join()
        assert (report.variant, small.runs) == ("large", 1)


def test_the_floor_of_a_request_is_never_broken() -> None:
    """Where the cloud fails, a request that needs the large one gets an error and not the small one's answer."""
    with family() as (engine, cloud, small):
        cloud.script = unavailable
        with pytest.raises(LinkError):
            engine.infer("birds", {"x": INPUT}, deadline_s=LONG_S, options=InferOptions(least_accuracy=0.8))
        cloud.script = cloud.hold
        with pytest.raises((DeadlineExceeded, LinkError)):
            engine.infer("birds", {"x": INPUT}, deadline_s=0.5, options=InferOptions(least_accuracy=0.8))
        assert small.runs == 0


def test_the_plans_floor_holds_for_every_request() -> None:
    """Without any option."""
    with family(least_accuracy=0.8) as (engine, cloud, small):
        cloud.script = unavailable
        with pytest.raises(LinkError):
            engine.infer("birds", {"x": INPUT}, deadline_s=LONG_S)
        assert small.runs == 0


def test_a_stale_answer_of_a_weaker_variant_is_not_given() -> None:
    """The stream's last answer was the small one's."""
    with family() as (engine, cloud, _):
        cloud.script = unavailable
        options = InferOptions(stream="door", stale_ok_s=60.0)
        assert engine.infer("birds", {"x": INPUT}, deadline_s=LONG_S, options=options).report.variant == "small"
        strict = InferOptions(stream="door", stale_ok_s=60.0, least_accuracy=0.8)
        with pytest.raises(LinkError):
            engine.infer("birds", {"x": INPUT}, deadline_s=LONG_S, options=strict)


def test_the_same_request_with_another_floor_is_another_request() -> None:
    """A retry gets the answer that was given, which may be the weaker one's; a request that asks for more does not."""
    with family() as (engine, cloud, _):
        cloud.script = unavailable
        first = engine.infer("birds", {"x": INPUT}, deadline_s=LONG_S, request_id="1")
        assert first.report.variant == "small"
        with pytest.raises(LinkError):
            engine.infer(
                "birds", {"x": INPUT}, deadline_s=LONG_S, request_id="1", options=InferOptions(least_accuracy=0.8)
            )


def test_a_floor_above_the_best_names_the_best() -> None:
    """And a model that is no family has no accuracy to ask for."""
    with family() as (engine, *_):
        with pytest.raises(InfeasibleLimits, match=r"95\.0%; the best, large, has 90\.0%"):
            engine.infer("birds", {"x": INPUT}, options=InferOptions(least_accuracy=0.95))
        with pytest.raises(UsageError, match="states no accuracy"):
            engine.infer("tiny", {"x": INPUT}, options=InferOptions(least_accuracy=0.5))


def test_the_plans_deadline_is_kept_before_the_requests() -> None:
    """A family that is to answer within 0.4 s does so with the small one, although the request would wait longer than
    the cloud takes."""
    with family(deadline_s=0.4) as (engine, cloud, _):
        cloud.script = cloud.hold
        report = engine.infer("birds", {"x": INPUT}, deadline_s=60.0).report
        assert (report.variant, report.cause) == ("small", "timeout")


def test_an_operators_request_through_the_controller_has_its_floor() -> None:
    """It arrives among the request's parameters; the rest of an application's options does not count."""
    with family() as (engine, _, _):

        def ask(options: InferOptions) -> Report | None:
            request = oip.InferRequest({"x": INPUT}, parameters=to_parameters(options))
            buffers, length = oip.encode_request(request)
            body, json_bytes = RemoteRequests(engine, PrivacyFloor()).answer("birds", b"".join(buffers), length, LONG_S)
            return from_parameters(dict(oip.decode_response(body, json_bytes).parameters))

        report = ask(InferOptions(least_accuracy=0.8, stream="camera", drop="oldest"))
        assert report is not None and report.variant == "large"
        with pytest.raises(InfeasibleLimits, match="the best, large, has"):
            ask(InferOptions(least_accuracy=0.95))
