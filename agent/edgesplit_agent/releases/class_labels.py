"""Outputs of a family's variant in the order of the family's classes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from edgesplit.errors import InferenceFailed
from edgesplit.lazy_import import np
from edgesplit.release.manifest import TensorSpec
from edgesplit.runtime import Tensor


def by_label(output: Tensor, labels: Sequence[int], spec: TensorSpec) -> Tensor:
    """The output with the value of each class at the place of its label, in the shape of `spec`, the family's output.

    `labels` has a label for each class index, or -1 for a class that is none of the family's. A label of several
    classes gets the greatest of their values, so that the likeliest class says the answer; one that the variant has no
    class for the least value of the output, so that it is never the answer. Without labels the output stays
    as it is. InferenceFailed where it has another number of classes.
    """
    if not labels:
        return output
    if output.size != len(labels):
        raise InferenceFailed(f"output {spec.name!r} has {output.size} classes, and {len(labels)} labels are declared")
    values = output.reshape(-1)
    ordered = np.full(tuple(max(1, length) for length in spec.shape), values.min(), output.dtype)
    known = [(place, label) for place, label in enumerate(labels) if label >= 0]
    places, wanted = ([pair[part] for pair in known] for part in (0, 1))
    np.maximum.at(ordered.reshape(-1), wanted, values[places])
    return ordered
