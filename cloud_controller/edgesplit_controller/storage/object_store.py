"""A folder of objects in an S3-compatible store, by URL (`s3://bucket/prefix`): read, write, list, delete.

Credentials, region, endpoint and authority come from the standard variables and profile of S3 clients, never from the
URL. An object appears whole or not at all: a large one is uploaded in parts and completed at the end. Each request is
retried here with the project's back-off, each part of an upload by itself; a download that breaks continues where it
was. What the store refuses is a `StoreUnusable` that says what to do, what may pass is a `LinkError`.

Needs the extra `s3` (botocore), which is imported on first use.
"""

from __future__ import annotations

import hashlib
import io
import ipaddress
import logging
import random
import re
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from edgesplit.backoff import Backoff
from edgesplit.errors import EdgeError, LinkError, NotFound, TrustError, UsageError

T = TypeVar("T")
SCHEME: Final = "s3://"
PART_BYTES: Final = 16 * 2**20
"""Bytes of the first parts of an upload; an object of at most that size is uploaded in one request."""
PARTS_OF_ONE_SIZE: Final = 1_000
"""Parts after which the next ones grow by `PART_BYTES`, so that the 10,000 parts of an upload hold 900 GB."""
COPIED_BYTES: Final = 5 * 10**9
"""Largest object that a store copies in one request."""
CONNECTIONS: Final = 16
"""Connections to the store per process."""
RETRY: Final = Backoff(first_s=0.2, longest_s=5.0)
ATTEMPTS: Final = 5
"""Attempts of a request until it fails."""
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5.0, 20.0
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PATH: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:+=-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.,:+=-]*)*")
_TRANSIENT: Final = frozenset({
    "BadDigest", "InternalError", "OperationAborted", "RequestTimeout", "ServiceUnavailable", "SlowDown", "Throttling",
    "ThrottlingException", "TooManyRequests", "RequestLimitExceeded",
})  # fmt: skip
"""Error codes after which the same request may succeed."""
_TRANSIENT_STATUS: Final = frozenset({429, 500, 502, 503, 504})
_REMEDIES: Final[Mapping[str, str]] = {
    "NoSuchBucket": "there is no such bucket: create it, or correct the URL",
    "AccessDenied": "access is denied: the credentials need s3:ListBucket, s3:ListBucketMultipartUploads, s3:GetObject,"
    " s3:PutObject, s3:DeleteObject and s3:AbortMultipartUpload there",
    "InvalidAccessKeyId": "the store does not know the access key: correct AWS_ACCESS_KEY_ID, or the profile",
    "SignatureDoesNotMatch": "the secret key is wrong: correct AWS_SECRET_ACCESS_KEY, or the profile",
    "ExpiredToken": "the credentials have expired: renew them",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set AWS_REGION",
    "PermanentRedirect": "the bucket is in another region: set AWS_REGION",
}
"""What an operator does about what a store refuses, by its error code."""
_CODES: Final[Mapping[str, str]] = {
    "403": "AccessDenied", "AllAccessDisabled": "AccessDenied", "InvalidToken": "ExpiredToken",
    "TokenRefreshRequired": "ExpiredToken", "IllegalLocationConstraintException": "PermanentRedirect",
    "301": "PermanentRedirect",
}  # fmt: skip
"""Other codes of the same causes; answers without a body have the HTTP status as their code."""
_MISSING: Final = frozenset({"404", "NoSuchKey", "NoSuchUpload"})


class StoreUnusable(EdgeError):
    """The store refuses what is asked; the text says what an operator must do. Retrying does not help."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class ObjectUrl:
    """A bucket, and a folder or an object in it."""

    bucket: str
    path: str
    """Without slashes around it; empty for the whole bucket."""

    @classmethod
    def parse(cls, text: str) -> ObjectUrl:
        """Parse `s3://BUCKET[/PATH]`; UsageError for anything else, and for a URL with credentials."""
        bucket, _, path = text.removeprefix(SCHEME).strip("/").partition("/")
        if "@" in text or "?" in text:  # the text is not shown: it may have a secret
            raise UsageError(
                "credentials and endpoint are not part of the URL: set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and"
                " AWS_ENDPOINT_URL_S3, or a profile by AWS_PROFILE"
            )
        if not text.startswith(SCHEME) or not _BUCKET.fullmatch(bucket) or (path and not _PATH.fullmatch(path)):
            raise UsageError(f"{text[:80]!r} is no place in an object store: s3://BUCKET or s3://BUCKET/PATH")
        return cls(bucket, path)

    def __str__(self) -> str:
        return SCHEME + self.bucket + (f"/{self.path}" if self.path else "")


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object in the listing of a folder."""

    name: str
    """Relative to the folder."""
    bytes: int
    written_at: float
    """Unix time, by the store's clock."""


