# Two commands are all the set-up: `make demo` runs the main job, `make test` the checks.
# Both build .venv on first use, `make demo` with no more than it needs; a second run reinstalls nothing.

PYTHON ?= python3
BIN := .venv/bin
# constraints.txt pins every version; torch there is the CPU build, so no CUDA packages arrive.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Two test processes share two cores: one thread each, or both crawl.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all test-slow bench docs fuzz soak lint clean
demo: .venv/installed
	$(BIN)/assay demo

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

# Also what is slow and rarely breaks: kills, long fuzz, every page of the site, the demo.
test-all: test test-slow

test-slow: .venv/dev-installed
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

lint: .venv/dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

# The site, in out/site; open out/site/index.html. Needs no network.
docs: .venv/docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

# Hours of a core: 10,000 damaged files of every format; 10,000 random steps, kills among them. `make test-all` has a short form of each.
fuzz: .venv/dev-installed
	nice -n 19 $(BIN)/python -m tests.fuzz.run

soak: .venv/dev-installed
	nice -n 19 $(BIN)/python -m tests.stateful

# All cores: nproc would answer with OMP_NUM_THREADS.
bench: .venv/bench-installed
	@threads=$$(getconf _NPROCESSORS_ONLN); for script in bench/*.py; do \
		echo "== $$script"; OMP_NUM_THREADS=$$threads $(BIN)/python $$script || exit 1; done

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -e .
	touch $@

.venv/dev-installed: .venv/installed
	$(PIP) -e '.[dev]'
	touch $@

.venv/docs-installed: .venv/installed
	$(PIP) -e '.[docs]'
	touch $@

.venv/bench-installed: .venv/installed
	$(PIP) -e '.[bench]'
	touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
