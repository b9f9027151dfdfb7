#!/usr/bin/env bash
# Brings the dumps of dump.sh back, with MLflow, Prefect and the workers stopped (docs/backup.md).
set -eu
RUN=${RUN-docker compose --file deploy/compose.yaml exec -T --env PGUSER=postgres postgres}
for database in mlflow mlflow_auth prefect; do
  $RUN pg_restore --clean --create --if-exists --exit-on-error --dbname=postgres < "$BACKUP/$database.dump"
done
