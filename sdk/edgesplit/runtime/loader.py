"""A release's slices as programs: the input slice runs its spec, every other one the engine that is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from edgesplit.crypto.slice_encryption import SliceInMemory, SliceSource
from edgesplit.errors import ModelRefused
from edgesplit.release.manifest import Manifest, Slice
from edgesplit.runtime import Program, Runtime
from edgesplit.runtime.input_decoder import InputProgram


def load_slices(
    manifest: Manifest, slice_folder: Callable[[str], SliceSource], runtime: Runtime, only: Iterable[str] | None = None
) -> dict[str, Program]:
    """Programs by slice name: of all slices, or of those in `only`. `slice_folder` says where a slice's files lie."""
    wanted = {one.name for one in manifest.slices} if only is None else set(only)
    known = manifest.every_slice
    return {one.name: load_slice(manifest, one, slice_folder, runtime) for one in known if one.name in wanted}


def load_slice(manifest: Manifest, one: Slice, slice_folder: Callable[[str], SliceSource], runtime: Runtime) -> Program:
    """One slice as a program; ModelRefused if it cannot be."""
    if one.format != "input":
        source = slice_folder(one.name)
        if not isinstance(source, SliceInMemory):
            return runtime.load(one, source)
        with source:
            return runtime.load(one, source)
    if manifest.input_spec is None or not manifest.input_spec.tensor:
        raise ModelRefused(f"slice {one.name} decodes the input, but the release has no complete input spec")
    return InputProgram(manifest.input_spec)
