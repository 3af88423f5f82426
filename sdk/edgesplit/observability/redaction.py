"""Text without secrets: what keys, tokens and passphrases look like is replaced before a line leaves the machine.

Rather too much than too little: digests keep their first twelve digits, by which releases are named in logs; anything
else that is long and looks random goes.
"""

from __future__ import annotations

import re

GONE = "[redacted]"
_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]{1,64}-----.*?(?:-----END [A-Z0-9 ]{1,64}-----|\Z)", re.DOTALL)
_NAMED = re.compile(
    r"(?i)(?<![a-z])(authorization|bearer|token|pass(?:word|phrase|wd)?|secret|pin|api[_-]?key|private[_-]?key|content[_-]?key|"
    r"cookie|session[_-]?id|csrf)(?!\W{0,4}(?:bearer\s+|basic\s+)?\[redacted\](?![^\s\"',;&]))(\W{1,4}(?:bearer\s+|basic\s+)?)([^\s\"',;&]{3,})"
)
_USER_INFO = re.compile(r"(?i)\b([a-z][a-z0-9+.-]{1,20}://)[^\s/@:]{1,200}:[^\s/@]{1,200}@")
_HEX = re.compile(r"\b([0-9a-fA-F]{12})[0-9a-fA-F]{20,}\b")
_RANDOM = re.compile(r"[A-Za-z0-9+/_-]{32,}={0,2}")
_WORDY = re.compile(r"[a-z_/.-]{0,400}|[a-z0-9]{1,24}(?:[-_/][a-z0-9]{1,24}){1,40}")


def redacted(text: str) -> str:
    """The same, without what looks like a secret."""
    text = _PEM.sub(GONE, text)
    text = _USER_INFO.sub(rf"\1{GONE}@", text)
    text = _NAMED.sub(lambda found: f"{found[1]}{found[2]}{GONE}", text)
    text = _HEX.sub(r"\1…", text)
    return _RANDOM.sub(lambda found: found[0] if _WORDY.fullmatch(found[0]) else GONE, text)


def without(text: str, secrets: frozenset[str]) -> str:
    """The same, without these very words, should one of them have come through."""
    for secret in secrets:
        text = text.replace(secret, GONE)
    return text
