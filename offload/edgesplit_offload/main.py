"""`python -m edgesplit_offload.main`: the offload server as a process. SIGTERM and SIGINT let running requests finish.

Prints one line once it listens. Without --cert, --key and --ca there is no TLS, and then only loopback is listened on.
"""

from __future__ import annotations

import argparse
import logging
import ssl
import sys
import threading
from collections.abc import Container, Sequence
from pathlib import Path

from edgesplit.errors import EdgeError, UsageError
from edgesplit.http1 import Server
from edgesplit.lifetime import end_with_parent, on_stop_signals, wait_until
from edgesplit.links import host_and_port
from edgesplit.remote import Remote
from edgesplit.seen import logs, spans
from edgesplit.seen.exposition import PATH, metrics_response
from edgesplit.seen.listener import metrics_server, parse_address
from edgesplit_offload.onward import WAITING, Onward
from edgesplit_offload.server import OffloadServer

log = logging.getLogger(__name__)

DEFAULT_PORT = 8500
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    options = _parser().parse_args(argv)
    logs.configure(options.log, options.log_format)
    try:
        serve(options)
    except EdgeError as error:
        print(f"offload: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def serve(options: argparse.Namespace) -> None:
    """Serve until told to stop. Raises EdgeError where it cannot begin."""
    ending = threading.Event()
    on_stop_signals(ending.set)
    if options.die_with_parent is not None:
        end_with_parent(options.die_with_parent)
    tracer = spans.configured("edgesplit-offload", {})
    server = OffloadServer(
        options.releases,
        _read(options.root),
        host=options.host,
        port=options.port,
        tls=_tls(options),
        revoked=_revoked(options),
        tracer=tracer,
        onward=_onward(options),
    )
    server.start()
    scraped = _scraped(options.metrics, server)
    print(f"offload: listening on {server.url}", flush=True)
    wait_until(ending)
    server.stop(options.drain)
    if scraped is not None:
        scraped.stop()
    tracer.stop()


def _scraped(address: str | None, server: OffloadServer) -> Server | None:
    """The page for Prometheus, on a port of its own."""
    if address is None:
        return None
    scraped = metrics_server(parse_address(address), lambda: metrics_response(server.series()))
    scraped.start()
    log.info("metrics at %s%s", scraped.url, PATH)
    return scraped


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="edgesplit-offload", description="Finishes inferences for devices.")
    add = parser.add_argument
    add("--releases", type=Path, required=True, help="folder of releases, one per digest")
    add("--root", type=Path, required=True, help="the TUF root that releases must lead back to")
    add("--cert", type=Path, help="this server's certificate (PEM); with --key and --ca")
    add("--key", type=Path, help="its private key (PEM)")
    add("--ca", type=Path, help="the authority that devices' certificates must come from (PEM)")
    add("--revoked", type=Path, help="the authority's revocation list (PEM), read again when it changes; with --ca")
    add("--onward", metavar="URL", help="of a gateway: the offload server of the next tier")
    add("--onward-cert", type=Path, help="the certificate that it is shown (PEM); with --onward-key and --ca")
    add("--onward-key", type=Path, help="its private key (PEM)")
    add("--onward-via", metavar="HOST:PORT", help="connect to it there, and still expect the name in the URL")
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    add("--port", type=int, default=DEFAULT_PORT, help="port to listen on, 0 for any (default %(default)s)")
    add("--drain", type=float, default=5.0, help="seconds that running requests get at the end (default %(default)s)")
    add(
        "--metrics",
        metavar="ADDRESS:PORT",
        help="answer Prometheus at /metrics there, in plain HTTP (default: nowhere; devices never may)",
    )
    add("--log", default="info", choices=logs.LEVELS, help="level (default %(default)s)")
    add("--log-format", default="text", choices=logs.FORMATS, help="json: an object per line (default %(default)s)")
    add(
        "--die-with-parent",
        type=int,
        nargs="?",
        const=0,
        metavar="PID",
        help="stop when the parent (of that number) ends",
    )
    return parser


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _tls(options: argparse.Namespace) -> ssl.SSLContext | None:
    """Mutual TLS, or none on loopback."""
    files = (options.cert, options.key, options.ca)
    if not any(files):
        if options.host not in _LOOPBACK:
            raise UsageError(f"listening on {options.host} needs --cert, --key and --ca: only loopback goes without")
        return None
    if not all(files):
        raise UsageError("--cert, --key and --ca go together")
    from edgesplit.identity import Credentials

    return Credentials(key_file=options.key, certificate_file=options.cert, ca_file=options.ca).server_context()


def _revoked(options: argparse.Namespace) -> Container[object]:
    if options.revoked is None:
        return frozenset()
    if options.ca is None:
        raise UsageError("--revoked needs --ca: nobody else's list counts")
    from edgesplit_offload.revoked import Revoked

    return Revoked(options.revoked, options.ca)


def _onward(options: argparse.Namespace) -> Onward | None:
    """The next tier, over mutual TLS unless its URL says http."""
    if not options.onward:
        return None
    files = (options.onward_key, options.onward_cert, options.ca)
    if not all(files) and not options.onward.startswith("http://"):
        raise UsageError("--onward needs --onward-cert, --onward-key and --ca: the next tier asks who we are")
    tls = None
    if all(files):
        from edgesplit.identity import Credentials

        tls = Credentials(*files).client_context()
    via = host_and_port(options.onward_via, "server") if options.onward_via else None
    return Onward(Remote(options.onward, tls, via=via, idle=WAITING))


if __name__ == "__main__":
    sys.exit(main())
