"""Separate HTTP server for Prometheus that serves `/metrics` and nothing else.

It offers no inference and no changes. It is plain HTTP without authentication, so it is started only where an operator
configures its address.
"""

from __future__ import annotations

from collections.abc import Callable

from edgesplit.errors import NotFound
from edgesplit.http1.head import Refused
from edgesplit.http1.server import Request, Response, Server, error_response
from edgesplit.observability.prometheus import METRICS_PATH, is_scrape

MAX_CONNECTIONS = 16


def make_metrics_server(address: tuple[str, int], render_page: Callable[[], Response]) -> Server:
    """Create the server; it is not started. `render_page` returns the response to a scrape."""

    def answer(request: Request) -> Response:
        if is_scrape(request):
            return render_page()
        if request.path == METRICS_PATH:
            return error_response(405, "only GET and HEAD are supported", {"allow": "GET, HEAD"})
        raise NotFound(f"only {METRICS_PATH} is served here")

    def refuse_body(request: Request) -> None:
        raise Refused(413, "no request here has a body")

    return Server(
        answer, host=address[0], port=address[1], max_connections=MAX_CONNECTIONS, check_head=refuse_body
    )  # fmt: skip
