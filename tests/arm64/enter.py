"""Runs a command in a namespace of its own, in which the kernel starts arm64 programs under a given qemu-user.

    python enter.py --qemu /path/to/qemu-aarch64 [--root FOLDER] [--bind FOLDER=WHERE] COMMAND [ARGUMENT...]

The kernel starts programs of other processors by what was registered with binfmt_misc. Since Linux 6.7 each user
namespace may have registrations of its own: this one's vanish with it, the machine's stay as they are. So do its mounts
and its processes: the first of them ends when whoever started this script does, and the kernel ends the rest with the
first. Killing it at any moment leaves nothing behind.

Uses the standard library only, so that it runs before anything is installed. Exit status: the command's; 97 where the
kernel refuses (and says what).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

REFUSED = 97
NEW_USER, NEW_PID, NEW_MOUNTS = 0x10000000, 0x20000000, 0x00020000
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000
PARENT_DEATH_SIGNAL = 1
ALL_USERS = "0 0 4294967295"
# ELF, 64 bits, little-endian, executable or shared, machine 183. The mask leaves out the ABI and the lower type bit.
MAGIC = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
MASK = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
ROOT_ENVIRONMENT = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8",
    "QEMU_CPU": "cortex-a72",  # a Raspberry Pi 4's; qemu's own choice has every extension, and is slower by half
}  # fmt: skip
BINFMT = Path("/proc/sys/fs/binfmt_misc")
LIBC = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """The kernel, or its administrator, does not let us; says what."""


def main() -> int:
    """The script."""
    options = _options()
    _end_with_parent()
    try:
        _own_users()
        first = _fork_into_own_pids()
        if first:
            return _status(first)
        return _first(options)
    except (OSError, Refused) as error:
        print(f"enter: {error}", file=sys.stderr)
        return REFUSED


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run a command where arm64 programs run under qemu-user.")
    parser.add_argument("--qemu", type=Path, required=True, metavar="FILE", help="a static qemu-aarch64")
    parser.add_argument("--root", type=Path, metavar="FOLDER", help="change to this root first")
    parser.add_argument("--bind", action="append", default=[], metavar="FOLDER=WHERE", help="show it there in the root")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser.parse_args()


def _own_users() -> None:
    """A user namespace in which every user is who it was: files keep their owners."""
    if os.geteuid() == 0:
        _mapped(_map_all)
    else:
        _mapped(_map_subordinates)
        os.setgid(0)
        os.setuid(0)


def _map_all(target: int) -> None:
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{target}/{name}").write_text(ALL_USERS)


def _mapped(write: Callable[[int], object]) -> None:
    """Enter a new user namespace; `write`, given our number, fills in its maps from outside of it."""
    outside = os.getpid()
    entered, told = os.pipe(), os.pipe()
    helper = os.fork()
    if helper == 0:
        status = 1
        try:
            os.read(entered[0], 1)
            write(outside)
            os.write(told[1], b"m")
            status = 0
        except (OSError, subprocess.CalledProcessError, Refused) as error:
            print(f"enter: {error}", file=sys.stderr)
        finally:
            os._exit(status)
    os.close(told[1])
    _check(LIBC.unshare(NEW_USER), "a user namespace of its own (unshare)")
    os.write(entered[1], b"e")
    if os.read(told[0], 1) != b"m":
        raise Refused("no users could be mapped into a namespace")
    os.waitpid(helper, 0)


def _map_subordinates(target: int) -> None:
    """The caller becomes root, the users lent to it by /etc/subuid the others; by the set-user-id helpers."""
    name = os.environ.get("USER", str(os.getuid()))
    for command, table, own in (("newuidmap", "/etc/subuid", os.getuid()), ("newgidmap", "/etc/subgid", os.getgid())):
        lent = [line.split(":") for line in Path(table).read_text().splitlines()]
        first, count = next(((one[1], one[2]) for one in lent if one[0] in (name, str(os.getuid()))), ("", ""))
        if not first:
            raise Refused(f"{table} lends no users to {name}")
        subprocess.run([command, str(target), "0", str(own), "1", "1", first, count], check=True)


def _fork_into_own_pids() -> int:
    """0 in the first process of a new process namespace, which ends with this one; elsewhere its number."""
    _check(LIBC.unshare(NEW_PID | NEW_MOUNTS), "namespaces of its own (unshare)")
    child = os.fork()
    if child == 0:
        LIBC.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    else:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda signum, _: os.kill(child, signum))
    return child


def _first(options: argparse.Namespace) -> int:
    """The first process of the namespace: it prepares it, starts the command and collects whoever ends."""
    _mount("none", "/", None, RECURSIVE | PRIVATE)
    _register(options.qemu)
    if options.root is not None:
        _furnish(options.root, options.bind)
    child = os.fork()
    if child == 0:
        _run(options)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, _: os.kill(child, signum))
    while True:
        ended, status = os.wait()
        if ended == child:
            return _code(status)


def _register(qemu: Path) -> None:
    """Have the kernel start arm64 programs by this file, which it opens now (F) and finds in any root.

    Under the name that Debian's own registration has: mmdebstrap looks there.
    """
    if not qemu.is_file():
        raise Refused(f"no qemu at {qemu}")
    _mount("binfmt_misc", str(BINFMT), "binfmt_misc", 0)
    (BINFMT / "register").write_text(f":qemu-aarch64:M::{MAGIC}:{MASK}:{qemu.resolve()}:FP")


def _furnish(root: Path, binds: list[str]) -> None:
    """What programs expect in a root: /proc of this namespace, devices, resolver, and the folders asked for."""
    (root / "proc").mkdir(exist_ok=True)
    try:
        _mount("proc", str(root / "proc"), "proc", 0)
    except Refused:  # where part of /proc is hidden, as in a container, the kernel allows no second one
        _mount("/proc", str(root / "proc"), None, BIND | RECURSIVE)
    (root / "dev").mkdir(exist_ok=True)
    _mount("/dev", str(root / "dev"), None, BIND | RECURSIVE)
    for bind in binds:
        folder, _, where = bind.partition("=")
        place = root / where.lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        _mount(folder, str(place), None, BIND | RECURSIVE)


def _run(options: argparse.Namespace) -> None:
    """Become the command; in a root with an environment of its own, none of this machine's settings."""
    environment = dict(os.environ)
    try:
        if options.root is not None:
            os.chroot(options.root)
            os.chdir("/")
            os.umask(0o022)
            environment = ROOT_ENVIRONMENT
        os.execvpe(options.command[0], options.command, environment)
    except OSError as error:
        print(f"enter: {options.command[0]}: {error.strerror}", file=sys.stderr)
    finally:
        os._exit(REFUSED)


def _mount(what: str, where: str, kind: str | None, flags: int) -> None:
    done = LIBC.mount(what.encode(), where.encode(), kind.encode() if kind else None, flags, None)
    _check(done, f"mounting {kind or what} at {where}")


def _check(done: int, what: str) -> None:
    if done != 0:
        raise Refused(f"{what}: {os.strerror(ctypes.get_errno())}")


def _end_with_parent() -> None:
    LIBC.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _status(child: int) -> int:
    return _code(os.waitpid(child, 0)[1])


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
