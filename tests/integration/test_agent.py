"""The agent as a process against real mosquitto, real TUF metadata, real TLS and a real offload server.

The controller here is the smallest that can be; tests/integration/test_chain.py has the whole product.
"""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgesplit.client.answer import Answer
from edgesplit.errors import LinkError, TrustError
from edgesplit.http1.server import Server, json_response
from edgesplit.mqtt import messages
from edgesplit.oip.options import InferOptions
from edgesplit.release import manifest
from edgesplit_agent.control.enrolment import enrol
from edgesplit_agent.state.data_folder import DataFolder
from edgesplit_cli.demo.run import free_port
from edgesplit_controller.pki.authority import Authority
from support.agent_engine import EXPECTED, INPUT, eventually
from support.small_controller import DEVICE, HERE, AgentProcess, SmallController, TinyRelease, agent_environment


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallController]:
    with SmallController(tmp_path_factory.mktemp("controller")) as running:
        yield running


@pytest.fixture
def agent(controller: SmallController, tmp_path: Path) -> Iterator[AgentProcess]:
    controller.received.clear()
    with AgentProcess(controller, tmp_path) as process:
        yield process


def test_from_claim_to_a_split_answer(controller: SmallController, agent: AgentProcess) -> None:
    """Enrols, fetches signed slices over MQTT, checks its golden input, answers with the cloud; stops cleanly."""
    release = TinyRelease(1, forced_row="cut-1")  # once measured, a quick machine is faster alone
    controller.deploy(release)
    agent.start()
    eventually("it runs", lambda: agent.is_running(release), 60)

    def finished_by_the_cloud() -> bool:
        answer = agent.infer()
        assert np.array_equal(answer.outputs["y"], EXPECTED) and answer.report.release == release.digest
        return (answer.report.row, answer.report.fallback) == ("cut-1", False)

    eventually("an answer for which the cloud was in time", finished_by_the_cloud)
    birth = controller.last(messages.Birth)
    assert birth.device_class == "pi4" and not birth.emulated and birth.local_url.startswith("http://127.0.0.1:")
    eventually("telemetry of it", lambda: _requests(controller) >= 1)

    assert agent.end() == 0
    eventually(
        "its death is published",
        lambda: controller.last(messages.Birth, messages.Death) == messages.Death(birth.session),
    )
    assert DataFolder(agent.data).read_address() is None


def _requests(controller: SmallController) -> int:
    telemetry = [message for _, message in controller.received if isinstance(message, messages.Telemetry)]
    return sum(window.requests for message in telemetry for window in message.models)


def test_a_restart_without_any_network_serves_what_it_had(controller: SmallController, agent: AgentProcess) -> None:
    """Killed, restarted with broker and offload server out of reach: verified offline, answered alone."""
    release = TinyRelease(2)
    controller.deploy(release)
    agent.start()
    eventually("it runs", lambda: agent.is_running(release), 60)
    agent.end(signal.SIGKILL)

    agent.extra = ("--broker", "127.0.0.1:9", "--offload", "127.0.0.1:9")
    agent.start()
    answer = agent.infer()
    assert np.array_equal(answer.outputs["y"], EXPECTED)
    assert answer.report.fallback or answer.report.row == "local"
    status = agent.status()
    assert status["broker"]["connected"] is False and status["models"][0]["release"] == release.digest
    assert agent.end() == 0


def test_a_flipped_bit_in_the_running_slice_costs_one_chunk(controller: SmallController, agent: AgentProcess) -> None:
    """A9: found at load, fetched again as soon as the controller is there, and only what was spoilt."""
    release = TinyRelease(3)
    controller.deploy(release)
    agent.start()
    eventually("it runs", lambda: agent.is_running(release), 60)
    spoilt = agent.data / "releases" / release.digest / "slices" / "b" / "graph.onnx"
    its_chunk = hashlib.sha256(spoilt.read_bytes()).hexdigest()
    eventually("the chunk is only in the slice", lambda: not list((agent.data / "chunks").rglob(its_chunk)))
    agent.end(signal.SIGKILL)
    spoilt.write_bytes(spoilt.read_bytes()[:-1] + b"\x00")
    controller.received.clear()
    controller.chunks_sent.clear()

    agent.start()
    eventually("it runs again", lambda: agent.is_running(release), 60)
    assert np.array_equal(agent.infer().outputs["y"], EXPECTED)
    assert hashlib.sha256(spoilt.read_bytes()).hexdigest() in controller.chunks_sent
    examples = manifest.decode_manifest(release.raw).golden
    golden = {chunk.sha256 for example in examples for chunk in (example.request, example.response)}
    assert set(controller.chunks_sent) - golden == {hashlib.sha256(spoilt.read_bytes()).hexdigest()}


