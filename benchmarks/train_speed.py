"""Training speed: milliseconds of an update, and as a multiple of the bare network's work.

    python benchmarks/train_speed.py --scripts dr plr accel --seeds 1 8

The bare network is what any PPO of this shape must compute, written with flax's own cells and
autodiff and nothing around it: one forward pass in T steps of N, and update_epochs forward and
backward passes over [T, N]. It and the updates are timed in turn within one process, for machines
are noisy; compile times are apart. PLR and ACCEL are timed on a warm buffer, in cycles that replay
(--replay-prob 1) and in cycles that do not (0).
"""

import argparse
import datetime
import importlib
import platform
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))


class ResetCell(nn.Module):
    @nn.compact
    def __call__(self, carry, inputs):
        x, is_first = inputs
        carry = jax.tree.map(lambda c: jnp.where(is_first[:, None], 0.0, c), carry)
        return nn.OptimizedLSTMCell(256)(carry, x)


class Bare(nn.Module):
    """The student's network in the plainest flax: image, direction, is_first [T, N]."""

    @nn.compact
    def __call__(self, image, direction, is_first):
        x = nn.relu(nn.Conv(16, (3, 3), padding="VALID")(image / 10.0))
        x = jnp.concatenate([x.reshape(*is_first.shape, -1), nn.Embed(4, 5)(direction)], axis=-1)
        carry = (jnp.zeros((is_first.shape[1], 256)),) * 2
        cell = nn.scan(ResetCell, variable_broadcast="params", split_rngs={"params": False})
        x = cell()(carry, (x, is_first))[1]
        heads = [nn.Dense(n)(jnp.tanh(nn.Dense(32)(x))) for n in (7, 1)]
        return sum((head**2).mean() for head in heads)


def bare_programs(steps, number):
    """forward(), and one forward and backward pass, each compiled."""
    image = jax.random.randint(jax.random.key(0), (steps, number, 5, 5, 3), 0, 9)
    data = image.astype(jnp.uint8), jnp.zeros((steps, number), int), jnp.zeros((steps, number), bool)
    params = Bare().init(jax.random.key(0), *(x[:1] for x in data))
    forward, gradient = jax.jit(Bare().apply), jax.jit(jax.grad(Bare().apply))
    return lambda: forward(params, *data), lambda: gradient(params, *data)


def update_program(script, seeds, **options):
    """An update of `seeds` vmapped seeds as the command line runs it, and its compile time."""
    module = importlib.import_module(script)
    config = replace(module.Config(), eval_interval=0, seeds=seeds, **options)
    device = jax.devices()[:1]
    init, update, _ = module.make_programs(config, device)
    rows = module.deal(config, module.make_rows(config), 1)
    state = init(rows)
    if hasattr(state, "buffer"):
        state = state.replace(step=state.step + config.buffer_size)  # as warm, by the schedule
        filled = jax.tree.map(jnp.ones_like, state.buffer.filled)
        state = state.replace(buffer=state.buffer._replace(filled=filled))
    started = time.perf_counter()
    program = update(1).lower(rows, state).compile()
    seconds = time.perf_counter() - started
    holder = [state]

    def run():
        holder[0], metrics = program(rows, holder[0])
        return metrics

    return run, seconds


def cases(script, seeds):
    if script in ("plr", "accel"):
        return {
            f"{script}, replay cycle, {seeds} seed(s)": dict(replay_prob=1.0),
            f"{script}, fresh cycle, {seeds} seed(s)": dict(replay_prob=0.0),
            f"{script}, half of each, {seeds} seed(s)": dict(replay_prob=0.5),
            f"{script} --parallel, {seeds} seed(s)": dict(parallel=True),
        }
    return {f"{script}, {seeds} seed(s)": {}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scripts", nargs="+", default=["dr"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    forward, gradient = bare_programs(256, 32)
    programs, compile_seconds, seeds_of = {"forward": forward, "gradient": gradient}, {}, {}
    for script in options.scripts:
        for seeds in options.seeds:
            for name, fields in cases(script, seeds).items():
                programs[name], compile_seconds[name] = update_program(script, seeds, **fields)
                seeds_of[name] = seeds
    times = {name: [] for name in programs}
    for round in range(options.rounds + 1):
        for name, run in programs.items():
            started = time.perf_counter()
            jax.block_until_ready(run())
            if round:  # the first warms up
                times[name].append(time.perf_counter() - started)
    bare = np.array(times["forward"]) + 5 * np.array(times["gradient"])
    print(f"{platform.processor() or platform.machine()}, {jax.devices()[0].device_kind}, "
          f"jax {jax.__version__}, Python {platform.python_version()}, {datetime.date.today()}\n")
    print("| | ms a seed and update | times the bare network | compile, s |\n|---|---|---|---|")
    print(f"| bare network: forward + 5 gradients | {1e3 * np.median(bare):.0f} | 1 | |")
    for name, seeds in seeds_of.items():
        seconds = np.array(times[name]) / seeds
        ratio = np.median(seconds / bare)
        print(f"| {name} | {1e3 * np.median(seconds):.0f} | {ratio:.2f} "
              f"| {compile_seconds[name]:.1f} |")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\npeak memory of all of it: {peak:.1f} GiB")


if __name__ == "__main__":
    main()
