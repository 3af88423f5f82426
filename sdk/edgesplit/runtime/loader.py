"""Loads a release's slices as programs: the input slice from its spec, every other one on the given runtime."""

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
    """Programs by slice name: of all slices, or of those in `only`. `slice_folder` returns a slice's files."""
    wanted = {slice_.name for slice_ in manifest.slices} if only is None else set(only)
    known = manifest.all_slices
    return {
        slice_.name: load_slice(manifest, slice_, slice_folder, runtime) for slice_ in known if slice_.name in wanted
    }


def load_slice(
    manifest: Manifest, slice_: Slice, slice_folder: Callable[[str], SliceSource], runtime: Runtime
) -> Program:
    """Load one slice; ModelRefused where that fails."""
    if slice_.format != "input":
        source = slice_folder(slice_.name)
        if not isinstance(source, SliceInMemory):
            return runtime.load(slice_, source)
        with source:
            return runtime.load(slice_, source)
    spec = manifest.input_spec_of(slice_)
    if spec is None or not spec.tensor:
        raise ModelRefused(f"slice {slice_.name} decodes the input, but the release has no complete input spec")
    return InputProgram(spec)
