"""What a model takes and gives, as text: its tensors, input spec and output kind, and what is proposed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgesplit.terminal_text import printable


def interface_lines(model_: Mapping[str, Any]) -> list[str]:
    """A model's inputs, outputs, input spec and bindings, a line each."""
    tensors = [
        f"  {side[:-1]:8}{tensor['name']} {tensor['datatype']} {tensor['shape']}"
        for side in ("inputs", "outputs")
        for tensor in model_[side]
    ]
    bindings = " ".join(f"{name}={value}" for name, value in (model_.get("bindings") or {}).items())
    lines = [
        *tensors,
        f"  {'--input':8}{model_.get('input') or 'none: the model takes tensors'}",
        *([f"  {'--output':8} {_output_text(model_)}"] if model_.get("output") else []),
        *([f"  {'--bind':8}{bindings}"] if bindings else []),
        *(
            f"  {'--bind':8}{batch}={length}, as nobody gave it"
            for batch, length in (model_.get("batches") or {}).items()
        ),
    ]
    return [str(printable(line)) for line in lines]


def _output_text(model_: Mapping[str, Any]) -> str:
    """A model's output kind, with the number of its names."""
    names = len((model_.get("output_kind") or {}).get("names", ()))
    return f"{model_['output']}{f', {names} names' if names else ''}"


def proposal_lines(stored: Mapping[str, Any]) -> list[str]:
    """What a model that was pushed without an input spec most likely takes and gives; empty where that is tensors."""
    proposal = stored.get("proposal") or {}
    if not proposal.get("input") and not proposal.get("output"):
        return []
    options = [f"--{end} '{proposal[end]}'" for end in ("input", "output") if proposal.get(end)]
    if proposal.get("output") and stored.get("output"):
        options = [option for option in options if not option.startswith("--output")]
    if not options:
        return []
    take = "" if proposal.get("question") or not proposal.get("input") else ", or --input auto to take this"
    asked = [f"  {proposal['question']}"] if proposal.get("question") else []
    lines = [f"  {proposal['reason']}: push again with {' '.join(options)}{take}", *asked]
    return [str(printable(line)) for line in lines]
