"""Evaluate trainings on test mazes: tables, plots and films from their checkpoints.

    python evaluate.py runs/plr                          all seeds of a run on the minimax suite
    python evaluate.py runs/dr runs/plr --suite dcd      runs side by side
    python evaluate.py runs/plr/checkpoint_500.msgpack   an archived checkpoint
    python evaluate.py runs/plr --suite sampled --levels 10000
    python evaluate.py runs/plr --mazes Labyrinth,FourRooms --gif Labyrinth
    python evaluate.py runs/sweep                        a sweep: also ranks its points
    python evaluate.py runs/mine --script my_plr.py      a run of your own copy of a script
    python evaluate.py --suite dcd --show-levels         a picture of the mazes, without a run
    python evaluate.py runs/dr runs/plr --play           only writes a page: agents in a browser

All agents play the same levels; actions are sampled. A training's score on a maze is its solve rate
there. Mean, interquartile mean (IQM) and optimality gap are over seeds and mazes (Agarwal 2021,
2108.13264). One agent plays all mazes, so the 95% bootstrap intervals resample whole seeds; from 6
seeds they cover the truth 85 times in 100, below 3 there are none. Sampled levels are played 10 +
10 times: one half finds the worst 10, 1 and 0.1% of levels, the other scores them (Rutherford 2024,
2408.15099). The points of a sweep are ranked first of all, by the last solve rate in logs.csv.

    put all episodes in a queue, mazes with long time limits first
    W lanes take the first W episodes, and at each step every lane
        acts; if its episode ends, it records return and length and takes the queue's next episode

Random numbers depend on --seed, the training's seed, the maze's name, the episode's number and the
time step only: devices, --batch-size, other runs and mazes change results by rounding at most.
Compiled programs are kept in ~/.cache/amaze, which may be deleted.

Shapes     A agents (seeds of a run times their students), M mazes, E episodes on each, G = M * E,
           P players (agents, times the parts that their episodes are split into), W lanes of each,
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
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, replace
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
from PIL import Image
from tqdm import tqdm

import amaze
import dr  # for reading and writing files
from dr import BadConfig as Refused, printable, read_checkpoint, read_config

SCRIPTS = ("dr.py", "plr.py", "accel.py", "paired.py", "sfl.py")  # the project's own scripts
STEPS = 50  # steps of the lanes between two looks at which episodes have ended
RESAMPLES = 2000  # resamples of the bootstrap
MIN_SEEDS = 3  # fewest seeds that give an interval
WORST = {"worst 10%": 0.1, "worst 1%": 0.01, "worst 0.1%": 0.001}  # shares of the sampled levels
MANY = 40  # most mazes that are listed and plotted one by one
HEADS = "(Dense_[0-3]/(bias|kernel) ){8}Embed_0/embedding conv/bias conv/kernel"
GATED = " core/bias core/kernel"
CORES = {"lstm": f"( core/Dense_0/kernel)?{GATED}", "gru": f" core/Dense_0/kernel{GATED}",
         "s5": r"( core/(Dense_0|S5Layer_\d+)/[\w/]+)+", "none": ""}  # fmt: skip
LONGEST = 99_999  # the highest max_steps that play.html reads
EMPTY_PAGE = '{"agents": [], "suites": {}, "mazes": {}}'  # what play.html holds before it is filled


@dataclass(frozen=True)
class Arguments:
    runs: tyro.conf.Positional[tuple[str, ...]] = ()  # run folders, or checkpoint files in them
    suite: str = ""  # minimax, jaxued, dcd, families or sampled; default: the environment's first
    mazes: str = ""  # comma-separated names of mazes, instead of the suite
    maze_file: str = ""  # a text file of mazes with blank lines between, instead of the suite
    max_steps: int = 250  # time limit of the mazes of --maze-file
    levels: int = 1000  # number of random solvable levels (60 walls) of the suite `sampled`
    episodes: int = 0  # per agent and maze; 0: 100, or 20 on each level of `sampled` (10 + 10)
    agent: str = "protagonist"  # student of paired.py: protagonist, antagonist, a number or all
    batch_size: int = 0  # episodes at once, per agent and device; 0: 128 on a CPU, 1,024 elsewhere
    seed: int = 0  # seed of levels and actions
    out: str = ""  # folder for results; default: the run's, or the one that holds the runs
    gif: str = ""  # comma-separated mazes to film: the first episode of each run's first agent
    show_levels: bool = False  # also write mazes.png, a picture of the mazes
    play: bool = False  # only write play.html, a page where agents walk mazes that one draws
    trainings: int = 0  # evaluate only the first so many trainings of each run; 0: all
    script: tuple[str, ...] = ()  # scripts of runs, if not beside evaluate.py; they are executed


class Maze(NamedTuple):
    name: str
    levels: Any  # [E, ...] if each episode has its own, else [1, ...]
    max_steps: int
    see_through_walls: bool | None = True  # None: the environment has no such rule


class Run(NamedTuple):
    """The agents of a checkpoint."""

    name: str
    folder: Path
    algorithm: str
    update: int  # cycles done at the checkpoint
    agents: list  # [A] dicts of seed, swept values, agent
    params: dict  # [A, ...]
    train: Callable  # made by the script; act, initial_carry, reset and step are used here
    env: ModuleType = amaze  # what the script imports as amaze
    script: Path | None = None


# --- mazes


def tag(name, number):
    """A number from a maze's name and a level or episode, to fold into a random key."""
    return np.uint32(zlib.crc32(f"{name}/{number}".encode()))


