"""Evaluate trainings on test mazes: tables, plots and films from their checkpoints.

    python evaluate.py runs/plr                          all seeds of a run on the minimax suite
    python evaluate.py runs/dr runs/plr --suite dcd      runs side by side
    python evaluate.py runs/plr/checkpoint_500.msgpack   an archived checkpoint
    python evaluate.py runs/plr --suite sampled --levels 10000
    python evaluate.py runs/plr --mazes Labyrinth,FourRooms --gif Labyrinth
    python evaluate.py runs/sweep                        a sweep: ranks its points
    python evaluate.py runs/mine --script my_plr.py      a run of your own copy of a script
    python evaluate.py --suite dcd --show-levels         a picture of the mazes, without a run
    python evaluate.py runs/dr runs/plr --play           only writes a page: agents in a browser

All agents play the same levels; actions are sampled. A training's score on a maze is its solve rate
there. Several seeds get mean, interquartile mean (IQM) and optimality gap over seeds and mazes
(Agarwal 2021, 2108.13264). One agent plays all mazes, so 95% bootstrap intervals resample whole
seeds; from 6 seeds they cover the truth 85 times in 100, below 3 there are none. Sampled levels are
played 10 + 10 times: one half finds the worst 10, 1 and 0.1% of levels, the other scores them
(Rutherford 2024, 2408.15099). The points of a sweep are ranked by the last solve rate in logs.csv;
all are played and stand in results.csv, the best is shown.

    put all episodes in a queue, mazes with long time limits first
    W lanes take the first W episodes, and at each step every lane
        acts; if its episode ends, it records return and length and takes the queue's next episode

Random numbers depend on --seed, the training's seed, the maze's name, the episode's number and the
time step only: devices, --batch-size, other runs and mazes change results by rounding at most.

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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.style
import numpy as np
import tyro
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from PIL import Image
from tqdm import tqdm

import amaze
import dr
from dr import BadConfig, read_checkpoint, read_config

SCRIPTS = ("dr.py", "plr.py", "accel.py", "paired.py", "sfl.py")  # the project's own scripts
STEPS = 50  # steps of the lanes between two looks at which episodes have ended
RESAMPLES = 2000  # resamples of the bootstrap
LEVELS, ACTIONS = 1, 2  # what a random key is for
MIN_SEEDS = 3  # fewest seeds that give an interval
WORST = {"worst 10%": 0.1, "worst 1%": 0.01, "worst 0.1%": 0.001}  # shares of the sampled levels
MANY = 40  # most mazes that are listed and plotted one by one
CORES = "lstm", "gru", "s5", "none"  # those that play.html has
EMPTY_PAGE = '{"agents": [], "suites": {}, "mazes": {}}'  # what play.html holds before it is filled


@dataclass(frozen=True)
class Arguments:
    runs: tyro.conf.Positional[tuple[str, ...]] = ()  # run folders, or checkpoint files in them
    suite: str = ""  # minimax, jaxued, dcd, families or sampled; default: the environment's first
    mazes: str = ""  # comma-separated names of mazes, instead of the suite
    maze_file: str = ""  # a text file of mazes with blank lines between, instead of the suite
    max_steps: int = 250  # time limit of the mazes of --maze-file
    see_through_walls: bool = True  # whether agents see behind walls in the mazes of --maze-file
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
    points: int = 1  # of a sweep: how many points to show, the best first; 0: all
    script: tuple[str, ...] = ()  # scripts of runs, if not beside evaluate.py; they are executed


class Maze(NamedTuple):
    name: str
    levels: Any  # [E, ...] if each episode has its own, else [1, ...]
    max_steps: int
    see_through_walls: bool | None = True  # None: the environment has no such rule


class Run(NamedTuple):  # the agents of a checkpoint
    name: str
    folder: Path
    algorithm: str
    update: int  # cycles done at the checkpoint
    agents: list  # [A] dicts of seed, swept values, agent
    params: dict  # [A, ...]
    train: Callable  # made by the script; act, initial_carry, reset and step are used here
    env: ModuleType = amaze  # what the script imports as amaze
    script: Path | None = None
    config: dict = {}  # as in config.json
    ranking: tuple = ()  # names of a sweep's points, the best first


# --- mazes


def demand_known(field, names, known):
    """Raise BadConfig about the names that are not known."""
    unknown = [name for name in names if name not in known]
    if len(unknown) > 0:
        raise BadConfig(f"{field} = {','.join(unknown)}: must be of {', '.join(known)}")


def tag(name, number):
    """A number from a maze's name and a level or episode, to fold into a random key."""
    return np.uint32(zlib.crc32(f"{name}/{number}".encode()))


