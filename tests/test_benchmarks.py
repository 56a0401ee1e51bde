"""The documents' links, and the pictures of benchmarks/figures beside their data."""

import csv
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import amaze
import jax
import numpy as np
import pytest
from PIL import Image, ImageSequence

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "benchmarks" / "figures"
sys.path.insert(0, str(ROOT / "benchmarks"))

import baselines  # noqa: E402
import evaluate  # noqa: E402
import kernels  # noqa: E402


def anchors(path):
    """GitHub's names of the headings of a document."""
    for title in re.findall(r"(?m)^#+ (.*)$", path.read_text()):
        yield re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("name", ["README.md", "benchmarks/README.md", "benchmarks/NOTEBOOK.md"])
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
    pictures = [path for path in FIGURES.iterdir() if path.suffix in (".png", ".gif")]
    assert pictures
    for path in pictures:
        data = [path.with_suffix(end) for end in (".csv", ".json")]
        assert any(x.exists() for x in data), path.name
    loose = [*(ROOT / "benchmarks").glob("*.png"), *(ROOT / "benchmarks").glob("*.gif")]
    assert not loose


def test_the_film_shows_the_steps_of_its_table():
    """Each is a legal step of StandardMaze up to the goal, and drawn as the film has it."""
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
    """From cell to neighbouring free cell, from the agent's place; solved ends beside the goal."""
    walks = json.loads((FIGURES / "paths.json").read_text())
    for title, walk in ((k, walk) for k, episodes in walks.items() for walk in episodes):
        level, cells = amaze.level_from_text(walk["level"]), np.array(walk["cells"])
        moves = np.abs(np.diff(cells, axis=0)).sum(1)
        assert moves.max() == 1
        assert (cells[0] == level.agent_pos).all()
        assert not np.asarray(level.wall_map)[cells[:, 1], cells[:, 0]].any()
        beside = np.abs(cells[-1] - level.goal_pos).sum() == 1
        max_steps = amaze.TEST_MAZES[title.split()[-1]][1]
        assert beside if walk["solved"] else len(cells) == max_steps
    assert {walk["solved"] for episodes in walks.values() for walk in episodes} == {True, False}


@pytest.mark.slow
def test_pictures_are_drawn_from_their_data(tmp_path):
    (tmp_path / "speed.json").write_text((FIGURES / "speed.json").read_text())
    commands = {
        "speed": f"speed.py --only --out {tmp_path}",
        "equal_time": f"curves.py --mazes {FIGURES}/equal_time.csv --out {tmp_path}/equal_time.png",
        "curriculum": f"curriculum.py {FIGURES}/curriculum.json --out {tmp_path}/curriculum.png",
        "paths": f"paths.py {FIGURES}/paths.json --out {tmp_path}/paths.png",
    }
    for name, words in commands.items():
        script, *words = words.split()
        subprocess.run([sys.executable, ROOT / "benchmarks" / script, *words], check=True)
        assert Image.open(tmp_path / f"{name}.png").width <= 800
    assert (tmp_path / "speed.md").read_text() == (FIGURES / "speed.md").read_text()
    by_hand = json.loads((tmp_path / "speed.json").read_text())["by-hand jaxued"]
    assert "by hand" in by_hand["machine"]


def test_agents_of_earlier_records_stay_on_the_page():
    """benchmarks/results/play.html: an agent is replaced by that of its own method alone."""
    path = ROOT / "benchmarks" / "results.py"
    spec = importlib.util.spec_from_file_location("results", path)
    spec.loader.exec_module(results := importlib.util.module_from_spec(spec))
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


def test_kernels_are_counted_loop_by_loop():
    """Trips multiply what is inside; graphs, copies and what launches nothing are told apart."""
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
    """By the map, in plain Python: the number of actions to the goal, 0 if there are too many.
    turn: 1 the right hand, -1 the left."""
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
    """It sees what is beside it, also where walls hide what is behind them."""
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
