"""Evaluate trainings on test mazes: tables, plots and films from their checkpoints.

    python evaluate.py runs/plr                          all seeds of a run on the minimax suite
    python evaluate.py runs/dr runs/plr --suite dcd      runs side by side
    python evaluate.py runs/plr/checkpoint_500.msgpack   an archive
    python evaluate.py runs/plr --suite sampled --levels 10000
    python evaluate.py runs/plr --mazes Labyrinth,FourRooms --gif Labyrinth
    python evaluate.py runs/sweep                        of a sweep also its points, ranked
    python evaluate.py runs/mine --script my_plr.py      a run of your own copy of a script
    python evaluate.py --suite dcd --show-levels         a picture of the mazes, without a run
    python evaluate.py runs/dr runs/plr --play           instead, play.html: in a browser they walk

All agents play the same levels; actions are sampled. A training's score on a maze is its solve rate
there. Over seeds and mazes: mean, interquartile mean (IQM) and optimality gap (Agarwal 2021,
2108.13264). One agent plays all mazes, so the 95% bootstrap intervals draw whole seeds anew; with 6
they hold the truth 85 times in 100, with fewer than 3 there are none. Sampled levels are played 10
+ 10 times: the worst 10, 1, 0.1% are found by one half and reported by the other (Rutherford 2024,
2408.15099). The points of a sweep are ranked by the last solve rate in logs.csv, before all else.

    put all episodes in a row, mazes with long time limits first
    W lanes take the first W episodes, and at each step every lane
        acts; if its episode ends, records return and length and takes the next episode in the row

Random numbers come from --seed, the training's seed, the maze's name, the episode's number and the
time step: devices, --batch-size and what else is evaluated change results by rounding only.
Compiled programs stay in ~/.cache/amaze; delete it freely.

Shapes     A agents (a run's seeds, times students), M mazes, E episodes on each, G = M * E,
           P players (agents, times the parts of their episodes), W lanes of each,
           L distinct levels, S seeds.
"""

import base64
import csv
import importlib.util
import io
import json
import math
import os
import re
import sys
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import serialization, traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from PIL import Image
from tqdm import tqdm

import amaze

SCRIPTS = ("dr.py", "plr.py", "accel.py", "paired.py", "sfl.py")  # all that a config.json may name
STEPS = 50  # of the lanes, between looks at what has ended
RESAMPLES = 2000  # of the bootstrap
MIN_SEEDS = 3  # of an interval
WORST = {"worst 10%": 0.1, "worst 1%": 0.01, "worst 0.1%": 0.001}  # shares of the sampled levels
MANY = 40  # more mazes than these are neither listed nor plotted one by one
HEADS = "(Dense_[0-3]/(bias|kernel) ){8}Embed_0/embedding conv/bias conv/kernel"
GATED = " core/bias core/kernel"
CORES = {"lstm": f"( core/Dense_0/kernel)?{GATED}", "gru": f" core/Dense_0/kernel{GATED}",
         "s5": r"( core/(Dense_0|S5Layer_\d+)/[\w/]+)+", "none": ""}  # fmt: skip
EMPTY_PAGE = '{"agents": [], "suites": {}, "mazes": {}}'  # what play.html holds before it is filled


@dataclass(frozen=True)
class Arguments:
    runs: tyro.conf.Positional[tuple[str, ...]] = ()  # run folders, or checkpoint files in them
    suite: str = ""  # minimax, jaxued, dcd, families or sampled; default: the environment's first
    mazes: str = ""  # instead of the suite: names of mazes, with commas between
    maze_file: str = ""  # instead of the suite: a text file of mazes, blank lines between
    max_steps: int = 250  # time limit of the mazes of --maze-file
    levels: int = 1000  # of the suite `sampled`: random solvable levels with 60 walls
    episodes: int = 0  # per agent and maze; 0: 100, or 20 on each level of `sampled` (10 + 10)
    agent: str = "protagonist"  # of paired.py: protagonist, antagonist or a number, all
    batch_size: int = 0  # episodes at once, for each player; 0: 128 on a CPU, 1,024 elsewhere
    seed: int = 0  # of levels and actions
    out: str = ""  # folder for results; default: the run's, or the one that holds the runs
    gif: str = ""  # mazes to film, with commas between: each run's first agent and episode
    show_levels: bool = False  # draw the mazes too
    play: bool = False  # instead: write play.html, a page where one draws mazes that agents walk
    trainings: int = 0  # of each run, the first so many; 0: all
    script: str = ""  # what made a run, if it is none of ours: a Python file, to be executed


class Refused(ValueError):
    """One line: what is wrong, and what is allowed."""


class Maze(NamedTuple):
    name: str
    levels: Any  # [E, ...] if each episode has its own, else [1, ...]
    max_steps: int
    see_through_walls: bool | None = True  # None: an environment without


