"""The audit log: read, verified, exported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import StreamingResponse

from edgesplit_controller.access.audit_log import Audit
from edgesplit_controller.api.authorisation import admin_routes
from edgesplit_controller.api.response_models import AuditLine, Verdict, answers, answers_with

admins = admin_routes()
Count = Annotated[int, Query(ge=1, le=10_000)]
Before = Annotated[int, Query(ge=0, le=2**62)]
Hash = Annotated[str, Query(max_length=64, pattern="^[0-9a-f]*$")]


@admins.get("/audit", responses=answers(list[AuditLine]))
def audit_lines(request: Request, newest: Count = 200, before: Before = 0) -> list[dict[str, Any]]:
    """The newest lines (those before number `before`, if given), oldest first."""
    return _audit(request).newest(newest, before)


@admins.get("/audit/verify", responses=answers(Verdict))
def verify_audit(request: Request, expect: Hash = "") -> dict[str, Any]:
    """Is every line what was written? With the hash of an older line: is that one still there?"""
    return _audit(request).verify(expect)


@admins.get("/audit/export", responses=answers_with("application/x-ndjson", "The lines."))
def export_audit(request: Request) -> StreamingResponse:
    """Every line, oldest first, a JSON object each."""

    def lines() -> Iterator[bytes]:
        for line in _audit(request).all():
            yield json.dumps(line, separators=(",", ":")).encode() + b"\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def _audit(request: Request) -> Audit:
    audit: Audit = request.app.state.gate.audit
    return audit
