"""Draw the pictures of RESULTS.md that only need tables in this folder; nothing is trained.

    python benchmarks/pictures.py                     all of them
    python benchmarks/pictures.py differences mazes   only these

`PICTURES` lists the function that draws each picture, and the files that it needs. tables.py uses
the first functions, too.
"""

import argparse
import re
import sys
from itertools import combinations, product
from pathlib import Path

import matplotlib.style
import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent))
import evaluate  # noqa: E402
from results import MEANS, PUBLISHED, TITLES, UPDATE, read, scores  # noqa: E402

RESULTS, SEARCH = HERE / "results", HERE / "search"
METHODS = "accel", "sfl", "plr", "dr", "paired"
SUITES = {"dcd": "dcd's twelve mazes", "families": "families' twelve mazes"}
LENGTHS = {"plr_1650": 1650, "plr_3300": 3300, "plr": 7500}  # cycles


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
    ends = np.quantile(means[0] - means[1], (0.025, 0.975))
    return np.array([x.mean() - y.mean(), *(ends if min(len(x), len(y)) > 2 else [np.nan] * 2)])


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
    """Minutes of one core for a training: its published updates in the method's last row of
    records.csv, as cores are not always equally fast."""
    rows = [row for row in read(RESULTS / "records.csv") if row["method"] == name]
    return float(rows[-1]["published updates"]) * UPDATE


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
        axis.plot(value, at, "osD"[i], color=f"C{i}", ms=7, label=name)
    axis.axvline(0, color="0.3", lw=1)
    axis.set(yticks=range(len(labels)), ylim=(len(labels) - 0.4, -0.6))
    axis.set_yticklabels(labels, fontsize=11)
    axis.grid(axis="x", alpha=0.3)


def draw_differences():
    pairs = list(combinations(METHODS, 2))
    figure, [axis] = new(6.6)
    labels = [f"{TITLES[x]} - {TITLES[y]}".replace("robust ", "") for x, y in pairs]
    forest(axis, labels, {SUITES[s]: [difference(*x, s) for x in pairs] for s in SUITES})
    axis.set_xticks([-0.05, 0, 0.05, 0.1, 0.15])
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
    label = "solve rate by this score - solve rate by\nthe method's own score (95% interval)"
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
    """Of logs with the columns of examples/scores.py."""
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
    runs = {"accel": "ACCEL", "sfl": "SFL", "plr": "PLR", "dr_all": "DR, 60 walls,\nall levels",
            "paired": "PAIRED", "plr_3300": "PLR, 5 min,\nconstant rate"}  # fmt: skip
    figure, [axis] = new(5)
    seeds = {title: [averaging(x, s) for x in runs] for s, title in SUITES.items()}
    series = {title: [interval(x) for x in each] for title, each in seeds.items()}
    forest(axis, [*runs.values()], series, seeds)
    axis.set_xlabel("averaged parameters - last ones: solve rate; small\n"
                    "dots: seeds; right of 0: averaging helps", fontsize=11)  # fmt: skip
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
    short = "plr_quick"
    best = [*(of_seeds(short, suite).mean() for suite in SUITES), worst(short)[:, 0].mean()]
    for i, value in enumerate(best):
        label = None if i else "plr.py --quick"
        x = minutes(short) + 0.2 * (i - 1)
        axis.plot(x, value, "*", color=f"C{i}", ms=14, mec="k", label=label)
    axis.set(ylim=(0.4, 1.01), xlim=(0, 12), xticks=[0, *at])
    axis.set_xticklabels(["0", *(f"{x:.1f}" for x in at)])
    axis.set_xlabel("minutes of one CPU core (PLR: 1,650, 3,300, 7,500 cycles)", fontsize=11)
    axis.set_ylabel("solve rate", fontsize=11)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=11, loc="lower right")
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


CORES = {"lstm": "LSTM", "gru": "GRU", "s5": "S5", "none": "no memory"}
MEMORY = {"dr.py": "DR", "plr.py": "robust PLR", "plr.py --no-robust": "plain PLR",
          "plr.py --score optimistic_max_mc": "PLR, optimistic"}  # fmt: skip
