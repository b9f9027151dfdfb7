#!/bin/bash
# Run once, by the postgres image, on an empty data folder: a role for each server, and their databases. psql takes the passwords from
# the environment, so that no command line shows them.
set -euo pipefail
psql --no-psqlrc --quiet --set ON_ERROR_STOP=1 --username "${POSTGRES_USER:-postgres}" --dbname postgres <<'SQL'
\getenv mlflow MLFLOW_DB_PASSWORD
\getenv prefect PREFECT_DB_PASSWORD
CREATE ROLE mlflow LOGIN PASSWORD :'mlflow';
CREATE ROLE prefect LOGIN PASSWORD :'prefect';
CREATE DATABASE mlflow OWNER mlflow;
CREATE DATABASE mlflow_auth OWNER mlflow;
CREATE DATABASE prefect OWNER prefect;
SQL
