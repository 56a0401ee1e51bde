"""Evolution over whole trainings: of PPO's hyperparameters, or of the value loss.

    python benchmarks/evolve.py floats            # lr, gae_lambda, clip_eps, ent_coef
    python benchmarks/evolve.py loss              # a small network in place of the squared error
    python benchmarks/evolve.py loss --resume     # continues, up to --generations
    python benchmarks/evolve.py loss --compare 32 # the result against the default, 32 new seeds

A member of a generation is a whole training of dr.py at a small size, with a few seeds that all
members share. One compiled program trains them all, vmapped and distributed over the cores. Fitness
is the solve rate of first episodes on random levels that no training saw. The strategy is evosax's
SNES (Wierstra 2014). WHAT.csv, WHAT.png and WHAT.msgpack are written to --out every --save-interval
generations. --compare trains the default and the result with seeds that evolution never used.
"""

import argparse
import csv
import os
import sys
import time
import types
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(len(os.sched_getaffinity(0))))  # all cores
# ruff: noqa: E402
import jax
import jax.numpy as jnp
import matplotlib.style
import numpy as np
from evosax.algorithms import SNES
from flax import serialization
from jax.sharding import Mesh, PartitionSpec
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import amaze
import dr
from evaluate import bootstrap

SMALL = dict(
    rnn="gru", hidden_size=32, height=7, width=7, n_walls=15, max_steps=64, num_envs=16,
    num_steps=64, num_minibatches=2, num_updates=40, lr=3e-3, gamma=0.98, gae_lambda=0.95,
    eval_interval=0)  # fmt: skip
LEVELS = 256  # random levels that measure fitness
HIDDEN = 8  # units of the network in the value loss
LOG = jnp.log, jnp.exp  # to the real line that evolution searches, and back
LOGIT = jax.scipy.special.logit, jax.nn.sigmoid
LINES = {"lr": LOG, "gae_lambda": LOGIT, "clip_eps": LOG, "ent_coef": LOG}
SEARCH = "population", "seeds", "seed"  # must be the same on --resume
STEP = {"floats": 0.5, "loss": 0.3}  # standard deviation in the first generation

# Old and new text: a copy of dr.py whose value loss is a network, with its parameters in Config.
HACK = {
    "    vf_coef: float":
        "    value_net: jax.Array | None = None  # the value loss\n    vf_coef: float",
    "        if config.clip_vloss:\n"
    "            error = jnp.maximum(error, (near(value, batch.value) - target) ** 2)\n": "",
    "error = (value - target) ** 2":
        "error = value_loss(config.value_net, value - target, value - batch.value)",
}  # fmt: skip


def value_loss(net, error, change):
    """Loss of V - target and V - the rollout's V; if net [HIDDEN, 4] is 0, the squared error."""
    hidden = jnp.tanh(error[..., None] * net[:, 0] + change[..., None] * net[:, 1] + net[:, 2])
    return (error + hidden @ net[:, 3]) ** 2


def hacked():
    text = Path(dr.__file__).read_text()
    for old, new in HACK.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    module = types.ModuleType("hacked")
    module.__dict__.update(value_loss=value_loss, __file__=dr.__file__)
    sys.modules["hacked"] = module  # dataclasses look up names there
    exec(compile(text, "hacked", "exec"), module.__dict__)
    return module


def score(script, size, changes, rng):
    """Train with these changes of Config -> the solve rate on LEVELS random levels."""
    config = replace(script.Config(**size), **changes)
    train = script.make_train(config)
    rng_train, rng_levels, rng_play = jax.random.split(rng, 3)
    params = train(rng_train)[0].student.params
    draw = lambda rng: amaze.sample_level(rng, config.n_walls, config.height, config.width)
    obs, state = jax.vmap(train.reset)(jax.vmap(draw)(jax.random.split(rng_levels, LEVELS)))

    def step(carry, rng):
        memory, obs, state, is_first, playing, solved = carry
        noise = jax.random.gumbel(rng, (LEVELS, amaze.NUM_ACTIONS))
        memory, action, *_ = train.act(params, memory, obs, is_first, noise)
        obs, state, reward, done = jax.vmap(train.step)(state, action)
        solved |= playing & (reward > 0)
        return (memory, obs, state, done, playing & ~done, solved), None

    yes = jnp.ones(LEVELS, bool)
    carry = train.initial_carry(LEVELS), obs, state, yes, yes, ~yes
    return jax.lax.scan(step, carry, jax.random.split(rng_play, config.max_steps))[0][-1].mean()


