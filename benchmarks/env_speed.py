"""How fast the maze steps, samples, edits and solves, alone or in turn with JaxUED's.

    python benchmarks/env_speed.py
    python benchmarks/env_speed.py --peer-python VENV/bin/python     # a Python that has `jaxued`

A run is one jitted program: N levels, a lax.scan of 256 steps with random actions drawn beforehand;
the carry holds every observation, so none can be skipped. `restart` begins the same level again on
done. `new` takes another level: here the next of a queue of 4 for each of the N, whose drawing is
counted; JaxUED draws one at every step. Each number is the best of the rounds, compilation left
out. With a peer the two take turns, in processes of their own. Other work on the machine slows all.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

STEPS, QUEUE = 256, 4
SIZES = (32, 256, 2048)


def best_seconds(f, *args, repeats=7):
    """Seconds of the fastest call after one warm-up call."""
    jax.block_until_ready(f(*args))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def roll(step, obs, state, actions):
    """Scan `step` over actions [T, N]; the last observation and the sum of rewards."""
    def act(carry, action):
        obs, state, total = carry
        obs, state, reward = step(state, action)
        return (obs, state, total + reward), None

    (obs, _, total), _ = jax.lax.scan(act, (obs, state, jnp.zeros(actions.shape[1])), actions)
    return obs, total


def amaze_rollout(mode):
    import amaze

    def step(state, action):
        obs, state, reward, _ = jax.vmap(amaze.step_and_reset)(state, action)
        return obs, state, reward

    def new(rng, actions):
        sample = jax.vmap(jax.vmap(amaze.sample_level))
        levels = sample(jax.random.split(rng, (actions.shape[1], QUEUE)))
        return roll(step, *jax.vmap(amaze.reset)(levels), actions)

    def restart(levels, actions):
        return roll(step, *jax.vmap(amaze.reset)(levels), actions)

    if mode == "new":
        return lambda n: (new, jax.random.key(0))
    sample = jax.vmap(amaze.sample_level)
    return lambda n: (restart, jax.jit(sample)(jax.random.split(jax.random.key(0), n)))


def jaxued_rollout(mode):
    jax.tree_map = jax.tree.map          # jaxued 0.0.1 still calls the name that JAX removed
    from jaxued.environments.maze import Maze, make_level_generator
    from jaxued.wrappers import AutoReplayWrapper, AutoResetWrapper

    sample = make_level_generator(13, 13, 60)
    env = Maze()
    env = AutoReplayWrapper(env) if mode == "restart" else AutoResetWrapper(env, sample)
    params = env.default_params

    def rollout(levels, actions):
        n = actions.shape[1]

        def step(state, action):
            rng, state = state
            rng, rng_step = jax.random.split(rng)
            rngs = jax.random.split(rng_step, n)
            step_all = jax.vmap(env.step, (0, 0, 0, None))
            obs, state, reward, _, _ = step_all(rngs, state, action, params)
            return obs, (rng, state), reward

        rng = jax.random.PRNGKey(0)
        reset = jax.vmap(env.reset_to_level, (0, 0, None))
        obs, state = reset(jax.random.split(rng, n), levels, params)
        return roll(step, obs, (rng, state), actions)

    rng = jax.random.PRNGKey(0)
    return lambda n: (rollout, jax.jit(jax.vmap(sample))(jax.random.split(rng, n)))


def measure(library):
    """{what: millions of steps a second}."""
    make = {"amaze": amaze_rollout, "jaxued": jaxued_rollout}[library]
    rates = {}
    for mode in ("restart", "new"):
        for n in SIZES:
            rollout, given = make(mode)(n)
            actions = jax.random.randint(jax.random.key(1), (STEPS, n), 0, 7)
            rates[f"{mode} {n}"] = n * STEPS / best_seconds(jax.jit(rollout), given, actions) / 1e6
    return rates


def print_level_operations():
    import amaze
    rngs = jax.random.split(jax.random.key(0), 2048)
    sample = jax.jit(jax.vmap(amaze.sample_level))
    levels = sample(rngs)
    few = jax.tree.map(lambda x: x[:32], levels)
    edit = jax.jit(jax.vmap(lambda rng, level: amaze.edit_level(rng, level, 20)))
    solve = jax.jit(jax.vmap(amaze.solve))
    print(f"sample_level {best_seconds(sample, rngs) / 2048 * 1e6:8.2f} us a level, 2048 at once")
    print(f"edit_level   {best_seconds(edit, rngs[:32], few) * 1e3:8.2f} ms for 32 x 20 edits")
    print(f"solve        {best_seconds(solve, few) * 1e3:8.2f} ms for 32 levels of 60 walls")
    print(f"solve        {best_seconds(solve, levels) * 1e3:8.2f} ms for 2048 levels of 60 walls")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", metavar="PATH", help="a Python that can import jaxued")
    parser.add_argument("--rounds", type=int, default=2, help="turns each side takes")
    parser.add_argument("--library", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    if args.library:
        print(json.dumps(measure(args.library)))
        return

    pythons = {"amaze": sys.executable}
    if args.peer_python:
        pythons["jaxued"] = args.peer_python
    best = {library: {} for library in pythons}
    for _ in range(args.rounds):
        for library, python in pythons.items():
            command = [python, __file__, "--library", library]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            for what, rate in json.loads(out.splitlines()[-1]).items():
                best[library][what] = max(rate, best[library].get(what, 0))
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}; millions of steps a second")
    print("mode, N        " + "".join(f"{library:>9}" for library in pythons)
          + ("    ratio" if args.peer_python else ""))
    for what, rate in best["amaze"].items():
        line = f"{what:15}" + "".join(f"{best[library][what]:9.2f}" for library in pythons)
        print(line + (f"{rate / best['jaxued'][what]:8.1f}x" if args.peer_python else ""))
    print_level_operations()


if __name__ == "__main__":
    main()
