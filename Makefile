# Two commands do everything: `make demo` and `make test`. Both create the environment if it is not there.
# PYTHON=python3.12 takes another interpreter; PIP_ARGS="..." goes to pip.
PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt
PROTOS := $(wildcard protos/draftbridge/v1/*.proto)

.PHONY: demo test test-engines llamacpp lint types layers protos stubs-fresh clean

demo: .venv/demo
	@$(BIN)/draftbridge demo $(if $(PROMPT),"$$PROMPT")

export PROMPT

test: .venv/dev
	$(BIN)/pytest

# Engines that are extras, by the contract that all engines are tested by. The first run builds llama.cpp, ten minutes.
test-engines: .venv/llamacpp
	$(BIN)/pytest tests/engines/test_engine.py tests/engines/test_llamacpp.py

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd protos && ../$(BIN)/buf lint

types: .venv/dev
	$(BIN)/mypy

layers: .venv/dev
	$(BIN)/lint-imports

# Stubs and their types, from the contract.
protos: .venv/dev
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iprotos \
		--python_out=protos --grpc_python_out=protos --mypy_out=quiet:protos --mypy_grpc_out=quiet:protos $(PROTOS)

stubs-fresh: protos
	@test -z "$$(git status --porcelain protos)" || \
		{ git status --short protos; echo "the committed stubs are not those of the contract: run make protos and commit"; exit 1; }

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) --quiet --editable .
	@touch $@

.venv/dev: .venv/demo
	$(PIP) --quiet --editable '.[dev]'
	@touch $@

# GCC 12 leaves out stores that llama.cpp's AMX kernels need, and they crash (llama.cpp issue 20824).
LLAMACPP_FLAGS := -DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'
llamacpp: .venv/llamacpp
.venv/llamacpp: .venv/dev
	CMAKE_ARGS="$(LLAMACPP_FLAGS) $$CMAKE_ARGS" $(PIP) --editable '.[dev,llamacpp]'
	@touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