def make_scores(script, size):
    """scores(changes of P members, S keys) -> [P, S]: one program of P * S trainings, distributed
    over the devices."""
    dealt = PartitionSpec("devices")
    specs = dict(in_specs=(dealt, dealt), out_specs=dealt, check_vma=False)
    mesh = Mesh(jax.devices(), "devices")
    each = jax.jit(jax.shard_map(jax.vmap(partial(score, script, size)), mesh=mesh, **specs))

    def scores(changes, rngs):
        members = len(jax.tree.leaves(changes)[0])
        changes = jax.tree.map(lambda x: np.repeat(np.array(x), len(rngs), axis=0), changes)
        all_rngs = rngs[jnp.arange(members * len(rngs)) % len(rngs)]
        return np.array(each(changes, all_rngs)).reshape(members, len(rngs))

    return scores


def start(what):
    """The point where evolution starts, and the function from a point to changes of Config."""
    if what == "loss":
        return {"value_net": jnp.zeros((HIDDEN, 4))}, lambda point: point
    default = dr.Config(**SMALL)
    point = {name: to(jnp.array(getattr(default, name))) for name, (to, _) in LINES.items()}
    return point, lambda point: {name: LINES[name][1](x) for name, x in point.items()}


@matplotlib.style.context("default")
def plot(options, changes, rows):
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axis, found = figure.subplots(1, 2)
    generation, mean, best = (np.array([float(row[i]) for row in rows]) for i in (0, 1, 2))
    axis.plot(generation, mean, label="mean of the members")
    axis.plot(generation, best, label="best member", lw=0.8)
    axis.set(xlabel="generation", ylabel="solve rate on held-out levels")
    if options.what == "loss":
        error = jnp.linspace(-1, 1, 201)
        found.plot(error, error**2, "k--", label="squared error")
        for change in (-0.2, 0.0, 0.2):
            loss = value_loss(changes["value_net"], error, jnp.full(201, change))
            found.plot(error, loss, label=f"evolved, V moved by {change:+.1f}")
        found.set(xlabel="V - target", ylabel="loss of the value")
    else:
        for i, name in enumerate(LINES):
            values = np.array([float(row[3 + i]) for row in rows])
            found.plot(generation, values / getattr(dr.Config(**SMALL), name), label=name)
        found.set(xlabel="generation", ylabel="value / default", yscale="log")
    for each in axis, found:
        each.legend(fontsize="small")
        each.grid(alpha=0.3)
    figure.savefig(options.out / f"{options.what}.png", dpi=110)


def save(path, data):
    path.with_suffix(".tmp").write_bytes(data)
    os.replace(path.with_suffix(".tmp"), path)