def draw(names, number, seed, env=amaze):
    """{name: levels} of test mazes: `number` of each, or one if all are the same."""
    rng = jax.random.fold_in(jax.random.key(seed), 0)
    tags = {name: np.array([tag(name, i) for i in range(number)]) for name in names}

    @jax.jit
    def draw_all(tags):
        rngs = jax.tree.map(jax.vmap(partial(jax.random.fold_in, rng)), tags)
        return {name: jax.vmap(env.TEST_MAZES[name][0])(x) for name, x in rngs.items()}

    drawn = jax.device_get(draw_all(tags))
    for name, levels in drawn.items():
        if all((x == x[:1]).all() for x in jax.tree.leaves(levels)):
            drawn[name] = jax.tree.map(lambda x: x[:1], levels)
    return drawn


def read_mazes(path, max_steps, env=amaze):
    """The mazes of a text file, each as for level_from_text, with blank lines between them."""
    path = Path(path)
    mazes = []
    try:
        text = path.read_text(encoding="utf-8-sig")
        texts = [x for x in re.split(r"\n(?:[ \t]*\n)+", text) if x.strip() != ""]
        for number, text in enumerate(texts or [""], start=1):
            level = jax.tree.map(lambda x: x[None], env.level_from_text(text))
            mazes.append(Maze(f"{path.stem}-{number}", level, max_steps))
    except ValueError as error:  # a UnicodeDecodeError is one too
        raise Refused(f"{path}, maze {len(mazes) + 1}: {error}") from None
    return mazes


def choose_mazes(args, env=amaze):
    """Names of all mazes asked for, the mazes of --maze-file, and whether the rest are sampled."""
    suite = args.suite or next(iter(env.SUITES))
    if suite not in env.SUITES:
        raise Refused(f"suite = {suite}: allowed are {', '.join(env.SUITES)}")
    own, names = [], env.SUITES[suite]
    if args.maze_file != "":
        if not hasattr(env, "level_from_text"):
            raise Refused(f"maze_file = {args.maze_file}: allowed is none in this environment")
        own, names = read_mazes(args.maze_file, args.max_steps, env), []
    if args.mazes != "":
        names = args.mazes.split(",")
    unknown = set(names) - set(env.TEST_MAZES)
    if len(unknown) > 0:
        raise Refused(f"mazes = {', '.join(unknown)}: allowed are {', '.join(env.TEST_MAZES)}")
    sampled = suite == "sampled" and args.maze_file == "" and args.mazes == ""
    if sampled and args.episodes % 2 == 1:
        raise Refused(f"episodes = {args.episodes}: allowed with sampled is an even number")
    if sampled:
        names = [f"{names[0]}-{i}" for i in range(args.levels)]
    each_once = dict.fromkeys([maze.name for maze in own] + names)
    return list(each_once), own, sampled


def draw_mazes(names, args=Arguments(episodes=1), sampled=False, env=amaze):
    """The mazes of these names; if sampled, each is one level of the suite `sampled`."""

    def maze(name, levels, source):
        rules = (*env.TEST_MAZES[source][1:], None)[:2]  # an environment may have one rule
        return Maze(name, levels, *rules)

    if not sampled:
        drawn = draw(names, args.episodes, args.seed, env)
        return [maze(name, drawn[name], name) for name in names]
    [source] = env.SUITES["sampled"]
    drawn = draw([source], len(names), args.seed, env)[source]
    levels = [jax.tree.map(lambda x: x[i : i + 1], drawn) for i in range(len(names))]
    return [maze(name, level, source) for name, level in zip(names, levels)]


def stack(mazes, env=amaze):
    """All levels [L, ...], padded to one size if they differ, and the maze of each level [L]."""
    pad = getattr(env, "pad_levels", list)
    levels = pad([maze.levels for maze in mazes])
    numbers = [len(jax.tree.leaves(x)[0]) for x in levels]
    levels = jax.tree.map(lambda *x: np.concatenate(x), *levels)
    return levels, np.repeat(np.arange(len(mazes)), numbers)


def optimal_returns(mazes, env=amaze):
    """[M] the optimal return, averaged over a maze's levels; NaN if it is not known."""
    levels, owner = stack(mazes, env)
    limits = np.array([maze.max_steps for maze in mazes])[owner]
    stats = jax.jit(jax.vmap(env.level_stats))(levels, limits)
    best = stats.get("optimal_return", np.full(len(owner), np.nan))  # [L]
    return np.bincount(owner, best) / np.bincount(owner)


def open_levels(reset, mazes, env=amaze):
    """First observation and state of each level [L, ...], and the maze of each level [L]."""
    levels, owner = stack(mazes, env)
    limits = np.array([maze.max_steps for maze in mazes])[owner]
    see = [maze.see_through_walls for maze in mazes]
    if None in see:  # an environment without this rule
        openings = jax.jit(jax.vmap(reset))(levels, limits)
    elif all(see):  # a static True is faster
        openings = jax.jit(jax.vmap(lambda level, limit: reset(level, limit, True)))(levels, limits)
    else:
        openings = jax.jit(jax.vmap(reset))(levels, limits, np.array(see)[owner])
    return openings, owner


def lay_out(mazes, episodes, owner):
    """E episodes on each maze, in the order of play [G]: their indices into [M, E], their tags, and
    the indices of their levels. owner [L]: the maze of each level."""
    limits = np.array([maze.max_steps for maze in mazes])
    maze = np.repeat(np.argsort(-limits, kind="stable"), episodes)  # [G]
    episode = np.tile(np.arange(episodes), len(mazes))  # [G]
    tags = np.array([tag(mazes[m].name, e) for m, e in zip(maze, episode)])
    slot = np.searchsorted(owner, maze) + episode % np.bincount(owner)[maze]
    return maze * episodes + episode, tags, slot


