"""Train a student by JaxUED, minimax or this project, and test it in this project's mazes.

    python benchmarks/peers/learning.py jaxued dr --source ../jaxued --seeds 0 1
    python benchmarks/peers/learning.py minimax plr --source ../minimax --seeds 0
    python benchmarks/peers/learning.py ours dr --as jaxued --seeds 0 1

--source is a checkout of the peer (ours: of this project). Peers keep their own settings, but for
64 units of the LSTM. `ours --as PEER` takes the settings of that peer, `--network jaxued` also the
heads (ReLU) and the direction of JaxUED's student. A copy with jaxued_dr.diff lets the
episodes of dr.py go on from one update to the next, as JaxUED's do; minimax_dr.diff keeps the
recurrent state although episodes are new, as minimax does.

At checkpoints, counted in PPO updates of the student, the agent plays dcd's twelve mazes, 10
episodes each, and one episode on each of 500 random levels, the same for all. For each run and
checkpoint --out gets one row, by default learning.csv in the current folder. Seconds are those of
the CPU in training without compilation; run it on one core (taskset -c 1). --check compares the
environments, parity.py the updates.
"""

import argparse
import csv
import importlib
import json
import os
import pickle
import sys
import time
import types
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

HERE = Path(__file__).resolve().parent
HIDDEN = 64
STEPS = 256 * 32  # of a rollout
JAXUED = dict(
    lr=1e-4, anneal_lr=True, num_updates=30_000, gamma=0.995, gae_lambda=0.98, ent_coef=1e-3,
    n_walls=25)  # fmt: skip
JAXUED_REPLAY = JAXUED | dict(replay_prob=0.8, staleness_coef=0.3, temperature=0.3)
SETTINGS = {  # of ours, where they are not our defaults; num_updates only sets the learning rate
    ("jaxued", "dr"): JAXUED,
    ("jaxued", "plr"): JAXUED_REPLAY | dict(num_updates=37_500),
    ("jaxued", "accel"): JAXUED_REPLAY | dict(num_updates=37_500, num_edits=5),
    ("minimax", "dr"): {},
    ("minimax", "plr"): {},
}


class Training(NamedTuple):
    """How to train and play one kind of student."""

    init: Any  # (seed) -> state
    update: Any  # (state) -> state, by CYCLES cycles
    progress: Any  # (state, cycles) -> PPO updates, rollouts so far
    params: Any  # (state) -> what `act` needs
    carry: Any  # (number of students) -> recurrent state
    act: Any  # (params, carry, obs [B, ...], is_first [B], noise [B, 7]) -> carry, action
    adapt: Any = None  # (our Observation) -> what theirs would be
    reset: Any = None  # (our Level) -> their observation and state
    step: Any = None  # (their state, action) -> their observation, state, reward, done
    parts: Any = None  # what parity.py calls: JaxUED's script, or minimax's runner


CYCLES = 5  # of a call of update


class JaxuedStudent(nn.Module):
    """JaxUED's network over our core: heads with ReLU, a dense layer for the direction."""

    core: nn.Module

    @nn.compact
    def __call__(self, carry, obs, is_first):
        import distrax
        from dr import convolution, orthogonal

        one_hot = nn.one_hot(obs.direction, 4)
        direction = nn.Dense(5, kernel_init=orthogonal(2**0.5))(one_hot)
        x = jnp.concatenate([convolution(obs.image, 16), direction], axis=-1)
        carry, x = self.core(carry, x, is_first)
        hidden = lambda: nn.relu(nn.Dense(32, kernel_init=orthogonal(2.0))(x))
        logits = nn.Dense(7, kernel_init=orthogonal(0.01))(hidden())
        value = nn.Dense(1, kernel_init=orthogonal(1.0))(hidden())
        return carry, distrax.Categorical(logits), value[..., 0]


def ours(method, source, settings):
    sys.path.insert(0, str(source))
    script = importlib.import_module(method)
    if settings.pop("network") == "jaxued":
        script.ActorCritic = JaxuedStudent
    config = script.Config(hidden_size=HIDDEN, eval_interval=0)
    train = script.make_train(replace(config, **settings))
    update = jax.jit(lambda state: train.update(state, CYCLES)[0])

    def progress(state, cycles):
        updates = int(getattr(state, "grad_updates", cycles))
        return updates, int(getattr(state, "rollouts", cycles))

    return Training(
        init=jax.jit(lambda seed: train.init(jax.random.key(seed))),
        update=update,
        progress=progress,
        params=lambda state: state.student.params,
        carry=train.initial_carry,
        act=lambda *args: train.act(*args)[:2],
    )


