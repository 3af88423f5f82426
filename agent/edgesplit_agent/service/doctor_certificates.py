"""Doctor's checks of the device's credentials: claim, certificates, and the chain of trust on disk."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from cryptography import x509

from edgesplit.errors import EdgeError, MalformedMessage, UsageError
from edgesplit.observability.doctor_findings import Finding, bad, good, warning
from edgesplit.trust.store import TrustStore
from edgesplit.trust.verification import verify_chain
from edgesplit_agent.control.certificate_renewal import RENEW_AT_RATIO
from edgesplit_agent.control.enrolment import credentials, read_claim
from edgesplit_agent.service.doctor_network import check_server
from edgesplit_agent.state.data_folder import DataFolder, Identity

CLAIM = "claim.json"
NEW_CLAIM = "edgectl device claim NAME --profile PROFILE --out FILE writes one; put it at {file}"


def known_identity(folder: DataFolder) -> Identity | None:
    """The device's identity, or None. A damaged file is left in place, for the agent to move aside."""
    if not (folder.certificate_file.exists() and folder.ca_file.exists() and folder.key_file.exists()):
        return None
    for name in ("enrolled.json", "enrolled.copy.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode((folder.identity / name).read_bytes(), type=Identity)
    return None


def check_claim(folder: DataFolder, now: float, *, online: bool) -> Iterator[Finding]:
    """Checks of a device that is not enrolled yet: its claim."""
    file = folder.path / CLAIM
    remedy = NEW_CLAIM.format(file=file)
    if not file.exists():
        yield bad("identity", "not enrolled, and there is no claim", remedy)
        return
    try:
        parsed_claim = read_claim(file)
    except (MalformedMessage, UsageError) as error:
        yield bad("identity", f"not enrolled, and the claim is invalid: {error}", remedy)
        return
    if parsed_claim.expires < now:
        yield bad(
            "identity",
            f"not enrolled, and the claim for {parsed_claim.device} expired on {_day(parsed_claim.expires)}",
            remedy,
        )
    else:
        yield warning(
            "identity",
            f"not enrolled yet as {parsed_claim.device}",
            "the agent enrols as soon as it reaches the controller",
        )
    if online:
        yield from check_server("controller", parsed_claim.controller_url, None, now, ca_pem=parsed_claim.ca_pem)


def check_certificates(folder: DataFolder, identity: Identity, now: float) -> Iterator[Finding]:
    """Who we are, and how long our certificates and our authority's last; by them, whether the clock is right."""
    used = credentials(folder)
    own = x509.load_pem_x509_certificate(used.certificate_file.read_bytes())
    begins, ends = own.not_valid_before_utc.timestamp(), own.not_valid_after_utc.timestamp()
    summary = f"{identity.device} ({identity.device_class}), certificate until {_day(ends)}"
    if now < begins:
        yield bad(
            "clock", f"{_day(now)} is before the certificate was issued", "set the clock: timedatectl set-ntp true"
        )
    if now > ends:
        yield warning("identity", summary, "it has expired; the agent renews it as soon as it reaches the controller")
    elif now > begins + RENEW_AT_RATIO * (ends - begins) + 86_400:
        yield warning(
            "identity",
            f"{summary}: renewal is overdue",
            "the controller could not be reached to renew it: see controller",
        )
    else:
        yield good("identity", summary)
    try:
        used.client_context()
    except UsageError as error:
        yield bad("key", str(error), "enrol again: --remove --purge, then install with a new claim")
    authority = x509.load_pem_x509_certificates(folder.ca_file.read_bytes())
    last = max(certificate.not_valid_after_utc.timestamp() for certificate in authority)
    if last < now + 30 * 86_400:
        yield bad("authority", f"ends on {_day(last)}", "renew the controller's authority: edgectl keys authority")


def check_trust_chain(folder: DataFolder, identity: Identity, now: float) -> Iterator[Finding]:
    """Check of the chain of signatures from the root of the claim to the releases that run."""
    root = identity.tuf_root.encode()
    if not folder.trust.is_dir():
        yield good("trust", "nothing was deployed here yet")
        return
    try:
        # On a copy: a TrustStore repairs what it reads.
        with tempfile.TemporaryDirectory(prefix="edgesplit-doctor-") as copy:
            shutil.copytree(folder.trust, Path(copy) / "trust")
            verified = verify_chain(TrustStore(Path(copy) / "trust", root).proof(), root)
    except (EdgeError, shutil.Error) as error:
        yield bad(
            "trust",
            f"the chain of signatures on disk is invalid: {error}",
            "nothing new is installed; move trust/ away and restart the agent",
        )
        return
    ends = {"root": verified.root.expires.timestamp(), "releases": verified.targets.expires.timestamp()}
    name, earliest = min(ends.items(), key=lambda item: item[1])
    summary = f"root {verified.root.version}, releases {verified.targets.version}"
    if earliest < now:
        yield warning(
            "trust",
            f"{summary}: {name} expired on {_day(earliest)}",
            "running releases go on; edgectl keys renew allows installations again",
        )
    else:
        yield good("trust", f"{summary}, valid until {_day(earliest)}")


def _day(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(unix_s))
