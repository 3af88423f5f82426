"""The engine on a tiny model: rows, privacy, activation, admission. Behaviour under faults is in tests/faults."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import pytest

from edgesplit.errors import (
    Busy,
    DeadlineExceeded,
    InferenceFailed,
    LinkError,
    MalformedMessage,
    NotFound,
    TrustError,
    UsageError,
)
from edgesplit.http1.server import Request
from edgesplit.offload_client.pool import OffloadClient
from edgesplit.oip import protocol as oip
from edgesplit.plan import Row
from edgesplit.release import boundary_codecs
from edgesplit.release.manifest import Chunk, GoldenExample, decode_manifest, device_slices, encode_manifest
from edgesplit.release.privacy_floor import PrivacyFloor
from edgesplit_agent.releases.loaded_release import check_golden, golden_ranges, is_close, plan_for
from edgesplit_agent.serving.engine import Engine, Settings, suggest_models
from edgesplit_agent.telemetry.request_record import DeviceRunObserver, RequestRecord
from edgesplit_agent.telemetry.windows import TelemetryWindows
from support.agent_engine import (
    CUT,
    DIGEST,
    EXPECTED,
    INPUT,
    LOCAL,
    REMOTE,
    H,
    ScriptedCloud,
    X,
    active,
    manifest,
    programs,
    unavailable,
    world,
)


@pytest.mark.parametrize("row", [LOCAL, CUT, REMOTE])
def test_every_row_gives_the_same_answer(row: Row) -> None:
    """Where the slices run does not change the result, and the report says where they ran."""
    with world(row) as (engine, cloud, _):
        answer = engine.infer("tiny", {"x": INPUT}, deadline_s=10)
        assert np.array_equal(answer.outputs["y"], EXPECTED)
        assert answer.report.row == row.name and not answer.report.fallback
        assert cloud.asked == ([] if row.is_local else [oip.remote_name(DIGEST, "pi4", row.name)])
        assert (answer.report.up_bytes > 0) == (not row.is_local)


def test_answer_and_telemetry_have_the_same_reason() -> None:
    """`infer`, `device show` and the pages show one sentence: that of the agent's own decision."""
    windows = TelemetryWindows()
    with world(LOCAL, CUT) as (engine, _, _):
        answer = engine.infer("tiny", {"x": INPUT}, deadline_s=10)
        windows.finished(RequestRecord("tiny", engine.serving["tiny"], answer.report))
        (window,) = windows.close_windows(engine.serving, engine.conditions, engine.reasons.of)
        assert answer.report.reason == window.reason != ""
        engine.drop("tiny")
        assert engine.reasons.of("tiny") == ""
    with world(LOCAL) as (engine, _, _):
        report = engine.infer("tiny", {"x": INPUT}, deadline_s=10).report
        assert report.reason.startswith("this device: the plan has no other row (about ")


def test_compressed_body_is_decoded_by_the_cloud() -> None:
    """A row with compression sends zstd, and the header length stays that of the uncompressed body."""
    import zstandard

    with world(msgspec.structs.replace(REMOTE, compress=True), LOCAL) as (engine, cloud, _):
        packed: list[int] = []

        def unpack(request: Request) -> Request:
            if request.headers.get("content-encoding") != "zstd":
                return request
            body = zstandard.ZstdDecompressor().decompress(request.body, max_output_size=1 << 20)
            packed.append(len(body))
            return msgspec.structs.replace(request, body=body)

        cloud.unpack = unpack
        answer = engine.infer("tiny", {"x": INPUT}, deadline_s=10)
    assert packed and not answer.report.fallback and np.array_equal(answer.outputs["y"], EXPECTED)


@pytest.mark.parametrize(("codec", "datatype"), [("fp16", "float16"), ("int8", "uint8")])
def test_lossy_row_sends_the_encoded_tensor(codec: str, datatype: str) -> None:
    """A local tail would continue from the original tensor."""
    lossy = msgspec.structs.replace(CUT, codecs={"h": codec})
    got: list[dict[str, np.ndarray]] = []

    def undo(request: Request) -> Request:
        asked = oip.decode_request(request.body, oip.header_length(request.headers))
        got.append(dict(asked.inputs))
        tensors = boundary_codecs.decode_tensors(asked.inputs, [H], lossy.codecs)
        body, length = oip.encode_request(oip.InferRequest(tensors, id=asked.id))
        headers = {**request.headers, oip.HEADER_LENGTH: str(length)}
        return msgspec.structs.replace(request, headers=headers, body=b"".join(body))

    with world(lossy) as (engine, cloud, _):
        cloud.unpack = undo
        answer = engine.infer("tiny", {"x": INPUT}, deadline_s=10)

    assert got[0]["h"].dtype == datatype
    assert answer.report.row == "cut-1" and np.allclose(answer.outputs["y"], EXPECTED, atol=2 * 4 / 255)


