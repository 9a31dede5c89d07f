"""Storage: validation of writes, rows made of them, the SQL behind each write, tombstones and skipped rows."""
