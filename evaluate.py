"""Evaluate trainings on test mazes: tables, plots and films from their checkpoints.

    python evaluate.py runs/plr                          all seeds of a run on the minimax suite
    python evaluate.py runs/dr runs/plr --suite dcd      runs side by side
    python evaluate.py runs/plr/checkpoint_500.msgpack   an archive
    python evaluate.py runs/plr --suite sampled --levels 1000 --episodes 10
    python evaluate.py runs/plr --mazes Labyrinth,FourRooms --gif Labyrinth
    python evaluate.py --suite dcd --show-levels         a picture of the mazes, without a run

All agents play the same levels; actions are sampled. A training's score on a maze is its solve rate
there. Over seeds and mazes: mean, median, interquartile mean (IQM) and optimality gap, with 95%
stratified bootstrap intervals (Agarwal 2021, 2108.13264).

    put all episodes in a row, mazes with long time limits first
    W lanes take the first W episodes, and at each step every lane
        acts; if its episode ends, records return and length and takes the next episode in the row

Random numbers come from --seed, the training's seed, the maze's name, the episode's number and the
time step: neither --batch-size nor what else is evaluated changes a result.

Shapes     A agents (a run's seeds, times students), M mazes, E episodes on each, G = M * E,
           L distinct levels, W lanes, S seeds.
"""

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
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import serialization
from matplotlib.figure import Figure
from PIL import Image
from tqdm import tqdm

import amaze

SCRIPTS = ("dr.py", "plr.py", "accel.py", "paired.py")  # all that a config.json may name
STEPS = 50  # of the lanes, between looks at what has ended
RESAMPLES = 2000  # of the bootstrap
WORST = {"worst 10%": 0.1, "worst 1%": 0.01, "worst 0.1%": 0.001}  # shares of the sampled levels
MANY = 40  # more mazes than these are neither listed nor plotted one by one


@dataclass(frozen=True)
class Arguments:
    runs: tyro.conf.Positional[tuple[str, ...]] = ()  # run folders, or checkpoint files in them
    suite: Literal["minimax", "jaxued", "dcd", "sampled"] = "minimax"  # test mazes
    mazes: str = ""  # instead of the suite: names of mazes, with commas between
    maze_file: str = ""  # instead of the suite: a text file of mazes, blank lines between
    max_steps: int = 250  # time limit of the mazes of --maze-file
    levels: int = 1000  # of the suite `sampled`: random solvable levels with 60 walls
    episodes: int = 100  # per agent and maze (with `sampled`: and level)
    agent: str = "protagonist"  # of paired.py: protagonist, antagonist, a student's number, all
    batch_size: int = 0  # episodes at once; 0: for each agent 128 on a CPU, 1,024 elsewhere
    seed: int = 0  # of levels and actions
    out: str = ""  # folder for results; default: the run's, or the one that holds the runs
    gif: str = ""  # mazes to film, with commas between: each run's first agent and episode
    show_levels: bool = False  # draw the mazes too
    script: str = ""  # what made a run, if none of the four did: a Python file, to be executed


class Refused(ValueError):
    """One line: what is wrong, and what is allowed."""


class Maze(NamedTuple):
    name: str
    levels: amaze.Level  # [E, ...] if each episode has its own, else [1, ...]
    max_steps: int
    see_through_walls: bool = True


class Course(NamedTuple):
    """All episodes, in the order of play, and the levels that they are played on."""

    row: np.ndarray  # [G] index into [M, E]
    tag: np.ndarray  # [G] uint32, names the random numbers
    slot: np.ndarray  # [G] index into the levels
    levels: amaze.Level  # [L, ...], padded to one size
    walls: jax.Array  # of all levels, as amaze packs them
    opening: tuple  # [L, ...] first observation and state, the latter without levels and walls


class Run(NamedTuple):
    """The agents of a checkpoint."""

    name: str
    folder: Path
    algorithm: str
    update: int
    agents: list  # [A] dicts of seed, swept values, agent
    params: dict  # [A, ...]
    act: Callable  # (params, carry, obs, is_first, noise) -> carry, action, ...
    initial_carry: Callable  # batch size -> carry


