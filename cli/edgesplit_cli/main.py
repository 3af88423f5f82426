"""`edgectl`: the operator's command. Each command is a thin client of the controller's HTTP API or of a library
package.

Exit codes are those of `edgesplit.errors` (2 for wrong usage, 3 for a refused model, and so on), 130 after Ctrl-C;
commands that follow a rollout exit by how it ended (`views.rollout.EXIT_CODES`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from edgesplit import __version__
from edgesplit.controller_client.settings import CREDENTIALS_VARIABLE, DATA_VARIABLE, default_data_folder
from edgesplit.errors import EdgeError, InfeasibleLimits
from edgesplit_cli.lazy_commands import LazyCommands, LazyGroup
from edgesplit_cli.options.plan_limits import LIMIT_PATTERN, to_options

COMMANDS = {
    "up": "up", "demo": "demo", "sim": "sim", "model": "model", "profile": "model", "profiles": "profiles",
    "calibrate": "calibrate", "check": "check", "plan": "plan", "deploy": "deploy", "deployments": "deploy",
    "rollout": "rollout", "device": "device", "agent": "agent", "keys": "keys", "operator": "operator",
    "login": "login", "logout": "login", "whoami": "login", "dashboard": "dashboard", "audit": "audit",
    "infer": "infer", "kit": "kit", "offload": "offload", "export": "export", "backup": "backup",
    "restore": "backup", "flash": "flash", "fleet": "fleet", "adopt": "adopt", "bundle": "bundle",
    "doctor": "doctor", "config": "config", "undeploy": "undeploy", "gc": "gc", "release": "release",
    "blobs": "blobs", "family": "family",
}  # fmt: skip
"""The module of `edgesplit_cli.commands` that defines each command."""


@click.group(
    cls=LazyGroup,
    commands=LazyCommands(COMMANDS),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="edgectl")
@click.option(
    "--data", type=click.Path(file_okay=False, path_type=Path), default=None,
    help=f"The controller's data folder. [default: ${DATA_VARIABLE} or ~/.local/share/edgesplit]",
)  # fmt: skip
@click.option(
    "--credentials",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar=CREDENTIALS_VARIABLE,
    default=None,
    help="An operator's file, from `edgectl operator add`: for a controller that runs elsewhere."
    f" [default: ${CREDENTIALS_VARIABLE}, or what `edgectl login` kept]",
)
@click.pass_context
def cli(context: click.Context, data: Path | None, credentials: Path | None) -> None:
    """Split neural networks between devices, edge and cloud; sign, deliver and watch them."""
    context.obj = data or default_data_folder()


def main() -> None:
    """Entry point of the console script."""
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        code = 130
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = error.exit_code
    except click.ClickException as error:
        click.echo(f"edgectl: {usage_error_text(error)}", err=True)
        code = error.exit_code
    except EdgeError as error:
        limits = isinstance(error, InfeasibleLimits) or LIMIT_PATTERN.match(str(error))
        click.echo(f"edgectl: {to_options(str(error)) if limits else error}", err=True)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError) as error:
        click.echo(f"edgectl: {error.strerror}: {error.filename}", err=True)
        code = 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


def usage_error_text(error: click.ClickException) -> str:
    """One line that describes a usage error, with a reference to the command's help."""
    text = error.format_message()
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return text
    root = error.ctx.find_root()
    if isinstance(error, click.NoSuchOption) and any(
        error.option_name in option.opts for option in root.command.params
    ):
        return f"{error.option_name} stands before the command: {root.command_path} {error.option_name} …"
    return f"{text[:1].lower()}{text[1:].rstrip('.')} (see `{error.ctx.command_path} --help`)"


if __name__ == "__main__":
    main()