# --- play


class Lanes(NamedTuple):
    """The W episodes that an agent plays at once."""

    memory: Any  # the recurrent core's
    obs: Any  # o_t
    state: Any
    t: jax.Array  # [W] steps so far
    returns: jax.Array  # [W] rewards so far
    turn: jax.Array  # [W] the episode's number in the queue
    done: jax.Array  # [W] whether the last action ended it
    taken: jax.Array  # [] episodes that the lanes together have begun


def gumbel(rng, tag, t, env=amaze):
    """Noise on the logits at step t of an episode, so that argmax samples."""
    rng = jax.random.fold_in(jax.random.fold_in(rng, tag), t)
    return jax.random.gumbel(rng, (env.NUM_ACTIONS,))


def make_player(train, tags, opening, parts, env):
    """Return go_on(params, rng, part, lanes) -> lanes, {record: [STEPS, W]}: an agent plays every
    parts-th episode of the queue, starting with number `part`."""

    def step(params, rng, part, lanes):
        begins = lanes.done
        # after the last episode comes the first: played again, an episode has the same result
        later = (part + parts * (lanes.taken + jnp.cumsum(begins) - 1)) % len(tags)
        turn = jnp.where(begins, later, lanes.turn)
        t, returns = jnp.where(begins, 0, lanes.t), jnp.where(begins, 0.0, lanes.returns)

        def open_next(old):
            return jax.tree.map(partial(jax.vmap(jnp.where), begins), opening(turn), old)

        number, old = begins.sum(), (lanes.obs, lanes.state)
        if jax.default_backend() != "cpu":  # summed over players, so that lax.cond stays a branch
            number = jax.lax.psum(number, "players")
        obs, state = jax.lax.cond(number > 0, open_next, lambda old: old, old)
        noise = jax.vmap(partial(gumbel, rng, env=env))(tags[turn], t)
        memory, action = train.act(params, lanes.memory, obs, begins, noise)[:2]
        obs, state, reward, done = jax.vmap(train.step)(state, action)
        t, returns, taken = t + 1, returns + reward, lanes.taken + begins.sum()
        lanes = Lanes(memory, obs, state, t, returns, turn, done, taken)
        return lanes, {"turn": turn, "done": done, "return": returns, "length": t}

    def go_on(params, rng, part, lanes):
        return jax.lax.scan(lambda lanes, _: step(params, rng, part, lanes), lanes, length=STEPS)

    return go_on


def make_program(player, devices):
    """The program of all players [P], and the sharding of the players over the devices."""

    def in_turn(*players):
        return jax.lax.map(lambda arguments: player(*arguments), players)

    # on a CPU the players of a device take turns, which is faster there; else they are vmapped
    of_all = in_turn if jax.default_backend() == "cpu" else jax.vmap(player, axis_name="players")
    dealt = NamedSharding(Mesh(devices, ("devices",)), PartitionSpec("devices"))
    specs = dict(in_specs=dealt.spec, out_specs=dealt.spec, check_vma=False)
    program = jax.shard_map(of_all, mesh=dealt.mesh, **specs)
    return jax.jit(program, donate_argnums=3), dealt


def play(train, params, rngs, mazes, episodes, batch_size=0, title="", env=amaze):
    """Every agent plays every maze: returns, lengths [A, M, E]. params [A, ...], rngs [A]."""
    devices = jax.devices()
    parts = len(devices) // math.gcd(len(rngs), len(devices))  # so that devices get equal parts
    agent, part = np.divmod(np.arange(len(rngs) * parts), parts)  # [P]
    openings, owner = open_levels(train.reset, mazes, env)
    row, tags, slot = lay_out(mazes, episodes, owner)

    def opening(turn):
        return jax.tree.map(lambda x: x[jnp.asarray(slot)[turn]], openings)

    player = make_player(train, jnp.asarray(tags), opening, parts, env)
    program, dealt = make_program(player, devices)
    batch_size = batch_size or (128 if jax.default_backend() == "cpu" else 1024)
    # the lanes start as if their episodes had just ended, so that they begin the first ones
    zeros = np.zeros(min(batch_size, math.ceil(len(row) / parts)), int)
    memory, (obs, state) = train.initial_carry(len(zeros)), opening(zeros)
    counts = dict(t=zeros, turn=zeros, taken=0)
    lanes = Lanes(memory, obs, state, returns=0.0 * zeros, done=zeros == 0, **counts)
    lanes = jax.tree.map(lambda x: jnp.stack([x] * len(agent)), lanes)  # [P, ...]
    players = *jax.tree.map(lambda x: x[agent], (params, rngs)), part
    players, lanes = jax.device_put((players, lanes), dealt)
    returns, lengths = np.zeros((2, len(rngs), len(row)))
    with tqdm(total=lengths.size, desc=title, unit="episode", disable=title == "") as bar:
        while not lengths.all():  # 0 until played
            lanes, records = program(*players, lanes)
            records = jax.device_get(records)  # [P, STEPS, W]
            done = records["done"]
            at = agent[done.nonzero()[0]], row[records["turn"][done]]
            returns[at], lengths[at] = records["return"][done], records["length"][done]
            bar.update(np.count_nonzero(lengths) - bar.n)
    shape = len(rngs), len(mazes), episodes
    return returns.reshape(shape), lengths.reshape(shape)


def agent_keys(run, seed):
    """[A] a random key for each agent, from --seed and its training's seed."""
    rng = jax.random.fold_in(jax.random.key(seed), 1)
    seeds = np.array([agent["seed"] for agent in run.agents])
    return jax.vmap(partial(jax.random.fold_in, rng))(seeds)


