"""Log lines for people or for a log store, each with the request that it belongs to and its trace, if there are any."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any, Literal, TextIO

from edgesplit.seen import trace

Format = Literal["text", "json"]
FORMATS: tuple[Format, ...] = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
LONGEST_ID = 80
"""Of a request's id in a line: it is the client's, and may be long."""


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
    asked = trace.current()
    if not hasattr(record, "request_id"):
        record.request_id = asked.request_id[:LONGEST_ID]
    if not hasattr(record, "trace_id"):
        record.trace_id = asked.trace.trace_id if asked.trace is not None else ""
    return True


class TextLines(logging.Formatter):
    """`time LEVEL logger: message [request=… trace=…]`, as people read it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        names = (("request", getattr(record, "request_id", "")), ("trace", getattr(record, "trace_id", "")))
        told = " ".join(f"{name}={_printable(value)}" for name, value in names if value)
        return super().formatMessage(record) + (f" [{told}]" if told else "")


class JsonLines(logging.Formatter):
    """A JSON object per line: at (UTC), level, logger, message; request_id, trace_id, exception if there are any."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("request_id", "trace_id"):
            if value := getattr(record, name, ""):
                line[name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _printable(text: str) -> str:
    """A client's id must not write lines of its own."""
    return "".join(one if one.isprintable() and one not in " []" else "?" for one in text)
