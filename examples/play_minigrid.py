"""A trained agent plays gymnasium's MiniGrid.

    pip install minigrid
    python examples/play_minigrid.py runs/plr-1 --show

The agent sees what it saw in training: MiniGrid's image of 5 x 5 cells, behind walls only if it did
there. The one in benchmarks/results/agent, which did, solves 0.85 of 100 FourRooms, but no
MultiRoom: it never saw a door.
"""

import argparse
import sys
from pathlib import Path

import gymnasium
import jax
import minigrid  # noqa: F401, registers its environments
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import evaluate
from amaze import Observation

form = argparse.RawDescriptionHelpFormatter
parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
parser.add_argument("run", help="a run's folder")
parser.add_argument("--env", default="MiniGrid-FourRooms-v0", help="a task with a goal to reach")
parser.add_argument("--episodes", type=int, default=100)
parser.add_argument("--show", action="store_true", help="show the episodes in a window")
args = parser.parse_args()

run, rng, solved = evaluate.load(args.run), np.random.default_rng(0), []
params, act = jax.tree.map(lambda x: x[0], run.params), jax.jit(run.train.act)  # the first seed
env = gymnasium.make(args.env, render_mode="human" if args.show else None, agent_view_size=5)
env.unwrapped.see_through_walls = run.config["see_through_walls"]
for seed in range(args.episodes):
    memory, seen, ended, is_first = run.train.initial_carry(1), env.reset(seed=seed)[0], False, True
    while not ended:
        obs = Observation(seen["image"][None], np.array([seen["direction"]]))  # a batch of one
        noise = rng.gumbel(size=(1, run.env.NUM_ACTIONS))  # argmax of logits + noise samples
        memory, action = act(params, memory, obs, np.array([is_first]), noise)[:2]
        seen, reward, terminated, truncated, _ = env.step(int(action[0]))
        ended, is_first = terminated or truncated, False
    solved.append(reward > 0)
print(f"{args.env}: solved {np.mean(solved):.2f} of {len(solved)} episodes")
