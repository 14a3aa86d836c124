# `make help` lists the targets. All but test-tf215 and test-clients run in .venv, which `make setup` makes with PYTHON.

PYTHON ?= python3
JOBS ?= $(shell nproc)

BIN := $(CURDIR)/.venv/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
SETUP_STAMP := .venv/setup-stamp
export PATH := $(BIN):$(PATH)
# Ranks outnumber cores in tests, demo and benchmarks, and threads of OpenMP would get in each other's way.
export OMP_NUM_THREADS ?= 1

# Every tool here is parallel in itself, and two of them must not share a build directory.
.NOTPARALLEL:

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## Make .venv with pinned requirements, and Horovod built for them
	@$(PYTHON) tools/bootstrap.py .venv

# Made by setup, which leaves it alone when there is nothing to do.
$(SETUP_STAMP): setup
	@:

.PHONY: build
build: build/release/build.ninja .venv/install-stamp ## Build the extensions in place
	@$(BIN)/cmake --build build/release -j $(JOBS)
	@$(BIN)/cmake --install build/release --prefix . >build/install.log

# An editable install for the console script and the metadata; it compiles nothing.
.venv/install-stamp: $(SETUP_STAMP) pyproject.toml setup.py
	@$(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

build/info/stamp: $(SETUP_STAMP) tools/horovod_info.py tools/install_horovod.py
	@$(BIN)/python tools/horovod_info.py build/info
	@touch $@

build/tsan/build.ninja: EXTRA := -DHOROVOD_PARTIAL_SANITIZE=thread
build/asan/build.ninja: EXTRA := -DHOROVOD_PARTIAL_SANITIZE=address
build/fuzz/build.ninja: EXTRA := -DHOROVOD_PARTIAL_SANITIZE=fuzzer -DCMAKE_CXX_COMPILER=$(CLANGXX)
build/gpu/build.ninja: EXTRA := -DHOROVOD_PARTIAL_GPU_CHECK=ON
build/coverage/build.ninja: EXTRA := "-DCMAKE_CXX_FLAGS=--coverage" "-DCMAKE_CXX_FLAGS_RELEASE=-O1"
build/%/build.ninja: build/info/stamp Makefile
	@$(BIN)/cmake -S . -B build/$* -G Ninja -DPython_EXECUTABLE=$(BIN)/python -DHOROVOD_PARTIAL_INFO=$(CURDIR)/build/info \
		-DHOROVOD_PARTIAL_TESTS=ON -DHOROVOD_PARTIAL_WERROR=ON $(EXTRA)
	@touch $@

# Build and run the C++ tests of one build directory.
CTESTS := ctest-release ctest-tsan ctest-asan ctest-coverage
.PHONY: $(CTESTS)
$(CTESTS): ctest-%: build/%/build.ninja
	@$(BIN)/cmake --build build/$* -j $(JOBS) --target cpp_tests
	@$(BIN)/ctest --test-dir build/$* --output-on-failure --no-tests=ignore -j $(JOBS)

# Python's is that of COVERED and of all processes that it starts. What threads count at once may be lost in C++.
COVERED ?= tests/single
COVERAGE := build/coverage/report
.PHONY: coverage
coverage: build ctest-coverage ## Show which lines and branches the C++ tests and COVERED run; pages go to build/coverage/report
	@$(PIP) --constraint requirements/constraints.txt --requirement requirements/coverage.txt
	@rm -rf $(COVERAGE) && mkdir -p $(COVERAGE)/cpp $(COVERAGE)/python
	@$(BIN)/gcovr --root . --filter cpp/ --exclude-throw-branches --exclude-unreachable-branches --delete -j $(JOBS) \
		--gcov-ignore-parse-errors=negative_hits.warn --txt-summary --html-nested $(COVERAGE)/cpp/index.html build/coverage
	@$(BIN)/coverage run -m pytest $(COVERED)
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage html --quiet --directory $(COVERAGE)/python
	@$(BIN)/coverage report --skip-covered

.PHONY: mutants
mutants: build/release/build.ninja ## Plant defects, one at a time, and see that the tests catch each
	@$(BIN)/python tools/mutants.py --jobs $(JOBS) build/mutants build/info

.PHONY: check-gpu
check-gpu: $(SETUP_STAMP) ## Compile what differs for CUDA and NCCL; needs no GPU
	@$(PIP) --no-deps --requirement requirements/gpu.txt --requirement requirements/gpu-check.txt
	@$(MAKE) --no-print-directory build/gpu/build.ninja
	@$(BIN)/cmake --build build/gpu -j $(JOBS) --target check_gpu

.PHONY: test
test: build ctest-release ## Set up, build and run the tests with up to 8 ranks
	@$(BIN)/python -m pytest tests/single tests/parallel tests/faults

.PHONY: test-all
test-all: build ctest-release ctest-tsan ctest-asan check-gpu ## Run the whole matrix, and the C++ tests under sanitizers
	@$(BIN)/python -m pytest --matrix=full tests/single tests/parallel tests/faults
	@$(MAKE) --no-print-directory test-clients

# Ranks with a sanitized extension, whose runtime must be there before Python. It wants to see the C++ library, too.
SANITIZED := $(addprefix tests/parallel/test_,rounds.py operations.py groups.py optimizer.py ends.py)
SANITIZED_asan := ASAN_OPTIONS=detect_leaks=0
# Open MPI follows the memory that threads give back, and takes a lock for it when ThreadSanitizer has done with the thread.
SANITIZED_tsan := TSAN_OPTIONS=suppressions=$(CURDIR)/tests/sanitizers/thread.supp OMPI_MCA_memory=^patcher
SANITIZED_RUNS := test-sanitized-asan test-sanitized-tsan
.PHONY: test-sanitized $(SANITIZED_RUNS)
test-sanitized: $(SANITIZED_RUNS) ## Run the tests of operations and optimizers under sanitizers
$(SANITIZED_RUNS): test-sanitized-%: build build/%/build.ninja
	@$(BIN)/cmake --build build/$* -j $(JOBS) --target attach _attach _core
	@rm -rf build/$*/package && mkdir build/$*/package && cp -r horovod_partial build/$*/package
	@cp build/$*/*.so build/$*/package/horovod_partial
	@env $(SANITIZED_$*) PYTHONPATH=$(CURDIR)/build/$*/package \
		LD_PRELOAD="$$(g++ -print-file-name=lib$*.so) $$(g++ -print-file-name=libstdc++.so.6)" $(BIN)/pytest $(SANITIZED)

# Besides these, tests/parallel/test_hosts.py in `make test-all`.
.PHONY: test-hosts
test-hosts: build ## Run the tests of operations, optimizers and groups over two and three hosts, as root
	@for hosts in 2 3; do for transport in gloo mpi; do \
		$(BIN)/python -m pytest --hosts=$$hosts --transport=$$transport \
			$(addprefix tests/parallel/test_,operations.py optimizer.py groups.py) || exit; \
	done; done

CLANGXX ?= clang++
FUZZ_SECONDS ?= 60
FUZZ_TARGETS := $(basename $(notdir $(wildcard tests/fuzz/fuzz_*.cc)))

.PHONY: fuzz
fuzz: build/fuzz/build.ninja ## Feed damaged messages and files to the decoders, FUZZ_SECONDS each; needs Clang with libFuzzer
	@$(BIN)/cmake --build build/fuzz -j $(JOBS) --target fuzz_targets
	@for name in $(FUZZ_TARGETS); do \
		mkdir -p build/fuzz/found/$$name && build/fuzz/$$name -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=1024 \
			-artifact_prefix=build/fuzz/$$name. build/fuzz/found/$$name tests/fuzz/corpus/$$name || exit; \
	done

MINUTES ?= 60
TRANSPORT ?= mpi
SEEDS ?= 0:150

.PHONY: soak
soak: build ## Train under all policies for MINUTES over TRANSPORT, with stops; again goes on where it ended
	@$(BIN)/python tests/faults/soak.py --minutes $(MINUTES) --transport $(TRANSPORT) --results build/soak.jsonl

.PHONY: faults
faults: build ## Run the jobs of SEEDS over TRANSPORT, each with faults of its own; again runs those that are left
	@$(BIN)/python tests/faults/run.py --seeds $(SEEDS) --transport $(TRANSPORT) --results build/faults.jsonl

# In an environment of its own, into which the package is installed as by users: nothing of the normal build is touched.
# `python -m pytest` would find the package of this folder first.
.PHONY: test-tf215
test-tf215: BIN := $(CURDIR)/.venv-tf215/bin
test-tf215: ## Run the tests of the tape and the operations with TensorFlow 2.15
	@$(PYTHON) tools/bootstrap.py .venv-tf215
	@rm -rf build/tf215
	@CMAKE_ARGS=-DHOROVOD_PARTIAL_WERROR=ON CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) --no-build-isolation --no-deps \
		--force-reinstall --config-settings='--global-option=build --build-base=build/tf215' .
	@$(BIN)/pytest -rs --no-fold-skipped \
		tests/parallel/test_tensorflow.py tests/parallel/test_jobs.py::test_two_frameworks_in_one_process \
		$(addprefix tests/parallel/test_conformance_,operations.py rounds.py invariants.py models.py optimizer.py) \
		-k '(test_tensorflow or two_frameworks or eager or graph) and not keras'

