"""Draw the paths of agents in test mazes: the first of the episodes that evaluate.py plays.

    python benchmarks/paths.py runs/sfl --seeds 1 3 --mazes Rings,Serpentine
    python benchmarks/paths.py runs/plr --mazes Sampled-1109      # a level of `--suite sampled`
    python benchmarks/paths.py paths.json      # only draws its picture again

A row of the picture shows the episodes of one agent in one maze. A path starts at the red dot, and
its dots turn from dark to light; the green star is the goal. paths.json beside it has the data.
"""

import argparse
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.style
import numpy as np
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import amaze
import evaluate


def walk(run, agent, name, episodes):
    """Yield of each episode the level as text, its n steps' cells [n, 2], whether it was solved."""
    source, _, number = name.partition("-")
    _, max_steps, see = amaze.TEST_MAZES[source]
    levels = evaluate.draw([source], int(number) + 1 if number else episodes, seed=0)[source]
    if number:
        levels = jax.tree.map(lambda x: x[-1:], levels)
    levels = jax.tree.map(lambda x: jnp.resize(x, (episodes, *x.shape[1:])), levels)
    rng, params = evaluate.agent_keys(run, 0)[agent], jax.tree.map(lambda x: x[agent], run.params)
    tags = np.array([evaluate.tag(name, i) for i in range(episodes)])

    @jax.jit
    def play(levels):
        def step(carry, t):
            memory, obs, state, playing = carry
            noise = jax.vmap(lambda tag: evaluate.gumbel(rng, tag, t))(tags)
            memory, action = run.train.act(params, memory, obs, jnp.full(episodes, t == 0), noise)[
                :2
            ]
            cell = state.agent_pos
            obs, state, reward, done = jax.vmap(run.train.step)(state, action)
            return (memory, obs, state, playing & ~done), (cell, playing, reward)

        obs, state = jax.vmap(lambda level: run.train.reset(level, max_steps, see))(levels)
        carry = run.train.initial_carry(episodes), obs, state, jnp.ones(episodes, bool)
        return jax.lax.scan(step, carry, jnp.arange(max_steps))[1]

    cell, playing, reward = map(np.asarray, play(levels))
    for i in range(episodes):
        text = amaze.level_to_text(jax.tree.map(lambda x: x[i], levels))
        solved = bool((reward * playing)[:, i].any())
        yield {"level": text, "cells": cell[playing[:, i], i].tolist(), "solved": solved}


@matplotlib.style.context("default")
def plot(walks, path):
    """Draw {agent and maze: its episodes}, a row for each."""
    columns = max(map(len, walks.values()))
    figure = Figure(figsize=(1.9 * columns, 2.1 * len(walks)), layout="constrained")
    for row, (title, episodes) in zip(
        figure.subplots(len(walks), columns, squeeze=False), walks.items()
    ):
        for axis, walk in zip(row, episodes):
            level = amaze.level_from_text(walk["level"])
            cells, shift = np.array(walk["cells"]), np.random.default_rng(0)
            cells = cells + shift.uniform(-0.3, 0.3, cells.shape)  # shows repeated visits
            axis.imshow(level.wall_map, cmap="Greys", vmax=1.6)
            axis.plot(*cells.T, lw=0.5, color="tab:blue")
            axis.scatter(*cells.T, s=4, c=np.arange(len(cells)))
            axis.plot(*level.goal_pos, "*", color="green", ms=11)
            axis.plot(*level.agent_pos, "o", color="red", ms=5)
            said = f"{len(cells)} steps" if walk["solved"] else f"lost after {len(cells)}"
            axis.set(xticks=[], yticks=[], title=said)
        row[0].set_ylabel(title)
    figure.savefig(path, dpi=80)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="folder of a run, or a .json")
    parser.add_argument("--script", default="", help="the script that made the run, if a copy")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="indices, from 0 on")
    parser.add_argument("--mazes", default="Rings,Serpentine", help="comma-separated names")
    parser.add_argument("--episodes", type=int, default=5)
    parser.add_argument("--out", type=Path, default="paths.png", help="path of the .png")
    options = parser.parse_args()
    if options.run.endswith(".json"):
        return plot(json.loads(Path(options.run).read_text()), options.out)
    run = evaluate.load(options.run, options.script)
    mazes = options.mazes.split(",")
    if unknown := {maze.partition("-")[0] for maze in mazes} - {*amaze.TEST_MAZES}:
        parser.error(f"--mazes: unknown {', '.join(unknown)}")
    walks = {
        f"{run.name} seed {run.agents[i]['seed']}\n{maze}": [*walk(run, i, maze, options.episodes)]
        for maze in mazes
        for i in options.seeds
    }
    options.out.with_suffix(".json").write_text(json.dumps(walks) + "\n")
    plot(walks, options.out)


if __name__ == "__main__":
    main()
