"""Log formats, as text or as JSON lines. Each line carries its request id and trace id, if there are any, and the
operator, device and rollout that it concerns (set by `log_context`, or by `extra=` of the logging call)."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Any, Literal, TextIO

from edgesplit.observability import trace_context

Format = Literal["text", "json"]
FORMATS: tuple[Format, ...] = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
MAX_ID_CHARS = 80
"""Maximum length of an id in a log line: a request id is chosen by the client and may be long."""
SUBJECTS = ("operator", "device", "rollout")
"""Names of the subjects that a log line can concern."""
_process_subjects: dict[str, str] = {}
_context_subjects: ContextVar[dict[str, str] | None] = ContextVar("edgesplit_about", default=None)


@contextmanager
def log_context(**subjects: str) -> Iterator[None]:
    """Attach these subjects to every log line inside the context, also from threads that inherit the context."""
    token = _context_subjects.set({**(_context_subjects.get() or {}), **subjects})
    try:
        yield
    finally:
        _context_subjects.reset(token)


def set_process_subjects(**subjects: str) -> None:
    """Attach these subjects to every log line of this process that has no others. Text lines omit them, because the
    reader of this process's log has them anyway; JSON lines contain them."""
    _process_subjects.update(subjects)


def add_to_log_context(**subjects: str) -> None:
    """Add subjects to the enclosing `log_context`; does nothing outside of one. For what becomes known later, such as
    the authenticated operator. The addition is visible to the code that opened the context."""
    subjects_in_context = _context_subjects.get()
    if subjects_in_context is not None:
        subjects_in_context.update(subjects)


def configure(level: str = "info", form: Format = "text", stream: TextIO | None = None) -> None:
    """Set up logging of this process, unless the root logger already has a handler."""
    handler = logging.StreamHandler(stream or sys.stderr)
    install_format(handler, form)
    logging.basicConfig(level=level.upper(), handlers=[handler])


def install_format(handler: logging.Handler, form: Format) -> None:
    """Install the formatter for this format, and the filter that adds ids and subjects, on a handler."""
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    handler.addFilter(_add_ids_to_record)


def _add_ids_to_record(record: logging.LogRecord) -> bool:
    """Logging filter: add request id, trace id and subjects to the record, on the thread that created it."""
    request = trace_context.current_request()
    if not hasattr(record, "request_id"):
        record.request_id = request.request_id[:MAX_ID_CHARS]
    if not hasattr(record, "trace_id"):
        record.trace_id = request.trace.trace_id if request.trace is not None else ""
    for name, value in {**_process_subjects, **(_context_subjects.get() or {})}.items():
        if not hasattr(record, name):
            setattr(record, name, value[:MAX_ID_CHARS])
    return True


class TextFormatter(logging.Formatter):
    """`time LEVEL logger: message [request=… trace=… operator=… device=… rollout=…]`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        names = (("request", "request_id"), ("trace", "trace_id"), *((name, name) for name in SUBJECTS))
        known = ((name, str(getattr(record, field, "") or "")) for name, field in names)
        text = " ".join(
            f"{name}={_sanitise(value)}" for name, value in known if value and _process_subjects.get(name) != value
        )
        return super().formatMessage(record) + (f" [{text}]" if text else "")


class JsonFormatter(logging.Formatter):
    """One JSON object per line: at (UTC), level, logger, message; and request_id, trace_id, operator, device, rollout,
    exception if there are any."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage(),
        }  # fmt: skip
        for name in ("request_id", "trace_id", *SUBJECTS):
            if value := getattr(record, name, ""):
                line[name] = str(value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _sanitise(text: str) -> str:
    """Replace characters in an id with which a client could forge log lines."""
    return "".join(char if char.isprintable() and char not in " []" else "?" for char in text)
