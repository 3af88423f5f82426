"""A port of its own for Prometheus: `/metrics`, read by whoever reaches it, and nothing else.

No model can be asked and nothing can be changed there. It speaks plain HTTP and asks nobody who they are, so it is
opened only where an operator names its address.
"""

from __future__ import annotations

from collections.abc import Callable

from edgesplit.errors import NotFound, UsageError
from edgesplit.http1.server import Request, Response, Server, error_response
from edgesplit.observability.prometheus import PATH, is_scrape

MOST_CONNECTIONS = 16


def parse_address(text: str) -> tuple[str, int]:
    """ADDRESS:PORT, as in 127.0.0.1:9400 or [::1]:9400; port 0 is any. UsageError for anything else."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 65_535:
        raise UsageError(f"not an address for metrics: {text[:200]!r} (as in 127.0.0.1:9400)")
    return host.strip("[]"), int(port)


def metrics_server(address: tuple[str, int], page: Callable[[], Response]) -> Server:
    """The server, not started yet."""

    def answer(request: Request) -> Response:
        if is_scrape(request):
            return page()
        if request.path == PATH:
            return error_response(405, "metrics are read by GET", {"allow": "GET, HEAD"})
        raise NotFound(f"only {PATH} is here")

    return Server(answer, host=address[0], port=address[1], max_connections=MOST_CONNECTIONS)