def root_key(seed, purpose):
    """The key from which all for this purpose are folded. It is no key of a training, which begins
    with key(seed): the words 0, seed."""
    return jax.random.wrap_key_data(np.array([purpose, seed], np.uint32))


def draw(names, number, seed, env=amaze):
    """{name: levels} of test mazes: `number` of each, or one if all are the same."""
    rng = root_key(seed, LEVELS)
    tags = {name: np.array([tag(name, i) for i in range(number)]) for name in names}
    one = lambda name, tag: env.TEST_MAZES[name][0](jax.random.fold_in(rng, tag))
    draw_all = jax.jit(lambda tags: {k: jax.vmap(partial(one, k))(x) for k, x in tags.items()})
    drawn = jax.device_get(draw_all(tags))
    for name, levels in drawn.items():
        if all((x == x[:1]).all() for x in jax.tree.leaves(levels)):
            drawn[name] = jax.tree.map(lambda x: x[:1], levels)
    return drawn


def read_mazes(path, max_steps, see_through_walls=True, env=amaze):
    """The mazes of a text file, each as for level_from_text, with blank lines between them."""
    path, mazes = Path(path), []
    try:
        text = path.read_text(encoding="utf-8-sig")
        texts = [x for x in re.split(r"\n(?:[ \t]*\n)+", text) if x.strip() != ""]
        for number, text in enumerate(texts or [""], start=1):
            level = jax.tree.map(lambda x: x[None], env.level_from_text(text))
            mazes.append(Maze(f"{path.stem}-{number}", level, max_steps, see_through_walls))
    except ValueError as error:  # a UnicodeDecodeError is one too
        raise BadConfig(f"{path}, maze {len(mazes) + 1}: {error}") from None
    return mazes


def choose_mazes(args, env=amaze):
    """Names of all mazes asked for, the mazes of --maze-file, and whether the rest are sampled."""
    suite = args.suite or next(iter(env.SUITES))
    demand_known("suite", [suite], env.SUITES)
    own, names = [], env.SUITES[suite]
    if args.maze_file != "":
        if not hasattr(env, "level_from_text"):
            raise BadConfig(f"maze_file = {args.maze_file}: must be none in this environment")
        own, names = read_mazes(args.maze_file, args.max_steps, args.see_through_walls, env), []
    if args.mazes != "":
        names = args.mazes.split(",")
    demand_known("mazes", names, env.TEST_MAZES)
    sampled = names is env.SUITES.get("sampled")
    if sampled:
        if args.episodes % 2 == 1:
            raise BadConfig(f"episodes = {args.episodes}: must be even for sampled levels")
        names = [f"{names[0]}-{i}" for i in range(args.levels)]
    return list(dict.fromkeys([maze.name for maze in own] + names)), own, sampled


def draw_mazes(names, args=Arguments(episodes=1), sampled=False, env=amaze):
    """The mazes of these names; if sampled, each is one level of the suite `sampled`."""
    if sampled:
        [source] = env.SUITES["sampled"]
        drawn = draw([source], len(names), args.seed, env)[source]
        levels = {x: jax.tree.map(lambda x: x[i : i + 1], drawn) for i, x in enumerate(names)}
        rules = dict.fromkeys(names, env.TEST_MAZES[source][1:])
    else:
        levels = draw(names, args.episodes, args.seed, env)
        rules = {name: env.TEST_MAZES[name][1:] for name in names}
    # an environment may have the first rule only
    return [Maze(name, levels[name], *(*rules[name], None)[:2]) for name in names]


