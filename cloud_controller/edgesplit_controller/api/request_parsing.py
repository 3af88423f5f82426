"""Parses what a request contains into plain values: the body as a file, base64 fields, dimension bindings."""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import Request
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from edgesplit.errors import Busy, EdgeError, LinkError, UsageError
from edgesplit_controller.api.dispatch import controller_of

BLOCK_BYTES = 1 << 20
"""Bytes that are buffered before each write to disk."""


def parse_bindings(words: list[str]) -> dict[str, int]:
    """Parse `DIMENSION=LENGTH` words; UsageError for anything else."""
    bindings = {}
    for word in words:
        name, _, length = word.rpartition("=")
        if not (name and length.isascii() and length.isdigit() and 0 < int(length[:10]) < 10**9):
            raise UsageError(f"bind {word[:80]!r}: it must be DIMENSION=LENGTH, as in batch=1")
        bindings[name] = int(length)
    return bindings


@asynccontextmanager
async def uploaded_file(request: Request, what: str) -> AsyncIterator[Path]:
    """The body as a temporary file, deleted at the end of the context. Busy if four uploads run already; `what` names
    them in that error."""
    if not request.app.state.pushing.acquire(blocking=False):
        raise Busy(f"four {what} are being uploaded already; try again later")
    try:
        part = controller_of(request).blobs.incoming_file()
        try:
            await write_body(request, part)
            yield part
        finally:
            part.unlink(missing_ok=True)
    finally:
        request.app.state.pushing.release()


async def write_body(request: Request, part: Path) -> None:
    """Write the body to the file `part`; middleware has limited its size. LinkError if the client disconnects."""
    with part.open("wb") as file:
        block = bytearray()
        try:
            async for received in request.stream():
                block += received
                if len(block) >= BLOCK_BYTES:
                    await run_in_threadpool(file.write, bytes(block))
                    block.clear()
            await run_in_threadpool(file.write, bytes(block))
        except ClientDisconnect as error:
            raise LinkError("the upload was cut short") from error
        except OSError as error:
            raise EdgeError(f"the upload cannot be stored: {error.strerror}") from error


def parse_base64(text: str, what: str = "a sample") -> bytes:
    """Decode base64; UsageError, naming `what`, for anything else."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError(f"{what}: not base64 ({error})") from error
