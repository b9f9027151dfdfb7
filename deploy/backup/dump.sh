#!/usr/bin/env bash
# Dumps the servers' databases to $BACKUP, a full path, while they run. RUN reaches the container; RUN= uses PGHOST,
# PGUSER and PGPASSWORD (docs/backup.md).
set -eu
RUN=${RUN-docker compose --file deploy/compose.yaml exec -T --env PGUSER=postgres postgres}
mkdir -p "$BACKUP"
for database in mlflow mlflow_auth prefect; do $RUN pg_dump --format=custom "$database" > "$BACKUP/$database.dump"; done
