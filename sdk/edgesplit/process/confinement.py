"""Confinement of a process that loads an untrusted model: what the kernel takes from it, for as long as it lives.

The process confines itself before it loads anything. Resource limits always hold. Network and other processes
(seccomp) and files (Landlock) are taken where the kernel allows it; `unavailable` says where it does not. Nothing here
needs privileges. See docs/decisions/0051-confined-models.md.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.process.lifecycle import forbid_core_dumps, gain_no_privileges

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_EPERM: Final = 1
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_PR_GET_SECCOMP: Final = 21
_CAPABILITY_VERSION: Final = 0x20080522
"""Version 3 of the kernel's interface to capabilities, which has two words for each set."""
_ALLOWED, _DENIED = 0x7FFF0000, 0x00050000 | _EPERM
"""Seccomp's verdicts: run the call; answer it with EPERM."""
_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
"""Codes of the four instructions (classic BPF) that the filter consists of."""
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
"""Offsets in what the filter reads (`struct seccomp_data`)."""
_OTHER_ABI: Final = 0x40000000
"""System calls from this number on are those of another binary interface (x32) of the same processor."""
_FAMILIES: Final = (socket.AF_UNIX, getattr(socket, "AF_NETLINK", 16))
"""Socket families that stay: neither leaves the machine, and drivers ask the kernel for devices by netlink."""


@dataclass(frozen=True, slots=True)
class _SystemCalls:
    """Numbers of the system calls that the filter knows, on one kind of processor."""

    architecture: int
    socket: int
    denied: tuple[int, ...]
    """ptrace, process_vm_readv, process_vm_writev, io_uring_setup (which opens sockets without `socket`)."""


_SYSTEM_CALLS: Final = {
    "x86_64": _SystemCalls(0xC000003E, 41, (101, 310, 311, 425)),
    "aarch64": _SystemCalls(0xC00000B7, 198, (117, 270, 271, 425)),
}

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
"""System calls of Landlock, on every processor."""
_READS_OF_FILE, _WRITES_OF_FILE = 1 << 0 | 1 << 2, 1 << 1
_READ_FOLDER, _WRITES_OF_FOLDER = 1 << 3, sum(1 << bit for bit in range(4, 13))
_FILE_RIGHTS_SINCE: Final = {2: 1 << 13, 3: 1 << 14}
"""Rights by the version of Landlock that knows them first: linking between folders, truncating."""
_TCP_SINCE, _TCP_RIGHTS = 4, 1 << 0 | 1 << 1
_SCOPES_SINCE, _SCOPES = 6, 1 << 0 | 1 << 1
"""Abstract sockets and signals of processes that are not confined with this one."""
_SYSTEM_FOLDERS: Final = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/proc", "/sys", "/run/udev")
"""Folders of programs and libraries that every process may read, beside those that Python imports from."""
_SETTINGS: Final = tuple(f"/etc/{name}" for name in ("ld.so.cache", "localtime", "nsswitch.conf", "passwd", "group"))
"""Settings that the C library reads. Others may be secrets."""
_OURS: Final = "edgesplit"
"""How the names of our packages begin."""
_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_ACCELERATORS: Final = ("/dev/bus/usb", "/dev/apex_0", "/dev/apex_1")
"""Device files that a measurement on an Edge TPU opens."""


class Confinement(msgspec.Struct, frozen=True, kw_only=True):
    """What a process may still use."""

    memory_bytes: int
    """Address space."""
    cpu_s: int
    """Processor seconds on all cores together; then the kernel ends the process (SIGXCPU)."""
    file_bytes: int
    """Size of each file that it writes."""
    folder: str = ""
    """The folder that it may read and write, with what is in it; empty: none."""
    readable: tuple[str, ...] = ()
    """Further folders that it may read, beside those of the system and of Python's packages."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Something that this kernel does not take from a confined process."""

    what: str
    reason: str
    remedy: str


def confine(limits: Confinement) -> None:
    """Confine this process and the threads that it starts, for good."""
    lower_limit(resource.RLIMIT_AS, limits.memory_bytes)
    lower_limit(resource.RLIMIT_CPU, limits.cpu_s)
    lower_limit(resource.RLIMIT_FSIZE, limits.file_bytes)
    forbid_core_dumps()
    give_way_when_memory_is_short(1000)
    gain_no_privileges()
    drop_capabilities()
    hide_files([limits.folder] if limits.folder else [], [*_import_folders(), *limits.readable])
    cut_off_network()


def lower_limit(limit: int, value: int) -> None:
    """Lower a resource limit of this process, for good: to `value`, or to its present limit where that is lower. The
    hard limit of processor time is a second higher, so that the signal at the soft one says what happened."""
    _, hard = resource.getrlimit(limit)
    allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
    beyond = 1 if limit == resource.RLIMIT_CPU and (hard == resource.RLIM_INFINITY or allowed < hard) else 0
    resource.setrlimit(limit, (allowed, allowed + beyond))


def give_way_when_memory_is_short(adjustment: int) -> None:
    """Make this process one of the first that the kernel kills when the machine's memory runs out (`oom_score_adj`, up
    to 1000)."""
    path = Path("/proc/self/oom_score_adj")
    with suppress(OSError, ValueError):  # only Linux has it; it may always be raised
        path.write_text(str(max(adjustment, int(path.read_text()))))


