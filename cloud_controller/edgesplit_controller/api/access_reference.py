"""docs/access.md: every route of the API with whom it lets in, as the routes themselves declare it.

`python -m edgesplit_controller.api.access_reference > docs/access.md` writes it; a test compares the two, so that no
route comes in unseen, and fails for a route that declares nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fastapi import APIRouter
from starlette.routing import BaseRoute

from edgesplit_controller.api.authorisation import Door, GuardedRoute, Needs
from edgesplit_controller.caller import Role

HEAD = """# Who may call what

Written by `python -m edgesplit_controller.api.access_reference > docs/access.md` from the routes of the API; a test
compares
the two. Each role may what those to the left of it may. "Own groups": for an operator of some groups, devices of others
do not exist (404), and `all`, labels and lists mean their own. "Session": a browser may, by cookie and CSRF token;
where it says no, an operator's certificate and token are needed. "Listed": such a call is in the audit log when it is
let in; one that is refused for who made it (401, 403, 421, 429) always is, but for the many of a flood.

| route | viewer | operator | admin | operators of some groups | session | listed |
|---|---|---|---|---|---|---|
"""


class Declared(NamedTuple):
    """One route."""

    method: str
    path: str
    needs: Needs | None
    """None: it was not made by `access`."""


def declared(routes: list[BaseRoute]) -> Iterator[Declared]:
    """Every route under these, also of routers that were included."""
    for route in routes:
        inner = getattr(route, "original_router", None) or getattr(route, "app", None)
        if isinstance(inner, APIRouter):
            yield from declared(inner.routes)
        elif isinstance(route, GuardedRoute):
            yield from (Declared(method, route.path, route.needs) for method in sorted(route.methods or ()))
        else:
            for method in sorted(getattr(route, "methods", None) or {"*"}):
                yield Declared(method, str(getattr(route, "path", route)), None)


def page(routes: list[BaseRoute]) -> str:
    """The whole page."""
    found = sorted(declared(routes), key=lambda one: (one.path, one.method))
    return HEAD + "".join(_row(one) for one in found)


def _row(one: Declared) -> str:
    name = f"`{one.method} {one.path}`"
    needs = one.needs
    if needs is None:
        return f"| {name} | not declared | | | | | |\n"
    listed = "yes" if needs.is_listed(one.method) else "no"
    if needs.role is None:
        return f"| {name} | anybody | anybody | anybody | yes | yes | {listed} |\n"
    roles = " | ".join("yes" if needs.role <= role else "no" for role in Role)
    groups = "no" if needs.everywhere else "own groups"
    session = "no" if needs.door is Door.CERTIFICATE else "yes"
    return f"| {name} | {roles} | {groups} | {session} | {listed} |\n"


def main() -> None:
    """Print the page."""
    from edgesplit_controller.api.app import ROUTERS

    print(page([route for router in ROUTERS for route in router.routes]), end="")


if __name__ == "__main__":
    main()