def film(run, seed, maze):
    """Pictures [h, w, 3] of the first episode of the run's first agent, its visible cells lit."""
    rng, params = agent_keys(run, seed)[0], jax.tree.map(lambda x: jnp.asarray(x[0]), run.params)

    @jax.jit
    def move(memory, obs, state, t):
        noise = gumbel(rng, tag(maze.name, 0), t, run.env)
        inputs = jax.tree.map(lambda x: x[None], (obs, t == 0, noise))
        memory, action = run.train.act(params, memory, *inputs)[:2]
        return memory, run.train.step(state, action[0])

    def picture(state):  # a script's state may hold more than the environment's
        is_maze = lambda x: isinstance(x, run.env.EnvState)
        [state] = filter(is_maze, jax.tree.leaves(state, is_leaf=is_maze))
        return run.env.render(state)

    openings, _ = open_levels(run.train.reset, [maze], run.env)
    obs, state = jax.tree.map(lambda x: x[0], openings)
    memory, done, pictures = run.train.initial_carry(1), False, [picture(state)]
    while not done:
        memory, (obs, state, _, done) = move(memory, obs, state, len(pictures) - 1)
        pictures.append(picture(state))
    return pictures


# --- statistics of scores [S, M]


def iqm(scores):
    """Interquartile mean: the mean without the lowest and the highest quarter of the scores."""
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

    Levels are ranked by one half of the episodes, and the mean is over the other half, which had no
    part in the choice (over the same half a mean would be too low); then the halves change places.
    Levels that tie for the last places share them. Shares below one level are left out."""
    means = []
    shares = [halves.shape[2] * share for share in WORST.values()]
    for number in [math.ceil(share) for share in shares if share >= 1]:
        last = np.sort(halves)[..., number - 1 : number]
        below, tied = halves < last, halves == last
        places = number - below.sum(2, keepdims=True)
        weight = below + tied * places / tied.sum(2, keepdims=True)
        means.append((weight * halves[::-1]).sum(2).mean(0) / number)
    return np.stack(means, axis=1)


def bootstrap(scores, statistic, seed):
    """Value, 2.5% and 97.5% quantile of n statistics [n, 3]; quantiles NaN below MIN_SEEDS seeds.

    Whole seeds are resampled with replacement, all mazes of a seed together: one trained agent
    plays them all, so its scores are not independent."""
    seeds = np.random.default_rng(seed).integers(len(scores), size=(RESAMPLES, len(scores)))
    values = np.array([statistic(scores[rows]) for rows in seeds])
    if len(scores) < MIN_SEEDS:
        values = np.full_like(values, np.nan)
    return np.stack([statistic(scores), *np.quantile(values, (0.025, 0.975), axis=0)], axis=-1)


def summarise(returns, names, seed, sampled, env=amaze):
    """{maze or aggregate: (value, low, high)} of the solve rates, from returns [S, M, E]."""
    mean = lambda scores: scores.mean(0)
    rates = lambda returns: env.solved(returns).mean(-1)  # [S, M]
    scores = rates(returns)
    summary = {}
    if len(names) <= MANY:
        summary |= zip(names, bootstrap(scores, mean, seed))
    statistics = AGGREGATES.values()
    aggregates = bootstrap(scores, lambda x: np.array([f(x) for f in statistics]), seed)
    summary |= zip(AGGREGATES, aggregates)
    if sampled and len(names) * max(WORST.values()) >= 1:
        halves = np.stack([rates(returns[..., i::2]) for i in (0, 1)])
        summary |= zip(WORST, bootstrap(worst(halves), mean, seed))
    return summary


def show(value, low, high):
    interval = "" if np.isnan(low) else f" [{low:.3f}, {high:.3f}]"
    return f"{value:.3f}{interval}"


# --- checkpoints: they are data, and nothing in them is executed


def choose_script(recorded, given):
    """The file of the script that config.json names: a file of that name in --script or beside this
    one, never a path that a folder gives; else the only --script, as a script that was renamed."""
    given = [Path(path) for path in given]
    named = [path for path in given if path.name == recorded]
    trains = lambda path: "\ndef make_train(" in path.read_text(encoding="utf-8")
    beside = [path for path in Path(__file__).resolve().parent.glob("*.py") if trains(path)]
    named += [path for path in beside if path.name == recorded]
    if len(named) == 0 and len(given) == 1:
        named = given
    if len(named) == 0:
        allowed = f"{', '.join(SCRIPTS)}, a copy beside them, or --script FILE"
        raise Refused(f"made by {recorded!r:.99}: allowed are {allowed}")
    return named[0]


def import_script(path):
    """Execute a file and return its module."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.append(str(path.resolve().parent))  # its environment may be there
    spec.loader.exec_module(module)
    return module


def fit(expected, found, num_rows):
    """The parameters [rows, ...] that were found; Refused if their shapes are not the expected."""

    def fits(x, y):
        return y.shape == (num_rows, *x.shape) and y.dtype == x.dtype

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


def read_students(state, expected, config, num_rows):
    """Names of the students of a training, and the parameters of the students of all rows."""
    role = "students" if hasattr(expected, "students") else "student"
    learner = dict(state.get(role) or {})
    params = learner.get("average_params")  # as in training: with polyak_averaging
    if params is None:
        params = learner.get("params")
    params = fit(getattr(expected, role).params, params, num_rows)
    if role == "student":
        return ["student"], params
    names = ["protagonist", "antagonist"]
    if config.regret != "paired":
        number = jax.tree.leaves(params)[0].shape[1]  # of [rows, students, ...]
        names = [str(i) for i in range(number)] if number > 1 else ["protagonist"]
    return names, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), params)


