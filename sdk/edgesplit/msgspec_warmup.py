"""Message types are made ready where they are defined, by one thread.

msgspec works out how to read a struct when one is read for the first time. Where two threads do that at once, one of
them meets half of it and the process crashes (msgspec 0.22: a segmentation fault at the first requests of a server that
was just started). Modules are imported by one thread, so each that defines structs ends with `settle(__name__)`.
"""

from __future__ import annotations

import sys

import msgspec


def settle(module: str) -> None:
    """Make all structs that this module defines ready to be read, whoever reads them first."""
    for kind in list(vars(sys.modules[module]).values()):
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module:
            msgspec.json.Decoder(kind)
