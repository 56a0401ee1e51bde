"""Agents that need no learning, on all suites of evaluate.py: random actions, a hand on the wall.

    python benchmarks/baselines.py
    python benchmarks/baselines.py --levels 100 --episodes 10      a quick look

They see what an agent sees: 5 x 5 cells and the direction. Random actions are uniform over all
seven. A wall follower walks straight ahead to a wall, then along it with its right (or left) hand
on it; if the goal is one cell ahead, to the right or to the left, it goes there. If the walls near
the goal are not connected to its wall, it circles for ever. (A follower that simply turns to its
hand wherever it can circles in open space: it solves 0.59 of dcd's mazes and no corridor.)
results/baselines.csv has the solve rates: a row for each maze, each mean and each worst share.
"""

import argparse
import csv
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import amaze  # noqa: E402
import evaluate  # noqa: E402

FORWARD, WALL, GOAL = amaze.FORWARD, amaze.WALL[0], amaze.GOAL[0]
BESIDE = {amaze.LEFT: -1, amaze.RIGHT: 1}  # offsets of the columns beside the agent in its view


def random_actions(params, memory, obs, is_first, noise):
    return memory, jnp.argmax(noise, axis=-1)


def hand_on_the_wall(params, holds, obs, is_first, noise, hand):
    """Actions [W] of W agents; holds [W]: whether the hand was on a wall one step ago."""
    other = amaze.LEFT + amaze.RIGHT - hand
    row, column = amaze.VIEW - 1, amaze.VIEW // 2  # of the agent, which looks towards row 0
    kind = obs.image[..., 0]  # [W, across, ahead]
    ahead = kind[:, column, row - 1]
    at_hand, at_other = (kind[:, column + BESIDE[x], row] for x in (hand, other))
    lost = holds & ~is_first & (at_hand != WALL)  # the wall has ended: turn around its corner
    action = jnp.select(
        [ahead == GOAL, at_hand == GOAL, at_other == GOAL, lost, ahead == WALL],
        [FORWARD, hand, other, hand, other],
        FORWARD,
    )
    return at_hand == WALL, action


def player(act, memory):
    """The parts of a script that evaluate.play needs; memory(W) is the initial state."""
    return SimpleNamespace(act=act, initial_carry=memory, reset=amaze.reset, step=amaze.step)


no_wall = partial(jnp.zeros, dtype=bool)
BASELINES = {
    "random": player(random_actions, jnp.zeros),
    "right hand": player(partial(hand_on_the_wall, hand=amaze.RIGHT), no_wall),
    "left hand": player(partial(hand_on_the_wall, hand=amaze.LEFT), no_wall),
}


def solve_rates(suite, args):
    """{maze or aggregate: {baseline: solve rate}} on a suite."""
    args = evaluate.Arguments(suite=suite, episodes=args.episodes, levels=args.levels)
    names, _, sampled = evaluate.choose_mazes(args)
    episodes = 20 if sampled else args.episodes
    args = evaluate.replace(args, episodes=episodes)
    mazes, rngs, rates = evaluate.draw_mazes(names, args, sampled), jax.random.key(0)[None], {}
    for name, train in BASELINES.items():
        title = f"{name}, {suite}"
        returns, _ = evaluate.play(train, (), rngs, mazes, episodes, title=title)
        summary = evaluate.summarise(returns, names, args.seed, sampled)
        for maze, (rate, _, _) in summary.items():
            rates.setdefault(maze, {})[name] = rate
    return {maze: rates[maze] for maze in rates if maze not in ("IQM", "optimality gap")}


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--episodes", type=int, default=100, help="per maze")
    parser.add_argument("--levels", type=int, default=2000, help="random levels, 20 episodes each")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "baselines.csv")
    args = parser.parse_args()
    table = []
    for suite in amaze.SUITES:
        lines = [[suite, *BASELINES]]
        for maze, rates in solve_rates(suite, args).items():
            cells = {name: f"{rate:.3f}" for name, rate in rates.items()}
            table.append({"suite": suite, "maze": maze} | cells)
            lines.append([maze, *cells.values()])
        evaluate.print_table(lines)
        print()
    with open(args.out, "w", newline="") as file:
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main()
