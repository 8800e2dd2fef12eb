"""The guards of the log's tables: triggers that refuse every change but an append, whatever program connects.

``schema`` adds them with the tables; a verification asks which are missing.
"""

from __future__ import annotations

from sqlalchemy import Connection, inspect

from shared.log.base import TABLES, Base

_UNIQUE = [["event_id"], ["stream", "stream_version"]]

_POSTGRESQL_FUNCTION = """CREATE OR REPLACE FUNCTION log_refuse() RETURNS trigger LANGUAGE plpgsql AS
       $$ BEGIN RAISE EXCEPTION 'the event log is append-only: %% refused', TG_OP; END $$"""

_POSTGRESQL_TRIGGERS = [
    """CREATE TRIGGER log_no_change BEFORE UPDATE OR DELETE ON log
       FOR EACH ROW EXECUTE FUNCTION log_refuse()""",
    """CREATE TRIGGER log_no_truncate BEFORE TRUNCATE ON log
       FOR EACH STATEMENT EXECUTE FUNCTION log_refuse()""",
]


def add_guards(connection: Connection, base: Base) -> None:
    """Create the triggers of a log that was just created; the base's tables have their rows already."""
    if connection.dialect.name == "sqlite":
        statements = _sqlite_triggers(base)
    else:
        statements = [_POSTGRESQL_FUNCTION, *_postgresql_triggers(base)]
    for statement in statements:
        connection.exec_driver_sql(statement)


def lacking_guards(connection: Connection, base: Base) -> list[str]:
    """Return which triggers and constraints the log's tables lack that refuse changes, in words."""
    sqlite = connection.dialect.name == "sqlite"
    found = _sqlite_guards(connection, base) if sqlite else _postgresql_guards(connection, base)
    inspector = inspect(connection)
    unique = [sorted(item["column_names"]) for item in inspector.get_unique_constraints("log")]
    found += [f"the constraint that {' and '.join(names)} are unique" for names in _UNIQUE if names not in unique]
    if inspector.get_pk_constraint("log")["constrained_columns"] != ["position"]:
        found.append("the primary key position")
    return found


def _sqlite_triggers(base: Base) -> list[str]:
    # The base's position is a constant of the trigger: what becomes of the base's row later does not change it.
    statements = [
        """CREATE TRIGGER log_no_update BEFORE UPDATE ON log
       BEGIN SELECT RAISE(ABORT, 'the event log is append-only: UPDATE refused'); END""",
        """CREATE TRIGGER log_no_delete BEFORE DELETE ON log
       BEGIN SELECT RAISE(ABORT, 'the event log is append-only: DELETE refused'); END""",
        # INSERT OR REPLACE deletes rows without the trigger above. A row passes if it replaces none and leaves no gap.
        f"""CREATE TRIGGER log_no_replace BEFORE INSERT ON log
       WHEN NEW.position IS NOT (SELECT coalesce(max(position), {base.position}) + 1 FROM log)
         OR EXISTS (SELECT 1 FROM log WHERE event_id = NEW.event_id)
         OR EXISTS (SELECT 1 FROM log WHERE stream = NEW.stream AND stream_version = NEW.stream_version)
       BEGIN SELECT RAISE(ABORT, 'the event log is append-only: REPLACE and gaps refused'); END""",  # nosec B608
    ]
    if base.is_cut:
        statements += [
            f"""CREATE TRIGGER {table.name}_no_{what.lower()} BEFORE {what} ON {table.name}
       BEGIN SELECT RAISE(ABORT, 'the base of the event log does not change: {what} refused'); END"""
            for table in TABLES
            for what in ("INSERT", "UPDATE", "DELETE")
        ]
    return statements


def _postgresql_triggers(base: Base) -> list[str]:
    statements = list(_POSTGRESQL_TRIGGERS)
    if base.is_cut:
        statements += [
            f"""CREATE TRIGGER {table.name}_no_change BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON {table.name}
       FOR EACH STATEMENT EXECUTE FUNCTION log_refuse()"""
            for table in TABLES
        ]
    return statements


def _sqlite_guards(connection: Connection, base: Base) -> list[str]:
    rows = connection.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")
    present = {name: sql for name, sql in rows}
    found = []
    for statement in _sqlite_triggers(base):
        name = statement.split()[2]
        if name not in present:
            found.append(f"the trigger {name}")
        elif present[name] != statement:
            found.append(f"the trigger {name} as it was created")
    return found


def _postgresql_guards(connection: Connection, base: Base) -> list[str]:
    tables = ["log", *(table.name for table in TABLES if base.is_cut)]
    places = ", ".join(f"'{name}'::regclass" for name in tables)
    rows = connection.exec_driver_sql(
        f"SELECT tgname FROM pg_trigger WHERE tgrelid IN ({places}) "  # nosec B608 # names of constants
        "AND NOT tgisinternal AND tgenabled IN ('O', 'A')"
    )
    present = {row.tgname for row in rows}
    names = [statement.split()[2] for statement in _postgresql_triggers(base)]
    return [f"the trigger {name}" for name in names if name not in present]
