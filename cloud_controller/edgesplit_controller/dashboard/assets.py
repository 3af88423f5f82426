"""The dashboard as files that a browser asks for: built by Vite into this package, read once, served from memory.

Where it was not built (a checkout without `make dashboard`), a plain page says so; everything else works without it.
"""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

FOLDER = "dashboard_assets"
PAGE = "index.html"
NOT_BUILT = b"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>edgesplit</title></head><body>
<h1>edgesplit</h1>
<p>This controller works, but its dashboard was not built: <code>make dashboard</code> in a checkout builds it,
and every wheel has it. <code>edgectl</code> shows and does all that the dashboard does.</p>
</body></html>
"""


@dataclass(frozen=True, slots=True)
class Asset:
    """One file, as it is sent."""

    body: bytes
    packed: bytes
    """The same in gzip."""
    media_type: str
    etag: str
    lasting: bool
    """Its name changes with its content: a browser never asks again."""

    @classmethod
    def of(cls, name: str, body: bytes) -> Asset:
        """The file of that name."""
        guessed = mimetypes.guess_type(name)[0] or "application/octet-stream"
        text = guessed.startswith("text/") or guessed in ("image/svg+xml", "application/json")
        etag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
        media_type = f"{guessed}; charset=utf-8" if text else guessed
        return cls(body, gzip.compress(body, 9, mtime=0), media_type, etag, lasting="/" in name)


def load_assets(folder: Traversable | None = None) -> dict[str, Asset]:
    """Every built file by its path below `/`; the page alone, saying so, where nothing was built."""
    root = folder if folder is not None else files("edgesplit_controller") / FOLDER
    found = {name: Asset.of(name, body) for name, body in _read(root)} if root.is_dir() else {}
    return found if PAGE in found else {PAGE: Asset.of(PAGE, NOT_BUILT)}


def _read(folder: Traversable, above: str = "") -> Iterator[tuple[str, bytes]]:
    for one in folder.iterdir():
        if one.is_dir():
            yield from _read(one, f"{above}{one.name}/")
        else:
            yield f"{above}{one.name}", one.read_bytes()
