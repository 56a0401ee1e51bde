"""What devices that share a training by levels send each other, and how long that takes on a CPU.

    python benchmarks/gathers.py        # three minutes on two CPU cores

For plr.py's --fast and its published size it counts the gathers and sums of one cycle that learns,
and their bytes, in the traced program. Then it times, in turn, a cycle and its gathers alone, on
1, 2 and 4 virtual devices. The table goes to figures/gathers.csv."""

import argparse
import csv
import os
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=1"
)
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, PartitionSpec as P  # noqa: E402

import plr  # noqa: E402

SIZES = {"--fast": plr.FAST, "published": plr.Config()}


def sent(jaxpr, times=1):
    """Each gather ("all_gather") and sum ("psum") of a program: kind, how often, its result."""
    for equation in jaxpr.eqns:
        kind = equation.primitive.name.split("_invariant")[0]
        if kind in ("all_gather", "psum"):
            yield from ((kind, times, x.aval) for x in equation.outvars)
        inner = times * equation.params.get("length", 1) if kind == "scan" else times
        for value in jax.tree.leaves(list(equation.params.values())):
            value = getattr(value, "jaxpr", value)
            if hasattr(value, "eqns"):
                yield from sent(value, inner)


def cycle(config, devices):
    """A compiled cycle that learns, with a full buffer -> a function that runs it, its trace."""
    config = replace(config, eval_interval=0, replay_prob=1.0, min_fill=0.001)
    init, update, *_ = plr.make_programs(config, 1, jax.devices()[:devices], "levels")
    row = {"seed": jnp.zeros(1, int)}
    state = init(0, row, None)[0]
    state = update(1)(0, row, state)[0]  # fills enough of the buffer
    traced = jax.make_jaxpr(partial(update(1), 9, row))(state)
    kept = [state]

    def run():
        kept[0], _ = jax.block_until_ready(update(1)(9, row, kept[0]))

    return run, traced.jaxpr


def gathers(arrays, devices):
    """A compiled program of these gathers alone."""
    mesh = Mesh(jax.devices()[:devices], ("devices",))
    axes = [next(i for i, n in enumerate(x.shape) if n % devices == 0 and n == 32) for x in arrays]
    take = lambda x, axis: jax.lax.all_gather(x, "devices", axis=axis, tiled=True)
    parts = tuple(P(*[None] * axis, "devices") for axis in axes)
    both = lambda xs: tuple(map(take, xs, axes))
    program = jax.jit(
        jax.shard_map(both, mesh=mesh, in_specs=(parts,), out_specs=P(), check_vma=False)
    )
    inputs = tuple(jnp.zeros(x.shape, x.dtype) for x in arrays)
    place = lambda x, spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
    inputs = jax.tree.map(place, inputs, parts)
    return lambda: jax.block_until_ready(program(inputs))


def seconds(run):
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cycles", type=int, default=20, help="of each kind, in turn")
    options, table = parser.parse_args(), []
    for size, config in SIZES.items():
        programs, counted = {}, {}
        for devices in (1, 2, 4):
            run, traced = cycle(config, devices)
            found = list(sent(traced))
            arrays = [x for kind, times, x in found for _ in range(times) if kind == "all_gather"]
            number, size_of = Counter(), Counter()
            for kind, times, x in found:
                number[kind] += times
                size_of[kind] += times * x.size * x.dtype.itemsize
            counted[devices] = number, size_of
            programs[devices, "cycle"] = run
            if devices > 1:
                programs[devices, "gathers"] = gathers(arrays, devices)
        spent = {key: [] for key in programs}
        for i in range(options.cycles + 2):
            for key, run in programs.items():
                spent[key] += [seconds(run)] if i > 1 else [] if run() is None else []
        for devices in (1, 2, 4):
            number, size_of = counted[devices]
            whole, alone = ([1e3 * statistics.median(spent[devices, x])] if (devices, x) in spent
                            else [] for x in ("cycle", "gathers"))  # fmt: skip
            table.append({
                "size": size, "devices": devices, "gathers": number["all_gather"],
                "gathered_bytes": size_of["all_gather"], "sums": number["psum"],
                "summed_bytes": size_of["psum"], "cycle_ms": f"{whole[0]:.1f}",
                "gathers_ms": f"{alone[0]:.2f}" if alone else ""})  # fmt: skip
            print(table[-1], flush=True)
    with open(HERE / "figures" / "gathers.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, table[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main()