def test_row_with_an_unknown_codec_is_dropped() -> None:
    """The agent drops what it could not encode, and keeps the other rows."""
    later = msgspec.structs.replace(CUT, codecs={"h": "int2"})
    assert [row.name for row in plan_for(manifest(LOCAL, later), "pi4").rows] == ["local"]


def test_row_whose_packed_codec_cannot_be_used_is_dropped() -> None:
    """A foreign server decodes int6 but not int4; and a clip is a share of the range, or the row is not used."""
    packed, fine = (msgspec.structs.replace(CUT, codecs={"h": codec}) for codec in ("int4", "int6"))

    def usable(row: Row, **fields: str) -> bool:
        return len(plan_for(manifest(LOCAL, row, **fields), "pi4").rows) == 2

    assert usable(packed) and usable(fine) and usable(msgspec.structs.replace(packed, clips={"h": 0.4}))
    assert usable(fine, offload="triton://gpu") and not usable(packed, offload="triton://gpu")
    for clip in (0.0, -1.0, 1.5):
        assert not usable(msgspec.structs.replace(packed, clips={"h": clip}))


def test_selection_follows_current_conditions() -> None:
    """With the planned link the cut is best; without the cloud only the local row counts."""
    with world(LOCAL, msgspec.structs.replace(CUT, device_s=0.001)) as (engine, cloud, _):
        assert engine.infer("tiny", {"x": INPUT}, deadline_s=10).report.row == "cut-1"
        cloud.healthy = False
        engine.own_target.on_overdue(0.0)
        assert engine.breaker.state == "open"
        assert engine.infer("tiny", {"x": INPUT}, deadline_s=10).report.row == "local"
        assert len(cloud.asked) == 1


def test_rows_that_violate_privacy_are_dropped() -> None:
    """Rows of a forged plan that send protected tensors are refused on the device one by one, and the whole plan if
    none is left."""
    assert [row.name for row in plan_for(manifest(LOCAL, CUT, REMOTE, private_tensors=("x",)), "pi4").rows] == [
        "local",
        "cut-1",
    ]
    with pytest.raises(TrustError):
        plan_for(manifest(REMOTE, private_tensors=("x",)), "pi4")
    with pytest.raises(UsageError):
        plan_for(manifest(LOCAL), "jetson")


def test_row_before_the_plans_earliest_cut_is_malformed() -> None:
    """Rows are checked against the earliest cut that the plan states."""
    good = manifest(LOCAL, CUT, required_local_layers=("a",))
    assert decode_manifest(encode_manifest(good)) == good
    with pytest.raises(MalformedMessage, match="earlier than its plan"):
        decode_manifest(encode_manifest(manifest(LOCAL, REMOTE, required_local_layers=("a",))))


def test_device_privacy_floor_overrides_the_plan() -> None:
    """A plan without any privacy, signed or not, loses the rows below this device's own floor."""
    signed = manifest(LOCAL, CUT, REMOTE)
    for floor, left in (
        (PrivacyFloor(), ["local", "cut-1", "remote"]),
        (PrivacyFloor(keep_raw_input=True), ["local", "cut-1"]),
        (PrivacyFloor(keep_first=1), ["local", "cut-1"]),
        (PrivacyFloor(keep_first=2), ["local"]),
        (PrivacyFloor(keep_first=999), ["local"]),
    ):
        assert [row.name for row in plan_for(signed, "pi4", floor).rows] == left, floor
    with pytest.raises(TrustError, match="remote: it sends x, which may never leave"):
        plan_for(manifest(REMOTE), "pi4", PrivacyFloor(keep_raw_input=True))


def test_selected_row_that_violates_privacy_sends_nothing() -> None:
    """The second check: a request that would send a protected tensor fails before any byte is sent."""
    with world(REMOTE) as (engine, cloud, release):
        leaky = msgspec.structs.replace(release.plan, private_tensors=("x",))
        object.__setattr__(release, "plan", leaky)
        with pytest.raises(UsageError):
            engine.infer("tiny", {"x": INPUT}, deadline_s=5)
        assert cloud.asked == []


