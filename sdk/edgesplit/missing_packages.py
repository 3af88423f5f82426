"""Explains a missing dependency: a plain `pip install edgesplit` has the applications' client, and the commands need an
extra."""

from __future__ import annotations

import sys

EXIT_CODE = 2
"""Exit code of a command whose dependencies are not installed: wrong usage."""
OWN_PREFIX = "edgesplit"


def missing_package_text(error: ModuleNotFoundError, command: str, extra: str) -> str:
    """What to install for `command`; empty if the module that is missing is one of ours or Python's own, which no extra
    repairs."""
    package = (error.name or "").partition(".")[0]
    if not package or package.startswith(OWN_PREFIX) or package in sys.stdlib_module_names:
        return ""
    return (
        f"{command}: {package} is not installed, which this command needs: python -m pip install"
        f" 'edgesplit[{extra}]' (in the environment of {sys.executable})"
    )


def unsupported_python_text(command: str, least: tuple[int, int], version: tuple[int, int]) -> str:
    """Why the command does not run on this version of Python; empty if it does."""
    if version >= least:
        return ""
    return (
        f"{command}: needs Python {least[0]}.{least[1]} or newer, and {sys.executable} is {version[0]}.{version[1]}:"
        " install edgesplit with a newer Python"
    )
