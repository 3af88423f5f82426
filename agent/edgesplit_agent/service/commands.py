"""The commands of `edgesplit-agent` that run it as a service: unit, warm, supervise, doctor."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgesplit.observability import log_format
from edgesplit_agent.service.systemd_unit import WATCHDOG_S, Installation, render_unit

PROGRAM = "edgesplit-agent"
LEAST_WATCHDOG_S = 1.0
"""Shortest watchdog time that may be configured."""
LONGEST_WATCHDOG_S = 86_400.0


def add_service_commands(commands: Any, add_run_options: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the commands to the parser; `supervise` takes the options of `run` too."""
    unit_parser = commands.add_parser("unit", help="print the systemd unit of an installation")
    unit_parser.add_argument(
        "--prefix", type=Path, default=Installation.prefix, metavar="DIR", help=f"(default {Installation.prefix})"
    )
    unit_parser.add_argument(
        "--data", type=Path, default=Installation.data, metavar="DIR", help=f"(default {Installation.data})"
    )
    unit_parser.add_argument("--user", default=Installation.user, metavar="NAME", help=f"(default {Installation.user})")
    unit_parser.set_defaults(command=_unit)
    warm_parser = commands.add_parser("warm", help="import every module once, to check that this machine can")
    warm_parser.set_defaults(command=_warm)
    supervise_help = "run and restart the agent where there is no systemd"
    supervise = commands.add_parser("supervise", help=supervise_help, allow_abbrev=False)
    supervise.add_argument(
        "--watchdog", type=_watchdog, default=float(WATCHDOG_S), metavar="N",
        help=f"watchdog timeout in seconds, after which it is restarted; 0: none (default {WATCHDOG_S})",
    )  # fmt: skip
    add_run_options(supervise)
    supervise.set_defaults(command=_supervise)
    doctor = commands.add_parser("doctor", help="check this device's agent, with a remedy for each problem")
    doctor.add_argument(
        "--data", type=Path, default=Installation.data, metavar="DIR", help=f"(default {Installation.data})"
    )
    doctor.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
    doctor.add_argument("--offline", action="store_true", help="make no network connections")
    doctor.set_defaults(command=_doctor)


def _unit(options: argparse.Namespace) -> int:
    print(render_unit(Installation(options.prefix, options.data, options.user)), end="")
    return 0


def _warm(_options: argparse.Namespace) -> int:
    from edgesplit_agent.host.preload import preload

    print(f"everything loads; engines: {', '.join(preload()) or 'none'}")
    return 0


def _supervise(options: argparse.Namespace) -> int:
    from edgesplit_agent.service.supervisor import Supervisor

    log_format.configure(options.log_level, options.log_format)
    return Supervisor([*_program(), *launch_arguments(sys.argv[1:])], options.watchdog).serve()


def _doctor(options: argparse.Namespace) -> int:
    from edgesplit.observability.doctor_findings import exit_code, format_findings
    from edgesplit_agent.service.doctor import examine

    findings = examine(options.data, online=not options.offline)
    print(format_findings(findings, as_json=options.as_json))
    return exit_code(findings)


def launch_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of `launch` for a supervisor that was called with these arguments."""
    result: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--watchdog":
            next(rest, None)
        elif not argument.startswith("--watchdog="):
            result.append(argument)
    result[result.index("supervise")] = "launch"
    return result


def _program() -> list[str]:
    """The command as it was called, without resolving links: where a link to the installed version has moved, the next
    start uses the new one."""
    called = shutil.which(sys.argv[0]) if os.path.basename(sys.argv[0]) == PROGRAM else None
    return [os.path.abspath(called)] if called else [sys.executable, "-m", "edgesplit_agent.main"]


def _watchdog(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if seconds != 0 and not LEAST_WATCHDOG_S <= seconds <= LONGEST_WATCHDOG_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds: {LEAST_WATCHDOG_S:g} or more, or 0")
    return seconds