# --- JaxUED: its scripts are one function, of which the part before the training is run


def jaxued(method, source, settings):
    jax.tree_map = jax.tree.map
    sys.path.insert(0, str(source / "src"))
    absent = lambda **fields: types.SimpleNamespace(define_metric=lambda *a, **k: None, **fields)
    given = {}

    class Settings(dict):
        as_dict = dict

    sys.modules["orbax"] = types.ModuleType("orbax")
    sys.modules["orbax.checkpoint"] = absent(CheckpointManager=None)
    sys.modules["orbax"].checkpoint = sys.modules["orbax.checkpoint"]
    begin = lambda config, **_: given.update(config)
    sys.modules["wandb"] = absent(init=begin, config=Settings())
    given = sys.modules["wandb"].config

    file = source / "examples" / f"maze_{'dr' if method == 'dr' else 'plr'}.py"
    text = file.read_text()
    for old, new in {
        "features=256": f"features={HIDDEN}",  # the LSTM, and its initial state
        "(*batch_dims, 256)": f"(*batch_dims, {HIDDEN})",
        "    # Set up the train states\n": "    return locals()\n",
        "    main(config, project": "    PARTS = main(config, project",
    }.items():
        assert old in text, old
        text = text.replace(old, new)
    script = types.ModuleType("__main__")
    script.__dict__["__name__"] = "__main__"
    sys.argv = [file.name] + (["--use_accel"] if method == "accel" else [])
    sys.argv += [f"--{name}={value}" for name, value in settings.items()]
    exec(compile(text, str(file), "exec"), script.__dict__)
    parts, agent = script.PARTS, script.ActorCritic

    def init(seed):  # as the script does
        rng_init, rng_train = jax.random.split(jax.random.PRNGKey(seed))
        return rng_train, parts["create_train_state"](rng_init)

    @jax.jit
    def update(state):
        return jax.lax.scan(parts["train_step"], state, None, CYCLES)[0]

    def progress(state, cycles):
        if method == "dr":
            return cycles, cycles
        fresh, replayed, edited = (
            int(getattr(state[1], f"num_{name}_updates")) for name in ("dr", "replay", "mutation")
        )
        return replayed, fresh + replayed + edited

    network = agent(7)
    maze = importlib.import_module("jaxued.environments.maze")
    seen = importlib.import_module("jaxued.environments.maze.env").Observation
    adapt = lambda obs: seen(obs.image / 10.0, obs.direction)
    env, rng = parts["eval_env"], jax.random.PRNGKey(0)

    def reset(level):
        where = level.goal_pos, level.agent_pos, level.agent_dir
        return env.reset_to_level(rng, maze.Level(level.wall_map, *where, 13, 13))

    def act(params, carry, obs, is_first, noise):
        inputs = jax.tree.map(lambda x: x[None], (adapt(obs), is_first))
        carry, policy, _ = network.apply(params, inputs, carry)
        return carry, jnp.argmax(policy.logits[0] + noise, axis=-1)

    carry = lambda number: agent.initialize_carry((number,))
    params = lambda state: state[1].params
    step = lambda state, action: env.step(rng, state, action)[:4]
    return Training(init, update, progress, params, carry, act, adapt, reset, step, script)


# --- minimax: its runner, as its own configuration sets it


