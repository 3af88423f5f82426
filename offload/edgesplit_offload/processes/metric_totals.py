"""What all serving processes have counted together, though some of them come and go.

What a process told last stays in the sums when it is late or has ended, so that no sum ever falls: Prometheus would
take that for a restart of the whole server. What a killed process counted since it was last asked is lost. Readings of
the moment count only where a process answered just now.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from edgesplit.errors import MalformedMessage
from edgesplit.observability.metrics import BY_NAME
from edgesplit.observability.registry import Series, packed, summed, unpacked

log = logging.getLogger(__name__)

REMEMBERED = 64
"""Processes that are remembered one by one; the counts of older ones are kept in one sum."""


def told(process: str, series: list[Series]) -> list[Any]:
    """A process's answer, under a mark that no other process ever had."""
    return [process, packed(series)]


class Totals:
    """Of one server's processes, by what they told so far. For one thread at a time."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._most = remembered
        self._last: OrderedDict[str, list[Series]] = OrderedDict()
        self._past: list[Series] = []

    def after(self, answers: Iterable[list[Any]]) -> list[Series]:
        """The sums, after these answers."""
        readings = []
        for process, raw in answers:
            try:
                series = unpacked(raw)
            except MalformedMessage as error:
                log.error("a serving process told what cannot be counted: %s", error)
                continue
            readings.append([one for one in series if _is_reading(one)])
            self._last[process] = [one for one in series if not _is_reading(one)]
            self._last.move_to_end(process)
        while len(self._last) > self._most:
            _, oldest = self._last.popitem(last=False)
            self._past = summed([self._past, oldest])
        return summed([self._past, *self._last.values(), *readings])


def _is_reading(one: Series) -> bool:
    return BY_NAME[one.family].kind == "gauge"
