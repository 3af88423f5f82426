"""Generates docs/access.md: every route of the API with the roles that may call it, as the routes declare them.

`python -m edgesplit_controller.api.reference access > docs/access.md` writes the page. A test compares the two, so that
a new route is reviewed, and fails for a route that declares no permissions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fastapi import APIRouter
from starlette.routing import BaseRoute

from edgesplit_controller.api.authorisation import Authentication, GuardedRoute, Permissions
from edgesplit_controller.caller import Role

HEAD = """# Permissions of the API

Written by `python -m edgesplit_controller.api.reference access > docs/access.md` from the routes of the API; a test
compares
the two. Each role includes the rights of those to its left. "Own groups": for an operator of some groups, devices of
others
do not exist (404), and `all`, labels and lists mean their own. "Session": a browser session may, by cookie and CSRF
token;
where it says no, an operator's certificate and token are needed. "Listed": such a call is in the audit log when it was
accepted; one that is refused because of its caller (401, 403, 421, 429) always is, except the many of a flood.

| route | viewer | operator | admin | operators of some groups | session | listed |
|---|---|---|---|---|---|---|
"""
"""Text of the page before the rows of its table."""


class DeclaredRoute(NamedTuple):
    """One route with its permissions."""

    method: str
    path: str
    needs: Permissions | None
    """None: the route was not created by `api.authorisation`."""


def declared_routes(routes: list[BaseRoute]) -> Iterator[DeclaredRoute]:
    """Every route in `routes`, including those of included routers."""
    for route in routes:
        inner = getattr(route, "original_router", None) or getattr(route, "app", None)
        if isinstance(inner, APIRouter):
            yield from declared_routes(inner.routes)
        elif isinstance(route, GuardedRoute):
            yield from (DeclaredRoute(method, route.path, route.needs) for method in sorted(route.methods or ()))
        else:
            for method in sorted(getattr(route, "methods", None) or {"*"}):
                yield DeclaredRoute(method, str(getattr(route, "path", route)), None)


def render_page(routes: list[BaseRoute]) -> str:
    """The whole page as Markdown."""
    rows = sorted(declared_routes(routes), key=lambda route: (route.path, route.method))
    return HEAD + "".join(_row(route) for route in rows)


def _row(route: DeclaredRoute) -> str:
    name = f"`{route.method} {route.path}`"
    needs = route.needs
    if needs is None:
        return f"| {name} | not declared | | | | | |\n"
    listed = "yes" if needs.is_listed(route.method) else "no"
    if needs.role is None:
        return f"| {name} | anybody | anybody | anybody | yes | yes | {listed} |\n"
    roles = " | ".join("yes" if needs.role <= role else "no" for role in Role)
    groups = "no" if needs.everywhere else "own groups"
    session = "no" if needs.authentication is Authentication.CERTIFICATE else "yes"
    return f"| {name} | {roles} | {groups} | {session} | {listed} |\n"
