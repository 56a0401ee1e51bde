"""Links and numbers of the documents; pictures in benchmarks/figures, compared with their data."""

import argparse
import csv
import gzip
import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import amaze
import jax
import numpy as np
import pytest
from PIL import Image, ImageSequence

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "benchmarks" / "figures"
sys.path.insert(0, str(ROOT / "benchmarks"))

import alike  # noqa: E402
import baselines  # noqa: E402
import curriculum  # noqa: E402
import evaluate  # noqa: E402
import kernels  # noqa: E402
import pictures  # noqa: E402
import results  # noqa: E402
import speed  # noqa: E402
from results import MEANS, TITLES, read  # noqa: E402


def anchors(path):
    """The anchors that GitHub makes from the headings of a document."""
    for title in re.findall(r"(?m)^#+ (.*)$", path.read_text()):
        yield re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


PAGES = "README.md", "benchmarks/README.md", "benchmarks/RESULTS.md", "benchmarks/HOW.md"


@pytest.mark.parametrize("name", PAGES)
def test_links_of_documents_lead_somewhere(name):
    page = ROOT / name
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text())
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_each_picture_lies_beside_its_data():
    drawn = [path for path in FIGURES.iterdir() if path.suffix in (".png", ".gif")]
    assert {path.stem for path in drawn} >= {*pictures.PICTURES}
    for path in drawn:
        own = [path.with_suffix(end) for end in (".csv", ".json")]
        of_several = pictures.PICTURES.get(path.stem, (None, ()))[1]
        assert any(x.exists() for x in own) or of_several, path.name
        assert all([*(ROOT / "benchmarks").glob(x)] for x in of_several), path.name
    loose = [*(ROOT / "benchmarks").glob("*.png"), *(ROOT / "benchmarks").glob("*.gif")]
    assert not loose


