#!/usr/bin/env bash
# `objects.sh save` copies the object store and the workers' home, without its models, to $BACKUP, a full path; `objects.sh bring`
# copies them back (docs/backup.md).
set -eu
COMPOSE="docker compose --file deploy/compose.yaml run --rm"
mirror() {
  $COMPOSE --volume "$BACKUP:/backup" --entrypoint sh bucket -euc '
    mc alias set store http://minio:9000 "$MINIO_ROOT_USER" "$MINIO_ROOT_PASSWORD" > /dev/null
    mc mirror --overwrite "$@"' mirror "$@"
}
case ${1:-} in
  save)
    mirror store/mlflow /backup/artifacts
    $COMPOSE -T --no-deps worker tar -C /var/lib/draftwell --exclude=./models -cz . > "$BACKUP/home.tar.gz"
    ;;
  bring)
    mirror /backup/artifacts store/mlflow
    $COMPOSE -T --no-deps worker tar -C /var/lib/draftwell -xz < "$BACKUP/home.tar.gz"
    ;;
  *)
    echo "objects.sh: say save or bring" >&2
    exit 2
    ;;
esac
