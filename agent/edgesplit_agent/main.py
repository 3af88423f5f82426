"""`edgesplit-agent`: the commands run, status and enrol, and the command line as a whole. `service` has unit, supervise
and doctor, `updates.bundle` has bundle.

Exit codes are those of edgesplit.errors.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import math
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

import edgesplit
from edgesplit.bandwidth_trace import UplinkTrace, read_uplink_trace
from edgesplit.errors import EdgeError, LinkError, UsageError
from edgesplit.links import parse_host_and_port, parse_link, parse_metrics_address
from edgesplit.observability import log_format
from edgesplit.oip.options import MAX_CHANGED, MIN_CHANGED, Hedge
from edgesplit.process.lifecycle import (
    add_die_with_parent_option,
    end_with_parent,
    forbid_core_dumps,
    on_stop_signals,
)
from edgesplit.quantities import ABOVE_ZERO, parse_percentage, parse_power, parse_rate, parse_size
from edgesplit.release.privacy_floor import PrivacyFloor
from edgesplit.runtime.options import Optimise
from edgesplit.runtime.providers import PROVIDERS, check_names
from edgesplit_agent.agent import Agent, AgentSettings, LocalSocket
from edgesplit_agent.control.enrolment import enrol, enrol_with_retries, read_claim, removed_if_refused
from edgesplit_agent.control.gateway_server import listen_address
from edgesplit_agent.host.log_buffer import install_log_buffer
from edgesplit_agent.host.sd_notify import ServiceManager
from edgesplit_agent.offload.foreign_server import ForeignTls
from edgesplit_agent.policy.audit_budget import AUDIT_LIMITS, AuditLimits
from edgesplit_agent.policy.still_calibration import SPACING_S
from edgesplit_agent.power.mode import POLICIES
from edgesplit_agent.power.mode import PowerSettings as PowerWishes
from edgesplit_agent.releases.loaded_release import RELATIVE_TOLERANCE
from edgesplit_agent.self_update import launcher
from edgesplit_agent.self_update.launcher import LaunchContext
from edgesplit_agent.self_update.manager import VersionManager
from edgesplit_agent.self_update.trial import TRIAL_S
from edgesplit_agent.service.commands import add_service_commands
from edgesplit_agent.service.enrol_wait import discard_claim, enrol_as_service, is_in_data_folder
from edgesplit_agent.service.watchdog import Watchdog
from edgesplit_agent.serving.http_endpoint import read_status
from edgesplit_agent.state.data_folder import DataFolder, Identity
from edgesplit_agent.state.slots import HEALTH_S
from edgesplit_agent.telemetry.disk_ring import MAX_AGE_S, QUOTA_BYTES
from edgesplit_agent.updates.bundle import command as bundle
from edgesplit_agent.updates.download_window import parse_span

log = logging.getLogger("edgesplit_agent")
T = TypeVar("T")
Number = TypeVar("Number", int, float)
AddOption = Callable[..., object]
"""A parser's `add_argument`."""
MOST_THREADS = 256
LONGEST_HEALTH_S = 86_400.0
MAX_POWER_BUDGET_W = 1_000.0
MAX_SPACING_S = 86_400.0
DEFAULT_CHANGED = 0.01
"""Share of a stream's answers that repeating may change, where the operator names none."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["launch"]:
        launcher.main(arguments[1:])
    options = build_parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except EdgeError as error:
        print(f"edgesplit-agent: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"edgesplit-agent: {error}", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="edgesplit-agent", description="Runs models on this device, with or without the cloud."
    )
    parser.add_argument("--version", action="version", version=f"edgesplit-agent {edgesplit.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="serve models until stopped")
    _run_options(run)
    run.set_defaults(command=_run)
    commands.add_parser("launch", help="like run, in the selected version of the agent: for services")
    status = commands.add_parser("status", help="show the status of the agent on this folder")
    _data_option(status)
    status.set_defaults(command=_status)
    enrolment = commands.add_parser("enrol", help="enrol as the device that a claim names")
    _data_option(enrolment)
    enrolment.add_argument("--claim", type=Path, required=True, metavar="FILE")
    enrolment.add_argument("--controller", metavar="URL", help="controller to enrol with, in place of the claim's")
    enrolment.set_defaults(command=_enrol)
    bundle.add_bundle_command(commands, _read_status)
    add_service_commands(commands, _run_options)
    return parser


def _run_options(run: argparse.ArgumentParser) -> None:
    _data_option(run)
    _network_options(run.add_argument)
    _release_options(run.add_argument)
    _power_options(run.add_argument)
    _socket_options(run.add_argument)
    _model_options(run.add_argument)
    add_die_with_parent_option(run)
    _observability_options(run.add_argument)


# An option has its name, type and metavar in one line and its help in the next.
# fmt: off
def _network_options(option: AddOption) -> None:
    """Options of identity and network."""
    option("--claim", type=Path, metavar="FILE",
           help="enrol with this claim first, if not enrolled yet; a claim in DIR is deleted after use")
    option("--port", type=_bounded(int, 0, 65_535, "port: 0 to 65535"), default=8600, metavar="N",
           help="port of the local endpoint; 0: any (default 8600)")
    option("--emulate", action="store_true", help="emulate the device: take the time that its profile predicts")
    option("--offload", metavar="HOST:PORT|URL", help="offload server, in place of the enrolled one")
    option("--foreign-ca", type=Path, metavar="FILE",
           help="CA certificates (PEM) for foreign servers that a release names (default: the system's)")
    option("--foreign-cert", type=Path, metavar="FILE", help="client certificate for foreign servers (default: none)")
    option("--foreign-key", type=Path, metavar="FILE", help="private key of that certificate")
    option("--gateway", metavar="[HOST]:PORT",
           help="serve the devices that offload through this one there; it must be claimed as a gateway")
    option("--broker", metavar="HOST:PORT", help="broker, in place of the enrolled one")
    option("--controller", metavar="URL", help="controller to enrol with, in place of the claim's")
    option("--link", metavar="SPEC", help="emulate the link to the offload server, as 8mbit/40ms or lte")


def _release_options(option: AddOption) -> None:
    """Options of fetching, storing and limiting releases."""
    seconds = _bounded(float, 0, LONGEST_HEALTH_S, f"number of seconds: 0 to {LONGEST_HEALTH_S:g}")
    option("--fetch-rate", metavar="RATE", help="fetch releases no faster than this, as in 2mbit")
    option("--keep-raw-input", action="store_true",
           help="inputs of applications never leave this device, whatever a plan says")
    option("--no-remote-inference", dest="remote_inference", action="store_false",
           help="refuse inferences that operators send through the controller: no answer leaves on such a request")
    option("--keep-first", type=_bounded(int, 0, 999_999, "number of layers"), default=0, metavar="N",
           help="the first N layers run on this device, whatever a plan says")
    option("--health-seconds", type=seconds, default=HEALTH_S, metavar="N",
           help="seconds that a new release must serve without a failure of its own before it is committed"
           f" (default {HEALTH_S:g})")
    option("--trial-seconds", type=seconds, default=TRIAL_S, metavar="N",
           help="seconds in which a new version of the agent must reach the broker and serve the models served before"
           f" (default {TRIAL_S:g})")
    option("--download-window", type=_argparse_type(parse_span), action="append", default=[], metavar="HH:MM-HH:MM",
           help="download releases only then, local time; may cross midnight and be given several times")
    option("--store-quota", type=_argparse_type(parse_size), metavar="SIZE",
           help="disk quota of releases, as in 2GB (default: half the disk)")
    option("--telemetry-quota", type=_argparse_type(parse_size), default=QUOTA_BYTES, metavar="SIZE",
           help=f"disk quota of telemetry stored while the link is down (default {QUOTA_BYTES >> 20}MB)")
    option("--telemetry-days", type=_bounded(float, ABOVE_ZERO, 365, "number of days: up to 365"),
           default=MAX_AGE_S / 86_400, metavar="N",
           help=f"maximum age of stored telemetry in days (default {MAX_AGE_S / 86_400:g})")


def _power_options(option: AddOption) -> None:
    """Options of battery, power and sensors."""
    watts = _argparse_type(partial(parse_power, least=ABOVE_ZERO, most=MAX_POWER_BUDGET_W))
    option("--power-budget", type=watts, metavar="WATTS",
           help="average power budget, as in 4W: slower rows where they take less energy")
    option("--battery-policy", choices=POLICIES, default="auto",
           help="optimise for latency, both, or energy; auto: by the battery (default auto)")
    option("--sensors-root", type=Path, metavar="DIR", help="read the sensors below it in place of /sys, for tests")
    option("--link-trace", type=Path, metavar="FILE",
           help="the emulated link's uplink follows this trace (mahimahi's format), which is repeated")


def _socket_options(option: AddOption) -> None:
    """Options of the Unix socket."""
    option("--socket", type=Path, metavar="PATH|none",
           help="Unix socket for applications (default: agent.sock in DIR)")
    option("--socket-mode", type=_permissions, default=0o600, metavar="MODE",
           help="its file mode, as in 660 (default 600)")
    option("--socket-group", metavar="GROUP", help="its group, in place of the agent's own")


def _model_options(option: AddOption) -> None:
    """Options of running models and of hedging."""
    threads = _bounded(int, 1, MOST_THREADS, f"number of threads: 1 to {MOST_THREADS}")
    option("--threads", type=threads, default=0, metavar="N", help="of the runtime (default: up to 4; emulated: 1)")
    option("--worker", choices=("process", "none"), default="process",
           help="process: models run in worker processes; none: in the agent's own, which ends if a model crashes")
    option("--no-direct-access", dest="direct_access", action="store_false",
           help="send every request through the agent: no direct access of applications to workers")
    option("--mode", choices=get_args(Optimise), default="fast",
           help="fast: engines fuse neighbouring operators and slices where that was measured to be faster, and outputs"
           f" differ by less than {RELATIVE_TOLERANCE:g} of their largest; exact: every slice runs as it was cut")
    option("--providers", type=_argparse_type(_providers), metavar="NAMES",
           help=f"accelerators to try first, as in cuda,cpu (of {', '.join(PROVIDERS)};"
           " default: the device profile's)")
    option("--worker-memory", type=_argparse_type(parse_size), default=0, metavar="SIZE",
           help="memory limit of a worker process, as in 500MB (default: half of the memory)")
    option("--hedge", default="auto", choices=get_args(Hedge),
           help="finish a request on the device too when the cloud is late (auto), always at once, or only when its"
           " deadline requires it (never)")
    option("--hedge-budget", type=_bounded(float, 0, 1, "part: 0 to 1"), metavar="PART",
           help="with auto: cost of hedges that no deadline requires, at most this part of answering everything locally"
           " (default: all of it on mains, a tenth on a discharging battery, 0 to save energy)")
    option("--skip-still", action="store_true",
           help="frames of a named stream that hardly differ from the last one answered are given its answer, marked"
           " with its age, once enough frames have shown which difference that may be")
    changed = partial(parse_percentage, least=MIN_CHANGED, most=MAX_CHANGED)
    option("--changed", type=_argparse_type(changed), metavar="SHARE",
           help="with --skip-still: share of a stream's answers that may differ from the model's because of it, as in"
           f" 0.5%% (default {DEFAULT_CHANGED:.0%}%)")
    option("--audits", type=_bounded(float, 0, 600, "number a minute: 0 to 600"), metavar="PER-MINUTE",
           default=AUDIT_LIMITS.per_minute,
           help="of a cascade: sure answers a minute that are compared with the second variant's, at most"
           " (default %(default)g; 0: none are)")
    option("--audit-bytes", type=_argparse_type(parse_size), default=int(AUDIT_LIMITS.bytes_per_minute), metavar="SIZE",
           help="bytes a minute that these audits may send and receive, as in 500kB (default 1MB)")
    spacing = _bounded(float, 0, MAX_SPACING_S, f"number of seconds: 0 to {MAX_SPACING_S:g}")
    option("--still-spacing", type=spacing, default=SPACING_S, metavar="SECONDS",
           help="frames count for that promise at most this often: about as long as a scene lasts"
           f" (default {SPACING_S:g})")


def _observability_options(option: AddOption) -> None:
    """Options of metrics and logs."""
    option("--metrics", type=_argparse_type(parse_metrics_address), metavar="ADDRESS:PORT",
           help="answer Prometheus at /metrics there too, in plain HTTP (default: only on the local endpoint)")
    option("--gateway-metrics", type=_argparse_type(_metrics_address), metavar="ADDRESS:PORT",
           help="answer Prometheus there for the offload server of a gateway")
    option("--log-level", default="info", choices=log_format.LEVELS)
    option("--log-format", default="text", choices=log_format.FORMATS, help="json: an object per line")
# fmt: on


def _data_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the agent's data folder")


def _bounded(kind: Callable[[str], Number], least: float, most: float, what: str) -> Callable[[str], Number]:
    """A parser for argparse of numbers from `least` to `most`; any other text is no `what`."""

    def convert(text: str) -> Number:
        with contextlib.suppress(ValueError):
            if least <= (number := kind(text)) <= most:
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}")

    return convert


def _argparse_type(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse` for argparse: its UsageError becomes the option's error."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _providers(text: str) -> tuple[str, ...]:
    return check_names(tuple(name.strip() for name in text.split(",") if name.strip()))


def _metrics_address(text: str) -> str:
    if text:  # argparse converts the default, an empty text, too
        parse_metrics_address(text)
    return text


def _permissions(text: str) -> int:
    if not re.fullmatch(r"0?[0-7]{3}", text) or not int(text, 8) & 0o200:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a file mode with access for the agent's own user, as in 600 or 660"
        )
    return int(text, 8)


def _foreign_trust(options: argparse.Namespace) -> ForeignTls:
    """TLS trust for foreign offload servers; UsageError where its files are invalid."""
    trust = ForeignTls(ca_file=options.foreign_ca, certificate_file=options.foreign_cert, key_file=options.foreign_key)
    if trust != ForeignTls():
        trust.context()
    return trust


def _socket_settings(options: argparse.Namespace) -> LocalSocket:
    wanted = options.socket != Path("none")
    return LocalSocket(options.socket if wanted else None, options.socket_mode, options.socket_group, wanted)


def check_words(words: Sequence[str]) -> None:
    """Check options of `run` that are meant for another machine's service, which names folder and claim itself.
    UsageError."""
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message), contextlib.redirect_stdout(io.StringIO()):
            options = build_parser().parse_args(["run", "--data", ".", *words])
    except SystemExit as error:
        reason = message.getvalue().strip().rpartition("error: ")[2] or "they ask for help"
        raise UsageError(f"the agent would refuse these options: {reason}") from error
    if options.data != Path() or options.claim is not None:
        raise UsageError("the agent's service names --data and --claim itself: leave them out")
    _check_values(options)


def _check_values(options: argparse.Namespace) -> None:
    """Check what no machine could accept. UsageError."""
    if options.link:
        parse_link(options.link)
    if options.changed is not None and not options.skip_still:
        raise UsageError("--changed says how much --skip-still may change: give both")
    if options.broker:
        parse_host_and_port(options.broker, "broker")
    if options.gateway:
        listen_address(options.gateway)


def check_options(options: argparse.Namespace) -> None:
    """Check the options that could stop the agent later, before a claim, which is valid once, is used up.
    UsageError."""
    _check_values(options)
    _link_trace(options)
    if options.port:
        try:
            socket.create_server(("127.0.0.1", options.port)).close()
        except OSError as error:
            raise UsageError(
                f"cannot listen on 127.0.0.1 port {options.port}: {error.strerror}; choose another with --port"
            ) from error


def _link_trace(options: argparse.Namespace) -> UplinkTrace | None:
    """The bandwidth trace of the emulated uplink, or None; UsageError for an invalid file, or where `--link` is
    missing."""
    if options.link_trace is None:
        return None
    if not options.link:
        raise UsageError("--link-trace needs --link too: the downlink and the round trip are not in a trace")
    return read_uplink_trace(options.link_trace)


def _run(options: argparse.Namespace) -> int:
    _keep_private()
    log_format.configure(options.log_level, options.log_format)
    install_log_buffer()
    launch_context = LaunchContext.from_environment(os.environ)
    manager = ServiceManager.from_environment(os.environ)
    fetch_bytes_per_s = parse_rate(options.fetch_rate) if options.fetch_rate else math.inf
    stop, end_requested, restart_requested = threading.Event(), threading.Event(), threading.Event()

    def end() -> None:
        end_requested.set()
        stop.set()

    on_stop_signals(end)
    if options.die_with_parent is not None:
        end_with_parent(options.die_with_parent)
    folder = DataFolder(options.data)
    folder.acquire()
    folder.make_private(passable=_has_shared_socket_inside(options))

    def restart() -> None:
        restart_requested.set()
        stop.set()

    try:
        version_manager = VersionManager(folder, launch_context, restart)
        version_manager.write_format()
        with removed_if_refused(folder):
            identity = _ensure_enrolled(options, folder, manager, stop)
        if identity is not None:
            log_format.set_process_subjects(device=identity.device)
            _serve(AgentSettings(
                data=options.data, port=options.port, emulate=options.emulate, offload=options.offload,
                broker=options.broker, link=options.link, threads=options.threads, socket=_socket_settings(options),
                privacy_floor=PrivacyFloor(keep_raw_input=options.keep_raw_input, keep_first=options.keep_first),
                fetch_bytes_per_s=fetch_bytes_per_s, health_s=options.health_seconds,
                trial_s=options.trial_seconds,
                download_spans=tuple(options.download_window),
                foreign_trust=_foreign_trust(options),
                metrics=options.metrics, gateway_metrics=options.gateway_metrics or "", log_format=options.log_format,
                store_quota_bytes=options.store_quota,
                telemetry_quota_bytes=options.telemetry_quota, telemetry_age_s=options.telemetry_days * 86_400,
                remote_inference=options.remote_inference,
                hedge=options.hedge, hedge_budget=options.hedge_budget,
                skip_still=(options.changed or DEFAULT_CHANGED) if options.skip_still else 0.0,
                audits=AuditLimits(options.audits, float(options.audit_bytes)),
                still_spacing_s=options.still_spacing,
                power=PowerWishes(options.battery_policy, options.power_budget), sensors_root=options.sensors_root,
                link_trace=_link_trace(options),
                isolate=options.worker == "process", lanes=options.direct_access,
                worker_memory_bytes=options.worker_memory,
                providers=options.providers, optimise=options.mode,
                gateway=options.gateway,
            ), folder, identity, version_manager, stop, manager)  # fmt: skip
    finally:
        folder.release()
    if restart_requested.is_set() and not end_requested.is_set() and launch_context is not None:
        launch_context.relaunch()
    return 0


def _keep_private() -> None:
    """Keep what this process writes and holds from other users, also where no service manager does."""
    os.umask(0o077)
    forbid_core_dumps()


def _has_shared_socket_inside(options: argparse.Namespace) -> bool:
    """Whether other users may connect to a socket in the data folder, and so must be able to pass through it."""
    inside = options.socket is None or options.data.resolve() in options.socket.resolve().parents
    return inside and bool(options.socket_mode & 0o077)


def _ensure_enrolled(
    options: argparse.Namespace, folder: DataFolder, manager: ServiceManager, stop: threading.Event
) -> Identity | None:
    """The device's identity, after enrolment by the claim where necessary; None when the agent is to stop."""
    identity, claim_file = folder.read_identity(), options.claim
    if claim_file is None:
        if identity is None:
            raise UsageError(f"{options.data} is not enrolled: give a claim with --claim FILE")
        return identity
    if identity is None and manager.is_present:
        check_options(options)
        identity = enrol_as_service(folder, claim_file, options.controller, stop.wait, manager)
    elif identity is None or (claim_file.exists() and not is_in_data_folder(claim_file, folder)):
        claim = read_claim(claim_file)
        check_options(options)
        identity = enrol_with_retries(folder, claim, options.controller, stop.wait)
    if identity is not None:
        discard_claim(claim_file, folder, identity)
    return identity