def test_the_film_shows_the_steps_of_its_table():
    """Each row is a legal step of StandardMaze, up to the goal, and drawn as in the film."""
    maze = amaze.TEST_MAZES["StandardMaze"]
    _, state = amaze.reset(maze.sample(jax.random.key(0)), maze.max_steps)
    with open(FIGURES / "standard_maze.csv", newline="") as file:
        table = [[int(x) for x in row.values()] for row in csv.DictReader(file)]
    assert [row[0] for row in table] == list(range(len(table)))
    film = Image.open(FIGURES / "standard_maze.gif")
    frames = [(x.convert("RGB"), x.info["duration"]) for x in ImageSequence.Iterator(film)]
    shown = [frame for frame, duration in frames[:-1] for _ in range(duration // 100)]
    shown += [frames[-1][0]]
    assert len(shown) == len(table)
    act, found = jax.jit(jax.vmap(amaze.step, (None, 0))), [state]
    for _, *now in table[1:]:  # an action that changes nothing is one of the last four
        _, states, reward, done = act(found[-1], np.arange(amaze.NUM_ACTIONS))
        places = np.column_stack([states.agent_pos, states.agent_dir])
        i = np.flatnonzero((places == now).all(1))[0]
        found.append(jax.tree.map(lambda x: x[i], states))
    assert done[i]
    assert reward[i] > 0
    for k in range(0, len(table), 20):
        np.testing.assert_array_equal(amaze.render(found[k]), shown[k])


def test_paths_are_walks():
    """Paths go from the agent's place to free neighbours; solved ones end beside the goal."""
    walks = json.loads((FIGURES / "paths.json").read_text())
    for title, walk in ((k, walk) for k, episodes in walks.items() for walk in episodes):
        level, cells = amaze.level_from_text(walk["level"]), np.array(walk["cells"])
        moves = np.abs(np.diff(cells, axis=0)).sum(1)
        assert moves.max() == 1
        assert (cells[0] == level.agent_pos).all()
        assert not np.asarray(level.wall_map)[cells[:, 1], cells[:, 0]].any()
        beside = np.abs(cells[-1] - level.goal_pos).sum() == 1
        source = title.split()[-1].partition("-")[0]
        max_steps = amaze.TEST_MAZES[source][1]
        assert beside if walk["solved"] else len(cells) == max_steps
    assert {walk["solved"] for episodes in walks.values() for walk in episodes} == {True, False}


def test_the_share_of_the_commonest_start():
    start = np.array([[[3, 1], [3, 2], [3, 1], [0, 1]], [[2, 2]] * 4])
    probabilities = np.array([[0.2, 0.5, 0.4, 0.3], [0.1, 0.2, 0.3, 0.4]])
    assert np.allclose(curriculum.commonest_start(start, probabilities), [0.6 / 1.4, 1])


@pytest.mark.slow
def test_pictures_are_drawn_from_their_data(tmp_path):
    (tmp_path / "speed.json").write_text((FIGURES / "speed.json").read_text())
    commands = {
        "speed": f"speed.py --only --out {tmp_path}",
        "curriculum": f"curriculum.py {FIGURES}/curriculum.json --out {tmp_path}/curriculum.png",
        "paths": f"paths.py {FIGURES}/paths.json --out {tmp_path}/paths.png",
    }
    commands |= {name: f"pictures.py {name} --out {tmp_path}" for name in pictures.PICTURES}
    for name, words in commands.items():
        script, *words = words.split()
        subprocess.run([sys.executable, ROOT / "benchmarks" / script, *words], check=True)
        assert Image.open(tmp_path / f"{name}.png").width <= 800
    assert (tmp_path / "speed.md").read_text() == (FIGURES / "speed.md").read_text()
    by_hand = json.loads((tmp_path / "speed.json").read_text())["by-hand jaxued"]
    assert "by hand" in by_hand["machine"]


def test_agents_of_earlier_records_stay_on_the_page():
    """In benchmarks/results/play.html a new agent replaces only the agent of the same method."""
    held = lambda text: json.loads(re.search(r'id="data">\n(.*)\n</script>', text)[1])
    empty = (ROOT / "play.html").read_text()

    def page(*agents):
        agents = json.dumps([{"name": name, "seed": seed} for name, seed in agents])
        return empty.replace('"agents": []', f'"agents": {agents}')

    before = page(("plr @7", 0), ("paired @3", 0), ("plr_1650 @<", 0))
    new = page(("plr @8", 1), ("accel @9", 1))
    merged = results.keep_agents(new, before)
    names = "accel @9", "plr @8", "paired @3", "plr_1650 @<"
    assert [x["name"] for x in held(merged)["agents"]] == [*names]
    assert "<" not in re.search(r'id="data">\n(.*)\n', merged)[1]
    cut = lambda text: re.sub(r'id="data">\n.*\n', "", text)
    assert cut(merged) == cut(empty)
    assert results.keep_agents(new, "") == new
    shown = held((ROOT / "benchmarks" / "results" / "play.html").read_text())["agents"]
    assert {"accel", "plr", "dr", "paired"} <= {x["name"].split()[0] for x in shown}


def test_no_agent_is_kept_of_paired(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "read_config", lambda run: {"seeds": 8})
    monkeypatch.setattr(results, "read_checkpoint", lambda path: {"state": {"students": {}}})
    results.keep_first_agent(tmp_path, tmp_path / "agent")
    assert not (tmp_path / "agent").exists()


def test_a_row_is_recorded_where_there_is_no_git(tmp_path, monkeypatch):
    shutil.copytree(pictures.RESULTS / "accel_optimistic", tmp_path / "accel_optimistic")
    said = (tmp_path / "accel_optimistic" / "tables.txt").read_text().strip()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    for changed in ("first", "--score optimistic_max_mc"):  # the second replaces the first
        options = argparse.Namespace(results=tmp_path, changed=changed)
        results.record("accel_optimistic", options, said)
    [row] = read(tmp_path / "records.csv")
    assert row.pop("commit") == "unknown"
    [known] = [x for x in read(pictures.RESULTS / "records.csv") if x["method"] == row["method"]]
    assert row == {k: known[k] for k in row}


@pytest.mark.parametrize("devices", [1, 2])
def test_one_device_is_timed_once(devices, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    driver = argparse.Namespace(
        bare=lambda *words: [("bare network", None, {})],
        training=lambda script, cycle, core, seeds, devices: (seeds, devices),
    )
    found = [
        run
        for library in (speed.ONE, "ours")
        for name, run, _ in speed.train_programs(library, driver, "dr", "lstm", [1, 4])
        if name != "bare network"
    ]
    assert found == [(1, 0), (4, 0)] if devices == 1 else [(1, 1), (1, 0), (4, 0)]


def test_checkouts_that_train_alike_are_told_from_others(tmp_path, capfd):
    script = """
import dataclasses
import types
import jax.numpy as jnp

@dataclasses.dataclass(frozen=True)
class Config:
    lr: float = 0.5
    num_updates: int = 3
    robust: bool = True

FAST = Config(lr=1.0)

def make_train(config):
    assert (config.num_updates, config.robust) == (20, config.lr == 1.5)
    def update(state, cycles):
        return {"params": STEP}, {"loss": jnp.float32(config.lr), "blank": jnp.float32(jnp.nan)}
    return types.SimpleNamespace(init=lambda rng: {"params": jnp.zeros(2)}, update=update)
"""
    for name, step in {"a": "state['params'] + config.lr", "b": "state['params'] + 1"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "toy.py").write_text(script.replace("STEP", step))
    call = lambda *items: alike.main(tmp_path / "a", "toy.py", *items, here=tmp_path / "b")
    assert not call("robust=False")
    assert capfd.readouterr().out == "toy.py: 0 of 3 arrays differ\n"
    assert call("lr=1.5")
    assert capfd.readouterr().out == "state['params']: 10.0\ntoy.py: 1 of 3 arrays differ\n"


def test_kernels_are_counted_loop_by_loop():
    """Trips multiply what is in a loop; graphs and copies are counted separately."""
    hlo = """
  %while.1 = while(%a), backend_config={"known_trip_count":{"n":"5"}}, metadata={op_name="scan"}
  %while.2 = while(%b), metadata={op_name="flood"}
"""
    thunks = """000: kCustomKernel [source] loop_add
001: kWhile [prev]
  condition:
    000: kCustomKernel [source] not_counted
  body:
    000: kCommandBuffer [source]
      001: kCustomKernel [source] in_a_graph
      002: kCopy [source]
    003: kWhile [prev]
      body:
        000: kCustomCall [source]
        001: kAsyncStart [source]
004: kConditional [prev]
  000: kCopy [source]
"""
    blocks = ((1, "while.1"), (3, "while.2"), (4, "cond"))
    block = 'thunk_metadata {{ thunk_info {{ thunk_id: {} profile_annotation: "{}" }} }}'
    metadata = "\n".join(block.format(*x) for x in blocks)
    names = kernels.read_names(metadata)
    assert names == dict(blocks)
    update = kernels.read_thunks(thunks, names, kernels.read_trips(hlo))
    [scan, branches] = update.inner
    assert (scan.trips, scan.where, scan.graphs) == (5, "scan", 1)
    assert (scan.kernels, scan.copies) == (1, 1)
    assert scan.inner[0].trips is None
    assert branches.name == "branches cond"
    nodes = [update.total(lambda x: x.kernels + x.copies, until) for until in (0, 1, 60)]
    assert nodes == [1 + 5 * 2 + 1, 1 + 5 * 3 + 1, 1 + 5 * 62 + 1]
    assert update.total(lambda x: x.graphs, 0) == 5
    assert update.until() == 1


AHEAD = (1, 0), (0, 1), (-1, 0), (0, -1)  # of the directions


def follow_the_wall(level, max_steps, turn):
    """Follow the wall on the map, in plain Python -> number of actions to the goal, 0 if there are
    too many. turn: 1 the right hand, -1 the left."""
    walls, (x, y), d, goal = level
    height, width = walls.shape
    free = {(x, y) for y in range(height) for x in range(width) if not walls[y, x]}
    goal, d, held = tuple(goal.tolist()), int(d), False
    for t in range(1, max_steps + 1):
        near = {k: (x + AHEAD[(d + k) % 4][0], y + AHEAD[(d + k) % 4][1]) for k in (0, turn, -turn)}
        beside = near[turn] not in free
        if near[0] == goal:
            return t
        if goal in near.values():
            d += next(k for k, cell in near.items() if cell == goal)
        elif held and not beside:
            d += turn
        elif near[0] not in free:
            d -= turn
        else:
            x, y = near[0]
        held = beside
    return 0


def test_a_hand_on_the_wall_walks_as_by_the_map():
    """It sees the cells beside it, even where walls hide what is behind them."""
    names = "FourRooms", "SimpleCrossing", "Rings", "Comb", "SmallCorridor", "Sampled"
    args = evaluate.Arguments(episodes=12)
    mazes, rng = evaluate.draw_mazes(names, args), jax.random.key(0)[None]
    lengths, unsolved = [], 0
    for name, turn in {"right hand": 1, "left hand": -1}.items():
        returns, steps = evaluate.play(baselines.BASELINES[name], (), rng, mazes, 12)
        for maze, r, n in zip(mazes, returns[0], steps[0]):
            levels = list(zip(*map(np.asarray, maze.levels)))
            for i in range(12):
                expected = follow_the_wall(levels[i % len(levels)], maze.max_steps, turn)
                assert n[i] == (expected or maze.max_steps), maze.name
                assert (r[i] > 0) == (expected > 0)
                unsolved += expected == 0
                lengths.append(expected)
    assert len({*lengths}) > 40
    assert 20 < unsolved < len(lengths) / 2


def test_the_means_of_the_baselines_are_of_their_mazes():
    with open(ROOT / "benchmarks" / "results" / "baselines.csv", newline="") as file:
        table = list(csv.DictReader(file))
    for suite, names in amaze.SUITES.items():
        rows = {row["maze"]: row for row in table if row["suite"] == suite}
        if suite == "sampled":
            assert list(rows) == ["mean", *evaluate.WORST]
            continue
        assert list(rows) == [*names, "mean"]
        for player in baselines.BASELINES:
            rates = [float(rows[name][player]) for name in names]
            assert float(rows["mean"][player]) == pytest.approx(np.mean(rates), abs=1e-3)


# The figures of RESULTS.md and of README.md's tables

NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e\d+)?"


def tables(path):
    """Rows of a document's tables, as dicts by column title; `section` is the heading above."""
    head, section = None, ""
    for line in path.read_text().splitlines():
        cells = [x.strip() for x in line.strip("|").split("|")]
        if line.startswith("#"):
            section = line.strip("# ")
        if not line.startswith("|"):
            head = None
        elif head is None:
            head = cells
        elif not cells[0].startswith("---"):
            yield dict(zip(head, cells), section=section)


def timed(section, library, name, column="ours is faster by"):
    """A cell of figures/speed.md; library "ours" has as many devices as the command line takes."""
    library = "**this project**" if library == "ours" else library
    [row] = [
        row for row in tables(FIGURES / "speed.md")
        if (row["section"], row.get("library"), row.get(section)) == (section, library, name)
    ]  # fmt: skip
    return float(row[column])


def trained(name, column="ours is faster by", library="ours", section="train", seeds=1):
    return timed(section, library, f"{name} --rnn lstm, {seeds} seed(s)", column)


def on_gpu(name, column="steps_per_s", folder="h200"):
    path = pictures.RESULTS / "gpu" / folder / "table.md"
    [row] = [row for row in tables(path) if row["name"] == name]
    return float(row[column].replace(",", ""))


def on_gpu_minutes(name, cycles):
    """Half of PLR's cycles replay."""
    return cycles * sum(on_gpu(name.format(x), "ms") for x in ("replay", "fresh")) / 2 / 6e4


def whole_minutes(name):
    return on_gpu(f"{name} fast", "training_s", "h200_whole") / 60


def whole_rates(name):
    table = read(pictures.RESULTS / "gpu" / "h200_whole" / f"{name}_dcd.csv")
    assert len(table) == 32 * len(amaze.SUITES["dcd"])
    return pictures.interval(np.array([float(x["solve_rate"]) for x in table]).reshape(32, -1))


@cache
def gpu_log(name):
    with gzip.open(pictures.RESULTS / "gpu" / f"{name}.csv.gz", "rt") as file:
        return list(csv.DictReader(file))


def swept(**values):
    """The rates of `families` at the end of each training of the sweep that has these values, else
    the published ones; None: any."""
    rows = gpu_log("h200_whole/paired_sweep")
    values = {"ent_coef": 1e-3, "vf_coef": 0.5, "teacher_lr": 1e-3} | values
    has = lambda row: all(x is None or float(row[k]) == x for k, x in values.items())
    rows = [x for x in rows if x["update"] == rows[-1]["update"] and has(x)]
    columns = [f"eval_solve_rate/{maze}" for maze in amaze.SUITES["families"]]
    return np.array([np.mean([float(row[x]) for x in columns]) for row in rows])


def recorded(method, commit, column="dcd"):
    rows = read(pictures.RESULTS / "records.csv")
    [row] = [row for row in rows if (row["method"], row["commit"]) == (method, commit)]
    return float(row[column].split()[0])


def of_mazes(*names, suite="dcd"):
    """The least and the greatest mean over seeds of the four better methods on these mazes."""
    found = []
    for method in pictures.METHODS[:4]:
        rates, mazes = pictures.scores(pictures.RESULTS / method, suite)
        found += [rates[:, mazes.index(name)].mean() for name in names]
    return min(found), max(found)


def of_a_maze(method, name, seed=slice(None)):
    rates, mazes = pictures.scores(pictures.RESULTS / method, "dcd")
    return rates[seed, mazes.index(name)].mean()


def logged(method, column, update):
    """A column of logs.csv in one cycle, for all seeds."""
    rows = read(pictures.RESULTS / method / "logs.csv")
    return np.array([float(row[column]) for row in rows if row["update"] == str(update)])


def unlearned(suite, maze, player):
    rows = read(pictures.RESULTS / "baselines.csv")
    [row] = [row for row in rows if (row["suite"], row["maze"]) == (suite, maze)]
    return float(row[player])


def over_seeds(name, column, cycle):
    """The mean over seeds of a column of a run's log in a cycle."""
    return np.nanmean(logged(name, column, cycle))


def correlation(score, cycle, run="plr_3300_traced"):
    return over_seeds(run, f"rank_correlation_{score}", cycle)


def craftax(update, column):
    [row] = [row for row in read(FIGURES / "craftax.csv") if row["update"] == str(update)]
    return float(row[column])


def mean(method, suite="dcd"):
    return pictures.interval(pictures.scores(pictures.RESULTS / method, suite)[0])


def worst(method, share="worst 10%"):
    return pictures.worst(method, share)[:, 0].mean()


def extremes(method):
    rates = pictures.of_seeds(method)
    return rates.min(), rates.max()


def changed(found, *names):
    return [x for name in names for x in found[name][:2]]


def replayed(temperature):
    rates = pictures.families(pictures.SEARCH / "temperature.csv", "temperature", temperature)
    return pictures.interval(rates)


def chosen(change, script="plr.py", cycles="1600", seeds=6, suite="families"):
    """The seeds of trainings in oracle.csv, by the true regret if no score is named."""
    rows, which = read(pictures.SEARCH / "oracle.csv"), (script, change, cycles)
    found = [row for row in rows if (row["script"], row["changed"], row["num_updates"]) == which]
    assert len(found) == seeds
    return np.array([float(row[suite]) for row in found])


def of_rates(score, suite="families"):
    """PLR's `--fast` at learning rates 6e-3 and 2e-3: eight seeds on a GPU and those on a CPU."""
    path = pictures.RESULTS / "gpu" / "h200_lr" / f"plr_lr_{score}_{suite}.csv"
    card = {x: [float(r["solve_rate"]) for r in read(path) if float(r["lr"]) == x]
              for x in (0.006, 0.002)}  # fmt: skip
    card = [np.array(x).reshape(8, len(amaze.SUITES[suite])).mean(1) for x in card.values()]
    change = {"oracle": "lr=0.006 annealed", "mc": "score=max_mc lr=0.006"}[score]
    record = pictures.of_seeds({"oracle": "plr_oracle", "mc": "plr"}[score], suite)
    cpu = chosen(change, cycles="7500", seeds=8, suite=suite), record
    return [np.append(*both) for both in zip(card, cpu)]


def at_rates(new, old):
    """The means at the learning rates 2e-3 (old) and 6e-3 (new), and the gain."""
    return [old.mean(), new.mean(), *pictures.gain(new, old)]


def faster_accel(suite="families"):
    """ACCEL by the true regret at learning rate 6e-3, six seeds and then eight others."""
    return chosen("lr=0.006 annealed", "accel.py", "4800", 14, suite)


def hardest(change, script="plr.py", cycles="7500", seeds="0 to 7"):
    """What trainings of oracle.csv solve of their hardest hundredth of random levels."""
    rows = read(pictures.SEARCH / "hardest.csv")
    [row] = [
        row for row in rows if (row["script"], row["changed"]) == (script, change)
        and (row["num_updates"], row["seeds"]) == (cycles, seeds)
    ]  # fmt: skip
    return float(row["worst 1%"].split()[0])


def entropy(changed, cycle):
    """The mean over seeds of the policy's entropy."""
    rows = [x for x in read(pictures.SEARCH / "entropy.csv") if x["changed"] == changed]
    return np.mean([float(x["entropy"]) for x in rows if x["cycle"] == str(cycle)])


def by_length(low, high=np.inf):
    """The mean solve rate of random levels whose shortest path is low <= length < high."""
    rows = read(pictures.SEARCH / "random_levels.csv")
    rows = [row for row in rows if low <= int(row["path_length"]) < high]
    return np.mean([float(row[f"seed {i}"]) for row in rows for i in range(6)])


def shares(run):
    """The share of the commonest start at the end of each seed of the runs so named."""
    rows = [x for x in read(pictures.SEARCH / "starts.csv") if x["run"].startswith(run)]
    end = max(int(x["cycle"]) for x in rows)
    return [float(x["share"]) for x in rows if int(x["cycle"]) == end]


def less_decided():
    rows = read(pictures.SEARCH / "less_decided.csv")
    found = {(row["divisor"], row["suite"]): row for row in rows}
    of = lambda suite, column: [float(found[x, suite][column]) for x in ("1", "1.5")]
    return 1.5, *of("sampled", "worst 1%"), *of("families", "mean")


def row_of_results(name):
    """The numbers of a method in RESULTS.md's table of all methods, from the files of results/."""
    return [len(pictures.of_seeds(name)), pictures.minutes(name), *mean(name), extremes(name)[0],
            *mean(name, "families"), worst(name), worst(name, "worst 1%")]  # fmt: skip


def less(one, other, suite="dcd"):
    """The absolute difference between two methods: value, low, high."""
    value, low, high = pictures.difference(one, other, suite)
    return (value, low, high) if value > 0 else (-value, -high, -low)


def from_paired():
    gaps = [pictures.difference(x, "paired", "families")[0] for x in pictures.METHODS[:4]]
    return min(gaps), max(gaps)


def gained(name, suite="dcd"):
    return pictures.interval(pictures.averaging(name, suite))


def navix(run, level=None):
    """A run's mean solve rate on one kind of NAVIX's layouts, or on all."""
    [levels] = [x for name, x in pictures.of_levels("navix").items() if name == run]
    return np.mean([levels[level]] if level else [*levels.values()])


def cartpole(level=None):
    """Each run's mean solve rate on a level (such as random physics), or on all corners."""
    found = pictures.of_levels("cartpole")
    corners = lambda levels: [v.mean() for k, v in levels.items() if k != "random physics"]
    pick = lambda levels: levels[level].mean() if level else np.mean(corners(levels))
    return [pick(found[run]) for run in ("dr", "plr", "accel")]


LARGE = "lr=0.003 annealed hidden_size=128"  # in oracle.csv
WHOLE = f"{LARGE} bptt_horizon=256"
FULL = {"plr.py": "7500", "accel.py": "4800"}  # cycles of `--fast`
RESULTS = {  # what RESULTS.md says: what it should be, of what lies in benchmarks/
    **{f"| {TITLES[x]}{' | {}' * 3} [{{}}, {{}}]{' | {}' * 2} [{{}}, {{}}]{' | {}' * 2} |":
       lambda x=x: row_of_results(x) for x in pictures.METHODS},
    **{f"| {TITLES[x]}, true regret | {{}} | |{' {} [{}, {}] | {} |' * 2} {{}} |":
       lambda x=x: np.delete(row_of_results(f"{x}_oracle"), 1) for x in ("plr", "accel")},
    **{f"| {TITLES[x]}, optimistic | {{}} | |{' {} [{}, {}] | {} |' * 2} {{}} |":
       lambda x=x: np.delete(row_of_results(f"{x}_optimistic"), 1) for x in ("plr", "accel")},
    "reports {} for ACCEL, {} for PLR, {} for DR and {} for PAIRED":
        lambda: [MEANS[x] for x in ("accel", "plr", "dr", "paired")],
    "rate of PLR after {}, {} and {} minutes":
        lambda: [pictures.minutes(x) for x in pictures.LENGTHS],
    "PLR solves {} [{}, {}] of dcd's mazes after {} minutes, as much as after {}, and {} [{}, {}] "
    "after {}.": lambda: [
        *mean("plr_3300"), pictures.minutes("plr_3300"), pictures.minutes("plr"),
        *mean("plr_1650"), pictures.minutes("plr_1650")],
    "On `families` ({}, {}, {}) and on the hardest tenth of random levels ({}, {}, {})":
        lambda: [mean(x, "families")[0] for x in pictures.LENGTHS]
        + [worst(x) for x in pictures.LENGTHS],
    "ahead of PLR by {}, and": lambda: less("accel", "plr")[:1],
    "behind PLR by {} [{}, {}] and behind SFL by {} [{}, {}].": lambda: [
        *less("accel", "plr", "families"), *less("accel", "sfl", "families")],
    "behind every other method by {} to {} on `families`,": from_paired,
    "ACCEL's between {} and {} on dcd's mazes.": lambda: extremes("accel"),
    "PLR's first eight seeds are {} ahead of `max_mc` there, the next eight {}.": lambda: [
        part.mean() - mean("plr")[0] for part in pictures.of_seeds("plr_optimistic").reshape(2, 8)],
    "ACCEL solves {} [{}, {}] by `oracle_regret` for {} by `max_mc`, PLR {} [{}, {}] for {}.":
        lambda: [f for x in ("accel", "plr") for f in (
            *pictures.worst(f"{x}_oracle", "worst 1%").ravel(), worst(x, "worst 1%"))],
    "Of `families` ACCEL solves {} [{}, {}] more and PLR {} [{}, {}] more;": lambda: [
        f for x in ("accel", "plr") for f in less(f"{x}_oracle", x, "families")],
    "of dcd's mazes ACCEL solves {} [{}, {}] less and PLR {} [{}, {}] more.": lambda: [
        *less("accel", "accel_oracle"), *less("plr_oracle", "plr")],
    "{} minutes suffice for {} [{}, {}] of dcd's mazes, {} of `families` and {} of the hardest "
    "tenth (16 seeds, eight of them since the rate was chosen). Whole trainings gain nothing by it "
    "(six seeds: {} of `families` for {}).":
        lambda: [
            pictures.minutes("plr_1650_optimistic"), *mean("plr_1650_optimistic"),
            mean("plr_1650_optimistic", "families")[0], worst("plr_1650_optimistic"),
            chosen("score=optimistic_max_mc lr=0.006", cycles="7500").mean(),
            mean("plr_optimistic", "families")[0]],
    "| by `max_mc` PLR {}; by true regret ACCEL {} |": lambda: [
        worst(x, "worst 1%") for x in ("plr", "accel_oracle")],
    "no difference to SFL ({} [{}, {}] more": lambda: less("sfl_oracle", "sfl", "families"),
    "it gains {} [{}, {}] of dcd's mazes, {} [{}, {}] of `families`, and ACCEL nothing ({} [{}, "
    "{}]; {} [{}, {}]).": lambda: [
        f for x in ("plr", "accel") for suite in ("dcd", "families")
        for f in pictures.difference(f"{x}_optimistic", x, suite)],
    "10 minutes | {} (LSTM: {}), by cycles | missed |": lambda: [
        on_gpu_minutes(f"plr published 8 {{}}{x}", 60_000) for x in (", s5", "")],
    "its levels hold {} to {} of the replay probability by `optimistic_max_mc`, {} to {} by the "
    "true regret, in PLR {} to {}.": lambda: [
        f(shares(x)) for x in ("accel_optimistic", "accel_oracle", "plr") for f in (min, max)],
    "60 walls lose {}, twice the entropy bonus {}, in ACCEL 5 edits {}.":
        lambda: [
            chosen("", script).mean() - chosen(x, script).mean()
            for script, x in (("plr.py", "n_walls=60"), ("plr.py", "ent_coef=0.02"),
                              ("accel.py", "num_edits=5"))],
    "| PLR, true regret | 16, 16 | {} | {} | {} [{}, {}] |": lambda: at_rates(*of_rates("oracle")),
    "| ACCEL, true regret | 8, 14 | {} | {} | {} [{}, {}] |": lambda: at_rates(
        faster_accel(), pictures.of_seeds("accel_oracle", "families")),
    "| PLR, `max_mc` | 24, 16 | {} | {} | {} [{}, {}] |": lambda: at_rates(*of_rates("mc")),
    "| ACCEL, `max_mc` | 16, 8 | {} | {} | {} [{}, {}] |": lambda: at_rates(
        chosen("score=max_mc lr=0.006", "accel.py", "4800", 8),
        pictures.of_seeds("accel", "families")),
    "| DR | 8, 14 | {} | {} | {} [{}, {}] |": lambda: at_rates(
        chosen("lr=0.006", "dr.py", "4700", 14), pictures.of_seeds("dr", "families")),
    "without them it gains {} [{}, {}] and {} [{}, {}].": lambda: [
        *pictures.gain(
            faster_accel()[6:], pictures.of_seeds("accel_oracle", "families")),
        *pictures.gain(
            chosen("lr=0.006 annealed", cycles="7500", seeds=8),
            pictures.of_seeds("plr_oracle", "families"))],
    "eight seeds of PLR solve {} of the hardest hundredth by the true regret and {} by `max_mc`, "
    "ACCEL {} and {}; of dcd's mazes {} and {}, {} and {}.": lambda: [
        *(f for script, cycles in FULL.items() for f in (
            hardest("lr=0.006 annealed", script, cycles),
            hardest("score=max_mc lr=0.006", script, cycles))),
        chosen("lr=0.006 annealed", cycles="7500", seeds=8, suite="dcd").mean(),
        chosen("score=max_mc lr=0.006", cycles="7500", seeds=8, suite="dcd").mean(),
        faster_accel("dcd")[6:].mean(),
        chosen("score=max_mc lr=0.006", "accel.py", "4800", 8, "dcd").mean()],
    "entropy ends at {} for {}, and PLR solves {} of the hardest hundredth for {}.": lambda: [
        *(entropy(f"score=oracle_regret {x}lr=0.006", 7500) for x in ("ent_coef=0.015 ", "")),
        *(hardest(f"lr=0.006 annealed{x}") for x in (" ent_coef=0.015", ""))],
    "14 seeds, {} times the minutes) solve {} of it, and {} of `families` for {}, {} of dcd's "
    "mazes for {}. The LSTM alone solves {}.": lambda: [
        2.3, np.average([hardest(WHOLE, seeds=x) for x in ("100 to 105", "0 to 3", "4 to 7")],
                   weights=[6, 4, 4]),
        *(f for suite in ("families", "dcd") for f in (
            chosen(WHOLE, cycles="7500", seeds=14, suite=suite).mean(),
            chosen("lr=0.006 annealed", cycles="7500", seeds=8, suite=suite).mean())),
        hardest(LARGE, seeds="100 to 105")],
    "PLR solves {} of `families` after 3,300 cycles (six seeds), {} [{}, {}] more than by `max_mc` "
    "and {} [{}, {}] more than by the true regret.": lambda: [
        mean("plr_3300_optimistic", "families")[0],
        *(f for x in ("plr_3300", "plr_3300_oracle")
          for f in less("plr_3300_optimistic", x, "families"))],
    "it solves {} [{}, {}] of `families` with the published values, {} with a bonus of 1e-2 in "
    "place of 1e-3, {} with a value loss of weight 2 ({}), and {} [{}, {}] with both":
        lambda: [*pictures.interval(swept()), swept(ent_coef=1e-2).mean(),
                 swept(vf_coef=2).mean(), 0.5, *pictures.interval(swept(ent_coef=1e-2, vf_coef=2))],
    "seeds solve {} of dcd's mazes, where it had {}.": lambda: [
        mean("paired")[0], recorded("paired", "94ed626")],
    "cycles more, eight seeds solve {} of dcd's mazes, {} [{}, {}] less than with an antagonist, "
    "and {} of `families`, as many.": lambda: [
        mean("paired_oracle")[0], *less("paired", "paired_oracle"),
        mean("paired_oracle", "families")[0]],
    "(its entropy ends at {}, by chance {}).": lambda: [
        logged("paired", "teacher_entropy", 1850).mean(), np.log(13**2)],
    "rate PAIRED loses {} [{}, {}]; by the true regret such a teacher puts the goal of {} to {} of "
    "its levels in one cell.": lambda: [
        *pictures.interval(np.subtract(*(
            swept(ent_coef=None, vf_coef=None, teacher_lr=x) for x in (1e-3, 5e-3)))),
        *(f(float(row["goal"]) for row in read(pictures.SEARCH / "designs.csv")
            if row["cycle"] == "2775") for f in (min, max))],
    "On Rings the four better methods solve {} to {}, on FourRooms {} to {}, and PLR solves {} of "
    "LargeCorridor.": lambda: [
        *of_mazes("Rings", suite="families"), *of_mazes("FourRooms"),
        of_a_maze("plr", "LargeCorridor")],
    "The left hand solves {} of dcd's mazes, more than any method here, the right hand {} and "
    "random actions {}: dcd": lambda: [
        unlearned("dcd", "mean", x) for x in ("left hand", "right hand", "random")],
    "hand solves {}, and it never": lambda: [unlearned("sampled", "mean", "left hand")],
    "whose shortest path has 30 cells or more it solves {}, of those below 10 cells {}.":
        lambda: [by_length(30), by_length(0, 10)],
    "logits are divided by {}, untrained, the hardest hundredth rises from {} to {}, but "
    "`families` fall from {} to {}.": less_decided,
    "walls is {} in cycle 250, {} in cycle 1,000 and {} in cycle 4,750, after {} generations":
        lambda: [logged("accel", "buffer_walls_weighted", x).mean() for x in (250, 1000, 4750)]
        + [logged("accel", "buffer_mutations_weighted", 4750).mean()],
    "has {} [{}, {}] of `families` after 1,600 cycles": lambda: replayed(1),
    "it has {} [{}, {}].": lambda: replayed(0.01),
    "it gains {} [{}, {}] on dcd's mazes for DR and {} [{}, {}] for PLR at a constant rate; "
    "ACCEL's {} is": lambda: [*gained("dr"), *gained("plr_3300"), gained("accel")[0]],
    "hardest hundredth PLR pays: {} with its last parameters, with the mean {}.": lambda: [
        recorded("plr", x, "worst 1% of random levels") for x in ("fd9687e", "c26a5df")],
    "may help PLR ({}, standard error {}), solvable levels only may help SFL ({}, {}), and PLR "
    "less ({}, {}).": lambda: [
        *changed(pictures.plr_effects(), "two_epochs"),
        *changed(pictures.sfl_effects(), "solvable_only"),
        *changed(pictures.plr_effects(), "solvable_only")],
    "JaxUED takes {} times as long for an update of DR as this project, and minimax {} times, or "
    "{} with statistics of levels, as ours; for PLR it is {}, {} and {}, for PAIRED "
    "minimax takes {} times": lambda: [
        *(f for x in ("dr", "plr replay cycle") for f in (
            trained(x, library="jaxued", section="by-hand"),
            trained(x, library="minimax, no level metrics"), trained(x, library="minimax"))),
        trained("paired", library="minimax", section="paired")],
    "32 seeds of PLR's `--fast` train in {} minutes and then solve {} [{}, {}] of dcd's mazes, "
    "DR's in {} and {} [{}, {}], as on a CPU": lambda: [
        f for x in ("plr", "dr") for f in (whole_minutes(x), *whole_rates(x))],
    "{} seeds of DR at once make {} million steps a second, 32 of PLR {} in replay cycles, "
    "published {}.": lambda: [
        2048, on_gpu("dr fast 2048 plain", folder="h200_lr") / 1e6,
        *(on_gpu(x) / 1e6 for x in ("plr fast 32 replay", "plr published 32 replay"))],
    "a minute or two), ACCEL's in {}. ": lambda: [
        on_gpu("accel fast, sweep", "training_s", "h200_lr") / 60],
    "DR solves {} of random physics, PLR {} and ACCEL {}, and on six extreme settings they have "
    "{}, {} and {}.": lambda: [*cartpole("random physics"), *cartpole()],
    "one seed, {} million steps: the return grows from {} to {} on four fixed test worlds.":
        lambda: [craftax(250, "env_steps") / 1e6,
                 craftax(50, "eval_return"), craftax(250, "eval_return")],
    "SFL solves {} of five kinds of layouts, ACCEL {}, DR {} and PLR {}, with": lambda: [
        navix(x) for x in ("sfl", "accel", "dr", "plr")],
    "against the true regret ({} to {}), {} of which lies": lambda: [
        max(x := [correlation(k, 150) for k in list(pictures.SCORES)[:4]]), min(x),
        over_seeds("plr_3300_traced", "never_solved_regret_share", 150)],
    "L1 value loss ends at {} by TRACED, at {} by the true regret.": lambda: [
        correlation("l1_value_loss", *at) for at in ((3300,), (7500, "plr_oracle"))],
    "from cycle 150 ({}) to the last ({}).": lambda: [
        correlation("optimistic_max_mc", x, "plr_optimistic") for x in (150, 7500)],
    "| dr {}, plr replay {}; dr {} by hand |": lambda: [
        *(trained(x, "x one seed, one device") for x in ("dr", "plr replay cycle")),
        trained("dr", "x one seed, one device", section="by-hand")],
    "| {} s |": lambda: [trained("plr", "s", section="compile")],
    "| {}, {}, {}; {}, {}, {} |": lambda: [
        f(x) for f in (lambda x: mean(x)[0], lambda x: extremes(x)[0])
        for x in ("accel", "plr", "sfl")],
    "DR `--fast`: 0.90, worst seed 0.80 | {}, {} |":
        lambda: [mean("dr")[0], extremes("dr")[0]],
    "PAIRED `--fast`: 0.80, worst seed 0.65 | {}, {} |":
        lambda: [mean("paired")[0], extremes("paired")[0]],
    "| PLR {}, {}; {}; {}; ACCEL {}, {}; {}; {} |": lambda: [
        f(x) for x in ("plr_oracle", "accel_oracle")
        for f in (lambda x: mean(x)[0], lambda x: extremes(x)[0],
                  lambda x: mean(x, "families")[0], lambda x: worst(x, "worst 1%"))],
    "| PLR {}, {}; optimistic {}, {} |": lambda: [
        mean(f"plr_{x}")[0] for x in ("1650", "3300", "1650_optimistic", "3300_optimistic")],
}  # fmt: skip
OF_README = {  # likewise
    "ACCEL solves {} of twelve unseen mazes after {} minutes of one CPU core, PLR by an optimistic "
    "score {} after {}; minimax's paper has {} and {}": lambda: [
        *(f(x) for x in ("accel", "plr_1650_optimistic")
          for f in (lambda x: mean(x)[0], pictures.minutes)),
        *(MEANS[x] for x in ("accel", "plr"))],
    "`plr.py --fast --seeds {}` trains 32 agents in {} minutes, after a minute or two of "
    "compiling; they solve {} of the": lambda: [
        32, whole_minutes("plr"), whole_rates("plr")[0]],
    "ACCEL leads PLR here by {} ({} to {})": lambda: less("accel", "plr"),
    "but only {} of random levels. The": lambda: [unlearned("sampled", "mean", "left hand")],
    "ACCEL solves {} of its worst 1% of random levels, else {}, but": lambda: [
        worst(x, "worst 1%") for x in ("accel_oracle", "accel")],
}  # fmt: skip
UNCHECKED = [  # regular expressions of what is no measurement, or has no file
    r"jax \d+\.\d+\.\d+",
    r"see a difference of 0\.05:",
    r"only the best level \(0\.01\)",  # a temperature
]


def plain(path):
    """A document's text on one line, without code blocks and the targets of links."""
    text = re.sub(r"(?ms)^```.*?^```$", "", path.read_text())
    return " ".join(re.sub(r"\]\([^)]*\)", "]", text).split())


def same(shown, value):
    """Whether a shown number equals a value, up to the digits that are shown."""
    shown = shown.replace(",", "")
    mantissa, _, power = shown.partition("e")
    unit = 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]))
    return abs(float(shown) - value) <= 0.5 * unit * (1 + 1e-6)