def stack(mazes, env=amaze):
    """All levels [L, ...], padded to one size if they differ, and each one's maze and limit [L]."""
    levels = getattr(env, "pad_levels", list)([maze.levels for maze in mazes])
    numbers = [len(jax.tree.leaves(x)[0]) for x in levels]
    levels = jax.tree.map(lambda *x: np.concatenate(x), *levels)
    owner = np.repeat(np.arange(len(mazes)), numbers)
    return levels, owner, np.array([maze.max_steps for maze in mazes])[owner]


def optimal_returns(mazes, env=amaze):
    """[M] the optimal return, averaged over a maze's levels; NaN if it is not known."""
    levels, owner, limits = stack(mazes, env)
    stats = jax.jit(jax.vmap(env.level_stats))(levels, limits)
    best = stats.get("optimal_return", np.full(len(owner), np.nan))  # [L]
    return np.bincount(owner, best) / np.bincount(owner)


def open_levels(reset, mazes, env=amaze):
    """First observation and state of each level [L, ...], and the maze of each level [L]."""
    levels, owner, limits = stack(mazes, env)
    see, fixed, rules = [maze.see_through_walls for maze in mazes], (), (limits,)
    if all(see):
        fixed = (True,)  # faster than an array
    elif None not in see:  # else an environment without this rule
        rules = limits, np.array(see)[owner]
    openings = jax.jit(jax.vmap(lambda level, *rules: reset(level, *rules, *fixed)))(levels, *rules)
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


class Lanes(NamedTuple):  # the W episodes that an agent plays at once
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

    def go_on(params, rng, part, lanes):
        def step(lanes, _):
            begins = lanes.done
            # after the last episode comes the first: played again, an episode has the same result
            later = (part + parts * (lanes.taken + jnp.cumsum(begins) - 1)) % len(tags)
            turn = jnp.where(begins, later, lanes.turn)
            t, returns = jnp.where(begins, 0, lanes.t), jnp.where(begins, 0.0, lanes.returns)
            choose = partial(jax.vmap(jnp.where), begins)
            open_next = lambda old: jax.tree.map(choose, opening(turn), old)
            number, old = begins.sum(), (lanes.obs, lanes.state)
            if jax.default_backend() != "cpu":  # over players, so that lax.cond stays a branch
                number = jax.lax.psum(number, "players")
            obs, state = jax.lax.cond(number > 0, open_next, lambda old: old, old)
            noise = jax.vmap(partial(gumbel, rng, env=env))(tags[turn], t)
            memory, action = train.act(params, lanes.memory, obs, begins, noise)[:2]
            obs, state, reward, done = jax.vmap(train.step)(state, action)
            t, returns, taken = t + 1, returns + reward, lanes.taken + begins.sum()
            lanes = Lanes(memory, obs, state, t, returns, turn, done, taken)
            return lanes, {"turn": turn, "done": done, "return": returns, "length": t}

        return jax.lax.scan(step, lanes, length=STEPS)

    return go_on


def make_program(player, devices):
    """The program of all players [P], and the sharding of the players over the devices."""
    in_turn = lambda *players: jax.lax.map(lambda of_one: player(*of_one), players)
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
    opening = lambda turn: jax.tree.map(lambda x: x[jnp.asarray(slot)[turn]], openings)
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
    rng = root_key(seed, ACTIONS)
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
    statistics = AGGREGATES if len(scores) > 1 else {"mean": np.mean}
    of_all = lambda scores: np.array([f(scores) for f in statistics.values()])
    summary |= zip(statistics, bootstrap(scores, of_all, seed))
    if sampled and len(names) * max(WORST.values()) >= 1:
        halves = np.stack([rates(returns[..., i::2]) for i in (0, 1)])
        summary |= zip(WORST, bootstrap(worst(halves), mean, seed))
    return summary


def show(value, low, high):
    interval = "" if np.isnan(low) else f" [{low:.3f}, {high:.3f}]"
    return f"{value:.3f}{interval}"


# --- runs: checkpoints are data, and nothing in them is executed


