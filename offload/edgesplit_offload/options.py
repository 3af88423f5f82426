"""Command line of the offload server, and the objects built from it; used by the supervisor and its serving processes
alike."""

from __future__ import annotations

import argparse
import os
import ssl
from collections.abc import Container
from pathlib import Path

from edgesplit.errors import UsageError
from edgesplit.links import parse_host_and_port
from edgesplit.observability import log_format, tracing
from edgesplit.offload_client.pool import OffloadClient
from edgesplit.process.lifecycle import add_die_with_parent_option
from edgesplit.quantities import parse_size
from edgesplit.runtime.dispatch import DispatchingRuntime
from edgesplit.runtime.options import EngineOptions
from edgesplit_offload.inference.gateway_relay import MAX_WAITING, NextTier

DEFAULT_PORT = 8500
FEW_CORES = 4
"""Up to this many cores each has a process of its own, which runs one request at a time while its weights are in the
cache; larger machines get one process per `CORES_PER_PROCESS`."""
CORES_PER_PROCESS = 4
TOO_FEW_CORES = 2
"""Up to this many cores one process serves: more would cost memory and gain nothing."""
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def parser() -> argparse.ArgumentParser:
    """The parser of `python -m edgesplit_offload.main`."""
    arguments = argparse.ArgumentParser(prog="edgesplit-offload", description="Finishes inferences for devices.")
    add = arguments.add_argument
    add("--releases", type=Path, required=True, help="folder of releases, one per digest")
    add("--root", type=Path, required=True, help="the TUF root by which releases are verified")
    add("--cert", type=Path, help="this server's certificate (PEM); with --key and --ca")
    add("--key", type=Path, help="its private key (PEM)")
    add("--ca", type=Path, help="the authority that must have issued the devices' certificates (PEM)")
    add("--revoked", type=Path, help="the authority's revocation list (PEM), read again when it changes; with --ca")
    add("--next-tier", metavar="URL", help="of a gateway: the offload server of the next tier")
    add("--next-tier-cert", type=Path, help="client certificate for the next tier (PEM); with --next-tier-key and --ca")
    add("--next-tier-key", type=Path, help="its private key (PEM)")
    add("--next-tier-via", metavar="HOST:PORT", help="connect to it there, and still expect the name in the URL")
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    add("--port", type=int, default=DEFAULT_PORT, help="port to listen on, 0 for any (default %(default)s)")
    add("--processes", type=int, default=0, help="serving processes behind the port (default 0: by the cores)")
    add(
        "--threads",
        type=int,
        default=1,
        help="threads of one run (default %(default)s: other counts change the last bits)",
    )
    add(
        "--mode",
        choices=("exact", "fast"),
        default="exact",
        help="exact: the whole model's bits on one machine; fast: onnxruntime may fuse further, and last digits differ "
        "(default %(default)s)",
    )
    add(
        "--concurrent-runs", type=int, default=0,
        help="concurrent runs of each process (default 0: together they use all the cores)",
    )  # fmt: skip
    add("--memory", type=_bytes, metavar="SIZE", help="memory for all loaded models, as in 2GB (default: no bound)")
    add(
        "--batching", choices=("auto", "off"), default="auto",
        help="auto: requests share runs where that is measured to gain and gives the same bits (default %(default)s)",
    )  # fmt: skip
    add("--connections", type=int, default=256, help="connections of each process (default %(default)s)")
    add(
        "--not-ready-for", type=float, default=0.0,
        help="seconds to keep serving after a stop signal, reported as not ready",
    )  # fmt: skip
    add("--drain", type=float, default=5.0, help="seconds that running requests get at the end (default %(default)s)")
    add("--hung-after", type=float, default=60.0, help="seconds until a process that hangs is replaced (%(default)s)")
    add(
        "--metrics",
        metavar="ADDRESS:PORT",
        help="answer Prometheus at /metrics there, in plain HTTP (default: none; devices never have access)",
    )
    add("--log", default="info", choices=log_format.LEVELS, help="level (default %(default)s)")
    add(
        "--log-format", default="text", choices=log_format.FORMATS,
        help="json: an object per line (default %(default)s)",
    )  # fmt: skip
    add_die_with_parent_option(arguments)
    add("--worker", help=argparse.SUPPRESS)
    return arguments


