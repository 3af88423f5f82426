"""Log bundles of remote devices: bounded, in parts, without secrets, and accepted from the requested device only."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgesplit.errors import LinkError, MalformedMessage, NotFound
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import DeviceJob, JobRefused, LogPiece
from edgesplit.observability.redaction import REDACTED, redact, redact_known
from edgesplit.trust.identity import load_or_make_key
from edgesplit_agent.control.log_bundle import PAUSE_S, LogBundleService, known_secrets
from edgesplit_agent.host.log_buffer import LogBuffer
from edgesplit_agent.state.data_folder import DataFolder
from edgesplit_cli.views.device import log_lines
from edgesplit_controller.errors import Conflict
from edgesplit_controller.fleet.log_bundles import (
    MAX_BUNDLES,
    MAX_UNPACKED_BYTES,
    REQUEST_TIMEOUT_S,
    RETENTION_S,
    LogBundleStore,
    unpack,
)
from support.device_fleet import FleetHarness, new_url

DIGEST = "3f" * 32
TOKEN = "Zk3vQ9-tT0aL_2xWcR7nB5yHdJ8sUeGf4mPiOqKbVwE"


@pytest.mark.parametrize(
    "line",
    [
        f"Authorization: Bearer {TOKEN}", f"token={TOKEN}", f"claim token: {TOKEN}", f"enrolled with {TOKEN}",
        "passphrase=hunter2", "EDGESPLIT_PASSPHRASE: hunter2", "password 'hunter2'", "PIN=hunter2",
        "https://me:hunter2@controller/v1", "postgresql+psycopg://me:hunter2@db/x", "cookie: session=hunter2",
        f"content_key {base64.b64encode(bytes(range(32))).decode()}", f"the key is {TOKEN[:33]}",
        "-----BEGIN PRIVATE KEY-----\nhunter2hunter2\n-----END PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nhunter2",
    ],
)  # fmt: skip
def test_secrets_are_redacted(line: str) -> None:
    """Tokens, keys and passphrases, in whatever syntax they stand."""
    told = redact(f"before {line} after")
    assert REDACTED in told and "hunter2" not in told and TOKEN[:20] not in told and "AAECAwQF" not in told
    assert told.startswith("before ")


@pytest.mark.parametrize(
    "line",
    [
        "activated digits from release 3f3f3f3f3f3f, on trial",
        "edgesplit_agent.updates.reconciler: release 3f3f3f3f3f3f: 17 of 64 chunks are missing",
        "connected to the broker, session 1795274308",
        "/var/lib/edgesplit/releases/some-long-but-harmless-folder-name/manifest.json",
        "mobilenet-v1-0-25-224-float-with-a-long-name@3",
    ],
)
def test_releases_paths_and_names_are_not_redacted(line: str) -> None:
    """Releases are shortened to their first digits."""
    assert redact(line) == line
    assert redact(f"release {DIGEST}") == f"release {DIGEST[:12]}…"


@given(st.binary(min_size=32, max_size=64), st.sampled_from(["{}", "x={} y", "key: {}", '{{"a": "{}"}}', "in {}."]))
def test_long_random_strings_are_redacted(secret: bytes, around: str) -> None:
    """Keys as base64 or hex, in whatever syntax they stand."""
    for text in (base64.b64encode(secret).decode(), base64.urlsafe_b64encode(secret).decode(), secret.hex()):
        found = redact(around.format(text))
        assert text not in found and (text[16:40] not in found or len(set(text)) < 8)


@given(st.text(max_size=300))
@example("CSRF:000")
@example("password: [[[[abc")
def test_redaction_terminates_and_is_idempotent(text: str) -> None:
    """For any text."""
    assert redact(redact(text)) == redact(redact(redact(text)))


def test_text_after_a_redaction_mark_is_still_redacted() -> None:
    """Text that already contains the mark does not protect a secret that follows it."""
    assert "hunter2" not in redact("token=[redacted]hunter2")
    assert redact("token=[redacted] and more") == "token=[redacted] and more"


def test_the_log_buffer_is_bounded_and_redacted(tmp_path: Path) -> None:
    """It keeps the newest lines."""
    book = LogBuffer(max_bytes=10_000)
    logger = logging.getLogger("test of the logbook")
    logger.propagate = False
    logger.addHandler(book)
    try:
        for number in range(1_000):
            logger.warning("line %d with token=%s", number, TOKEN)
        logger.warning("x" * 100_000)
        logger.warning("%d", "no number")
    except TypeError:  # pragma: no cover
        raise AssertionError("a line that cannot be written must not stop who logs it") from None
    finally:
        logger.removeHandler(book)
    lines = book.lines()
    assert sum(map(len, lines)) <= 10_000 and TOKEN not in "".join(lines) and book.dropped > 900


class LogBundleDevice:
    """A device's diagnosis over a folder with keys in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = DataFolder(folder)
        load_or_make_key(self.folder.key_file)
        self.secret = self.folder.key_file.read_text()
        self.book = LogBuffer()
        self.status: dict[str, Any] = {
            "device": "cam", "deep": [{"token": TOKEN}], "note": f"Bearer {TOKEN}", "path": folder,
        }  # fmt: skip
        self.sent: list[LogPiece | JobRefused] = []
        self.diagnosis = LogBundleService(self.folder, "cam", self.book, lambda: self.status, lambda pieces, wait: None)

    def log(self, text: str) -> None:
        self.book.emit(logging.LogRecord("edgesplit_agent", logging.INFO, "", 0, text, (), None))

    def answer(self, job: DeviceJob, now: float = 100.0) -> list[LogPiece | JobRefused]:
        return list(self.diagnosis.pieces(job, now))