# --- mazes


def tag(name, number):
    """What names the random numbers of a maze's level or episode."""
    return np.uint32(zlib.crc32(f"{name}/{number}".encode()))


def draw(names, number, seed):
    """{name: levels} of test mazes: `number` of each, or one if all are the same."""
    fold_in = partial(jax.random.fold_in, jax.random.fold_in(jax.random.key(seed), 0))

    def sample(tags):
        rngs = {name: jax.vmap(fold_in)(tags[name]) for name in names}
        return {name: jax.vmap(amaze.TEST_MAZES[name].sample)(rngs[name]) for name in names}

    tags = {name: np.array([tag(name, i) for i in range(number)]) for name in names}
    drawn = jax.device_get(jax.jit(sample)(tags))
    fixed = lambda levels: all((x == x[:1]).all() for x in levels)
    return {k: jax.tree.map(lambda x: x[:1], v) if fixed(v) else v for k, v in drawn.items()}


def read_mazes(path, max_steps):
    """The mazes of a text file, as amaze.level_from_text takes them, blank lines between."""
    try:
        texts = re.split(r"\n\s*\n", Path(path).read_text().strip())
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path}: {getattr(error, 'strerror', 'not a text file')}") from None
    for i, text in enumerate(texts, start=1):
        try:
            level = amaze.level_from_text(text)
        except ValueError as error:
            raise Refused(f"{path}, maze {i}: {error}") from None
        yield Maze(f"{Path(path).stem}-{i}", jax.tree.map(lambda x: x[None], level), max_steps)


def choose_mazes(args):
    """The mazes that the arguments ask for, and whether they are sampled levels."""
    mazes = list(read_mazes(args.maze_file, args.max_steps)) if args.maze_file else []
    if args.suite == "sampled" and not (mazes or args.mazes):
        levels = draw(["Sampled"], args.levels, args.seed)["Sampled"]
        level = lambda i: jax.tree.map(lambda x: x[i : i + 1], levels)
        rules = amaze.TEST_MAZES["Sampled"][1:]
        return [Maze(f"Sampled-{i}", level(i), *rules) for i in range(args.levels)], True
    suite = [] if mazes else amaze.SUITES[args.suite]
    names = args.mazes.split(",") if args.mazes else suite
    try:
        amaze.check_maze_names(names)
    except ValueError as error:
        raise Refused(str(error)) from None
    drawn = draw(names, args.episodes, args.seed)
    return mazes + [Maze(name, drawn[name], *amaze.TEST_MAZES[name][1:]) for name in names], False


def stack(mazes):
    """All levels, padded to one size, and each one's maze: Level [L, ...], [L]."""
    height, width = (max(maze.levels.wall_map.shape[i] for maze in mazes) for i in (1, 2))
    pad = jax.vmap(partial(amaze.pad_level, height=height, width=width))
    levels = jax.tree.map(lambda *x: jnp.concatenate(x), *(pad(maze.levels) for maze in mazes))
    numbers = [len(maze.levels.agent_dir) for maze in mazes]
    return levels, np.repeat(np.arange(len(mazes)), numbers)


def optimal_returns(mazes):
    """[M] the best return there is, averaged over a maze's levels."""
    levels, owner = stack(mazes)
    limits = np.array([maze.max_steps for maze in mazes])[owner]
    best = jax.jit(jax.vmap(lambda level, t: amaze.optimal_return(amaze.solve(level), t)))
    return np.bincount(owner, best(levels, limits)) / np.bincount(owner)