def test_wrong_or_unsigned_release_is_reported_as_failed_and_the_old_one_goes_on(
    controller: SmallController, agent: AgentProcess
) -> None:
    """C15 and an unsigned release: both reported as failed with their reason; the good one keeps answering."""
    good, wrong, unsigned = TinyRelease(4), TinyRelease(5, golden=EXPECTED + np.float32(9)), TinyRelease(6)
    controller.deploy(good)
    agent.start()
    eventually("it runs", lambda: agent.is_running(good), 60)

    for bad, reason, sign in ((wrong, "golden", True), (unsigned, "not one that the release key signed", False)):
        controller.deploy(bad, sign=sign)
        eventually("it failed", lambda bad=bad, reason=reason: controller.has_reported(bad, "failed", reason), 60)
        report = agent.infer().report
        assert report.release == good.digest
    newer = TinyRelease(7, factor=3.0)
    controller.deploy(newer)
    eventually("the newer one runs", lambda: agent.is_running(newer), 60)
    assert np.array_equal(agent.infer().outputs["y"], (INPUT + 1) * 3)
    eventually("the old one is gone from disk", lambda: not (agent.data / "releases" / good.digest).exists())


def test_a_release_over_the_store_quota_is_refused_and_the_running_one_goes_on(
    controller: SmallController, agent: AgentProcess
) -> None:
    """A8: over --store-quota nothing is fetched and the reported state names the option; a larger quota lets it in."""
    good, large = TinyRelease(20), TinyRelease(21)
    controller.deploy(good)
    agent.start()
    eventually("it runs", lambda: agent.is_running(good), 60)
    agent.end()
    agent.extra = ("--store-quota", "200kB")
    controller.chunks_sent.clear()
    controller.deploy(large)
    agent.start()
    eventually("it is refused", lambda: controller.has_reported(large, "failed", "--store-quota"), 60)
    assert agent.infer().report.release == good.digest and not controller.chunks_sent
    agent.end()
    agent.extra = ("--store-quota", "50MB")
    agent.start()
    eventually("it runs", lambda: agent.is_running(large), 60)


def test_download_window_delays_chunks_unless_the_statement_says_now(
    controller: SmallController, agent: AgentProcess
) -> None:
    """Outside --download-window metadata is fetched and chunks are not, and the reported state says why; `now` in the
    statement fetches at once."""
    release = TinyRelease(22)
    controller.chunks_sent.clear()
    controller.deploy(release)
    begins, ends = (time.strftime("%H:%M", time.localtime(time.time() + hours * 3600)) for hours in (2, 3))
    agent.extra = ("--download-window", f"{begins}-{ends}")
    agent.start()
    eventually(
        "it reports that it waits",
        lambda: controller.has_reported(release, "fetching", "waiting for the download window"),
        60,
    )
    waiting = agent.status()["desired"]
    assert [model["detail"] for model in waiting] == [f"waiting for the download window ({begins}-{ends})"]
    assert not controller.chunks_sent
    controller.deploy(release, now=True)
    eventually("it runs", lambda: agent.is_running(release), 60)


def test_updates_wait_on_an_empty_battery_and_report_why(
    controller: SmallController, agent: AgentProcess, tmp_path: Path
) -> None:
    """Sensors under a root folder: at 10 % nothing is fetched, on the charger the update goes on; both are reported."""
    battery = tmp_path / "sys/class/power_supply/BAT0"
    battery.mkdir(parents=True)
    for name, text in (("type", "Battery"), ("status", "Discharging"), ("capacity", "10")):
        (battery / name).write_text(text + "\n")
    release = TinyRelease(23)
    controller.chunks_sent.clear()
    controller.deploy(release)
    agent.extra = ("--sensors-root", str(tmp_path / "sys"), "--power-budget", "4W")
    agent.start()
    eventually(
        "it reports that it waits", lambda: controller.has_reported(release, "fetching", "the battery is at 10 %"), 60
    )
    power = agent.status()["power"]
    assert (power["mode"], power["budget_watts"], power["sensors"]["battery_percent"]) == ("saver", 4.0, 10.0)
    assert not controller.chunks_sent
    (battery / "status").write_text("Charging\n")
    eventually("it runs", lambda: agent.is_running(release), 60)
    eventually("telemetry shows the charger", lambda: _power(controller) == ("performance", False), 30)
    assert agent.status()["models"][0]["reason"].startswith("the plan has no power figures")


def _power(controller: SmallController) -> tuple[str, bool | None] | None:
    newest = controller.last(messages.Telemetry)
    return (newest.power.mode, newest.power.discharging) if newest is not None and newest.power is not None else None


