"""Device memory of a training, per seed: its state, and what an update needs in addition.

    python benchmarks/memory.py
    python benchmarks/memory.py --scripts plr --options '{"rnn": "s5"}'

XLA reports both (`memory_analysis`) for an update of two and of four seeds on one device; a seed's
share is half of the difference. On a CPU, where seeds would take turns, the update is compiled as
for a GPU, with all seeds at once. It includes an evaluation.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


lax_map = jax.lax.map


def at_once(function, xs, batch_size=None):
    """Replaces jax.lax.map, by which rows and PAIRED's students take turns on a CPU: up to four run
    at once. SFL's candidates, which take turns on all devices, are more than four."""
    number = len(jax.tree.leaves(xs)[0])
    return lax_map(function, xs, batch_size=number if number <= 4 else batch_size)


def bytes_of(script, seeds, options):
    """Bytes of the state and of temporary memory in an update of this many seeds."""
    module = importlib.import_module(script)
    config = module.Config(**options, seeds=seeds)
    init, update, *_ = module.make_programs(config, seeds, jax.devices()[:1], "seeds")
    rows = {"seed": np.arange(seeds)}
    states = jax.eval_shape(init, 0, rows, None)[0]
    memory = update(1).lower(0, rows, states).compile().memory_analysis()
    return memory.argument_size_in_bytes, memory.temp_size_in_bytes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scripts", nargs="+", default=["dr", "plr", "accel", "paired", "sfl"])
    parser.add_argument("--options", type=json.loads, default={}, help="fields of Config, as JSON")
    options = parser.parse_args()
    jax.lax.map = at_once
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {options.options}\n")
    print("| MiB a seed | state | more, in an update |\n|---|---|---|")
    for script in options.scripts:
        two, four = (bytes_of(script, seeds, options.options) for seeds in (2, 4))
        state, besides = ((b - a) / 2 / 2**20 for a, b in zip(two, four))
        print(f"| `{script}.py` | {state:.1f} | {besides:.0f} |", flush=True)


if __name__ == "__main__":
    main()
