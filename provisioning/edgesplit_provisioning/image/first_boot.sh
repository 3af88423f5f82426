#!/bin/sh
# First boot of a device made by `edgectl flash`. Runs as root, from the boot partition, at each boot until every step is
# done; after an interruption the next run continues.
#
# 1. The claim is moved off the boot partition, which any card reader can read, before anything else.
# 2. The agent is installed from the folder of this file.
# 3. The key of the wireless network is erased from the boot partition once the system has its own copy.
set -u

main() {
  here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd) || exit 1
  boot=$(dirname -- "$here")
  root=${EDGESPLIT_ROOT:-}
  state=$root/var/lib/edgesplit-first-boot
  umask 077
  mkdir -p "$state" "$root/var/log" || exit 1
  [ -e "$state/done" ] && exit 0
  log=$root/var/log/edgesplit-first-boot.log
  [ "$(cat "$log" 2>/dev/null | wc -c)" -lt 262144 ] || mv "$log" "$log.1"
  exec >>"$log" 2>&1
  say "first boot: begun"

  take_claim || { tell "the claim could not be moved off the boot partition"; exit 1; }
  install_agent || { tell "the agent could not be installed"; exit 1; }
  clear_secrets || { tell "the key of the wireless network is still needed"; exit 1; }

  rm -f "$here/first-boot.log"
  rm -f "$state/told"
  : >"$state/done"
  sync
  rm -f "$root/etc/systemd/system/multi-user.target.wants/edgesplit-first-boot.service"
  say "first boot: done"
  exit 0
}

say() { printf '%s %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$*"; }

# Report why the first boot is not done, also on the boot partition for a card reader; only when the reason changes, since
# cards wear out. The log contains no secret.
tell() {
  say "first boot: not done: $*; it is tried again"
  [ "$*" = "$(cat "$state/told" 2>/dev/null)" ] && [ -e "$here/first-boot.log" ] && return
  tail -n 60 "$log" >"$here/first-boot.log"
  echo "$*" >"$state/told"
  sync
}

take_claim() {
  [ -f "$here/claim.json" ] || return 0
  if [ -s "$here/claim.json" ] && [ -n "$(tr -d '\000' <"$here/claim.json" | head -c 1)" ]; then
    cp "$here/claim.json" "$state/claim.part" || return 1
    sync
    mv "$state/claim.part" "$state/claim.json" || return 1
    sync
  fi
  forget "$here/claim.json"
}

install_agent() {
  [ -e "$state/installed" ] && return 0
  coral=
  [ ! -e "$here/coral.tar" ] || coral=--coral
  if [ -s "$state/claim.json" ]; then
    sh "$here/install.sh" --claim "$state/claim.json" $coral || return 1
  else
    sh "$here/install.sh" $coral || return 1
  fi
  sync
  : >"$state/installed"
  sync
}

clear_secrets() {
  if [ -f "$boot/network-config" ] && key=$(key_in "$boot/network-config"); then
    is_kept "$key" || return 1
    sync
    overwrite "$boot/network-config"
    if [ -f "$here/network-config.clean" ]; then
      cp "$here/network-config.clean" "$boot/network-config" || return 1
    fi
    sync
  fi
  # firstrun.sh removes itself, unless the power failed just before. While the kernel command line names it, it is still due.
  if [ -f "$boot/firstrun.sh" ] && ! grep -q 'systemd\.run=' "$boot/cmdline.txt"; then
    forget "$boot/firstrun.sh"
  fi
  return 0
}

# Print the network's key (64 hex digits); fails where there is none.
key_in() { grep -Eo '(^|[^0-9a-f])[0-9a-f]{64}($|[^0-9a-f])' "$1" | grep -Eo '[0-9a-f]{64}' | head -n 1 | grep .; }

is_kept() {
  grep -rqsF -e "$1" "$root/etc/netplan" "$root/etc/NetworkManager/system-connections" \
    "$root/etc/wpa_supplicant" "$root/etc/network"
}

# Overwrite a file's own blocks with zeros, synced to the card before the next step.
overwrite() {
  length=$(wc -c <"$1") || return 1
  head -c "$length" /dev/zero | dd of="$1" bs=65536 conv=notrunc,fsync 2>/dev/null
}

forget() {
  overwrite "$1" && sync && rm -f "$1" && sync
}

main "$@"