class ObjectStore:
    """The objects below `url`. Safe from any thread and process."""

    def __init__(self, url: ObjectUrl, client: Any = None, *, pause: Callable[[float], object] = time.sleep) -> None:
        """`client` is an S3 client of botocore, by default one of the standard configuration; `pause` waits before a
        retry."""
        self.url = url
        self._client = client or make_client()
        self._pause = pause
        self._prefix = f"{url.path}/" if url.path else ""

    def __str__(self) -> str:
        endpoint = str(self._client.meta.endpoint_url)
        return str(self.url) if endpoint.endswith(".amazonaws.com") else f"{self.url} at {endpoint}"

    def find(self, name: str) -> StoredObject | None:
        """An object's size and age; None if there is none."""
        try:
            answer = self.call("head_object", Key=self.key(name))
        except NotFound:
            return None
        return StoredObject(name, answer["ContentLength"], answer["LastModified"].timestamp())

    def renew(self, name: str) -> bool:
        """Make an object of at most `COPIED_BYTES` as if it was written now; whether it is there."""
        source = {"Bucket": self.url.bucket, "Key": self.key(name)}
        try:
            self.call("copy_object", Key=self.key(name), CopySource=source, MetadataDirective="REPLACE")
        except NotFound:
            return False
        return True

    def read(self, name: str) -> bytes:
        """An object's bytes; NotFound if there is none."""
        with self.reader(name) as content:
            return content.read()

    def reader(self, name: str) -> io.BufferedReader:
        """A stream of an object's bytes."""
        return io.BufferedReader(_ObjectReader(self, name), 2**20)

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Store an object, replacing one of that name."""
        if len(data) <= PART_BYTES:
            self.call("put_object", Key=self.key(name), Body=bytes(data), ContentMD5=_md5(data))
            return
        with self.writer(name) as upload:
            upload.write(data)

    @contextmanager
    def writer(self, name: str) -> Iterator[io.RawIOBase]:
        """A stream whose bytes become an object when the context ends without an exception, and nothing otherwise."""
        upload = _Upload(self, name)
        try:
            yield upload
            upload.complete()
        except BaseException:
            upload.abort()
            raise

    def objects(self) -> Iterator[StoredObject]:
        """Every object below the URL."""
        token: dict[str, Any] = {}
        while True:
            page = self.call("list_objects_v2", Prefix=self._prefix, **token)
            for entry in page.get("Contents", ()):
                name = entry["Key"].removeprefix(self._prefix)
                yield StoredObject(name, entry["Size"], entry["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, name: str) -> None:
        """Delete an object; a missing one is no error."""
        self.call("delete_object", Key=self.key(name))

    def abort_uploads(self, older_than_s: float) -> None:
        """Delete the parts of uploads that began so long ago and were not completed: their process was killed."""
        page = self.call("list_multipart_uploads", Prefix=self._prefix)
        for upload in page.get("Uploads", ()):
            if time.time() - upload["Initiated"].timestamp() >= older_than_s:
                self.call("abort_multipart_upload", Key=upload["Key"], UploadId=upload["UploadId"])

    def check(self) -> None:
        """Raise unless the bucket exists and can be listed; one attempt."""
        self.call("list_objects_v2", attempts=1, Prefix=self._prefix, MaxKeys=1)

    def call(self, operation: str, attempts: int = ATTEMPTS, **parameters: Any) -> Any:
        """One operation of S3 on the bucket, retried; NotFound, StoreUnusable, TrustError or LinkError if it fails."""
        method = getattr(self._client, operation)
        return self.retried(lambda: method(Bucket=self.url.bucket, **parameters), attempts)

    def retried(self, action: Callable[[], T], attempts: int = ATTEMPTS) -> T:
        """The action's result; repeated while it fails for a reason that may pass."""
        for failures in range(attempts):
            try:
                return action()
            except Exception as error:  # botocore and its transport raise many types, without a common base
                translated = self._translated(error)
                if not isinstance(translated, LinkError) or failures == attempts - 1:
                    if translated is error:
                        raise
                    raise translated from error
                self._pause(RETRY.pause_s(failures, random.random()))
        raise AssertionError("at least one attempt")

    def _translated(self, error: Exception) -> Exception:
        """botocore's error as one of ours; any other exception as it is."""
        from botocore import exceptions as raised

        if isinstance(error, raised.ClientError):
            return self._refusal(error.response)
        if isinstance(error, raised.SSLError):
            return TrustError(
                f"{self}: its certificate is not trusted ({_first_line(error)}): AWS_CA_BUNDLE names the file of a"
                " private authority"
            )
        if isinstance(error, _credential_errors()):
            return StoreUnusable(
                f"{self}: no usable credentials ({_first_line(error)}): set AWS_ACCESS_KEY_ID and"
                " AWS_SECRET_ACCESS_KEY, or a profile by AWS_PROFILE, or give this machine a role"
            )
        if isinstance(error, raised.HTTPClientError | raised.ConnectionError | raised.IncompleteReadError | OSError):
            return LinkError(
                f"{self} does not answer ({_first_line(error)}): check the network, and AWS_ENDPOINT_URL_S3 if the"
                " store is not Amazon's"
            )
        if isinstance(error, raised.BotoCoreError):
            return StoreUnusable(f"{self}: {_first_line(error)}")
        return error

    def _refusal(self, response: Mapping[str, Any]) -> EdgeError:
        """The error for an answer that is not a success."""
        given = str(response.get("Error", {}).get("Code", ""))
        code, status = _CODES.get(given, given), int(response["ResponseMetadata"]["HTTPStatusCode"])
        if code in _MISSING:
            return NotFound(f"{self} has no such object")
        if remedy := _REMEDIES.get(code):
            return StoreUnusable(f"{self}: {remedy}")
        if status in _TRANSIENT_STATUS or code in _TRANSIENT:
            return LinkError(f"{self} is overloaded or failing ({code or status}): try again later")
        text = str(response.get("Error", {}).get("Message", ""))[:200]
        return StoreUnusable(f"{self} refuses the request ({code or status}): {text}")

    def key(self, name: str) -> str:
        """An object's key in the bucket."""
        return self._prefix + name


