"""Lazy imports: a module that is loaded on first use instead of at import.

An agent that waits for its first model needs no numpy, which takes a third of its memory (docs/footprint.md): modules
of the agent and the SDK import `np` from here. Of another module, type checkers see the plain import:

    if TYPE_CHECKING:
        from PIL import Image
    else:
        Image = lazy_import("PIL.Image")
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["Tensor", "defer_import", "lazy_import", "np", "npt"]


class _LazyModule(ModuleType):
    """Proxy of a module. Each attribute is cached on the proxy at its first use."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(self.__name__), name)
        setattr(self, name, value)
        return value


class _DeferredModule(_LazyModule):
    """Stands in `sys.modules` for a package until its first use."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return super().__getattr__(name)


def lazy_import(name: str) -> Any:
    """A proxy of the module `name`, which is imported at first use, from any thread."""
    return _LazyModule(name)


def defer_import(name: str) -> None:
    """Have every plain `import NAME` from now on, a library's too, load that package at its first use. Does nothing
    where it is loaded already or not installed."""
    spec = find_spec(name) if name not in sys.modules else None
    if spec is None:
        return
    module = sys.modules[name] = _DeferredModule(name)
    module.__spec__, module.__file__ = spec, spec.origin


if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Tensor = npt.NDArray[Any]
else:
    np, npt, Tensor = lazy_import("numpy"), lazy_import("numpy.typing"), Any