def lay_out(mazes, episodes):
    """The Course of E episodes on each maze."""
    levels, owner = stack(mazes)
    limits = np.array([maze.max_steps for maze in mazes])
    see = np.array([maze.see_through_walls for maze in mazes])
    rules = [limits[owner]] if see.all() else [limits[owner], see[owner]]
    obs, state = jax.jit(jax.vmap(amaze.reset))(levels, *rules)
    maze = np.repeat(np.argsort(-limits, kind="stable"), episodes)
    episode = np.tile(np.arange(episodes), len(mazes))
    tags = np.array([tag(mazes[m].name, e) for m, e in zip(maze, episode)])
    slot = np.searchsorted(owner, maze) + episode % np.bincount(owner)[maze]
    start = state._replace(levels=None, walls=None, slot=jnp.arange(len(owner), dtype=jnp.int32))
    row = maze * episodes + episode
    return Course(row, tags, slot, levels, state.walls.reshape(-1), (obs, start))


# --- play


def gumbel(rng, tag, t):
    """Noise on the logits [7] at step t of an episode, so that argmax samples."""
    rng = jax.random.fold_in(jax.random.fold_in(rng, tag), t)
    return jax.random.gumbel(rng, (amaze.NUM_ACTIONS,))


def make_player(act, initial_carry, course, width):
    """open_lanes() -> lanes [W], and go_on(params, rng, lanes) -> lanes, records [STEPS, W]."""
    tags, slots, size = jnp.asarray(course.tag), jnp.asarray(course.slot), len(course.tag)
    opening = lambda turn: jax.tree.map(lambda x: x[slots[turn]], course.opening)
    levels = dict(levels=course.levels, walls=course.walls)  # the lanes share them

    def move(state, action):
        obs, state, reward, done = amaze.step(state._replace(**levels), action)
        return obs, state._replace(levels=None, walls=None), reward, done

    def step(params, rng, lanes):
        memory, obs, state, is_first, turn, taken = lanes
        noise = jax.vmap(partial(gumbel, rng))(tags[turn], state.t)
        memory, action = act(params, memory, obs, is_first, noise)[:2]
        obs, state, reward, done = jax.vmap(move)(state, action)
        record = turn, done, reward, state.t
        # after the last episode the first again: played twice, an episode gives the same result
        turn = jnp.where(done, (taken + jnp.cumsum(done) - 1) % size, turn)
        choose = lambda new, old: jnp.where(done.reshape(-1, *[1] * (old.ndim - 1)), new, old)
        obs, state = jax.tree.map(choose, opening(turn), (obs, state))
        return (memory, obs, state, done, turn, taken + done.sum()), record

    def open_lanes():
        turn, is_first = jnp.arange(width), jnp.ones(width, bool)
        return initial_carry(width), *opening(turn), is_first, turn, jnp.asarray(width)

    def go_on(params, rng, lanes):
        return jax.lax.scan(lambda lanes, _: step(params, rng, lanes), lanes, length=STEPS)

    return open_lanes, go_on


