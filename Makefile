# Two commands for a fresh machine with Python 3.11 or 3.12, g++ and git: `make serve` and `make test`.

PYTHON ?= $(shell for p in python3 python3.11 python3.12; do \
    $$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
PY := $(VENV)/bin/python
READY := $(VENV)/opshim-ready
LOCK := requirements/cpu.txt
TORCH_INDEX := https://download.pytorch.org/whl/cpu
ARGS ?=
# What nvcc, where there is one, compiles for. One arch keeps `make test` short; an image or a release wants them all.
ARCHS ?= 90a

.DEFAULT_GOAL := help
.PHONY: help env build test serve lint clean
# Compiled modules are worth keeping: vLLM imports in half the time with them.
unexport PYTHONDONTWRITEBYTECODE

help: ## show the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10
	@echo 'ARCHS=80,86,89,90a,100 has nvcc compile for those'
	@echo 'ARGS="..." is handed to serve and test, e.g. make serve ARGS="--port 8001 --policy auto"'

env: $(READY) ## make the virtual environment in .venv from the lock

# The stamp is written last, so an interrupted installation is begun anew. The lock is complete and installed without
# dependency resolution. The CPU build of torch may lie in PyTorch's own index only.
$(READY): $(LOCK) setup.cfg pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or 3.12 on the PATH (set PYTHON=)"; exit 2; }
	@test -e $@ || { echo "env: creating $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv --clear $(VENV); }
	@rm -f $@
	@echo "env: installing $$(grep -c == $(LOCK)) packages of $(LOCK) (1 to 2 minutes)"
	@install="$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-compile -r $(LOCK)"; \
	    $$install 2>$(VENV)/pip.log || $$install --extra-index-url $(TORCH_INDEX) || { cat $(VENV)/pip.log; exit 1; }
	@echo "env: installing opshim in place"
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@echo "env: first import of vLLM"
	@$(PY) -c 'import vllm.entrypoints.cli.serve, vllm.v1.engine.core, vllm.v1.worker.cpu_worker' 2>$(VENV)/import.log \
	    || { cat $(VENV)/import.log; exit 1; }
	@touch $@

build: $(READY) ## compile the native libraries (what is up to date is left alone)
	@echo "build: native libraries"
	@$(PY) runner.py build --arch $(ARCHS)

lint: $(READY) ## check style with ruff
	@echo "lint: ruff"
	@$(PY) -m ruff check --quiet .

test: lint build ## the whole test suite
	@echo "test: pytest -n auto $(ARGS)"
	@$(PY) -m pytest -n auto $(ARGS)

serve: build ## serve the bundled model on 127.0.0.1:8000
	@$(PY) runner.py serve $(ARGS)

clean: ## remove the environment and everything built
	rm -rf $(VENV) build *.egg-info ops_native/lib .pytest_cache .ruff_cache reports
	find . -name __pycache__ -prune -exec rm -rf {} +