def test_numbers_are_compared_as_they_are_shown():
    assert same("0.89", 0.8945)
    assert not same("0.90", 0.8945)
    assert same("3.3e9", 3_319_400_486)
    assert not same("3.4e9", 3_319_400_486)
    assert same("-0.05", -0.046)
    assert not same("+0.05", -0.046)
    assert same("7,500", 7500)


PAGE, README = plain(ROOT / "benchmarks" / "RESULTS.md"), plain(ROOT / "README.md")


def spans(sentence, page=PAGE):
    """The places of a sentence's numbers in a page; the sentence must occur once."""
    pattern = re.escape(sentence).replace(re.escape("{}"), f"({NUMBER})").replace(r"\ ", " ")
    found = [*re.finditer(pattern, page)]
    assert len(found) == 1, f"{len(found)} times there: {sentence}"
    return [found[0].span(i + 1) for i in range(found[0].re.groups)]


SENTENCES = [(x, PAGE, values) for x, values in RESULTS.items()]
SENTENCES += [(x, README, values) for x, values in OF_README.items()]


@pytest.mark.parametrize("sentence, page, values", SENTENCES, ids=range(len(SENTENCES)))
def test_pages_say_what_the_files_say(sentence, page, values):
    shown, values = [page[a:b] for a, b in spans(sentence, page)], [*values()]
    assert len(shown) == len(values)
    wrong = [(x, float(value)) for x, value in zip(shown, values) if not same(x, value)]
    assert not wrong, f"shown, computed: {wrong}"


