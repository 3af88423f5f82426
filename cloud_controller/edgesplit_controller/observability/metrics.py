"""What the controller counts of its API, its broker session and its database, and reads of its fleet when Prometheus
asks: counts that the database makes, whatever the number of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from sqlalchemy import Engine, event
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import edgesplit
from edgesplit.observability import metrics
from edgesplit.observability.registry import Ledger, Series, gauge
from edgesplit_controller.fleet.ingest import Taken
from edgesplit_controller.fleet.overview import Fleet
from edgesplit_controller.history.rollup import Rolling
from edgesplit_controller.rollout.metrics import Count

METHODS = frozenset({"GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH"})
STATES = ("online", "stale", "offline", "claimed", "revoked")
STATEMENTS = frozenset({"select", "insert", "update", "delete"})
Reading = Callable[[], Mapping[str, float]]
"""What waits now, by queue; and `broker`, 1 where it is connected."""


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
                    (metrics.CONTROLLER_REQUESTS, (method, route, f"{status // 100}xx"), 1.0),
                    (metrics.CONTROLLER_REQUEST_S, (method, route), perf_counter() - began),
                )
            )


def heard(ledger: Ledger, taken: Taken, seconds: float) -> None:
    """A batch of messages was taken in."""
    ledger.record(
        [
            (metrics.CONTROLLER_HEAR_S, (), seconds),
            *((metrics.CONTROLLER_MESSAGES, key, float(count)) for key, count in taken.outcomes.items()),
            *((metrics.CONTROLLER_LATE_S, (), lag_s) for lag_s in taken.lags_s),
        ]
    )


def watch(engine: Engine, ledger: Ledger) -> None:
    """Time every statement from now on."""

    @event.listens_for(engine, "before_cursor_execute")
    def before(_connection: Any, _cursor: Any, _statement: str, _parameters: Any, context: Any, _many: bool) -> None:
        context.edgesplit_began = perf_counter()

    @event.listens_for(engine, "after_cursor_execute")
    def after(_connection: Any, _cursor: Any, statement: str, _parameters: Any, context: Any, _many: bool) -> None:
        word = statement.lstrip()[:6].lower()
        kind = word if word in STATEMENTS else "other"
        seconds = perf_counter() - getattr(context, "edgesplit_began", perf_counter())
        ledger.observe(metrics.CONTROLLER_STATEMENT_S, kind, value=seconds)


def series(ledger: Ledger, fleet: Fleet, rolling: Rolling, rollouts: Count, reading: Reading = dict) -> list[Series]:
    """All that is shown."""
    states, now, counted = fleet.states(), reading(), rollouts()
    return [
        gauge(metrics.CONTROLLER_INFO, 1.0, edgesplit.__version__),
        *ledger.series(),
        *(gauge(metrics.CONTROLLER_DEVICES, states[state], state) for state in STATES),
        *(gauge(metrics.CONTROLLER_CONDITIONS, one["devices"], one["kind"]) for one in fleet.conditions()),
        *(gauge(metrics.CONTROLLER_RUNNING, count, model, state) for model, state, count in fleet.running()),
        *(gauge(metrics.CONTROLLER_ROLLOUTS, count, state) for state, count in counted.rollouts.items()),
        *(gauge(metrics.CONTROLLER_ROLLOUT_DEVICES, count, state) for state, count in counted.devices.items()),
        *(gauge(metrics.CONTROLLER_WAITING, value, queue) for queue, value in now.items() if queue != "broker"),
        *(gauge(metrics.CONTROLLER_BROKER, value) for queue, value in now.items() if queue == "broker"),
        gauge(metrics.CONTROLLER_UNROLLED, rolling.behind()),
    ]
