"""Credentials for an offload server on another machine: issued by the installation's own authority, for the given
names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from edgesplit.errors import UsageError
from edgesplit.trust.identity import Credentials
from edgesplit_cli.main import cli
from edgesplit_controller.pki.authority import Authority


def written(data: Path, out: Path, *words: str) -> Path:
    arguments = ["offload", "credentials", "--out", str(out), "--json", *words]
    done = CliRunner().invoke(cli, ["--data", str(data), *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert [Path(file).name for file in json.loads(done.output)["files"]] == ["ca.pem", "offload.key", "offload.pem"]
    return out


def test_server_credentials_are_valid_for_the_given_names(tmp_path: Path) -> None:
    """Issued by the controller's own authority, with a private key file; a server starts with them; requested again
    they are the same."""
    authority = Authority(tmp_path / "data" / "keys")
    out = written(tmp_path / "data", tmp_path / "out", "--host", "offload.example", "--host", "10.0.0.3")
    certificate = x509.load_pem_x509_certificate((out / "offload.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"offload.example"}
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.3"]
    purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(purposes) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert (out / "ca.pem").read_text() == authority.ca_pem
    assert (out / "offload.key").stat().st_mode & 0o077 == 0
    assert Credentials(out / "offload.key", out / "offload.pem", out / "ca.pem").server_context()
    again = written(tmp_path / "data", tmp_path / "again", "--host", "offload.example", "--host", "10.0.0.3")
    assert (again / "offload.pem").read_bytes() == (out / "offload.pem").read_bytes()


def test_server_credentials_create_no_authority(tmp_path: Path) -> None:
    """A wrong --data would give credentials that no device trusts."""
    words = ["--data", str(tmp_path), "offload", "credentials", "--host", "h", "--out", str(tmp_path / "out")]
    with pytest.raises(UsageError, match="not a controller's data folder yet"):
        CliRunner().invoke(cli, words, catch_exceptions=False)
    assert not (tmp_path / "keys").exists() and not (tmp_path / "out").exists()


def test_an_invalid_server_name_is_refused(tmp_path: Path) -> None:
    """Before anything is written."""
    Authority(tmp_path / "keys")
    words = ["--data", str(tmp_path), "offload", "credentials", "--host", "https://h", "--out", str(tmp_path / "out")]
    with pytest.raises(UsageError, match="--host"):
        CliRunner().invoke(cli, words, catch_exceptions=False)
    assert not (tmp_path / "out").exists()