def choose_script(recorded, given):
    """The file of the script that made a run: one of the recorded name in --script or beside this
    file, never in a folder that a run names; else the only --script, as if it was renamed."""
    given = [Path(path) for path in given]
    beside = Path(__file__).resolve().parent / Path(recorded).name
    named = [path for path in given if path.name == recorded]
    named = named or ([beside] if beside.is_file() else given)
    if len(named) != 1:
        raise BadConfig(f"made by {recorded}: must be a script beside evaluate.py or --script FILE")
    return named[0]


def import_script(path):
    """Execute a file and return its module."""
    if path.suffix != ".py":
        raise BadConfig(f"script = {path}: must end in .py")
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.append(str(path.resolve().parent))  # its environment may be there
    spec.loader.exec_module(module)
    return module


def read_run(path, scripts=()):
    """Of a checkpoint file: its dict, config.json's dict, the script's file and module, Config."""
    data = read_checkpoint(path)
    stored = json.loads(data["config"])
    script = choose_script(stored["script"], scripts)
    module = import_script(script)
    settings = {k: x for k, x in stored.items() if k != "script" and not k.startswith("jax_")}
    if gone := [name for name in settings if name not in module.Config.__dataclass_fields__]:
        raise BadConfig(f"{script} has no {', '.join(gone)}: must be the script that made the run")
    return data, stored, script, module, module.Config(**settings)


def read_students(state, config):
    """Names of the students of a training, and the parameters of the students of all rows."""
    learner = state["students" if "students" in state else "student"]
    params = learner.get("average_params") or learner["params"]  # as in training
    if "students" not in state:
        return ["student"], params
    names = ["protagonist", "antagonist"]
    if config.regret != "paired":
        number = jax.tree.leaves(params)[0].shape[1]  # of [rows, students, ...]
        names = [str(i) for i in range(number)] if number > 1 else ["protagonist"]
    return names, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), params)


def load(path, script=(), agent="protagonist", trainings=0):
    """The Run of a run folder's last checkpoint or of a checkpoint file; others: see Arguments."""
    path, scripts = Path(path), (script,) if isinstance(script, str | Path) else script
    folder, path = (path, path / "checkpoint.msgpack") if path.is_dir() else (path.parent, path)
    data, stored, script, module, config = read_run(path, scripts)
    names, params = read_students(data["state"], config)
    wanted = {"all": names, "protagonist": names[:1]} | {name: [name] for name in names}
    demand_known("agent", [agent], wanted)
    order = "seed", *(sweep.partition("=")[0] for sweep in stored["sweep"])  # msgpack sorts keys
    rows = [{key: row[key] for key in order} for row in data["rows"]]
    agents = [row | {"agent": name} for row in rows[: trainings or None] for name in names]
    chosen = [i for i, x in enumerate(agents) if x["agent"] in wanted[agent]]
    agents, params = [agents[i] for i in chosen], jax.tree.map(lambda x: x[chosen], params)
    folder, about = folder.resolve(), (Path(stored["script"]).stem, data["cycles"])
    swept = {name: x for name, x in rows[0].items() if name != "seed"}
    train = module.make_train(replace(config, **swept))
    made = agents, params, train, module.amaze, script, stored
    return Run(folder.name, folder, *about, *made)


def save(folder, config, state):
    """Save one training done in code, or several with states [R, ...], in a new folder for `load`
    and --resume. Several are the points of config.sweep, or config.seed and the seeds after it."""
    folder, script = Path(folder), sys.modules[type(config).__module__]
    state = jax.tree.map(lambda x: x.reshape(-1, *x.shape[state.cycles.ndim :]), state)
    number = len(state.cycles)
    config = config if config.sweep else replace(config, seeds=number)
    rows = script.make_rows(config)
    script.demand(len(rows) == number, config, "sweep seeds", f"as many as the state's {number}")
    folder.mkdir(parents=True)
    script.write(folder / "config.json", lambda file: file.write(script.to_json(config).encode()))
    with open(folder / "logs.csv", "w") as log:
        reached = log, config, rows, state, int(state.cycles[0]), 0.0
        script.save_checkpoint(folder / "checkpoint.msgpack", *reached)