class _ObjectReader(io.RawIOBase):
    """Reads one object, and continues after a broken connection where it was."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store = store
        self._key = store.key(name)
        self._position = self._size = 0
        self._version: dict[str, str] = {}
        self._body: Any = None
        store.retried(self._open)  # a missing object is known at once

    def readable(self) -> bool:
        """True: this is a readable stream."""
        return True

    def tell(self) -> int:
        """Bytes that were read."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; returns the number of bytes, 0 at the end."""
        return self._store.retried(lambda: self._read(memoryview(buffer).cast("B")))

    def close(self) -> None:
        """Close the connection, unless it was read to its end."""
        if self._body is not None:
            self._body.close()
        super().close()

    def _read(self, buffer: memoryview) -> int:
        if self._position == self._size:
            return 0
        try:
            data = (self._body or self._open()).read(min(len(buffer), self._size - self._position))
        except Exception:  # whatever it was: what is left of this body cannot be trusted
            self._body = None
            raise
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _open(self) -> Any:
        # The rest of an object that was replaced meanwhile would not fit what was read.
        begin = {"Range": f"bytes={self._position}-", **self._version} if self._position else {}
        answer = self._store.call("get_object", attempts=1, Key=self._key, **begin)
        self._version, self._body = {"IfMatch": answer["ETag"]}, answer["Body"]
        self._size = self._position + int(answer["ContentLength"])
        return self._body


