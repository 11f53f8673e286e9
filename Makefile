# make run    a model answers, with the bill of the answer
# make test   everything: style, unit tests, exercise proofs, notebooks
# make lab    JupyterLab on the first notebook
# make bench  speed and memory of this machine, against transformers
# Python 3.11 to 3.13 is all that is needed; another one: make run PYTHON=/path/to/python3.12

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)

.PHONY: run test lab bench gpu setup lint unit notebooks clean

run: setup
	@$(BIN)/python -m minillm demo

test: lint unit notebooks

lab: setup
	$(BIN)/python -m jupyter lab notebooks/00_start_here.ipynb

bench: setup
	$(BIN)/python -m minillm bench --compare transformers --quality

lint: setup
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

# One thread a worker: two test files at a time are faster than two threads on the tiny models of most tests.
# The model is fetched first, so that the workers do not each do it. tests/conftest.py says which files are begun first.
unit: setup
	$(BIN)/python -c "from minillm.fetch import default_model_path; default_model_path()"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -n 2 --dist loadfile --no-loadscope-reorder -q \
		--durations=10

# One thread a kernel here too, and two notebooks at a time. Two threads in one: a step waits for both, and on a machine
# that does other work a wait costs more than the step, so that no comparison of times would hold. The cells of the
# exercises' solutions are plain Python, without a kernel of their own to start: tests/test_exercises.py runs them.
notebooks: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --nbval-lax --nbval-current-env --nbval-cell-timeout=300 -n 2 --dist loadfile \
		-q --durations=10 notebooks

setup: $(STAMP)

$(STAMP): requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "minillm needs Python 3.11 to 3.13; install one, or: make $(MAKECMDGOALS) PYTHON=/path/to/python" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments; on Debian: apt install python3-venv" >&2; exit 2; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version), once; torch makes this a few minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps -e .
	@touch $(STAMP)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis *.egg-info

gpu:
	@python3 -m kernels gpu