def load_runs(args):
    """The runs that can be loaded, named by their folders, and a line for each that cannot; prints
    the ranking of each sweep."""
    runs, refused = {}, []
    for path in dict.fromkeys(map(Path, args.runs)):
        try:
            ranking = rank(path, args) if path.is_dir() and not args.play else ()
            run = load(path, args.script, args.agent, args.trainings)._replace(ranking=ranking)
            if args.play:
                demand_playable(run, args)
            runs.setdefault((run.folder, run.update), run)
        except (BadConfig, ImportError, OSError) as error:
            refused.append(str(error) if str(path) in str(error) else f"{path}: {error}")
    runs = list(runs.values())
    if len({run.env for run in runs}) > 1:
        raise BadConfig("runs of different environments: must be evaluated one by one")
    unused = {*map(Path, args.script)} - {run.script for run in runs}
    if len(args.runs) > 0 and len(refused) == 0 and unused:
        raise BadConfig(f"script = {', '.join(args.script)}: must each have made a run")
    shared = os.path.commonpath([run.folder.parent for run in runs] or [Path.cwd()])
    names = [Path(os.path.relpath(run.folder, shared)).as_posix() for run in runs]
    return [run._replace(name=name) for run, name in zip(runs, names)], refused


# --- results


def write(path, save):
    """Write a file as a whole, as the scripts do, and print its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    dr.write(path, save)
    print(f"{path} written")


def write_figure(path, plot, *args):
    """Write the Figure plot(*args), whatever matplotlibrc says; a $ starts no formula."""
    with matplotlib.style.context(["default", {"text.parse_math": False}]):
        write(path, partial(plot(*args).savefig, format="png"))


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


def point_name(values):
    """A point of a sweep {name: value} as text."""
    return ", ".join(f"{name} {x:.6g}" for name, x in values.items())


def group_seeds(run):
    """{label: numbers of agents}, where the agents of a label differ only in their seeds; in the
    order of the ranking."""
    groups = {}
    for i, agent in enumerate(run.agents):
        role = "" if agent["agent"] in ("student", "protagonist") else agent["agent"]
        point = point_name({k: x for k, x in agent.items() if k not in ("seed", "agent")})
        label = ", ".join(filter(None, [f"{run.name} @{run.update}", role, point]))
        groups.setdefault((point, label), []).append(i)
    place = {point: i for i, point in enumerate(run.ranking)}
    best_first = sorted(groups, key=lambda x: place.get(x[0], len(place)))
    return {label: groups[point, label] for point, label in best_first}


def print_table(lines):
    """Print lines of cells, the first column left-aligned and the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    for first, *others in lines:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:]))
        print("  ".join([first.ljust(widths[0]), *cells]))


def print_results(results, summaries, shown, mazes, optimal):
    """Print a table of mazes for each group of seeds that is shown, and a table of all groups."""
    for label in shown:
        (returns, lengths), summary = results[label], summaries[label]
        seeds, _, episodes = returns.shape
        halves = " (worst: half rank, half report)" if "worst 10%" in summary else ""
        print(f"\n{label}: {seeds} seed(s), {episodes} episodes on each maze{halves}")
        lines = [["maze", "solve rate", "return", "optimal return", "length"]]
        for maze, *numbers in zip(mazes, returns.mean((0, 2)), optimal, lengths.mean((0, 2))):
            if maze.name in summary:
                cells = ["" if np.isnan(x) else f"{x:.3f}" for x in numbers]
                lines.append([maze.name, show(*summary[maze.name]), *cells])
        print_table(lines if len(lines) > 1 else [])
    held = {name for summary in summaries.values() for name in summary}
    columns = [name for name in AGGREGATES | WORST if name in held]
    about = f", with 95% intervals from {MIN_SEEDS} seeds on" if "IQM" in columns else ""
    print(f"\nover {len(mazes)} maze(s){about}")
    lines = [["solve rate", *columns]]
    for label, summary in summaries.items():
        lines.append([label, *(show(*summary[x]) if x in summary else "" for x in columns)])
    print_table(lines)


