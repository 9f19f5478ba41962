# Two commands are all the set-up: `make demo` runs the main job, `make test` the checks.
# Both build .venv on first use; a second run reinstalls nothing.

PYTHON ?= python3
BIN := .venv/bin
# Two test processes share two cores: one thread each, or both crawl.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test bench lint clean
demo: .venv/installed
	$(BIN)/assay study run studies/demo/study.toml -o out/demo

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

bench: .venv/bench-installed
	@for script in bench/*.py; do echo "== $$script"; OMP_NUM_THREADS=$$(nproc) $(BIN)/python $$script || exit 1; done

# constraints.txt pins every version; torch there is the CPU build, so no CUDA packages arrive.
.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

.venv/bench-installed: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