class Run(NamedTuple):
    """The agents of a checkpoint."""

    name: str
    folder: Path
    algorithm: str
    update: int
    agents: list  # [A] dicts of seed, swept values, agent
    params: dict  # [A, ...]
    train: Callable  # the script's, of which act, initial_carry, reset and step are needed here
    env: ModuleType = amaze  # what the script imports as amaze


# --- mazes


def tag(name, number):
    """What names the random numbers of a maze's level or episode."""
    return np.uint32(zlib.crc32(f"{name}/{number}".encode()))


def draw(names, number, seed, env=amaze):
    """{name: levels} of test mazes: `number` of each, or one if all are the same."""
    rng = jax.random.fold_in(jax.random.key(seed), 0)
    level = lambda name: lambda tag: env.TEST_MAZES[name][0](jax.random.fold_in(rng, tag))
    sample = lambda tags: {name: jax.vmap(level(name))(x) for name, x in tags.items()}
    tags = {name: np.array([tag(name, i) for i in range(number)]) for name in names}
    drawn = jax.device_get(jax.jit(sample)(tags))
    fixed = lambda levels: all((x == x[:1]).all() for x in levels)
    return {k: jax.tree.map(lambda x: x[:1], v) if fixed(v) else v for k, v in drawn.items()}


def read_mazes(path, max_steps, env=amaze):
    """The mazes of a text file, as level_from_text takes them, blank lines between."""
    mazes = []
    try:
        for i, text in enumerate(re.split(r"\n\s*\n", Path(path).read_text().strip()), start=1):
            level = jax.tree.map(lambda x: x[None], env.level_from_text(text))
            mazes.append(Maze(f"{Path(path).stem}-{i}", level, max_steps))
    except ValueError as error:  # a UnicodeDecodeError is one too
        raise Refused(f"{path}, maze {len(mazes) + 1}: {error}") from None
    return mazes


def choose_mazes(args, env=amaze):
    """Names of all mazes that are asked for, those of --maze-file, and if others are sampled."""
    suite = args.suite or next(iter(env.SUITES))
    if suite not in env.SUITES:
        raise Refused(f"suite = {suite}: allowed are {', '.join(env.SUITES)}")
    if args.maze_file and not hasattr(env, "level_from_text"):
        raise Refused(f"maze_file = {args.maze_file}: allowed is none in this environment")
    own = read_mazes(args.maze_file, args.max_steps, env) if args.maze_file else []
    names = args.mazes.split(",") if args.mazes else [] if own else env.SUITES[suite]
    if unknown := set(names) - set(env.TEST_MAZES):
        raise Refused(f"mazes = {', '.join(unknown)}: allowed are {', '.join(env.TEST_MAZES)}")
    if sampled := suite == "sampled" and not (own or args.mazes):
        names = [f"{names[0]}-{i}" for i in range(args.levels)]
        if args.episodes % 2:
            raise Refused(f"episodes = {args.episodes}: allowed with sampled is an even number")
    return [*dict.fromkeys([*(maze.name for maze in own), *names])], own, sampled


def draw_mazes(names, args=Arguments(episodes=1), sampled=False, env=amaze):
    """The mazes of these names."""
    rules = lambda name: (*env.TEST_MAZES[name][1:], None)[:2]
    if sampled:
        [name] = env.SUITES["sampled"]
        levels = draw([name], len(names), args.seed, env)[name]
        level = lambda i: jax.tree.map(lambda x: x[i : i + 1], levels)
        return [Maze(x, level(i), *rules(name)) for i, x in enumerate(names)]
    drawn = draw(names, args.episodes, args.seed, env)
    return [Maze(name, drawn[name], *rules(name)) for name in names]


def stack(mazes, env=amaze):
    """All levels, padded to one size if they differ, and each one's maze: levels [L, ...], [L]."""
    levels = getattr(env, "pad_levels", list)([maze.levels for maze in mazes])
    numbers = [len(jax.tree.leaves(x)[0]) for x in levels]
    levels = jax.tree.map(lambda *x: np.concatenate(x), *levels)
    return levels, np.repeat(np.arange(len(mazes)), numbers)


def optimal_returns(mazes, env=amaze):
    """[M] the best return there is, averaged over a maze's levels; NaN if it is not known."""
    levels, owner = stack(mazes, env)
    limits = np.array([maze.max_steps for maze in mazes])[owner]
    best = lambda level, t: env.level_stats(level, t).get("optimal_return", np.nan)
    return np.bincount(owner, jax.jit(jax.vmap(best))(levels, limits)) / np.bincount(owner)


def lay_out(reset, mazes, episodes, env=amaze):
    """E episodes on each maze, in the order of play [G]: index into [M, E], what names the random
    numbers, index into the levels; and first observation and state of each level [L, ...]."""
    levels, owner = stack(mazes, env)
    limits = np.array([maze.max_steps for maze in mazes])
    see = np.array([maze.see_through_walls for maze in mazes])
    rules = [limits[owner]] if see.all() or None in see else [limits[owner], see[owner]]
    plain = [] if None in see else [True]  # which is faster
    openings = jax.vmap(lambda level, limit, *see: reset(level, limit, *(see or plain)))
    maze = np.repeat(np.argsort(-limits, kind="stable"), episodes)
    episode = np.tile(np.arange(episodes), len(mazes))
    tags = np.array([tag(mazes[m].name, e) for m, e in zip(maze, episode)])
    slot = np.searchsorted(owner, maze) + episode % np.bincount(owner)[maze]
    return maze * episodes + episode, tags, slot, jax.jit(openings)(levels, *rules)


