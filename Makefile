# Sets up an environment of its own in .venv, builds, tests, checks, and runs the study. What is
# installed and built is done again only when something it depends on has changed, and a finished
# training is kept; tests and measurements run each time. Paths are relative throughout, so the path
# of this folder may hold spaces.
#
#   PYTHON=python3.12   the Python that .venv is made from (default python3)
#   TORCH=2.15.0        another torch, in an environment of its own, .venv-2.15.0
#   PY=python3          use an environment of your own instead of .venv; nothing is installed in it
#   PYTEST_ARGS, TRAIN_ARGS, STUDY_ARGS, TABLES_ARGS   passed on, as in make study TRAIN_ARGS=--epochs=5
#   FORCE_CUDA, TORCH_CUDA_ARCH_LIST, MAX_JOBS   as setup.py says

PYTHON ?= python3
VENV := .venv$(if $(TORCH),-$(TORCH))
PY ?= $(VENV)/bin/python

LIBRARY := spamm_torch/libspamm_torch.so
SOURCES := $(sort $(shell find csrc -type f))
CPP_FILES := $(sort $(filter %.h %.cpp %.cu %.cuh,$(SOURCES)) $(wildcard tests/cpp/*.h tests/cpp/*.cpp tests/sanitize/ATen/*.h examples/cpp/*.cpp))
CPP_TESTS := build/tests-cpp
CPP_EXAMPLE := build/example-cpp

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help build test test-all test-cpp test-python asan tsan study tables wheel docs lint tidy clean distclean FORCE

help:
	@echo "make build   build the library into an environment in .venv"
	@echo "make test    build, then run the C++ and Python tests (make test-all: every combination, too)"
	@echo "make asan    the same tests in part, under AddressSanitizer (make tsan: ThreadSanitizer)"
	@echo "make study   build, train VGG13 and replace its convolutions; writes results/"
	@echo "make tables  build, measure the paper's tables; writes results/table_1.md and so on"
	@echo "make wheel   build dist/*.whl for this torch, and run README.md's examples with it"
	@echo "make docs    build, write the reference of all functions to build/docs"
	@echo "make lint    check formatting, style, types and docs/budget.toml"
	@echo "make tidy    build, then clang-tidy over the host files"
	@echo "make clean   remove what was built (make distclean: and .venv)"

# ---- Environment ---------------------------------------------------------------------------------

# $(call need,TEST,WHAT,PACKAGE): fails with one line where a command that tests for WHAT fails.
need = $(1) >/dev/null 2>&1 || { echo "make: $(2) is missing; on Debian: apt-get install $(3)" >&2; exit 1; }
# $(call pip,FILE,OPTIONS): installs a requirements file; one line where that fails. Python compiles
# what is imported; pip would take a minute for all 13,000 modules.
pip = $(VENV)/bin/python -m pip install --no-compile $(2) -r $(1) >$(VENV)/pip.log 2>&1 || \
	{ echo "make: pip could not install $(1), which needs the network; see $(VENV)/pip.log" >&2; exit 1; }

$(VENV)/bin/python:
	@$(call need,$(PYTHON) --version,$(PYTHON),python3)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "make: Python 3.10 or newer is needed; got $$($(PYTHON) --version)" >&2; exit 1; }
	@$(call need,$(PYTHON) -m ensurepip --version,Python's venv module,python3-venv)
	@echo "make: environment in $(VENV) from $$($(PYTHON) --version)"
	@rm -rf $(VENV) && $(PYTHON) -m venv $(VENV)

$(VENV)/ready: requirements.txt requirements-headers.txt | $(VENV)/bin/python
	@echo "make: installing requirements.txt (torch with CUDA is a download of about 3 GB); log in $(VENV)/pip.log"
	@sed -e '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/; s/^torchvision==.*/torchvision/)' \
		requirements.txt > $(VENV)/requirements.txt
	@$(call pip,$(VENV)/requirements.txt)
	@$(call pip,requirements-headers.txt,--no-deps)
	@touch $@

$(VENV)/lint-ready: requirements-lint.txt | $(VENV)/bin/python
	@echo "make: installing requirements-lint.txt"
	@$(call pip,requirements-lint.txt)
	@touch $@

# ---- Build ---------------------------------------------------------------------------------------

ifeq ($(PY),$(VENV)/bin/python)
ENVIRONMENT := $(VENV)/ready
INSTALLED := $(VENV)/installed
endif

# What a build depends on beside the contents of its files.
define SETTINGS
python: $(PY)
nvcc: $(shell command -v nvcc) CUDA_HOME: $(CUDA_HOME)
FORCE_CUDA: $(FORCE_CUDA) TORCH_CUDA_ARCH_LIST: $(TORCH_CUDA_ARCH_LIST)
sources: $(SOURCES)
endef
export SETTINGS

build/settings: FORCE
	@mkdir -p build && echo "$$SETTINGS" | cmp -s - $@ || echo "$$SETTINGS" > $@

$(LIBRARY): $(ENVIRONMENT) build/settings setup.py pyproject.toml $(SOURCES)
	@$(call need,c++ --version,a C++ compiler,g++)
	@$(call need,test -e "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h",Python.h,python3-dev)
	$(PY) setup.py --quiet build_ext --inplace
	@touch $@

# Editable: .venv sees this folder; what `make build` builds later is there at once.
$(VENV)/installed: pyproject.toml setup.py | $(LIBRARY)
	@$(VENV)/bin/python -m pip install -qqq --no-build-isolation --no-deps -e .
	@touch $@

build: $(LIBRARY) $(INSTALLED)

# ---- Tests, study, tables, docs, lint -------------------------------------------------------------

test: test-cpp test-python

test-all: CHOSEN = thorough or not thorough
test-all: test

test-cpp: build
	@$(call need,cmake --version,cmake,cmake)
	@$(call need,echo '#include <gtest/gtest.h>' | c++ -x c++ -E -,GoogleTest,libgtest-dev)
	@cmake -S tests/cpp -B $(CPP_TESTS) --log-level=NOTICE
	@cmake --build $(CPP_TESTS) --parallel 2
	ctest --test-dir $(CPP_TESTS) --parallel 2 --output-on-failure
	@cmake -S examples/cpp -B $(CPP_EXAMPLE) --log-level=NOTICE \
		-DCMAKE_PREFIX_PATH="$$($(PY) -c 'import spamm_torch; print(spamm_torch.paths.cmake_prefix_path())')"
	@cmake --build $(CPP_EXAMPLE)
	$(CPP_EXAMPLE)/product && $(CPP_EXAMPLE)/decay

CHOSEN = not thorough
# Tests for CUDA run in one process: two would share the GPU's memory.
test-python: build
	$(PY) -m pytest -n 2 --dist loadscope -m "not cuda and ($(CHOSEN))" $(PYTEST_ARGS)
	@if $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	then $(PY) -m pytest -m "cuda and ($(CHOSEN))" $(PYTEST_ARGS); \
	else echo "make: no CUDA device: tests that need one were left out"; fi

# A build for the CPU alone and its tests under AddressSanitizer and UndefinedBehaviorSanitizer, or
# under ThreadSanitizer (docs/reliability.md). Leaks are not looked for: Python keeps much to its end.
SANITIZED := tests/products/test_multiply.py tests/sparse/test_block_products.py tests/convolution/test_epilogue.py \
	tests/sharding/test_mm_shards.py tests/robustness -k "not memory_stays_flat"
asan: export SPAMM_TORCH_SANITIZE = address
asan: FLAGS = -fsanitize=address,undefined
asan: export ASAN_OPTIONS = detect_leaks=0:allocator_may_return_null=1
asan: export UBSAN_OPTIONS = print_stacktrace=1
tsan: export SPAMM_TORCH_SANITIZE = thread
tsan: FLAGS = -fsanitize=thread
tsan: export TSAN_OPTIONS = ignore_noninstrumented_modules=1 halt_on_error=1 allocator_may_return_null=1
asan tsan: $(ENVIRONMENT)
	$(PY) setup.py --quiet build --build-lib build/$@
	@cmake -S tests/cpp -B build/$@-cpp --log-level=NOTICE -DCMAKE_CXX_FLAGS="-O1 -g $(FLAGS)" \
		-Dspamm_torch_DIR="$(CURDIR)/build/$@/spamm_torch/share/cmake/spamm_torch" \
		-Dspamm_torch_LIBTORCH="$$($(PY) -c 'import torch; print(torch.__path__[0])')"
	@cmake --build build/$@-cpp --parallel 2
	build/$@-cpp/spamm_torch_tests
	export LD_PRELOAD="$$(c++ -print-file-name=lib$@.so) $$(c++ -print-file-name=libstdc++.so)" && \
	PYTHONPATH=build/$@ $(PY) scripts/fuzz.py --device cpu --minutes 10 --cases 500 --threads 4 && \
	$(PY) -m pytest -o pythonpath="scripts examples build/$@" -m "not cuda and not thorough" $(SANITIZED)

study: build
	@$(PY) -c 'import torch; torch.cuda.is_available() or print("make: no CUDA device: the study runs on the CPU")'
	$(PY) scripts/bench.py table_5 $(TRAIN_ARGS) $(STUDY_ARGS)

tables: build
	@$(PY) -c 'import torch; torch.cuda.is_available() or print("make: no CUDA device: the tables are small ones of the CPU")'
	for table in 1 2 3 4 5; do $(PY) scripts/bench.py table_$$table $(TABLES_ARGS) || exit; done

# Its file says the oldest glibc that it runs on. What torch brings is not packed a second time. README.md's examples run
# with it in a folder of its own, where no compiler is.
wheel: $(ENVIRONMENT) $(VENV)/lint-ready
	@rm -rf build/wheel build/lib* build/bdist* && mkdir -p build/wheel
	$(PY) -m pip wheel -q --no-build-isolation --no-deps --wheel-dir build/wheel .
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" auditwheel repair --wheel-dir dist $(BESIDE:%=--exclude %) build/wheel/*.whl
	@rm -rf build/there && mkdir -p build/there
	$(PY) -m pip install -q --no-deps --target build/there "$$(ls -t dist/*.whl | head -1)"
	@cp --parents README.md docs/api.md tests/build/test_docs.py examples/*.py build/there
	python=$$($(PY) -c 'import sys; print(sys.executable)'); cd build/there && \
		env -i PATH=/none PYTHONPATH="$$PWD:$$PWD/examples" "$$python" -m pytest -q -c /dev/null \
		tests/build/test_docs.py -k "examples_run and README"

BESIDE := libc10.so libc10_cuda.so libtorch.so libtorch_cpu.so libtorch_cuda.so libgomp.so.1 libcudart.so.13

docs: build $(VENV)/lint-ready
	$(PY) -m pdoc --docformat google --output-directory build/docs spamm_torch

lint: $(VENV)/lint-ready
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP_FILES)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/python scripts/check_budget.py

# The checks are in .clang-tidy; the units and the flags are those of the latest build.
tidy: build $(VENV)/lint-ready
	@mkdir -p build/tidy
	@$(PY) -m ninja -C "$$(ls -td build/torch-*/spamm_torch.libspamm_torch | head -1)" --quiet -t compdb host \
		| sed 's/ -fopenmp//' > build/tidy/compile_commands.json
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" run-clang-tidy.py -quiet -j 2 -p build/tidy '\.cpp$$'

clean:
	rm -rf build dist *.egg-info spamm_torch/*.so spamm_torch/_built.json .pytest_cache .ruff_cache .mypy_cache
	find spamm_torch models scripts tests -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean
	rm -rf .venv .venv-*
