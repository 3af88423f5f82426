"""An installation whose blobs are in S3 (moto's mock of it over HTTP; no real store), with a real broker, PostgreSQL,
offload server and agent."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edgesplit.errors import EdgeError
from edgesplit_controller.settings import find_free_port
from support.edgesplit_processes import DIGITS, Cloud, FurtherProcess, eventually, frame_input, frames
from support.postgres import Postgres
from support.s3_server import Bucket, refuse


def has_no_files(folder: Path) -> bool:
    return not [path for path in folder.rglob("*") if path.is_file()]


def test_two_processes_with_folders_of_their_own_deliver_from_one_s3_mock_bucket(
    tmp_path: Path, postgres: Postgres, s3_mock_bucket: Bucket
) -> None:
    """A model pushed to one process is planned, signed and deployed by the other one, and reaches a device: neither
    folder has blobs, and each process has copies of what it read only."""
    url = postgres.database().replace("postgresql+psycopg://", "postgresql://")
    first = Cloud(tmp_path / "first", "--database", url, "--blobs", s3_mock_bucket.url)
    first.start()
    try:
        further = FurtherProcess(first, tmp_path / "further", "--database", url, "--blobs", s3_mock_bucket.url)
        further.start()
        try:
            first.push_digits()
            agent = first.agent("cam-1")
            further.edgectl("deploy", "digits", "--to", "cam-1", "--partition", "auto", "--wait", "120")
            jpeg, label = frames(1)[0]
            answer = eventually("an answer", lambda: agent.infer("digits", frame_input(jpeg)))
            assert int(next(iter(answer.outputs.values())).argmax()) == label
            for cloud in (first, further):
                assert not (cloud.data / "blobs").exists() and not has_no_files(cloud.data / "cache" / "blobs")
            assert all(name.startswith("edgesplit/") for name in s3_mock_bucket.names())
            parts = {part["name"]: part for part in first.api.get("/v1/components")}
            assert parts["object store"]["state"] == "good" and s3_mock_bucket.url in parts["object store"]["text"]
            assert s3_mock_bucket.variables["AWS_SECRET_ACCESS_KEY"] not in (tmp_path / "first" / "up.log").read_text()
        finally:
            further.stop()
    finally:
        first.stop()


def test_an_installation_moves_into_the_s3_mock_and_back(tmp_path: Path, s3_mock_bucket: Bucket) -> None:
    """Copied while it runs, changed when it is stopped; a start that would look elsewhere is refused, what the store
    refuses is in the API's answer, and backups go there."""
    cloud = Cloud(tmp_path)
    cloud.start()
    try:
        cloud.push_digits()
        blobs = sorted(path.name for path in (cloud.data / "blobs").glob("??/*"))
        refused = cloud.edgectl("blobs", "move", s3_mock_bucket.url, code=2)
        assert "a controller runs" in refused and f"{len(blobs)} blobs are in" in refused
        cloud.process.stop()
        moved = cloud.json("blobs", "move", s3_mock_bucket.url, "--remove")
        assert (moved["blobs"], moved["removed"]) == (len(blobs), True)
        assert sorted(name.rpartition("/")[2] for name in s3_mock_bucket.names()) == blobs
        assert cloud.json("config", "show")["blobs"] == s3_mock_bucket.url

        kept = cloud.data / "settings.json"
        with_store = kept.read_bytes()
        kept.unlink()
        refused = cloud.edgectl("up", "--api-port", "0", "--mqtt-port", "0", "--offload-port", "0", code=2)
        assert "none of the newest models" in refused and "--blobs" in refused
        kept.write_bytes(with_store)
        cloud.start()
        assert "s3cr3t" not in (tmp_path / "up.log").read_text()

        shutil.rmtree(cloud.data / "cache" / "blobs", ignore_errors=True)
        s3_mock_bucket.server.break_next("GET", "/edgesplit/", refuse("403 Forbidden", "AccessDenied"))
        with pytest.raises(EdgeError, match=r"access is denied: the credentials need s3:ListBucket"):
            cloud.api.download("/v1/models/digits/file")
        assert cloud.api.download("/v1/models/digits/file") == (DIGITS / "digits.onnx").read_bytes()
        ok = cloud.json("backup", f"s3://{s3_mock_bucket.name}/b/a.backup", "--without-keys", "--without-blobs")
        assert ok["bytes"] == len(s3_mock_bucket.store("b").read("a.backup"))
    finally:
        cloud.stop()
    assert cloud.json("blobs", "move", "files")["to"] == "files"
    assert sorted(path.name for path in (cloud.data / "blobs").glob("??/*")) == blobs


def test_a_store_that_does_not_work_is_named_at_the_start(
    tmp_path: Path, s3_mock_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line with the remedy, before anything runs."""
    cloud = Cloud(tmp_path)
    said = cloud.edgectl("up", "--blobs", "s3://missing-bucket/x", code=2)
    assert "there is no such bucket: create it" in said and "Traceback" not in said
    said = cloud.edgectl("up", "--blobs", "s3://key:s3cr3t@bucket", code=2)
    assert "AWS_PROFILE" in said and "s3cr3t" not in said
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{find_free_port('127.0.0.1')}")
    assert "AWS_ENDPOINT_URL_S3" in cloud.edgectl("up", "--blobs", s3_mock_bucket.url, code=5)