def _serve(
    settings: AgentSettings,
    folder: DataFolder,
    identity: Identity,
    version_manager: VersionManager,
    stop: threading.Event,
    manager: ServiceManager,
) -> None:
    agent = Agent(settings, folder, identity, version_manager)
    try:
        agent.start()
        suffix = " (emulated)" if settings.emulate else ""
        print(f"edgesplit-agent: {identity.device}{suffix} listening on {agent.url}", flush=True)
        manager.ready(f"{identity.device} listening on {agent.url}")
        Watchdog(manager, agent.check_alive).run_until(stop)
    finally:
        manager.stopping()
        agent.stop()


def _enrol(options: argparse.Namespace) -> int:
    _keep_private()
    folder = DataFolder(options.data)
    folder.acquire()
    folder.make_private()
    try:
        with removed_if_refused(folder):
            identity = enrol(folder, read_claim(options.claim), options.controller)
    finally:
        folder.release()
    print(f"enrolled as {identity.device} ({identity.device_class})")
    return 0


def _status(options: argparse.Namespace) -> int:
    print(json.dumps(_read_status(DataFolder(options.data)), indent=2))
    return 0


def _read_status(folder: DataFolder) -> dict[str, Any]:
    """Status of the agent that runs on that folder; UsageError where none runs, LinkError where it does not answer."""
    address = folder.read_address()
    if address is None:
        raise UsageError(f"no agent runs on {folder.path}")
    try:
        return read_status(address.url)
    except LinkError as error:
        raise LinkError(f"the agent on {folder.path} {error}") from error


if __name__ == "__main__":
    sys.exit(main())