def minimax(method, source, settings):
    jax.tree_map, jax.jax = jax.tree.map, jax  # names that JAX has removed
    sys.path.insert(0, str(source / "src"))
    from minimax.arguments import parser
    from minimax.runners import ExperimentRunner

    path = source / "src" / "minimax" / "config" / "configs" / "maze" / f"{method}.json"
    flags = {name: values[0] for name, values in json.loads(path.read_text())["args"].items()}
    flags |= {"student_recurrent_hidden_dim": HIDDEN, "track_env_metrics": False} | settings
    sys.argv = ["train"] + [f"--{k}={v}" for k, v in flags.items() if k != "test_env_names"]
    args = parser.parse_args()
    names = "train_runner env_name agent_rl_algo student_model_name teacher_model_name n_devices"
    parts = "train_runner env ued_env student_rl teacher_rl student_model teacher_model"
    options = {f"{part}_kwargs": getattr(args, f"{part}_args") for part in parts.split()}
    runner = ExperimentRunner(**{name: getattr(args, name) for name in names.split()}, **options)

    def update(state):
        for _ in range(CYCLES):
            _, _, *state = runner.step(state, False)
        return state

    pop = runner.runner.student_pop

    env = runner.runner.benv.env.base_env

    def adapt(obs):  # their image is the transpose
        return OrderedDict(image=obs.image.swapaxes(-3, -2) / 10.0, agent_dir=obs.direction)

    def reset(level):
        fields = level.agent_pos, level.agent_dir, level.goal_pos, level.wall_map
        names = "agent_pos", "agent_dir_idx", "goal_pos", "wall_map"
        return env.set_env_instance(types.SimpleNamespace(**dict(zip(names, fields))))

    def act(params, carry, obs, is_first, noise):
        one = lambda tree: jax.tree.map(lambda x: x[None], tree)  # the only one of a population
        _, logits, carry = pop.act(params, one(adapt(obs)), carry, is_first[None])
        return carry, jnp.argmax(logits[0] + noise, axis=-1)

    carry = lambda number: pop.agent.init_carry(jax.random.PRNGKey(0), (1, number))
    init = lambda seed: list(runner.runner.reset(jax.random.PRNGKey(seed)))
    progress = lambda state, cycles: (int(state[1].n_updates[0]), cycles)
    params = lambda state: state[1].params
    step = lambda state, action: env.step_env(jax.random.PRNGKey(0), state, action)[:4]
    return Training(init, update, progress, params, carry, act, adapt, reset, step, runner.runner)


# --- tests in our mazes


def make_test(training):
    """test(params, seed) -> {column: value}: solve rates on mazes, return on random levels."""
    import amaze

    names = amaze.SUITES["dcd"]

    def play(params, rng, levels, max_steps, see_through_walls):
        reset = lambda level, *rules: amaze.reset(level, *rules)
        obs, state = jax.vmap(reset)(levels, max_steps, see_through_walls)
        number = len(max_steps)

        def step(carry):
            t, memory, obs, state, playing, returns = carry
            noise = jax.random.gumbel(jax.random.fold_in(rng, t), (number, amaze.NUM_ACTIONS))
            is_first = jnp.full(number, t == 0)
            memory, action = training.act(params, memory, obs, is_first, noise)
            obs, state, reward, done = jax.vmap(amaze.step)(state, action)
            return t + 1, memory, obs, state, playing & ~done, returns + reward * playing

        carry = 0, training.carry(number), obs, state, jnp.ones(number, bool), jnp.zeros(number)
        return jax.lax.while_loop(lambda carry: carry[4].any(), step, carry)[5]

    mazes = jax.jit(lambda rng: amaze.sample_mazes(rng, names, 10))(jax.random.key(1))
    rngs = jax.random.split(jax.random.key(2), 500)
    levels = jax.jit(jax.vmap(amaze.sample_solvable))(rngs)
    random = levels, jnp.full(500, 250), jnp.ones(500, bool)
    played = jax.jit(play)

    def test(params, seed):
        rng_mazes, rng_random = jax.random.split(jax.random.key(seed))
        solved = amaze.solved(played(params, rng_mazes, *mazes)).reshape(len(names), -1).mean(1)
        returns = played(params, rng_random, *random)
        scores = {"solve_rate": solved.mean(), "random_return": returns.mean()}
        scores |= {"random_solve_rate": amaze.solved(returns).mean()} | dict(zip(names, solved))
        return {name: f"{float(x):.4f}" for name, x in scores.items()}

    return test


