"""Operators, sessions and their secrets, stored on SQLite and PostgreSQL."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator

import pytest

from edgesplit.errors import UsageError
from edgesplit_controller.access import bearer_token
from edgesplit_controller.access.operators import NewOperator, Operators, to_caller
from edgesplit_controller.access.sessions import Sessions
from edgesplit_controller.caller import OWNER, Caller, Role
from edgesplit_controller.errors import Conflict, PermissionDenied, Unauthenticated
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.operators import OperatorRow, TokenRow

ActiveByToken = Callable[[str], OperatorRow | None]

ALL = Caller(OWNER, Role.ADMIN)
NOW = 1_800_000_000.0


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    yield database
    database.close()


@pytest.fixture
def operators(database: Database) -> Operators:
    found = Operators(database, lambda csr, name, expires: b"", now=lambda: NOW)
    found.adopt_owner("the owner's", 1)
    return found


@pytest.fixture
def active(operators: Operators, database: Database) -> ActiveByToken:
    """The active operator with a token, whatever the certificate."""

    def by_token(token: str) -> OperatorRow | None:
        with database.read() as session:
            row = session.get(TokenRow, bearer_token.fingerprint(token))
            return operators.active(row.operator, session) if row is not None and not row.revoked else None

    return by_token


def test_an_operator_is_added_authenticated_revoked_and_added_again(
    operators: Operators, active: ActiveByToken
) -> None:
    """With role, groups and expiry; a revoked token stays void after the operator was added again."""
    wish = NewOperator("alice", Role.OPERATOR, ("doors", "doors", "attic"), 100)
    first = operators.add(wish, "", ALL)
    row = active(first.token)
    assert row is not None and first.expires == NOW + 100
    caller = to_caller(row, serial="", address="")
    assert (caller.operator, caller.role, caller.groups) == ("alice", Role.OPERATOR, frozenset({"doors", "attic"}))
    with pytest.raises(Conflict, match="already"):
        operators.add(wish, "", ALL)
    operators.revoke("alice", ALL)
    assert active(first.token) is None
    with pytest.raises(Conflict, match="revoked"):
        operators.rotate("alice", "", ALL)
    second = operators.add(NewOperator("alice", Role.VIEWER), "", ALL)
    assert active(first.token) is None and active(second.token) is not None
    assert [operator["name"] for operator in operators.all(ALL)] == ["alice", OWNER]


def test_an_expired_operator_needs_a_new_expiry_to_be_renewed(database: Database) -> None:
    """A new token alone does not restore the access of an expired operator."""
    clock = [NOW]
    operators = Operators(database, lambda csr, name, expires: b"", now=lambda: clock[0])
    operators.add(NewOperator("alice", Role.VIEWER, (), 100), "", ALL)
    clock[0] += 101
    with pytest.raises(Conflict, match="--expires"):
        operators.rotate("alice", "", ALL)
    again = operators.rotate("alice", "", ALL, 50)
    with database.read() as session:
        assert again.expires == clock[0] + 50 and operators.active("alice", session) is not None


def test_the_owner_token_is_the_one_in_the_data_folder(
    operators: Operators, database: Database, active: ActiveByToken
) -> None:
    """Another file, another token: the old one and its sessions end, also one from before there were operators; the
    same file again ends nothing."""
    sessions = Sessions(database, operators, now=lambda: NOW)
    row = active("the owner's")
    assert row is not None and row.role == "admin" and row.expires is None
    assert operators.by_token_and_certificate("the owner's", 1)
    opened = sessions.open(row, "")
    operators.adopt_owner("the owner's", 2)
    assert operators.by_token_and_certificate("the owner's", 2)
    assert not operators.by_token_and_certificate("the owner's", 1)
    assert sessions.operator_of(opened.secret) is not None
    operators.adopt_owner("a new one", 2)
    assert active("the owner's") is None and active("a new one") is not None
    assert sessions.operator_of(opened.secret) is None
    operators.adopt_owner("the owner's", 2)
    assert active("the owner's") is not None and active("a new one") is None


def test_an_admin_cannot_manage_operators_with_wider_rights(operators: Operators, active: ActiveByToken) -> None:
    """By role and by groups; the owner cannot be changed at all."""
    admin = caller_of_wish(operators, active, NewOperator("adm", Role.ADMIN, ("doors",)))
    lesser = Caller("op", Role.OPERATOR)
    for by, wish in (
        (admin, NewOperator("x", Role.VIEWER)),
        (admin, NewOperator("x", Role.VIEWER, ("lab",))),
        (lesser, NewOperator("x", Role.ADMIN)),
    ):
        with pytest.raises(PermissionDenied):
            operators.add(wish, "", by)
    operators.add(NewOperator("boss", Role.ADMIN), "", ALL)
    with pytest.raises(PermissionDenied):
        operators.revoke("boss", lesser)
    with pytest.raises(Conflict, match=r"operator\.token"):
        operators.revoke(OWNER, ALL)


def caller_of_wish(operators: Operators, active: ActiveByToken, wish: NewOperator) -> Caller:
    row = active(operators.add(wish, "", ALL).token)
    assert row is not None
    return to_caller(row, serial="1", address="")


def test_invalid_operator_settings_are_refused_with_a_message(operators: Operators) -> None:
    """Names, groups and lifetimes out of bounds, and unknown roles."""
    names = [NewOperator(name, Role.VIEWER) for name in ("", OWNER, "Alice", "a" * 64, "alice\n", "-a", "a b", "é")]
    groups = [("",), ("x" * 64,), tuple(map(str, range(65)))]
    lives = [NewOperator("alice", Role.VIEWER, (), expires_s) for expires_s in (0, -1, 10**12)]
    for wish in (*names, *(NewOperator("alice", Role.VIEWER, some) for some in groups), *lives):
        with pytest.raises(UsageError):
            operators.add(wish, "", ALL)
    for word in ("", "Admin", "root", "VIEWER"):
        with pytest.raises(UsageError, match="viewer, operator or admin"):
            Role.parse(word)


def test_a_login_code_is_redeemed_once_under_concurrency(operators: Operators, database: Database) -> None:
    """On both databases, by one statement that can succeed once."""
    sessions = Sessions(database, operators, now=lambda: NOW)
    code, _ = sessions.make_code(OWNER)
    let_in: list[str] = []
    refused: list[BaseException] = []

    def use() -> None:
        try:
            let_in.append(sessions.open_by_code(code, "").secret)
        except Unauthenticated as error:
            refused.append(error)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(let_in) == 1 and len(refused) == 7


def test_secrets_match_the_scanner_grammar_and_their_checksum() -> None:
    """The grammar that docs/security.md gives to scanners; no two are alike."""
    made = [bearer_token.make(kind) for kind in ("op", "code", "session") for _ in range(50)]
    assert len(set(made)) == 150
    for secret in made:
        found = re.fullmatch(r"edgesplit_(op|code|session)_([0-9A-Za-z]{43})([0-9A-Za-z]{6})", secret)
        assert found and bearer_token.checksum(found[2]) == found[3]
