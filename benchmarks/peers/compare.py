"""Draw figures/peers.png from peers/learning.csv, and print a table of differences.

    python benchmarks/peers/compare.py

A difference is ours minus theirs, at the last checkpoint that both have reached, or of the means
over all checkpoints until then. Intervals: 95% bootstrap, seeds of both drawn anew.
"""

import argparse
import csv
from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
SCORES = {"random_return": "return on 500 random levels", "solve_rate": "solve rate, dcd's mazes"}
NAMES = {
    "jaxued": "JaxUED",
    "minimax": "minimax",
    "dr": "DR",
    "plr": "robust PLR",
    "accel": "ACCEL",
}
STYLES = {
    "theirs": ("C1", "-"),
    "ours": ("C0", "-"),
    "ours, heads": ("C3", ":"),
    "ours, alike": ("C2", "--"),
}


def read(path):
    """{(settings, method): {curve: {seed: rows}}}, checkpoints numbered 0, 1, ... in each run."""
    pairs = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            ours = "ours, " + row["variant"] if row["variant"] else "ours"
            curve = ours if row["library"] == "ours" else "theirs"
            run = pairs[row["settings"], row["method"]][curve][int(row["seed"])]
            if row["updates"] not in [earlier["updates"] for earlier in run]:  # a run went on
                run.append(row)
    return pairs


def column(runs, name, checkpoints=None):
    """Values [seeds, checkpoints] of the runs that have so many checkpoints, or at least one."""
    least = checkpoints or max(map(len, runs.values()), default=0)
    full = [rows[:least] for rows in runs.values() if len(rows) >= least]
    return np.array([[float(row[name]) for row in rows] for rows in full])


def interval(theirs, ours, draws=10_000):
    """Difference of means of two sets of seeds and its 95% bootstrap interval."""
    rng = np.random.default_rng(0)
    again = lambda x: x[rng.integers(0, len(x), (draws, len(x)))].mean(1)
    low, high = np.percentile(again(ours) - again(theirs), [2.5, 97.5])
    return ours.mean() - theirs.mean(), low, high


def table(pairs):
    names = "settings of | method | ours | seeds: theirs, ours | updates | score | theirs | ours"
    yield f"| {names} | difference | of the means over checkpoints |"
    yield "|" + "---|" * 10
    for (peer, method), curves in pairs.items():
        for name in [name for name in curves if name != "theirs" and "theirs" in curves]:
            longest = [max(map(len, curves[curve].values())) for curve in ("theirs", name)]
            last = min(longest)
            for score, title in SCORES.items():
                theirs, ours = (column(curves[x], score, last) for x in ("theirs", name))
                updates = column(curves["theirs"], "updates", last)[:, -1].mean()
                cells = [NAMES[peer], NAMES[method], name, f"{len(theirs)}, {len(ours)}"]
                cells += [f"{updates:.0f}", title]
                cells += [f"{x[:, -1].mean():.3f}" for x in (theirs, ours)]
                for x, y in ((theirs[:, -1], ours[:, -1]), (theirs.mean(1), ours.mean(1))):
                    text = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*interval(x, y))
                    enough = min(len(x), len(y)) >= 3
                    cells.append(text if enough else text.split(" ")[0])
                yield "| " + " | ".join(cells) + " |"


def draw(pairs, path):
    """Rows: scores by updates, then by minutes; columns: settings and method. Seeds are thin."""
    rows = [(score, x) for x in ("updates", "seconds") for score in SCORES]
    figure = Figure(figsize=(3.2 * len(pairs) + 0.6, 9), layout="constrained")
    axes = figure.subplots(len(rows), len(pairs), squeeze=False, sharex="row", sharey="row")
    for j, ((peer, method), curves) in enumerate(pairs.items()):
        for i, (score, x) in enumerate(rows):
            axis = axes[i, j]
            for name, (color, dash) in STYLES.items():
                runs = curves.get(name, {})
                unit = 60 if x == "seconds" else 1
                for run in runs.values():
                    at = [float(row[x]) / unit for row in run]
                    axis.plot(
                        at, [float(row[score]) for row in run], color=color, lw=0.5, alpha=0.5
                    )
                number = min(map(len, runs.values()), default=0)
                if number:
                    at = column(runs, x, number).mean(0) / unit
                    label = NAMES[peer] if name == "theirs" else name
                    values = column(runs, score, number).mean(0)
                    axis.plot(at, values, dash, color=color, lw=2, label=f"{label} ({len(runs)})")
            axis.grid(alpha=0.3)
            axis.set(xlabel="PPO updates" if x == "updates" else "minutes of one core")
        axes[0, j].set_title(f"{NAMES[method]}, {NAMES[peer]}'s settings", fontsize=10)
        axes[0, j].legend(fontsize=7)
    for i, (score, _) in enumerate(rows):
        axes[i, 0].set_ylabel(SCORES[score], fontsize=8)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=HERE / "learning.csv")
    parser.add_argument("--out", type=Path, default=HERE.parent / "figures" / "peers.png")
    options = parser.parse_args()
    pairs = read(options.data)
    print("\n".join(table(pairs)))
    draw(pairs, options.out)


if __name__ == "__main__":
    main()