def play(act, initial_carry, params, rngs, mazes, episodes, batch_size=0, bar=None):
    """Every agent plays every maze: returns, lengths [A, M, E]. params [A, ...], rngs [A]."""
    course, on_cpu = lay_out(mazes, episodes), jax.default_backend() == "cpu"
    at_once = min(len(rngs), batch_size or len(rngs))  # agents
    width = min(len(course.row), batch_size // at_once or (128 if on_cpu else 1024))
    open_lanes, go_on = make_player(act, initial_carry, course, width)
    # on a CPU, agents that are vmapped play faster in turn than at once
    in_turn = jax.custom_batching.sequential_vmap if on_cpu else lambda function: function
    program = jax.jit(jax.vmap(in_turn(go_on)), donate_argnums=2)
    returns, lengths = np.zeros((2, len(rngs), len(course.row)))
    for i in range(0, len(rngs), at_once):
        group = jax.tree.map(lambda x: jnp.asarray(x[i : i + at_once]), (params, rngs))
        ended = lengths[i : i + at_once]  # 0 until then
        lanes = jax.jit(jax.vmap(lambda _: open_lanes()))(jnp.arange(len(ended)))
        while not ended.all():
            before = np.count_nonzero(ended)
            lanes, records = program(*group, lanes)
            turn, done, reward, t = jax.device_get(records)  # [agents, STEPS, W]
            at = i + done.nonzero()[0], course.row[turn[done]]
            returns[at], lengths[at] = reward[done], t[done]
            if bar:
                bar.update(np.count_nonzero(ended) - before)
    return (x.reshape(-1, len(mazes), episodes) for x in (returns, lengths))


def agent_keys(run, seed):
    """[A] a key for each agent, of --seed and of its training's seed."""
    rng = jax.random.fold_in(jax.random.key(seed), 1)
    return jax.vmap(partial(jax.random.fold_in, rng))(np.array([x["seed"] for x in run.agents]))


def film(run, seed, maze):
    """Pictures [h, w, 3] of the run's first agent in its first episode, with its view lit up."""
    rng, params = agent_keys(run, seed)[0], jax.tree.map(lambda x: x[0], run.params)

    @jax.jit
    def move(memory, obs, state):
        noise = gumbel(rng, tag(maze.name, 0), state.t)
        inputs = jax.tree.map(lambda x: x[None], (obs, state.t == 0, noise))
        memory, action = run.act(params, memory, *inputs)[:2]
        return memory, *amaze.step(state, action[0])

    level = jax.tree.map(lambda x: x[0], maze.levels)
    obs, state = amaze.reset(level, *maze[2:])
    memory, done, pictures = run.initial_carry(1), False, [amaze.render(state)]
    while not done:
        memory, obs, state, _, done = move(memory, obs, state)
        pictures.append(amaze.render(state))
    return pictures


# --- statistics of scores [S, M]


def iqm(scores):
    """Interquartile mean: without the lowest and the highest quarter of the scores."""
    scores = np.sort(scores, axis=None)
    cut = len(scores) // 4
    return scores[cut : len(scores) - cut].mean()


AGGREGATES = {
    "mean": np.mean,
    "median": lambda scores: np.median(scores.mean(0)),  # of the mazes' means
    "IQM": iqm,
    "optimality gap": lambda scores: 1 - np.minimum(scores, 1).mean(),
}


def worst(scores):
    """Each seed's mean over its WORST shares of the levels, ranked by solve rate [S, 3]."""
    ranked = np.sort(scores, axis=1)
    number = [math.ceil(ranked.shape[1] * share) for share in WORST.values()]
    return np.stack([ranked[:, :n].mean(1) for n in number], axis=1)


def bootstrap(scores, statistic, seed):
    """Of each of n statistics: value, 2.5% and 97.5% points [n, 3].

    Stratified: for each maze by itself, its seeds are drawn anew with replacement."""
    rng, values = np.random.default_rng(seed), []
    for _ in range(RESAMPLES):
        rows = rng.integers(len(scores), size=scores.shape)
        values.append(statistic(np.take_along_axis(scores, rows, axis=0)))
    return np.stack([statistic(scores), *np.quantile(values, (0.025, 0.975), axis=0)], axis=-1)


def summarise(scores, names, seed, sampled):
    """{maze or aggregate: value, low, high}."""
    mean = lambda scores: scores.mean(0)
    aggregates = lambda scores: np.array([f(scores) for f in AGGREGATES.values()])
    summary = dict(zip(names, bootstrap(scores, mean, seed))) if len(names) <= MANY else {}
    summary |= zip(AGGREGATES, bootstrap(scores, aggregates, seed))
    return summary | (dict(zip(WORST, bootstrap(worst(scores), mean, seed))) if sampled else {})


# --- checkpoints: data, from which nothing is executed


def import_script(recorded, given):
    """The module of a run: one of SCRIPTS beside this file, or the one that the user names."""
    if given and (recorded not in SCRIPTS or Path(given).name == recorded):
        path = Path(given)
    elif recorded in SCRIPTS:
        path = Path(__file__).resolve().with_name(recorded)
    else:
        known = ", ".join(SCRIPTS)
        raise Refused(f"made by {recorded!r}: allowed are {known}; name another by --script")
    if not (path.is_file() and path.suffix == ".py"):
        raise Refused(f"script {path}: allowed is a Python file")
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_run(path):
    """What a run folder or a file in it holds: config, update, rows and the state's dict."""
    if not path.exists():
        raise Refused("no such file or folder")
    path = path / "checkpoint.msgpack" if path.is_dir() else path
    for file in (path, path.with_name("config.json")):
        if not file.is_file():
            raise Refused(f"no {file.name}: allowed is a run's folder or a checkpoint in one")
    try:
        config = json.loads(path.with_name("config.json").read_text())
        config = {k: tuple(x) if isinstance(x, list) else x for k, x in config.items()}
        config["script"] = str(config["script"])
    except (ValueError, RecursionError, AttributeError, KeyError):
        raise Refused("config.json is none that a training wrote") from None
    try:
        data = serialization.msgpack_restore(path.read_bytes())
        rows = [data["rows"][str(i)] for i in range(len(data["rows"]))]
        rows = [row | {"seed": int(row["seed"])} for row in rows]
        return config, int(data["step"]), rows, dict(data["state"])
    except Exception:  # whatever the parser makes of foreign bytes
        raise Refused(f"{path.name} is truncated, or no checkpoint of a training") from None


def fit(expected, found, num_rows):
    """The parameters [rows, ...] of shard 0, if they have the shapes of the config's network."""
    fits = lambda x, y: y.shape == (len(y), num_rows, *x.shape) and y.dtype == x.dtype and len(y)
    try:
        params = serialization.from_state_dict(expected, found)
        fine = jax.tree.leaves_with_path(jax.tree.map(fits, expected, params))
    except (ValueError, TypeError, AttributeError, KeyError):
        raise Refused("the checkpoint's network has other parts than config.json's") from None
    for (where, ok), x in zip(fine, jax.tree.leaves(params)):
        if not ok:
            name = jax.tree_util.keystr(where, simple=True, separator="/")
            raise Refused(f"{name}, {x.shape} in the checkpoint, is not of config.json's network")
    return jax.tree.map(lambda x: x[0], params)


def load_run(path, args):
    """The Run of a checkpoint file, or of a folder's last checkpoint."""
    stored, update, rows, found = read_run(path)
    script = stored.pop("script")
    module = import_script(script, args.script)
    if unknown := set(stored) - {f.name for f in fields(module.Config)}:
        raise Refused(f"config.json: {script} does not know {', '.join(sorted(unknown))}")
    try:
        config = module.Config(**stored)
        train = module.make_train(config)
        state = jax.eval_shape(train.init, jax.random.key(0))
    except (ValueError, TypeError) as error:
        raise Refused(f"config.json: {str(error).splitlines()[0]}") from None
    role = "students" if hasattr(state, "students") else "student"
    found = dict(found.get(role) or {}).get("params")
    params = fit(getattr(state, role).params, found, len(rows))
    names = ["student"]
    if role == "students":  # [rows, S, ...]
        names = [str(i) for i in range(jax.tree.leaves(params)[0].shape[1])]
        names = ["protagonist", "antagonist"] if config.regret == "paired" else names
        params = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), params)
    wanted = {"all": names, "protagonist": names[:1]} | {name: [name] for name in names}
    if args.agent not in wanted:
        raise Refused(f"agent = {args.agent!r}: allowed are {', '.join(wanted)}")
    agents = [row | {"agent": name} for row in rows for name in names]
    chosen = [i for i, agent in enumerate(agents) if agent["agent"] in wanted[args.agent]]
    params = jax.tree.map(lambda x: x[chosen], params)
    folder = (path if path.is_dir() else path.parent).resolve()
    return Run(folder.name, folder, Path(script).stem, update, [agents[i] for i in chosen],
               params, train.act, train.initial_carry)