def test_still_frames_of_a_stream_are_repeated_within_the_operators_share(
    controller: SmallController, agent: AgentProcess
) -> None:
    """A made-up video whose truth is known (seed 9): most answers are repeated, with their age, and few are wrong.
    Telemetry has the counts, and a restart does not calibrate again."""
    release, allowed, rng = TinyRelease(9), 0.05, np.random.default_rng(9)
    agent.extra = ("--skip-still", "--changed", "5%", "--still-spacing", "0", "--offload", "127.0.0.1:9")
    controller.deploy(release)
    agent.start()
    eventually("it runs", lambda: agent.is_running(release), 60)
    scenes = [rng.permutation(4).astype(np.float32) for _ in range(20)]
    frames = [scene + rng.normal(0, 0.01, 4).astype(np.float32) for scene in scenes for _ in range(20)]
    with agent.client as client:
        source = ({"x": frame[None]} for frame in frames)
        results = list(client.stream("tiny", source, deadline_s=30.0, options=InferOptions(stream="door")))
    answers = [result for result in results if isinstance(result, Answer)]
    ages = [answer.report.repeated_age_s for answer in answers if answer.report]
    assert len(ages) == len(frames) and not any(ages[:90]), "the first 91 frames calibrate"
    assert sum(age > 0 for age in ages) > len(frames) / 2
    pairs = zip(answers, frames, strict=True)
    wrong = [int(answer.outputs["y"].argmax()) != int(frame.argmax()) for answer, frame in pairs]
    assert sum(wrong) <= allowed * len(frames)
    (stream,) = agent.status()["still_frames"]
    assert (stream["stream"], stream["state"], stream["allowed"]) == ("door", "repeating", allowed)
    assert stream["repeated"] == sum(age > 0 for age in ages) and stream["alarm"] == ""
    eventually("telemetry has the allowance", lambda: _allowed_still(controller) == allowed, 60)
    assert agent.end() == 0
    agent.start()
    eventually("it serves again", lambda: [model["model"] for model in agent.status()["models"]] == ["tiny"], 60)
    with agent.client as client:
        client.infer("tiny", {"x": frames[0][None]}, deadline_s=30.0, options=InferOptions(stream="door"))
    (restarted,) = agent.status()["still_frames"]
    assert (restarted["state"], restarted["calibrated"]) == ("repeating", stream["calibrated"])


def _allowed_still(controller: SmallController) -> float | None:
    newest = controller.last(messages.Telemetry)
    windows = newest.models if newest is not None else ()
    return next((window.still.allowed for window in windows if window.still is not None), None)


def test_a_killed_agent_loses_no_request_and_its_last_will_is_published(
    controller: SmallController, agent: AgentProcess
) -> None:
    """SIGKILL in the middle of a stream: each id of the client is answered once, the last will is this session's."""
    release = TinyRelease(8)
    controller.deploy(release)
    agent.extra = ("--port", str(free_port()))
    agent.start()
    eventually("it runs", lambda: agent.is_running(release), 60)
    client, answers = agent.client, []
    done = threading.Event()

    def stream() -> None:
        for _ in range(60):
            answers.append(client.infer("tiny", {"x": INPUT}, deadline_s=30).outputs["y"])
        done.set()

    session = controller.last(messages.Birth).session
    thread = threading.Thread(target=stream)
    thread.start()
    eventually("some are answered", lambda: len(answers) >= 5)
    agent.end(signal.SIGKILL)
    eventually(
        "the broker publishes the last will",
        lambda: messages.Death(session) in [message for _, message in controller.received],
    )
    agent.start()
    thread.join(60)
    assert done.is_set() and all(np.array_equal(answer, EXPECTED) for answer in answers) and len(answers) == 60
    eventually("a newer session has begun", lambda: controller.last(messages.Birth).session > session)


def test_offloading_resumes_when_the_offload_server_is_back(controller: SmallController, agent: AgentProcess) -> None:
    """The device answers alone while the server is stopped, and offloads again once it is back; no request fails."""
    release = TinyRelease(9)
    controller.deploy(release)
    agent.extra = ("--emulate",)  # as slow as its plan says: else it wins its races against the cloud
    agent.start()
    eventually("it runs", lambda: agent.is_running(release), 60)
    eventually("a request is offloaded", lambda: not _answers_alone(agent))
    controller.offload.stop(0.2)
    eventually("it answers alone", lambda: _answers_alone(agent))
    controller.restart_offload()
    eventually("a request is offloaded again", lambda: not _answers_alone(agent))


def _answers_alone(agent: AgentProcess) -> bool:
    answer = agent.infer()
    assert np.array_equal(answer.outputs["y"], EXPECTED)
    return bool(answer.report.fallback or answer.report.row == "local")


