"""What a request carries, made into plain values: its body as a file, base64, bindings."""

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


def parse_bindings(words: list[str]) -> dict[str, int]:
    """`DIM=N` each; UsageError for anything else."""
    bindings = {}
    for word in words:
        name, _, length = word.rpartition("=")
        if not (name and length.isascii() and length.isdigit() and 0 < int(length[:10]) < 10**9):
            raise UsageError(f"bind {word[:80]!r}: it must be DIMENSION=LENGTH, as in batch=1")
        bindings[name] = int(length)
    return bindings


@asynccontextmanager
async def uploaded(request: Request, what: str) -> AsyncIterator[Path]:
    """The body as a file among what comes in, for as long as it is looked at. Busy where too many of `what` come."""
    if not request.app.state.pushing.acquire(blocking=False):
        raise Busy(f"four {what} are on their way already; try again later")
    try:
        part = controller_of(request).blobs.incoming_file()
        try:
            await receive(request, part)
            yield part
        finally:
            part.unlink(missing_ok=True)
    finally:
        request.app.state.pushing.release()


async def receive(request: Request, part: Path) -> None:
    """The body into a file; its size was bounded on the way here."""
    with part.open("wb") as file:
        block = bytearray()
        try:
            async for piece in request.stream():
                block += piece
                if len(block) >= BLOCK_BYTES:
                    await run_in_threadpool(file.write, bytes(block))
                    block.clear()
            await run_in_threadpool(file.write, bytes(block))
        except ClientDisconnect as error:
            raise LinkError("the upload was cut short") from error
        except OSError as error:
            raise EdgeError(f"the upload cannot be kept: {error.strerror}") from error


def from_base64(text: str, what: str = "a sample") -> bytes:
    """The bytes; UsageError for what is not base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError(f"{what}: not base64 ({error})") from error
