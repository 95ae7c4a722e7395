# Two commands: `make demo` and `make test`. Both set up .venv first; pip and a package index are all they need.
PYTHON ?= python3.11
VENV := .venv
DATA ?= ../shared/data
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Ratios to a plain loop over torch_geometric models; about 40 minutes on a quiet machine.
bench: $(READY)
	$(BIN)/python benchmarks/speed/bench.py --data-dir $(DATA)

.PHONY: demo test test-slow test-bounds bench check docs options format lock hashes clean

demo: $(READY)
	$(BIN)/silograph run digits --clients 10 --partition metis

# Workers and the processes that tests start share compiled modules, whatever the environment says.
test test-slow: export PYTHONDONTWRITEBYTECODE :=

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow --timeout 5400

# Tries each command with the lowest and the newest allowed versions, in environments of their own.
# uv finds wheels where pip does. PYTHONS are versions or paths. BOUNDS=--cuda also tries Pythons whose torch brings CUDA packages.
PYTHONS ?= 3.11 3.13
test-bounds: export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
test-bounds:
	test -x .venv-bounds/bin/uv || { $(PYTHON) -m venv .venv-bounds && .venv-bounds/bin/python -m pip install --quiet uv; }
	$(PYTHON) tests/bounds.py --uv .venv-bounds/bin/uv --python $(PYTHONS) $(BOUNDS)

# The documentation site, into docs/_build/html/VERSION; warnings and broken links are errors. Notebooks run once and are kept in docs/_build.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	site=docs/_build/html/$$($(BIN)/python -c 'import silograph; print(silograph.__version__)') && \
		$(BIN)/python -m sphinx -b html -W --keep-going -d docs/_build/doctrees docs $$site && \
		$(BIN)/python docs/check_links.py $$site

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Keywords of sg.run and its relatives, for editors: after a change of the fields of RunConfig.
options: $(READY)
	PYTHONPATH=tests $(BIN)/python tests/typed_options.py

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# An unpinned torch may bring gigabytes of CUDA packages, so every install goes by constraints.txt.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "silograph needs Python 3.11 or newer")'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,fast,plots,tune,federation,dp]'
	touch $(READY)

# Pins anew from a clean environment; look at the difference before you commit it.
lock:
	rm -rf .venv-lock
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet hatchling editables
	.venv-lock/bin/python -m pip install --quiet 'torch==2.13.0' -e '.[dev,fast,plots,tune,tensorboard,mlflow,federation,dp,ray]'
	.venv-lock/bin/python -m pip freeze --all --exclude-editable --exclude pip | sed 's/+cpu//' > constraints.txt
	$(MAKE) hashes

# The same versions with digests of all files that the package index has of each; of torch that of the
# wheel alone that pip takes here (a CPU build), for other ones need packages that are not listed.
hashes:
	test -x .venv-lock/bin/python || $(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet uv
	grep -v '^torch==' constraints.txt | .venv-lock/bin/uv pip compile --quiet --no-deps --generate-hashes --no-header \
		--no-annotate --python-version 3.11 - > constraints-hashed.txt
	.venv-lock/bin/python -m pip download --quiet --no-deps --dest .venv-lock/torch "$$(grep '^torch==' constraints.txt)"
	grep '^torch==' constraints.txt | sed 's/$$/ \\/' >> constraints-hashed.txt
	.venv-lock/bin/python -m pip hash .venv-lock/torch/torch*.whl | sed -n 's/^--hash/    --hash/p' >> constraints-hashed.txt
	rm -rf .venv-lock

clean:
	rm -rf $(VENV) .venv-bounds .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist docs/_build
