"""A device's log from afar: bounded, in pieces, without secrets, and from that device or from nobody."""

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
def test_secrets_do_not_leave(line: str) -> None:
    """Tokens, keys, passphrases, whatever they stand in."""
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
def test_what_an_engineer_needs_stays(line: str) -> None:
    """Releases by their first digits, paths, names."""
    assert redact(line) == line
    assert redact(f"release {DIGEST}") == f"release {DIGEST[:12]}…"


@given(st.binary(min_size=32, max_size=64), st.sampled_from(["{}", "x={} y", "key: {}", '{{"a": "{}"}}', "in {}."]))
def test_nothing_random_and_long_gets_through(secret: bytes, around: str) -> None:
    """Keys as base64 or hex, in whatever they stand."""
    for text in (base64.b64encode(secret).decode(), base64.urlsafe_b64encode(secret).decode(), secret.hex()):
        found = redact(around.format(text))
        assert text not in found and (text[16:40] not in found or len(set(text)) < 8)


@given(st.text(max_size=300))
@example("CSRF:000")
@example("password: [[[[abc")
def test_redacting_is_harmless(text: str) -> None:
    """It ends, and twice is once."""
    assert redact(redact(text)) == redact(redact(redact(text)))


def test_what_follows_a_gone_secret_does_not_hide_behind_it() -> None:
    """Who writes the mark before a secret does not get it through."""
    assert "hunter2" not in redact("token=[redacted]hunter2")
    assert redact("token=[redacted] and more") == "token=[redacted] and more"


def test_the_logbook_is_bounded_and_redacted(tmp_path: Path) -> None:
    """The newest lines, whatever is logged."""
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


class Asked:
    """A device's diagnosis over a folder with keys in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = DataFolder(folder)
        load_or_make_key(self.folder.key_file)
        self.secret = self.folder.key_file.read_text()
        self.book = LogBuffer()
        status = {"device": "cam", "deep": [{"token": TOKEN}], "note": f"Bearer {TOKEN}", "path": folder}
        self.sent: list[LogPiece | JobRefused] = []
        self.diagnosis = LogBundleService(self.folder, "cam", self.book, lambda: status, lambda pieces, wait: None)

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


def test_a_bundle_tells_enough_and_no_secret(tmp_path: Path) -> None:
    """D12: versions, state, files by name and size, the log; the device's own keys are looked for and are not there."""
    asked = Asked(tmp_path)
    asked.log("hello")
    lines = [line for line in asked.secret.splitlines() if "PRIVATE" not in line]
    asked.log(f"somebody logs a key: {asked.secret}")
    asked.log(f"or a line of it {lines[0]}")
    found = joined(asked.answer(job()))
    assert {"format", "device", "versions", "machine", "files", "status", "log"} <= set(found)
    text = json.dumps(found)
    assert TOKEN not in text and not any(line in text for line in lines) and "hello" in found["log"][0]
    assert any(one["name"] == "identity/key.pem" and one["mode"] == "0o600" for one in found["files"])
    assert redact_known(lines[0], known_secrets(asked.folder)) == REDACTED
    assert "hello" in log_lines(found)[1]


def test_a_bundle_is_no_longer_than_was_asked(tmp_path: Path) -> None:
    """The oldest lines are left away; where even nothing of the log fits, that is said."""
    asked = Asked(tmp_path)
    rng = random.Random(7)
    for number in range(2_000):
        asked.log(f"{number} " + " ".join(str(rng.random()) for _ in range(10)))
    found = asked.answer(job(most_bytes=20_000))
    content = joined(found)
    assert sum(len(piece.data) for piece in found if isinstance(piece, LogPiece)) <= 20_000
    assert "1999 " in content["log"][-1] and content["lines_left_away"] > 0
    asked.diagnosis._status = lambda: {"noise": [rng.random() for _ in range(500)]}
    (refused,) = asked.answer(job(2, most_bytes=1_024), 100.0 + PAUSE_S)
    assert isinstance(refused, JobRefused) and "takes" in refused.reason


def test_a_device_answers_no_more_often_than_it_can_afford(tmp_path: Path) -> None:
    """Whoever may ask, a second one within the pause is refused."""
    asked = Asked(tmp_path)
    assert isinstance(asked.answer(job(1), 50.0)[0], LogPiece)
    (refused,) = asked.answer(job(2), 50.0 + PAUSE_S - 1)
    assert isinstance(refused, JobRefused)


