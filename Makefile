# Two commands do everything: `make demo` (the main job) and `make test`.
PYTHON ?= python3
PYTEST_ARGS ?=
WORKERS ?= 2
BIN := .venv/bin

.PHONY: demo test test-fast k8s-test image soak lint format bench docs setup clean

# STORE=hdfs: the checkpoint lies on a real HDFS, which the first run downloads.
demo: setup
	$(BIN)/python -m tools.demo $(if $(STORE),--store $(STORE)) $(DEMO_ARGS)

test: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-fast: setup
	$(BIN)/python -m pytest -n $(WORKERS) --fast $(PYTEST_ARGS)

# Injected pods on a real Kubernetes, which the first run builds in about three minutes.
k8s-test: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/test_inject*.py tests/test_initimage.py tests/test_k8s_*.py

# The init container's image: make image IMAGE=registry.example/bootseer-init:0.1.0
IMAGE ?=
image:
	$(PYTHON) -m tools.initimage $(if $(IMAGE),--name $(IMAGE))

# The long counts, module by module; what was stopped goes on: make soak SOAK_ARGS=--list shows it.
SOAK_ARGS ?=
soak: setup
	$(BIN)/python -m tools.soak $(SOAK_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One benchmark: make bench NAME=depsnap; python -m bench --help lists them.
bench: setup
	$(BIN)/python -m bench $(NAME) $(BENCH_ARGS)

docs: setup
	$(BIN)/python -m tools.docs

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt tools/setup.sh tools/debian-packages.txt
	PYTHON="$(PYTHON)" sh tools/setup.sh

clean:
	rm -rf .venv demo-out build dist *.egg-info