# Horovod with NCCL, and ours for it, in environments of their own: what of a build for GPUs can be tested without one.
GPU_VENVS := .venv-gpu .venv-gpu211
# Those of PyTorch: the others need TensorFlow, other machines, or minutes for what has nothing to do with a build.
GPU_BUILD_TESTS := $(filter-out %_papers.py %_hosts.py %_smoke.py %_work.py %cookbook.py %_gpu_programs.py, \
	$(shell grep -L "tensorflow\|keras" tests/parallel/test_*.py)) \
	$(addprefix tests/parallel/test_conformance_,invariants.py model_optimizer.py) tests/single/test_nccl.py
.PHONY: setup-gpu $(GPU_VENVS:%=setup-%)
setup-gpu: $(GPU_VENVS:%=setup-%) ## Make .venv-gpu and .venv-gpu211: PyTorch for CUDA, and Horovod and ours built with NCCL
$(GPU_VENVS:%=setup-%): setup-%:
	@$(PYTHON) tools/bootstrap.py $*
	@rm -rf build/$*
	@CMAKE_ARGS=-DHOROVOD_PARTIAL_WERROR=ON CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $*/bin/python -m pip install --quiet \
		--disable-pip-version-check --no-build-isolation --no-deps --force-reinstall \
		--config-settings='--global-option=build --build-base=build/$*' .

