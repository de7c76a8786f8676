# Every chore is one command. Each first makes its own virtual environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOWEST_VENV ?= .venv-lowest
FRAMEWORKS_VENV ?= .venv-frameworks
FRAMEWORKS_STAMP := $(FRAMEWORKS_VENV)/.installed
# Tested in addition to the versions in tests/frameworks/requirements.txt. The last one is released only for Python 3.12
# and later; the tested parts of it also run under 3.11.
MEGATRON_CORES := 0.12.3 0.13.1 0.14.0 0.15.3
NEWEST_MEGATRON_CORE := 0.19.2
NEWEST_TORCH := 2.15.0
NEWEST_TORCHTITAN := 0.3.0
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
PROTOS := $(wildcard protos/perseus/v1/*.proto)
SERVICES := $(wildcard protos/perseus/v1/*_service.proto)
# The stable contract: it may grow, but nothing in it may change.
CONTRACT := protos/contract.binpb
# Output folder of `make protos`; a test regenerates elsewhere and compares.
OUT ?= .

# `make demo NVML=stub` runs the main job on a stand-in for the NVML library; `make demo SCENARIO=grid` runs three jobs
# under a power budget, `make demo SCENARIO=serving` an inference engine. Exit code 75, a machine
# too busy to judge, is no failure here.
NVML ?=
SCENARIO ?=

# The tests of these are in folders with a script that installs their dependencies other than Python packages.
PARTS := grid languages prometheus slurm web

# Every runnable module of benchmarks/ is a benchmark.
BENCHMARKS := $(patsubst benchmarks/%.py,%,$(shell grep -l __main__ benchmarks/*.py))

.PHONY: demo test test-times test-ci test-all test-lowest test-slow test-gpu gpu-wheels test-frameworks framework-versions test-serving \
  test-postgresql test-kubernetes test-dist test-images pictures torture torture-coordinator torture-fleet fuzz mutants check bench docs metrics settings protos \
  contract dist clean $(PARTS:%=test-%) $(PARTS:%=needs-%)

demo: $(STAMP)
	$(BIN)/perseus demo $(if $(NVML),--nvml=$(NVML)) $(if $(SCENARIO),--scenario=$(SCENARIO)) || [ $$? -eq 75 ]

# Tests start many Python processes: keep compiled modules, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

# On all cores, up to eight. The fixed seed makes failures reproducible; plain `pytest` tries new examples at every run.
PYTEST := $(BIN)/pytest --hypothesis-seed=0 --numprocesses=auto --maxprocesses=8 --dist=worksteal

# The tests before every commit, in minutes: all but those marked slow (tests/tiers.py).
test: check
	$(PYTEST) -m "smoke or not slow" --durations=10

# The same tests, and which of them want the marker `slow`, judged by a reference loop on this machine.
test-times: $(STAMP)
	$(PYTEST) -m "not slow" --times --durations=30

# The same tests with the oldest dependencies that pyproject.toml allows; `test` has the newest.
test-lowest: $(STAMP)
	$(BIN)/pip install -qq --upgrade 'uv>=0.9,<1'
	test -d $(LOWEST_VENV) || $(BIN)/uv venv --quiet --python $(PYTHON) $(LOWEST_VENV)
	UV_FIND_LINKS="$$PIP_FIND_LINKS" $(BIN)/uv pip install --quiet --python $(LOWEST_VENV)/bin/python \
	  --resolution lowest-direct --editable '.[dev]'
	$(PYTEST:$(BIN)/%=$(LOWEST_VENV)/bin/%) -m "smoke or not slow"

# What CI runs: all but the tests marked nightly. It continues after a failing part.
test-ci:
	$(MAKE) --keep-going test test-slow test-frameworks

# Everything, as every night.
test-all:
	$(MAKE) --keep-going NIGHTLY=yes test test-slow test-frameworks

# With NIGHTLY, a target runs its nightly tests, too, and property tests have more examples.
NIGHTLY ?=

# The tests of Perseus itself that `make test` leaves out. Run as root, it installs missing dependencies.
test-slow: $(PARTS:%=needs-%) needs-postgresql needs-kubernetes dist
	$(PYTEST) $(if $(NIGHTLY),--hypothesis-profile=nightly -m "slow or hypothesis",-m "slow and not nightly")

# Real training through every framework's hook, on CPUs, with the frameworks in their own environment, one at a time.
test-frameworks: $(FRAMEWORKS_STAMP)
	$(FRAMEWORKS_VENV)/bin/pytest tests/frameworks tests/gpu $(if $(NIGHTLY),,-m "not nightly")

# A real vLLM on CPUs with a tiny model: it loads the plug-in, and its metrics have the names that the agent reads.
test-serving: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/pytest tests/engines

# The table of versions, in the hooks and in docs/frameworks.md, from this run of the tests.
framework-versions: $(FRAMEWORKS_STAMP)
	WRITE_VERSIONS=1 $(FRAMEWORKS_VENV)/bin/pytest tests/frameworks

# Check a real NVIDIA GPU without changing its settings; append the table to benchmarks/results/gpus.md. PYTHON has
# PyTorch with CUDA, numpy and grpcio. Other dependencies come from gpu-wheels, if it is there.
GPU_SITE := gpu-wheels/site
test-gpu: $(if $(wildcard gpu-wheels/*.whl),$(GPU_SITE)/.installed)
	PYTHONPATH=$(CURDIR):$(CURDIR)/$(GPU_SITE) $(PYTHON) -m tests.gpu.check benchmarks/results/gpus.md

$(GPU_SITE)/.installed: $(wildcard gpu-wheels/*.whl)
	rm -rf $(GPU_SITE)
	$(PYTHON) -m pip install -qq --no-index --no-deps --target $(GPU_SITE) gpu-wheels/*.whl
	touch $@

# Run it with a network, for the Python of the machine with the GPU.
GPU_PYTHON ?= 3.12
gpu-wheels: $(STAMP)
	rm -rf gpu-wheels
	$(BIN)/pip wheel -qq --no-deps --wheel-dir gpu-wheels .
	$(BIN)/python -m tests.gpu.needs | $(BIN)/pip download -qq --only-binary=:all: --python-version $(GPU_PYTHON) \
	  $(addprefix --platform ,manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64) \
	  --dest gpu-wheels --requirement /dev/stdin

# A broker, other languages, Prometheus, Slurm, a browser. Debian's packages are installed if root runs it.
$(PARTS:%=test-%): test-%: needs-%
	$(PYTEST) tests/$*

$(PARTS:%=needs-%): needs-%: $(STAMP)
	tests/$*/install

# The store on a PostgreSQL server, beside SQLite.
test-postgresql: needs-postgresql
	$(PYTEST) tests/service/storage

needs-postgresql: $(STAMP)
	tests/service/storage/install

# The Helm chart for several values: lint it, render it, validate it against Kubernetes' schemas, and run its commands.
test-kubernetes: needs-kubernetes
	$(PYTEST) tests/kubernetes

needs-kubernetes: $(STAMP)
	$(BIN)/pip install -qq --requirement tests/kubernetes/requirements.txt
	test -x $(BIN)/helm || $(BIN)/python -m tests.kubernetes.get_helm $(BIN)/helm

# The source distribution, the wheel, and a bundle for installation without an index: all wheels that it needs, for this
# Python and this kind of machine, with their licences and bill of materials (CycloneDX), deploy/ and its install script. The
# same commit, and the same wheels of others, make the same bytes.
DIST_EXTRAS := coordinator,postgresql,certificates
dist: $(STAMP)
	rm -rf dist build
	$(BIN)/python -m build --no-isolation --outdir dist > /dev/null
	$(BIN)/pip wheel -qq --wheel-dir dist/wheels "$$(echo dist/perseus_energy-*.whl)[$(DIST_EXTRAS)]"
	$(PYTHON) -m venv dist/installed
	dist/installed/bin/pip install -qq --no-index --find-links dist/wheels "perseus-energy[$(DIST_EXTRAS)]"
	dist/installed/bin/pip uninstall -qq --yes pip setuptools
	$(BIN)/cyclonedx-py environment --gather-license-texts --output-reproducible --output-file \
	  dist/perseus-energy.cdx.json dist/installed
	rm -r dist/installed
	$(BIN)/python deploy/bundle.py dist

# Install the bundle as an operator does, without a network.
test-dist: dist
	$(PYTEST) tests/bundle

# Build the images on a Debian made for it, and run them: as root. Not part of `test-slow`.
test-images: dist
	tests/images/install
	$(PYTEST) --timeout=900 tests/images

# Take the pictures of the live page from a demo. Look at them before you commit them.
pictures: $(STAMP)
	tests/web/install
	$(BIN)/python -m tests.web.pictures docs/images

# The kill tests of `make test`, many more times. Writes benchmarks/results/torture.md.
KILLS ?= 50
torture: $(STAMP)
	$(BIN)/python -m tests.nvml.torture $(KILLS) benchmarks/results/torture.md

# Kill a coordinator many times under load, and send it malformed messages. Writes
# benchmarks/results/torture-coordinator.md.
COORDINATOR_KILLS ?= 100
MALFORMED ?= 100000
torture-coordinator: $(STAMP)
	$(BIN)/python -m tests.torture.coordinator $(COORDINATOR_KILLS) benchmarks/results/torture-coordinator.md \
	  --malformed $(MALFORMED)

# End coordinators that share a PostgreSQL database, in every way, while agents train.
FLEET_ROUNDS ?= 88
torture-fleet: $(STAMP)
	$(BIN)/python -m tests.torture.fleet $(FLEET_ROUNDS)

# Search for input that a parser neither accepts nor refuses, for so long each, guided by coverage.
FUZZ_S ?= 1200
fuzz: $(STAMP)
	$(BIN)/pip install -qq 'atheris>=3,<4'
	for target in $$($(BIN)/python -c 'from tests.fuzz.targets import TARGETS; print(*TARGETS)'); do \
	  echo "$$target"; $(BIN)/python -m tests.fuzz $$target $(FUZZ_S) 2>&1 | tail -8 || exit; done

# The documentation site, in build/docs; warnings are errors, and broken links are warnings.
docs: $(STAMP)
	$(BIN)/sphinx-build --fail-on-warning --fresh-env --quiet -b html docs build/docs

# Which tests can't fail: a sample of mutants against their own part's tests, for an hour or two. With AGAINST=FILE, the
# mutants of that earlier report.
MUTANTS ?= build/mutants.jsonl
mutants: $(STAMP)
	$(BIN)/pip install -qq 'cosmic-ray>=8.4,<9' 'pytest-cov>=7,<8'
	mkdir -p $(dir $(MUTANTS))
	$(BIN)/python -m tests.mutants $(MUTANTS) $(if $(AGAINST),--against $(AGAINST))

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/buf lint
	$(BIN)/buf breaking --against $(CONTRACT)
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/pip install -qq --editable '.[dev,bench]'
	for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name || exit; done
	test ! -e $(FRAMEWORKS_STAMP) || $(FRAMEWORKS_VENV)/bin/python -m benchmarks.adapters
	test ! -e $(FRAMEWORKS_STAMP) || $(FRAMEWORKS_VENV)/bin/python -m benchmarks.training_cost
	test ! -e $(FRAMEWORKS_STAMP) || $(FRAMEWORKS_VENV)/bin/python -m benchmarks.framework_plans
	$(BIN)/python -m benchmarks.report

# --proto_path is the folder above the package, so that the stubs import each other as perseus.v1.
protos: $(STAMP)
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m grpc_tools.protoc --proto_path=protos \
	  --python_out=$(OUT) --mypy_out=quiet:$(OUT) $(PROTOS:protos/%=%)
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m grpc_tools.protoc --proto_path=protos \
	  --grpc_python_out=$(OUT) --mypy_grpc_out=quiet:$(OUT) $(SERVICES:protos/%=%)

# The page of metrics, after a change of their names; a test compares.
metrics: $(STAMP)
	$(BIN)/python -m perseus.metrics.document > docs/metrics.md

# The page of all settings, after a change of one; a test compares.
settings: $(STAMP)
	$(BIN)/python docs/settings_page.py > docs/settings.md

# Run it, and review the result, after an intended change of the contract: from then on it is stable.
contract: $(STAMP)
	$(BIN)/buf build --exclude-source-info --output $(CONTRACT)

$(STAMP): pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -qq --upgrade pip
	$(BIN)/pip install -qq --editable '.[dev]'
	touch $@

# Several gigabytes: uv downloads in parallel, unpacks on all cores and compiles nothing beforehand. It takes wheels and
# certificates from pip's sources. DS_BUILD_OPS=0: DeepSpeed compiles nothing, either.
UV_INSTALL := UV_FIND_LINKS="$$PIP_FIND_LINKS" DS_BUILD_OPS=0 $(FRAMEWORKS_VENV)/bin/uv pip install --quiet \
  --python $(FRAMEWORKS_VENV)
$(FRAMEWORKS_STAMP): pyproject.toml tests/frameworks/requirements.txt
	test -d $(FRAMEWORKS_VENV) || $(PYTHON) -m venv $(FRAMEWORKS_VENV)
	$(FRAMEWORKS_VENV)/bin/pip install -qq --upgrade 'uv>=0.9,<1'
	$(UV_INSTALL) --editable '.[coordinator,certificates]' --requirement tests/frameworks/requirements.txt
	for version in $(MEGATRON_CORES); do \
	  $(UV_INSTALL) --no-deps --upgrade megatron-core==$$version \
	    --target $(FRAMEWORKS_VENV)/megatron-core-$$version || exit; done
	$(UV_INSTALL) --no-deps --upgrade megatron-core==$(NEWEST_MEGATRON_CORE) \
	  --python-version 3.12 --target $(FRAMEWORKS_VENV)/megatron-core-$(NEWEST_MEGATRON_CORE)
	$(UV_INSTALL) --upgrade torch==$(NEWEST_TORCH) torchtitan==$(NEWEST_TORCHTITAN) \
	  --target $(FRAMEWORKS_VENV)/torch-$(NEWEST_TORCH)
	touch $@

# Two gigabytes. torchvision and its like come with libraries for CUDA, and a language model needs none of them.
$(VLLM_STAMP): pyproject.toml tests/engines/requirements.txt
	test -d $(VLLM_VENV) || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install -qq --upgrade 'uv>=0.9,<1'
	UV_FIND_LINKS="$$PIP_FIND_LINKS" $(VLLM_VENV)/bin/uv pip install --quiet --python $(VLLM_VENV) \
	  --editable '.[coordinator]' --requirement tests/engines/requirements.txt
	$(VLLM_VENV)/bin/uv pip uninstall --quiet --python $(VLLM_VENV) torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(FRAMEWORKS_VENV) $(LOWEST_VENV) examples/nodejs/node_modules gpu-wheels dist demo-out build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
