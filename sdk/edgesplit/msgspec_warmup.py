"""Warm-up of msgspec's decoders: the decoder of each struct is built by the importing thread.

msgspec analyses a struct type when it is first decoded. If two threads do that at once, one of them sees a half-built
state and the process crashes (msgspec 0.22: a segmentation fault at the first requests of a server that was just
started). Modules are imported by one thread, so each module that defines structs ends with `warm_up_structs(__name__)`.
"""

from __future__ import annotations

import sys

import msgspec


def warm_up_structs(module: str) -> None:
    """Build the decoders of all structs that the module of this name defines."""
    for struct_type in list(vars(sys.modules[module]).values()):
        if (
            isinstance(struct_type, type)
            and issubclass(struct_type, msgspec.Struct)
            and struct_type.__module__ == module
        ):
            msgspec.json.Decoder(struct_type)
