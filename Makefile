# Two commands for people: `make demo`, `make test`. Both start from nothing but Python and pip.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE  # the tests start many processes: they should not compile plait each

.PHONY: demo test test-all test-tf lint bench clean

demo: $(VENV)/.installed
	$(BIN)/plait demo

test: lint
	$(BIN)/pytest -m "not slow and not alone" -n 2 --dist loadfile
	$(BIN)/pytest -m "not slow and alone"

test-all: lint
	HYPOTHESIS_PROFILE=new $(BIN)/pytest

test-tf:  # against TensorFlow itself: files, checkpoints, networks; in an environment of its own
	$(PYTHON) -m venv $(VENV)-tf
	$(VENV)-tf/bin/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,dev-tf]'
	CUDA_VISIBLE_DEVICES= $(VENV)-tf/bin/pytest $$(find tests -name '*_tensorflow.py' | sort)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/pip install -q -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/source.py
	$(BIN)/python benchmarks/pictures.py
	$(BIN)/python benchmarks/resnet.py
	$(BIN)/python benchmarks/tfrecord.py
	$(BIN)/python benchmarks/collective.py
	$(BIN)/python benchmarks/parameter_server.py
	$(BIN)/python benchmarks/table.py
	$(BIN)/python benchmarks/transport.py
	$(BIN)/python benchmarks/federal.py
	$(BIN)/python benchmarks/privacy.py
	$(BIN)/python benchmarks/features.py
	$(BIN)/python benchmarks/psi.py
	$(BIN)/python benchmarks/serve.py

$(VENV)/.installed: pyproject.toml constraints.txt src/plait/feature_column/_rows.c
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-tf build demo-output src/*.egg-info src/plait/feature_column/_rows.*.so .mypy_cache .pytest_cache .ruff_cache