def load_runs(args):
    """The runs that can be had, named by their folders, and a line for each that cannot."""
    runs, refused = {}, []
    for path in dict.fromkeys(map(Path, args.runs)):
        try:
            run = load_run(path, args)
            runs.setdefault((run.folder, run.update), run)
        except (Refused, OSError) as error:
            refused.append(f"{path}: {error}")
    shared = os.path.commonpath([run.folder.parent for run in runs.values()]) if runs else ""
    name = lambda run: run.folder.relative_to(shared).as_posix()
    return [run._replace(name=name(run)) for run in runs.values()], refused


# --- results


def write(path, save):
    """A file as a whole: save(file) writes a temporary one, which then takes its place."""
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
        scores = zip((r > 0).mean(1), r.mean(1), n.mean(1), optimal)
        for maze, numbers in zip(mazes, scores):
            names = "solve_rate", "return", "length", "optimal_return"
            scores = {name: round(float(x), 6) for name, x in zip(names, numbers)}
            yield who | {"maze": maze.name, "episodes": r.shape[1]} | scores


def to_csv(table):
    """Bytes of the table; where a run lacks a swept value, its cell is empty."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in table for name in row)))
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue().encode()


def group_seeds(table):
    """{label: rows} of rows that differ in seed and maze only; [S * M] each."""
    usual = "run algorithm update agent seed maze episodes solve_rate return length optimal_return"
    updates, groups = {(row["run"], row["update"]) for row in table}, {}
    several = {run for run, _ in updates if sum(run == other for other, _ in updates) > 1}
    for row in table:
        label = row["run"] + (f" @{row['update']}" if row["run"] in several else "")
        label += f", {row['agent']}" if row["agent"] not in ("student", "protagonist") else ""
        swept = {name: x for name, x in row.items() if name not in usual.split()}
        label += "".join(f", {name} {x}" for name, x in swept.items())
        groups.setdefault(label, []).append(row)
    return groups


def print_table(lines):
    """Lines of cells, the first cell to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    for first, *others in lines:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:]))
        print("  ".join([first.ljust(widths[0]), *cells]))


