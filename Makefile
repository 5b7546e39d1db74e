# `make demo` and `make test` set everything up themselves, in .venv, from a fresh clone.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
# Spinning OpenMP threads make small models many times slower on a busy machine.
export OMP_WAIT_POLICY ?= PASSIVE
OUT ?= demo

SOURCES := $(shell find loka_compile passes lowering kernels -name '*.py') pyproject.toml

.PHONY: setup torchrec demo test lint types golden results clean

setup: $(VENV)/.installed

$(VENV)/.dependencies: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch triton
	$(BIN)/pip install --quiet -c constraints.txt '.[train,flights,torchao,dev]'
	touch $@

# The tests run against an installed wheel, so a changed source is installed again.
$(VENV)/.installed: $(VENV)/.dependencies $(SOURCES)
	$(BIN)/pip install --quiet --no-deps --force-reinstall .
	touch $@

# Beside the environment, not in it: TorchRec's own requirements would replace torch. Where it cannot
# be had, its example is skipped.
torchrec: $(VENV)/.torchrec

$(VENV)/.torchrec: examples/torchrec.txt $(VENV)/.dependencies
	rm -rf $(VENV)/torchrec
	$(BIN)/pip install --quiet --no-deps --target $(VENV)/torchrec -r $< \
	  && touch $@ || echo 'TorchRec cannot be installed here; its example will be skipped'

demo: setup
	$(BIN)/loka train --model wukong --scale tiny --data flights --limit 61440 --batch 512 --out $(OUT)

# Not `python -m pytest`: that puts the source tree before the installed package.
test: setup torchrec lint types
	LOKA_TORCHREC=$(abspath $(VENV))/torchrec TORCHINDUCTOR_COMPILE_THREADS=1 $(BIN)/pytest -n $(WORKERS) --durations=10

lint: setup
	$(BIN)/ruff check .

types: setup
	cd $(VENV) && bin/mypy -p loka_compile --config-file ../pyproject.toml

golden: setup
	LOKA_UPDATE_GOLDEN=1 $(BIN)/pytest tests/report -q

results:
	$(PYTHON) benchmarks/make_results.py

clean:
	rm -rf $(VENV) build *.egg-info $(OUT)
