# The start of the image postgres, as far as docker-compose.yml uses it: makes the database once, runs the scripts for it, and
# then listens.
set -eu
if ! test -s "$PGDATA/PG_VERSION"; then
    printf '%s\n' "${POSTGRES_PASSWORD:?}" > /tmp/password
    initdb --username="$POSTGRES_USER" --pwfile=/tmp/password --auth-local=trust --auth-host=scram-sha-256 --encoding=UTF8
    rm /tmp/password
    printf 'host all all all scram-sha-256\n' >> "$PGDATA/pg_hba.conf"
    # Without a TCP port, so that nobody takes it for ready.
    pg_ctl --pgdata="$PGDATA" --options="-c listen_addresses=''" --wait start
    for script in /docker-entrypoint-initdb.d/*.sh; do
        sh "$script"
    done
    pg_ctl --pgdata="$PGDATA" --mode=fast --wait stop
fi
exec "$@" -c listen_addresses='*'
