"""Lineage of a model version that stands in for another: which one, how it was made, and what samples showed of both.

It is part of the release's manifest and so signed with it. A manifest has it only where there is one: agents before 0.3
refuse a manifest with a field that they do not know. Devices do not act on it.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.quantities import format_percentage

RecipeValue = str | int | bool | list[str] | dict[str, str]


class AccuracyInterval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The share of right answers on the confirming samples, with its two-sided interval at 1 - delta."""

    share: float
    at_least: float
    at_most: float

    def __str__(self) -> str:
        return f"{100 * self.share:.1f} % ({100 * self.at_least:.1f} to {100 * self.at_most:.1f} %)"


class VariantEvidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the confirming samples showed of base and variant, side by side. They had no part in making the variant.
    What needs labels is None without them."""

    samples: int
    changed: int
    """Number of samples whose answer differs from the base's."""
    changed_at_most: float
    """Upper bound of the share of changed answers, one-sided at 1 - delta."""
    right_to_wrong: int | None = None
    right_to_wrong_at_most: float | None = None
    wrong_to_right: int | None = None
    accuracy_base: AccuracyInterval | None = None
    accuracy_variant: AccuracyInterval | None = None
    net_loss_at_most: float | None = None
    """Upper bound of the accuracy that is lost, as a share of all answers, one-sided at 1 - delta."""
    delta: float = 0.1
    """Probability with which a bound may be wrong."""
    samples_digest: str = ""
    """SHA-256 of the confirming samples."""


class Lineage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where a version comes from, and that it passed the gate."""

    base: str
    """`name@version` of the model that it stands in for. The number is never used again, even if that is removed."""
    base_sha256: str
    """Digest of the base's model file."""
    answer: str
    """What an answer is, in the command line's notation (`edgesplit.answers.answer_rule`)."""
    samples_sha256: str
    """Digest of all samples with their labels, those that chose included."""
    evidence: VariantEvidence
    allowed_accuracy_loss: float | None = None
    """Largest accuracy that it was allowed to lose, as a share of all answers."""
    least_agreement: float | None = None
    """Least share of unchanged answers that was asked for."""
    recipe: dict[str, RecipeValue] = {}
    """How it was compressed, as `edgesplit_partitioner.compression.recipe.Recipe`; empty where it was made elsewhere.
    Not typed here, so that a later recipe does not make a manifest unreadable."""

    @property
    def method(self) -> str:
        """How it was made, in a word."""
        return str(self.recipe.get("method", "made elsewhere"))


def sentences(lineage: Lineage) -> list[str]:
    """The lineage in plain words: one sentence on how it was made, one on answers, and one on accuracy where samples
    had labels."""
    return [_making(lineage), _answers(lineage), *_accuracy(lineage.evidence)]


def _making(lineage: Lineage) -> str:
    if not lineage.recipe:
        return f"stands in for {lineage.base}, made elsewhere"
    details = list(_recipe_details(lineage.recipe))
    return f"made from {lineage.base} by {lineage.method}" + (f" ({'; '.join(details)})" if details else "")


def _recipe_details(recipe: dict[str, RecipeValue]) -> Iterator[str]:
    if isinstance(layers := recipe.get("float_layers"), list) and layers:
        yield f"left in float: {', '.join(layers)}"
    if isinstance(types := recipe.get("without_kernel"), list) and types:
        yield f"without an int8 kernel: {', '.join(types)}"
    if isinstance(tools := recipe.get("tools"), dict) and tools:
        yield ", ".join(f"{name} {version}" for name, version in sorted(tools.items()))


def _answers(lineage: Lineage) -> str:
    seen = lineage.evidence
    sure = f"{format_percentage(1 - seen.delta)} sure, {seen.samples} samples that chose nothing"
    return f"at most {format_percentage(seen.changed_at_most)} of answers differ ({sure}; {seen.changed} differed)"


def _accuracy(seen: VariantEvidence) -> Iterator[str]:
    if seen.accuracy_variant is None or seen.accuracy_base is None:
        yield "accuracy unknown: it takes labelled samples, and answers that are classes"
        return
    lost = ""
    if seen.net_loss_at_most is not None:
        lost = f"; at most {100 * seen.net_loss_at_most:.3g} percentage points lost"
    yield f"accuracy {seen.accuracy_variant}, of the base {seen.accuracy_base}{lost}"


warm_up_structs(__name__)