def job(number: int = 1, most_bytes: int = 524_288) -> DeviceJob:
    return DeviceJob(id=f"{number:016x}", kind="logs", max_bytes=most_bytes)


def joined(pieces: list[Any]) -> dict[str, Any]:
    whole = b"".join(piece.data for piece in pieces)
    assert hashlib.sha256(whole).hexdigest() == pieces[0].sha256 and len(whole) == pieces[0].total
    return unpack(whole)


def test_a_log_bundle_has_the_diagnosis_and_no_secret(tmp_path: Path) -> None:
    """D12: versions, state, files by name and size, the log; none of the device's own keys is in it."""
    asked = LogBundleDevice(tmp_path)
    asked.log("hello")
    lines = [line for line in asked.secret.splitlines() if "PRIVATE" not in line]
    asked.log(f"somebody logs a key: {asked.secret}")
    asked.log(f"or a line of it {lines[0]}")
    found = joined(asked.answer(job()))
    assert {"format", "device", "versions", "machine", "files", "status", "log"} <= set(found)
    text = json.dumps(found)
    assert TOKEN not in text and not any(line in text for line in lines) and "hello" in found["log"][0]
    assert any(file["name"] == "identity/key.pem" and file["mode"] == "0o600" for file in found["files"])
    assert redact_known(lines[0], known_secrets(asked.folder)) == REDACTED
    assert "hello" in log_lines(found)[1]


def test_a_log_bundle_keeps_to_the_requested_size(tmp_path: Path) -> None:
    """The oldest lines are dropped; a bundle without room for any line reports that."""
    asked = LogBundleDevice(tmp_path)
    rng = random.Random(7)
    for number in range(2_000):
        asked.log(f"{number} " + " ".join(str(rng.random()) for _ in range(10)))
    found = asked.answer(job(most_bytes=20_000))
    content = joined(found)
    assert sum(len(piece.data) for piece in found if isinstance(piece, LogPiece)) <= 20_000
    assert "1999 " in content["log"][-1] and content["lines_left_away"] > 0
    asked.status = {"noise": [rng.random() for _ in range(500)]}
    (refused,) = asked.answer(job(2, most_bytes=1_024), 100.0 + PAUSE_S)
    assert isinstance(refused, JobRefused) and "smallest" in refused.reason


