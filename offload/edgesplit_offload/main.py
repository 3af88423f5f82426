"""`python -m edgesplit_offload.main`: the offload server. On SIGTERM and SIGINT running requests are finished first.

Prints one line once it listens. Without --cert, --key and --ca there is no TLS, and it listens on loopback only. With
one process this process serves; with several it is their supervisor, and starts them with the same command line.
"""

from __future__ import annotations

import argparse
import logging
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from edgesplit.errors import EdgeError, UsageError
from edgesplit.http1.listener import listening_socket, server_url
from edgesplit.http1.server import Response
from edgesplit.links import parse_metrics_address
from edgesplit.observability import log_format, tracing
from edgesplit.observability.metrics_server import make_metrics_server
from edgesplit.observability.prometheus import METRICS_PATH, metrics_response
from edgesplit.observability.registry import Series
from edgesplit.process.lifecycle import end_with_parent, forbid_core_dumps, on_stop_signals, wait_until
from edgesplit_offload import options as given
from edgesplit_offload.processes.ipc import IpcConnection
from edgesplit_offload.processes.metric_totals import MetricTotals
from edgesplit_offload.processes.supervisor import Supervisor
from edgesplit_offload.server import SERIES, STACK_THREADS, OffloadServer
from edgesplit_offload.serving_process import ServingProcess

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = given.validate(given.parser().parse_args(arguments))
        log_format.configure(options.log, options.log_format)
        forbid_core_dumps()
        if options.worker:
            work(options)
        elif given.process_count(options.processes) == 1:
            serve(options)
        else:
            supervise(options, arguments)
    except EdgeError as error:
        print(f"offload: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def serve(options: argparse.Namespace) -> None:
    """Serve in this process until a stop signal. EdgeError if it cannot start."""
    ending = _stop_event(options)
    with ExitStack() as stack:
        server = _server(options, 1, stack, host=options.host, port=options.port)
        server.start()
        stack.callback(lambda: server.stop(options.drain))
        _serve_metrics(options, server.series, stack)
        server.confine(given.network_needed_for(options))
        print(f"offload: listening on {server.url}", flush=True)
        wait_until(ending)
        if options.not_ready_for:
            server.set_not_ready()
            threading.Event().wait(options.not_ready_for)


def supervise(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Supervise several serving processes until a stop signal. EdgeError if they cannot start."""
    ending = _stop_event(options)
    context = given.tls(options)
    for check in (given.revoked, given.root, given.next_tier):  # errors are reported before any process is started
        check(options)
    listener = listening_socket(options.host, options.port)
    url = server_url(options.host, listener.getsockname()[1], tls=context is not None)
    command = [sys.executable, "-m", "edgesplit_offload.main", *arguments]
    count = given.process_count(options.processes)
    supervisor = Supervisor(listener, command, count, hung_after_s=options.hung_after)
    with ExitStack() as stack:
        stack.callback(lambda: supervisor.stop(options.drain))
        supervisor.start()
        totals = MetricTotals()
        _serve_metrics(options, lambda: totals.update(supervisor.ask(SERIES)), stack)
        print(f"offload: listening on {url}", flush=True)
        wait_until(ending)
        supervisor.notice()
        if options.not_ready_for:
            threading.Event().wait(options.not_ready_for)


def work(options: argparse.Namespace) -> None:
    """Be one serving process of several, on the sockets inherited from the supervisor."""
    try:
        ipc_socket, connections = (socket.socket(fileno=int(number)) for number in options.worker.split(","))
    except (ValueError, OSError) as error:
        raise UsageError("--worker is reserved for the supervisor") from error
    supervisor = IpcConnection(ipc_socket)
    worker = ServingProcess(supervisor, connections, longest_run_s=options.hung_after, drain_s=options.drain)
    count = given.process_count(options.processes)
    with ExitStack() as stack:
        peers_options = {
            "siblings": worker.peers, "elsewhere": worker.remote_batcher, "on_closed": worker.on_connection_closed
        }  # fmt: skip
        wide = given.engine(options, STACK_THREADS) if given.has_cores_for(STACK_THREADS, options.threads) else None
        server = _server(options, count, stack, wide=wide, **peers_options)
        server.confine(given.network_needed_for(options))
        worker.serve(server)


def _server(options: argparse.Namespace, processes: int, stack: ExitStack, **extra: Any) -> OffloadServer:
    tracer = tracing.make_tracer("edgesplit-offload", {})
    stack.callback(tracer.stop)
    return OffloadServer(
        options.releases, given.root(options), tls=given.tls(options), revoked=given.revoked(options),
        runtime=given.engine(options), threads=options.threads,
        at_once=options.concurrent_runs or given.runs_at_once(processes, options.threads),
        memory=None if options.memory is None else options.memory // processes, batching=options.batching == "auto",
        connections=options.connections, tracer=tracer, next_tier=given.next_tier(options),
        own_client=given.own_client(options), **extra,
    )  # fmt: skip


def _stop_event(options: argparse.Namespace) -> threading.Event:
    """An event that is set by a stop signal."""
    ending = threading.Event()
    on_stop_signals(ending.set)
    if options.die_with_parent is not None:
        end_with_parent(options.die_with_parent)
    return ending


def _serve_metrics(options: argparse.Namespace, series: Callable[[], list[Series]], stack: ExitStack) -> None:
    """Serve the Prometheus page on a port of its own; one page is made at a time."""
    if options.metrics is not None:
        lock = threading.Lock()

        def page() -> Response:
            with lock:
                return metrics_response(series())

        page_server = make_metrics_server(parse_metrics_address(options.metrics), page)
        page_server.start()
        stack.callback(page_server.stop)
        log.info("metrics at %s%s", page_server.url, METRICS_PATH)


if __name__ == "__main__":
    sys.exit(main())
