"""Modules that are loaded when something of them is used, not when whoever names them is.

An agent that waits for its first model needs no numpy, which takes a third of its memory (docs/footprint.md). Type
checkers see the plain import:

    if TYPE_CHECKING:
        import numpy as np
    else:
        np = later("numpy")
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any


class _Later(ModuleType):
    """Stands for a module. What was used once is found like any attribute: the way here is taken once for each name."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(self.__name__), name)
        setattr(self, name, value)
        return value


def later(name: str) -> Any:
    """The module of that name, not loaded yet; any thread may be the first to use it."""
    return _Later(name)