def test_a_device_limits_the_rate_of_log_bundles(tmp_path: Path) -> None:
    """A second request within the pause is refused, whatever its origin."""
    asked = LogBundleDevice(tmp_path)
    assert isinstance(asked.answer(job(1), 50.0)[0], LogPiece)
    (refused,) = asked.answer(job(2), 50.0 + PAUSE_S - 1)
    assert isinstance(refused, JobRefused)


@pytest.mark.parametrize("change", [{"what": "shell"}, {"id": "../../etc"}, {"max_bytes": 10**9}, {"what": "logs; rm"}])
def test_an_unknown_job_is_malformed(change: dict[str, Any]) -> None:
    """Only the listed jobs are decoded."""
    raw = messages.msgspec.msgpack.encode({"type": "job", "id": "0" * 16, "what": "logs", **change})
    with pytest.raises(MalformedMessage):
        messages.decode(raw, DeviceJob)


class LogBundleHarness:
    """A controller's bundles, and what was asked of which device."""

    def __init__(self, folder: Path) -> None:
        self.world = FleetHarness(new_url(folder))
        self.world.add("cam", "thief")
        self.world.birth("cam", "thief")
        self.asked: list[tuple[str, DeviceJob]] = []
        self.bundles = LogBundleStore(
            self.world.database, lambda name, job: self.asked.append((name, job)), now=lambda: self.world.now
        )

    def say(self, name: str, *said: LogPiece | JobRefused) -> None:
        self.world.devices.ingest([(name, message) for message in said])


def pieces(number: str, content: bytes, size: int = 300) -> list[LogPiece]:
    digest = hashlib.sha256(content).hexdigest()
    return [
        LogPiece(id=number, offset=at, total=len(content), sha256=digest, data=content[at : at + size])
        for at in range(0, len(content), size)
    ]


CONTENT = gzip.compress(json.dumps({"log": ["x" * 10, *map(str, range(999))]}).encode())


def test_log_bundle_parts_arrive_in_any_order(tmp_path: Path) -> None:
    """Duplicated and shuffled; before the last part the bundle is pending."""
    desk = LogBundleHarness(tmp_path)
    asked = desk.bundles.request("cam", "me")
    (name, sent), *_ = desk.asked
    assert name == "cam" and sent.id == asked["id"] and asked["state"] == "requested"
    said = pieces(asked["id"], CONTENT)
    shuffled = [*said[1:], *said[1:]]
    random.Random(3).shuffle(shuffled)
    desk.say("cam", *shuffled)
    assert desk.bundles.get("cam", asked["id"])["state"] == "receiving"
    desk.say("cam", said[0])
    found = desk.bundles.get("cam", asked["id"])
    assert found["state"] == "complete" and len(found["content"]["log"]) == 1_000
    desk.say("cam", *said)
    assert desk.bundles.get("cam", asked["id"])["state"] == "complete"


def test_log_bundle_parts_of_another_device_are_ignored(tmp_path: Path) -> None:
    """Also unsolicited parts, parts after a refusal, and parts that do not fit together."""
    desk = LogBundleHarness(tmp_path)
    asked = desk.bundles.request("cam", "me")
    desk.say("thief", *pieces(asked["id"], CONTENT))
    desk.say("cam", *pieces("f" * 16, CONTENT))
    assert desk.bundles.get("cam", asked["id"])["state"] == "requested" and desk.bundles.of_device("thief") == []
    with pytest.raises(NotFound):
        desk.bundles.get("thief", asked["id"])
    one, other = pieces(asked["id"], CONTENT), pieces(asked["id"], CONTENT + b"more")
    desk.say("cam", one[0], other[1])
    found = desk.bundles.get("cam", asked["id"])
    assert found["state"] == "corrupt" and found["content"] is None


