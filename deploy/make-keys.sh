#!/bin/sh
# Makes what is missing of a cluster's keys for NATS: sh make-keys.sh FOLDER URL_OF_NATS NODE...
# With NATS_TLS=1 also a certificate, for the name of NATS's container.
# Runs as root in a container of the control image (service `keys` in docker-compose.yml). A credential has mode 0600, so each
# gets the user of the container that reads it: 10001 is the services', root the agents'. NATS reads what everybody may.
set -eu
umask 022

keys=$1 server=$2
shift 2
unicron keys make --keys "$keys" --server "$server"
for node in "$@"; do
    test -e "$keys/nodes/$node.json" || unicron node add "$node" --keys "$keys" 2>/dev/null
done
if [ -n "${NATS_TLS:-}" ]; then
    unicron keys tls nats --keys "$keys" --mounted /etc/nats/keys
fi
chown 10001:10001 "$keys"/*.json
