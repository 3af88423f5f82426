#!/bin/sh
# Installs the edgesplit agent from the folder of this script, without a network. Run as root. Idempotent; after an
# interruption the next run continues.
#
# It checks every file's digest, installs into PREFIX/versions/VERSION-ID beside the running version, switches the link
# PREFIX/current by one rename, creates the agent's user and service, and moves the claim from this medium into the data
# folder.
set -eu

usage() {
  cat <<'TEXT'
usage: install.sh [--claim FILE] [--data DIR] [--prefix DIR] [--user NAME] [--units DIR] [--env FILE] [--no-service]
                  [--coral]
       install.sh --remove [--purge]
  --claim FILE   the device's claim: moved into the data folder (default: claim.json beside this script, if there)
  --data DIR     the agent's own folder (default /var/lib/edgesplit-agent)
  --prefix DIR   where it is installed (default /opt/edgesplit-agent)
  --user NAME    whom it runs as; made if it is not there (default edgesplit-agent)
  --units DIR    where systemd's units go (default /etc/systemd/system)
  --env FILE     environment of the service (default /etc/edgesplit-agent.env), which gets the line OPTIONS="…" of
                 options.env beside this script, if there
  --no-service   install only: `edgesplit-agent supervise` keeps it running where there is no systemd
  --coral        install libedgetpu from the kit too, for a Coral accelerator
  --remove       take the agent and its service away; --purge: its data folder and its user too
TEXT
}

say() { printf 'install: %s\n' "$*"; }
fail() { printf 'install: %s\n' "$*" >&2; exit 1; }
misused() { printf 'install: %s\n' "$*" >&2; usage >&2; exit 2; }

# Print a value of kit.json, which has one line for each.
value() { sed -n "s/^ \"$1\": \"\{0,1\}\([^\",]*\)\"\{0,1\},\{0,1\}\$/\1/p" "$kit/kit.json"; }

# Print the files of kit.json in sha256sum's format.
sums() {
  sed -n 's/^  {"name": "\([a-z0-9._-]*\)", "bytes": [0-9]*, "sha256": "\([0-9a-f]*\)"},\{0,1\}$/\2  \1/p' "$kit/kit.json"
}

main() {
  claim='' data=/var/lib/edgesplit-agent prefix=/opt/edgesplit-agent user=edgesplit-agent units=/etc/systemd/system
  environment=/etc/edgesplit-agent.env
  service=yes coral=no remove=no purge=no
  kit=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
  while [ $# -gt 0 ]; do
    case $1 in
      --claim | --data | --prefix | --user | --units | --env) [ $# -ge 2 ] || misused "$1 needs a value" ;;
    esac
    case $1 in
      --claim) claim=$2; shift ;;
      --data) data=$2; shift ;;
      --prefix) prefix=$2; shift ;;
      --user) user=$2; shift ;;
      --units) units=$2; shift ;;
      --env) environment=$2; shift ;;
      --no-service) service=no ;;
      --coral) coral=yes ;;
      --remove) remove=yes ;;
      --purge) purge=yes ;;
      -h | --help) usage; exit 0 ;;
      *) misused "no such option: $1" ;;
    esac
    shift
  done
  case $data in /?*) ;; *) misused "--data $data: give a full path" ;; esac
  case $prefix in /?*) ;; *) misused "--prefix $prefix: give a full path" ;; esac
  [ $purge = no ] || [ $remove = yes ] || misused '--purge goes with --remove'
  umask 022
  unset PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE || true
  if [ "$(id -u)" != 0 ]; then
    [ $service = no ] && [ "$user" = "$(id -un)" ] ||
      fail "run this as root, or for yourself: --no-service --user $(id -un) --prefix DIR --data DIR"
  fi
  if [ $remove = yes ]; then take_away; else put_there; fi
}

put_there() {
  mkdir -p "$prefix"
  hold
  describe
  place=$prefix/versions/$id
  if [ -e "$place/.whole" ]; then
    say "$version is installed already"
  else
    check_kit
    check_machine
    check_space
    find_python
    install_version
  fi
  [ $coral = no ] || install_coral
  switch
  make_user
  make_data
  take_claim
  if [ $service = yes ]; then install_service; else say_how; fi
  say 'done'
}

hold() { # lock: one installation at a time
  if command -v flock >/dev/null; then
    exec 9>"$prefix/.lock"
    flock -n 9 || fail "another installation runs on $prefix"
  fi
}

describe() {
  [ -r "$kit/kit.json" ] || fail "no kit.json beside $0: this folder is no kit"
  [ "$(tail -n 1 "$kit/kit.json")" = '}' ] || fail 'kit.json is cut off: copy the kit again'
  [ "$(value format)" = edgesplit.kit/1 ] || fail "kit.json is of format '$(value format)', not edgesplit.kit/1"
  version=$(value version) python=$(value python) machine=$(value machine) glibc=$(value glibc)
  needs=$(value needs_bytes)
  case $version in '' | *[!a-zA-Z0-9.+-]* | .*) fail 'kit.json names no version: copy the kit again' ;; esac
  id=$version-$(sha256sum "$kit/kit.json" | cut -c1-8)
}

