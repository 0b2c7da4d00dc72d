# Two commands for a bare machine with Python 3.11 or newer:
#   make demo   protects a real training run through real faults (under five minutes)
#   make test   runs the tests
# Both make a virtual environment in .venv and install what they need.

PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: demo test slow lint types doctest clean

demo: $(STAMP)
	$(RUN) -m stabil.cli demo

# XLA's older emitters compile for a CPU in half the time, and bits may differ by them.
# A flag that XLA does not know ends the process, so it is tried first.
QUICK := --xla_cpu_use_fusion_emitters=false
TRY := -c "import jax; jax.devices()"

test: $(STAMP)
	flags=$$(XLA_FLAGS=$(QUICK) $(RUN) $(TRY) 2> /dev/null && echo $(QUICK)); \
	XLA_FLAGS=$$flags $(RUN) -m pytest -n auto --dist loadfile -m "not slow and not bits"
	$(RUN) -m pytest -n auto --dist loadfile -m "bits and not slow"

slow: $(STAMP)
	$(RUN) -m pytest -m slow

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(STAMP)
	$(RUN) -m pyrefly check --python-interpreter-path $(RUN)

doctest: $(STAMP)
	JAX_PLATFORMS=cpu $(RUN) -m pytest -n auto --doctest-modules stabil

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "stabil needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": write make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV)