def print_results(groups, summaries):
    """A table of mazes for each group, and one of all groups."""
    suite = [["solve rate"]]
    for (label, rows), summary in zip(groups.items(), summaries):
        seeds, mazes = len({row["seed"] for row in rows}), {}
        show = ("{0[0]:.3f} [{0[1]:.3f}, {0[2]:.3f}]" if seeds > 1 else "{0[0]:.3f}").format
        print(f"\n{label}: update {rows[0]['update']}, {seeds} seed(s), "
              f"{rows[0]['episodes']} episodes for each seed and maze")
        for row in rows:
            mazes.setdefault(row["maze"], []).append(row)
        lines = [["maze", "solve rate", "return", "optimal return", "length"]]
        for name in mazes if rows[0]["maze"] in summary else []:
            mean = lambda key: f"{np.mean([row[key] for row in mazes[name]]):.3f}"
            others = map(mean, ("return", "optimal_return", "length"))
            lines.append([name, show(summary[name]), *others])
        print_table(lines) if len(lines) > 1 else None
        over_all = {name: show(x) for name, x in summary.items() if name not in mazes}
        suite[0] = ["solve rate", *over_all]
        suite.append([label, *over_all.values()])
    print(f"\nover {len(mazes)} maze(s), with 95% intervals if there are several seeds")
    print_table(suite)


def plot_results(summaries, all_scores):
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
        share = (all_scores[label][..., None] > tau).mean((0, 1))
        profile.step(tau, share, where="post", color=f"C{i}")
    points.set_xticks(range(len(names)), names, rotation=45, ha="right")
    points.set(ylabel="solve rate, 95% interval over seeds", ylim=(-0.03, 1.03))
    points.grid(axis="y", alpha=0.3)
    points.legend(fontsize="small")
    profile.set(xlabel="tau", ylabel="share of seeds x mazes with solve rate > tau")
    profile.set(xlim=(0, 1), ylim=(-0.03, 1.03))
    return figure


