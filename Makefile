# Every target makes its own virtual environment when there is none.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: look test lint fuzz bench bench-gpu docs picture clean

look: $(READY)
	$(BIN)/heedful look

# Processes that tests start read what others have compiled, also where the environment keeps Python from writing it.
test: $(READY) lint
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks docs experiments gallery
	$(BIN)/ruff format --check src tests benchmarks docs experiments gallery
	$(BIN)/mypy

# Random calls of `attend` against an oracle apart from it: make fuzz N=100000
N ?= 20000
fuzz: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/attend/test_fuzz.py --fuzz $(N)

bench: $(READY)
	$(BIN)/python -m benchmarks.cpu

# Needs a CUDA device; the page is written also where a bar is missed.
bench-gpu: $(READY)
	$(BIN)/python -m benchmarks.gpu; code=$$?; test $$code -eq 2 || $(BIN)/python -m benchmarks.gpu --page; exit $$code

# A site to read offline: docs/_build/index.html
docs: $(READY)
	$(BIN)/python docs/build.py

# The picture of the report in README.md; needs chromium.
picture: $(READY)
	$(BIN)/python docs/picture.py

clean:
	rm -rf .venv docs/_build

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("heedful needs Python 3.11 or newer; this is %d.%d: make PYTHON=python3.11 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[hf,train,tables,transport,corpus,numba,dask,gensim,archive,graphs,demo,plot,docs,dev]"
	touch $(READY)
