"""Redaction of secrets in text: anything that looks like a key, token or passphrase is replaced before a log line
leaves the machine.

It prefers false positives. Digests keep their first twelve digits, by which logs refer to releases; any other long and
random-looking word is replaced.
"""

from __future__ import annotations

import re

REDACTED = "[redacted]"
_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]{1,64}-----.*?(?:-----END [A-Z0-9 ]{1,64}-----|\Z)", re.DOTALL)
_NAMED = re.compile(
    r"(?i)(?<![a-z])(authorization|bearer|token|pass(?:word|phrase|wd)?|secret|pin|api[_-]?key|private[_-]?key|content[_-]?key|"
    r"cookie|session[_-]?id|csrf)(?!\W{0,4}(?:bearer\s+|basic\s+)?\[redacted\](?![^\s\"',;&]))(\W{1,4}(?:bearer\s+|basic\s+)?)([^\s\"',;&]{3,})"
)
_USER_INFO = re.compile(r"(?i)\b([a-z][a-z0-9+.-]{1,20}://)[^\s/@:]{1,200}:[^\s/@]{1,200}@")
_HEX = re.compile(r"\b([0-9a-fA-F]{12})[0-9a-fA-F]{20,}\b")
_RANDOM = re.compile(r"[A-Za-z0-9+/_-]{32,}={0,2}")
_WORDY = re.compile(r"[a-z_/.-]{0,400}|[a-z0-9]{1,24}(?:[-_/][a-z0-9]{1,24}){1,40}")


def redact(text: str) -> str:
    """Replace everything in `text` that looks like a secret."""
    text = _PEM.sub(REDACTED, text)
    text = _USER_INFO.sub(rf"\1{REDACTED}@", text)
    text = _NAMED.sub(lambda match: f"{match[1]}{match[2]}{REDACTED}", text)
    text = _HEX.sub(r"\1…", text)
    return _RANDOM.sub(lambda match: match[0] if _WORDY.fullmatch(match[0]) else REDACTED, text)


def redact_known(text: str, secrets: frozenset[str]) -> str:
    """Replace every occurrence of these known secrets in `text`, as a second line of defence."""
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return text
