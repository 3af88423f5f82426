"""A process that joins a running controller takes from it what it was not given."""

from __future__ import annotations

import json
from pathlib import Path

from edgesplit_controller.app.main import _settings_of_joining
from edgesplit_controller.settings import Settings, find_free_port


def test_a_process_that_joins_uses_the_object_store_of_the_running_controller(tmp_path: Path) -> None:
    """Unless it is given one: otherwise it would store models where no other process looks."""
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "ca.pem").touch()
    running = {"mqtt_host": "hub", "mqtt_port": 8883, "blobs": "s3://models/edgesplit"}
    (tmp_path / "controller.json").write_text(json.dumps(running))
    port = find_free_port("127.0.0.1")
    for given, used in (("", "s3://models/edgesplit"), ("s3://other", "s3://other")):
        settings = Settings(data=tmp_path, join=True, database="postgresql://hub/x", blobs=given, api_port=port)
        assert _settings_of_joining(settings).blobs == used
