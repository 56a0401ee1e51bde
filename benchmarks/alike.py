"""Do two checkouts train alike? Compares 20 cycles of a script's --fast in small, bit for bit.

    python benchmarks/alike.py ../other plr.py              # this checkout beside ../other
    python benchmarks/alike.py ../other accel.py rnn=s5     # with other fields of Config

Prints each array of the state and of the logs that differs, and by how much; the status is 1 then.
XLA runs without fusion and algebraic simplification, which round differently after any change of a
program: what still differs is computed differently. (From jax 0.11 on, which fuses in one way that
cannot be switched off, a difference may be rounding.) Most of the minutes it takes is compilation.
"""

import dataclasses
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

EXACT = "--xla_disable_hlo_passes=fusion,algsimp"
if jax.__version_info__ < (0, 11):  # later versions do not know it
    EXACT += " --xla_cpu_use_fusion_emitters=false"
SMALL = {  # those that a Config lacks are left out
    "num_updates": 20, "num_envs": 4, "num_steps": 16, "bptt_horizon": 8, "hidden_size": 8,
    "height": 5, "width": 5, "max_steps": 12, "n_walls": 6, "buffer_size": 40, "min_fill": 0.3,
    "num_edits": 4, "num_candidates": 40, "candidates_at_once": 20, "eval_interval": 0,
}  # fmt: skip


def train(script, items):
    """20 cycles of the script in the current path -> {name: array} of the state and of the logs."""
    module = importlib.import_module(script)
    fast = module.FAST if hasattr(module.FAST, "lr") else module.Config(**module.FAST)  # of old
    fields = dataclasses.asdict(fast)
    small = SMALL | ({"buffer_size": 12} if script == "sfl" else {})
    small = {k: v for k, v in small.items() if k in fields}
    value = lambda old, new: new == "True" if isinstance(old, bool) else type(old)(new)
    given = {k: value(fields[k], v) for k, v in items}
    program = module.make_train(dataclasses.replace(fast, **small | given))
    state, logs = program.init(jax.random.key(3)), []
    for _ in range(SMALL["num_updates"]):
        state, metrics = program.update(state, 1)
        logs.append(metrics)
    found = {k: np.stack([x[k] for x in logs]) for k in metrics}
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        found["state" + jax.tree_util.keystr(path)] = np.asarray(x)
    return found


def main(other, script, *items, here=Path(__file__).parent.parent):
    runs = []
    for folder in (Path(other), here):
        with tempfile.NamedTemporaryFile() as file:
            environment = os.environ | {"XLA_FLAGS": EXACT, "PYTHONPATH": str(folder.resolve())}
            words = [sys.executable, __file__, "--into", file.name, script, *items]
            subprocess.run(words, env=environment, check=True)
            runs.append(pickle.load(file))
    one, two = runs
    for name in sorted(one.keys() ^ two.keys()):
        print(f"only in one: {name}")
    both, differ = sorted(one.keys() & two.keys()), 0
    for name in both:
        x, y = one[name], two[name]
        if x.shape != y.shape or not np.array_equal(x, y, equal_nan=x.dtype.kind == "f"):
            differ += 1
            by = np.nanmax(np.abs(x - y * 1.0)) if x.shape == y.shape else (x.shape, y.shape)
            print(f"{name}: {by}")
    print(f"{script}: {differ} of {len(both)} arrays differ")
    return bool(differ)


if __name__ == "__main__":
    if sys.argv[1] == "--into":
        into, script, *items = sys.argv[2:]
        Path(into).write_bytes(pickle.dumps(train(script[:-3], [x.split("=") for x in items])))
    else:
        sys.exit(main(*sys.argv[1:]))
