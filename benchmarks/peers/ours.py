"""This project, measured as the others are, and the bare network that training is compared with.

A program is (name, function that runs it, notes); notes are numbers for the table."""

import importlib
import os
import time
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import amaze
from s5 import S5

QUEUE = 4  # levels drawn per environment for a run with new levels


def compiled(function, *args):
    start = time.perf_counter()
    program = jax.jit(function).lower(*args).compile()
    return program, {"compile": time.perf_counter() - start}


def environment(mode, number):
    """`given`, begin(given) -> obs, state, and step(state, action) -> obs, state, reward."""

    def step(state, action):
        obs, state, reward, _ = jax.vmap(amaze.step_and_reset)(state, action)
        return obs, state, reward

    sample = lambda rng: jax.vmap(amaze.sample_level)(jax.random.split(rng, QUEUE))
    rngs, begin = jax.random.split(jax.random.key(0), number), jax.vmap(amaze.reset)
    if mode == "new":  # the drawing of the levels is part of the run
        return rngs, lambda rngs: begin(jax.vmap(sample)(rngs)), step
    return jax.jit(jax.vmap(amaze.sample_level))(rngs), begin, step


def levels():
    rngs = jax.random.split(jax.random.key(0), 2048)
    sample, solve = jax.jit(jax.vmap(amaze.sample_level)), jax.jit(jax.vmap(amaze.solve))
    edit = jax.jit(jax.vmap(lambda rng, level: amaze.edit_level(rng, level, 20)))
    drawn = sample(rngs)
    few = jax.tree.map(lambda x: x[:32], drawn)
    yield "sample_level, 2048 levels", partial(sample, rngs), {}
    yield "edit_level by 20 edits, 32 levels", partial(edit, rngs[:32], few), {}
    yield "solve, 32 levels", partial(solve, few), {}
    yield "solve, 2048 levels", partial(solve, drawn), {}


# --- the bare network


def teacher_filters(core):
    return 32 if core == "s5" else 128  # as published


class ResetCell(nn.Module):
    core: str

    @nn.compact
    def __call__(self, carry, inputs):
        x, is_first = inputs
        carry = jax.tree.map(lambda c: jnp.where(is_first[:, None], 0.0, c), carry)
        return {"lstm": nn.OptimizedLSTMCell, "gru": nn.GRUCell}[self.core](256)(carry, x)


class Bare(nn.Module):
    """A student or teacher in the plainest flax; S5, which flax lacks, is s5.py's."""

    core: str
    filters: int
    embedding: tuple
    actions: int

    @nn.compact
    def __call__(self, image, number, noise, is_first):  # [T, N, ...]
        x = nn.relu(nn.Conv(self.filters, (3, 3), padding="VALID")(image / 10.0))
        x = [x.reshape(*is_first.shape, -1), nn.Embed(*self.embedding)(number), noise]
        x, carry = jnp.concatenate(x, axis=-1), jnp.zeros((is_first.shape[1], 256))
        if self.core == "s5":
            x = S5()(S5().initial_carry(len(carry)), x, is_first)[1]
        else:
            scan = nn.scan(ResetCell, variable_broadcast="params", split_rngs={"params": False})
            x = scan(self.core)((carry, carry) if self.core == "lstm" else carry, (x, is_first))[1]
        heads = [nn.Dense(n)(jnp.tanh(nn.Dense(32)(x))) for n in (self.actions, 1)]
        return sum((head**2).mean() for head in heads)


