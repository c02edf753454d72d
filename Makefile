# Everything a newcomer needs: `make warmup` and `make test` on a fresh Linux machine with Python >= 3.11.
#
#   TORCH    the torch to install, e.g. TORCH=torch==2.10.0 beside torch-npu
#   EXTRAS   what to install beside it: cpu (Triton and its interpreter), cuda, npu
#   PYTHON   the interpreter .venv is made with
#   JOBS     test processes at a time

PYTHON ?= python3
ASCEND_PYTHON ?= python3.11
TORCH ?= torch==2.13.0
EXTRAS ?= cpu
JOBS ?= 2
SHAPES ?= examples/shapes.json

BIN := .venv/bin
INSTALLED := .venv/.installed

# Releases of transformers whose models are served: the newest that keeps the function on its layers, and one that offers
# it to the package kernels, which comes with it.
TRANSFORMERS := transformers==5.14.1 transformers[kernels]==5.22.2

# Releases of Ascend's compiler before the one that everything here is written against.
RELEASES := 1.0.0 1.1.0

.PHONY: help install warmup test test-all transformers-test lint ascend ascend-releases ascend-test ascend-matrix ascend-docs clean

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25"
	$(BIN)/python -m pip install --quiet "$(TORCH)" -e ".[$(EXTRAS),dev]"
	touch $@

## make install     make .venv once and install into it
install: $(INSTALLED)

## make warmup      tune examples/shapes.json (or SHAPES=...) on the accelerator there is, else in the interpreter
warmup: $(INSTALLED)
	$(BIN)/tuner warmup --shapes $(SHAPES)

## make test        every test but the ones marked nightly; the simulated NPU's run in a process of their own
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(JOBS) -m "not nightly and not ascend"
	OMP_NUM_THREADS=1 LAYOUT_TUNER_TEST_NPU=1 $(BIN)/pytest -q tests/npu

## make test-all    the nightly ones too
test-all: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(JOBS) -m "not ascend"
	OMP_NUM_THREADS=1 LAYOUT_TUNER_TEST_NPU=1 $(BIN)/pytest -q tests/npu

## make transformers-test models of transformers, tiny and random, each release in a copy of .venv without flash-linear-attention
transformers-test: $(INSTALLED)
	for wanted in $(foreach each,$(TRANSFORMERS),"$(each)"); do \
	  folder=.venv-transformers-$${wanted##*=}; \
	  if ! test -e $$folder/.installed; then \
	    rm -rf $$folder && cp -al .venv $$folder && rm -f $$folder/.installed && \
	    $$folder/bin/python -m pip uninstall --quiet -y fla-core && \
	    $$folder/bin/python -m pip install --quiet "$$wanted" && touch $$folder/.installed || exit 1; \
	  fi; \
	  OMP_NUM_THREADS=1 $$folder/bin/python -P -m pytest -q -n $(JOBS) tests/test_transformers.py || exit 1; \
	done

## make lint        ruff and mypy; types are checked on the tree that ships
lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build .mypy_cache
	$(BIN)/python -m pip install --quiet --no-deps --target build/typecheck .
	$(BIN)/mypy --config-file pyproject.toml build/typecheck/layout_tuner

## make ascend      Ascend's compiler in .venv-ascend, no NPU needed; Python 3.11 for triton-ascend's wheel
ascend: .venv-ascend/.installed

.venv-ascend/.installed:
	$(ASCEND_PYTHON) -m venv .venv-ascend
	.venv-ascend/bin/python -m pip install --quiet triton-ascend==3.2.0 ascendnpu-ir==1.2.0 pybind11
	touch $@
	@missing=; for tool in mlir-opt-19 mlir-translate-19 clang-19; do \
	  command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	if [ -n "$$missing" ]; then echo "running compiled kernels on this CPU also needs$$missing:" \
	  "apt-get install mlir-19-tools llvm-19 clang-19"; fi

## make ascend-releases the compiler's other releases, each in an environment of its own
ascend-releases: $(RELEASES:%=.venv-ascend-%/.installed)

.venv-ascend-%/.installed:
	$(ASCEND_PYTHON) -m venv .venv-ascend-$*
	.venv-ascend-$*/bin/python -m pip install --quiet triton-ascend==3.2.0 ascendnpu-ir==$* pybind11
	touch $@

## make ascend-test what lowers, counts and runs kernels for Ascend, and half of the matrix: every pair of properties
ascend-test: $(INSTALLED) ascend
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(JOBS) -m "not nightly" tests/ascend

## make ascend-matrix every op, candidate, form, width, dtype and target on Ascend's compiler and natively; long
ascend-matrix: $(INSTALLED) ascend
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(JOBS) tests/ascend/test_matrix.py

## make ascend-docs write docs/ascend.md: what the kernels compile to, beside the public ones; the whole matrix, long
ascend-docs: $(INSTALLED) ascend ascend-releases
	mkdir -p docs
	$(BIN)/python bench/ascend_docs.py --whole $(RELEASES:%=--release .venv-ascend-%/bin/python) > docs/ascend.md.new
	mv docs/ascend.md.new docs/ascend.md

clean:
	rm -rf .venv .venv-ascend .venv-ascend-* .venv-transformers-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache
