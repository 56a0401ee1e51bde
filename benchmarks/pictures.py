"""Draw the pictures of RESULTS.md that only need tables in this folder; nothing is trained.

    python benchmarks/pictures.py                     all of them
    python benchmarks/pictures.py differences mazes   only these

`PICTURES` lists the function that draws each picture, and the files that it needs. The functions
above it compute the numbers in RESULTS.md; tests/test_benchmarks.py checks the page against them.
"""

import argparse
import re
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent))
import evaluate  # noqa: E402
from results import TITLES, read, scores  # noqa: E402

RESULTS, SEARCH = HERE / "results", HERE / "search"
METHODS = "accel", "sfl", "plr", "dr", "paired"
SUITES = {"dcd": "dcd's twelve mazes", "families": "families' twelve mazes"}
LENGTHS = {"plr_1650": 1650, "plr_3300": 3300, "plr": 7500}  # cycles
PLR_CHANGES = {  # columns of hacks.csv with two values: the larger one is the change
    "two_epochs": "two passes, not three", "ncc": "learned replay (NCC)",
    "solvable_only": "solvable levels only", "best_quarter": "best quarter of rollouts",
    "vf_coef": "heavier value loss, looser clips", "lr": "larger learning rate",
    "truncated_bptt": "truncated backprop.", "thinned_walls": "walls thinned",
    "num_minibatches": "four minibatches", "mingru": "minGRU for the LSTM",
    "muon": "Muon for Adam",
}  # fmt: skip
SFL_CHANGES = {  # columns of short.csv
    "vf_coef": "heavier value loss, looser clips", "restart": "ended levels restart",
    "solvable_only": "solvable levels only", "ent_coef": "entropy bonus 1e-2, not 1e-3",
    "num_minibatches": "four minibatches", "learnable_slots": "learnable slots only",
    "lr": "learning rate 3e-3, not 1.5e-3", "n_walls": "90 walls, not 60",
}  # fmt: skip


def of_seeds(name, suite="dcd"):
    """Mean solve rate on a suite for each seed of a method [S]."""
    return scores(RESULTS / name, suite)[0].mean(1)


def interval(values):
    """Mean of values [S, ...] -> value, low, high; the interval is evaluate.py's, over seeds."""
    return evaluate.bootstrap(values, lambda x: np.array([x.mean()]), 0)[0]


def gain(x, y):
    """Mean of some seeds minus that of others -> value, low, high: a bootstrap over seeds."""
    rng = np.random.default_rng(0)
    means = [rng.choice(z, (20_000, len(z))).mean(1) for z in (x, y)]
    return np.array([x.mean() - y.mean(), *np.quantile(means[0] - means[1], (0.025, 0.975))])


def difference(one, other, suite="dcd"):
    """Mean of one method minus that of another -> value, low, high."""
    return gain(of_seeds(one, suite), of_seeds(other, suite))


def last_parameters(name, suite):
    """Solve rates [S] of seeds 0 to 7 with the last parameters, not the averaged ones."""
    table = read(SEARCH / "last_parameters.csv")
    rates = [x["solve_rate"] for x in table if (x["run"], x["suite"]) == (name, suite)]
    return np.array(rates, float).reshape(8, -1).mean(1)


def averaging(name, suite):
    """Solve rates [S] with averaged parameters minus those with the last ones, for each seed."""
    return of_seeds(name, suite)[:8] - last_parameters(name, suite)


def effects(path, runs, columns, outcome="families_last"):
    """Effect of each two-valued column on an outcome, by least squares -> {column: (effect,
    standard error, trainings with the smaller value, with the larger)}."""
    table = [row for row in read(path) if row["run"].startswith(runs)]
    values = np.array([[float(row[x]) for x in columns] for row in table])
    high = values == values.max(0)
    x, y = np.column_stack([np.ones(len(table)), high]), [float(row[outcome]) for row in table]
    fitted = np.linalg.lstsq(x, np.array(y), rcond=None)[0]
    rest = np.array(y) - x @ fitted
    variance = rest @ rest / (len(x) - x.shape[1])
    errors = np.sqrt(variance * np.diag(np.linalg.inv(x.T @ x)))
    counts = zip((~high).sum(0), high.sum(0))
    return {k: (*z, *n) for k, *z, n in zip(columns, fitted[1:], errors[1:], counts)}


def plr_effects(outcome="families_last"):
    return effects(SEARCH / "hacks.csv", "pb_", [*PLR_CHANGES], outcome)


def sfl_effects():
    return effects(SEARCH / "short.csv", ("sfl1", "sfl2"), [*SFL_CHANGES])


def families(path, key, value):
    """families_last in the rows of a search whose `key` starts with a text or equals a number."""
    same = lambda x: x.startswith(value) if isinstance(value, str) else float(x) == value
    return np.array([float(row["families_last"]) for row in read(path) if same(row[key])])


def worst(name, share="worst 10%"):
    """On the worst sampled levels, by tables.txt -> [[value, low, high]], a row per eight seeds."""
    lines = (RESULTS / name / "tables.txt").read_text().splitlines()
    found = []
    for i, line in enumerate(lines):
        if share in line:
            head, row = (re.split(r"\s{2,}", x) for x in (line, lines[i + 1]))
            found.append([float(x) for x in re.findall(r"[\d.]+", row[head.index(share)])])
    return np.array(found)


def minutes(name):
    """Minutes of one core for a training, from the method's last row in records.csv."""
    rows = [row for row in read(RESULTS / "records.csv") if row["method"] == name]
    return float(rows[-1]["minutes"])


def new(height, rows=1, columns=1, **options):
    """A figure and its axes, 6 inches wide, with letters that are readable on a phone."""
    figure = Figure(figsize=(6, height), layout="constrained", dpi=130)
    axes = figure.subplots(rows, columns, squeeze=False, **options).ravel()
    for axis in axes:
        axis.tick_params(labelsize=11)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def forest(axis, labels, series, seeds=None):
    """Draw intervals, with a row for each label; series: {name: [[value, low, high]]}."""
    for i, (name, values) in enumerate(series.items()):
        at = np.arange(len(labels)) + 0.3 * (i - (len(series) - 1) / 2)
        value, low, high = np.array(values).T
        for y, x in zip(at, seeds[name] if seeds else ()):
            axis.plot(x, np.full(len(x), y), ".", color=f"C{i}", ms=4, alpha=0.4)
        axis.hlines(at, low, high, color=f"C{i}", lw=2.5)
        axis.plot(value, at, "os"[i], color=f"C{i}", ms=7, label=name)
    axis.axvline(0, color="0.3", lw=1)
    axis.set(yticks=range(len(labels)), ylim=(len(labels) - 0.4, -0.6))
    axis.set_yticklabels(labels, fontsize=11)
    axis.grid(axis="x", alpha=0.3)


def draw_differences():
    pairs = list(combinations(METHODS[:4], 2))
    figure, [axis] = new(4.6)
    labels = [f"{TITLES[x]} less {TITLES[y]}".replace("robust ", "") for x, y in pairs]
    forest(axis, labels, {SUITES[s]: [difference(*x, s) for x in pairs] for s in SUITES})
    axis.set_xticks([-0.05, 0, 0.05, 0.1])
    axis.set_xlabel("difference of mean solve rates, 95% interval\n(0: no difference)", fontsize=11)
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=11)
    return figure


