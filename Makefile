# make demo   the main job on the bundled model: a few minutes, no download but the packages
# make test   the test suite
# make lint   ruff
# make bench  mtplab against its peers and against the machine's limits
#
# Each needs nothing but Python 3.11 or newer; the packages go into .venv. Another Python: make PYTHON=/path/to/python demo

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -c constraints.txt
INPUTS := pyproject.toml constraints.txt

# A stamp is touched last: what failed or was interrupted is done again.
MADE := $(VENV)/.made
DEMO := $(VENV)/.demo
TEST := $(VENV)/.test

.PHONY: help demo test lint bench clean
.DELETE_ON_ERROR:

help:
	@sed -n '/^# make/s/^# //p' Makefile

demo: $(DEMO)
	$(BIN)/mtplab demo $(ARGS)

test: $(TEST)
	$(BIN)/python -m pytest $(ARGS)

lint: $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(TEST)
	$(BIN)/python benchmarks/run.py $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info

# A venv whose Python has gone (an upgrade, a moved folder) is made anew.
ifneq ($(shell $(BIN)/python -c 'print("works")' 2>/dev/null),works)
.PHONY: $(MADE)
endif

$(MADE):
	@found=; bare=; \
	for python in $(or $(PYTHON),python3.11 python3.12 python3.13 python3.14 python3); do \
	  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  if "$$python" -c 'import ensurepip, venv' 2>/dev/null; then found=$$python; break; fi; \
	  bare=$${bare:-$$python}; \
	done; \
	if [ -z "$$found" ] && [ -n "$$bare" ]; then \
	  v=$$("$$bare" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	  echo "make: $$bare (Python $$v) has no ensurepip, so it cannot make a venv with pip." \
	    "On Debian or Ubuntu: apt install python$$v-venv" >&2; exit 1; \
	fi; \
	if [ -z "$$found" ]; then \
	  echo "make: $(if $(PYTHON),$(PYTHON) is no Python,no Python) 3.11 or newer$(if $(PYTHON),, was found);" \
	    "install one, or name it: make PYTHON=/path/to/python" >&2; exit 1; \
	fi; \
	echo "making $(VENV) with $$found"; \
	rm -rf $(VENV) && "$$found" -m venv $(VENV) && touch $@

$(DEMO): $(MADE) $(INPUTS)
	$(PIP) -e '.[plots]'
	@touch $@

# mlx-vlm's model files need nothing that is not there; what the rest of it needs is 550 MB.
$(TEST): $(MADE) $(INPUTS)
	$(PIP) -e '.[test]'
	$(PIP) --no-deps mlx-vlm
	@touch $@