def validate(options: argparse.Namespace) -> argparse.Namespace:
    """`options`, validated. UsageError for values out of range."""
    for name, least in (("processes", 0), ("concurrent_runs", 0), ("threads", 1), ("connections", 1)):
        if getattr(options, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}")
    for name in ("not_ready_for", "drain", "hung_after"):
        if not 0 <= getattr(options, name) < 1e6:
            raise UsageError(f"--{name.replace('_', '-')} must be a number of seconds")
    return options


def process_count(requested: int, cores: int | None = None) -> int:
    """Number of serving processes; 0 stands for the default by cores (docs/decisions/0034)."""
    known = cores or len(os.sched_getaffinity(0))
    by_cores = 1 if known <= TOO_FEW_CORES else min(known, max(FEW_CORES, known // CORES_PER_PROCESS))
    return requested or by_cores


def runs_at_once(processes: int, threads: int, cores: int | None = None) -> int:
    """Concurrent runs per process, so that all processes together use all cores; rounded up, as some processes idle."""
    known = cores or len(os.sched_getaffinity(0))
    share = -(-known // (processes * threads))
    return max(1, share)


def has_cores_for(stack_threads: int, threads: int, cores: int | None = None) -> bool:
    """Whether a batch may run with `stack_threads` threads, where a single request has `threads`: there must be as many
    cores."""
    return threads < stack_threads and stack_threads <= (cores or len(os.sched_getaffinity(0)))


def engine(options: argparse.Namespace, threads: int | None = None) -> DispatchingRuntime:
    """The engine for the slices, by `--threads` and `--mode`."""
    return DispatchingRuntime(setup=EngineOptions(threads=threads or options.threads, optimise=options.mode))


def tls(options: argparse.Namespace) -> ssl.SSLContext | None:
    """The context for mutual TLS; None without certificates, which is allowed on loopback only (UsageError)."""
    files = (options.cert, options.key, options.ca)
    if not any(files):
        if options.host not in _LOOPBACK:
            raise UsageError(f"listening on {options.host} needs --cert, --key and --ca: only loopback goes without")
        return None
    if not all(files):
        raise UsageError("--cert, --key and --ca go together")
    from edgesplit.trust.identity import Credentials
    from edgesplit.trust.renewed_context import RenewedContext

    credentials = Credentials(key_file=options.key, certificate_file=options.cert, ca_file=options.ca)
    return RenewedContext(credentials, credentials.server_context)


def revoked(options: argparse.Namespace) -> Container[object]:
    """Serial numbers of revoked certificates."""
    if options.revoked is None:
        return frozenset()
    if options.ca is None:
        raise UsageError("--revoked needs --ca, whose authority must have signed the list")
    from edgesplit_offload.revocation import RevokedSerials

    return RevokedSerials(options.revoked, options.ca)


def next_tier(options: argparse.Namespace) -> NextTier | None:
    """The next tier of a gateway, over mutual TLS unless its URL is http; None for other servers."""
    if not options.next_tier:
        return None
    files = (options.next_tier_key, options.next_tier_cert, options.ca)
    if not all(files) and not options.next_tier.startswith("http://"):
        raise UsageError(
            "--next-tier needs --next-tier-cert, --next-tier-key and --ca: the next tier requires a client certificate"
        )
    context = None
    if all(files):
        from edgesplit.trust.identity import Credentials

        context = Credentials(*files).client_context()
    via = parse_host_and_port(options.next_tier_via, "server") if options.next_tier_via else None
    return NextTier(OffloadClient(options.next_tier, context, via=via, idle=MAX_WAITING))


def own_client(options: argparse.Namespace) -> str:
    """Name in the certificate of a gateway's agent, by which it asks the next tier; empty for other servers."""
    if options.next_tier_cert is None:
        return ""
    from edgesplit.trust.identity import certificate_name

    return certificate_name(options.next_tier_cert)


def network_needed_for(options: argparse.Namespace) -> str:
    """Why a serving process opens connections; empty if it never does."""
    if options.next_tier:
        return "it asks the next tier"
    return "it sends traces" if tracing.is_tracing_enabled(os.environ) else ""


def root(options: argparse.Namespace) -> bytes:
    """The bytes of the TUF root."""
    path: Path = options.root
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _bytes(text: str) -> int:
    try:
        return parse_size(text)
    except UsageError as error:
        raise UsageError(f"--memory: {error}") from error