LONGEST_TRAINED = 7  # cells of the longest corridor in search/memory.csv's trainings


def of_corridors(script, rnn, equal):
    """Lengths of corridors [L] and solve rates [S, L] after equal `updates` or `minutes`."""
    table = [row for row in read(SEARCH / "memory.csv")
             if (row["script"], row["rnn"], row["equal"]) == (script, rnn, equal)]  # fmt: skip
    names = [x for x in table[0] if x.startswith("Corridor")]
    rates = np.array([[float(row[x]) for x in names] for row in table])
    return [int(x.removeprefix("Corridor")) for x in names], rates


def longest_solved(script, rnn, equal, least=0.9):
    """The longest corridor up to which a seed solves at least 0.9 of each length, 0 if none [S]."""
    lengths, rates = of_corridors(script, rnn, equal)
    number = (rates >= least).cumprod(1).sum(1)
    return np.array([0, *lengths])[number]


def draw_memory():
    figure, panels = new(6.2, 2, 2, sharex=True, sharey=True)
    kinds = [(x, y) for x in ("dr.py", "plr.py") for y in ("updates", "minutes")]
    for axis, (script, equal) in zip(panels, kinds):
        for i, (rnn, label) in enumerate(CORES.items()):
            lengths, rates = of_corridors(script, rnn, equal)
            for seed in rates:
                axis.plot(lengths, seed, color=f"C{i}", lw=0.7, alpha=0.35)
            axis.plot(lengths, rates.mean(0), "o-", color=f"C{i}", lw=2.2, ms=4, label=label)
        axis.axhline(1, color="k", ls=":", lw=1.5, label="optimum")
        axis.axhline(0.5, color="0.5", ls="--", lw=1.5, label="chance at the fork")
        axis.axvspan(1, LONGEST_TRAINED, color="0.9", zorder=0, label="trained on")
        axis.set_xscale("log")
        axis.set(ylim=(-0.03, 1.05), xticks=(1, 3, 7, 15, 31, 63, 255))
        axis.set_xticklabels(axis.get_xticks())
        axis.minorticks_off()
        axis.set_title(f"{MEMORY[script]}, equal {equal}", fontsize=12)
    figure.supxlabel("cells of the corridor", fontsize=11)
    figure.supylabel("solve rate", fontsize=11)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3,
                  frameon=False, fontsize=11)  # fmt: skip
    return figure


SHARDED = {"dcd": SUITES["dcd"], "families": SUITES["families"],
           "hardest_hundredth": "hardest hundredth\nof random levels"}  # fmt: skip


def sharded(column):
    """{kind: solve rates [S]} of a column of search/sharded.csv; one buffer is the first kind."""
    kinds = {}
    for row in read(SEARCH / "sharded.csv"):
        kind = f"{row['num_buffers']} of {int(row['slots']):,} levels"
        kind += ", advantages\nnormalised over all" * (row["normalised_by"] == "all")
        kinds.setdefault(kind, []).append(float(row[column]))
    return {kind: np.array(rates) for kind, rates in kinds.items()}


def draw_sharded():
    figure, [axis] = new(4.6)
    series = {}
    for column, title in SHARDED.items():
        (_, one), *others = sharded(column).items()
        series[title] = [gain(x, one) for _, x in others]
    forest(axis, [kind for kind, _ in others], series)
    label = "solve rate - that with one buffer of 4,000\nlevels (95% interval; 0: no difference)"
    axis.set_xlabel(label, fontsize=11)
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=11)
    return figure


BATCHED = {"plr.py": "robust PLR", "dr.py": "DR"}
REACHED = 0.6  # of the random levels that a training draws
CARDS = {  # milliseconds of a cycle with so many levels (results/gpu), of seeds with 32 levels each
    "plr.py": {"an H100": {32: (30.43 + 23.47) / 2, 256: (46.14 + 35.86) / 2,
                           1024: (61.2 + 40.2) / 2}},
    "dr.py": {"an H100": {32: 23.51, 256: 27.14, 1024: 37.63},
              "an H200, 32 trainings": {32: 22.07, 256: 111.6}}}  # fmt: skip