def plot_results(results, summaries, env=amaze):
    """A Figure of points with intervals and of performance profiles, from two {label: ...}."""
    names = list(dict.fromkeys(name for summary in summaries.values() for name in summary))
    figure = Figure(figsize=(9 + 0.45 * len(names), 5), dpi=150, layout="constrained")
    points, profile = figure.subplots(1, 2, width_ratios=(1 + 0.45 * len(names), 4))
    tau = np.linspace(0, 1, 201)
    for i, (label, summary) in enumerate(summaries.items()):
        value, low, high = np.array(list(summary.values())).T
        at = np.array([names.index(name) for name in summary])
        x = at + 0.6 * ((i + 0.5) / len(summaries) - 0.5)
        points.vlines(x, low, high, color=f"C{i}")
        points.plot(x, value, "o", color=f"C{i}", markersize=4, label=label)
        rates = env.solved(results[label][0]).mean(-1, keepdims=True)  # [S, M, 1]
        profile.step(tau, (rates > tau).mean((0, 1)), where="post", color=f"C{i}")
    points.set_xticks(range(len(names)), names, rotation=45, ha="right")
    several = "IQM" in names
    about = f", with 95% intervals from {MIN_SEEDS} seeds on" if several else ""
    points.set(title=f"solve rate{about}", ylim=(-0.03, 1.03))
    points.grid(axis="y", alpha=0.3)
    points.legend(fontsize="small")
    title = f"share of {'seeds x ' if several else ''}mazes with a solve rate above tau"
    profile.set(title=title, xlabel="tau", xlim=(0, 1), ylim=(-0.03, 1.03))
    return figure


# --- sweeps: points {name of a swept field: [N]}, scores [N, S], NaN where a training diverged


def rank(folder, args):
    """Print and draw the points of a run's sweep, the best first; a diverged training scores 0.
    -> the points' names"""
    names = [sweep.partition("=")[0] for sweep in read_config(folder)["sweep"]]
    path = folder / "logs.csv"
    if len(names) == 0 or not path.exists() or path.stat().st_size == 0:
        return ()
    points, column, scores = read_sweep(path, names)
    summary = bootstrap(np.nan_to_num(scores).T, lambda scores: scores.mean(0), args.seed)  # [N, 3]
    diverged = np.isnan(scores).sum(1)  # [N]
    print(f"{folder}: {len(scores)} points, {scores.shape[1]} seed(s)")
    lines = [["point", f"last {column}", ""]]
    for i in np.lexsort((diverged, -summary[:, 0])):
        note = f"{diverged[i]} diverged" if diverged[i] > 0 else ""
        point = point_name({name: x[i] for name, x in points.items()})
        lines.append([point, show(*summary[i]), note])
    print_table(lines)
    name = f"sweep_{folder.as_posix().replace('/', '_')}.png" if args.out != "" else "sweep.png"
    write_figure(Path(args.out or folder) / name, plot_sweep, points, column, scores, summary)
    return tuple(point for point, *_ in lines[1:])


def read_sweep(path, names):
    """Points, the column of scores, and each training's last score in logs.csv: 0 if it has none,
    NaN if any of its values was not finite ("inf")."""
    whole_lines = path.read_text().rpartition("\n")[0]  # not one that is being written
    table = list(csv.DictReader(whole_lines.splitlines()))
    evaluated = any(row.get("eval_solve_rate") for row in table)
    column = "eval_solve_rate" if evaluated else "train_solve_rate"
    points = {}  # point: {seed: scores}
    for row in table:
        of_point = points.setdefault(tuple(float(row[name]) for name in names), {})
        scores = of_point.setdefault(row["seed"], [0.0])
        if "inf" in row.values() or row[column] != "":
            scores.append(np.nan if "inf" in row.values() else float(row[column]))
    if len({len(of_point) for of_point in points.values()}) > 1:
        raise BadConfig(f"{path} has no row yet of some trainings")
    last = lambda scores: np.nan if np.isnan(scores).any() else scores[-1]
    scores = np.array([[last(x) for x in of_point.values()] for of_point in points.values()])
    return dict(zip(names, np.transpose(list(points)))), column, scores