def check(training, number=500):
    """Play random actions on random levels in their environment and in ours, and compare."""
    import amaze

    def episode(rng):
        rng_level, rng_actions = jax.random.split(rng)
        level = amaze.sample_level(rng_level)
        starts = amaze.reset(level), training.reset(level)
        actions = jax.random.choice(rng_actions, jnp.array([0, 1, 2, 2, 2, 3, 6]), (250,))

        def act(carry, action):
            ours, theirs, playing = carry
            obs, ours, *ended = amaze.step(ours, action)
            seen, theirs, *outcome = training.step(theirs, action)
            same = lambda x, y: jnp.abs(jnp.asarray(x, float) - jnp.asarray(y, float)).max()
            ended_alike = jnp.stack([same(x, y) for x, y in zip(ended, outcome)]).max()
            views = zip(jax.tree.leaves(training.adapt(obs)), jax.tree.leaves(seen))
            error = jnp.where(ended[1], 0.0, jnp.stack([same(x, y) for x, y in views]).max())
            error = jnp.maximum(error, ended_alike) * playing  # after done theirs does not move
            return (ours, theirs, playing & ~ended[1]), (error, playing, ended[0] > 0)

        (obs, ours), (seen, theirs) = starts
        views = zip(jax.tree.leaves(training.adapt(obs)), jax.tree.leaves(seen))
        first = [jnp.abs(jnp.asarray(x, float) - jnp.asarray(y, float)).max() for x, y in views]
        types = jax.eval_shape(training.step, theirs, actions[0])[1]
        theirs = jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), theirs, types)
        _, (error, playing, goal) = jax.lax.scan(act, (ours, theirs, True), actions)
        return jnp.maximum(error.max(), jnp.stack(first).max()), playing.sum(), goal.sum()

    error, steps, goals = jax.jit(jax.vmap(episode))(jax.random.split(jax.random.key(3), number))
    print(f"{steps.sum()} transitions, {goals.sum()} goals, largest difference {error.max():.1e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", choices=["ours", "jaxued", "minimax"])
    parser.add_argument("method", choices=["dr", "plr", "accel"])
    parser.add_argument("--source", type=Path, default=HERE.parents[1])
    parser.add_argument("--as", dest="peer", choices=["jaxued", "minimax"])
    parser.add_argument("--variant", default="", help="what differs in this source, for the table")
    parser.add_argument("--network", choices=["jaxued"], help="of ours")
    parser.add_argument("--set", nargs="*", default=[], help="further settings, as NAME=VALUE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--at", type=int, nargs="+", default=[100, 200, 400, 600, 800, 1000])
    parser.add_argument("--check", action="store_true", help="only compare the environments")
    parser.add_argument("--until", type=int, default=10**9, help="updates after which to stop")
    parser.add_argument("--keep", type=Path, help="folder for states, from which runs go on")
    parser.add_argument("--out", type=Path, default=Path("learning.csv"))
    options = parser.parse_args()
    settings = {name: json.loads(value) for name, value in (x.split("=") for x in options.set)}
    if options.library == "ours":
        settings = SETTINGS[options.peer, options.method] | settings
        settings |= {"network": options.network}
    sys.path.append(str(HERE.parents[1]))
    training = globals()[options.library](options.method, options.source.resolve(), settings)
    if options.check:
        return check(training)
    test = make_test(training)
    first = {
        "library": options.library,
        "settings": options.peer or options.library,
        "method": options.method,
        "variant": options.variant,
    }
    for seed in options.seeds:
        run(training, test, first | {"seed": seed}, options)


def run(training, test, row, options):
    """Train one seed from where its file in --keep ends; add a row to the table at checkpoints."""
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    file = options.keep and options.keep / ("-".join(map(str, row.values())) + ".pickle")
    state, seconds, cycles = training.init(row["seed"]), 0.0, 0
    jax.block_until_ready(training.update(state))  # compiles
    state = training.init(row["seed"])
    if file and file.exists():
        leaves, seconds, cycles = pickle.loads(file.read_bytes())
        state = from_arrays(state, leaves)
    updates, rollouts = training.progress(state, cycles)
    due = [x for x in options.at if x > updates]
    while due and updates < options.until:
        clock = time.process_time()
        state = jax.block_until_ready(training.update(state))
        seconds, cycles = seconds + time.process_time() - clock, cycles + CYCLES
        updates, rollouts = training.progress(state, cycles)
        is_due = updates >= due[0]
        if is_due:
            due.pop(0)
            reached = {"updates": updates, "env_steps": rollouts * STEPS}
            scores = test(training.params(state), row["seed"])
            write(options.out, row | reached | {"seconds": f"{seconds:.1f}"} | scores)
        if file and (is_due or cycles % 25 == 0 or updates >= options.until):
            text = pickle.dumps((arrays(state), seconds, cycles))
            file.with_suffix(".new").write_bytes(text)
            file.with_suffix(".new").replace(file)


def arrays(state):
    """The arrays of a state, with random keys as their data."""
    is_key = lambda x: jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(state)]


def from_arrays(like, leaves):
    is_key = lambda x: jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key)
    back = lambda x, y: jax.random.wrap_key_data(y) if is_key(x) else jnp.asarray(y)
    old, tree = jax.tree.flatten(like)
    return jax.tree.unflatten(tree, [back(*pair) for pair in zip(old, leaves)])


def write(path, row):
    new = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, row, lineterminator="\n")
        writer.writerows([dict(zip(row, row))] * new + [row])
    print(*row.values(), flush=True)


if __name__ == "__main__":
    main()
