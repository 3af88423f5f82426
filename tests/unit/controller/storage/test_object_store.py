"""The object store over HTTP to moto's mock of S3 (no real store): faults on the way, refusals and what they say."""

from __future__ import annotations

import os
from typing import Any

import pytest

from edgesplit.errors import LinkError, NotFound, UsageError
from edgesplit_controller.settings import find_free_port
from edgesplit_controller.storage import object_store
from edgesplit_controller.storage.object_store import ATTEMPTS, ObjectStore, ObjectUrl, StoreUnusable
from support.s3_server import Bucket, Fault, cut_answer, cut_request, lose_answer, refuse

SLOW_DOWN = refuse("503 Slow Down", "SlowDown")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Parts so small that few bytes need several."""
    monkeypatch.setattr(object_store, "PART_BYTES", 65_536)
    return 65_536


@pytest.mark.parametrize("fault", [SLOW_DOWN, cut_request, lose_answer], ids=["503", "cut", "answer lost"])
@pytest.mark.parametrize("where", ["uploads", "partNumber=1", "partNumber=3", "uploadId"])
def test_an_upload_survives_faults(s3_mock_bucket: Bucket, small_parts: int, fault: Fault, where: str) -> None:
    """Each request of an upload in parts is retried by itself, and the object is whole afterwards."""
    store, data = s3_mock_bucket.store(), os.urandom(3 * small_parts + 1000)
    method = "PUT" if "partNumber" in where else "POST"
    s3_mock_bucket.server.break_next(method, where, fault, times=2)
    store.write("large", data)
    assert store.read("large") == data
    parts = [request for request in s3_mock_bucket.server.requests if "partNumber=2" in request]
    assert len(parts) == 1, "what was uploaded is not uploaded again"


@pytest.mark.parametrize("fault", [SLOW_DOWN, cut_request, lose_answer], ids=["503", "cut", "answer lost"])
def test_an_upload_in_one_request_survives_faults(s3_mock_bucket: Bucket, fault: Fault) -> None:
    """It is repeated until it is confirmed; a store that fails for longer is an error, and nothing is stored."""
    store = s3_mock_bucket.store()
    s3_mock_bucket.server.break_next("PUT", "small", fault, times=ATTEMPTS - 1)
    store.write("small", b"weights" * 1000)
    assert store.read("small") == b"weights" * 1000
    s3_mock_bucket.server.break_next("PUT", "other", SLOW_DOWN, times=ATTEMPTS)
    with pytest.raises(LinkError, match="try again later"):
        store.write("other", b"weights")
    assert store.find("other") is None


@pytest.mark.parametrize("fault", [SLOW_DOWN, cut_answer], ids=["503", "cut"])
def test_a_download_continues_after_faults(s3_mock_bucket: Bucket, fault: Fault) -> None:
    """A broken connection is opened again where it was."""
    store, data = s3_mock_bucket.store(), os.urandom(4 * 2**20)
    store.write("object", data)
    s3_mock_bucket.server.break_next("GET", "object", fault, times=3)
    with store.reader("object") as source:
        read = b"".join(iter(lambda: source.read(100_000), b""))
        assert source.tell() == len(data)
    assert read == data


def test_an_object_that_is_replaced_while_it_is_read_is_not_spliced(s3_mock_bucket: Bucket) -> None:
    """The rest of another version does not continue the first one."""
    store = s3_mock_bucket.store()
    store.write("object", b"a" * 4 * 2**20)
    s3_mock_bucket.server.break_next("GET", "object", cut_answer)
    with store.reader("object") as source, pytest.raises(StoreUnusable, match="PreconditionFailed"):
        source.read(1000)
        store.write("object", b"b" * 4 * 2**20)
        source.read()


def test_half_of_an_object_is_never_visible(s3_mock_bucket: Bucket, small_parts: int) -> None:
    """An upload that fails, or whose writer fails, leaves neither an object nor its parts; the one before it stays."""
    store = s3_mock_bucket.store()
    store.write("object", b"before")
    with pytest.raises(ZeroDivisionError), store.writer("object") as upload:
        upload.write(bytes(2 * small_parts))
        assert store.read("object") == b"before"
        raise ZeroDivisionError
    s3_mock_bucket.server.break_next("PUT", "partNumber=2", SLOW_DOWN, times=ATTEMPTS)
    with pytest.raises(LinkError, match=r"overloaded or failing \(SlowDown\): try again later"):
        store.write("object", bytes(2 * small_parts))
    assert store.read("object") == b"before"
    assert not store.call("list_multipart_uploads").get("Uploads")


def test_uploads_of_killed_processes_are_deleted(s3_mock_bucket: Bucket) -> None:
    """By the time at which they began (the mock's uploads all began in 2010); those that may be in progress stay."""
    store = s3_mock_bucket.store()
    store.call("create_multipart_upload", Key="edgesplit/abandoned")
    store.abort_uploads(older_than_s=100 * 365 * 86_400)
    assert len(store.call("list_multipart_uploads")["Uploads"]) == 1
    store.abort_uploads(older_than_s=3600)
    assert not store.call("list_multipart_uploads").get("Uploads")


def test_a_listing_has_every_object_below_the_url(s3_mock_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several pages, and none of a neighbour whose name begins alike."""
    store = s3_mock_bucket.store()
    for number in range(5):
        store.write(f"a/{number}", b"x" * number)
    s3_mock_bucket.store("edgesplit-2").write("other", b"x")
    whole = store.call
    monkeypatch.setattr(store, "call", lambda operation, **words: whole(operation, **{**words, "MaxKeys": 2}))
    assert [(entry.name, entry.bytes) for entry in store.objects()] == [(f"a/{number}", number) for number in range(5)]


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        ("403 Forbidden", "AccessDenied", "access is denied: the credentials need s3:ListBucket"),
        ("403 Forbidden", "InvalidAccessKeyId", "correct AWS_ACCESS_KEY_ID"),
        ("403 Forbidden", "SignatureDoesNotMatch", "correct AWS_SECRET_ACCESS_KEY"),
        ("400 Bad Request", "ExpiredToken", "renew them"),
        ("403 Forbidden", "RequestTimeTooSkewed", "clock"),
        ("400 Bad Request", "AuthorizationHeaderMalformed", "set AWS_REGION"),
        ("501 Not Implemented", "NotImplemented", "refuses the request"),
        ("504 Gateway Timeout", "", "overloaded or failing"),
        ("418 Teapot", "Odd", "refuses the request"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_to_do(s3_mock_bucket: Bucket, status: str, code: str, words: str) -> None:
    """And is not repeated, unless it may pass; no message has the secret key."""
    s3_mock_bucket.server.break_next("GET", "list-type", refuse(status, code))
    with pytest.raises((StoreUnusable, LinkError), match=words) as raised:
        s3_mock_bucket.store().check()
    assert s3_mock_bucket.url in str(raised.value) and s3_mock_bucket.server.endpoint in str(raised.value)
    assert "s3cr3t" not in str(raised.value)


def test_a_missing_bucket_object_or_store_is_named(s3_mock_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its remedy."""
    with pytest.raises(NotFound):
        s3_mock_bucket.store().reader("missing")
    with pytest.raises(StoreUnusable, match="no such bucket: create it"):
        ObjectStore(ObjectUrl("missing-bucket", "")).check()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{find_free_port('127.0.0.1')}")
    paused: list[Any] = []
    with pytest.raises(LinkError, match=r"does not answer .* AWS_ENDPOINT_URL_S3"):
        ObjectStore(ObjectUrl("bucket", ""), pause=paused.append).read("x")
    assert len(paused) >= ATTEMPTS - 1
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://me:s3cr3t@store.example:9000")
    with pytest.raises(UsageError, match="has credentials") as raised:
        ObjectStore(ObjectUrl("bucket", ""))
    assert "s3cr3t" not in str(raised.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://store.example:9000")
    with pytest.raises(UsageError, match="without TLS"):
        ObjectStore(ObjectUrl("bucket", ""))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_mock_bucket.server.endpoint)
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    with pytest.raises(StoreUnusable, match=r"no usable credentials .* AWS_PROFILE"):
        ObjectStore(ObjectUrl("bucket", "")).check()


@pytest.mark.parametrize("text", [
    "s3://", "s3://B", "https://bucket/x", "s3://bucket//x", "s3://bucket/../x", "s3://bucket/a b", "bucket", "",
    "s3://key:s3cr3t@bucket/x", "s3://key:s3cr3t/more@bucket", "s3://bucket/x?endpoint=http://s3cr3t", "s3://b\n/x",
])  # fmt: skip
def test_a_url_without_a_bucket_or_with_credentials_is_refused(text: str) -> None:
    """Without showing what may be a secret."""
    with pytest.raises(UsageError) as raised:
        ObjectUrl.parse(text)
    assert "s3cr3t" not in str(raised.value)


def test_a_url_is_a_bucket_and_a_path() -> None:
    """Slashes at the end do not matter."""
    assert ObjectUrl.parse("s3://models/") == ObjectUrl("models", "")
    assert str(ObjectUrl.parse("s3://models/a.b/c_d/")) == "s3://models/a.b/c_d"
