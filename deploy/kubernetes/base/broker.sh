#!/bin/sh
# mosquitto that reads its revocation list again when that changes: `broker.sh FOLDER`, with the files that
# `edgectl up --print-broker-config mosquitto` wrote. A controller in another container writes the list
# (--on-revocation) and cannot send signals here.
set -u
folder=${1:?usage: broker.sh FOLDER}

known=$(cksum <"$folder/revoked.pem") # before mosquitto reads it: a list that comes meanwhile is read again
mosquitto -c "$folder/mosquitto.conf" &
broker=$!
trap 'kill -TERM "$broker" 2>/dev/null' TERM INT

while kill -0 "$broker" 2>/dev/null; do
  sleep 1 &
  wait $!
  now=$(cksum <"$folder/revoked.pem")
  if [ "$now" != "$known" ]; then
    known=$now
    echo "revocation list changed: read again" >&2
    kill -HUP "$broker"
  fi
done
wait "$broker"
