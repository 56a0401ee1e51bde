"""PAIRED beside the minimax adversary at a size for two cores: what the teachers learn to design.

    python benchmarks/paired_small.py            # trains both, some minutes each; writes the CSV
    python benchmarks/paired_small.py --plot     # only draws the picture from the CSV again

Mazes of 9 x 9 cells, a budget of 30 walls, 500 cycles, one seed. paired_small.csv holds a row for
each 10 cycles, their mean; paired_small.png shows the teacher's reward (the regret; for minimax,
minus the mean return) and how long and how solvable the designs are. The shortest path is the mean
over solvable designs, which for minimax are few from cycle 380 on.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
TABLE = HERE / "paired_small.csv"
STUDENTS = {"paired": 2, "minimax": 1}
OPTIONS = """--height 9 --width 9 --n-walls 30 --num-steps 64 --max-steps 60 --hidden-size 32
    --teacher-hidden-size 64 --teacher-filters 16 --lr 1e-3 --teacher-lr 1e-3
    --teacher-ent-coef 0.005 --num-updates 500 --eval-interval 0 --plot-interval 0""".split()
PANELS = {
    "regret": "the teacher's reward",
    "path_length": "shortest path, cells",
    "solvable": "solvable share of the designs",
    "walls": "walls",
    "train_solve_rate": "protagonist's solve rate",
    "antagonist_train_solve_rate": "antagonist's solve rate",
}


def train():
    table = []
    with tempfile.TemporaryDirectory() as folder:
        for mode, students in STUDENTS.items():
            out = Path(folder) / mode
            given = ["--regret", mode, "--num-students", str(students), "--out", str(out)]
            command = [sys.executable, HERE.parent / "paired.py", *given, *OPTIONS]
            subprocess.run(command, check=True)
            with open(out / "logs.csv", newline="") as log:
                table += [{"mode": mode} | row for row in csv.DictReader(log)]
    with open(TABLE, "w", newline="") as file:
        writer = csv.DictWriter(file, ["mode", "update", *PANELS], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(table)


def plot():
    with open(TABLE, newline="") as file:
        table = list(csv.DictReader(file))
    figure = Figure(figsize=(11, 6), layout="constrained")
    for axis, (column, title) in zip(figure.subplots(2, 3).flat, PANELS.items()):
        for mode in STUDENTS:
            points = [(row["update"], row[column]) for row in table if row["mode"] == mode]
            points = [(int(update), float(value)) for update, value in points if value]
            if points:
                axis.plot(*zip(*points), label=mode)
        axis.set(title=title, xlabel="cycles")
        axis.legend(fontsize="small")
    figure.savefig(HERE / "paired_small.png", dpi=80)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", action="store_true", help="do not train")
    if not parser.parse_args().plot:
        train()
    plot()


if __name__ == "__main__":
    main()