def batched(file, script, scaled):
    """{levels a cycle: rows} of a table, at the first learning rate, or scaled by the root."""
    found = {}
    for row in read(SEARCH / file):
        number, is_first = int(row["num_envs"]), float(row["lr"]) == 2e-3
        if row["script"] == script and (number == 32 or is_first != scaled):
            found.setdefault(number, []).append(row)
    return dict(sorted(found.items()))


def of_batches(script, scaled, column):
    """{levels a cycle: values [S]} of a column of search/batch.csv."""
    found = batched("batch.csv", script, scaled)
    return {n: np.array([float(row[column]) for row in rows]) for n, rows in found.items()}


def steps_to_reach(script, rate=REACHED):
    """{levels a cycle: millions of steps} after which the mean over seeds first solves `rate` of
    the random levels that a training with a scaled rate draws; NaN if it never does."""
    found = {}
    for number, rows in batched("batch_curves.csv", script, True).items():
        curves, at = {}, np.arange(0, 14, 0.01)
        for row in rows:
            point = float(row["env_steps"]) / 1e6, float(row["solve_rate"])
            curves.setdefault(row["seed"], []).append(point)
        mean = np.mean([np.interp(at, *zip(*x), left=0) for x in curves.values()], axis=0)
        found[number] = at[(mean >= rate).argmax()] if mean.max() >= rate else np.nan
    return found


def time_to_reach(script):
    """Time until REACHED, relative to 32 levels: {machine: {levels: ratio}}. The time of a cycle
    on a GPU is interpolated between the sizes that were measured."""
    steps = steps_to_reach(script)
    core = {n: x.mean() for n, x in of_batches(script, True, "cpu_seconds").items()}
    costs = {"one core": core}
    for card, measured in CARDS[script].items():
        size, ms = np.log([*measured.items()]).T
        at = [n for n in steps if n <= max(measured)]
        costs[card] = {n: np.exp(np.interp(np.log(n), size, ms)) / n for n in at}
    relative = lambda cost: {n: steps[n] * x / (steps[32] * cost[32]) for n, x in cost.items()}
    return {machine: relative(cost) for machine, cost in costs.items()}


def draw_batch():
    figure, axes = new(8.2, 3, 2, sharex=True, sharey="row")
    panels = axes.reshape(3, 2)
    rates = {False: "the same learning rate", True: "scaled by the square root"}
    for (script, title), column in zip(BATCHED.items(), panels.T):
        column[0].set_title(title, fontsize=12)
        for axis, suite in zip(column, ("families", "hardest_tenth")):
            for i, (scaled, label) in enumerate(rates.items()):
                found = of_batches(script, scaled, suite)
                value, low, high = np.array([interval(x) for x in found.values()]).T
                at = np.array([*found]) * 1.04 ** (2 * i - 1)
                axis.errorbar(at, value, (value - low, high - value), color=f"C{i}", lw=2,
                              marker="os"[i], label=label)  # fmt: skip
        for i, (machine, found) in enumerate(time_to_reach(script).items()):
            column[2].plot(*zip(*found.items()), "D-", color=f"C{i + 2}", lw=2, label=machine)
        column[2].axhline(1, color="0.3", lw=1)
    for axis in panels.ravel():
        axis.grid(alpha=0.3)
    ticks = [*of_batches(script, True, "seed")]
    axis.set(xscale="log", yscale="log", xticks=ticks, yticks=(0.25, 0.5, 1, 2, 4))
    axis.set_xticklabels(ticks)
    axis.set_yticklabels(axis.get_yticks())
    axis.minorticks_off()
    labels = "solved: families", "solved: hardest tenth", f"time to solve {REACHED}\n(32 levels: 1)"
    for axis, label in zip(panels[:, 0], labels):
        axis.set_ylabel(label, fontsize=11)
    figure.supxlabel("levels a cycle", fontsize=11)
    entries = [axis.get_legend_handles_labels() for axis in panels[[0, 2], 1]]
    handles, labels = (sum(x, []) for x in zip(*entries))
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False, fontsize=11)
    return figure


