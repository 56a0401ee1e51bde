"""Show the levels that a training replays over time, from the buffers of archived checkpoints.

    python accel.py --fast --archive-interval 500 --out runs/accel
    python benchmarks/curriculum.py runs/accel --updates 500 1500 3000 6000
    python benchmarks/curriculum.py curriculum.json    # only draws its picture again

A row of the picture has levels of the first seed in one update, sampled by replay probability;
curriculum.json beside it has them as text. The script prints means over all seeds, weighted by this
probability, and how close the buffers come to the 13 x 13 test mazes of the suite dcd: for each
maze the smallest number of cells in which a level of a buffer differs from it.
"""

import argparse
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.style
import numpy as np
from flax import serialization
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import amaze
import evaluate


def read_buffer(path):
    """A checkpoint's Buffer [R, K, ...] and replay probabilities [R, K], as NumPy arrays."""
    if not path.exists():
        sys.exit(f"{path}: does not exist; train with --archive-interval to get it")
    data, _, _, module, config = evaluate.read_run(path)
    if not hasattr(module, "replay_probabilities"):
        sys.exit(f"{path}: must be of a run of plr.py or accel.py")
    expected = jax.eval_shape(module.make_train(config).init, jax.random.key(0)).buffer
    buffer = serialization.from_state_dict(expected, data["state"]["buffer"])
    rows, cycle = data["rows"], data["cycles"]
    strength = ([row.get(name, getattr(config, name)) for row in rows]  # may be swept
                for name in ("temperature", "staleness_coef"))  # fmt: skip
    inputs = jax.tree.map(jnp.asarray, (buffer, *map(np.array, strength)))
    probabilities = jax.vmap(lambda x, *strength: module.replay_probabilities(x, cycle, *strength))
    return jax.tree.map(np.asarray, (buffer, probabilities(*inputs)))


def commonest_start(start, probabilities):
    """The probability [R] that a replayed level starts in the commonest cell; start [R, K, 2]."""
    cells = start[..., 0] + 1000 * start[..., 1]
    return np.array([np.bincount(*x).max() / x[1].sum() for x in zip(cells, probabilities)])


def test_walls():
    """Yield the names and wall maps of dcd's mazes of 13 x 13 cells."""
    for name in amaze.SUITES["dcd"]:
        level = amaze.TEST_MAZES[name].sample(jax.random.key(0))
        if level.wall_map.shape == (13, 13):
            yield name, np.asarray(level.wall_map)


@matplotlib.style.context("default")
def plot(chosen, path):
    """Draw {update: levels as text}, a row for each update."""
    columns = max(map(len, chosen.values()))
    grid = Figure(figsize=(1.25 * columns, 1.25 * len(chosen) + 0.4), layout="constrained")
    axes = grid.subplots(len(chosen), columns, squeeze=False)
    for row, (update, levels) in zip(axes, chosen.items()):
        for axis, level in zip(row, levels):
            axis.imshow(amaze.render(amaze.level_from_text(level)))
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(f"cycle {int(update):,}", fontsize=12)
    grid.suptitle("levels in training: the red agent has to reach the green goal; grey is wall")
    grid.savefig(path, dpi=80)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run of accel.py or plr.py, or a .json")
    parser.add_argument("--updates", type=int, nargs="+", help="archived cycles to draw")
    parser.add_argument("--columns", type=int, default=8, help="levels per update")
    parser.add_argument("--out", type=Path, default="curriculum.png", help="path of the .png")
    options = parser.parse_args()
    if options.run.suffix == ".json":
        return plot(json.loads(options.run.read_text()), options.out)
    if not options.updates:
        parser.error("--updates: needed with the folder of a run")
    chosen = {}
    for update in options.updates:
        buffer, probabilities = read_buffer(options.run / f"checkpoint_{update}.msgpack")
        walls = buffer.level.wall_map  # [R, K, H, W]
        solution = jax.vmap(jax.vmap(amaze.solve))(jax.tree.map(jnp.asarray, buffer.level))
        solvable = probabilities * np.asarray(solution.solvable)
        mean = lambda x, weight=probabilities: (weight * np.asarray(x)).sum() / weight.sum()
        print(
            f"update {update}: {mean(walls.sum((2, 3))):.1f} walls, "
            f"shortest path {mean(solution.path_length, solvable):.1f} cells, "
            f"{mean(buffer.mutations):.1f} generations of edits, "
            f"{solvable.sum() / len(solvable):.1%} solvable"
        )
        shares = commonest_start(buffer.level.agent_pos, probabilities)
        print("  share of the commonest start in each seed:", *shares.round(2))
        taken = walls[buffer.scored]
        apart = {name: (taken != maze).sum((1, 2)).min() for name, maze in test_walls()}
        print("  fewest differing cells:", ", ".join(f"{name} {n}" for name, n in apart.items()))
        slots = np.random.default_rng(0).choice(
            len(probabilities[0]), options.columns, replace=False, p=probabilities[0]
        )
        text = lambda slot: amaze.level_to_text(jax.tree.map(lambda x: x[0, slot], buffer.level))
        chosen[update] = list(map(text, slots))
    options.out.with_suffix(".json").write_text(json.dumps(chosen, indent=1) + "\n")
    plot(chosen, options.out)


if __name__ == "__main__":
    main()