REGRET = {  # a method and its score: the run, and the run by the method's own score
    "PLR, optimistic": ("plr_optimistic", "plr"),
    "PLR, true regret": ("plr_oracle", "plr"),
    "ACCEL, optimistic": ("accel_optimistic", "accel"),
    "ACCEL, true regret": ("accel_oracle", "accel"),
    "SFL, true regret": ("sfl_oracle", "sfl"),
    "PAIRED, true regret": ("paired_oracle", "paired"),
    "5 min: PLR, true regret": ("plr_3300_oracle", "plr_3300"),
    "5 min: PLR, optimistic": ("plr_3300_optimistic", "plr_3300"),
    "5 min: PLR, L1 value loss": ("plr_3300_l1", "plr_3300"),
    "5 min: PLR,\nvalue disagreement": ("plr_3300_value_disagreement", "plr_3300"),
    "5 min: PLR,\npositive value loss": ("plr_3300_pvl", "plr_3300"),
    "5 min: PLR, TRACED": ("plr_3300_traced", "plr_3300"),
}
APPROXIMATED = {  # panel: the run whose log has the rank correlations
    "PLR by TRACED": "plr_3300_traced", "PLR by the true regret": "plr_oracle",
    "ACCEL by the true regret": "accel_oracle",
    "PLR by optimistic max_mc": "plr_optimistic"}  # fmt: skip
SCORES = {"l1_value_loss": "L1 value loss", "max_mc": "max_mc", "traced": "TRACED",
          "positive_value_loss": "positive value loss",
          "optimistic_max_mc": "optimistic max_mc"}  # fmt: skip


def draw_regret():
    figure, [axis] = new(1.4 + 0.6 * len(REGRET))
    series = {SUITES[s]: [difference(*x, s) for x in REGRET.values()] for s in SUITES}
    forest(axis, list(REGRET), series)
    label = "solve rate less that by\nthe method's own score (95% interval)"
    axis.set_xlabel(label, fontsize=11)
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=11)
    return figure


def over_training(name, column):
    """The cycles [C] of a run's log, and a column's mean over seeds [C] in each of them."""
    seeds = {}
    for row in read(RESULTS / name / "logs.csv"):
        seeds.setdefault(int(row["update"]), []).append(float(row[column] or "nan"))
    return [*seeds], np.array([np.mean(x) for x in seeds.values()])


def draw_approximations():
    figure, panels = new(1.4 + 2 * len(APPROXIMATED), len(APPROXIMATED), sharex=True, sharey=True)
    for axis, (title, name) in zip(panels, APPROXIMATED.items()):
        for i, (score, label) in enumerate(SCORES.items()):
            if f"rank_correlation_{score}" in read(RESULTS / name / "logs.csv")[0]:
                cycles, values = over_training(name, f"rank_correlation_{score}")
                axis.plot(cycles, values, color=f"C{i}", lw=2, label=label)
        cycles, values = over_training(name, "never_solved_regret_share")
        axis.plot(cycles, values, "k:", lw=2, label="share of regret in\nlevels never solved")
        axis.axhline(0, color="0.3", lw=1)
        axis.set_title(title, fontsize=12)
        axis.grid(alpha=0.3)
    panels[-1].set_xlabel("cycle", fontsize=11)
    figure.supylabel("rank correlation\nwith the true regret", fontsize=11)
    lines = {line.get_label(): line for axis in panels for line in axis.get_lines()}
    lines = {label: line for label, line in lines.items() if not label.startswith("_")}
    figure.legend(lines.values(), lines, loc="outside upper center", ncols=2, frameon=False,
                  fontsize=11)  # fmt: skip
    return figure


def draw_averaging():
    runs = {"accel": "ACCEL", "sfl": "SFL", "plr": "PLR", "dr": "DR", "paired": "PAIRED",
            "plr_3300": "PLR, 5 min,\nconstant rate"}  # fmt: skip
    figure, [axis] = new(5)
    seeds = {title: [averaging(x, s) for x in runs] for s, title in SUITES.items()}
    series = {title: [interval(x) for x in each] for title, each in seeds.items()}
    forest(axis, [*runs.values()], series, seeds)
    axis.set_xlabel("solve rate of averaged parameters less that of the\nlast ones; small dots: "
                    "seeds; right of 0: averaging helps", fontsize=11)  # fmt: skip
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=11)
    return figure


