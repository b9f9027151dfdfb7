# shellcheck shell=bash
# vLLM by Docker Compose: source this file in its folder, where compose.yaml is.
LAUNCHER='PORT={port} SPECULATION={speculation_file} docker compose -p engine-{port} up'
STOP='PORT={port} SPECULATION={speculation_file} docker compose -p engine-{port} down'