def plot_sweep(points, column, scores, summary):
    """A Figure of the scores against each swept field."""
    _, low, high = summary.T
    diverged = np.isnan(scores).any(1)  # [N]
    figure = Figure(figsize=(4 * len(points), 4), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(points), squeeze=False)[0]
    for axes, (name, x) in zip(panels, points.items()):
        axes.plot(x, scores, "o", color="C0", alpha=0.4)
        axes.plot(x[diverged], 0 * x[diverged], "x", color="C3")
        axes.vlines(x, low, high, color="C0")
        axes.set(xlabel=name, ylabel=f"{column}, x: diverged", ylim=(-0.03, 1.03))
        axes.set_xscale("log" if max(x) > 10 * min(x) > 0 else "linear")
    return figure


# --- the page where agents play, play.html


def demand_playable(run, args):
    """Raise BadConfig if the page, which has amaze.py and dr.py's network, would play otherwise."""
    must = f"must be a network of dr.py's, rnn = {', '.join(CORES)}"
    settings = "rnn", "hidden_size", "s5_layers", "s5_norm"  # a copy may have fewer
    network = {k: run.config[k] for k in settings if k in run.config}
    fits = run.env is amaze and network.get("rnn") in CORES
    if fits:
        ours = dr.make_train(dr.Config(**network))
        expected = jax.eval_shape(ours.init, jax.random.key(0)).student.params
        shapes = jax.tree.map(lambda x: x.shape[1:], run.params)
        fits = shapes == jax.tree.map(lambda x: x.shape, expected)
    if not fits:
        raise BadConfig(f"play: {must}")
    if not all((abs(x) < np.finfo(np.float16).max).all() for x in jax.tree.leaves(run.params)):
        raise BadConfig("play: parameters must be finite in float16, which play.html holds")
    if run.config["script"] in SCRIPTS:
        return
    first = jax.tree.map(lambda x: x[:1], (run.params, agent_keys(run, args.seed)))
    names = "TrivialMaze", "MiniMaze", "FourRooms"  # even random actions solve these
    mazes = draw_mazes(names, replace(args, episodes=30))
    played, expected = (play(train, *first, mazes, 30) for train in (run.train, ours))
    if np.mean(np.not_equal(played, expected)) > 0.05:  # a few may differ by rounding
        raise BadConfig(f"play: {run.config['script']} acts otherwise than dr.py: {must}")


def page(runs, mazes, dtype="<f2"):
    """play.html, filled with the agents of the runs and with mazes, all in base64.
    With float16, for three agents (LSTM 64) on dcd's mazes, no probability of an action changed by
    more than 0.006 in 300 steps, no value by more than 0.001, no mean solve rate by over 0.003."""
    encode = lambda x: base64.urlsafe_b64encode(x.tobytes()).decode().rstrip("=")

    def texts(maze):  # as play.html's maze_to_text writes them
        for walls, (x, y), turn, (u, v) in zip(*map(np.asarray, maze.levels)):
            place = f"{walls.shape[1]}x{walls.shape[0]}.{x}.{y}.{turn}.{u}.{v}"
            rules = f"{maze.max_steps}.{maze.see_through_walls:d}"
            yield f"{place}.{rules}.{encode(np.packbits(walls))}"

    mazes = {maze.name: list(texts(maze)) for maze in mazes}
    data = {"agents": [], "suites": amaze.SUITES, "mazes": mazes}
    for run in runs:
        network = {name: run.config.get(name) for name in ("rnn", "s5_norm")}
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


def plot_levels(mazes, env):
    """A Figure of the first level of each maze."""
    first = [maze._replace(levels=jax.tree.map(lambda x: x[:1], maze.levels)) for maze in mazes]
    captions = {"": [maze.name for maze in mazes], "best return": optimal_returns(first, env)}
    return env.plot_levels({"": (stack(first, env)[0], captions)})