check_kit() {
  say 'checking the kit'
  [ "$(sums | wc -l)" = "$(grep -c '^  {"name"' "$kit/kit.json")" ] || fail 'kit.json is spoilt: copy the kit again'
  sums | while read -r digest name; do
    [ -r "$kit/$name" ] || fail "$name is missing: copy the kit again"
    [ "$(sha256sum "$kit/$name" | cut -c1-64)" = "$digest" ] || fail "$name is spoilt: copy the kit again"
  done
}

check_machine() {
  [ "$(uname -m)" = "$machine" ] || fail "this kit is for $machine, this machine is $(uname -m): make a kit for it"
  have=$(getconf GNU_LIBC_VERSION 2>/dev/null | sed -n 's/^glibc //p')
  [ -n "$have" ] || fail 'this system has no GNU C library: edgesplit has no wheels for it'
  oldest=$(printf '%s\n%s\n' "$glibc" "$have" | sort -t. -k1,1n -k2,2n | head -n 1)
  [ "$oldest" = "$glibc" ] || fail "this kit needs glibc $glibc or newer, here is $have: take a newer system"
}

check_space() {
  free=$(df -Pk "$prefix" | awk 'NR == 2 { print $4 }')
  [ "$free" -ge $((needs / 1024)) ] || fail "$prefix has $((free / 1024)) MB free, installing takes $((needs / 1048576))"
}

fits() { # is this the Python that the kit's wheels are for? (32-bit programs run under a 64-bit kernel too)
  "$1" -c 'import struct, sys, venv
sys.exit(struct.calcsize("P") != 8 or sys.implementation.name != "cpython"
         or "%d.%d" % sys.version_info[:2] != sys.argv[1])' "$python" >/dev/null 2>&1
}

find_python() {
  for interpreter in "/usr/bin/python$python" "python$python" python3 "/usr/local/bin/python$python"; do
    if fits "$interpreter"; then
      interpreter=$(command -v "$interpreter")
      say "using $interpreter"
      return
    fi
  done
  [ -e "$kit/python.tar.gz" ] ||
    fail "no 64-bit Python $python here: make the kit for this system's Python (edgectl kit build --python), or with --interpreter"
  unpack_python
}

unpack_python() {
  own=$prefix/python/$(sums | sed -n 's/^\(.\{12\}\).*  python.tar.gz$/\1/p')
  interpreter=$own/bin/python$python
  if [ ! -e "$own" ]; then
    say 'unpacking the Python of the kit'
    rm -rf "$prefix/python/.part"
    mkdir -p "$prefix/python/.part"
    tar -xzf "$kit/python.tar.gz" -C "$prefix/python/.part"
    sync
    mv -T "$prefix/python/.part/python" "$own"
    rm -rf "$prefix/python/.part"
  fi
  fits "$interpreter" || fail "the Python of the kit does not run here, or is not $python: make the kit again"
}

install_version() {
  say "installing $version"
  mkdir -p "$prefix/versions"
  rm -rf "$place" "$prefix/.unpacked" # left by an interrupted run
  trap 'rm -rf "$place" "$prefix/.unpacked"' EXIT # on failure, free the space again
  mkdir "$prefix/.unpacked"
  tar -xf "$kit/wheels.tar" -C "$prefix/.unpacked"
  mkdir "$prefix/.unpacked/installer"
  mv "$prefix"/.unpacked/pip-*.whl "$prefix/.unpacked/installer/"
  "$interpreter" -m venv --without-pip "$place"
  PIP_CONFIG_FILE=/dev/null "$place/bin/python" -I "$(echo "$prefix"/.unpacked/installer/pip-*.whl)/pip" \
    install --quiet --isolated --no-index --no-deps --no-cache-dir --disable-pip-version-check \
    --root-user-action=ignore --no-compile "$prefix"/.unpacked/*.whl ||
    fail 'the wheels could not be installed: see above, then run this again'
  rm -rf "$prefix/.unpacked"
  "$place/bin/edgesplit-agent" warm >/dev/null || fail 'what was installed does not run here: see above'
  cp "$kit/kit.json" "$place/kit.json"
  sync
  : >"$place/.whole"
  sync
  trap - EXIT
}

install_coral() {
  [ -e "$kit/coral.tar" ] || fail 'this kit holds no libedgetpu: make it with --coral'
  say 'installing libedgetpu'
  rm -rf "$prefix/.coral"
  mkdir "$prefix/.coral"
  tar -xf "$kit/coral.tar" -C "$prefix/.coral"
  dpkg -i "$prefix"/.coral/*.deb
  rm -rf "$prefix/.coral"
}

switch() {
  before=$(readlink "$prefix/current" || true)
  switched=no
  [ "$before" = "versions/$id" ] && return
  ln -sfn "versions/$id" "$prefix/.current"
  mv -fT "$prefix/.current" "$prefix/current"
  sync
  switched=yes
  say "$prefix/current is $version now"
  for old in "$prefix"/versions/*; do # keep the previous version for a rollback
    case versions/${old##*/} in "versions/$id" | "$before") ;; *) rm -rf "$old" ;; esac
  done
}