# --- play


def gumbel(rng, tag, t, env=amaze):
    """Noise on the logits at step t of an episode, so that argmax samples."""
    rng = jax.random.fold_in(jax.random.fold_in(rng, tag), t)
    return jax.random.gumbel(rng, (env.NUM_ACTIONS,))


def make_player(train, tags, opening, parts, env):
    """go_on(params, rng, part, lanes) -> lanes [W], records [STEPS, W]: an agent plays every
    parts-th episode of the row, from number `part` on."""

    def step(params, rng, part, lanes):
        memory, obs, state, t, total, turn, done, taken = lanes
        # after the last episode the first again: played twice, an episode gives the same result
        later = (part + parts * (taken + jnp.cumsum(done) - 1)) % len(tags)
        turn, taken = jnp.where(done, later, turn), taken + done.sum()
        t, total = jnp.where(done, 0, t), jnp.where(done, 0.0, total)
        choose = lambda new, old: jnp.where(done.reshape(-1, *[1] * (old.ndim - 1)), new, old)
        begin = lambda old: jax.tree.map(choose, opening(turn), old)
        obs, state = jax.lax.cond(done.any(), begin, lambda old: old, (obs, state))
        noise = jax.vmap(partial(gumbel, rng, env=env))(tags[turn], t)
        memory, action = train.act(params, memory, obs, done, noise)[:2]
        obs, state, reward, done = jax.vmap(train.step)(state, action)
        t, total = t + 1, total + reward
        return (memory, obs, state, t, total, turn, done, taken), (turn, done, total, t)

    def go_on(params, rng, part, lanes):
        return jax.lax.scan(lambda lanes, _: step(params, rng, part, lanes), lanes, length=STEPS)

    return go_on