def read_rows(data, made_by, expected):
    """The rows of a checkpoint, dicts of seed and swept values; they must be config.json's rows."""
    try:
        rows = [dict(data["rows"][str(i)]) for i in range(len(data["rows"]))]
        rows = [row | {"seed": int(row["seed"])} for row in rows]
        script = data["config"]["script"]
    except (KeyError, TypeError, ValueError):
        raise Refused("the checkpoint does not say which trainings it holds") from None
    if script != made_by or rows != (expected or rows):
        raise Refused(f"the checkpoint is of {script!r:.50} or of other seeds or swept values")
    return rows


def load(path, script=(), agent="protagonist", trainings=0):
    """The Run of a run folder's last checkpoint or of a checkpoint file; others: see Arguments."""
    path, script = Path(path), (script,) if isinstance(script, str | Path) else script
    folder = path if path.is_dir() or path.suffix == "" else path.parent
    settings = read_config(folder)
    data = read_checkpoint(path / "checkpoint.msgpack" if path.is_dir() else path)
    made_by = settings.pop("script")
    settings.pop("track", None)  # playing needs no tracker
    script = choose_script(made_by, script)
    module = import_script(script)
    unknown = set(settings) - {f.name for f in fields(module.Config)}
    if len(unknown) > 0:
        raise Refused(f"config.json: {made_by} does not know {', '.join(sorted(unknown))}")
    try:
        config = module.Config(**settings)
        rows = module.make_rows(config) if hasattr(module, "make_rows") else []
        train = module.make_train(config)
        state = jax.eval_shape(train.init, jax.random.key(0))
    except (ValueError, TypeError) as error:
        raise Refused(f"config.json: {str(error).splitlines()[0]}") from None
    rows = read_rows(data, made_by, rows)
    names, params = read_students(data["state"], state, config, len(rows))
    wanted = {"all": names, "protagonist": names[:1]} | {name: [name] for name in names}
    if agent not in wanted:
        raise Refused(f"agent = {agent!r}: allowed are {', '.join(wanted)}")
    agents = [row | {"agent": name} for row in rows[: trainings or None] for name in names]
    chosen = [i for i, x in enumerate(agents) if x["agent"] in wanted[agent]]
    params = jax.tree.map(lambda x: x[chosen], params)
    agents = [agents[i] for i in chosen]
    folder, about = folder.resolve(), (Path(made_by).stem, data["cycles"])
    return Run(folder.name, folder, *about, agents, params, train, module.amaze, script)


def save(folder, config, state):
    """Save one training done in code, or several with states [R, ...], in a new folder for `load`
    and --resume. Several are the points of config.sweep, or config.seed and the seeds after it."""
    folder = Path(folder)
    script = sys.modules.get(type(config).__module__)
    if not hasattr(script, "make_rows"):
        raise Refused(f"config = {config}: allowed is the Config of an imported script")
    state = jax.tree.map(lambda x: x.reshape(-1, *x.shape[state.cycles.ndim :]), state)
    number = len(state.cycles)
    cycles = set(state.cycles.tolist())
    if len(config.sweep) == 0:
        config = replace(config, seeds=number)
    rows = script.make_rows(config)
    allowed = f"as many as the state's {number}, which must have done as many updates"
    script.demand(len(rows) == number and len(cycles) == 1, config, "sweep seeds", allowed)
    state = jax.device_get(state.replace(cycles=None, rng=jax.random.key_data(state.rng)))
    keys = len(np.unique(state.rng, axis=0))
    allowed = "the values, NAME=0.1,0.2; trainings without them differ by their rng"
    script.demand(keys >= config.seeds, config, "sweep", allowed)
    if any(folder.glob("*")):
        raise Refused(f"folder = {folder}: allowed is a new one")
    folder.mkdir(parents=True, exist_ok=True)
    data = {"config": script.fixed_fields(config), "cycles": cycles.pop()}
    data |= {"rows": rows, "state": state}
    script.write_config(folder, config)
    script.write_checkpoint(folder / "checkpoint.msgpack", serialization.to_state_dict(data))
    print(f"{folder} written")


def curve(metrics, name):
    """Rollouts so far and values [n, R] of a metric of make_train or run, for plt.plot(*...)."""
    x, y = np.atleast_2d(metrics["rollouts"]).T, np.atleast_2d(metrics[name]).T
    measured = ~np.isnan(y).all(1)
    return x[measured], y[measured]


def common_folder(folders):
    """The deepest folder that holds them all; the present one if they are on two drives."""
    try:
        return Path(os.path.commonpath(folders))
    except ValueError:
        return Path.cwd()


def load_runs(args):
    """The runs that can be loaded, named by their folders, and a line for each that cannot; prints
    the ranking of each sweep."""
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
            line = str(error)
            refused.append(line if line.startswith(str(path)) else f"{path}: {line}")
    runs = list(runs.values())
    if len({run.env for run in runs}) > 1:
        raise Refused("runs of different environments: allowed is one at a time")
    for script in args.script:
        if len(refused) == 0 and Path(script) not in [run.script for run in runs]:
            names = ", ".join({f"{run.algorithm}.py" for run in runs})
            raise Refused(f"script = {script}: allowed is one that made a run, as {names} did")
    if len(runs) > 0:
        shared = common_folder([run.folder.parent for run in runs])
        names = [os.path.relpath(run.folder, shared) for run in runs]
        names = [printable(Path(name).as_posix()) for name in names]
        runs = [run._replace(name=name) for run, name in zip(runs, names)]
    return runs, refused


# --- results


