"""The demo's display: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar

from edgesplit_cli.demo.application import FrameSender
from edgesplit_cli.demo.scenario import DemoDevice
from edgesplit_cli.output import ms, table

RECENT = 12
"""Number of requests whose median latency is shown."""
PLAIN_EVERY_S = 5.0


class Display:
    """Shows the streams until it is closed; call `refresh` often."""

    def __init__(
        self, console: Console, streams: dict[DemoDevice, FrameSender], length_s: float, elapsed: Callable[[], float]
    ) -> None:
        self._console = console
        self._streams = streams
        self._length_s = length_s
        self._elapsed = elapsed
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._next_line = 0.0

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def announce(self, text: str) -> None:
        """Print an event; it stays on the screen."""
        line = f"[{self._elapsed():5.1f} s] {text}"
        (self._live.console if self._live else self._console).print(line, style="bold")

    def refresh(self) -> None:
        """Draw the present state."""
        if self._live:
            bar = ProgressBar(total=self._length_s, completed=min(self._length_s, self._elapsed()), width=60)
            self._live.update(Group(bar, self._table()))
        elif monotonic() >= self._next_line:
            self._next_line = monotonic() + PLAIN_EVERY_S
            for device, stream in self._streams.items():
                self._console.print(f"[{self._elapsed():5.1f} s]   {device.name:9} {_status_line(stream)}")

    def _table(self) -> Any:
        rows = [
            (device.name, f"{device.profile}, {device.link}", *_cells(stream))
            for device, stream in self._streams.items()
        ]
        return table(("device", "emulated", ">answers", "cut now", ">latency ms", ">predicted ms", ">fallbacks"), rows)


def _cells(stream: FrameSender) -> tuple[str, ...]:
    samples = stream.log.samples[-RECENT:]
    if not samples:
        return "0", "-", "-", "-", "0"
    last = samples[-1]
    cut = f"{last.variant} {last.row}".lstrip() + (f" after {last.after}" if last.row.startswith("cut") else "")
    latency = sorted(sample.latency_s for sample in samples)[len(samples) // 2]
    fallbacks = sum(sample.fallback for sample in stream.log.samples)
    return str(len(stream.log.samples)), cut, ms(latency), ms(last.predicted_s), str(fallbacks)


def _status_line(stream: FrameSender) -> str:
    answers, cut, latency, predicted, fallbacks = _cells(stream)
    return f"{answers:>4} answers, {cut}, {latency} ms (predicted {predicted}), {fallbacks} fallbacks"