class _Upload(io.RawIOBase):
    """An object that is uploaded in parts while it is written."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store = store
        self._name, self._key = name, store.key(name)
        self._pending = bytearray()
        self._written = 0
        self._parts: list[dict[str, Any]] = []
        self._id = ""

    def writable(self) -> bool:
        """True: this is a writable stream."""
        return True

    def write(self, data: Any) -> int:
        """Buffer bytes, and upload the parts that are complete."""
        view = memoryview(data).cast("B")
        self._written += len(view)
        taken = 0
        while taken < len(view):
            if len(self._pending) == self._part_bytes:
                self._upload_part()
            room = self._part_bytes - len(self._pending)
            self._pending += view[taken : taken + room]
            taken = min(taken + room, len(view))
        return len(view)

    @property
    def _part_bytes(self) -> int:
        return PART_BYTES * (1 + len(self._parts) // PARTS_OF_ONE_SIZE)

    def complete(self) -> None:
        """Make the object appear."""
        if not self._id:
            self._store.call("put_object", Key=self._key, Body=bytes(self._pending), ContentMD5=_md5(self._pending))
            return
        self._upload_part()
        parts = {"Parts": self._parts}
        try:
            self._store.call("complete_multipart_upload", Key=self._key, UploadId=self._id, MultipartUpload=parts)
        except NotFound:  # the answer of an attempt that succeeded may have been lost
            found = self._store.find(self._name)
            if found is None or found.bytes != self._written:
                raise

    def abort(self) -> None:
        """Delete what was uploaded; where the store does not answer, the parts stay until `abort_uploads`."""
        if self._id:
            try:
                self._store.call("abort_multipart_upload", attempts=1, Key=self._key, UploadId=self._id)
            except EdgeError as error:
                logging.getLogger(__name__).warning("parts of an upload stay for now: %s", error)

    def _upload_part(self) -> None:
        if not self._id:
            self._id = self._store.call("create_multipart_upload", Key=self._key)["UploadId"]
        body, number = bytes(self._pending), len(self._parts) + 1
        answer = self._store.call(
            "upload_part", Key=self._key, UploadId=self._id, PartNumber=number, Body=body, ContentMD5=_md5(body)
        )
        self._parts.append({"PartNumber": number, "ETag": answer["ETag"]})
        self._pending.clear()


def make_client() -> Any:
    """An S3 client of the standard variables and profile. UsageError without the extra, or for plain HTTP to another
    machine."""
    try:
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session
    except ModuleNotFoundError as error:
        raise UsageError("storage in S3 needs an extra: python -m pip install 'edgesplit[s3]'") from error
    logging.getLogger("botocore").setLevel(logging.WARNING)  # at DEBUG it logs signed requests
    # Retries are ours. Checksums that older stores do not know are left out: Content-MD5 protects uploads, and blobs
    # are verified by their SHA-256.
    config = Config(
        retries={"total_max_attempts": 1}, connect_timeout=CONNECT_TIMEOUT_S, read_timeout=READ_TIMEOUT_S,
        max_pool_connections=CONNECTIONS, request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )  # fmt: skip
    try:
        session = Session()
        region = session.get_config_variable("region") or "us-east-1"
        client = session.create_client("s3", region_name=region, config=config)
    except (BotoCoreError, ValueError) as error:
        raise UsageError(f"the S3 client's configuration is wrong: {_first_line(error)}") from error
    _check_endpoint(str(client.meta.endpoint_url))
    return client


def _check_endpoint(endpoint: str) -> None:
    """UsageError for one with credentials, which messages would show, and for plain HTTP except on this machine: models
    would be readable on the way."""
    parts = urlsplit(endpoint)
    if "@" in parts.netloc:
        raise UsageError("the endpoint of the object store has credentials: take them out, and set AWS_ACCESS_KEY_ID")
    if parts.scheme != "https" and not _is_loopback(parts.hostname or ""):
        raise UsageError(
            f"the object store at {endpoint} is reached without TLS: use its https:// address (AWS_CA_BUNDLE names the"
            " file of a private authority)"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _credential_errors() -> tuple[type[Exception], ...]:
    from botocore import exceptions as raised

    return (
        raised.NoCredentialsError, raised.PartialCredentialsError, raised.CredentialRetrievalError,
        raised.TokenRetrievalError, raised.ProfileNotFound, raised.UnauthorizedSSOTokenError, raised.SSOTokenLoadError,
    )  # fmt: skip


def _md5(data: bytes | bytearray | memoryview) -> str:
    """The Content-MD5 by which the store recognises bytes that were damaged on the way."""
    return b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
