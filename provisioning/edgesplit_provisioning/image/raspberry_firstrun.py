"""`firstrun.sh`: configures Raspberry Pi OS Bookworm at its first boot, before the normal start. No I/O.

The kernel command line makes systemd run it (systemd.run=) and reboot. It removes itself from that line once everything
it does is synced to the card, so that after a power cut it runs again; then it overwrites and deletes itself.
"""

from __future__ import annotations

from shlex import quote

from edgesplit_provisioning.image import systemd_unit
from edgesplit_provisioning.image.cloud_init import regulatory_domain
from edgesplit_provisioning.image.options import CardSettings
from edgesplit_provisioning.wifi import CONNECTION, Wifi, network_manager_keyfile

NAME = "firstrun.sh"


def kernel_parameters(mount: str, wifi: Wifi | None) -> list[str]:
    """Kernel parameters that run the script. The path is that of the mounted partition, since systemd runs it once file
    systems are mounted."""
    return [
        *regulatory_domain(wifi),
        f"systemd.run={mount}/{NAME}",
        "systemd.run_success_action=reboot",
        "systemd.unit=kernel-command-line.target",
    ]


def script(settings: CardSettings, mount: str) -> bytes:
    """The content of `firstrun.sh`."""
    parts = [_HEAD, _variables(settings, mount), _NAME, _USER, _KEYS if settings.ssh_keys else "", _sudo(settings)]
    parts += [_wifi(settings.wifi), f"  (\n{systemd_unit.install_commands(mount)}  )", _RETRY, _TAIL]
    return "".join(parts).encode("ascii")


def _variables(settings: CardSettings, mount: str) -> str:
    keys = "\n".join(settings.ssh_keys)
    return f"""  boot=$root{mount}
  hostname={quote(settings.hostname)}
  user={quote(settings.user)}
  keys={_shell_quoted(keys)}
"""


def _shell_quoted(text: str) -> str:
    """The text quoted for the shell, in ASCII; other characters are given as octal bytes."""
    if text.isascii():
        return quote(text)
    return f"$(printf '{''.join(map(_octal, text.encode()))}')"


def _octal(byte: int) -> str:
    return chr(byte) if 0x20 <= byte < 0x7F and byte not in b"\\%'" else f"\\{byte:03o}"


_HEAD = """#!/bin/sh
# Written by `edgectl flash`: the first boot of this device. It removes itself.
main() {
  root=${EDGESPLIT_ROOT:-}
  umask 022
  mkdir -p "$root/var/log"
  exec >>"$root/var/log/edgesplit-firstrun.log" 2>&1
"""
_NAME = """
  printf '%s\\n' "$hostname" >"$root/etc/hostname"
  grep -v '^127\\.0\\.1\\.1[[:space:]]' "$root/etc/hosts" >"$root/etc/hosts.part"
  printf '127.0.1.1\\t%s\\n' "$hostname" >>"$root/etc/hosts.part"
  mv "$root/etc/hosts.part" "$root/etc/hosts"
"""
_USER = """
  # The image's own first user gets this name, or there is none yet. Nobody gets a password.
  if [ -x "$root/usr/lib/userconf-pi/userconf" ]; then
    "$root/usr/lib/userconf-pi/userconf" "$user" '*'
  fi
  getent passwd "$user" >/dev/null || useradd --create-home --shell /bin/bash "$user"
  usermod -p '*' "$user"
"""
_KEYS = """
  home=$root$(getent passwd "$user" | cut -d: -f6)
  mkdir -p "$home/.ssh"
  printf '%s\\n' "$keys" >"$home/.ssh/authorized_keys"
  chmod 700 "$home/.ssh"
  chmod 600 "$home/.ssh/authorized_keys"
  chown -R "$user:" "$home/.ssh"
  mkdir -p "$root/etc/ssh/sshd_config.d"
  printf 'PasswordAuthentication no\\n' >"$root/etc/ssh/sshd_config.d/10-edgesplit.conf"
  systemctl enable ssh
"""


def _sudo(settings: CardSettings) -> str:
    if not settings.sudo:
        return '\n  rm -f "$root"/etc/sudoers.d/010_*-nopasswd\n'
    return """
  printf '%s ALL=(ALL) NOPASSWD: ALL\\n' "$user" >"$root/etc/sudoers.d/edgesplit.part"
  chmod 440 "$root/etc/sudoers.d/edgesplit.part"
  mv "$root/etc/sudoers.d/edgesplit.part" "$root/etc/sudoers.d/010_edgesplit"
"""


def _wifi(wifi: Wifi | None) -> str:
    if wifi is None:
        return ""
    return f"""
  connections=$root/etc/NetworkManager/system-connections
  mkdir -p "$connections"
  (
    umask 077
    cat >"$connections/{CONNECTION}.part" <<'END'
{network_manager_keyfile(wifi)}END
  )
  mv "$connections/{CONNECTION}.part" "$connections/{CONNECTION}.nmconnection"
  rfkill unblock wifi
  for switch in "$root"/var/lib/systemd/rfkill/*:wlan; do
    [ -e "$switch" ] && echo 0 >"$switch"
  done
"""


_RETRY = """ || {
    # Not armed: the next boot tries again; after three it goes on without, so that somebody can look at the device.
    echo x >>"$boot/edgesplit/firstrun.tries"
    [ "$(wc -l <"$boot/edgesplit/firstrun.tries")" -gt 3 ] || exit 0
  }
"""
_TAIL = f"""
  sync
  rm -f "$boot/edgesplit/firstrun.tries"
  sed 's/ systemd\\.run=[^ ]*//; s/ systemd\\.run_success_action=[^ ]*//; s/ systemd\\.unit=[^ ]*//' \\
    "$boot/cmdline.txt" >"$boot/cmdline.new" || exit 0
  [ -s "$boot/cmdline.new" ] || exit 0
  sync
  mv "$boot/cmdline.new" "$boot/cmdline.txt"
  sync
  # It holds the network's key: zeros over its blocks. The shell has read all of it by now.
  head -c "$(wc -c <"$boot/{NAME}")" /dev/zero | dd of="$boot/{NAME}" bs=65536 conv=notrunc,fsync
  rm -f "$boot/{NAME}"
  sync
  exit 0
}}
main
"""