LADDER = {  # a change from the published settings of DR to those of --fast: its label, its flags
    "network": ("64 units, not 256", "--hidden-size 64"),
    "passes": ("2 epochs of 2 minibatches,\nnot 5 of 1", "--update-epochs 2 --num-minibatches 2"),
    "chunks": ("backpropagation through\n64 steps, not 256", "--bptt-horizon 64"),
    "lr": ("learning rate 2e-3,\nfalling to 0, not 1e-4", "--lr 2e-3 --anneal-lr"),
    "gamma": ("discount 0.999, not 0.995", "--gamma 0.999"),
    "value": ("value loss: weight 2, no\nclipping, not 0.5", "--vf-coef 2 --no-clip-vloss"),
    "norm": ("gradient norm 1.5, not 0.5", "--max-grad-norm 1.5"),
    "averaging": ("averaged parameters", "--polyak-averaging"),
    "solvable": ("only levels that have\na solution", "--solvable-only"),
    "walls": ("90 walls, not 60", "--n-walls 90"),
    "entropy": ("entropy bonus 1e-2, not 1e-3", "--ent-coef 1e-2"),
}


def ladder(part, column):
    """{change: values [S]} of a column of search/ladder.csv: `step` has all changes until this one,
    `without` all but this one and the last three, `unsolvable` all but `solvable`, and of the last
    two only this one."""
    found = {}
    for row in read(SEARCH / "ladder.csv"):
        if row["part"] == part:
            found.setdefault(row["change"], []).append(float(row[column]))
    return {change: np.array(values) for change, values in found.items()}


def draw_ladder():
    steps = [*ladder("step", "seed")]
    figure, [axis] = new(1.6 + 0.62 * len(steps))
    for i, (suite, title) in enumerate(SUITES.items()):
        found = ladder("step", suite)
        at = np.arange(len(steps)) + 0.38 * (i - 0.5)
        value, low, high = np.array([interval(x) for x in found.values()]).T
        axis.barh(at, value, 0.36, color=f"C{i}", alpha=0.75, label=title)
        axis.hlines(at, low, high, color="0.2", lw=1.5)
    names = [f"+ {LADDER[name][0]}" if name else "published settings" for name in steps]
    axis.set(yticks=range(len(steps)), xlim=(0, 1), ylim=(len(steps) - 0.4, -0.6))
    axis.set_yticklabels(names, fontsize=11)
    axis.set_xlabel("solve rate of DR after two and a half minutes", fontsize=11)
    axis.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=11)
    return figure


CURVES = {"theirs": ("C1", "-"), "ours": ("C0", "-"), "ours, heads": ("C3", ":"),
          "ours, alike": ("C2", "--")}  # fmt: skip
PEERS = {"jaxued": "JaxUED", "minimax": "minimax"}
LEARNED = {"random_return": "return on random levels", "solve_rate": SUITES["dcd"]}


def peers():
    """{(settings, method): {curve: {column: values [S, checkpoints]}}} of peers/learning.csv: the
    trainings that have reached 1,000 updates."""
    runs = {}
    for row in read(HERE / "peers" / "learning.csv"):
        curve = "ours" * (row["library"] == "ours") or "theirs"
        curve = ", ".join(filter(None, [curve, row["variant"]]))
        curves = runs.setdefault((row["settings"], row["method"]), {})
        curves.setdefault(curve, {}).setdefault(row["seed"], []).append(row)
    values = lambda seeds, name: np.array([[float(row[name]) for row in x] for x in seeds])
    found = {}
    for pair, curves in runs.items():
        for curve in [x for x in CURVES if x in curves]:
            whole = [x for x in curves[curve].values() if float(x[-1]["updates"]) >= 1000]
            columns = {name: values(whole, name) for name in ("updates", "seconds", *LEARNED)}
            if whole:
                found.setdefault(pair, {})[curve] = columns
    return found