def play(train, params, rngs, mazes, episodes, batch_size=0, title="", env=amaze):
    """Every agent plays every maze: returns, lengths [A, M, E]. params [A, ...], rngs [A]."""
    devices, on_cpu = jax.devices(), jax.default_backend() == "cpu"
    parts = len(devices) // math.gcd(len(rngs), len(devices))  # so that players deal evenly
    agent, part = np.divmod(np.arange(len(rngs) * parts), parts)  # [P]
    row, tags, slot, openings = lay_out(train.reset, mazes, episodes, env)
    opening = lambda turn: jax.tree.map(lambda x: x[jnp.asarray(slot)[turn]], openings)
    player = make_player(train, jnp.asarray(tags), opening, parts, env)
    # on a device players take turns if it is a CPU, which is faster there, else they are vmapped
    in_turn = lambda *players: jax.lax.map(lambda args: player(*args), players)
    dealt = NamedSharding(Mesh(devices, ("devices",)), PartitionSpec("devices"))
    program = jax.shard_map(
        in_turn if on_cpu else jax.vmap(player),
        mesh=dealt.mesh,
        in_specs=dealt.spec,
        out_specs=dealt.spec,
        check_vma=False,
    )
    program = jax.jit(program, donate_argnums=3)
    # at first all lanes are as if their episodes had ended, so that they begin the next
    zeros = np.zeros(min(-(-len(row) // parts), batch_size or (128 if on_cpu else 1024)), int)
    ended = train.initial_carry(len(zeros)), *opening(zeros), zeros, 0.0 * zeros, zeros, zeros == 0
    lanes = jax.tree.map(lambda x: jnp.stack([x] * len(agent)), (*ended, 0))
    agents = *jax.tree.map(lambda x: x[agent], (params, rngs)), part
    agents, lanes = jax.device_put((agents, lanes), dealt)
    returns, lengths = np.zeros((2, len(rngs), len(row)))
    with tqdm(total=lengths.size, desc=title, unit="episode", disable=not title) as bar:
        while not lengths.all():  # 0 until played
            lanes, records = program(*agents, lanes)
            turn, done, total, t = jax.device_get(records)  # [P, STEPS, W]
            at = agent[done.nonzero()[0]], row[turn[done]]
            returns[at], lengths[at] = total[done], t[done]
            bar.update(np.count_nonzero(lengths) - bar.n)
    return (x.reshape(-1, len(mazes), episodes) for x in (returns, lengths))


def agent_keys(run, seed):
    """[A] a key for each agent, of --seed and of its training's seed."""
    rng = jax.random.fold_in(jax.random.key(seed), 1)
    return jax.vmap(partial(jax.random.fold_in, rng))(np.array([x["seed"] for x in run.agents]))


def film(run, seed, maze):
    """Pictures [h, w, 3] of the run's first agent in its first episode, with its view lit up."""
    rng, params = agent_keys(run, seed)[0], jax.tree.map(lambda x: jnp.asarray(x[0]), run.params)

    @jax.jit
    def move(memory, obs, state, t):
        noise = gumbel(rng, tag(maze.name, 0), t, run.env)
        inputs = jax.tree.map(lambda x: x[None], (obs, t == 0, noise))
        memory, action = run.train.act(params, memory, *inputs)[:2]
        return memory, *run.train.step(state, action[0])

    def picture(state):  # whatever else a script's state holds
        is_maze = lambda x: isinstance(x, run.env.EnvState)
        return run.env.render(*filter(is_maze, jax.tree.leaves(state, is_leaf=is_maze)))

    level = jax.tree.map(lambda x: x[0], maze.levels)
    obs, state = run.train.reset(level, *(x for x in maze[2:] if x is not None))
    memory, done, pictures = run.train.initial_carry(1), False, [picture(state)]
    while not done:
        memory, obs, state, _, done = move(memory, obs, state, len(pictures) - 1)
        pictures.append(picture(state))
    return pictures


# --- statistics of scores [S, M]


def iqm(scores):
    """Interquartile mean: without the lowest and the highest quarter of the scores."""
    low = scores.size // 4
    high = scores.size - low
    return np.partition(scores, (low, high - 1), axis=None)[low:high].mean()


AGGREGATES = {
    "mean": np.mean,
    "IQM": iqm,
    "optimality gap": lambda scores: 1 - np.minimum(scores, 1).mean(),
}


def worst(halves):
    """Each seed's mean over its WORST shares of the levels [S, 3]; halves: solve rates [2, S, L].

    Levels are ranked by one half of the episodes and the mean is over the other, which had no part
    in the choice (by its own luck a mean would be too low); both ways round, for less noise. Those
    that tie for the last places share them. Shares below one level are left out."""
    means, num_levels = [], halves.shape[2]
    for number in (math.ceil(num_levels * x) for x in WORST.values() if num_levels * x >= 1):
        last = np.sort(halves)[..., number - 1 : number]
        below, tied = halves < last, halves == last
        places = number - below.sum(2, keepdims=True)
        weight = below + tied * places / tied.sum(2, keepdims=True)
        means.append((weight * halves[::-1]).sum(2).mean(0) / number)
    return np.stack(means, axis=1)


def bootstrap(scores, statistic, seed):
    """Of each of n statistics: value, 2.5% and 97.5% points [n, 3], NaN for fewer than MIN_SEEDS.

    Whole seeds are drawn anew with replacement, all mazes of a seed together: one trained agent
    plays them all, so its scores are not independent."""
    seeds = np.random.default_rng(seed).integers(len(scores), size=(RESAMPLES, len(scores)))
    values = np.array([statistic(scores[rows]) for rows in seeds])
    values += 0 if len(scores) >= MIN_SEEDS else np.nan
    return np.stack([statistic(scores), *np.quantile(values, (0.025, 0.975), axis=0)], axis=-1)


def summarise(returns, names, seed, sampled, env=amaze):
    """{maze or aggregate: value, low, high} of the solve rates in episodes [S, M, E]."""
    rates = lambda returns: env.solved(returns).mean(-1)  # [S, M]
    mean = lambda scores: scores.mean(0)
    aggregates = lambda scores: np.array([f(scores) for f in AGGREGATES.values()])
    scores = rates(returns)
    summary = dict(zip(names, bootstrap(scores, mean, seed))) if len(names) <= MANY else {}
    summary |= zip(AGGREGATES, bootstrap(scores, aggregates, seed))
    if sampled and len(names) * max(WORST.values()) >= 1:
        halves = np.stack([rates(returns[..., i::2]) for i in (0, 1)])
        summary |= zip(WORST, bootstrap(worst(halves), mean, seed))
    return summary


show = lambda x, low, high: f"{x:.3f}" + f" [{low:.3f}, {high:.3f}]" * (not np.isnan(low))


# --- checkpoints: data, from which nothing is executed


def import_script(recorded, given):
    """The module of a run: one of SCRIPTS beside this file, or the one that the user names."""
    ours = recorded in SCRIPTS and Path(given).name != recorded
    if not (ours or given):
        raise Refused(f"made by {recorded!r}: allowed are {', '.join(SCRIPTS)}, or --script FILE")
    path = Path(__file__).resolve().with_name(recorded) if ours else Path(given)
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(path.resolve().parent))  # where its environment may lie
    spec.loader.exec_module(module)
    return module


def read_config(folder):
    try:
        config = json.loads((folder / "config.json").read_text())
        config = {k: tuple(x) if isinstance(x, list) else x for k, x in config.items()}
        return config | {"script": str(config["script"])}
    except (OSError, ValueError, RecursionError, AttributeError, KeyError):
        raise Refused("no config.json of a training: allowed is a run's folder or file") from None


def read_run(path):
    """What a run folder or a file in it holds: config, update, rows and the state's dict."""
    path = path / "checkpoint.msgpack" if path.is_dir() else path
    config = read_config(path.parent)
    try:
        data = serialization.msgpack_restore(path.read_bytes())
        rows = [data["rows"][str(i)] for i in range(len(data["rows"]))]
        rows = [row | {"seed": int(row["seed"])} for row in rows]
        return config, int(data["step"]), rows, dict(data["state"])
    except Exception:  # whatever the parser makes of foreign bytes
        raise Refused(f"{path.name} is missing, truncated or no checkpoint") from None


def fit(expected, found, num_rows):
    """The parameters [rows, ...], if they have the shapes of the config's network."""
    fits = lambda x, y: y.shape == (num_rows, *x.shape) and y.dtype == x.dtype
    try:
        params = serialization.from_state_dict(expected, found)
        fine = jax.tree.leaves_with_path(jax.tree.map(fits, expected, params))
    except (ValueError, TypeError, AttributeError, KeyError):
        raise Refused("the checkpoint's network has other parts than config.json's") from None
    for (where, ok), x in zip(fine, jax.tree.leaves(params)):
        if not ok:
            name = jax.tree_util.keystr(where, simple=True, separator="/")
            raise Refused(f"{name}, {x.shape} in the checkpoint, is not of config.json's network")
    return params


def load(path, script="", agent="protagonist", trainings=0):
    """The Run of a run folder's last checkpoint, or of a checkpoint file; else as in Arguments."""
    stored, update, rows, found = read_run(path := Path(path))
    made_by, _ = stored.pop("script"), stored.pop("track", None)  # who plays needs no tracker
    module = import_script(made_by, script)
    if unknown := set(stored) - {f.name for f in fields(module.Config)}:
        raise Refused(f"config.json: {made_by} does not know {', '.join(sorted(unknown))}")
    try:
        config = module.Config(**stored)
        train = module.make_train(config)
        state = jax.eval_shape(train.init, jax.random.key(0))
    except (ValueError, TypeError) as error:
        raise Refused(f"config.json: {str(error).splitlines()[0]}") from None
    role = "students" if hasattr(state, "students") else "student"
    learner = dict(found.get(role) or {})
    params = learner.get("mean") or learner.get("params")  # as in training: with polyak_averaging
    params = fit(getattr(state, role).params, params, len(rows))
    names = ["student"]
    if role == "students":  # [rows, S, ...]
        names = [str(i) for i in range(jax.tree.leaves(params)[0].shape[1])]
        names = ["protagonist", "antagonist"] if config.regret == "paired" else names
        params = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), params)
    wanted = {"all": names, "protagonist": names[:1]} | {name: [name] for name in names}
    if agent not in wanted:
        raise Refused(f"agent = {agent!r}: allowed are {', '.join(wanted)}")
    agents = [row | {"agent": name} for row in rows[: trainings or None] for name in names]
    chosen = [i for i, x in enumerate(agents) if x["agent"] in wanted[agent]]
    params = jax.tree.map(lambda x: x[chosen], params)
    folder = (path if path.is_dir() else path.parent).resolve()
    agents = [agents[i] for i in chosen]
    return Run(folder.name, folder, Path(made_by).stem, update, agents, params, train, module.amaze)


