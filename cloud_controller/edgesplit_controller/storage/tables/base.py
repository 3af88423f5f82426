"""`Table`, the base class of all tables of the controller's database, with the column types of its annotations."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Integer, LargeBinary
from sqlalchemy.orm import DeclarativeBase

Json = dict[str, Any]


class Table(DeclarativeBase):
    """Base class of all tables. A change of a table also needs a migration step in `migrations/versions`
    (docs/operations.md)."""

    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy's own idiom
        Json: JSON,
        list[Any]: JSON,
        bytes: LargeBinary,
        # A counter follows the Unix time and a model may have 16 GB: 32 bits are too few.
        int: BigInteger().with_variant(Integer, "sqlite"),
    }
