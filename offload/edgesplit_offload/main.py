"""`python -m edgesplit_offload.main`: the offload server. SIGTERM and SIGINT let running requests finish.

Prints one line once it listens. Without --cert, --key and --ca there is no TLS, and then only loopback is listened on.
With one process it is that process; with several it is their supervisor, and starts them by the same command line.
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
from edgesplit.observability import log_format, tracing
from edgesplit.observability.metrics_server import metrics_server, parse_address
from edgesplit.observability.prometheus import PATH, metrics_response
from edgesplit.observability.registry import Series
from edgesplit.process.lifecycle import end_with_parent, on_stop_signals, wait_until
from edgesplit_offload import options as given
from edgesplit_offload.processes.ipc import Talk
from edgesplit_offload.processes.metric_totals import Totals
from edgesplit_offload.processes.supervisor import Supervisor
from edgesplit_offload.server import SERIES, STACK_THREADS, OffloadServer
from edgesplit_offload.serving_process import Worker

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        options = given.checked(given.parser().parse_args(words))
        log_format.configure(options.log, options.log_format)
        if options.worker:
            work(options)
        elif given.process_count(options.processes) == 1:
            serve(options)
        else:
            supervise(options, words)
    except EdgeError as error:
        print(f"offload: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def serve(options: argparse.Namespace) -> None:
    """In this process, until told to stop. Raises EdgeError where it cannot begin."""
    ending = _ending(options)
    with ExitStack() as stack:
        server = _server(options, 1, stack, host=options.host, port=options.port)
        server.start()
        stack.callback(lambda: server.stop(options.drain))
        _metrics(options, server.series, stack)
        print(f"offload: listening on {server.url}", flush=True)
        wait_until(ending)
        if options.notice:
            server.not_ready()
            threading.Event().wait(options.notice)


def supervise(options: argparse.Namespace, words: Sequence[str]) -> None:
    """Have several processes serve, until told to stop. Raises EdgeError where they cannot begin."""
    ending = _ending(options)
    context = given.tls(options)
    for problem in (given.revoked, given.root, given.onward):  # what is wrong is told before any process is started
        problem(options)
    listener = listening_socket(options.host, options.port)
    url = server_url(options.host, listener.getsockname()[1], tls=context is not None)
    command = [sys.executable, "-m", "edgesplit_offload.main", *words]
    count = given.process_count(options.processes)
    supervisor = Supervisor(listener, command, count, stuck_after_s=options.stuck_after)
    with ExitStack() as stack:
        stack.callback(lambda: supervisor.stop(options.drain))
        supervisor.start()
        totals = Totals()
        _metrics(options, lambda: totals.after(supervisor.ask(SERIES)), stack)
        print(f"offload: listening on {url}", flush=True)
        wait_until(ending)
        supervisor.notice()
        if options.notice:
            threading.Event().wait(options.notice)


def work(options: argparse.Namespace) -> None:
    """Be one of several, on the sockets that the supervisor gave to this process."""
    try:
        words, connections = (socket.socket(fileno=int(number)) for number in options.worker.split(","))
    except (ValueError, OSError) as error:
        raise UsageError("--worker is for the supervisor to give") from error
    worker = Worker(Talk(words), connections, longest_run_s=options.stuck_after, drain_s=options.drain)
    count = given.process_count(options.processes)
    with ExitStack() as stack:
        among = {"siblings": worker.siblings, "elsewhere": worker.elsewhere, "on_closed": worker.closed}
        wide = given.engine(options, STACK_THREADS) if given.has_cores_for(STACK_THREADS, options.threads) else None
        worker.serve(_server(options, count, stack, wide=wide, **among))


def _server(options: argparse.Namespace, processes: int, stack: ExitStack, **how: Any) -> OffloadServer:
    tracer = tracing.configured("edgesplit-offload", {})
    stack.callback(tracer.stop)
    return OffloadServer(
        options.releases,
        given.root(options),
        tls=given.tls(options),
        revoked=given.revoked(options),
        runtime=given.engine(options),
        threads=options.threads,
        at_once=options.runs or given.runs_at_once(processes, options.threads),
        memory=None if options.memory is None else options.memory // processes,
        batching=options.batching == "auto",
        connections=options.connections,
        tracer=tracer,
        onward=given.onward(options),
        **how,
    )


def _ending(options: argparse.Namespace) -> threading.Event:
    """Set when it is time to stop."""
    ending = threading.Event()
    on_stop_signals(ending.set)
    if options.die_with_parent is not None:
        end_with_parent(options.die_with_parent)
    return ending


def _metrics(options: argparse.Namespace, series: Callable[[], list[Series]], stack: ExitStack) -> None:
    """The page for Prometheus, on a port of its own; one at a time is made."""
    if options.metrics is not None:
        lock = threading.Lock()

        def page() -> Response:
            with lock:
                return metrics_response(series())

        scraped = metrics_server(parse_address(options.metrics), page)
        scraped.start()
        stack.callback(scraped.stop)
        log.info("metrics at %s%s", scraped.url, PATH)


if __name__ == "__main__":
    sys.exit(main())
