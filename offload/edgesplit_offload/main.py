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
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from edgesplit.errors import EdgeError, UsageError
from edgesplit.http1 import listening_socket, server_url
from edgesplit.lifetime import end_with_parent, on_stop_signals, wait_until
from edgesplit.seen.listener import listener as metrics_listener
from edgesplit.seen.listener import parse_address
from edgesplit_offload import options as given
from edgesplit_offload.channel import Channel
from edgesplit_offload.server import SERIES, OffloadServer, metrics_of
from edgesplit_offload.supervisor import Supervisor
from edgesplit_offload.worker import Worker


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = given.parser().parse_args(words)
    logging.basicConfig(level=options.log.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        given.checked(options)
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
    server = _server(options, 1, host=options.host, port=options.port)
    with ExitStack() as stack:
        server.start()
        stack.callback(lambda: server.stop(options.drain))
        _metrics(options, server.metrics, stack)
        print(f"offload: listening on {server.url}", flush=True)
        wait_until(ending)
        if options.notice:
            server.not_ready()
            threading.Event().wait(options.notice)


def supervise(options: argparse.Namespace, words: Sequence[str]) -> None:
    """Have several processes serve, until told to stop. Raises EdgeError where they cannot begin."""
    ending = _ending(options)
    context, _, _ = given.tls(options), given.revoked(options), given.root(options)  # before any process is started
    listener = listening_socket(options.host, options.port)
    url = server_url(options.host, listener.getsockname()[1], tls=context is not None)
    command = [sys.executable, "-m", "edgesplit_offload.main", *words]
    count = given.process_count(options.processes)
    supervisor = Supervisor(listener, command, count, stuck_after_s=options.stuck_after)
    with ExitStack() as stack:
        stack.callback(lambda: supervisor.stop(options.drain))
        supervisor.start()
        _metrics(options, lambda: metrics_of(supervisor.ask(SERIES)), stack)
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
    worker = Worker(Channel(words), connections, longest_run_s=options.stuck_after, drain_s=options.drain)
    count = given.process_count(options.processes)
    worker.serve(_server(options, count, siblings=worker.siblings, on_closed=worker.closed))


def _server(options: argparse.Namespace, processes: int, **how: Any) -> OffloadServer:
    return OffloadServer(
        options.releases,
        given.root(options),
        tls=given.tls(options),
        revoked=given.revoked(options),
        threads=options.threads,
        at_once=options.runs or given.runs_at_once(processes, options.threads),
        memory=None if options.memory is None else options.memory // processes,
        batching=options.batching == "auto",
        connections=options.connections,
        **how,
    )


def _ending(options: argparse.Namespace) -> threading.Event:
    """Set when it is time to stop."""
    ending = threading.Event()
    on_stop_signals(ending.set)
    if options.die_with_parent is not None:
        end_with_parent(options.die_with_parent)
    return ending


def _metrics(options: argparse.Namespace, page: Any, stack: ExitStack) -> None:
    if options.metrics is not None:
        server = metrics_listener(parse_address(options.metrics), page)
        server.start()
        stack.callback(server.stop)


if __name__ == "__main__":
    sys.exit(main())