def test_only_slices_of_this_device_class_are_needed() -> None:
    """Slices that no row runs on the device are neither fetched nor loaded."""
    assert device_slices(plan_for(manifest(CUT, REMOTE), "pi4"), manifest(CUT, REMOTE)) == {"a"}


@pytest.mark.parametrize(
    "inputs",
    [{}, {"x": INPUT, "z": INPUT}, {"x": INPUT.astype(np.float64)}, {"x": np.zeros((1, 5), np.float32)}],
)
def test_wrong_inputs_are_refused_before_anything_runs(inputs: dict[str, np.ndarray]) -> None:
    """Missing, unknown, wrong type, wrong shape: one typed error."""
    with world(LOCAL) as (engine, _, release):
        with pytest.raises(UsageError):
            engine.infer("tiny", inputs)
        assert release.programs["a"].runs == 0  # type: ignore[attr-defined]


def test_unknown_model_is_not_found() -> None:
    """And the error lists the models that exist."""
    with world(LOCAL) as (engine, _, _), pytest.raises(NotFound, match="tiny"):
        engine.infer("huge", {"x": INPUT})


def test_request_keeps_its_release_across_an_activation() -> None:
    """E7: a new release is activated while a request runs; it finishes with the old one, the next request uses the new
    one."""
    steps = programs()
    steps["b"].may_run.clear()
    with world(LOCAL, steps=steps) as (engine, _, _):
        answers = []
        thread = threading.Thread(target=lambda: answers.append(engine.infer("tiny", {"x": INPUT}, deadline_s=15)))
        thread.start()
        assert steps["b"].entered.wait(10)
        engine.serve("tiny", active(LOCAL, digest="b" * 64))
        steps["b"].may_run.set()
        thread.join(15)
        assert answers[0].report.release == DIGEST
        assert engine.infer("tiny", {"x": INPUT}, deadline_s=10).report.release == "b" * 64