def write(path, save):
    """Write a file as a whole, as the scripts do; make its folder and print its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    existed = path.exists()
    dr.write(path, save)
    print(f"{printable(str(path))} {'replaced' if existed else 'written'}")


def tabulate(run, mazes, optimal, returns, lengths):
    """The rows of results.csv for a run, from its episodes [A, M, E]."""
    names = "solve_rate", "return", "length", "optimal_return"
    for agent, r, n in zip(run.agents, returns, lengths):
        who = {"run": run.name, "algorithm": run.algorithm, "update": run.update} | agent
        columns = run.env.solved(r).mean(1), r.mean(1), n.mean(1), optimal  # [M] each
        for maze, *numbers in zip(mazes, *columns):
            scores = ["" if np.isnan(x) else round(float(x), 6) for x in numbers]
            yield who | {"maze": maze.name, "episodes": r.shape[1]} | dict(zip(names, scores))


def to_csv(table):
    """The table as the bytes of a CSV file; a cell is empty where a run has no such value."""
    columns = dict.fromkeys(name for row in table for name in row)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue().encode()


def group_seeds(run):
    """{label: numbers of agents}, where the agents of a label differ only in their seeds."""
    groups = {}
    for i, agent in enumerate(run.agents):
        label = [f"{run.name} @{run.update}"]
        if agent["agent"] not in ("student", "protagonist"):
            label.append(agent["agent"])
        label += [f"{name} {x}" for name, x in agent.items() if name not in ("seed", "agent")]
        groups.setdefault(", ".join(label), []).append(i)
    return groups


def print_table(lines):
    """Print lines of cells, the first column left-aligned and the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    for first, *others in lines:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:]))
        print("  ".join([first.ljust(widths[0]), *cells]))


def print_results(results, summaries, mazes, optimal):
    """Print a table of mazes for each group of seeds, and a table of all groups."""
    for label, (returns, lengths) in results.items():
        summary = summaries[label]
        seeds, _, episodes = returns.shape
        halves = " (worst: half rank, half report)" if "worst 10%" in summary else ""
        print(f"\n{label}: {seeds} seed(s), {episodes} episodes on each maze{halves}")
        lines = [["maze", "solve rate", "return", "optimal return", "length"]]
        for maze, *numbers in zip(mazes, returns.mean((0, 2)), optimal, lengths.mean((0, 2))):
            if maze.name in summary:
                cells = ["" if np.isnan(x) else f"{x:.3f}" for x in numbers]
                lines.append([maze.name, show(*summary[maze.name]), *cells])
        if len(lines) > 1:
            print_table(lines)
    print(f"\nover {len(mazes)} maze(s), with 95% intervals from {MIN_SEEDS} seeds on")
    columns = [name for name in next(iter(summaries.values())) if name in AGGREGATES | WORST]
    lines = [["solve rate", *columns]]
    for label, summary in summaries.items():
        lines.append([label, *(show(*summary[name]) for name in columns)])
    print_table(lines)


def plain(text):
    """Text for matplotlib in which $ starts no formula."""
    return text.replace("$", r"\$")


def plot_results(results, summaries, env=amaze):
    """A Figure of points with intervals and of performance profiles, from two {label: ...}."""
    names = list(next(iter(summaries.values())))
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9 + 0.45 * len(names), 5), layout="constrained")
    points, profile = figure.subplots(1, 2, width_ratios=(1 + 0.45 * len(names), 4))
    tau = np.linspace(0, 1, 201)
    for i, (label, summary) in enumerate(summaries.items()):
        value, low, high = np.array(list(summary.values())).T
        x = np.arange(len(names)) + 0.6 * ((i + 0.5) / len(summaries) - 0.5)
        points.vlines(x, low, high, color=f"C{i}")
        points.plot(x, value, "o", color=f"C{i}", markersize=4, label=plain(label))
        rates = env.solved(results[label][0]).mean(-1, keepdims=True)  # [S, M, 1]
        profile.step(tau, (rates > tau).mean((0, 1)), where="post", color=f"C{i}")
    points.set_xticks(range(len(names)), map(plain, names), rotation=45, ha="right")
    points.set(ylabel="solve rate, 95% interval over seeds", ylim=(-0.03, 1.03))
    points.grid(axis="y", alpha=0.3)
    points.legend(fontsize="small")
    profile.set(xlabel="tau", ylabel="share of seeds x mazes with solve rate > tau")
    profile.set(xlim=(0, 1), ylim=(-0.03, 1.03))
    return figure


# --- sweeps: points {name of a swept field: [N]}, scores [N, S], NaN where a training diverged


def rank(folder, args):
    """Print and draw the points of a run's sweep, the best first; a diverged training scores 0."""
    names = [str(sweep).partition("=")[0] for sweep in read_config(folder).get("sweep") or ()]
    if len(names) == 0 or not (folder / "logs.csv").exists():
        return
    points, column, scores = read_sweep(folder / "logs.csv", names)
    summary = bootstrap(np.nan_to_num(scores).T, lambda scores: scores.mean(0), args.seed)  # [N, 3]
    print(f"{folder}: {len(scores)} points, {scores.shape[1]} seed(s)")
    print_ranking(points, column, scores, summary)
    figure = plot_sweep(points, column, scores, summary)
    name = f"sweep_{folder.as_posix().replace('/', '_')}.png" if args.out != "" else "sweep.png"
    save = partial(figure.savefig, format="png", dpi=150)
    write(Path(args.out or folder) / name, save)


