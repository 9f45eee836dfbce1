# Everything here works on a fresh machine with Python 3.11+ and a C++17 compiler: each target makes its own .venv.
#   make demo     build sparkd and let the built-in model answer
#   make test     build sparkd with its test dependencies, check the code, run the tests
#   make soak     the long tests: every golden vector and every chunking
#   make sanitize the kernels under the address, undefined-behaviour and thread sanitizers
#   make clean    remove what was built

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := CMakeLists.txt pyproject.toml $(shell find sparkd -name '*.cpp' -o -name '*.h')
# One of these must be there: the one that CXX names, or else those that CMake looks for.
COMPILERS := $(if $(filter default undefined,$(origin CXX)),c++ g++ clang++,$(firstword $(CXX)))
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test lint soak sanitize clean toolchain

demo: $(VENV)/.base
	$(BIN)/sparkd demo

test: lint
	$(BIN)/python -m pytest -m "not soak"

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

soak: $(VENV)/.test
	$(BIN)/python -m pytest -m soak

CHECKED := tests/native/check_kernels.cpp sparkd/kernels/cpu/fast_products.cpp sparkd/kernels/cpu/products.cpp sparkd/kernels/cpu/pool.cpp
CHECK := $(or $(CXX),c++) -std=c++17 -g -O1 -ffp-contract=off -pthread -w -Isparkd/kernels $(CHECKED)
ADDRESS := -fsanitize=address,undefined -fno-sanitize-recover=all

# Instruction sets that this machine lacks are skipped with a line.
sanitize: toolchain
	@mkdir -p build/sanitize
	@grep -qw avx512_vnni /proc/cpuinfo && $(CHECK) $(ADDRESS) -march=x86-64-v4 -mavx512vnni -o build/sanitize/v4 && build/sanitize/v4 || { grep -qw avx512_vnni /proc/cpuinfo && exit 1 || echo "no AVX-512 here"; }
	@grep -qw avx2 /proc/cpuinfo && $(CHECK) $(ADDRESS) -march=x86-64-v3 -o build/sanitize/v3 && build/sanitize/v3 || { grep -qw avx2 /proc/cpuinfo && exit 1 || echo "no AVX2 here"; }
	@$(CHECK) $(ADDRESS) -o build/sanitize/base && build/sanitize/base
	@$(CHECK) -fsanitize=thread -o build/sanitize/thread && build/sanitize/thread

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

toolchain:
	@for compiler in $(COMPILERS); do command -v $$compiler >/dev/null && exit 0; done; echo "sparkd: no C++ compiler found ($(COMPILERS)); install one, for example: apt install g++" >&2; exit 1
	@command -v $(PYTHON) >/dev/null || { echo "sparkd: no $(PYTHON) found; sparkd needs Python 3.11 or newer, for example: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "sparkd: $(PYTHON) is older than 3.11; name another, for example: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "sparkd: $(PYTHON) has no venv module; install it, for example: apt install python3-venv" >&2; exit 1; }

$(BIN)/python: | toolchain
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: $(NATIVE) | $(BIN)/python
	@echo "Installing sparkd into $(VENV) (compiles the native kernels, about a minute) ..."
	$(PIP) install -e .
	@touch $@

# sparkd is there already, so that this adds only what its tests need.
$(VENV)/.test: $(VENV)/.base
	@echo "Installing the test dependencies into $(VENV) ..."
	$(PIP) install 'sparkd[test]'
	@touch $@
