"""Learning curves of several runs side by side, from their logs.csv: mean and range over seeds.
The points of a sweep are pooled with the seeds; `evaluate.py` draws them separately.

    python benchmarks/curves.py runs/dr-1 runs/plr-1 --columns train_solve_rate eval_solve_rate
    python benchmarks/curves.py runs/accel-1 --columns buffer_walls_weighted replay_path_length
    python benchmarks/curves.py --mazes results.csv    # evaluate.py's: mean and range on each maze

`--table` also prints the mean of each run and of each seed over the last `--last` log steps.
"""

import argparse
import csv
from pathlib import Path

import matplotlib.style
import numpy as np
from matplotlib.figure import Figure


def read(folder, x, column):
    """Where a column was logged: x [n], the mean over seeds, and its values [n, seeds]."""
    points = {}
    if not (Path(folder) / "logs.csv").exists():
        raise SystemExit(f"{folder}: has no logs.csv")
    with open(Path(folder) / "logs.csv", newline="") as file:
        for row in csv.DictReader(file):
            if row.get(column):
                points.setdefault(row["update"], []).append((float(row[x]), float(row[column])))
    full = max(map(len, points.values()), default=0)  # skip updates that a seed lacks
    points = np.array([values for values in points.values() if len(values) == full])
    return (points[..., 0].mean(1), points[..., 1]) if full else (points, points)


def mazes(path, out):
    """Draw each run's mean and range on each maze of evaluate.py's results.csv, and on all."""
    rates = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            for maze in (row["maze"], "all of them"):
                seeds = rates.setdefault(maze, {}).setdefault(row["run"], {})
                seeds.setdefault(row["seed"], []).append(float(row["solve_rate"]))
    rates["all of them"] = rates.pop("all of them")  # moved to the end
    figure = Figure(figsize=(8, 0.55 * len(rates) + 1), layout="constrained")
    axis = figure.subplots()
    for y, runs in enumerate(rates.values()):
        for i, (run, seeds) in enumerate(runs.items()):
            values = np.array([np.mean(x) for x in seeds.values()])
            at = y + 0.7 * ((i + 0.5) / len(runs) - 0.5)
            axis.plot((values.min(), values.max()), (at, at), color=f"C{i}", lw=2)
            axis.plot(values.mean(), at, "o", color=f"C{i}", label=run if y == 0 else None)
        axis.axhline(y + 0.5, color="0.85", lw=1)
    axis.set(yticks=range(len(rates)), yticklabels=rates, ylim=(len(rates) - 0.5, -0.5),
             xlim=(-0.02, 1.02), xlabel="solve rate, higher is better: dot: mean of "
             f"{len(values)} seeds; line: from the worst to the best of them")  # fmt: skip
    figure.legend(loc="outside upper center", ncols=len(runs), frameon=False)
    figure.savefig(out, dpi=100)


@matplotlib.style.context("default")
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", help="run folders; NAME=FOLDER names one in the legend")
    parser.add_argument("--mazes", metavar="CSV", help="evaluate.py's results.csv, not runs")
    parser.add_argument("--columns", nargs="+", default=["train_solve_rate", "eval_solve_rate"])
    parser.add_argument("--x", default="env_steps", choices=["env_steps", "grad_updates", "update"])
    parser.add_argument("--last", type=int, default=5)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--out", default="curves.png")
    options = parser.parse_args()
    if bool(options.runs) == bool(options.mazes):
        parser.error("must be given: either run folders or --mazes")
    if options.mazes:
        return mazes(options.mazes, options.out)
    figure = Figure(figsize=(4.6 * len(options.columns), 3.4), layout="constrained")
    axes = figure.subplots(1, len(options.columns), squeeze=False)[0]
    for axis, column in zip(axes, options.columns):
        for i, run in enumerate(options.runs):
            name, _, folder = run.rpartition("=")
            x, values = read(folder, options.x, column)
            if not len(x):
                continue
            marker = "o" if len(x) == 1 else ""  # a line needs two rows
            label = name or Path(folder).name
            axis.plot(x, values.mean(1), marker, ls="-", color=f"C{i}", label=label)
            axis.fill_between(x, values.min(1), values.max(1), color=f"C{i}", alpha=0.2, lw=0)
            if options.table:
                last = values[-options.last :].mean(0)
                each = " ".join(f"{value:.3f}" for value in last)
                print(f"{name or folder}\t{column}\t{last.mean():.3f}\tseeds: {each}")
        if not axis.lines:
            raise SystemExit(f"--columns {column}: no run has logged it")
        axis.set(title=column.replace("_", " "), xlabel=options.x.replace("_", " "))
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
