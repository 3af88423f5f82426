"""Log lines of a request carry its context: in JSON and in text, across threads."""

from __future__ import annotations

import io
import json
import logging
import threading
from contextvars import copy_context
from typing import Any

import anyio
import pytest

from edgesplit.observability import log_format
from edgesplit.observability.trace_context import TRACEPARENT, current_request
from edgesplit_controller.api.request_logging import RequestLoggingMiddleware
from edgesplit_controller.api.security_headers import REQUEST_ID

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def lines() -> Any:
    """What is logged, as a log store reads it."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    log_format.install_format(handler, "json")
    root = logging.getLogger("edgesplit_controller")
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.removeHandler(handler)
    root.setLevel(before)


def send_request(method: str = "POST", path: str = "/v1/deployments", trace: str = "") -> None:
    """Send one request to an application that logs, and that authenticates the operator on the way."""
    log = logging.getLogger("edgesplit_controller.test")

    async def application(scope: Any, receive: Any, send: Any) -> None:
        log_format.add_to_log_context(operator="anna")
        context = copy_context()
        worker = threading.Thread(target=lambda: context.run(log.info, "heavy work"))
        worker.start()
        worker.join()
        assert current_request().request_id == "abc"
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        """Nobody reads it."""

    headers = [(TRACEPARENT.encode(), trace.encode())] if trace else []
    scope = {"type": "http", "method": method, "path": path, "headers": headers, REQUEST_ID: "abc"}
    anyio.run(RequestLoggingMiddleware(application), scope, None, send)


def test_log_lines_of_a_request_carry_its_context(lines: Any) -> None:
    """Route name, trace and operator, also on a worker thread that serves the request; the change itself is one
    line."""
    send_request(trace=f"00-{TRACE}-00f067aa0ba902b7-01")
    work, change = lines()
    for line in (work, change):
        assert (line["request_id"], line["trace_id"], line["operator"]) == ("abc", TRACE, "anna")
    assert change["message"].startswith("POST '/v1/deployments': 201 in ") and change["level"] == "info"


def test_reads_log_at_debug_level_and_paths_are_escaped(lines: Any) -> None:
    """Line breaks and terminal codes in a path are escaped, a long path is truncated."""
    send_request("GET", "/v1/devices/\n\x1b[31m" + "x" * 5_000)
    _, read = lines()
    assert read["level"] == "debug" and "\\n\\x1b" in read["message"] and len(read["message"]) < 400


def test_log_subjects_come_from_the_innermost_about_block(lines: Any) -> None:
    """They end with the block; `extra` of a single line overrides them; outside of a block there are none."""
    log = logging.getLogger("edgesplit_controller.test")
    log_format.add_to_log_context(operator="nobody hears this")
    with log_format.log_context(rollout="7"):
        with log_format.log_context(device="cam-1"):
            log.info("in")
            log.info("other", extra={"device": "cam-2"})
        log.info("out")
    log.info("none")
    told = [{name: line[name] for name in log_format.SUBJECTS if name in line} for line in lines()]
    assert told == [{"device": "cam-1", "rollout": "7"}, {"device": "cam-2", "rollout": "7"}, {"rollout": "7"}, {}]


def test_text_format_prints_subjects_in_brackets() -> None:
    """A value that contains brackets cannot forge a subject."""
    record = logging.LogRecord("edgesplit", logging.INFO, "", 0, "hello", (), None)
    record.operator, record.device = "an]na", "cam-1"
    assert log_format.TextFormatter().format(record).endswith("hello [operator=an?na device=cam-1]")


def test_agent_log_lines_carry_the_device_name(lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every thread; a line about another device carries that device's name."""
    monkeypatch.setattr(log_format, "_process_subjects", {})
    log_format.set_process_subjects(device="cam-1")
    log = logging.getLogger("edgesplit_controller.test")
    worker = threading.Thread(target=lambda: log.info("from a thread"))
    worker.start()
    worker.join()
    with log_format.log_context(device="cam-2"):
        log.info("about another")
    assert [line["device"] for line in lines()] == ["cam-1", "cam-2"]
    record = logging.LogRecord("edgesplit", logging.INFO, "", 0, "hello", (), None)
    record.device = "cam-1"
    assert log_format.TextFormatter().format(record).endswith("edgesplit: hello")
