"""Files for an external broker, operated by someone else: configuration, access rules, certificates, the revocation
list, and a README on where each file goes (`edgectl up --print-broker-config`).

The rules are those of the embedded broker. The files for mosquitto are started and attacked by the tests; those for
EMQX follow its documentation (5.8) and their grammar is checked, but no EMQX was run with them here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from edgesplit.atomic_files import write_durably
from edgesplit.errors import UsageError
from edgesplit.limits import LIMITS
from edgesplit.mqtt.messages import ROOT
from edgesplit.mqtt.session import MAX_PACKET_BYTES
from edgesplit.trust.identity import Credentials
from edgesplit_controller.messaging.broker import (
    CONTROLLER,
    DEVICE_READS,
    DEVICE_WRITES,
    MEMORY_BYTES,
    access_rules,
    configuration,
)
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.settings import BrokerKind

EXTERNAL_BROKER: Final = "broker-elsewhere"
"""Name of the external broker's certificate in the controller's keys folder."""
MAILBOX_MESSAGES: Final = 1_000
"""Messages that may wait for one client's process in EMQX."""
HEAP_MB: Final = 32
"""Memory of one client's process in EMQX: 16 MiB of queue, and as much again."""


def write_broker_files(
    kind: BrokerKind, folder: Path, authority: Authority, revoked: bytes, hosts: Sequence[str], port: int, *,
    installed_at: Path | None = None, memory_bytes: int = MEMORY_BYTES,
) -> list[Path]:  # fmt: skip
    """Write what a broker reachable as `hosts` needs into `folder`; return the files. Paths inside the files refer to
    `installed_at`, if that is another folder. `revoked` is the current revocation list, and `memory_bytes` the memory
    that mosquitto may allocate. Raises UsageError if the folder cannot be written."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is no folder: give another with --out")
    issued = authority.issue_server(EXTERNAL_BROKER, hosts)
    target = (installed_at or folder).absolute()
    credentials = Credentials(target / "broker.key", target / "broker.pem", target / "ca.pem")
    files = {
        "ca.pem": authority.ca_pem.encode(),
        "broker.pem": issued.certificate_file.read_bytes(),
        "broker.key": issued.key_file.read_bytes(),
        "revoked.pem": revoked,
        **{name: text.encode() for name, text in _FILES[kind](target, credentials, port, memory_bytes).items()},
    }
    try:
        for name, data in files.items():
            write_durably(folder / name, data, mode=0o600 if name == "broker.key" else 0o644)
    except OSError as error:
        raise UsageError(f"cannot write in {folder}: {error.strerror}; choose another folder with --out") from error
    return [folder / name for name in sorted(files)]


def _mosquitto(folder: Path, credentials: Credentials, port: int, memory_bytes: int) -> Mapping[str, str]:
    revoked = folder / "revoked.pem"
    return {
        "mosquitto.conf": configuration(folder, credentials, "", port, "mosquitto", memory_bytes, revoked),
        "acl": access_rules(),
        "README.txt": _MOSQUITTO.format(place=folder),
    }


def _emqx(folder: Path, credentials: Credentials, port: int, memory_bytes: int) -> Mapping[str, str]:
    del memory_bytes  # EMQX bounds each client's process instead
    return {
        "emqx.conf": emqx_configuration(folder, credentials, port),
        "acl.conf": emqx_rules(),
        "README.txt": _EMQX.format(place=folder),
    }


def emqx_configuration(folder: Path, credentials: Credentials, port: int) -> str:
    """Lines to append to emqx.conf, in HOCON."""
    lines = [
        "# A certificate's name is user and client id; only TLS 1.3 with our certificates comes in.",
        *(f"listeners.{other}.default.enable = false" for other in ("tcp", "ws", "wss")),
        "listeners.ssl.default {",
        f'  bind = "0.0.0.0:{port}"',
        "  tcp_options {",
        "    nodelay = true",
        "    send_timeout = 15s",
        "    send_timeout_close = true",
        "  }",
        "  ssl_options {",
        f"    cacertfile = {_quoted(credentials.ca_file)}",
        f"    certfile = {_quoted(credentials.certificate_file)}",
        f"    keyfile = {_quoted(credentials.key_file)}",
        '    versions = ["tlsv1.3"]',
        "    verify = verify_peer",
        "    fail_if_no_peer_cert = true",
        "  }",
        "}",
        "mqtt {",
        "  peer_cert_as_username = cn",
        "  peer_cert_as_clientid = cn",
        f"  max_packet_size = {MAX_PACKET_BYTES}B",
        "  max_mqueue_len = 256",
        "  mqueue_store_qos0 = true",
        "  shared_subscription = true",
        "}",
        "# A client that makes the broker remember too much is disconnected; by send_timeout, one that does not read.",
        "force_shutdown {",
        "  enable = true",
        f"  max_mailbox_size = {MAILBOX_MESSAGES}",
        f"  max_heap_size = {HEAP_MB}MB",
        "}",
        "retainer {",
        "  enable = true",
        f"  max_payload_size = {LIMITS.message_bytes}B",
        "}",
        "authorization {",
        "  no_match = deny",
        "  deny_action = ignore",
        "  sources = [",
        f"    {{ type = file, enable = true, path = {_quoted(folder / 'acl.conf')} }}",
        "  ]",
        "}",
    ]
    return "\n".join(lines) + "\n"


def emqx_rules() -> str:
    """acl.conf for EMQX: the rules of `broker.access_rules` as Erlang terms."""
    own = {action: [f"{ROOT}/${{username}}/{kind}" for kind in kinds] for action, kinds in _ACTIONS.items()}
    reads = [*own["subscribe"], f"{ROOT}/chunk/+"]
    rules = [
        f'{{allow, {{username, {{re, "^{CONTROLLER}([.][0-9]+)?$"}}}}, all, ["{ROOT}/#"]}}.',
        f"{{allow, all, publish, {json.dumps(own['publish'])}}}.",
        f"{{allow, all, subscribe, {json.dumps(reads)}}}.",
        "{deny, all}.",
    ]
    return "\n".join(rules) + "\n"


def _quoted(path: Path) -> str:
    return json.dumps(str(path))


_ACTIONS: Final[Mapping[str, tuple[str, ...]]] = {"publish": DEVICE_WRITES, "subscribe": DEVICE_READS}
_FILES: Final[Mapping[BrokerKind, Callable[[Path, Credentials, int, int], Mapping[str, str]]]] = {
    "mosquitto": _mosquitto,
    "emqx": _emqx,
}
_COMMON: Final = """\
Broker of an edgesplit controller. All of these files lie in {place}, readable by the broker's user alone:

    ca.pem        the authority; only certificates that it issued are accepted
    broker.pem    this broker's certificate        broker.key    its private key: a secret
    revoked.pem   the revoked certificates, as of now

