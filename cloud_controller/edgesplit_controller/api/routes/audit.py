"""Routes for the audit log: read, verify, export."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import StreamingResponse

from edgesplit_controller.access.audit_log import AuditLog
from edgesplit_controller.api.authorisation import admin_routes, authenticator_of
from edgesplit_controller.api.response_models import AuditLine, Verdict, binary_response, json_response

admins = admin_routes()
Count = Annotated[int, Query(ge=1, le=10_000)]
Before = Annotated[int, Query(ge=0, le=2**62)]
Hash = Annotated[str, Query(max_length=64, pattern="^[0-9a-f]*$")]


@admins.get("/audit", responses=json_response(list[AuditLine]))
def audit_lines(request: Request, newest: Count = 200, before: Before = 0) -> list[dict[str, Any]]:
    """The newest entries, only those before number `before` if that is given, oldest first."""
    return _audit(request).newest(newest, before)


@admins.get("/audit/verify", responses=json_response(Verdict))
def verify_audit(request: Request, expect: Hash = "") -> dict[str, Any]:
    """Check that no entry was changed or removed. `expect`: hash of an older entry that must still exist."""
    return _audit(request).verify(expect)


@admins.get("/audit/export", responses=binary_response("application/x-ndjson", "The lines."))
def export_audit(request: Request) -> StreamingResponse:
    """Every entry, oldest first, as one JSON object per line."""

    def lines() -> Iterator[bytes]:
        for line in _audit(request).all():
            yield json.dumps(line, separators=(",", ":")).encode() + b"\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def _audit(request: Request) -> AuditLog:
    return authenticator_of(request).audit