def test_an_emulated_device_and_link_are_marked_in_reports_and_telemetry(
    controller: SmallController, agent: AgentProcess
) -> None:
    """--emulate and --link show in every report, in birth and telemetry messages, and in the times."""
    release = TinyRelease(10)
    controller.deploy(release)
    agent.extra = ("--emulate", "--link", "50mbit/2ms")
    agent.start()
    eventually("it runs", lambda: agent.is_running(release), 60)
    answer = agent.infer()
    assert answer.report.emulated and answer.report.device_s >= 0.001
    assert controller.last(messages.Birth).emulated
    eventually(
        "telemetry", lambda: controller.last(messages.Telemetry) and controller.last(messages.Telemetry).emulated
    )
    assert agent.status()["link_emulated"] == "50mbit/2ms"


def test_a_second_agent_on_the_same_folder_is_refused(controller: SmallController, agent: AgentProcess) -> None:
    """One clear line, exit code 2, and the first one is not disturbed."""
    agent.start()
    argv = [sys.executable, "-m", "edgesplit_agent.main", "run", "--data", str(agent.data), "--port", "0"]
    second = subprocess.run(argv, env=agent_environment(), capture_output=True, text=True, check=False, timeout=60)
    assert second.returncode == 2 and "another edgesplit-agent runs" in second.stderr
    assert second.stderr.count("\n") == 1
    assert agent.client.ready()


@pytest.mark.parametrize("lost_at", ["key.pem", "certificate.pem", "ca.pem", "enrolled.json"])
def test_enrolment_killed_at_any_point_finishes_at_the_next_start(
    controller: SmallController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost_at: str
) -> None:
    """A4: power fails just before each file is written; the next start enrols with the same key and token."""
    import edgesplit_agent.control.enrolment as enrolment
    import edgesplit_agent.state.data_folder as folder_module
    from edgesplit.atomic_files import write_durably
    from edgesplit.crypto import private_key

    def dying(path: Path, data: bytes, mode: int = 0o644) -> None:
        if path.name == lost_at:
            raise KeyboardInterrupt
        write_durably(path, data, mode)

    with monkeypatch.context() as patch:
        for module in (enrolment, folder_module, private_key):
            patch.setattr(module, "write_durably", dying)
        with pytest.raises(KeyboardInterrupt):
            enrol(DataFolder(tmp_path), controller.claim())
    folder = DataFolder(tmp_path)
    assert folder.read_identity() is None
    key = folder.key_file.read_bytes() if folder.key_file.exists() else None
    assert enrol(folder, controller.claim()).device == DEVICE
    assert key is None or folder.key_file.read_bytes() == key
    assert folder.key_file.stat().st_mode & 0o777 == 0o600
    again = controller.enrolments
    assert enrol(folder, controller.claim()).device == DEVICE and controller.enrolments == again


def test_a_bad_claim_and_a_false_controller_give_different_errors(controller: SmallController, tmp_path: Path) -> None:
    """D7, D9: a refused token or a server of another authority is a trust error, a server out of reach a link error."""
    with pytest.raises(TrustError, match="refused the claim"):
        enrol(DataFolder(tmp_path / "one"), controller.claim("stolen"))
    stranger = Authority(tmp_path / "other-ca").issue_server("controller", ["localhost", HERE])
    false = Server(lambda request: json_response(200, {}), tls=stranger.server_context(client_required=False))
    false.start()
    with pytest.raises(TrustError, match="does not present a certificate"):
        enrol(DataFolder(tmp_path / "two"), controller.claim(), f"https://{HERE}:{false.port}")
    false.stop(0.2)
    with pytest.raises(LinkError):
        enrol(DataFolder(tmp_path / "three"), controller.claim(), f"https://{HERE}:9")


KILLED_AT = (
    "identity/key.pem", "identity/enrolled.json", "session.json", "trust/counters.json", "chunks/*/*",
    "chunks/*/slices/*/*", "chunks/*/manifest.json", "releases/*/manifest.json", "current.json",
)  # fmt: skip


def test_a_first_update_completes_after_sigkill_at_every_stage(controller: SmallController, tmp_path: Path) -> None:
    """A1 in processes: SIGKILL when each file first appears, on one folder; no cleaning by hand."""
    release = TinyRelease(11)
    controller.deploy(release)
    controller.received.clear()
    agent = AgentProcess(controller, tmp_path)
    for pattern in KILLED_AT:
        agent.spawn()
        try:
            eventually(
                f"{pattern} or the end of it",
                lambda p=pattern: any(agent.data.glob(p)) or agent.is_running(release),
                60,
            )
        finally:
            agent.end(signal.SIGKILL)
    agent.start()
    eventually("it runs", lambda: agent.is_running(release), 60)
    assert np.array_equal(agent.infer().outputs["y"], EXPECTED)
    eventually("no partial download is left", lambda: not list(agent.data.glob("chunks/*/*")))
    assert agent.end() == 0
