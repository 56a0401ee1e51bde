"""How long a full-size PAIRED cycle takes, beside the work of its networks alone.

    python benchmarks/paired_cycle.py
    python benchmarks/paired_cycle.py --rnn s5 --teacher-rnn s5 --teacher-filters 32

A cycle is `train.update(state, 1)` of paired.py, without evaluation: 32 designs of 62 steps, two
students of 256 x 32 steps, 5 epochs each for them and the teacher. `networks` is what cannot be
avoided: for the teacher and for each student one forward pass over all steps at once, and five times
forward and backward with a plain gradient step; no acting step by step, no maze, no PPO, no Adam. The
two take turns; the medians and their ratio are printed, compilation apart. On two cores of another
machine a cycle of minimax takes 27.7 s (95 s to compile), JaxUED's, with a smaller teacher, 15.9 s.
"""

import argparse
import resource
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import amaze  # noqa: E402
import paired  # noqa: E402


def networks(config):
    """A function of (teacher's params, students' params) that runs every network, and does no more."""
    train = paired.make_train(config)
    core = partial(paired.make_core, s5_layers=config.s5_layers, s5_norm=config.s5_norm)
    steps, cells = config.n_walls + 2, config.height * config.width
    teacher_core = core(config.teacher_rnn, config.teacher_hidden_size)
    teacher = paired.TeacherActorCritic(teacher_core, config.teacher_filters, steps, cells)
    student = paired.ActorCritic(core(config.rnn, config.hidden_size))

    def learn(network, obs, shape, params):
        is_first = jnp.zeros(shape, bool).at[0].set(True)
        carry = network.core.initial_carry(shape[1])

        def loss(params):
            _, logits, value = network.apply(params, carry, obs, is_first)
            return (logits**2).mean() + (value**2).mean()

        def epoch(params, _):
            return jax.tree.map(lambda p, g: p - 1e-6 * g, params, jax.grad(loss)(params)), None

        return loss(params), jax.lax.scan(epoch, params, None, length=config.update_epochs)[0]

    def run(rng, teacher_params, students_params):
        image, time, noise = jax.random.split(rng, 3)
        shape = steps, config.num_envs
        grid = (*shape, config.height + 2, config.width + 2, 3)
        obs = amaze.TeacherObservation(
            jax.random.randint(image, grid, 0, 9).astype(jnp.uint8),
            jax.random.randint(time, shape, 0, steps),
            jax.random.uniform(noise, (*shape, 50)),
        )
        taught = learn(teacher, obs, shape, teacher_params)
        shape = config.num_steps, config.num_envs * config.num_evals
        view = jax.random.randint(image, (*shape, 5, 5, 3), 0, 9).astype(jnp.uint8)
        obs = amaze.Observation(view, jax.random.randint(time, shape, 0, 4))
        return taught, jax.lax.map(partial(learn, student, obs, shape), students_params)

    return train, run


def compiled(function, *args):
    start = time.perf_counter()
    program = jax.jit(function).lower(*args).compile()
    return program, time.perf_counter() - start


def seconds(program, *args):
    start = time.perf_counter()
    jax.block_until_ready(program(*args))
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = paired.Config()
    parser.add_argument("--rnn", default=default.rnn)
    parser.add_argument("--teacher-rnn", default=default.teacher_rnn)
    parser.add_argument("--teacher-filters", type=int, default=default.teacher_filters)
    parser.add_argument("--num-students", type=int, default=default.num_students)
    parser.add_argument("--regret", default=default.regret)
    parser.add_argument("--repeats", type=int, default=3)
    args = vars(parser.parse_args())
    repeats = args.pop("repeats")
    train, bare = networks(paired.Config(eval_interval=0, **args))

    rng = jax.random.key(0)
    init, compile_init = compiled(train.init, rng)
    state = jax.block_until_ready(init(rng))
    count = lambda agent: sum(x.size for x in jax.tree.leaves(agent.params))
    students = count(state.students) / args["num_students"]
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {args}")
    print(f"parameters: teacher {count(state.teacher):,}, a student {students:,.0f}")
    cycle, compile_cycle = compiled(lambda state: train.update(state, 1), state)
    print(f"to compile: init {compile_init:.1f} s, cycle {compile_cycle:.1f} s", flush=True)
    inputs = rng, state.teacher.params, state.students.params
    bare, _ = compiled(bare, *inputs)
    times = [(seconds(cycle, state), seconds(bare, *inputs)) for _ in range(repeats + 1)][1:]
    a_cycle, alone = (statistics.median(x) for x in zip(*times))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"cycle      {a_cycle:7.2f} s    of {', '.join(f'{a:.2f}' for a, _ in times)}")
    print(f"networks   {alone:7.2f} s    of {', '.join(f'{b:.2f}' for _, b in times)}")
    print(f"ratio      {a_cycle / alone:7.2f}      peak memory on the host {peak:.1f} GiB")


if __name__ == "__main__":
    main()
