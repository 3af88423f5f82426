"""Writes the two pages that describe the API: `python -m edgesplit_controller.api.reference openapi` prints
docs/openapi.json, `... access` prints docs/access.md. `make pages` runs both; tests compare them with the files."""

from __future__ import annotations

import json
import sys

from edgesplit_controller.api.access_reference import render_page
from edgesplit_controller.api.app import ROUTERS
from edgesplit_controller.api.openapi import document_of_routers


def main(page: str) -> None:
    """Print the page `openapi` or `access`."""
    if page == "openapi":
        print(json.dumps(document_of_routers(ROUTERS), indent=1, ensure_ascii=False))
    else:
        print(render_page([route for router in ROUTERS for route in router.routes]), end="")


if __name__ == "__main__":
    main(sys.argv[1])
