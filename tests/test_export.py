"""What can be tested for GPUs and TPUs without one: the command line's programs, with the published
configuration, are lowered for them and use no operations other than XLA's own."""

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.export
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

QR = {  # of initial weights: the only calls of a library
    "cuda": {"cusolver_geqrf_ffi", "cusolver_orgqr_ffi"},
    "tpu": {"Qr", "ProductOfElementaryHouseholderReflectors"},
}
SEEDS = 3


class Accelerators(list):
    """Devices that claim not to be CPUs."""

    def __getitem__(self, i):
        return SimpleNamespace(platform="accelerator")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dr", "accel", "paired", "sfl"])
def test_programs_lower_for_accelerators(name, monkeypatch):
    """Seeds, and PAIRED's students, do not take turns, as they do on a CPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "accelerator")
    script = importlib.import_module(name)
    config = script.Config(seeds=SEEDS)
    rows, devices = script.make_rows(config), Accelerators(jax.devices()[:1])
    init, update, show, _ = script.make_programs(config, SEEDS, devices, "seeds")
    table = {"seed": np.array([row["seed"] for row in rows])}
    state = jax.eval_shape(init, 0, table, None)[0]
    programs = {"init": (init, None), "update": (update(config.log_interval), state)}
    for what, (program, states) in (programs | {"show": (show, state)}).items():
        exported = jax.export.export(program, platforms=[*QR])(0, table, states)
        text = str(exported.mlir_module())
        called = {*re.findall(r"custom_call\W+(\w+)", text)}
        assert called == (set().union(*QR.values()) if what == "init" else set()), what
        assert not re.search(r"callback|\b(send|recv|infeed|outfeed)\b", text)
        if what == "update":  # all agents of a step and all steps of a batch, in one array
            agents = f"{SEEDS}x{config.num_students}" if name == "paired" else f"{SEEDS}"
            for shape in (f"{config.num_envs}x7", f"{config.num_steps}x{config.num_envs}x7"):
                assert f"tensor<{agents}x{shape}xf32>" in text, shape
