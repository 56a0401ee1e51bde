"""The other libraries that benchmarks/speed.py measures, as far as they are installed for tests."""

import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import speed
from peers import minigrid


def test_updates_beside_dcd():
    """Each with the published network and with a small one; dcd has no --parallel."""
    driver = Namespace(training=lambda *case: case)
    programs = list(speed.dcd_programs("dcd", driver, ["dr", "plr"]))
    cores = "lstm", "lstm --hidden-size 64"
    cases = ("dr", ""), ("plr", "replay cycle"), ("plr", "fresh cycle")
    assert [run for _, run, _ in programs] == [(*case, core) for core in cores for case in cases]
    assert {notes["env_steps"] for *_, notes in programs} == {8192}
    rows = [
        {
            "name": name,
            "library": library,
            "seconds": [seconds * (1 + name.startswith("plr fresh"))],
        }
        | notes
        for name, _, notes in programs
        for library, seconds in (("ours", 2.0), ("dcd", 9.0))
    ]
    found = {row["name"]: row for row in speed.summarise("dcd", rows) if row["library"] == "dcd"}
    mean = found["plr half of each --rnn lstm --hidden-size 64, 1 seed(s)"]
    assert mean["seconds"] == [13.5] and mean["speedup"] == pytest.approx(4.5)


@pytest.mark.parametrize("mode", ["restart", "new"])
def test_mazes_of_minigrid_are_stepped(mode, monkeypatch):
    """At the time limit of 250 steps, or at the goal, the same maze begins again, or another."""
    made = []
    monkeypatch.setattr(
        minigrid, "Maze", lambda make=minigrid.Maze: made.append(make()) or made[-1]
    )
    run = minigrid.environment(mode, 2)
    walls = lambda: [env.grid.encode()[1:-1, 1:-1, 0] == 2 for env in made]
    first = walls()
    assert [env.step_count for env in made] == [0, 125]
    assert all(40 < x.sum() <= 60 for x in first)  # of 60 draws among 169 cells
    images, total = run(np.zeros((125, 2), int))  # turns left
    assert [env.step_count for env in made] == [125, 0] and not total.any()
    for image, env in zip(images[-1], made):
        assert np.array_equal(image, env.gen_obs()["image"])
    images, total = run(np.zeros((125, 2), int))
    assert [env.step_count for env in made] == [0, 125]
    same = [np.array_equal(x, y) for x, y in zip(first, walls())]
    assert same == [mode == "restart"] * 2
