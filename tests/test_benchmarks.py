"""Links and tables of the documents; scripts in benchmarks/, and pictures beside their data."""

import argparse
import csv
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import amaze
import dr
import jax
import matplotlib
import numpy as np
import pytest
from PIL import Image, ImageSequence

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "benchmarks" / "figures"
sys.path.insert(0, str(ROOT / "benchmarks"))

import baselines  # noqa: E402
import curriculum  # noqa: E402
import evaluate  # noqa: E402
import kernels  # noqa: E402
import paths  # noqa: E402
import pictures  # noqa: E402
import results  # noqa: E402
import speed  # noqa: E402
import tables  # noqa: E402
from dr import read_checkpoint  # noqa: E402
from results import read  # noqa: E402


def anchors(path):
    """The anchors that GitHub makes from the headings of a document."""
    for title in re.findall(r"(?m)^#+ (.*)$", path.read_text()):
        yield re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


PAGES = [f"benchmarks/{x}.md" for x in ("README", "RESULTS", "HOW")]
PAGES += ["README.md", "examples/README.md", "examples/SWITCHING.md"]


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
def test_pictures_are_drawn_from_their_data(tmp_path, monkeypatch):
    (tmp_path / "speed.json").write_text((FIGURES / "speed.json").read_text())
    commands = {
        "speed": (speed, "--only", "--out", tmp_path),
        "curriculum": (
            curriculum,
            FIGURES / "curriculum.json",
            "--out",
            tmp_path / "curriculum.png",
        ),
        "paths": (paths, FIGURES / "paths.json", "--out", f"{tmp_path}/paths.png"),
        "all others": (pictures, "--out", tmp_path),
    }
    readers_own = {"image.origin": "lower", "font.size": 30, "savefig.dpi": 10}
    with matplotlib.rc_context(readers_own):
        for script, *words in commands.values():
            monkeypatch.setattr(sys, "argv", [script.__file__, *map(str, words)])
            script.main()
    mazes = [np.asarray(Image.open(x / "curriculum.png")) for x in (tmp_path, FIGURES)]
    green = [(x[:, :, 1] > x[:, :, 0] + 100).nonzero() for x in mazes]  # goals
    np.testing.assert_allclose(np.mean(green[0], 1), np.mean(green[1], 1), atol=10)
    for name in ("speed", "curriculum", "paths", *pictures.PICTURES):
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


def test_records_keep_the_columns_that_pages_read(tmp_path):
    names = "update,seed,approx_kl,eval_solve_rate,eval_solve_rate/Rings,rank_correlation_mna"
    (tmp_path / "logs.csv").write_text(f"{names}\n1,0,9,,,0.5\n")
    (tmp_path / "kept").mkdir()
    results.keep_log(tmp_path, tmp_path / "kept")
    kept = {"update": "1", "seed": "0", "eval_solve_rate": "", "rank_correlation_mna": "0.5"}
    assert read(tmp_path / "kept" / "logs.csv") == [kept]


def test_no_agent_is_kept_of_paired(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "read_checkpoint", lambda path: {"state": {"students": {}}})
    results.keep_first_agent(tmp_path, tmp_path / "agent")
    assert not (tmp_path / "agent").exists()


@pytest.mark.parametrize("average", [None, {"w": np.array([[5.0], [6.0]])}])
def test_the_first_agent_is_kept(tmp_path, monkeypatch, average):
    student = {"params": {"w": np.array([[1.0], [2.0]])}, "average_params": average}
    rows = [{"seed": 3}, {"seed": 4}]
    data = {"config": '{"seeds": 2, "out": "runs/x"}', "rows": rows, "state": {"student": student}}
    monkeypatch.setattr(results, "read_checkpoint", lambda path: data)
    results.keep_first_agent(tmp_path, tmp_path / "agent")
    kept = read_checkpoint(tmp_path / "agent" / "checkpoint.msgpack")
    assert kept["state"]["student"]["params"]["w"] == [[5.0 if average else 1.0]]
    assert kept["rows"] == [{"seed": 3}]
    assert kept["config"] == (tmp_path / "agent" / "config.json").read_text()
    assert json.loads(kept["config"]) == {"seeds": 1, "out": ""}


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


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda x: x.name)
def test_tables_of_pages_say_what_the_data_say(page):
    """Else: python benchmarks/tables.py. Words are free, and so are numbers in them."""
    text = page.read_text()
    assert text.count("<!-- table: ") == text.count("<!-- end -->") > 0
    assert tables.fill(text) == text


