"""Prometheus metrics of the controller: its API, its broker session, its database, and its fleet. Counts of the fleet
are computed by database queries at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Any

from sqlalchemy import Engine, event
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import edgesplit
from edgesplit.observability import metrics
from edgesplit.observability.registry import Entry, MetricRegistry, Series, gauge_series
from edgesplit_controller.fleet.audits import AnswerAudits
from edgesplit_controller.fleet.ingest import IngestResult
from edgesplit_controller.fleet.overview import FleetOverview
from edgesplit_controller.history.rollup import RollUp
from edgesplit_controller.rollout.metrics import RolloutCounter

METHODS = frozenset({"GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH"})
STATES = ("online", "stale", "offline", "claimed", "revoked")
STATEMENTS = frozenset({"select", "insert", "update", "delete"})
QueueLengths = Callable[[], Mapping[str, float]]
"""Returns queue lengths by queue, and `broker`: 1 while connected, else 0."""


class CountedRequests:
    """ASGI middleware: counts and times each request under the template of its route, whatever path was requested."""

    def __init__(self, app: ASGIApp, ledger: MetricRegistry) -> None:
        self._app = app
        self._ledger = ledger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, counted when it was answered or has failed."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = perf_counter(), 500

        async def observe_and_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, observe_and_send)
        finally:
            method = scope["method"] if scope["method"] in METHODS else ""
            route = str(getattr(scope.get("route"), "path", ""))
            self._ledger.record(
                (
                    (metrics.CONTROLLER_REQUESTS, (method, route, f"{status // 100}xx"), 1.0),
                    (metrics.CONTROLLER_REQUEST_S, (method, route), perf_counter() - began),
                )
            )


def record_ingest(ledger: MetricRegistry, taken: IngestResult, seconds: float) -> None:
    """Record a batch of ingested device messages and the seconds it took."""
    ledger.record(
        [
            (metrics.CONTROLLER_INGEST_S, (), seconds),
            *((metrics.CONTROLLER_MESSAGES, key, float(count)) for key, count in taken.outcomes.items()),
            *((metrics.CONTROLLER_BACKLOG_AGE_S, (), lag_s) for lag_s in taken.lags_s),
            *(entry for model, counted in taken.audits.items() for entry in _entries_of_audits(model, counted)),
        ]
    )


def _entries_of_audits(model: str, counted: AnswerAudits) -> Iterator[Entry]:
    """What a cascade and still frames of a model add to their counters."""
    if (cascade := counted.cascade) is not None:
        for outcome in ("sure", "escalated", "unsure"):
            yield metrics.CONTROLLER_CASCADE_ANSWERS, (model, outcome), float(getattr(cascade, outcome))
        same = max(0, cascade.audited - cascade.changed)
        for outcome, count in (("same", same), ("changed", cascade.changed), ("unaudited", cascade.unaudited)):
            yield metrics.CONTROLLER_CASCADE_AUDITS, (model, outcome), float(count)
        yield metrics.CONTROLLER_CASCADE_ALARMS, (model,), float(cascade.alarms)
    if (still := counted.still) is not None:
        yield metrics.CONTROLLER_REPEATED, (model,), float(still.repeated)
        for outcome, count in (
            ("same", still.audited_same),
            ("changed", still.changed),
            ("unaudited", still.unaudited),
        ):
            yield metrics.CONTROLLER_REPEAT_AUDITS, (model, outcome), float(count)
        yield metrics.CONTROLLER_REPEAT_ALARMS, (model,), float(still.alarms)


def observe_statements(engine: Engine, ledger: MetricRegistry) -> None:
    """Time every SQL statement of `engine` from now on."""

    @event.listens_for(engine, "before_cursor_execute")
    def before(_connection: Any, _cursor: Any, _statement: str, _parameters: Any, context: Any, _many: bool) -> None:
        context.edgesplit_began = perf_counter()

    @event.listens_for(engine, "after_cursor_execute")
    def after(_connection: Any, _cursor: Any, statement: str, _parameters: Any, context: Any, _many: bool) -> None:
        word = statement.lstrip()[:6].lower()
        kind = word if word in STATEMENTS else "other"
        seconds = perf_counter() - getattr(context, "edgesplit_began", perf_counter())
        ledger.observe(metrics.CONTROLLER_STATEMENT_S, kind, value=seconds)


def series(
    ledger: MetricRegistry, fleet: FleetOverview, rollup: RollUp, rollouts: RolloutCounter,
    queue_lengths: QueueLengths = dict,
) -> list[Series]:  # fmt: skip
    """All metrics as they are exposed. `queue_lengths` provides queue lengths."""
    states, counts, lengths = fleet.states(), rollouts(), dict(queue_lengths())
    broker = [lengths.pop("broker")] if "broker" in lengths else []
    return [
        gauge_series(metrics.CONTROLLER_INFO, 1.0, edgesplit.__version__),
        *ledger.series(),
        *(gauge_series(metrics.CONTROLLER_DEVICES, states[state], state) for state in STATES),
        *(gauge_series(metrics.CONTROLLER_CONDITIONS, row["devices"], row["kind"]) for row in fleet.conditions()),
        *(gauge_series(metrics.CONTROLLER_RUNNING, count, model, state) for model, state, count in fleet.running()),
        *(gauge_series(metrics.CONTROLLER_ROLLOUTS, count, state) for state, count in counts.rollouts.items()),
        *(gauge_series(metrics.CONTROLLER_ROLLOUT_DEVICES, count, state) for state, count in counts.devices.items()),
        *(gauge_series(metrics.CONTROLLER_WAITING, length, queue) for queue, length in lengths.items()),
        *(gauge_series(metrics.CONTROLLER_BROKER, is_connected) for is_connected in broker),
        gauge_series(metrics.CONTROLLER_ROLLUP_BACKLOG, rollup.backlog()),
    ]
