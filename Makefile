# Two commands do everything: `make demo` (the main job) and `make test`.
PYTHON ?= python3
PYTEST_ARGS ?=
# More than two cores: tests wait, for servers above all, about as long as they compute.
WORKERS ?= 4
BIN := .venv/bin

# Set, it would have each of some thousand Python processes compile the same modules again.
test test-fast k8s-test soak: export PYTHONDONTWRITEBYTECODE :=
# Set, standard error has no buffer, and a thread that hangs in it is in nobody's way.
test test-fast k8s-test soak: export PYTHONUNBUFFERED :=

.PHONY: demo test test-fast k8s-test image soak fresh lint format bench docs setup clean

# LINK=200/5: another link than 1000 Mbit/s with a round trip of 1 ms. STORE=hdfs: without
# containers, and the checkpoint lies on a real HDFS, which the first run downloads.
demo: .venv/.ready-$(if $(filter hdfs,$(STORE)),hdfs,demo)
	$(BIN)/python -m tools.demo $(if $(STORE),--store $(STORE) --no-containers) $(if $(LINK),--link $(LINK)) $(DEMO_ARGS)

test: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

# The unit tests: none needs root, a server, or the free space that image caches ask for.
test-fast: setup
	$(BIN)/python -m pytest -n $(WORKERS) --fast $(PYTEST_ARGS) tests/unit

# Injected pods on a real Kubernetes.
k8s-test: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/unit/kubernetes tests/integration/kubernetes tests/faults/kubernetes

# The init container's image: make image IMAGE=registry.example/bootseer-init:0.1.0
IMAGE ?=
image:
	$(PYTHON) -m tools.initimage $(if $(IMAGE),--name $(IMAGE))

# The long counts, module by module; what was stopped goes on: make soak SOAK_ARGS=--list shows it.
SOAK_ARGS ?=
soak: setup
	$(BIN)/python -m tools.soak $(SOAK_ARGS)

# These commands on a Debian that has never seen this tree; as root, with debootstrap.
fresh:
	$(PYTHON) -m tools.fresh $(FRESH_ARGS)

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

SETUP := pyproject.toml constraints.txt tools/setup.sh tools/debian-packages.txt
.venv/.ready: $(SETUP)
	PYTHON="$(PYTHON)" sh tools/setup.sh

# What the demonstration uses is a small part of that, and is there in a minute.
.venv/.ready-demo: $(SETUP)
	PYTHON="$(PYTHON)" sh tools/setup.sh demo

.venv/.ready-hdfs: $(SETUP)
	PYTHON="$(PYTHON)" sh tools/setup.sh demo hdfs

clean:
	rm -rf .venv demo-out build dist *.egg-info