def save(folder, config, state):
    """Write into a new folder what `load` and a script's --resume read, of a training in code or of
    many, states [R, ...]: the points of config.sweep, or config.seed and the seeds after it."""
    folder, script = Path(folder), sys.modules.get(type(config).__module__)
    if not hasattr(script, "make_rows"):
        raise Refused(f"config = {config}: allowed is the Config of an imported script")
    state = jax.tree.map(lambda x: x.reshape(-1, *x.shape[state.step.ndim :]), state)
    config = config if config.sweep else replace(config, seeds=len(state.step))
    rows, steps = script.make_rows(config), {*state.step.tolist()}
    allowed = f"as many as the state's {len(state.step)}, which must have done as many updates"
    script.demand(len(rows) == len(state.step) and len(steps) == 1, config, "sweep seeds", allowed)
    if any(folder.glob("*")):
        raise Refused(f"folder = {folder}: allowed is a new one")
    state = jax.device_get(state.replace(step=None, rng=jax.random.key_data(state.rng)))
    data = serialization.to_state_dict({"step": steps.pop(), "rows": rows, "state": state})
    stored = json.dumps({"script": script.SCRIPT} | asdict(config), indent=2, default=float)
    write(folder / "config.json", lambda file: file.write(stored.encode()))
    data = serialization.msgpack_serialize(data)
    write(folder / "checkpoint.msgpack", lambda file: file.write(data))


def curve(metrics, name):
    """What make_train or run measured: rollouts so far and values [n, R], for plt.plot(*...)."""
    x, y = (np.atleast_2d(metrics[k]).T for k in ("rollouts", name))
    measured = ~np.isnan(y).all(1)
    return x[measured], y[measured]