def draw_mazes():
    players = {"right hand": "right hand", "left hand": "left hand", "random": "random actions"}
    unlearned = {row["maze"]: row for row in read(RESULTS / "baselines.csv")}
    figure, panels = new(8.2, 2)
    for axis, (suite, title) in zip(panels, SUITES.items()):
        tables = [scores(RESULTS / name, suite) for name in METHODS]
        names, order = tables[0][1], np.mean([x[0].mean(0) for x in tables], 0).argsort()
        rates = [table.mean(0) for table, _ in tables]
        rates += [
            np.array([float(unlearned[maze][player]) for maze in names]) for player in players
        ]
        rates, names = np.array(rates)[:, order], [names[i] for i in order]
        axis.imshow(rates, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        for (i, j), x in np.ndenumerate(rates):
            shade = "k" if 0.1 < x < 0.89 else "w"
            percent = f"{x:.2f}".replace("0.", "").lstrip("0") if x < 0.995 else "100"
            axis.text(j, i, percent or "0", color=shade, ha="center", va="center", fontsize=11)
        axis.axhline(len(METHODS) - 0.5, color="w", lw=4)
        axis.set(xticks=range(len(names)), yticks=range(len(rates)))
        axis.set_xticklabels(names, rotation=50, ha="right", rotation_mode="anchor", fontsize=10)
        labels = [*(TITLES[x].replace("robust ", "") for x in METHODS), *players.values()]
        axis.set_yticklabels(labels, fontsize=11)
        axis.set_title(f"{title}: percent solved", fontsize=12)
        axis.spines[:].set_visible(False)
    return figure


def draw_length():
    figure, [axis] = new(4.4)
    at, names = [minutes(name) for name in LENGTHS], [*LENGTHS]
    for i, (suite, title) in enumerate(SUITES.items()):
        seeds = [of_seeds(name, suite) for name in names]
        for x, y in zip(at, seeds):
            axis.plot(np.full(len(y), x + 0.12 * i - 0.12), y, ".", color=f"C{i}", ms=4, alpha=0.4)
        value, low, high = np.array([interval(x) for x in seeds]).T
        x = np.array(at) + 0.12 * i - 0.12
        axis.errorbar(x, value, (value - low, high - value), color=f"C{i}", lw=2, marker="o",
                      label=title)  # fmt: skip
    value, low, high = np.array([worst(name).mean(0) for name in names]).T
    axis.plot(at, value, "s--", color="C2", lw=2, label="the hardest tenth of random levels")
    short = "plr_1650_optimistic"
    best = [*(of_seeds(short, suite).mean() for suite in SUITES), worst(short)[:, 0].mean()]
    for i, value in enumerate(best):
        label = None if i else "optimistic, learning rate 6e-3"
        x = minutes(short) + 0.2 * (i - 1)
        axis.plot(x, value, "*", color=f"C{i}", ms=14, mec="k", label=label)
    axis.set(ylim=(0.4, 1.01), xlim=(0, 11.5), xticks=[0, *at])
    axis.set_xticklabels(["0", *(f"{x:.1f}" for x in at)])
    axis.set_xlabel("minutes of one CPU core (PLR: 1,650, 3,300, 7,500 cycles)", fontsize=11)
    axis.set_ylabel("solve rate", fontsize=11)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=11, loc="lower right")
    return figure


def draw_effects():
    figure, panels = new(6.8, 2, sharex=True, height_ratios=(len(PLR_CHANGES), len(SFL_CHANGES)))
    both = {"PLR, 24 trainings of some 160 s": (PLR_CHANGES, plr_effects()),
            "SFL, 24 trainings of 1,200 updates": (SFL_CHANGES, sfl_effects())}  # fmt: skip
    for axis, (title, (names, found)) in zip(panels, both.items()):
        values = [(x, x - 2 * e, x + 2 * e) for x, e, *_ in found.values()]
        forest(axis, [*names.values()], {title: values})
        axis.set_title(title, fontsize=12)
    panels[1].set_xlabel("effect on the solve rate on families\n(line: two standard errors)",
                         fontsize=11)  # fmt: skip
    return figure