def test_full_queue_refuses_at_once() -> None:
    """The queue is bounded: one request too many is refused, and displaces no other."""
    steps = programs()
    steps["a"].may_run.clear()
    engine = Engine("pi4", None, settings=Settings(in_flight=2))
    engine.serve("tiny", active(LOCAL, steps=steps))
    threads = [threading.Thread(target=lambda: engine.infer("tiny", {"x": INPUT}, deadline_s=15)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert steps["a"].entered.wait(10)
    while engine.queue.in_flight < 2:
        pass
    with pytest.raises(Busy):
        engine.infer("tiny", {"x": INPUT}, deadline_s=15)
    steps["a"].may_run.set()
    for thread in threads:
        thread.join(15)
    assert np.array_equal(engine.infer("tiny", {"x": INPUT}, deadline_s=10).outputs["y"], EXPECTED)
    engine.stop()


def test_request_behind_a_long_one_fails_by_its_deadline() -> None:
    """The processor is not free in time: a typed error, not after the deadline."""
    steps = programs()
    steps["a"].may_run.clear()
    engine = Engine("pi4", None, settings=Settings(margin_s=1.0))
    engine.serve("tiny", active(LOCAL, steps=steps))
    thread = threading.Thread(target=lambda: engine.infer("tiny", {"x": INPUT}, deadline_s=15))
    thread.start()
    assert steps["a"].entered.wait(10)
    with pytest.raises(DeadlineExceeded):
        engine.infer("tiny", {"x": INPUT}, deadline_s=1.2)
    assert not steps["a"].may_run.is_set()
    steps["a"].may_run.set()
    thread.join(15)
    engine.stop()


def test_retried_id_returns_the_cached_answer() -> None:
    """The model does not run again for a repeated id."""
    with world(LOCAL) as (engine, _, release):
        first = engine.infer("tiny", {"x": INPUT}, deadline_s=10, request_id="r-1")
        again = engine.infer("tiny", {"x": INPUT}, deadline_s=10, request_id="r-1")
        assert again is first and engine.idempotency.joined == 1
        assert release.programs["a"].runs == 1  # type: ignore[attr-defined]


def test_emulated_device_is_marked_in_reports() -> None:
    """Every report is marked, and the run takes the emulated device's time."""
    with world(LOCAL, emulated=True) as (engine, _, _):
        report = engine.infer("tiny", {"x": INPUT}, deadline_s=10).report
        assert report.emulated and report.latency_s >= 0.01


def _golden(answer: np.ndarray, *, binary: bool) -> tuple[GoldenExample, dict[str, bytes]]:
    request = b"".join(oip.encode_request(oip.InferRequest({"x": INPUT}, id="golden"))[0])
    response = b"".join(oip.encode_response(oip.InferResponse("tiny", {"y": answer}, id="golden"), binary)[0])
    chunks = {"1" * 64: request, "2" * 64: response}
    return GoldenExample(Chunk("1" * 64, len(request)), Chunk("2" * 64, len(response))), chunks


@pytest.mark.parametrize("binary", [True, False])
def test_golden_inputs_decide_the_commit(binary: bool) -> None:
    """C15: the stored whole answer is met within the tolerance for another processor's arithmetic; anything else is not
    committed."""
    good, chunks = _golden(EXPECTED * np.float32(1 + 1e-6), binary=binary)
    check_golden(active(LOCAL), good, chunks.__getitem__)
    bad, wrong = _golden(EXPECTED + np.float32(0.5), binary=binary)
    with pytest.raises(InferenceFailed):
        check_golden(active(LOCAL), bad, wrong.__getitem__)


def test_nan_never_matches_a_golden_answer() -> None:
    """An answer that became NaN is a different answer."""
    want = np.ones(3, np.float32)
    assert is_close(want, want)
    assert not is_close(np.array([1, np.nan, 1], np.float32), want)
    assert not is_close(want.astype(np.float64), want)
    assert not is_close(np.ones((3, 1), np.float32), want)


def test_a_golden_input_without_a_find_was_compared_relative_to_itself() -> None:
    """Of two golden answers one may be far below the output's range: both are compared relative to the larger."""
    small = np.full(3, 4e-4, np.float32)
    moved = small + np.float32(3e-5)
    assert not is_close(moved, small) and is_close(moved, small, 1.0)
    faint, bodies = _golden(EXPECTED * np.float32(1e-4), binary=True)
    clear, more = _golden(EXPECTED, binary=True)
    clear = GoldenExample(clear.request, Chunk("3" * 64, clear.response.bytes))
    bodies["3" * 64] = more["2" * 64]
    ranges = golden_ranges([faint, clear], bodies.__getitem__)
    assert ranges == {"y": pytest.approx(float(np.abs(EXPECTED).max()))}
    check_golden(active(LOCAL), clear, bodies.__getitem__, ranges)
    with pytest.raises(InferenceFailed):
        check_golden(active(LOCAL), faint, bodies.__getitem__, ranges)


def test_golden_inputs_are_skipped_without_a_local_row() -> None:
    """Without a local row a golden input cannot run on the device; loading was the test."""
    golden, chunks = _golden(EXPECTED, binary=True)
    check_golden(active(CUT), golden, chunks.__getitem__)
    assert X.name == "x"


def test_misspelt_model_name_suggests_the_nearest() -> None:
    """The same for every interface."""
    assert suggest_models("digts", ["digits", "faces"]) == "did you mean digits?"
    assert suggest_models("xyz", ["digits", "faces"]) == "these do: digits, faces"
    assert "edgectl deploy" in suggest_models("digits", [])


def test_release_health_counts_only_device_failures() -> None:
    """A broken cloud, an application's bad frame and a deadline in the past are not the release's fault."""
    steps = programs()
    told: list[tuple[str, Exception | None]] = []
    cloud = ScriptedCloud()
    cloud.start()
    engine = Engine("pi4", OffloadClient(cloud.server.url), settings=Settings(idle_probe_s=3600.0))
    engine.observe(DeviceRunObserver(lambda release, error: told.append((release, error))))
    engine.serve("tiny", active(CUT, steps=steps))
    cloud.script = unavailable
    with pytest.raises(LinkError):
        engine.infer("tiny", {"x": INPUT}, deadline_s=10)
    assert told == [(DIGEST, None)], "the device did its part, the cloud did not"
    steps["a"].error = UsageError("the frame is not a whole JPEG")
    with pytest.raises(UsageError):
        engine.infer("tiny", {"x": INPUT}, deadline_s=10)
    with pytest.raises(UsageError):
        engine.infer("tiny", {"x": INPUT[0]}, deadline_s=10)
    assert told == [(DIGEST, None)], "the application's fault"
    steps["a"].error = InferenceFailed("the accelerator has gone")
    with pytest.raises(InferenceFailed):
        engine.infer("tiny", {"x": INPUT}, deadline_s=10)
    assert told[1:] == [(DIGEST, steps["a"].error)]
    engine.stop()
    cloud.stop()