def read_sweep(path, names):
    """Points, the column of scores, and each training's last score in logs.csv: 0 if it has none,
    NaN if any of its values was not finite ("nan")."""
    points = {}  # point: {seed: score}
    try:
        table = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines(), restval=""))
        evaluated = any(row.get("eval_solve_rate", "") != "" for row in table)
        column = "eval_solve_rate" if evaluated else "train_solve_rate"
        for row in table:
            scores = points.setdefault(tuple(float(row[name]) for name in names), {})
            score = scores.get(row["seed"], 0.0)
            if "nan" in row.values():
                score = np.nan
            elif row[column] != "" and not np.isnan(score):
                score = float(row[column])
            scores[row["seed"]] = score
        scores = np.array([list(x.values()) for x in points.values()]).reshape(len(points), -1)
        sizes = np.abs([x for point in points for x in point])
        if len(names) > 20 or sizes.max() > 1e9 or np.nanmax(np.abs(scores - 0.5), initial=0) > 0.5:
            raise ValueError("what no training has")
    except (ValueError, TypeError, KeyError, AttributeError, csv.Error):  # or seeds differ
        raise Refused("logs.csv was not written by this run") from None
    return dict(zip(names, np.transpose(list(points)))), column, scores


def print_ranking(points, column, scores, summary):
    diverged = np.isnan(scores).sum(1)  # [N]
    lines = [[", ".join(points), f"last {column}", ""]]
    for i in np.lexsort((diverged, -summary[:, 0])):
        point = ", ".join(f"{x[i]:.4g}" for x in points.values())
        note = f"{diverged[i]} diverged" if diverged[i] > 0 else ""
        lines.append([point, show(*summary[i]), note])
    print_table(lines)


def plot_sweep(points, column, scores, summary):
    """A Figure of the scores against each swept field."""
    _, low, high = summary.T
    diverged = np.isnan(scores).any(1)  # [N]
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(points), 4), layout="constrained")
    panels = figure.subplots(1, len(points), squeeze=False)[0]
    for axes, (name, x) in zip(panels, points.items()):
        axes.plot(x, scores, "o", color="C0", alpha=0.4)
        axes.plot(x[diverged], 0 * x[diverged], "x", color="C3")
        axes.vlines(x, low, high, color="C0")
        axes.set(xlabel=plain(name), ylabel=f"{column}, x: diverged", ylim=(-0.03, 1.03))
        axes.set_xscale("log" if max(x) > 10 * min(x) > 0 else "linear")
    return figure


# --- the page where agents play, play.html


def demand_playable(run, args):
    """Refuse a run that the page, which has amaze.py and dr.py's network, would play otherwise."""
    allowed = f"allowed is dr.py's, rnn = {', '.join(CORES)}"
    config = read_config(run.folder)
    network = {k: config[k] for k in ("rnn", "hidden_size", "s5_layers", "s5_norm") if k in config}
    names = " ".join(sorted(traverse_util.flatten_dict(run.params.get("params", {}), sep="/")))
    pattern = HEADS + CORES.get(network.get("rnn"), "#")  # "#": in no name
    if run.env is not amaze or re.fullmatch(pattern, names) is None:
        raise Refused(f"a network that play.html cannot play: {allowed}")
    if not all((abs(x) < np.finfo(np.float16).max).all() for x in jax.tree.leaves(run.params)):
        raise Refused("parameters that are not finite in float16, which play.html holds")
    if config["script"] not in SCRIPTS and not plays_as_ours(run, network, args):
        raise Refused(f"{config['script']} plays otherwise than play.html would: {allowed}")


def plays_as_ours(run, network, args):
    """Whether the run's first agent plays on three mazes as it does with dr.py's network."""
    ours = dr.make_train(dr.Config(**network))
    shapes = jax.eval_shape(ours.init, jax.random.key(0)).student.params
    try:
        params = fit(shapes, run.params, len(run.agents))
    except Refused:  # it is larger, say
        return False
    params, rngs = jax.tree.map(lambda x: x[:1], (params, agent_keys(run, args.seed)))
    names = "TrivialMaze", "MiniMaze", "FourRooms"  # even random actions solve these
    mazes = draw_mazes(names, replace(args, episodes=30), False)
    played, expected = (play(train, params, rngs, mazes, 30) for train in (run.train, ours))
    return np.mean(np.not_equal(played, expected)) <= 0.05  # a few may differ by rounding


def maze_texts(maze, encode):
    """Yield the levels of a maze as play.html's maze_to_text writes them."""
    for level in zip(*map(np.asarray, maze.levels)):
        walls, (x, y), turn, (u, v) = level
        place = f"{walls.shape[1]}x{walls.shape[0]}.{x}.{y}.{turn}.{u}.{v}"
        rules = f"{maze.max_steps}.{maze.see_through_walls:d}"
        yield f"{place}.{rules}.{encode(np.packbits(walls))}"


def page(runs, mazes, dtype="<f2"):
    """play.html, filled with the agents of the runs and with mazes, all in base64.

    With float16, for three agents (LSTM 64) on dcd's mazes, no probability of an action changed by
    more than 0.006 in 300 steps, no value by more than 0.001, no mean solve rate by over 0.003."""
    encode = lambda x: base64.urlsafe_b64encode(x.tobytes()).decode().rstrip("=")
    mazes = {maze.name: list(maze_texts(maze, encode)) for maze in mazes}
    data = {"agents": [], "suites": amaze.SUITES, "mazes": mazes}
    for run in runs:
        config = read_config(run.folder)
        network = {name: config.get(name) for name in ("rnn", "s5_norm")}
        params = traverse_util.flatten_dict(run.params["params"], sep="/")
        for label, seeds in group_seeds(run).items():
            for i in seeds:
                who = {"name": label, "seed": run.agents[i]["seed"]}
                stored = {k: (x.shape[1:], encode(x[i].astype(dtype))) for k, x in params.items()}
                data["agents"].append(who | {"params": stored} | network)
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    empty = Path(__file__).with_name("play.html").read_text(encoding="utf-8")
    return empty.replace(EMPTY_PAGE, text).encode()


