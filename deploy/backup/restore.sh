#!/usr/bin/env bash
# Brings a copy of backup.sh back, with nothing running (docs/backup.md).
set -eu
: "${DRAFTWELL_HOME:=.draftwell}" "${BACKUP:=$HOME/draftwell-backup}"
: "${PREFECT_HOME:=$(cat "$BACKUP/prefect-home" 2> /dev/null || echo "$HOME/.prefect")}"
mkdir -p "$DRAFTWELL_HOME/mlflow" "$PREFECT_HOME"
tar -C "$DRAFTWELL_HOME" -xzf "$BACKUP/home.tar.gz"
rm -f "$DRAFTWELL_HOME/mlflow/mlflow.db-wal" "$DRAFTWELL_HOME/mlflow/mlflow.db-shm"
rm -f "$PREFECT_HOME/prefect.db-wal" "$PREFECT_HOME/prefect.db-shm"
cp "$BACKUP/mlflow.db" "$DRAFTWELL_HOME/mlflow/mlflow.db"
cp "$BACKUP/prefect.db" "$PREFECT_HOME/prefect.db"