def load_runs(args):
    """The runs that can be had, named by their folders, and a line for each that cannot; sweeps
    are ranked."""
    runs, refused = {}, []
    for path in dict.fromkeys(map(Path, args.runs)):
        try:
            if path.is_dir() and not args.play:
                rank(path, args)
            run = load(path, args.script, args.agent, args.trainings)
            if args.play:
                demand_playable(run, args)
            runs.setdefault((run.folder, run.update), run)
        except (Refused, OSError) as error:
            refused.append(f"{path}: {error}")
    if len({run.env for run in runs.values()}) > 1:
        raise Refused("runs of different environments: allowed is one at a time")
    shared = os.path.commonpath([run.folder.parent for run in runs.values()]) if runs else ""
    name = lambda run: run.folder.relative_to(shared).as_posix()
    return [run._replace(name=name(run)) for run in runs.values()], refused


# --- results


def write(path, save):
    """A file as a whole: save(file) writes a temporary one, which then takes its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    existed, temporary = path.exists(), path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            save(file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    print(f"{path} {'replaced' if existed else 'written'}")


def tabulate(run, mazes, optimal, returns, lengths):
    """The rows of results.csv of a run, from its episodes [A, M, E]."""
    for agent, r, n in zip(run.agents, returns, lengths):
        who = {"run": run.name, "algorithm": run.algorithm, "update": run.update} | agent
        for maze, *numbers in zip(mazes, run.env.solved(r).mean(1), r.mean(1), n.mean(1), optimal):
            names = "solve_rate", "return", "length", "optimal_return"
            scores = {k: round(float(x), 6) if x == x else "" for k, x in zip(names, numbers)}
            yield who | {"maze": maze.name, "episodes": r.shape[1]} | scores


def to_csv(table):
    """Bytes of the table; where a run lacks a swept value, its cell is empty."""
    columns = list(dict.fromkeys(name for row in table for name in row))
    text = io.StringIO(newline="")
    csv.writer(text).writerows([columns, *([row.get(x) for x in columns] for row in table)])
    return text.getvalue().encode()


def group_seeds(run):
    """{label: numbers of the agents} that differ in seed only."""
    groups = {}
    for i, agent in enumerate(run.agents):
        role = [agent["agent"]] if agent["agent"] not in ("student", "protagonist") else []
        swept = [f"{k} {x}" for k, x in agent.items() if k not in ("seed", "agent")]
        label = ", ".join([f"{run.name} @{run.update}", *role, *swept])
        groups.setdefault(label, []).append(i)
    return groups


def print_table(lines):
    """Lines of cells, the first cell to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    for first, *others in lines:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:]))
        print("  ".join([first.ljust(widths[0]), *cells]))


def rank(folder, args):
    """Print the points of a run's sweep, the best first, and draw them. A training's score is the
    last in logs.csv, and 0 if there is none or something was not finite ("nan")."""
    swept = [str(sweep).partition("=")[0] for sweep in read_config(folder).get("sweep") or ()]
    if not (swept and (folder / "logs.csv").exists()):
        return
    points = {}
    try:
        table = list(csv.DictReader((folder / "logs.csv").read_text().splitlines()))
        evaluated = any(row.get("eval_solve_rate") for row in table)
        column = "eval_solve_rate" if evaluated else "train_solve_rate"
        for row in table:
            scores = points.setdefault(tuple(float(row[name]) for name in swept), {})
            last = scores.get(row["seed"], 0.0)
            lost = np.isnan(last) or "nan" in row.values()
            scores[row["seed"]] = np.nan if lost else float(row[column] or last)
        scores = np.array([list(x.values()) for x in points.values()]).reshape(len(points), -1)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise Refused("logs.csv is none that this run wrote") from None
    points, diverged = np.array(list(points)), np.isnan(scores).sum(1)  # [N, swept], [N]
    summary = bootstrap(np.nan_to_num(scores).T, lambda scores: scores.mean(0), args.seed)  # [N, 3]
    lines = [[", ".join(swept), f"last {column}", ""]]
    for i in np.lexsort((diverged, -summary[:, 0])):
        point = ", ".join(f"{value:.4g}" for value in points[i])
        lines.append([point, show(*summary[i]), f"{diverged[i]} diverged" if diverged[i] else ""])
    print(f"{folder}: {len(points)} points, {scores.shape[1]} seed(s)")
    print_table(lines)
    figure = Figure(figsize=(4 * len(swept), 4), layout="constrained")
    for name, x, axes in zip(swept, points.T, figure.subplots(1, len(swept), squeeze=False)[0]):
        axes.plot(x, scores, "o", color="C0", alpha=0.4)
        axes.plot(x[diverged > 0], 0 * x[diverged > 0], "x", color="C3")
        axes.vlines(x, *summary.T[1:], color="C0")
        axes.set(xlabel=name, ylabel=f"{column}, x: diverged", ylim=(-0.03, 1.03))
        axes.set_xscale("log" if max(x) > 10 * min(x) > 0 else "linear")
    name = f"sweep_{folder.as_posix().replace('/', '_')}.png" if args.out else "sweep.png"
    write(Path(args.out or folder) / name, partial(figure.savefig, format="png", dpi=150))


