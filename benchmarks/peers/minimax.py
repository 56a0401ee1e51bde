"""minimax (PyPI: minimax-lib): its maze, and its runners as its own maze configurations set them.

Left out is the evaluation on test mazes. Only for timing, a runner of PLR or ACCEL either replays
in every cycle, once its buffer holds some levels, or never."""

import json
import sys
from pathlib import Path

import jax

jax.tree_map, jax.jax = jax.tree.map, jax  # minimax-lib 0.2.0 calls names that JAX removed
import minimax.config  # noqa: E402
from minimax.arguments import parser  # noqa: E402
from minimax.envs import make  # noqa: E402
from minimax.runners import ExperimentRunner  # noqa: E402

CYCLES = {
    "replay cycle": dict(plr_replay_prob=1.0, plr_min_fill_ratio=0.005),
    "fresh cycle": dict(plr_replay_prob=0.0),
    "--parallel": dict(plr_min_fill_ratio=0.005),
}


def environment(mode, number):
    size = dict(height=13, width=13, n_walls=60, replace_wall_pos=True, max_episode_steps=250)
    env, _ = make("Maze", size)
    rngs = jax.random.split(jax.random.PRNGKey(0), number)

    def begin(rngs):
        obs, start = jax.vmap(env.reset)(rngs)
        return obs, (rngs[0], start, start)

    def step(state, action):
        rng, start, state = state
        rng, rng_step = jax.random.split(rng)
        given = jax.random.split(rng_step, number), state, action
        again = start if mode == "restart" else None
        step_one = lambda rng, state, action, again: env.step(rng, state, action, reset_state=again)
        obs, state, reward, _, _ = jax.vmap(step_one)(*given, again)
        return obs, (rng, start, state), reward

    return rngs, begin, step


def training(script, cycle, core, **overrides):
    """A function that runs one update; it returns what to wait for."""
    name = ("s5_" if core == "s5" else "") + ("p" if cycle == "--parallel" else "") + script
    path = Path(minimax.config.__file__).parent / "configs" / "maze" / f"{name}.json"
    settings = {name: values[0] for name, values in json.loads(path.read_text())["args"].items()}
    settings |= CYCLES.get(cycle, {}) | overrides
    sys.argv = ["train"] + [f"--{k}={v}" for k, v in settings.items() if k != "test_env_names"]
    args = parser.parse_args()
    names = "train_runner env_name agent_rl_algo student_model_name teacher_model_name n_devices"
    parts = "train_runner env ued_env student_rl teacher_rl student_model teacher_model"
    options = {f"{part}_kwargs": getattr(args, f"{part}_args") for part in parts.split()}
    runner = ExperimentRunner(**{name: getattr(args, name) for name in names.split()}, **options)
    state = list(runner.runner.reset(jax.random.PRNGKey(0)))

    def update():
        nonlocal state
        stats, _, *state = runner.step(state, False)
        return stats

    return update
