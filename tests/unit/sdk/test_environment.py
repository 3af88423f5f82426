"""The environment of processes that run models."""

from __future__ import annotations

import pytest

from edgesplit.process.environment import environment_for_models
from edgesplit_partitioner.sandbox.child_process import child_environment


def test_processes_that_run_models_get_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the object store's credentials nor the database's URL or a passphrase; everything else stays."""
    secrets = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "EDGESPLIT_DATABASE", "EDGESPLIT_PASSPHRASE", "PGPASSWORD")
    for name in secrets:
        monkeypatch.setenv(name, "s3cr3t")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    for environment in (environment_for_models(), child_environment()):
        assert not environment.keys() & {*secrets} and "s3cr3t" not in environment.values()
        assert environment["OMP_NUM_THREADS"] == "3" and environment["PATH"]
