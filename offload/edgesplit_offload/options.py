"""The command line of the offload server, and what follows from it; read alike by the supervisor and its processes."""

from __future__ import annotations

import argparse
import os
import ssl
from collections.abc import Container
from pathlib import Path

from edgesplit.errors import UsageError
from edgesplit.links import host_and_port
from edgesplit.observability import log_format
from edgesplit.offload_client.pool import Remote
from edgesplit.process.lifecycle import add_die_with_parent
from edgesplit.quantities import parse_size
from edgesplit.runtime.dispatch import EngineByFormat
from edgesplit.runtime.options import Setup
from edgesplit_offload.inference.gateway_relay import WAITING, Onward

DEFAULT_PORT = 8500
FEW_CORES = 4
"""Up to so many, each has a process of its own, which runs one request at a time where its weights are warm; machines
with more get a process for each `CORES_PER_PROCESS`."""
CORES_PER_PROCESS = 4
TOO_FEW_CORES = 2
"""On so many one process serves: what several take in memory gains nothing."""
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def parser() -> argparse.ArgumentParser:
    """What `python -m edgesplit_offload.main` takes."""
    made = argparse.ArgumentParser(prog="edgesplit-offload", description="Finishes inferences for devices.")
    add = made.add_argument
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
    add("--processes", type=int, default=0, help="serving processes behind the port (default 0: by the cores)")
    add("--threads", type=int, default=1, help="of one run (default %(default)s: other counts give other last bits)")
    add(
        "--mode",
        choices=("exact", "fast"),
        default="exact",
        help="exact: the whole model's bits on one machine; fast: onnxruntime may fuse further, and last digits differ "
        "(default %(default)s)",
    )
    add("--runs", type=int, default=0, help="at once, of each process (default 0: what gives them all the cores)")
    add("--memory", type=_bytes, metavar="SIZE", help="for loaded models in all, as in 2GB (default: no bound)")
    add(
        "--batching",
        choices=("auto", "off"),
        default="auto",
        help="auto: requests share runs where that is measured to gain and gives the same bits (default %(default)s)",
    )
    add("--connections", type=int, default=256, help="at once, of each process (default %(default)s)")
    add("--notice", type=float, default=0.0, help="seconds of serving on after being told to stop, not ready any more")
    add("--drain", type=float, default=5.0, help="seconds that running requests get at the end (default %(default)s)")
    add("--stuck-after", type=float, default=60.0, help="seconds until a process that hangs is replaced (%(default)s)")
    add(
        "--metrics",
        metavar="ADDRESS:PORT",
        help="answer Prometheus at /metrics there, in plain HTTP (default: nowhere; devices never may)",
    )
    add("--log", default="info", choices=log_format.LEVELS, help="level (default %(default)s)")
    add(
        "--log-format",
        default="text",
        choices=log_format.FORMATS,
        help="json: an object per line (default %(default)s)",
    )
    add_die_with_parent(made)
    add("--worker", help=argparse.SUPPRESS)
    return made


def checked(options: argparse.Namespace) -> argparse.Namespace:
    """The same, with what makes no sense refused (UsageError)."""
    for name, least in (("processes", 0), ("runs", 0), ("threads", 1), ("connections", 1)):
        if getattr(options, name) < least:
            raise UsageError(f"--{name} must be at least {least}")
    for name in ("notice", "drain", "stuck_after"):
        if not 0 <= getattr(options, name) < 1e6:
            raise UsageError(f"--{name.replace('_', '-')} must be a number of seconds")
    return options


def process_count(wanted: int, cores: int | None = None) -> int:
    """How many serve; by default as docs/decisions/0034 says."""
    known = cores or len(os.sched_getaffinity(0))
    by_cores = 1 if known <= TOO_FEW_CORES else min(known, max(FEW_CORES, known // CORES_PER_PROCESS))
    return wanted or by_cores


def runs_at_once(processes: int, threads: int, cores: int | None = None) -> int:
    """Runs of one process at a time, so that all together have the cores, and a run more each when others idle."""
    known = cores or len(os.sched_getaffinity(0))
    share = -(-known // (processes * threads))
    return max(1, share)


def has_cores_for(stack_threads: int, threads: int, cores: int | None = None) -> bool:
    """May a run of many requests take so many threads, where one takes `threads`? There are cores for it then."""
    return threads < stack_threads and stack_threads <= (cores or len(os.sched_getaffinity(0)))


def engine(options: argparse.Namespace, threads: int | None = None) -> EngineByFormat:
    """What runs the slices, as `--threads` and `--mode` say."""
    return EngineByFormat(setup=Setup(threads=threads or options.threads, optimise=options.mode))


def tls(options: argparse.Namespace) -> ssl.SSLContext | None:
    """Mutual TLS, or none on loopback."""
    files = (options.cert, options.key, options.ca)
    if not any(files):
        if options.host not in _LOOPBACK:
            raise UsageError(f"listening on {options.host} needs --cert, --key and --ca: only loopback goes without")
        return None
    if not all(files):
        raise UsageError("--cert, --key and --ca go together")
    from edgesplit.trust.identity import Credentials

    return Credentials(key_file=options.key, certificate_file=options.cert, ca_file=options.ca).server_context()


def revoked(options: argparse.Namespace) -> Container[object]:
    """Serial numbers of certificates that count no more."""
    if options.revoked is None:
        return frozenset()
    if options.ca is None:
        raise UsageError("--revoked needs --ca: nobody else's list counts")
    from edgesplit_offload.revocation import Revoked

    return Revoked(options.revoked, options.ca)


def onward(options: argparse.Namespace) -> Onward | None:
    """The next tier, over mutual TLS unless its URL says http."""
    if not options.onward:
        return None
    files = (options.onward_key, options.onward_cert, options.ca)
    if not all(files) and not options.onward.startswith("http://"):
        raise UsageError("--onward needs --onward-cert, --onward-key and --ca: the next tier asks who we are")
    context = None
    if all(files):
        from edgesplit.trust.identity import Credentials

        context = Credentials(*files).client_context()
    via = host_and_port(options.onward_via, "server") if options.onward_via else None
    return Onward(Remote(options.onward, context, via=via, idle=WAITING))


def root(options: argparse.Namespace) -> bytes:
    """The TUF root's bytes."""
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
