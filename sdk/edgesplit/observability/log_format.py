"""Log lines for people or for a log store, each with the request that it belongs to and its trace, if there are any,
and with the operator, the device and the rollout that it is about (`about`, or `extra=` of the logging call).
"""

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
LONGEST_ID = 80
"""Of a request's id in a line: it is the client's, and may be long."""
SUBJECTS = ("operator", "device", "rollout")
_always: dict[str, str] = {}
_about: ContextVar[dict[str, str] | None] = ContextVar("edgesplit_about", default=None)


@contextmanager
def about(**subjects: str) -> Iterator[None]:
    """What is logged inside, also by threads that take this context along, is about these subjects too."""
    token = _about.set({**(_about.get() or {}), **subjects})
    try:
        yield
    finally:
        _about.reset(token)


def always(**subjects: str) -> None:
    """From now on whatever this process logs is about these, where a line says nothing else; people who read its log
    know that, and are not told on every line."""
    _always.update(subjects)


def note(**subjects: str) -> None:
    """From now on the `about` that we are in is about these, too; nothing happens outside of one. For what is learned
    on the way, as who asks: also those see it who entered that `about`."""
    inside = _about.get()
    if inside is not None:
        inside.update(subjects)


def configure(level: str = "info", form: Format = "text", stream: TextIO | None = None) -> None:
    """All of this process's log lines, from now on, unless somebody has said already where they go."""
    handler = logging.StreamHandler(stream or sys.stderr)
    equip(handler, form)
    logging.basicConfig(level=level.upper(), handlers=[handler])


def equip(handler: logging.Handler, form: Format) -> None:
    """What this handler writes is in that form."""
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    handler.addFilter(_named)


def _named(record: logging.LogRecord) -> bool:
    """Note on the record, on the thread that made it, whom it is about."""
    asked = trace_context.current()
    if not hasattr(record, "request_id"):
        record.request_id = asked.request_id[:LONGEST_ID]
    if not hasattr(record, "trace_id"):
        record.trace_id = asked.trace.trace_id if asked.trace is not None else ""
    for name, value in {**_always, **(_about.get() or {})}.items():
        if not hasattr(record, name):
            setattr(record, name, value[:LONGEST_ID])
    return True


class TextLines(logging.Formatter):
    """`time LEVEL logger: message [request=… trace=… operator=… device=… rollout=…]`, as people read it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        names = (("request", "request_id"), ("trace", "trace_id"), *((name, name) for name in SUBJECTS))
        known = ((name, str(getattr(record, field, "") or "")) for name, field in names)
        told = " ".join(f"{name}={_printable(value)}" for name, value in known if value and _always.get(name) != value)
        return super().formatMessage(record) + (f" [{told}]" if told else "")


class JsonLines(logging.Formatter):
    """A JSON object per line: at (UTC), level, logger, message; request_id, trace_id, operator, device, rollout,
    exception if there are any."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("request_id", "trace_id", *SUBJECTS):
            if value := getattr(record, name, ""):
                line[name] = str(value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _printable(text: str) -> str:
    """A client's id must not write lines of its own."""
    return "".join(one if one.isprintable() and one not in " []" else "?" for one in text)