def print_results(results, summaries, mazes, optimal):
    """A table of mazes for each group of seeds, and one of all groups."""
    over_all = []
    for (label, (returns, lengths)), summary in zip(results.items(), summaries.values()):
        sets = " (worst: half rank, half report)" * ("worst 10%" in summary)
        print(f"\n{label}: {len(returns)} seed(s), {returns.shape[2]} episodes on each maze{sets}")
        numbers = zip(mazes, returns.mean((0, 2)), optimal, lengths.mean((0, 2)))
        lines = [[maze.name, show(*summary[maze.name]),
                  *("" if np.isnan(x) else f"{x:.3f}" for x in others)]
                 for maze, *others in numbers if maze.name in summary]  # fmt: skip
        header = ["maze", "solve rate", "return", "optimal return", "length"]
        print_table([header, *lines]) if lines else None
        names = [name for name in summary if name in AGGREGATES | WORST]
        over_all.append([label, *(show(*summary[name]) for name in names)])
    print(f"\nover {len(mazes)} maze(s), with 95% intervals from {MIN_SEEDS} seeds on")
    print_table([["solve rate", *names], *over_all])


def plot_results(results, summaries, env=amaze):
    """A Figure: points with intervals, and the performance profile; {label: ...} both."""
    names = list(next(iter(summaries.values())))
    figure = Figure(figsize=(9 + 0.45 * len(names), 5), layout="constrained")
    points, profile = figure.subplots(1, 2, width_ratios=(1 + 0.45 * len(names), 4))
    tau = np.linspace(0, 1, 201)
    for i, (label, summary) in enumerate(summaries.items()):
        value, low, high = np.array(list(summary.values())).T
        x = np.arange(len(names)) + 0.6 * ((i + 0.5) / len(summaries) - 0.5)
        points.vlines(x, low, high, color=f"C{i}")
        points.plot(x, value, "o", color=f"C{i}", markersize=4, label=label)
        rates = env.solved(results[label][0]).mean(-1, keepdims=True)  # [S, M, 1]
        profile.step(tau, (rates > tau).mean((0, 1)), where="post", color=f"C{i}")
    points.set_xticks(range(len(names)), names, rotation=45, ha="right")
    points.set(ylabel="solve rate, 95% interval over seeds", ylim=(-0.03, 1.03))
    points.grid(axis="y", alpha=0.3)
    points.legend(fontsize="small")
    profile.set(xlabel="tau", ylabel="share of seeds x mazes with solve rate > tau")
    profile.set(xlim=(0, 1), ylim=(-0.03, 1.03))
    return figure


# --- the page where agents play, play.html


def demand_playable(run, args):
    """The page plays amaze.py and dr.py's network; what a copy does is compared with theirs."""
    config, allowed = read_config(run.folder), f"allowed is dr.py's, rnn = {', '.join(CORES)}"
    network = {k: config.get(k) for k in ("rnn", "hidden_size", "s5_layers", "s5_norm")}
    names = " ".join(sorted(traverse_util.flatten_dict(run.params.get("params", {}), sep="/")))
    if run.env is not amaze or not re.fullmatch(HEADS + CORES.get(network["rnn"], "#"), names):
        raise Refused(f"a network that play.html cannot play: {allowed}")
    if not all((abs(x) < np.finfo(np.float16).max).all() for x in jax.tree.leaves(run.params)):
        raise Refused("parameters that are not finite in float16, which play.html holds")
    if args.script:
        ours = import_script("dr.py", "")
        train, rngs = ours.make_train(ours.Config(**network)), agent_keys(run, args.seed)[:1]
        shapes = jax.eval_shape(train.init, jax.random.key(0)).student.params
        params = jax.tree.map(lambda x: x[:1], fit(shapes, run.params, len(run.agents)))
        easy = "TrivialMaze", "MiniMaze", "FourRooms"  # also by chance
        easy = draw_mazes(easy, replace(args, episodes=30), False)
        one, two = (list(play(x, params, rngs, easy, 30)) for x in (run.train, train))
        if np.mean(np.not_equal(one, two)) > 0.05:  # a few may differ by rounding
            raise Refused(f"{args.script} plays otherwise than play.html would: {allowed}")