def evolve(options, size):
    """Evolve from the last save on -> changes of Config at the mean of the search distribution."""
    point, to_changes = start(options.what)
    strategy = SNES(options.population, point)
    params = strategy.default_params.replace(std_init=STEP[options.what])
    rng, rng_init = jax.random.split(jax.random.key(options.seed))
    state = strategy.init(rng_init, point, params)
    table, kept = (options.out / f"{options.what}.{end}" for end in ("csv", "msgpack"))
    rows, chosen = [], {name: getattr(options, name) for name in SEARCH}
    chosen["num_updates"] = size["num_updates"]
    if (options.resume or options.compare) and not kept.exists():
        sys.exit(f"{kept}: does not exist")
    if options.resume or options.compare:
        generation, before, state = serialization.from_bytes((0, chosen, state), kept.read_bytes())
        if options.resume and before != chosen:
            sys.exit(f"{kept}: saved by a search with {before}, not {chosen}")
        with open(table, newline="") as file:
            rows = list(csv.reader(file))[1:][:generation]
    elif kept.exists():
        sys.exit(f"{kept}: exists; --resume continues it, or choose another --out")
    scores = make_scores(hacked() if options.what == "loss" else dr, size)
    while len(rows) < options.generations and not options.compare:
        began = time.time()
        rng_ask, rng_seeds, rng_tell = jax.random.split(jax.random.fold_in(rng, len(rows)), 3)
        population, state = strategy.ask(rng_ask, state, params)
        seeds = jax.random.split(rng_seeds, options.seeds)
        fitness = scores(jax.vmap(to_changes)(population), seeds).mean(1)
        state, _ = strategy.tell(rng_tell, population, -fitness, state, params)  # SNES minimises
        now = to_changes(strategy.get_mean(state))
        numbers = [fitness.mean(), fitness.max()]
        numbers += [now[name] for name in LINES] if options.what == "floats" else []
        rows.append([str(len(rows)), *(f"{float(x):.6g}" for x in numbers)])
        print(*rows[-1], f"{time.time() - began:.1f} s", flush=True)
        if len(rows) % options.save_interval == 0 or len(rows) == options.generations:
            header = ["generation", "mean", "best", *(LINES if options.what == "floats" else ())]
            save(table, "\n".join(map(",".join, [header, *rows])).encode() + b"\n")
            # last: after a crash the table may have too many rows, which --resume cuts off
            save(kept, serialization.to_bytes((len(rows), chosen, state)))
            plot(options, now, rows)
    return to_changes(strategy.get_mean(state))


def compare(options, size, changes):
    """Print solve rates of the default and of the evolved values, on seeds new to both."""
    first, to_changes = start(options.what)
    seeds = jax.random.split(jax.random.key(options.seed + 1_000_000), options.compare)
    members = jax.tree.map(lambda *x: jnp.stack(x), to_changes(first), changes)
    if options.what == "loss":
        names = "the squared error", "evolved"
        rates = dict(zip(names, make_scores(hacked(), size)(members, seeds)))
        clipped = make_scores(dr, size)({"vf_coef": jnp.full(1, dr.Config.vf_coef)}, seeds)
        rates["PPO's clipped error"] = clipped[0]
    else:
        rates = dict(zip(("default", "evolved"), make_scores(dr, size)(members, seeds)))
    for name, rate in rates.items():
        rows = np.stack([rate, rates["evolved"] - rate], axis=1)
        (mean, low, high), gain = bootstrap(rows, lambda rows: rows.mean(0), options.seed)
        print(f"{name}: {mean:.3f} [{low:.3f}, {high:.3f}]; evolved is better by "
              f"{gain[0]:.3f} [{gain[1]:.3f}, {gain[2]:.3f}]")  # fmt: skip


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("what", choices=STEP)
    parser.add_argument("--generations", type=int, default=25)
    parser.add_argument("--population", type=int, default=16, help="members of a generation")
    parser.add_argument("--seeds", type=int, default=2, help="of each member, new each generation")
    parser.add_argument("--seed", type=int, default=0, help="seed of the evolution")
    parser.add_argument("--num-updates", type=int, default=SMALL["num_updates"])
    parser.add_argument("--save-interval", type=int, default=5, help="in generations")
    parser.add_argument("--out", type=Path, default=Path("runs/evolve"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--compare", type=int, default=0, metavar="SEEDS", help="do not evolve")
    options = parser.parse_args()
    for number in options.population * options.seeds, options.compare:
        if number % jax.device_count():
            parser.error(f"{number} trainings: must be a multiple of {jax.device_count()} cores")
    options.out.mkdir(parents=True, exist_ok=True)
    size = SMALL | {"num_updates": options.num_updates}
    changes = evolve(options, size)
    if options.compare:
        compare(options, size, changes)


if __name__ == "__main__":
    main()
