# `make` lists the targets. Settings are variables: make setup EXTRAS=cpu,docker PYTHON=/opt/python3.12/bin/python3
# EXTRAS is remembered by VENV; TORCH_INDEX is asked for the +cpu torch when pip's own sources lack it.
# Every failing target makes `make` itself end with 2; tools/run ends with pytest's own code (0, 4, 10 to 13).

PYTHON ?= python3.11
VENV ?= .venv
EXTRAS ?=
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ARGS ?=
TARGET ?= h200-torch211
PART_MIB ?= 48
BIN := $(VENV)/bin
export VENV RESUME
# Only where it was given: an empty EXPECT means "compare with nothing", an absent one the pinned pair (tools/run).
ifneq ($(origin EXPECT),undefined)
export EXPECT
endif

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup gates gates-full smoke base-image wheelhouse image docker-smoke bench-smoke defects test test-slow lint format preflight bundle clean clean-all

help: ## list the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install into VENV (.venv): EXTRAS=cpu|cuda12|cuda13|none[,docker] (first time: cpu), PYTHON=, TORCH_INDEX=
	@command -v $(PYTHON) >/dev/null || { echo "setup: no $(PYTHON) here; set PYTHON=/path/to/python (3.11 or newer), or as root on Debian: apt-get install python3.11 python3.11-venv" >&2; exit 4; }
	@$(PYTHON) -m tools.setup_env --venv "$(VENV)" --extras "$(EXTRAS)" --torch-index "$(TORCH_INDEX)"

gates: setup ## judge the pinned CPU stack: the core gates against its recorded verdicts (ARGS= goes to pytest)
	@tools/run gates $(ARGS)

gates-full: setup ## every case of every gate; RESUME=reports/out/RUN goes on with a run that was cut
	@tools/run gates-full $(ARGS)

smoke: setup ## the fastest real-stack proof of each family; a few minutes
	@tools/run smoke $(ARGS)

base-image: setup ## a slim Debian base image out of Debian packages; no image registry is asked
	@$(BIN)/python -m tools.image base

wheelhouse: setup ## the wheels of the CPU stack in wheelhouse/image-cpu, fetched once
	@$(BIN)/python -m tools.image wheelhouse

image: setup ## the CPU image of the stack, built with no network; quick when nothing changed
	@$(BIN)/python -m tools.image image

docker-smoke: image ## two engines and a master in three containers: share, partition, heal, and three gates
	@$(BIN)/python -c "import docker" 2>/dev/null || { echo "docker-smoke: needs the docker SDK for Python; make setup EXTRAS=cpu,docker" >&2; exit 4; }
	@tools/run docker-smoke $(ARGS)

bench-smoke: setup ## TTFT by source and a concurrency ladder, on the real stack; under five minutes
	@tools/run bench-smoke $(ARGS)

defects: setup ## planted defects: proof that the gates can go red
	@tools/run defects $(ARGS)

test: setup ## selftests of the suite itself; no vLLM, about 45 seconds
	@tools/run test $(ARGS)

test-slow: setup ## the rest of them: on a pool's real servers, and those that measure a client for seconds; about 70 seconds
	@tools/run test-slow $(ARGS)

lint: setup ## ruff, formatting, mypy, import contract
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: setup ## let ruff format and sort what it can
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

preflight: setup ## what this host can run, what it cannot, and the mend
	@$(BIN)/python -m fixtures.capabilities $(ARGS)

bundle: setup ## everything a host without network lacks, in parts: TARGET=name of tools/bundle/targets, PART_MIB=48, WANT="vllm==0.25.1 ..." (other releases)
	@$(BIN)/python -m tools.bundle "$(TARGET)" --part-mib "$(PART_MIB)" $(foreach release,$(WANT),--want '$(release)')

clean: ## remove VENV and caches; finished runs in reports/out stay
	@rm -rf "$(VENV)" .stamps .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks .import_linter_cache build dist *.egg-info
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

clean-all: clean ## clean, and remove finished runs and bundles too
	@rm -rf reports/out bundle wheelhouse