.PHONY: test-gpu-build
test-gpu-build: setup-gpu ## Run PyTorch's parallel tests on CPU tensors over builds with NCCL, without a GPU
	@for venv in $(GPU_VENVS); do for transport in gloo mpi; do \
		PATH="$(CURDIR)/$$venv/bin:$$PATH" $$venv/bin/pytest -rs --transport=$$transport \
			-k "not (eager or graph or tensorflow or keras)" $(GPU_BUILD_TESTS) || exit; \
	done; done

# The double of a GPU, which TensorFlow takes for one, so that our kernels for GPUs run: placement, what is on the host and what
# on the device, the order of streams. Of PyTorch's tensors only we say that they lie there: devices in messages, zeros, events.
# It says nothing of CUDA or NCCL. TensorFlow has no kernels for sparse variables there, and Horovod
# has no join and no broadcast in place.
DOUBLE := build/release/double
GPU_DOUBLE_TESTS := $(addprefix tests/parallel/test_,gpu_kernels.py tensorflow.py conformance_operations.py conformance_rounds.py \
	conformance_models.py gpu_devices.py gpu_training.py operations.py rounds.py optimizer.py groups.py ends.py work_sharing.py)
.PHONY: test-gpu-double
test-gpu-double: build build/release/build.ninja ## Run tests of operations and optimizers on a double of a GPU
	@$(BIN)/cmake --build build/release -j $(JOBS) --target gpu_double tensorflow_ops_double
	@rm -rf $(DOUBLE)/package && mkdir $(DOUBLE)/package && cp -r horovod_partial $(DOUBLE)/package
	@cp $(DOUBLE)/_tensorflow_ops.so $(DOUBLE)/libhorovod_partial_attach.so $(DOUBLE)/package/horovod_partial
	@cp tests/parallel/doubles/gpu/devices.py $(DOUBLE)/package/horovod_partial/exchange
	@cp tests/parallel/doubles/gpu/torch_devices.py $(DOUBLE)/package/horovod_partial/torch/devices.py
	@TF_PLUGGABLE_DEVICE_LIBRARY_PATH=$(CURDIR)/$(DOUBLE)/gpu_double.so PYTHONPATH=$(CURDIR)/$(DOUBLE)/package \
		$(BIN)/pytest -rs --no-fold-skipped $(GPU_DOUBLE_TESTS) -k 'not indexed_slices and not test_join and not joined_rank and not tensors_that_are_refused and not inplace'

