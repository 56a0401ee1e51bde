"""Learning pass, acting and compile time of the cores lstm, gru and s5, as a Markdown table.

    python benchmarks/rnn_speed.py --num-envs 32 1024 --repeats 10

learn: forward and backward over T steps; act: T times one step. All programs of one N are compiled
first, then timed in turn, round after round: medians. CPU seconds bear a busy machine better."""

import argparse
import datetime
import os
import platform
import statistics
import sys
import time

import flax
import jax
import jax.numpy as jnp

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from dr import make_core

T, D_IN, SIZE = 256, 149, 256


def programs(rnn, N):
    """(name, function, arguments) of a core's learning pass and acting step on N levels."""
    core = make_core(rnn, SIZE, 2, "after")
    keys = jax.random.split(jax.random.key(0), 3)
    xs = jax.random.normal(keys[0], (T, N, D_IN))
    is_first = jax.random.bernoulli(keys[1], 0.02, (T, N))
    carry = core.initial_carry(N)
    params = jax.jit(core.init)(keys[2], carry, xs[:1], is_first[:1])
    weight = jnp.cos(jnp.arange(SIZE) ** 2.0)  # a plain mean of LayerNorm's output has no gradient
    loss = lambda params, *args: (core.apply(params, *args)[1] * weight).mean()

    def act(params, carry, xs, is_first):  # T times one step, as in a rollout
        step = lambda carry, x: core.apply(params, carry, *jax.tree.map(lambda x: x[None], x))
        return jax.lax.scan(step, carry, (xs, is_first))

    yield f"learn {N}", jax.grad(loss), (params, carry, xs, is_first)
    yield f"act {N}", act, (params, carry, xs, is_first)


def seconds(function, *args):
    start, cpu = time.perf_counter(), time.process_time()
    out = jax.block_until_ready(function(*args))
    return out, time.perf_counter() - start, time.process_time() - cpu


def compile_once(function, args):
    jax.clear_caches()
    return seconds(lambda: jax.jit(function).lower(*args).compile())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rnns", nargs="+", default=["lstm", "gru", "s5"])
    parser.add_argument("--num-envs", nargs="+", type=int, default=[32, 1024])
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()

    table = {}
    for N in args.num_envs:
        cases = {(name, rnn): p for rnn in args.rnns for name, *p in programs(rnn, N)}
        compiled = {}
        compiling, running = ({case: [] for case in cases} for _ in range(2))
        for _ in range(3):
            for case, (function, arguments) in cases.items():
                compiled[case], *compile_time = compile_once(function, arguments)
                compiling[case].append(compile_time)
        for repeat in range(args.repeats + 1):  # the first is a warm-up
            for case, (_, arguments) in cases.items():
                _, *run_time = seconds(compiled[case], *arguments)
                running[case] += [run_time] if repeat else []
        for case in cases:
            columns = [*zip(*running[case]), *zip(*compiling[case])]
            table[case] = [statistics.median(column) for column in columns]

    device = jax.devices()[0].device_kind
    print(f"{platform.machine()}, {os.cpu_count()} cores, {device}; {datetime.date.today()};")
    print(f"Python {platform.python_version()}, jax {jax.__version__}, flax {flax.__version__};")
    print(f"load {os.getloadavg()[0]:.1f}; T = {T}, {args.repeats} rounds in turn, medians\n")
    print("| pass, N levels | " + " | ".join(args.rnns) + " |")
    print("|---" * (len(args.rnns) + 1) + "|")
    for name in dict.fromkeys(name for name, _ in table):
        rows = zip(*(table[name, rnn] for rnn in args.rnns))
        for label, row in zip(("s", "CPU s", "compile, s", "compile, CPU s"), rows):
            print(f"| {name}: {label} | " + " | ".join(f"{x:.3g}" for x in row) + " |")


if __name__ == "__main__":
    main()