def test_every_figure_of_results_is_checked():
    """Except for UNCHECKED and for targets, which are the first cells of the last table."""
    checked = {at for sentence in RESULTS for at in spans(sentence)}
    free = [x.span() for pattern in UNCHECKED for x in re.finditer(pattern, PAGE)]
    for row in tables(ROOT / "benchmarks" / "RESULTS.md"):
        if aim := re.sub(r"\]\([^)]*\)", "]", row.get("target", "")):
            a = PAGE.index(f"| {aim} | {row['measured']} |")
            free.append((a, a + len(aim) + 2))
    for number in re.finditer(NUMBER, PAGE):
        a, b = number.span()
        inside = any(x <= a and b <= y for x, y in free)
        assert "." not in number[0] or (a, b) in checked or inside, PAGE[a - 60 : b + 30]


def test_the_readme_table_says_what_the_files_say():
    names = {title: name for name, title in TITLES.items()}
    names["the same, `--score optimistic_max_mc`"] = "plr_optimistic"
    rows = [row for row in tables(ROOT / "README.md") if row.get("method") in names]
    assert len(rows) == len(names)
    [hand] = [row for row in tables(ROOT / "README.md") if "left hand" in row.get("method", "")]
    assert same(hand["mean solve rate"], unlearned("dcd", "mean", "left hand"))
    for row in rows:
        name = names[row["method"]]
        cost = read(pictures.RESULTS / "records.csv")
        [*_, cost] = [float(x["published updates"]) for x in cost if x["method"] == name]
        expected = {
            "seeds": [len(pictures.of_seeds(name))],
            "minutes": [pictures.minutes(name)] if name in TITLES else [],
            "in published updates": [round(cost, -1)],
            "mean solve rate": mean(name)[:1],
            "interval": mean(name)[1:],
            "worst seed": [extremes(name)[0]],
            "minimax's paper": [MEANS[name]] if name in MEANS else [],
            "worst 10% of random levels": [worst(name)],
        }
        for column, cell in row.items():
            if column not in ("method", "section"):
                shown = re.findall(NUMBER, cell)
                assert len(shown) == len(expected[column]), (name, column)
                assert all(map(same, shown, expected[column])), (name, column, expected[column])
