"""W3C trace context: what is accepted, what is passed on, and the ids in log lines."""

from __future__ import annotations

import io
import json
import logging
import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.observability import log_format, trace_context
from edgesplit.observability.trace_context import TraceContext

ID, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{ID}-{SPAN}-01"


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (GOOD, True),
        (f"00-{ID}-{SPAN}-00", False),
        (f"00-{ID}-{SPAN}-03", True),
        (f"cc-{ID}-{SPAN}-01", True),
        (f"cc-{ID}-{SPAN}-01-what-the-future-will-be-like", True),
    ],
)
def test_valid_traceparent_is_parsed(header: str, sampled: bool) -> None:
    """Also one of a later version, of which only what this version knows is read (section 3.2.4)."""
    assert trace_context.parse(header) == TraceContext(ID, SPAN, sampled)


@pytest.mark.parametrize(
    "header",
    [
        "",
        GOOD.upper(),
        f" {GOOD}",
        f"{GOOD} ",
        f"{GOOD}\n",
        f"{GOOD}-more",
        f"{GOOD}, {GOOD}",
        f"ff-{ID}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{ID}-{'0' * 16}-01",
        f"00-{ID[:-1]}-{SPAN}-01",
        f"00-{ID}-{SPAN}-1",
        f"cc-{ID}-{SPAN}-01.{'x' * 10}",
        f"cc-{ID}-{SPAN}-01-{'x' * 4000}",
        f"00-{ID[:-1]}\u0665-{SPAN}-01",
        "00-" + "g" * 32 + f"-{SPAN}-01",
    ],
)
def test_malformed_traceparent_is_ignored(header: str) -> None:
    """Nothing of it is passed on."""
    assert trace_context.parse(header) is None
    assert trace_context.from_headers({"traceparent": header}) is None


@given(st.one_of(st.text(), st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{30,33}-[0-9a-f]{15,17}-[0-9a-f]{2}.{0,3}")), st.text())
def test_forwarded_headers_are_always_valid(header: str, state: str) -> None:
    """Whatever came, what is sent on is short, printable and parses to the same context."""
    context = trace_context.parse(header, state)
    if context is None:
        return
    sent = context.headers()
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]", sent["traceparent"])
    assert re.fullmatch(r"[\x20-\x7e]{0,512}", sent.get("tracestate", ""))
    assert trace_context.parse(sent["traceparent"], sent.get("tracestate", "")) == context


def test_tracestate_is_forwarded_unless_too_long() -> None:
    """The trace goes on without a state that could not be forwarded."""
    assert trace_context.parse(GOOD, "vendor=1,other=t61rcWkgMzE") == TraceContext(
        ID, SPAN, True, "vendor=1,other=t61rcWkgMzE"
    )
    assert trace_context.parse(GOOD, "a=" + "x" * 600) == TraceContext(ID, SPAN, True)
    assert trace_context.parse(GOOD, "a=1\r\nhost: evil") == TraceContext(ID, SPAN, True)


def test_requests_sent_by_a_thread_are_children_of_its_request() -> None:
    """Of no other thread's, and of none when it is done."""
    context = TraceContext(ID, SPAN, True)
    elsewhere: list[dict[str, str]] = []
    with trace_context.request_context(context, "r1"):
        assert (
            trace_context.outgoing_headers() == {"traceparent": GOOD}
            and trace_context.current_request().request_id == "r1"
        )
        thread = threading.Thread(target=lambda: elsewhere.append(trace_context.outgoing_headers()))
        thread.start()
        thread.join()
    assert trace_context.outgoing_headers() == {} and elsewhere == [{}]


@pytest.fixture
def written() -> tuple[logging.Logger, io.StringIO, logging.Handler]:
    """A logger of its own, so that the test run's own logging stays as it is."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.Logger("edgesplit.test")
    logger.addHandler(handler)
    return logger, stream, handler


def test_json_log_line_has_trace_and_request_id(written: tuple[logging.Logger, io.StringIO, logging.Handler]) -> None:
    """One object a line, also with an exception and a message of several lines in it."""
    logger, stream, handler = written
    log_format.install_format(handler, "json")
    with trace_context.request_context(TraceContext(ID, SPAN, True), "frame-7"):
        logger.warning("two\nlines %s", '"')
    try:
        raise ValueError("no")
    except ValueError:
        logger.exception("outside")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["message"], first["trace_id"], first["request_id"]) == ('two\nlines "', ID, "frame-7")
    assert first["level"] == "warning" and first["at"].endswith("+00:00")
    assert "trace_id" not in second and "ValueError: no" in second["exception"]


def test_text_log_line_has_ids_without_line_breaks(
    written: tuple[logging.Logger, io.StringIO, logging.Handler],
) -> None:
    """A request's id is chosen by its client."""
    logger, stream, handler = written
    log_format.install_format(handler, "text")
    with trace_context.request_context(TraceContext(ID, SPAN, True), "x]\nFAKE line" + "y" * 500):
        logger.warning("hello")
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().endswith(f"hello [request=x??FAKE?line{'y' * 68} trace={ID}]\n")