def bare(script, core, seeds=1):
    """What an update of `script` cannot do without: forward() and gradient(), by autodiff, of its
    networks over all their steps at once. Several seeds are vmapped, as in a vmapped training."""
    student = Bare(core, 16, (4, 5), 7), (256, 32), 5, 0
    agents, passes = [student], []
    if script == "paired":
        teacher = Bare(core, teacher_filters(core), (62, 10), 169), (62, 32), 15, 50
        agents = [student, student, teacher]
    for network, shape, size, noise in agents:
        image = jax.random.randint(jax.random.key(0), (*shape, size, size, 3), 0, 9)
        image = image.astype(jnp.uint8)
        data = image, jnp.zeros(shape, int), jnp.zeros((*shape, noise)), jnp.zeros(shape, bool)
        params = jax.jit(network.init)(jax.random.key(0), *(x[:1] for x in data))
        forward, gradient = network.apply, jax.grad(network.apply)
        if seeds > 1:
            params, data = jax.tree.map(lambda x: jnp.stack([x] * seeds), (params, data))
            forward, gradient = jax.vmap(forward), jax.vmap(gradient)
        passes.append([partial(jax.jit(f), params, *data) for f in (forward, gradient)])
    title, notes = f"{seeds} vmapped bare" if seeds > 1 else "bare", {"seeds": seeds}
    yield f"{title} forward", lambda: [forward() for forward, _ in passes], notes
    yield f"{title} gradient", lambda: [gradient() for _, gradient in passes], notes


# --- training

CYCLES = {
    "replay cycle": {"replay_prob": 1.0},
    "fresh cycle": {"replay_prob": 1e-9},
    "--parallel": {"parallel": True},
}


def training(script, cycle, core, seeds, devices):
    """run(): an update of that cycle on a full buffer, as the command line runs it."""
    module, fields = importlib.import_module(script), CYCLES.get(cycle, {})
    core, _, units = core.partition(" --hidden-size ")
    fields = fields | ({"hidden_size": int(units)} if units else {})
    if script == "paired":
        fields |= {"teacher_rnn": core, "teacher_filters": teacher_filters(core)}
    config = module.Config(rnn=core, seeds=seeds, devices=devices, eval_interval=0, **fields)
    if devices != 1:  # as the command line does before JAX is asked for its devices
        jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))
    where = module.choose_devices(config, seeds)
    init, update, _, sharding = module.make_programs(config, seeds, *where)
    rows, step = jax.device_put({"seed": np.arange(seeds)}, sharding), 0
    states, program = init(step, rows, None)[0], update(1)
    if hasattr(states, "buffer"):
        step = config.buffer_size
        rngs = jax.random.split(jax.random.key(1), step)
        level = jax.jit(jax.vmap(amaze.sample_level))(rngs)
        full = states.buffer._replace(
            level=level,
            code=jax.vmap(amaze.level_code)(level),
            scored=True,
            score=jnp.linspace(0, 1, step),
        )
        spread = lambda x, y: jnp.array(jnp.broadcast_to(x, y.shape), y.dtype)
        full = jax.tree.map(spread, full, states.buffer)
        states = jax.device_put(states.replace(buffer=full), sharding)

    def run():
        nonlocal step, states
        states, metrics = program(step, rows, states)
        step += 1
        return metrics

    return run


def cores(sizes):
    """Learning pass and acting of the cores: T = 256, 149 inputs, 256 units."""
    from s5 import make_core

    for number in sizes:
        for rnn in ("lstm", "gru", "s5"):
            core = make_core(rnn, 256, 2, "after")
            keys = jax.random.split(jax.random.key(0), 3)
            xs = jax.random.normal(keys[0], (256, number, 149))
            is_first = jax.random.bernoulli(keys[1], 0.02, (256, number))
            carry = core.initial_carry(number)
            params = jax.jit(core.init)(keys[2], carry, xs[:1], is_first[:1])
            weight = jnp.cos(jnp.arange(256) ** 2.0)  # a plain mean of a LayerNorm has no gradient
            apply = core.apply
            loss = lambda params, *args: (apply(params, *args)[1] * weight).mean()

            def act(params, carry, *inputs):  # T times one step, as in a rollout
                step = lambda carry, x: apply(params, carry, *jax.tree.map(lambda x: x[None], x))
                return jax.lax.scan(step, carry, inputs)

            for name, function in (("learn", jax.grad(loss)), ("act", act)):
                program, notes = compiled(function, params, carry, xs, is_first)
                run = partial(program, params, carry, xs, is_first)
                yield f"{rnn}: {name}, N = {number}", run, notes
