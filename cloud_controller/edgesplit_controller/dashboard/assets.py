"""The dashboard's files: built by Vite into this package, read once, served from memory.

Where they were not built (a checkout without `make dashboard`), a plain page says so; everything else works without
them.
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
<p>This controller works, but its dashboard was not built: <code>make dashboard</code> in a checkout builds it (it needs
npm's registry). A wheel has it, unless it was built with <code>EDGESPLIT_WITHOUT_DASHBOARD=1</code>.
<code>edgectl</code> shows and does all that the dashboard does.</p>
</body></html>
"""


@dataclass(frozen=True, slots=True)
class Asset:
    """One file as it is sent."""

    body: bytes
    gzipped: bytes
    """The file compressed with gzip."""
    media_type: str
    etag: str
    is_immutable: bool
    """The file name changes with its content, so that a browser may cache it for ever."""

    @classmethod
    def from_file(cls, name: str, body: bytes) -> Asset:
        """The asset with this file name and content."""
        base_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
        is_text = base_type.startswith("text/") or base_type in ("image/svg+xml", "application/json")
        etag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
        media_type = f"{base_type}; charset=utf-8" if is_text else base_type
        return cls(body, gzip.compress(body, 9, mtime=0), media_type, etag, is_immutable="/" in name)


def is_built() -> bool:
    """Whether this installation has the dashboard's files."""
    return (files("edgesplit_controller") / FOLDER / PAGE).is_file()


def load_assets(folder: Traversable | None = None) -> dict[str, Asset]:
    """Every built file by its path below `/`; only a page that says so if nothing was built."""
    root = folder if folder is not None else files("edgesplit_controller") / FOLDER
    assets = {name: Asset.from_file(name, body) for name, body in _read(root)} if root.is_dir() else {}
    return assets if PAGE in assets else {PAGE: Asset.from_file(PAGE, NOT_BUILT)}


def _read(folder: Traversable, above: str = "") -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _read(entry, f"{above}{entry.name}/")
        else:
            yield f"{above}{entry.name}", entry.read_bytes()