def test_every_table_is_on_a_page():
    names = [x for page in tables.PAGES for x in re.findall(r"table: (\w+) -->", page.read_text())]
    assert sorted(names) == sorted(tables.TABLES)


def test_only_tables_are_rewritten(monkeypatch):
    text = "words 0.5\n\n<!-- table: toy -->\n| old |\n<!-- end -->\n\n| a table | by hand |\n"
    monkeypatch.setitem(tables.TABLES, "toy", lambda: iter([("a", "b"), (1, "")]))
    assert tables.fill(text) == text.replace("| old |\n", "| a | b |\n|---|---|\n| 1 |  |\n")


def test_numbers_are_rounded_and_signed():
    assert tables.show(0.8946, 0.87, 0.9) == "0.895 [0.870, 0.900]"
    assert tables.signed(0.0384, -0.0004, 0.07) == "+0.038 [0.000, 0.070]"
    assert tables.signed(-0.0004) == "0.000"


def test_differences_are_means_over_seeds():
    """The same by plain loops over the rows of the files."""
    means = []
    for name in ("accel", "plr"):
        seeds = {}
        for row in read(pictures.RESULTS / name / "dcd.csv"):
            seeds.setdefault(row["seed"], []).append(float(row["solve_rate"]))
        means.append(sum(sum(x) / 12 for x in seeds.values()) / len(seeds))
    value, low, high = pictures.difference("accel", "plr")
    assert value == pytest.approx(means[0] - means[1])
    assert low < value < high
    assert tables.difference("accel", "plr", "dcd").startswith(f"{value:+.3f} [")


@pytest.mark.skipif(not shutil.which("patch"), reason="there is no `patch` here")
@pytest.mark.parametrize("name", ["jaxued_dr", "minimax_dr"])
def test_diffs_beside_peers_apply_exactly(name, tmp_path):
    words = ["patch", "-F0", "-o", tmp_path / "dr.py", ROOT / "dr.py"]
    words.append(ROOT / f"benchmarks/peers/{name}.diff")
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    compile((tmp_path / "dr.py").read_text(), name, "exec")


def test_the_ladder_leads_from_the_published_settings_to_fast():
    read_flags = lambda flags: replace(dr.parse(flags.split()), num_updates=0)
    flags = {name: flags for name, (_, flags) in pictures.LADDER.items()}
    assert read_flags(" ".join(flags.values())) == read_flags("--fast")
    parts = {}
    for row in read(pictures.SEARCH / "ladder.csv"):
        parts.setdefault(row["part"], []).append(row)
    steps = [*dict.fromkeys(row["change"] for row in parts["step"])]
    assert sorted(steps) == sorted(["", *flags])
    for row in parts["step"]:
        taken = steps[1 : steps.index(row["change"]) + 1]
        assert read_flags(row["flags"]) == read_flags(" ".join(flags[x] for x in taken))
    last = "solvable", "walls", "entropy"
    without = lambda *names: " ".join(x for name, x in flags.items() if name not in names)
    for row in parts["without"]:
        assert read_flags(row["flags"]) == read_flags(without(row["change"], *last))
    for row in parts["unsolvable"]:
        others = [x for x in last if x != row["change"]]
        assert len(others) == 2 and read_flags(row["flags"]) == read_flags(without(*others))


def test_differences_on_the_hardest_levels_have_an_interval(monkeypatch):
    """Two groups of seeds with half widths of 0.1, minus one: sqrt(0.1² / 2 + 0.1²) = 0.122."""
    groups = {"one": [[0.6, 0.5, 0.7], [0.5, 0.4, 0.6]], "other": [[0.3, 0.2, 0.4]]}
    monkeypatch.setattr(tables.pictures, "worst", lambda name, _: np.array(groups[name]))
    assert tables.hardest_difference("one", "other") == "+0.250 [0.128, 0.372]"


def test_two_seeds_have_no_interval():
    shown = [tables.signed(*pictures.gain(np.arange(n) + 2.0, np.ones(6))) for n in (2, 3)]
    assert shown[0] == "+1.500" and shown[1].startswith("+2.000 [")
