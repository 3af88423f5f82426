"""Which operators belong together, whatever the model's format: groups, the circles they close, and their order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import numpy as np

from edgesplit.errors import ModelRefused
from edgesplit.input_spec import INPUT_LAYER


class Groups:
    """Which nodes belong together: union-find, the earliest node leads."""

    def __init__(self, size: int) -> None:
        self._parent = list(range(size))

    def __len__(self) -> int:
        return len(self._parent)

    def find(self, place: int) -> int:
        """The leader of the group that `place` is in."""
        while self._parent[place] != place:
            self._parent[place] = self._parent[self._parent[place]]
            place = self._parent[place]
        return place

    def join(self, *places: int) -> None:
        """Make one group of the groups of all `places`."""
        leaders = sorted({self.find(place) for place in places})
        for leader in leaders[1:]:
            self._parent[leader] = leaders[0]


def close_circles(groups: Groups, writer: Mapping[str, int], readers: Mapping[str, Sequence[int]]) -> None:
    """Groups that need each other become one. `writer` and `readers` are nodes by tensor."""
    edges = {
        (groups.find(writer[name]), groups.find(reader))
        for name, reading in readers.items()
        if name in writer
        for reader in reading
    }
    if not edges:
        return
    from scipy.sparse import coo_matrix  # they take longer to load than most models to be looked at
    from scipy.sparse.csgraph import connected_components

    source, target = np.array(sorted(edges)).T
    matrix = coo_matrix((np.ones(len(edges)), (source, target)), shape=(len(groups), len(groups)))
    _, component = connected_components(matrix, directed=True, connection="strong")
    first: dict[int, int] = {}
    for place in sorted({end for edge in edges for end in edge}):
        groups.join(first.setdefault(int(component[place]), place), place)


def fixed_before(
    places: Iterable[int], reads: Callable[[int], Iterable[str]], writer: Mapping[str, int], fixed: Container[int]
) -> set[int]:
    """The nodes among `fixed` that compute the constants which `places` use. `reads` gives a node's tensors."""
    found: set[int] = set()
    pending = list(places)
    while pending:
        for tensor in reads(pending.pop()):
            place = writer.get(tensor)
            if place is not None and place in fixed and place not in found:
                found.add(place)
                pending.append(place)
    return found


def told_apart(bases: Iterable[str]) -> list[str]:
    """The same names, each later one of several alike with a number; `input` belongs to the input layer."""
    used = {INPUT_LAYER}
    names = []
    for base in bases:
        name, count = base, 1
        while name in used:
            count += 1
            name = f"{base}-{count}"
        used.add(name)
        names.append(name)
    return names


def topological(needs: Mapping[int, set[int]]) -> list[int]:
    """The keys in an order in which each comes after what it needs, smaller ones first where there is a choice."""
    readers: dict[int, list[int]] = {one: [] for one in needs}
    for one, before in needs.items():
        for other in before:
            readers[other].append(one)
    waiting = {one: len(before) for one, before in needs.items()}
    ready = [one for one, count in waiting.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        one = heapq.heappop(ready)
        order.append(one)
        for reader in readers[one]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, reader)
    if len(order) != len(needs):
        raise ModelRefused("the model's operators depend on each other in a circle")
    return order
