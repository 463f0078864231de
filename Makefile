# Each target makes .venv by itself; nothing need be installed but Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test check bench clean

setup: .venv/.ready

# Pinned versions first, then Trainyard itself, editable. A changed pin or project file re-installs.
.venv/.ready: pyproject.toml requirements.lock
	@command -v $(PYTHON) >/dev/null || { echo "python3 not found: install Python 3.11 or newer"; exit 1; }
	@echo "installing the pinned versions into .venv: 2 minutes, 6 GB with CUDA"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

demo: setup
	$(BIN)/trainyard data prepare digits data/digits
	$(BIN)/trainyard launch local digits --ranks 2

# What the tests compare with: two scripts of DALI's, without the libraries that it needs, and
# decentralized training as published.
.venv/.peers: .venv/.ready
	$(BIN)/python -m pip install --quiet --no-deps nvidia-dali-cuda130==2.4.0 \
		decent-dp==0.2.3 loguru==0.7.3
	touch $@

test: check .venv/.peers
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/index.py
	$(BIN)/python benchmarks/prepare.py build/prepare
	$(BIN)/python benchmarks/randaugment.py
	$(BIN)/python benchmarks/optimizers.py build/optimizers
	@echo "benchmarks/step.py needs a checkout of timm besides: see its first lines"

clean:
	rm -rf .venv data/digits runs/digits
