# make train · test · gpu-test · bench · lint · torture · clean. Each sets up what it needs in .venv, from
# nothing but Python 3.11 with venv and a C++20 compiler; mpirun comes from a wheel.

PYTHON ?= python3
N ?= 8
ARGS ?=

BIN := .venv/bin
# Most of what it installs is never imported; what is, is compiled to bytecode then.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# Kernels for GPUs are compiled where they run.
KERNELS := $(shell find kernels -type f -not -path 'kernels/cuda/*')
# All tests wait as much as they compute: four lanes for two cores, each with whole files, in the order
# of their names but for the longest (tests/conftest.py).
# What ARGS chooses runs in one, without starting further processes for it.
LANES := --numprocesses 4 --dist loadfile --no-loadscope-reorder
NATIVE := $(filter %.cpp %.h %.hpp %.cu %.cuh,$(shell find kernels tests benchmarks -type f))

# Tests and benchmarks start processes: they have to find this mpirun before any other.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# And hundreds of them: where the environment forbids to keep bytecode (as images of containers do), each
# would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help train test gpu-test gpu-lane bench lint torture clean
.DELETE_ON_ERROR:

help:
	@sed -n '1,2s/^# //p' Makefile

train: .venv/.installed
	$(BIN)/mpirun -n $(N) $(BIN)/python mpi_examples/train.py $(ARGS)

test: .venv/.test
	$(BIN)/python -m pytest -m "not torture" $(or $(ARGS),$(LANES))
	$(if $(ARGS),,@$(MAKE) --no-print-directory gpu-lane)

# On this machine's GPUs; where it has none, or with STANDINS=1, on simulated ones.
gpu-test: .venv-gpu/.installed .venv/.test
	.venv-gpu/bin/python -m tests.gpu.launch -- .venv-gpu/bin/python -m pytest \
	  -m "$(or $(MARK),not torture)" $(or $(ARGS),tests/gpu $(LANES))

# As `make test` runs it: a machine that cannot have the packages still tests everything else.
gpu-lane:
	@if $(MAKE) --no-print-directory .venv-gpu/.installed; then \
	  $(MAKE) --no-print-directory gpu-test; \
	else \
	  echo "make: tests/gpu is skipped: its packages (the extra gpu-test) cannot be installed"; \
	fi

torture: .venv/.test
	$(BIN)/python -m pytest -m torture $(ARGS)
	$(if $(ARGS),,@$(MAKE) --no-print-directory gpu-lane MARK=torture)

# Into a folder of their own: the figures in benchmarks/results are beside more libraries.
bench: .venv/.bench
	@mkdir -p build/bench
	$(BIN)/mpirun -n 2 $(BIN)/python benchmarks/collectives.py --out build/bench/collectives
	$(BIN)/python benchmarks/training.py --out build/bench/training $(ARGS)

# mypy cannot be told that strategies/ is allreduce.strategies: it reads a picture of the installed
# package made of links. Run from there, its messages name the files as they are called here.
lint: .venv/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)
	@rm -rf build/typing && mkdir -p build/typing/allreduce
	@ln -s $(CURDIR)/allreduce/* build/typing/allreduce/
	@ln -s $(CURDIR)/strategies build/typing/allreduce/strategies
	@ln -s $(CURDIR)/tests $(CURDIR)/benchmarks $(CURDIR)/mpi_examples build/typing/
	cd build/typing && MYPYPATH=benchmarks $(CURDIR)/$(BIN)/mypy \
	  --config-file $(CURDIR)/setup.cfg --cache-dir $(CURDIR)/.mypy_cache \
	  allreduce tests benchmarks mpi_examples

clean:
	rm -rf .venv .venv-gpu build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- what each of them needs -------------------------------------------------------------------------

# Editable, so that Python files need no reinstall; native ones do, and are why this depends on them.
# What it needs at run time is fetched beside the compilers, which wait for nothing of it.
# What builds it stands in .venv, not in a folder of pip's that has another name each time: so what is
# compiled here is not compiled again where the tests make a wheel, nor where one source has changed.
# The build backend also puts the clone and its parent folder on sys.path, where neighbours of the
# clone would become importable: its import hook is all that is needed.
.venv/.installed: .venv/.made pyproject.toml $(KERNELS)
	@echo "installing allreduce from source into .venv: compiling its kernels takes a minute or more ..."
	@$(BIN)/python -c 'import tomllib; \
	  print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
	  | $(PIP) --requirement /dev/stdin
	@$(BIN)/python -c 'from scikit_build_core import build; \
	  print(*build.get_requires_for_build_editable(), sep="\n")' | $(PIP) --requirement /dev/stdin
	@$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  extras = project["optional-dependencies"]; \
	  print(*project["dependencies"], *extras["mpich"], *extras["examples"], sep="\n")' \
	  | $(PIP) --requirement /dev/stdin & needed=$$!; \
	  $(PIP) --no-build-isolation --no-deps --editable .; built=$$?; \
	  wait $$needed && exit $$built
	@grep -lsFx "$(CURDIR)" .venv/lib/python3*/site-packages/*.pth | xargs -rd '\n' grep -ls '^import ' \
	  | xargs -rd '\n' sed -i '/^import /!d'
	@touch $@

# The package is installed already: these only add what the extra names. Were it not, pip would take a
# stranger's of the same name.
.venv/.test .venv/.bench .venv/.lint: .venv/.%: .venv/.installed
	@echo "installing what make $* needs into .venv ..."
	@$(BIN)/python -c 'from importlib.metadata import version; version("allreduce")' || { \
	  echo "make: .venv has lost allreduce; make clean, and again" >&2; exit 1; }
	@$(PIP) "allreduce[$*]"
	@touch $@

# An environment beside .venv, whose packages it sees too: about 700 MB more.
# Installed anew only when the extra gpu-test changes, which the stamp holds.
.venv-gpu/.installed: pyproject.toml | .venv/.test
	@set -e; needed="$$($(BIN)/python -c 'import tomllib; \
	  project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  print(*project["optional-dependencies"]["gpu-test"], sep="\n")')"; \
	if [ "$$needed" != "$$(cat $@ 2>/dev/null)" ]; then \
	  echo "installing what make gpu-test needs into .venv-gpu ..."; \
	  $(PYTHON) -m venv --clear .venv-gpu; \
	  folder=$$(echo .venv/lib/python3*/site-packages); \
	  echo "import site; site.addsitedir('$(CURDIR)/$$folder')" > .venv-gpu/$${folder#.venv/}/beside.pth; \
	  echo "$$needed" | .venv-gpu/bin/python -m pip install --quiet --disable-pip-version-check \
	    --no-compile --requirement /dev/stdin; \
	fi; \
	echo "$$needed" > $@

# mypy reads the tests too, and so the types of what they import.
.venv/.lint: .venv/.test

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: $(PYTHON) is not Python 3.11 or newer; name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig as s; \
	  sys.exit(not os.path.exists(os.path.join(s.get_path("include"), "Python.h")))' || { \
	  echo "make: $(PYTHON) comes without Python.h; install its headers (python3-dev)" >&2; exit 1; }
	@echo '#include <span>' | $${CXX:-c++} -std=c++20 -x c++ -fsyntax-only - || { \
	  echo "make: no C++20 compiler found; install g++ 12 or newer, or name one: make CXX=g++-13" >&2; \
	  exit 1; }
	@$(PYTHON) -m venv --clear .venv || { \
	  echo "make: $(PYTHON) cannot make .venv; install its venv module (python3-venv)" >&2; exit 1; }
	@touch $@
