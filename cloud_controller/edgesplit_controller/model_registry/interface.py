"""What a pushed model takes and gives: its input spec and its output kind, as given, by a preset, or as proposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from edgesplit.answers.kind_text import parse_output_kind
from edgesplit.errors import MalformedMessage, UsageError
from edgesplit.output_kind import MOST_NAMES, Name, OutputKind
from edgesplit_controller.storage.blob_interface import Blobs
from edgesplit_controller.storage.tables.core import Model
from edgesplit_partitioner import proposals
from edgesplit_partitioner.ir.prepared_model import PreparedModel

AUTO = "auto"
"""Takes what is proposed."""
NONE = "none"
"""No output kind, whatever is proposed."""


@dataclass(frozen=True, slots=True)
class InterfaceRequest:
    """What the caller says of a model's input and outputs; empty where nothing."""

    input: str = ""
    """An input spec, or `auto`."""
    preset: str = ""
    """One of `proposals.PRESETS`, in place of `input`."""
    output: str = ""
    """An output kind, `auto`, or `none`."""
    names: Sequence[str] = ()
    """Names of the classes."""


NOTHING_SAID = InterfaceRequest()


@dataclass(frozen=True, slots=True)
class Interface:
    """A model's input spec as text (empty: tensors), and its output kind."""

    input_text: str
    kind: OutputKind | None


def settle(model: PreparedModel, request: InterfaceRequest) -> Interface:
    """The interface that the caller asks for. UsageError where it does not fit the model, or the proposal asks."""
    if request.preset and request.input:
        raise UsageError("--preset stands for an --input: give one of them")
    taken = None
    if request.preset:
        taken = proposals.preset(request.preset, model)
    elif request.input == AUTO:
        taken = proposals.propose(model)
        if taken.question:
            raise UsageError(f"--input auto: {taken.reason}: {taken.question}. Proposed: --input '{taken.input}'")
    text = taken.input if taken is not None else " ".join(request.input.split())
    return Interface(text, _kind(model, request, taken))


def _kind(model: PreparedModel, request: InterfaceRequest, taken: proposals.Proposal | None) -> OutputKind | None:
    """The output kind that is asked for, or that belongs to what was taken."""
    if request.output == NONE:
        return None
    wanted, names = request.output, tuple(request.names)
    if not wanted and taken is None and not names:
        return None
    if wanted in ("", AUTO):
        proposed = taken or proposals.propose(model)
        if not proposed.output:
            if not wanted and not names:
                return None
            raise UsageError("what its outputs are is not seen: give --output labels, boxes:LAYOUT, mask or embedding")
        wanted, names = proposed.output, names or proposed.names
    return parse_output_kind(wanted, model.outputs, names)


def kind_of(model: Model) -> OutputKind | None:
    """The output kind of a stored model."""
    stored = model.shown.get("output_kind")
    return None if stored is None else msgspec.convert(stored, OutputKind)


def kind_of_variant(model: PreparedModel, base: Model) -> OutputKind | None:
    """The kind of a model that stands in for `base`: the base's, read from the outputs that this one has. None where it
    has none that fit."""
    kind = kind_of(base)
    if kind is None or set(kind.outputs) <= {spec.name for spec in model.outputs}:
        return kind
    try:
        renamed = parse_output_kind(f"{kind.kind}:{kind.layout}" if kind.layout else kind.kind, model.outputs)
    except UsageError:
        return None
    return msgspec.structs.replace(kind, outputs=renamed.outputs)


def store_names(blobs: Blobs, names: Sequence[str]) -> str:
    """Store names of classes for the push that follows; returns their digest."""
    return blobs.put(msgspec.json.encode(list(names)))


def stored_names(blobs: Blobs, digest: str) -> tuple[str, ...]:
    """The names of that digest."""
    try:
        names = msgspec.json.decode(blobs.get(digest), type=tuple[Name, ...])
    except msgspec.MsgspecError as error:
        raise MalformedMessage(f"{digest[:16]} is no list of names: {error}") from error
    if len(names) > MOST_NAMES:
        raise UsageError(f"{len(names)} names, at most {MOST_NAMES}")
    return names


def description(model: PreparedModel, kind: OutputKind | None) -> dict[str, Any]:
    """The output kind, and the batches of one that nobody asked for, for the model's description; empty where there is
    neither."""
    batches = {"batches": dict(model.hints.bound)} if model.hints.bound else {}
    if kind is None:
        return batches
    # As it is read from the database again, where tuples are lists: versions are compared by it.
    stored = msgspec.json.decode(msgspec.json.encode(kind))
    return {"output_kind": stored, "output": kind.to_text(), **batches}
