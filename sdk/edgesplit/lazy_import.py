"""Lazy imports: a module that is loaded on first use instead of at import.

An agent that waits for its first model needs no numpy, which takes a third of its memory (docs/footprint.md): modules
of the agent and the SDK import `np` from here. Of another module, type checkers see the plain import:

    if TYPE_CHECKING:
        from PIL import Image
    else:
        Image = lazy_import("PIL.Image")
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["Tensor", "lazy_import", "np", "npt"]


class _LazyModule(ModuleType):
    """Proxy of a module. Each attribute is cached on the proxy at its first use."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(self.__name__), name)
        setattr(self, name, value)
        return value


def lazy_import(name: str) -> Any:
    """A proxy of the module `name`, which is imported at first use, from any thread."""
    return _LazyModule(name)


if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Tensor = npt.NDArray[Any]
else:
    np, npt, Tensor = lazy_import("numpy"), lazy_import("numpy.typing"), Any
