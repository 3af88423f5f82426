# Every target installs what it needs by itself (tools/setup says what it does) and works from a fresh clone.
VENV := .venv
BIN := $(VENV)/bin

ASSETS := cloud_controller/edgesplit_controller/dashboard_assets/index.html
DASHBOARD := $(shell find cloud_controller/dashboard -name node_modules -prune -o -type f -print)

.PHONY: demo test test-arm64 test-boot test-dashboard lint check bench format pages soak clean dashboard screenshots

demo: $(VENV)/.demo $(ASSETS)
	$(BIN)/edgectl demo $(DEMO)

# Tests run side by side: a thread of matrices for each worker, or they wait for each other. They wait for processes a
# third of their time, so there are more workers than processors; files of many short tests come last and fill the gaps.
test: export OPENBLAS_NUM_THREADS ?= 1
test: $(VENV)/.dev $(ASSETS)
	@tools/dashboard test || [ $$? = 3 ]
	$(BIN)/python -m pytest -n $(or $(JOBS),$(shell echo $$(($$(getconf _NPROCESSORS_ONLN) * 3 / 2)))) --dist loadfile --no-loadscope-reorder $(TEST)

# The agent on real arm64 programs, under qemu-user: installed from a flashed card, enrolled at a controller here, split on
# onnxruntime and on LiteRT. Says what it fetches; a Debian root is made once and kept in out/arm64 (EDGESPLIT_ARM64_CACHE).
test-arm64: $(VENV)/.dev
	EDGESPLIT_ARM64=1 $(BIN)/python -m pytest -s -v --timeout 3600 tests/arm64/test_arm64_device.py $(TEST)

# A first boot of a flashed card in qemu-system (systemd, cloud-init), with a power cut in the middle that heals; more
# cuts: EDGESPLIT_BOOT_CUTS=3, at other moments: EDGESPLIT_SEED=7.
test-boot: $(VENV)/.dev
	EDGESPLIT_ARM64=1 $(BIN)/python -m pytest -s -v --timeout 7200 tests/arm64/test_booted_card.py $(TEST)

# Format, lint and types.
lint: $(VENV)/.dev $(ASSETS)
	tools/dashboard check || [ $$? = 3 ]
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini tests bench
	$(BIN)/pyright

check: lint
	$(BIN)/python -m pytest -q -n $(or $(JOBS),auto) tests/unit $(TEST)

bench: $(VENV)/.dev
	@for script in bench/*.py; do echo "== $$script"; $(BIN)/python $$script --json out/$$(basename $$script .py).json || exit 1; done

# The planner against trying every assignment, on as many random graphs as asked for (make soak INSTANCES=10000); power
# cut as often as asked for (CUTS=20000), agents killed, long walks through the states of an update, and every parser
# of network bytes with as many spoiled examples (EXAMPLES=5000); a simulated fleet through thirty days of faults
# (SIM_DEVICES=40 SIM_DAYS=30); then an hour of full load with
# faults (SOAK_S=600), and models above 2 GB, and a slice of 2 GiB all the
# way to a device (16 GB of disk).
soak: export EDGESPLIT_SEED ?= $(shell date +%s)
soak: $(VENV)/.dev
	EDGESPLIT_INSTANCES=$(or $(INSTANCES),10000) $(BIN)/python -m pytest -n $(or $(JOBS),auto) --timeout 3600 tests/unit/partitioner/planner/test_planner_brute_force.py tests/unit/partitioner/milp/test_milp_brute_force.py tests/unit/partitioner/planner/test_planner_tiers.py
	EDGESPLIT_POWER_CUTS=$(or $(CUTS),20000) EDGESPLIT_DISK_FAULTS=1 EDGESPLIT_AGENT_KILLS=120 EDGESPLIT_WORKER_KILLS=500 EDGESPLIT_OFFLOAD_KILLS=200 EDGESPLIT_OFFLOAD_CUTS=5000 EDGESPLIT_ACTIVATION_EXAMPLES=1000 EDGESPLIT_ROLLOUT_KILLS=1000 EDGESPLIT_ROLLOUT_EXAMPLES=200 $(BIN)/python -m pytest -n $(or $(JOBS),auto) --dist loadfile --timeout 7200 tests/faults/test_power_cuts.py tests/faults/test_disk_faults.py tests/faults/test_agent_kills.py tests/faults/test_activation_machine.py tests/faults/test_worker_faults.py tests/faults/test_offload_server_faults.py tests/faults/test_rollout_faults.py tests/unit/controller/rollout/test_state_machine.py
	EDGESPLIT_PROCESS_KILLS=$(or $(PROCESS_KILLS),40) $(BIN)/python -m pytest --timeout 7200 tests/faults/test_several_processes.py
	EDGESPLIT_FUZZ=$(or $(EXAMPLES),5000) $(BIN)/python -m pytest -n $(or $(JOBS),auto) --dist load --timeout 7200 tests/faults/test_fuzz_*.py tests/faults/test_forged_halves.py
	EDGESPLIT_OPENAPI_EXAMPLES=$(or $(EXAMPLES),200) $(BIN)/python -m pytest -n $(or $(JOBS),auto) --timeout 7200 tests/conformance/test_openapi.py
	EDGESPLIT_SIM_DAYS=$(or $(SIM_DAYS),30) EDGESPLIT_SIM_DEVICES=$(or $(SIM_DEVICES),40) $(BIN)/python -m pytest -s --timeout 14400 tests/faults/test_fleet.py
	EDGESPLIT_SOAK_S=$(or $(SOAK_S),3600) $(BIN)/python -m pytest -s tests/faults/test_soak.py tests/faults/test_offload_faults.py
	EDGESPLIT_LARGE_MODEL=1 $(BIN)/python -m pytest --timeout 3600 -s tests/unit/partitioner/onnx_format/test_archive.py tests/integration/test_large_slice.py

# Pages that programs write of themselves; a test compares each.
pages: $(VENV)/.dev
	$(BIN)/python -m edgesplit_cli.reference > docs/cli.md
	$(BIN)/python -m edgesplit.observability.metrics_reference > docs/metrics.md
	$(BIN)/python -m edgesplit_controller.api.reference openapi > docs/openapi.json
	$(BIN)/python -m edgesplit_controller.api.reference access > docs/access.md

format: $(VENV)/.dev
	tools/dashboard format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

dashboard: $(VENV)/.demo
	tools/dashboard build

# The dashboard's tests as in an installation that has grown: two controller processes on PostgreSQL.
test-dashboard: $(VENV)/.dev $(ASSETS)
	EDGESPLIT_DASHBOARD_PROCESSES=2 $(BIN)/python -m pytest -q tests/integration/test_dashboard.py

# Every page of the dashboard, light and dark, on a desktop and a phone, of a fleet that is made up: docs/pictures/dashboard.
screenshots: $(VENV)/.dev $(ASSETS)
	$(BIN)/python tools/screenshots

clean:
	rm -rf cloud_controller/dashboard/node_modules cloud_controller/edgesplit_controller/dashboard_assets
	rm -rf $(VENV) out dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.demo: pyproject.toml constraints.txt requirements/cli.txt tools/setup
	tools/setup cli
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt requirements/dev.txt tools/setup
	tools/setup dev
	@touch $@ $(VENV)/.demo

# Where npm's registry cannot be reached the controller serves a page that says so.
$(ASSETS): $(DASHBOARD) tools/dashboard | $(VENV)/.demo
	@tools/dashboard build || [ $$? = 3 ]