def plot_mazes(mazes, optimal):
    """A Figure of each maze's first level."""
    mazes, columns = mazes[: 2 * MANY], min(8, len(mazes))
    rows = -(-len(mazes) // columns)
    figure = Figure(figsize=(1.8 * columns, 2.2 * rows), layout="constrained")
    for axes in (grid := figure.subplots(rows, columns, squeeze=False).ravel()):
        axes.axis("off")
    for axes, maze, best in zip(grid, mazes, optimal):
        axes.imshow(amaze.render(jax.tree.map(lambda x: x[0], maze.levels)))
        axes.set_title(f"{maze.name}\nbest return {best:.3f}", fontsize=8)
    return figure


def report(table, mazes, args, sampled, out):
    """Print the tables; write results.csv and results.png."""
    groups, names = group_seeds(table), [maze.name for maze in mazes]
    rates = {label: [row["solve_rate"] for row in rows] for label, rows in groups.items()}
    scores = {label: np.reshape(x, (-1, len(mazes))) for label, x in rates.items()}
    summaries = {k: summarise(x, names, args.seed, sampled) for k, x in scores.items()}
    print_results(groups, summaries.values())
    write(out / "results.csv", lambda file: file.write(to_csv(table)))
    figure = plot_results(summaries, scores)
    write(out / "results.png", lambda file: figure.savefig(file, format="png", dpi=150))


# --- command line


def check(args):
    least = {"levels": 1, "episodes": 1, "max_steps": 1, "batch_size": 0, "seed": 0}
    for name, number in least.items():
        if getattr(args, name) < number:
            raise Refused(f"{name} = {getattr(args, name)}: allowed is at least {number}")
    if not args.runs and not args.show_levels:
        raise Refused("no runs: allowed are folders of runs and checkpoint files")


def evaluate(args):
    """Do what the arguments ask for; returns the lines about runs that could not be had."""
    check(args)
    mazes, sampled = choose_mazes(args)
    named = {maze.name: maze for maze in mazes}
    films = args.gif.split(",") if args.gif else []
    if unknown := set(films) - set(named):
        raise Refused(f"gif = {', '.join(unknown)}: allowed are {', '.join(named)}")
    runs, refused = load_runs(args)
    if args.runs and not runs:
        return refused
    folders = [run.folder for run in runs] or [Path.cwd()]
    out = Path(args.out or os.path.relpath(os.path.commonpath(folders)))
    out.mkdir(parents=True, exist_ok=True)
    optimal, table = optimal_returns(mazes), []
    if args.show_levels:
        figure = plot_mazes(mazes, optimal)
        write(out / "mazes.png", lambda file: figure.savefig(file, format="png"))
    total = sum(len(run.agents) for run in runs) * len(mazes) * args.episodes
    with tqdm(total=total, unit="episode", dynamic_ncols=True, disable=not runs) as bar:
        for run in runs:
            bar.set_postfix_str(run.name)
            agents = run.act, run.initial_carry, run.params, agent_keys(run, args.seed)
            played = play(*agents, mazes, args.episodes, args.batch_size, bar)
            table += tabulate(run, mazes, optimal, *played)
    if table:
        report(table, mazes, args, sampled, out)
    for run, name in ((run, name) for run in runs for name in films):
        first, *others = map(Image.fromarray, film(run, args.seed, named[name]))
        durations = [100] * len(others) + [1000]  # milliseconds
        save = partial(first.save, format="GIF", save_all=True, append_images=others,
                       duration=durations, loop=0)
        write(out / f"film_{run.name.replace('/', '_')}_{run.update}_{name}.gif", save)
    return refused


def main():
    status, args = 0, tyro.cli(Arguments, description=__doc__)
    try:
        refused = evaluate(args)
    except Refused as error:
        refused = [str(error)]
    except OSError as error:
        sys.exit(f"evaluate.py: error: {error}")
    for line in refused:
        print(f"evaluate.py: error: {line}", file=sys.stderr)
        status = 2
    sys.exit(status)


if __name__ == "__main__":
    main()