"""
_MOSQUITTO: Final = (
    _COMMON
    + """    mosquitto.conf, acl    mosquitto 2.0 or later:  mosquitto -c {place}/mosquitto.conf

Start the controller with  edgectl up --broker mqtts://HOST:PORT --on-revocation COMMAND

Floods. Use 2.0.16 or later: before it a client that does not read its acknowledgements makes mosquitto grow, up to
memory_limit, at which any client may be disconnected. memory_limit lies below what the machine or container has
(edgectl up --broker-memory). The controller counts the messages that reach it, and keeps a device out that sends too
many. It does not see subscriptions, pings and refused messages at a broker that it does not run: where devices may be
hostile, limit each address in front of the broker, to 256 kB/s say, and watch its processor time. An example for
nftables is in docs/operations.md.

Revocation. mosquitto reads revoked.pem again on SIGHUP, and leaves sessions alone; the controller ends the session of a
revoked device itself. COMMAND brings the file in $EDGESPLIT_CRL here, whole, and sends the signal. On the same machine:

    install -m 640 -g mosquitto "$EDGESPLIT_CRL" {place}/.new && mv {place}/.new {place}/revoked.pem
        && pkill -HUP -x mosquitto

and on another one the same by scp and ssh. It runs at each start of the controller, at each revocation and every ten
days, and again every few seconds until it succeeds. The broker's certificate lasts a year, and so does a list: by an
expired one mosquitto refuses every client. Write these files anew before the certificate's end.
"""
)
_EMQX: Final = (
    _COMMON
    + """    emqx.conf     append it to EMQX's own (5.8 or later)        acl.conf    the rules that it names

Start the controller with  edgectl up --broker mqtts://HOST:PORT

These two files follow EMQX's documentation; they were not tried with an EMQX.

Floods. A client that does not read for 15 s, or whose process grows beyond 32 MB, is disconnected. EMQX's rate limits
(messages_rate, bytes_rate) hold for every client of a listener, the controller's too, which sends all chunks: set them
on a listener for devices alone. The controller does not see subscriptions, pings and refused messages here.

Revocation. EMQX checks lists of revoked certificates only by a distribution point in the certificate, and these have
none: nothing here keeps a revoked device from connecting again. The controller ends its session when it is revoked and
with each message that it sends, and its messages are dropped. Where that is not enough, let a proxy end TLS in front
of EMQX by ca.pem and revoked.pem (HAProxy: `verify required ca-file ca.pem crl-file revoked.pem` and
`send-proxy-v2-ssl-cn`; EMQX: `listeners.tcp.default.proxy_protocol = true`), and reload it with --on-revocation
COMMAND, which finds a new list in $EDGESPLIT_CRL. The broker's certificate lasts a year: write these files anew before
its end.
"""
)
