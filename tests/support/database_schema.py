"""A database's schema and what migrations put into it, as facts that do not depend on the order of columns."""

import re
from typing import Any

OF_POSTGRES = {
    "columns": "SELECT table_name, column_name, data_type, is_nullable, column_default, character_maximum_length "
    "FROM information_schema.columns WHERE table_schema = current_schema()",
    "constraints": "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint "
    "WHERE connamespace = current_schema()::regnamespace",
    "indexes": "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = current_schema()",
}
DATA = {
    "rights": "SELECT g.name, c.app_label, p.codename, p.name FROM auth_group_permissions gp "
    "JOIN auth_group g ON g.id = gp.group_id JOIN auth_permission p ON p.id = gp.permission_id "
    "JOIN django_content_type c ON c.id = p.content_type_id",
    "schedules": "SELECT name, func, schedule_type, repeats FROM django_q_schedule",
}
OURS = ("feedback_", "rl_")


def schema_facts(connection: Any) -> dict[str, Any]:
    """Tables and indexes of our apps, groups' rights and schedules, sorted: equal where two databases are.

    SQLite: a table as the words of its CREATE TABLE, sorted, so that columns may stand in any order. PostgreSQL: its
    columns, constraints and indexes, each as the server says it.
    """
    with connection.cursor() as cursor:

        def rows(query: str) -> list[list[Any]]:
            cursor.execute(query)
            return sorted(([*row] for row in cursor.fetchall()), key=str)

        found: dict[str, Any] = {name: rows(query) for name, query in DATA.items()}
        if connection.vendor == "postgresql":
            for name, query in OF_POSTGRES.items():
                found[name] = [row for row in rows(query) if row[0].startswith(OURS)]
        else:
            written = rows("SELECT name, type, tbl_name, sql FROM sqlite_master WHERE sql IS NOT NULL")
            for name, kind, table, sql in written:
                if table.startswith(OURS):
                    words = re.findall(r"[\w.']+|[^\s\w]", sql)
                    found[f"{kind} {name}"] = sorted(words) if kind == "table" else words
    return found