def test_a_refused_log_bundle_reports_the_devices_reason(tmp_path: Path) -> None:
    """The operator reads the reason that the device sent."""
    desk = LogBundleHarness(tmp_path)
    asked = desk.bundles.request("cam", "me")
    desk.say("cam", JobRefused(id=asked["id"], reason="not now"))
    found = desk.bundles.get("cam", asked["id"])
    assert (found["state"], found["reason"]) == ("refused", "not now")


def test_one_log_bundle_request_is_in_flight_per_device(tmp_path: Path) -> None:
    """Two operators share one answer; an unanswered request times out; an offline device is not asked; the newest few
    bundles are kept."""
    desk = LogBundleHarness(tmp_path)
    first = desk.bundles.request("cam", "me")
    assert desk.bundles.request("cam", "you")["id"] == first["id"] and len(desk.asked) == 1
    for _ in range(MAX_BUNDLES + 2):
        desk.world.now += REQUEST_TIMEOUT_S + 1
        desk.bundles.request("cam", "me")
    assert len(desk.bundles.of_device("cam")) == MAX_BUNDLES
    desk.world.devices.ingest([("cam", messages.Death(1))])
    desk.world.now += REQUEST_TIMEOUT_S + 1
    with pytest.raises(Conflict, match="cam is offline since"):
        desk.bundles.request("cam", "me")
    with pytest.raises(NotFound):
        desk.bundles.request("stranger", "me")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"not gzip", gzip.compress(b"not json"), gzip.compress(b"[1]"), CONTENT[:-9],
        gzip.compress(b" " * (MAX_UNPACKED_BYTES + 1)), gzip.compress(b"[" * 100_000),
    ],
    ids=["empty", "no gzip", "no json", "no object", "cut off", "bomb", "deep"],
)  # fmt: skip
def test_an_invalid_log_bundle_is_malformed(content: bytes) -> None:
    """A decompression bomb from a device does no harm to the reader of its log."""
    with pytest.raises(MalformedMessage):
        unpack(content)


def test_a_job_that_cannot_be_sent_raises(tmp_path: Path) -> None:
    """Rather than a bundle that stays pending."""
    desk = LogBundleHarness(tmp_path)

    def fails(name: str, job: DeviceJob) -> None:
        raise LinkError("the broker is gone")

    broken = LogBundleStore(desk.world.database, fails, now=lambda: desk.world.now)
    with pytest.raises(LinkError):
        broken.request("cam", "me")


def test_a_birth_between_parts_does_not_spoil_the_log_bundle(tmp_path: Path) -> None:
    """A reconnection in the middle of a transfer is ignored."""
    desk = LogBundleHarness(tmp_path)
    asked = desk.bundles.request("cam", "me")
    first, *rest = pieces(asked["id"], CONTENT)
    desk.say("cam", first)
    desk.world.birth("cam", session=2)
    desk.say("cam", *rest)
    assert desk.bundles.get("cam", asked["id"])["state"] == "complete"


def test_old_and_incomplete_log_bundles_are_deleted(tmp_path: Path) -> None:
    """Together with their parts."""
    desk = LogBundleHarness(tmp_path)
    asked = desk.bundles.request("cam", "me")
    desk.say("cam", pieces(asked["id"], CONTENT)[0])
    desk.world.now += RETENTION_S["requested"] + 1
    desk.bundles.trim()
    assert [(bundle["state"], bundle["reason"]) for bundle in desk.bundles.of_device("cam")] == [
        ("corrupt", "it did not arrive in time")
    ]
    desk.say("cam", *pieces(asked["id"], CONTENT))
    assert desk.bundles.of_device("cam")[0]["state"] == "corrupt"
    desk.world.now += RETENTION_S["complete"]
    desk.bundles.trim()
    assert desk.bundles.of_device("cam") == []