def draw_peers():
    found = peers()
    panels = ("updates", "random_return"), ("seconds", "random_return"), ("updates", "solve_rate")
    figure, axes = new(2.4 * len(found), len(found), len(panels))
    for axis, ((peer, method), (x, y)) in zip(axes, product(found, panels)):
        for curve, columns in found[peer, method].items():
            at, (color, dash) = columns[x] / (60 if x == "seconds" else 1), CURVES[curve]
            axis.plot(at.T, columns[y].T, dash, color=color, lw=0.5, alpha=0.5)
            label = PEERS[peer] if curve == "theirs" else curve
            axis.plot(at.mean(0), columns[y].mean(0), dash, color=color, lw=2, label=label)
        if x == "seconds":  # the panel in the middle
            axis.set_title(f"{TITLES[method]} by {PEERS[peer]}'s settings", fontsize=10)
        axis.set_xlabel("PPO updates" if x == "updates" else "minutes of one core", fontsize=9)
        axis.set_ylabel(LEARNED[y], fontsize=9)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=9)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    return figure


EXPERIMENTS = {"S5": "results/gpu/h200_s5/logs.csv.gz",
               "LSTM, seed 0": "results/published/plr/logs.csv",
               "LSTM, seed 1": "results/published/plr_1/logs.csv"}  # fmt: skip


def published(core):
    """Cycles [n] and solve rates on dcd's mazes [n, S] of the published trainings of PLR."""
    found = {}
    for row in read(HERE / EXPERIMENTS[core]):
        if row["eval_solve_rate"]:
            found.setdefault(int(row["update"]), []).append(float(row["eval_solve_rate"]))
    return np.array([*found]), np.array([*found.values()])


def draw_published():
    figure, [axis] = new(3.8)
    for color, core in zip(("C0", "C1", "C3"), EXPERIMENTS):
        cycles, rates = published(core)
        axis.plot(cycles, rates, color=color, lw=0.7, alpha=0.4)
        label = f"robust PLR by {core}" + f", mean of {rates.shape[1]}" * (rates.shape[1] > 1)
        axis.plot(cycles, rates.mean(1), color=color, lw=2.5, label=label)
    files = np.mean([robust for _, robust, _ in PUBLISHED.values()])
    axis.axhline(MEANS["plr"], color="0.3", ls="--", label="minimax's paper, 30,000 updates")
    axis.axhline(files, color="0.3", ls=":", label="dcd's files, 20,000 updates")
    axis.set(ylim=(0, 1), xlim=(0, 60_000))
    axis.set_xlabel("cycles, of which half learn; the experiment has 60,000", fontsize=11)
    axis.set_ylabel("solve rate on dcd's mazes", fontsize=11)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=10, loc="lower right")
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
    "memory": (draw_memory, ("search/memory.csv",)),
    "sharded": (draw_sharded, ("search/sharded.csv",)),
    "peers": (draw_peers, ("peers/learning.csv",)),
    "published": (draw_published, tuple(EXPERIMENTS.values())),
    "ladder": (draw_ladder, ("search/ladder.csv",)),
    "batch": (draw_batch, ("search/batch.csv", "search/batch_curves.csv")),
    "other": (draw_other, tuple(f"figures/{x}.csv" for x in ("navix", "cartpole", "craftax"))),
}


@matplotlib.style.context("default")
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(PICTURES)}; default: all")
    parser.add_argument("--out", type=Path, default=HERE / "figures")
    options = parser.parse_args()
    if unknown := {*options.names} - {*PICTURES}:
        parser.error(f"{', '.join(unknown)}: must be some of {', '.join(PICTURES)}")
    for name in options.names or PICTURES:
        PICTURES[name][0]().savefig(options.out / f"{name}.png")


if __name__ == "__main__":
    main()