def drop_capabilities() -> None:
    """Take from this process, for good, what root may do beyond other users: with it a process reads the environment of
    others past every other rule."""
    none = struct.pack("6I", *[0] * 6)  # effective, permitted and inheritable ones, in two words each
    _LIBC.capset(struct.pack("Ii", _CAPABILITY_VERSION, 0), none)


def cut_off_network() -> bool:
    """Take from this process, for good, sockets to other machines and the memory of other processes (seccomp). False
    where the kernel does not allow it. The process must not be able to gain privileges (`gain_no_privileges`)."""
    calls = _system_calls()
    if calls is None:
        return False
    code = _filter(calls)
    raw = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(raw))
    return bool(_LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0) == 0)


def _system_calls() -> _SystemCalls | None:
    """Those of this process; None where they are not known. A program for 32 bits has others than the kernel's own."""
    return _SYSTEM_CALLS.get(platform.machine()) if struct.calcsize("P") == 8 else None


def _filter(calls: _SystemCalls) -> bytes:
    """The filter's instructions. A jump counts the instructions that it leaves out."""
    families, denied = len(_FAMILIES), len(calls.denied)
    # After the first five: `denied` comparisons, that with `socket`, two verdicts; then the family, and two verdicts.
    program = [
        (_LOAD_WORD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_EQUAL, 1, 0, calls.architecture),
        (_RETURN, 0, 0, _DENIED),
        (_LOAD_WORD, 0, 0, _NUMBER_AT),
        (_JUMP_AT_LEAST, denied + 2, 0, _OTHER_ABI),
        *((_JUMP_EQUAL, denied + 1 - place, 0, number) for place, number in enumerate(calls.denied)),
        (_JUMP_EQUAL, 2, 0, calls.socket),
        (_RETURN, 0, 0, _ALLOWED),
        (_RETURN, 0, 0, _DENIED),
        (_LOAD_WORD, 0, 0, _FIRST_ARGUMENT_AT),
        *((_JUMP_EQUAL, families - place, 0, int(family)) for place, family in enumerate(_FAMILIES)),
        (_RETURN, 0, 0, _DENIED),
        (_RETURN, 0, 0, _ALLOWED),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def hide_files(writable: Iterable[str], readable: Iterable[str]) -> bool:
    """Take from this process, for good, all files but these folders, those of the system and some device files, and
    signals to other processes (Landlock). False where the kernel does not allow it."""
    version = _landlock_version()
    if version < 1:
        return False
    extra = sum(right for since, right in _FILE_RIGHTS_SINCE.items() if version >= since)
    read, write = _READS_OF_FILE | _READ_FOLDER, _WRITES_OF_FILE | _WRITES_OF_FOLDER | extra
    tcp = _TCP_RIGHTS if version >= _TCP_SINCE else 0
    scopes = _SCOPES if version >= _SCOPES_SINCE else 0
    rules = struct.pack("QQQ", read | write, tcp, scopes)
    size = 24 if version >= _SCOPES_SINCE else 16 if version >= _TCP_SINCE else 8
    ruleset = _LIBC.syscall(_LANDLOCK_CREATE, rules, size, 0)
    if ruleset < 0:
        return False
    try:
        for path in dict.fromkeys((*_SYSTEM_FOLDERS, *_SETTINGS, *readable)):
            _allow(ruleset, path, read)
        for path in dict.fromkeys((*_DEVICES, *_ACCELERATORS, *writable)):
            _allow(ruleset, path, read | write)
        return bool(_LIBC.syscall(_LANDLOCK_RESTRICT, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Allow these rights at the path and below; nothing where it does not exist."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not os.path.isdir(path):  # the kernel refuses a folder's rights on a file
            rights &= _READS_OF_FILE | _WRITES_OF_FILE | _FILE_RIGHTS_SINCE[3]
        _LIBC.syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", rights, descriptor), 0)
    finally:
        os.close(descriptor)


def _import_folders() -> list[str]:
    """Folders of this Python and its packages. Of the module path only folders that hold packages: it may contain the
    folder from which a service was started."""
    prefixes = [sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.path.realpath(sys.executable))]
    return [*prefixes, *(path for path in map(os.path.abspath, sys.path) if _holds_packages(path))]


def _holds_packages(path: str) -> bool:
    if path.endswith("-packages"):
        return True
    with suppress(OSError):
        return any((Path(path) / name / "__init__.py").exists() for name in os.listdir(path) if name.startswith(_OURS))
    return False


def _landlock_version() -> int:
    """Version of Landlock in this kernel; 0 or less where it is absent or switched off."""
    return int(_LIBC.syscall(_LANDLOCK_CREATE, None, 0, 1)) if sys.platform == "linux" else 0


def unavailable() -> list[Unavailable]:
    """What this kernel does not take from a confined process; empty where everything is taken."""
    missing = []
    if _system_calls() is None or _LIBC.prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) < 0:
        missing.append(
            Unavailable("network", f"no seccomp filter on this {platform.machine()} kernel", "run on x86_64 or arm64")
        )
    version = _landlock_version()
    if version < 1:
        remedy = "use Linux 5.13 or later with Landlock (lsm=landlock,... on the kernel's command line)"
        missing.append(Unavailable("files", "the kernel has no Landlock, or it is switched off", remedy))
    elif version < _SCOPES_SINCE:
        reason = f"the kernel's Landlock has version {version}, signals are taken from {_SCOPES_SINCE} on"
        missing.append(Unavailable("signals to other processes", reason, "use Linux 6.12 or later"))
    return missing


warm_up_structs(__name__)
