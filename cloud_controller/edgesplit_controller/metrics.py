"""What the controller counts of its API, and reads of its fleet when Prometheus asks."""

from __future__ import annotations

from collections import Counter
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

import edgesplit
from edgesplit.seen import families
from edgesplit.seen.ledger import Ledger, Series, gauge
from edgesplit_controller.devices import Devices

METHODS = frozenset({"GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH"})


class CountedRequests:
    """ASGI middleware: each request under its route's template, whatever path was asked."""

    def __init__(self, app: ASGIApp, ledger: Ledger) -> None:
        self._app = app
        self._ledger = ledger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, counted when its answer is sent, or has failed."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = perf_counter(), 500

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, told)
        finally:
            method = scope["method"] if scope["method"] in METHODS else ""
            route = str(getattr(scope.get("route"), "path", ""))
            self._ledger.record(
                (
                    (families.CONTROLLER_REQUESTS, (method, route, f"{status // 100}xx"), 1.0),
                    (families.CONTROLLER_REQUEST_S, (method, route), perf_counter() - began),
                )
            )


def series(ledger: Ledger, devices: Devices) -> list[Series]:
    """All that is shown."""
    states: Counter[str] = Counter(devices.state(device) for device in devices.all())
    states["claimed"] = len(devices.open_claims())
    return [
        gauge(families.CONTROLLER_INFO, 1.0, edgesplit.__version__),
        *ledger.series(),
        *(
            gauge(families.CONTROLLER_DEVICES, states[state], state)
            for state in ("online", "stale", "offline", "claimed", "revoked")
        ),
    ]