@pytest.mark.parametrize("change", [{"what": "shell"}, {"id": "../../etc"}, {"max_bytes": 10**9}, {"what": "logs; rm"}])
def test_a_job_is_one_of_a_closed_list(change: dict[str, Any]) -> None:
    """Anything else is malformed before anybody looks at it."""
    raw = messages.msgspec.msgpack.encode({"type": "job", "id": "0" * 16, "what": "logs", **change})
    with pytest.raises(MalformedMessage):
        messages.decode(raw, DeviceJob)


class Desk:
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
        self.world.devices.ingest([(name, one) for one in said])


def pieces(number: str, content: bytes, size: int = 300) -> list[LogPiece]:
    digest = hashlib.sha256(content).hexdigest()
    return [
        LogPiece(id=number, offset=at, total=len(content), sha256=digest, data=content[at : at + size])
        for at in range(0, len(content), size)
    ]


CONTENT = gzip.compress(json.dumps({"log": ["x" * 10, *map(str, range(999))]}).encode())


def test_pieces_in_any_order_make_the_bundle(tmp_path: Path) -> None:
    """Doubled and shuffled; before the last one it is coming."""
    desk = Desk(tmp_path)
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


def test_nobody_answers_for_another_device(tmp_path: Path) -> None:
    """Nor without being asked, nor after it was refused, nor with pieces that do not fit."""
    desk = Desk(tmp_path)
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


def test_a_refusal_is_told(tmp_path: Path) -> None:
    """With the device's reason."""
    desk = Desk(tmp_path)
    asked = desk.bundles.request("cam", "me")
    desk.say("cam", JobRefused(id=asked["id"], reason="not now"))
    found = desk.bundles.get("cam", asked["id"])
    assert (found["state"], found["reason"]) == ("refused", "not now")


def test_a_device_is_asked_once_at_a_time_and_only_where_it_is_there(tmp_path: Path) -> None:
    """Two operators share one answer; what never came is given up; the newest few are kept."""
    desk = Desk(tmp_path)
    first = desk.bundles.request("cam", "me")
    assert desk.bundles.request("cam", "you")["id"] == first["id"] and len(desk.asked) == 1
    for _ in range(MAX_BUNDLES + 2):
        desk.world.now += REQUEST_TIMEOUT_S + 1
        desk.bundles.request("cam", "me")
    assert len(desk.bundles.of_device("cam")) == MAX_BUNDLES
    desk.world.devices.ingest([("cam", messages.Death(1))])
    desk.world.now += REQUEST_TIMEOUT_S + 1
    with pytest.raises(Conflict, match="is not online"):
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
def test_a_bundle_that_is_none_is_malformed(content: bytes) -> None:
    """A device that sends bombs harms nobody who reads its log."""
    with pytest.raises(MalformedMessage):
        unpack(content)


def test_a_job_that_cannot_be_sent_is_an_error(tmp_path: Path) -> None:
    """Not a bundle that never comes."""
    desk = Desk(tmp_path)

    def fails(name: str, job: DeviceJob) -> None:
        raise LinkError("the broker is gone")

    broken = LogBundleStore(desk.world.database, fails, now=lambda: desk.world.now)
    with pytest.raises(LinkError):
        broken.request("cam", "me")


def test_births_do_not_matter_here(tmp_path: Path) -> None:
    """A birth in the middle of pieces spoils nothing."""
    desk = Desk(tmp_path)
    asked = desk.bundles.request("cam", "me")
    first, *rest = pieces(asked["id"], CONTENT)
    desk.say("cam", first)
    desk.world.birth("cam", session=2)
    desk.say("cam", *rest)
    assert desk.bundles.get("cam", asked["id"])["state"] == "complete"


def test_old_bundles_and_those_that_never_came_are_dropped(tmp_path: Path) -> None:
    """Their pieces too."""
    desk = Desk(tmp_path)
    asked = desk.bundles.request("cam", "me")
    desk.say("cam", pieces(asked["id"], CONTENT)[0])
    desk.world.now += RETENTION_S["requested"] + 1
    desk.bundles.trim()
    assert [(one["state"], one["reason"]) for one in desk.bundles.of_device("cam")] == [
        ("corrupt", "it did not arrive in time")
    ]
    desk.say("cam", *pieces(asked["id"], CONTENT))
    assert desk.bundles.of_device("cam")[0]["state"] == "corrupt"
    desk.world.now += RETENTION_S["complete"]
    desk.bundles.trim()
    assert desk.bundles.of_device("cam") == []