# --- command line


def check(args):
    for name, least in dict(levels=1, episodes=0, max_steps=1, batch_size=0, seed=0).items():
        value = getattr(args, name)
        if not least <= value < 2**31:
            raise Refused(f"{name} = {value}: allowed is at least {least}, below 2^31")
    for path in args.script:
        if not (Path(path).is_file() and path.endswith(".py")):
            raise Refused(f"script = {path}: allowed is a Python file")
    if len(args.runs) == 0 and not args.show_levels:
        raise Refused("no runs: allowed are folders of runs and checkpoint files")


def choose_out(args, runs):
    """The folder for results; it need not exist yet."""
    folders = [run.folder for run in runs] or [Path.cwd()]
    out = Path(os.path.expanduser(args.out) or os.path.relpath(common_folder(folders)))
    there = next(x for x in (out, *out.absolute().parents) if x.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise Refused(f"out = {out}: allowed is a folder that can be written")
    return out


def write_levels(out, mazes, env):
    """mazes.png: the first level of each maze."""
    first = [maze._replace(levels=jax.tree.map(lambda x: x[:1], maze.levels)) for maze in mazes]
    names = [plain(maze.name) for maze in mazes]
    captions = {"": names, "best return": optimal_returns(first, env)}
    figure = env.plot_levels({"": (stack(first, env)[0], captions)})
    write(out / "mazes.png", lambda file: figure.savefig(file, format="png"))


def write_results(out, runs, mazes, args, sampled):
    """Let all runs play all mazes; print tables, write results.csv and results.png."""
    env, names = runs[0].env, [maze.name for maze in mazes]
    optimal = optimal_returns(mazes, env)
    results, table = {}, []
    for run in runs:
        agents = run.train, run.params, agent_keys(run, args.seed)
        played = play(*agents, mazes, args.episodes, args.batch_size, run.name, env)
        table += tabulate(run, mazes, optimal, *played)
        for label, seeds in group_seeds(run).items():
            results[label] = [x[seeds] for x in played]
    summaries = {k: summarise(x[0], names, args.seed, sampled, env) for k, x in results.items()}
    print_results(results, summaries, mazes, optimal)
    figure = plot_results(results, summaries, env)
    write(out / "results.csv", lambda file: file.write(to_csv(table)))
    write(out / "results.png", lambda file: figure.savefig(file, format="png", dpi=150))


def write_film(out, run, maze, seed):
    pictures = [Image.fromarray(picture) for picture in film(run, seed, maze)]
    times = [100] * (len(pictures) - 1) + [1000]  # milliseconds
    options = dict(format="GIF", save_all=True, append_images=pictures[1:], duration=times, loop=0)
    name = f"film_{run.name.replace('/', '_')}_{run.update}_{maze.name}.gif"
    write(out / name, lambda file: pictures[0].save(file, **options))


def evaluate(args):
    """Do what the arguments ask for; return a line for each run that could not be loaded."""
    check(args)
    runs, refused = load_runs(args)
    if len(args.runs) > 0 and len(runs) == 0:
        return refused
    env = amaze
    if len(runs) > 0:
        env = runs[0].env
    elif len(args.script) > 0:
        env = import_script(Path(args.script[0])).amaze
    names, own, sampled = choose_mazes(args, env)
    args = replace(args, episodes=args.episodes or (20 if sampled else 100))
    films = args.gif.split(",") if args.gif != "" else []
    unknown = set(films) - set(names)
    if len(unknown) > 0:
        raise Refused(f"gif = {', '.join(unknown)}: allowed are {', '.join(names)}")
    if len(films) > 0 and not {"EnvState", "render"} <= {*dir(env)}:
        raise Refused(f"gif = {args.gif}: allowed is none, as there is no EnvState or render")
    out = choose_out(args, runs)
    if args.play:
        longest = max((maze.max_steps for maze in own), default=1)
        if longest > LONGEST:
            raise Refused(f"max_steps = {longest}: allowed with --play is at most {LONGEST}")
        mazes = own + draw_mazes(env.TEST_MAZES, replace(args, episodes=5), False, env)
        html = page(runs, mazes)
        write(out / "play.html", lambda file: file.write(html))
        return refused
    mazes = own + draw_mazes(names[len(own) :], args, sampled, env)
    if args.show_levels:
        write_levels(out, mazes, env)
    if len(runs) > 0:
        write_results(out, runs, mazes, args, sampled)
    for run in runs:
        for name in films:
            write_film(out, run, mazes[names.index(name)], args.seed)
    return refused


def main():
    os.environ.pop("MPLBACKEND", None)  # a notebook's backend need not be installed
    if "-h" in sys.argv or "--help" in sys.argv:
        print(__doc__)  # unchanged; tyro would reflow it
    args = tyro.cli(Arguments, description="", config=(tyro.conf.UseAppendAction,))
    try:
        dr.start_jax(dr.Config())
        refused = evaluate(args)
    except (Refused, OSError) as error:
        refused = [str(error)]
    for line in refused:
        print(f"evaluate.py: error: {printable(line)}", file=sys.stderr)
    sys.exit(2 if len(refused) > 0 else 0)


if __name__ == "__main__":
    with redirect_stdout(dr.Speech(sys.stdout)), redirect_stderr(dr.Speech(sys.stderr)):
        main()

# What `uv run` installs
# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10", "flax>=0.12", "optax>=0.2.5", "distrax>=0.1.8", "numpy>=2.0",
#                 "matplotlib>=3.9", "tyro>=0.9", "tqdm>=4.66"]
# ///