make_user() {
  [ "$user" != "$(id -un)" ] || return 0
  id "$user" >/dev/null 2>&1 ||
    useradd --system --user-group --no-create-home --home-dir "$data" --shell /usr/sbin/nologin "$user"
  for group in video render plugdev apex; do # cameras and GPUs, Coral by USB and by PCIe
    if getent group "$group" >/dev/null; then usermod -a -G "$group" "$user"; fi
  done
}

make_data() {
  mkdir -p "$data"
  chmod 700 "$data"
  [ "$(stat -c %U "$data")" = "$user" ] || chown -R "$user:" "$data"
}

take_claim() {
  [ -n "$claim" ] || claim=$kit/claim.json
  if [ ! -e "$claim" ]; then
    [ -e "$data/claim.json" ] || [ -e "$data/identity/enrolled.json" ] ||
      say "no claim yet: put one at $data/claim.json (edgectl device claim NAME writes it)"
    return 0
  fi
  [ "$claim" -ef "$data/claim.json" ] && return
  if [ -n "$(tr -d '\000' <"$claim" | head -c 1)" ]; then # only zeros: an earlier run took it and was killed while erasing
    say 'taking the claim'
    rm -f "$data/.claim"
    (umask 077 && cp "$claim" "$data/.claim")
    [ "$user" = "$(id -un)" ] || chown "$user:" "$data/.claim"
    mv -f "$data/.claim" "$data/claim.json"
    sync # a claim can be used once: keep it here before erasing it there
  fi
  erase "$claim" || say "cannot erase $claim: do it yourself, it is a secret until the device is enrolled"
}

erase() { # anyone with a card reader can read a boot partition: overwrite before deleting
  dd if=/dev/zero of="$1" bs="$(wc -c <"$1")" count=1 conv=notrunc,fsync 2>/dev/null && rm -f "$1" && sync
}

install_service() {
  if ! command -v systemctl >/dev/null; then
    say_how
    return
  fi
  unit=$units/edgesplit-agent.service
  mkdir -p "$units"
  "$prefix/current/bin/edgesplit-agent" unit --prefix "$prefix" --data "$data" --user "$user" >"$unit.new"
  changed=no
  cmp -s "$unit.new" "$unit" || changed=yes
  mv -f "$unit.new" "$unit"
  take_options
  sync
  systemctl daemon-reload
  systemctl enable --quiet edgesplit-agent.service
  if [ $switched = yes ] || [ $changed = yes ]; then
    systemctl restart --no-block edgesplit-agent.service
  else
    systemctl start --no-block edgesplit-agent.service
  fi
  say 'edgesplit-agent.service runs: systemctl status edgesplit-agent'
}

take_options() { # other lines of the environment file are somebody else's, and stay
  [ -e "$kit/options.env" ] || return 0
  mkdir -p "$(dirname -- "$environment")"
  [ -e "$environment" ] || (umask 077 && : >"$environment") # it may come to hold a proxy's password
  rm -f "$environment.new"
  cp -p "$environment" "$environment.new"
  { grep -v '^OPTIONS=' "$environment" || true; cat "$kit/options.env"; } >"$environment.new"
  cmp -s "$environment.new" "$environment" || changed=yes
  mv -f "$environment.new" "$environment"
}

say_how() { say "to run it: $prefix/current/bin/edgesplit-agent supervise --data $data --claim $data/claim.json"; }

take_away() {
  if [ $service = yes ] && [ -e "$units/edgesplit-agent.service" ] && command -v systemctl >/dev/null; then
    say 'stopping the service'
    systemctl disable --quiet --now edgesplit-agent.service || true
  fi
  if [ $service = yes ]; then
    rm -f "$units/edgesplit-agent.service" "$units/edgesplit-agent.service.new"
    if command -v systemctl >/dev/null; then systemctl daemon-reload || true; fi
  fi
  if [ -e "$prefix" ]; then
    [ -e "$prefix/.lock" ] || [ -d "$prefix/versions" ] || fail "$prefix was not made by this script: left as it is"
    say "removing $prefix"
    rm -rf "$prefix"
  fi
  if [ $purge = yes ]; then
    if [ -e "$data" ]; then
      [ -d "$data/identity" ] || [ -e "$data/claim.json" ] || [ -e "$data/lock" ] || rmdir "$data" 2>/dev/null ||
        fail "$data is no agent's folder: left as it is"
      say "removing $data"
      [ ! -e "$data/claim.json" ] || erase "$data/claim.json" || true
      rm -rf "$data"
    fi
    if [ "$user" != "$(id -un)" ] && [ "$user" = edgesplit-agent ] && id "$user" >/dev/null 2>&1; then
      userdel "$user" || say "$user still has processes: end them, and then userdel $user"
    fi
  fi
  say 'removed'
}

main "$@"
