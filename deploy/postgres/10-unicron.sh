#!/bin/sh
# Runs once, when the database is created: a role without superuser rights that owns the log's database.
# psql quotes the values itself (:"name" and :'name'), so any password is safe.
set -eu

psql --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname postgres \
    --set password="$LOG_PASSWORD" <<'SQL'
CREATE ROLE unicron LOGIN PASSWORD :'password';
CREATE DATABASE unicron OWNER unicron ENCODING 'UTF8' TEMPLATE template0;
REVOKE ALL ON DATABASE unicron FROM PUBLIC;
-- A commit that was reported is on disk: the log is the truth.
ALTER DATABASE unicron SET synchronous_commit = 'on';
SQL
