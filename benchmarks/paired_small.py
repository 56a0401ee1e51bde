"""Compare PAIRED with the minimax adversary at a small size: what the teachers learn to design.

    python benchmarks/paired_small.py            # trains both, in some minutes each
    python benchmarks/paired_small.py --plot     # only draws the picture again, from the CSV

Mazes have 9 x 9 cells and at most 30 walls; training has 500 cycles and one seed. Each row of
figures/paired_small.csv is a mean over 10 cycles. paired_small.png beside it shows the teacher's
reward (the regret; for minimax, minus the mean return), the designs and the students' solve rates.
The shortest path is a mean over solvable designs; minimax has only few from cycle 380 on.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
TABLE = HERE / "figures" / "paired_small.csv"
STUDENTS = {"paired": 2, "minimax": 1}
NAMES = {"paired": "PAIRED's teacher", "minimax": "minimax adversary"}
OPTIONS = """--height 9 --width 9 --n-walls 30 --num-steps 64 --max-steps 60 --hidden-size 32
    --teacher-hidden-size 64 --teacher-filters 16 --lr 1e-3 --teacher-lr 1e-3
    --teacher-ent-coef 0.005 --num-updates 500 --eval-interval 0 --plot-interval 0""".split()
PANELS = {
    "regret": "reward of the teacher",
    "path_length": "shortest path to the goal, cells",
    "solvable": "share of solvable designs",
    "walls": "walls in a design",
    "train_solve_rate": "student's solve rate",
    "antagonist_train_solve_rate": "second student's solve rate",
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
    figure = Figure(figsize=(8, 5), layout="constrained")
    for axis, (column, title) in zip(figure.subplots(2, 3).flat, PANELS.items()):
        for mode in STUDENTS:
            points = [(row["update"], row[column]) for row in table if row["mode"] == mode]
            points = [(int(update), float(value)) for update, value in points if value]
            if points:
                axis.plot(*zip(*points), label=NAMES[mode])
        axis.set_title(title, fontsize=10.5)
        axis.set_ylim(None if column == "regret" else 0)
        axis.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    figure.supxlabel("cycles of training", fontsize=10.5)
    figure.savefig(TABLE.with_suffix(".png"), dpi=100)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plot", action="store_true", help="do not train")
    if not parser.parse_args().plot:
        train()
    plot()


if __name__ == "__main__":
    main()