def write_results(out, runs, mazes, args, sampled):
    """Let all runs play all mazes; print tables, write results.csv and results.png."""
    env, names = runs[0].env, [maze.name for maze in mazes]
    optimal = optimal_returns(mazes, env)
    results, table, shown = {}, [], []
    for run in runs:
        agents = run.train, run.params, agent_keys(run, args.seed)
        played = play(*agents, mazes, args.episodes, args.batch_size, run.name, env)
        table += tabulate(run, mazes, optimal, *played)
        groups = group_seeds(run)
        results |= {label: [x[seeds] for x in played] for label, seeds in groups.items()}
        roles = len({agent["agent"] for agent in run.agents})  # groups of a point
        shown += [*groups][: roles * args.points or None] if run.ranking else groups
    summaries = {k: summarise(x[0], names, args.seed, sampled, env) for k, x in results.items()}
    print_results(results, summaries, shown, mazes, optimal)
    write(out / "results.csv", lambda file: file.write(to_csv(table)))
    drawn = ({label: x[label] for label in shown} for x in (results, summaries))
    write_figure(out / "results.png", plot_results, *drawn, env)


def write_film(out, run, maze, seed):
    pictures = [Image.fromarray(picture) for picture in film(run, seed, maze)]
    times = [100] * (len(pictures) - 1) + [1000]  # milliseconds
    options = dict(format="GIF", save_all=True, append_images=pictures[1:], duration=times, loop=0)
    name = f"film_{run.name.replace('/', '_')}_{run.update}_{maze.name}.gif"
    write(out / name, lambda file: pictures[0].save(file, **options))


def evaluate(args):
    """Do what the arguments ask for; return a line for each run that could not be loaded."""
    least = dict(levels=1, max_steps=1, episodes=0, batch_size=0, seed=0, trainings=0, points=0)
    for name, low in least.items():
        if not low <= getattr(args, name) <= 1e9:
            raise BadConfig(f"{name} = {getattr(args, name)}: must be from {low} to {1e9:g}")
    if len(args.runs) == 0 and not args.show_levels:
        raise BadConfig("runs: must be folders of runs or checkpoint files")
    kind = jax.config.jax_default_prng_impl
    if kind != "threefry2x32":  # numbers of others depend on --batch-size
        raise BadConfig(f"JAX_DEFAULT_PRNG_IMPL = {kind}: must be threefry2x32")
    runs, refused = load_runs(args)
    if len(args.runs) > 0 and len(runs) == 0:
        return refused
    env = import_script(Path(args.script[0])).amaze if args.script and not runs else amaze
    env = runs[0].env if runs else env
    names, own, sampled = choose_mazes(args, env)
    args = replace(args, episodes=args.episodes or (20 if sampled else 100))
    films = args.gif.split(",") if args.gif != "" else []
    demand_known("gif", films, names)
    if len(films) > 0 and not (hasattr(env, "EnvState") and hasattr(env, "render")):
        raise BadConfig(f"gif = {args.gif}: must be none, as there is no EnvState or render")
    holds_all = os.path.commonpath([run.folder for run in runs] or [Path.cwd()])
    out = Path(args.out or os.path.relpath(holds_all))
    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        raise BadConfig(f"out = {out}: must be a folder that can be written")
    if args.play:
        html = page(runs, own + draw_mazes(env.TEST_MAZES, replace(args, episodes=5)))
        write(out / "play.html", lambda file: file.write(html))
        print(f"open {out / 'play.html'} in a browser")
        return refused
    mazes = own + draw_mazes(names[len(own) :], args, sampled, env)
    if args.show_levels:
        write_figure(out / "mazes.png", plot_levels, mazes, env)
    if len(runs) > 0:
        write_results(out, runs, mazes, args, sampled)
    for run in runs:
        for name in films:
            write_film(out, run, mazes[names.index(name)], args.seed)
    return refused


def main():
    """Exit status: 0 done, 2 bad input, of which each is named in one line."""
    args = tyro.cli(Arguments, description=__doc__, config=(tyro.conf.UseAppendAction,))
    try:
        dr.start_jax(dr.Config())
        refused = evaluate(args)
    except (BadConfig, ImportError, OSError) as error:
        refused = [str(error)]
    for line in refused:
        print(f"evaluate.py: error: {line}", file=sys.stderr)
    sys.exit(2 if len(refused) > 0 else 0)


if __name__ == "__main__":
    main()
