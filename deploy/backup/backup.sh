#!/usr/bin/env bash
# Copies one machine's registry, Prefect's database and home to $BACKUP, while others write (docs/backup.md).
set -eu
: "${DRAFTWELL_HOME:=.draftwell}" "${BACKUP:=$HOME/draftwell-backup}"
for folder in "$DRAFTWELL_HOME/prefect" .draftwell/prefect "$HOME/.prefect"; do
  if [ -f "$folder/prefect.db" ]; then : "${PREFECT_HOME:=$folder}"; fi
done
: "${PREFECT_HOME:=$HOME/.prefect}"
mkdir -p "$BACKUP"
copy() {
  python3 -c 'import pathlib, sqlite3, sys; a = sqlite3.connect(pathlib.Path(sys.argv[1]).absolute().as_uri() + "?mode=ro", uri=True); b = sqlite3.connect(sys.argv[2]); a.backup(b); b.close()' "$1" "$2"
}
copy "$DRAFTWELL_HOME/mlflow/mlflow.db" "$BACKUP/mlflow.db"
copy "$PREFECT_HOME/prefect.db" "$BACKUP/prefect.db"
(cd "$PREFECT_HOME" && pwd) > "$BACKUP/prefect-home"
tar -C "$DRAFTWELL_HOME" --exclude=./models --exclude='./mlflow/mlflow.db*' --exclude='./prefect/prefect.db*' -czf "$BACKUP/home.tar.gz" .
