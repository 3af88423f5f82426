"""Operators, what they prove themselves with, and the audit log, whose lines the database refuses to change or drop."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
REFUSED = "the audit log is only ever added to"


def upgrade() -> None:
    """Make the tables, and what guards the log."""
    op.create_table(
        "operators",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("groups", sa.JSON(), nullable=False),
        sa.Column("made", sa.Double(), nullable=False),
        sa.Column("expires", sa.Double(), nullable=True),
        sa.Column("revoked", sa.Double(), nullable=True),
        sa.Column("last_seen", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("name"),
    )
    for table, columns in SECRETS.items():
        op.create_table(
            table,
            *(sa.Column(name, kind(), nullable=name in ("revoked", "used", "ended")) for name, kind in columns.items()),
            sa.ForeignKeyConstraint(["operator"], ["operators.name"]),
            sa.PrimaryKeyConstraint(next(iter(columns))),
        )
    op.create_index("tokens_of_operator", "operator_tokens", ["operator"])
    op.create_index("certificates_of_operator", "operator_certificates", ["operator"])
    op.create_index("sessions_of_operator", "browser_sessions", ["operator"])
    texts = ("operator", "serial", "address", "request", "what", "subject", "outcome")
    op.create_table(
        "audit",
        sa.Column("number", BIG, autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        *(sa.Column(name, sa.String(), nullable=False) for name in texts),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.Column("previous", sa.String(), nullable=False),
        sa.Column("hash", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("number"),
    )
    heads = op.create_table(
        "audit_head",
        sa.Column("id", BIG, autoincrement=False, nullable=False),
        sa.Column("number", BIG, nullable=False),
        sa.Column("hash", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.bulk_insert(heads, [{"id": 1, "number": 0, "hash": "0" * 64}])
    for statement in GUARDS[op.get_bind().dialect.name]:
        op.execute(statement)


SECRETS = {
    "operator_tokens": {"sha256": sa.String, "operator": sa.String, "made": sa.Double, "revoked": sa.Double},
    "operator_certificates": {
        "serial": sa.String,
        "operator": sa.String,
        "issued": sa.Double,
        "expires": sa.Double,
        "revoked": sa.Double,
    },
    "login_codes": {"sha256": sa.String, "operator": sa.String, "expires": sa.Double, "used": sa.Double},
    "browser_sessions": {
        "sha256": sa.String,
        "operator": sa.String,
        "made": sa.Double,
        "last_seen": sa.Double,
        "expires": sa.Double,
        "ended": sa.Double,
        "address": sa.String,
    },
}
GUARDS = {
    "sqlite": [
        f"CREATE TRIGGER audit_not_{verb.lower()} BEFORE {verb} ON audit BEGIN SELECT RAISE(ABORT, '{REFUSED}'); END"
        for verb in ("UPDATE", "DELETE")
    ]
    + [
        # An INSERT OR REPLACE deletes without asking a DELETE trigger.
        "CREATE TRIGGER audit_not_replace BEFORE INSERT ON audit"
        " WHEN EXISTS (SELECT 1 FROM audit WHERE number = NEW.number)"
        f" BEGIN SELECT RAISE(ABORT, '{REFUSED}'); END"
    ],
    "postgresql": [
        "CREATE FUNCTION audit_refuse() RETURNS trigger LANGUAGE plpgsql"
        f" AS $$BEGIN RAISE EXCEPTION '{REFUSED}'; END$$",
        "CREATE TRIGGER audit_only_added BEFORE UPDATE OR DELETE ON audit FOR EACH ROW EXECUTE FUNCTION audit_refuse()",
        "CREATE TRIGGER audit_not_emptied BEFORE TRUNCATE ON audit FOR EACH STATEMENT EXECUTE FUNCTION audit_refuse()",
    ],
}