# What a launcher's server needs is installed here, so that `make setup` stays as small as it is. Not where systemd runs, which
# would start the servers.
LAUNCHER_PACKAGES := slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge openssh-server nftables
.PHONY: test-launchers
test-launchers: build ## Train under mpirun, Slurm, Ray and Spark; what is missing is skipped, with its reason
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && [ ! -d /run/systemd/system ]; then \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(LAUNCHER_PACKAGES) >/dev/null || true; \
	fi
	@$(PIP) --constraint requirements/constraints.txt --requirement requirements/launchers.txt
	@$(BIN)/python -m pytest -rs tests/launchers

# Beside .venv: what is not in .venv-clients comes from there, and nothing that Horovod was built for is replaced.
.venv-clients/stamp: $(SETUP_STAMP) requirements/clients.txt
	@rm -rf .venv-clients
	@$(BIN)/python -m venv .venv-clients
	@$(BIN)/python -c "import site; print('import site; site.addsitedir(' + repr(site.getsitepackages()[0]) + ')')" \
		>"$$(echo .venv-clients/lib/python*/site-packages)/beside.pth"
	@.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements/clients.txt
	@touch $@

.PHONY: test-clients
test-clients: build .venv-clients/stamp ## Run unedited programs of others under Horovod, and with ours in its place
	@.venv-clients/bin/python -m pytest -rs tests/clients

.PHONY: matrix
matrix: ## Install and try everything on bare Debian systems, with old and new frameworks; as root, an hour or two
	@$(PYTHON) tools/matrix.py

.PHONY: demo
demo: build ## Set up, build and train on digits under each policy
	@$(BIN)/python examples/torch/digits.py

.PHONY: bench
bench: build ## Measure the figures of docs/benchmarks.md again; takes hours
	@$(BIN)/python benchmarks/rerun.py
	@$(BIN)/python benchmarks/write_pages.py

.PHONY: lint
lint: build ## Check style and types
	@$(BIN)/pre-commit run --all-files

.PHONY: tidy
tidy: build ## Check the C++ sources with clang-tidy, which takes minutes
	@$(BIN)/clang-tidy -p build/release --quiet cpp/*/*.cc cpp/core/*/*.cc

.PHONY: format
format: $(SETUP_STAMP) ## Format the sources in place
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format --quiet .
	@$(BIN)/clang-format -i $$(git ls-files --cached --others --exclude-standard '*.cc' '*.h')

.PHONY: docs
docs: build ## Build the documentation in build/docs; a broken link within it is an error
	@$(PIP) --constraint requirements/constraints.txt --requirement requirements/docs.txt
	@$(BIN)/sphinx-build --quiet --fail-on-warning docs build/docs

.PHONY: clean
clean: ## Remove what was built, but neither .venv nor the cached Horovod
	rm -rf build dist *.egg-info horovod_partial/*.so horovod_partial/_build_info.py