def of_levels(name):
    """{run: {level: solve rates of seeds}} in figures/<name>.csv, random levels as one."""
    rates = {}
    for row in read(HERE / "figures" / f"{name}.csv"):
        level = "random physics" if row["level"].startswith("Random") else row["level"]
        seeds = rates.setdefault(row["run"], {}).setdefault(level, {})
        seeds.setdefault(row["seed"], []).append(float(row["solve_rate"]))
    return {run: {k: np.array([np.mean(x) for x in seeds.values()]) for k, seeds in levels.items()}
            for run, levels in rates.items()}  # fmt: skip


def draw_levels(axis, found):
    """Draw {run: {level: solve rates of seeds}}: a row for each level, a colour for each run."""
    for i, (run, levels) in enumerate(found.items()):
        for y, rates in enumerate(levels.values()):
            at = y + 0.2 * (i - (len(found) - 1) / 2)
            axis.plot(rates, np.full(len(rates), at), ".", color=f"C{i}", ms=5, alpha=0.5)
            axis.plot(rates.mean(), at, "D", color=f"C{i}", ms=7, label=None if y else run.upper())
    axis.set(yticks=range(len(levels)), ylim=(len(levels) - 0.5, -0.5), xlim=(-0.03, 1.03))
    axis.set_yticklabels(levels, fontsize=11)


def draw_other():
    figure, (doors, poles, worlds) = new(9, 3, height_ratios=(5, 7, 5))
    draw_levels(doors, of_levels("navix"))
    doors.set_title("NAVIX's DoorKey: solve rate", fontsize=12)
    draw_levels(poles, of_levels("cartpole"))
    poles.set_title("CartPole: solve rate (dots: seeds, diamonds: means)", fontsize=12)
    figure.legend(*doors.get_legend_handles_labels(), loc="outside upper center", ncols=4,
                  frameon=False, fontsize=11)  # fmt: skip
    table = [row for row in read(HERE / "figures" / "craftax.csv") if row["eval_return"]]
    for column, label in {"replay_return": "replayed worlds", "eval_return": "test worlds",
                          "fresh_return": "new worlds"}.items():  # fmt: skip
        steps = [float(row["env_steps"]) / 1e6 for row in table]
        worlds.plot(steps, [float(row[column]) for row in table], "o-", lw=2, label=label)
    worlds.set(ylim=(0, None), xlim=(0, None))
    worlds.set_xlabel("million steps", fontsize=11)
    worlds.set_title("Craftax-Classic, PLR, one seed: return", fontsize=12)
    worlds.legend(fontsize=11, loc="lower right")
    for axis in (doors, poles, worlds):
        axis.grid(alpha=0.3)
    return figure


TABLES = "results/*/dcd.csv", "results/*/families.csv"
PICTURES = {  # name: the function that draws it, the files that it reads
    "differences": (draw_differences, TABLES),
    "regret": (draw_regret, TABLES),
    "approximations": (
        draw_approximations,
        tuple(f"results/{name}/logs.csv" for name in APPROXIMATED.values()),
    ),
    "length": (draw_length, (*TABLES, "results/plr*/tables.txt", "results/records.csv")),
    "mazes": (draw_mazes, (*TABLES, "results/baselines.csv")),
    "averaging": (draw_averaging, (*TABLES, "search/last_parameters.csv")),
    "effects": (draw_effects, ("search/hacks.csv", "search/short.csv")),
    "other": (draw_other, tuple(f"figures/{x}.csv" for x in ("navix", "cartpole", "craftax"))),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(PICTURES)}; default: all")
    parser.add_argument("--out", type=Path, default=HERE / "figures")
    options = parser.parse_args()
    if unknown := {*options.names} - {*PICTURES}:
        parser.error(f"{', '.join(unknown)}: allowed are {', '.join(PICTURES)}")
    for name in options.names or PICTURES:
        PICTURES[name][0]().savefig(options.out / f"{name}.png")


if __name__ == "__main__":
    main()