def page(runs, mazes, dtype="<f2"):
    """play.html, filled with the agents of the runs and with mazes, all in base64.

    Of three agents (LSTM 64) on dcd's mazes float16 changed no probability of an action by more
    than 0.006 in 300 steps, no value by more than 0.001, and mean solve rates by up to 0.003."""
    encode = lambda x: base64.urlsafe_b64encode(x.tobytes()).decode().rstrip("=")
    data = {"agents": [], "suites": amaze.SUITES, "mazes": {maze.name: [] for maze in mazes}}
    for name, levels, max_steps, see in mazes:  # as its maze_to_text writes them
        for walls, (x, y), turn, (u, v) in zip(*map(np.asarray, levels)):
            place = f"{walls.shape[1]}x{walls.shape[0]}.{x}.{y}.{turn}.{u}.{v}.{max_steps}.{see:d}"
            data["mazes"][name].append(f"{place}.{encode(np.packbits(walls))}")
    for run in runs:
        network = {k: read_config(run.folder).get(k) for k in ("rnn", "s5_norm")}
        for label, i in ((label, i) for label, seeds in group_seeds(run).items() for i in seeds):
            params = traverse_util.flatten_dict(run.params["params"], sep="/")
            params = {k: (x.shape[1:], encode(x[i].astype(dtype))) for k, x in params.items()}
            who = {"name": label, "seed": run.agents[i]["seed"], "params": params}
            data["agents"].append(who | network)
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return Path(__file__).with_name("play.html").read_text().replace(EMPTY_PAGE, text).encode()


# --- command line


def check(args):
    for name, least in dict(levels=1, episodes=0, max_steps=1, batch_size=0, seed=0).items():
        if not least <= getattr(args, name) < 2**31:
            raise Refused(f"{name} = {vars(args)[name]}: allowed is at least {least}, below 2^31")
    if args.script and not (Path(args.script).is_file() and args.script.endswith(".py")):
        raise Refused(f"script = {args.script}: allowed is a Python file")
    if not args.runs and not args.show_levels:
        raise Refused("no runs: allowed are folders of runs and checkpoint files")


def evaluate(args):
    """Do what the arguments ask for; returns the lines about runs that could not be had."""
    check(args)
    runs, refused = load_runs(args)
    if args.runs and not runs:
        return refused
    env = runs[0].env if runs else import_script("", args.script).amaze if args.script else amaze
    names, own, sampled = choose_mazes(args, env)
    args = replace(args, episodes=args.episodes or (20 if sampled else 100))
    films = args.gif.split(",") if args.gif else []
    if unknown := set(films) - set(names):
        raise Refused(f"gif = {', '.join(unknown)}: allowed are {', '.join(names)}")
    folders = [run.folder for run in runs] or [Path.cwd()]
    out = Path(args.out or os.path.relpath(os.path.commonpath(folders)))
    there = next(x for x in (out, *out.absolute().parents) if x.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise Refused(f"out = {out}: allowed is a folder that can be written")
    if args.play:
        mazes = own + draw_mazes(env.TEST_MAZES, replace(args, episodes=5), False, env)
        write(out / "play.html", lambda file: file.write(page(runs, mazes)))
        return refused
    mazes = own + draw_mazes(names[len(own) :], args, sampled, env)
    optimal, results, table = optimal_returns(mazes, env), {}, []
    if args.show_levels:
        drawn = [maze._replace(levels=jax.tree.map(lambda x: x[:1], maze.levels)) for maze in mazes]
        captions = {"": names, "best return": optimal_returns(drawn, env)}
        figure = env.plot_levels({"": (stack(drawn, env)[0], captions)})
        write(out / "mazes.png", lambda file: figure.savefig(file, format="png"))
    for run in runs:
        agents = run.train, run.params, agent_keys(run, args.seed)
        played = list(play(*agents, mazes, args.episodes, args.batch_size, run.name, env))
        table += tabulate(run, mazes, optimal, *played)
        for label, seeds in group_seeds(run).items():
            results[label] = [x[seeds] for x in played]
    if results:
        summaries = {k: summarise(x[0], names, args.seed, sampled, env) for k, x in results.items()}
        print_results(results, summaries, mazes, optimal)
        figure = plot_results(results, summaries, env)
        write(out / "results.csv", lambda file: file.write(to_csv(table)))
        write(out / "results.png", lambda file: figure.savefig(file, format="png", dpi=150))
    for run, maze in ((run, mazes[names.index(name)]) for run in runs for name in films):
        first, *others = map(Image.fromarray, film(run, args.seed, maze))
        save = partial(
            first.save,
            format="GIF",
            save_all=True,
            append_images=others,
            duration=[100] * len(others) + [1000],
            loop=0,
        )  # milliseconds
        write(out / f"film_{run.name.replace('/', '_')}_{run.update}_{maze.name}.gif", save)
    return refused


def main():
    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__)  # as it stands; tyro would reflow it
    args = tyro.cli(Arguments, description="")
    try:
        script = import_script(SCRIPTS[0], "")
        script.start_jax(script.Config())
        refused = evaluate(args)
    except (Refused, OSError) as error:
        refused = [str(error)]
    for line in refused:
        print(f"evaluate.py: error: {line}", file=sys.stderr)
    sys.exit(2 if refused else 0)


if __name__ == "__main__":
    main()

# What `uv run` installs
# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10", "flax>=0.12", "optax>=0.2.5", "distrax>=0.1.8", "numpy>=2.0",
#                 "matplotlib>=3.9", "tyro>=0.9", "tqdm>=4.66"]
# ///
