"""What the methods reach: each with several seeds, then the 12 unseen mazes of the dcd suite.

    python benchmarks/results.py --fast          half an hour on one core for each training
    python benchmarks/results.py                 the published lengths, about 30,000 gradient updates
    python benchmarks/results.py --minutes 60    a piece; again and again, until nothing is left
    python benchmarks/results.py --evaluate      what is trained, beside the published figures

Runs are trained one after the other, in order of interest; each goes on from its checkpoint.
`--evaluate` writes into --results, a folder for each finished method: `results.csv` (every seed on
every maze), `tables.txt`, `last.csv` (the last rows of its logs), `curve.csv`; and, of all methods
with a folder there, `mazes.md` and `learning.png` (solve rate against minutes on one core); and
`play.html`, in which the first training of each finished method plays.
"""

import argparse
import csv
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from flax.serialization import msgpack_restore
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
S5 = "--rnn s5 --lr 1e-4 --ent-coef 1e-3"
S5_PARALLEL = "--parallel --rnn s5 --lr 1e-4 --gae-lambda 0.98 --ent-coef 1e-3"
FAST = {name: f"{name}.py --fast --eval-interval 150"
        for name in ("accel", "plr", "dr", "sfl", "paired")}
METHODS = {  # name: script and options (README, "S5 policies")
    "accel": "accel.py",
    "plr": "plr.py",
    "dr": "dr.py",
    "sfl": "sfl.py",
    "plr_parallel": "plr.py --parallel",
    "accel_parallel": "accel.py --parallel",
    "accel_s5": f"accel.py {S5} --gamma 0.995 --replay-prob 0.5 --num-updates 60000 "
                "--staleness-coef 0.3 --temperature 0.1 --num-edits 10",
    "plr_s5": f"plr.py {S5} --s5-norm before --staleness-coef 0.5 --temperature 0.5",
    "dr_s5": "dr.py --rnn s5 --lr 3e-5",
    "plr_parallel_s5": f"plr.py {S5_PARALLEL} --staleness-coef 0.5 --temperature 0.5",
    "accel_parallel_s5": "accel.py --parallel --rnn s5 --lr 3e-5 --ent-coef 0 --temperature 0.1",
    "paired": "paired.py",
}  # fmt: skip
MEANS = {"accel": 0.83, "plr": 0.82, "dr": 0.55, "paired": 0.63}  # minimax's, 30,000 updates
PUBLISHED = {  # solve rates of dcd's own result files, 5 seeds: ACCEL, robust PLR, DR
    "SixteenRooms": (1.00, 0.95, 0.87), "SixteenRooms2": (0.93, 0.49, 0.53),
    "Labyrinth": (0.74, 0.55, 0.45), "Labyrinth2": (0.85, 0.66, 0.54),
    "StandardMaze": (0.78, 0.54, 0.43), "StandardMaze2": (1.00, 0.74, 0.49),
    "StandardMaze3": (0.84, 0.75, 0.69), "SimpleCrossing": (0.79, 0.87, 0.57),
    "FourRooms": (0.68, 0.64, 0.77), "SmallCorridor": (1.00, 0.89, 1.00),
    "LargeCorridor": (0.99, 0.79, 0.64), "PerfectMazeMedium": (0.90, 0.62, 0.45),
}  # fmt: skip


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def done(folder):
    """Cycles of a run in its checkpoint, and whether they are all."""
    if not (folder / "checkpoint.msgpack").exists():
        return 0, False
    cycles = int(msgpack_restore((folder / "checkpoint.msgpack").read_bytes())["step"])
    return cycles, cycles == json.loads((folder / "config.json").read_text())["num_updates"]


def train(name, options, deadline):
    """Train a method until it is done or the time is over -> whether it is done."""
    folder = options.out / name
    if not done(folder)[1]:
        script, *given = options.methods[name].split()
        given += f"--eval-suite dcd --seeds {options.seeds} {options.options}".split()
        given += ["--resume"] if (folder / "config.json").exists() else []
        words = [sys.executable, HERE.parent / script, *given, "--out", folder]
        process = subprocess.Popen(list(map(str, words)))
        try:
            status = process.wait(max(deadline - time.time(), 1))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # it finishes its chunk, saves and ends
            status = process.wait()
        if status not in (0, 128 + signal.SIGTERM, -signal.SIGTERM):  # the last: while it starts
            sys.exit(f"{name}: {script} ended with status {status}")
    print(f"{name}: {done(folder)[0]} cycles", flush=True)
    return done(folder)[1]


def write(path, table):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows(table)


def curve(run):
    """Solve rate on the suite that a run evaluates, mean and range over seeds, against minutes of
    one core (device): the median time of an update, so that a pause does not count; those with an
    evaluation or SFL's scoring have medians of their own."""
    config, seeds = json.loads((run / "config.json").read_text()), {}
    for row in read(run / "logs.csv"):
        seeds.setdefault(row["seed"], []).append(row)
    first = next(iter(seeds.values()))
    update, seconds = (np.array([float(row[x]) for row in first]) for x in ("update", "seconds"))
    intervals = "log_interval", "eval_interval", "score_interval"
    period = np.lcm.reduce([config[name] for name in intervals if config.get(name)])
    phase, cost = update[1:] % period, np.diff(seconds) / np.diff(update)
    cost = np.mean([np.median(cost[phase == i]) for i in np.unique(phase)])
    minutes = update * cost * config["devices"] / len(seeds) / 60  # of one seed's updates
    for row, *others, minute in zip(*seeds.values(), minutes):
        rates = [float(x["eval_solve_rate"]) for x in (row, *others) if x["eval_solve_rate"]]
        if rates:
            numbers = minute, np.mean(rates), min(rates), max(rates)
            names = "minutes", "solve_rate", "lowest", "highest"
            yield {"update": row["update"]} | {k: f"{x:.4g}" for k, x in zip(names, numbers)}


def compare(folders):
    """Markdown: a line for each maze, mean solve rates over seeds beside the published ones."""
    yield f"| maze | {' | '.join(folders)} | published: accel | plr | dr |"
    yield "|" + "---|" * (len(folders) + 4)
    tables = [read(folder / "results.csv") for folder in folders.values()]
    for maze, published in PUBLISHED.items():
        rates = [[float(row["solve_rate"]) for row in table if row["maze"] == maze]
                 for table in tables]  # fmt: skip
        yield f"| {maze} | {' | '.join(f'{x:.2f}' for x in (*map(np.mean, rates), *published))} |"


def plot(folders, path):
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for i, (name, folder) in enumerate(folders.items()):
        table, seeds = (read(folder / f"{what}.csv") for what in ("curve", "results"))
        seeds = len({row["seed"] for row in seeds})
        x, mean, *ends = ([float(row[key]) for row in table] for key in list(table[0])[1:])
        axes.plot(x, mean, color=f"C{i}", label=f"{name}, {seeds} seeds")
        axes.fill_between(x, *ends, color=f"C{i}", alpha=0.15, lw=0)
        if name in MEANS:
            axes.axhline(MEANS[name], color=f"C{i}", ls="--", lw=1)
    axes.set(xlabel="minutes on one core", ylabel="mean solve rate, 12 unseen mazes", ylim=(0, 1))
    axes.set_title("dashed: published, after 30,000 updates on a GPU", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def evaluate(options):
    """Write what --evaluate promises."""
    finished = [name for name in options.methods if done(options.out / name)[1]]
    if not finished:
        sys.exit(f"{options.out}: no run is finished")
    suites = {"sampled": "--levels 2000 --episodes 10", "dcd": f"--episodes {options.episodes}"}
    for name in finished:
        run, into, said = options.out / name, options.results / name, []
        for suite, given in suites.items():  # dcd last: its results.csv is the one to keep
            words = [sys.executable, HERE.parent / "evaluate.py", run, "--suite", suite]
            process = subprocess.run(list(map(str, [*words, *given.split()])),
                                     stdout=subprocess.PIPE, text=True)  # fmt: skip
            if process.returncode:
                sys.exit(f"evaluate.py ended with status {process.returncode}")
            lines = process.stdout.splitlines()
            said += [line for line in lines if not line.endswith(("written", "replaced"))]
        print("\n".join(said), flush=True)
        into.mkdir(parents=True, exist_ok=True)
        (into / "tables.txt").write_text("\n".join(said) + "\n")
        shutil.copy(run / "results.csv", into)
        table = read(run / "logs.csv")
        write(into / "last.csv", [row for row in table if row["update"] == table[-1]["update"]])
        write(into / "curve.csv", list(curve(run)))
    folders = {name: options.results / name for name in METHODS}
    folders = {name: x for name, x in folders.items() if (x / "curve.csv").exists()}
    (options.results / "mazes.md").write_text("\n".join(compare(folders)) + "\n")
    plot(folders, options.results / "learning.png")
    runs = [options.out / name for name in finished]
    words = [sys.executable, HERE.parent / "evaluate.py", *runs, "--play", "--trainings", "1"]
    subprocess.run([*map(str, words), "--out", str(options.results)], check=True)


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--fast", action="store_true", help="the scripts' --fast, on a CPU")
    parser.add_argument("--methods", nargs="+", default=[], help="default: all")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so long")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--devices", type=int, default=1,
                        help="that seeds are dealt over: cores, but 1 is all threads of a CPU")
    parser.add_argument("--options", default="", help="further options of the scripts, quoted")
    parser.add_argument("--out", type=Path, help="default: runs/fast or runs/published")
    parser.add_argument("--evaluate", action="store_true", help="instead of training")
    parser.add_argument("--results", type=Path, help="default: results in --out")
    parser.add_argument("--episodes", type=int, default=100, help="of each maze")
    options = parser.parse_args()
    methods = FAST if options.fast else METHODS
    if unknown := {*options.methods} - {*methods}:
        parser.error(f"--methods {', '.join(unknown)}: allowed are {', '.join(methods)}")
    if options.devices < 1:
        parser.error(f"--devices {options.devices}: allowed is at least 1")
    options.methods = {name: methods[name] for name in options.methods or methods}
    options.out = options.out or Path("runs/fast" if options.fast else "runs/published")
    options.results = options.results or options.out / "results"
    options.options = f"--devices {options.devices} {options.options}"  # the last one counts
    if options.evaluate:
        return evaluate(options)
    deadline = time.time() + 60 * options.minutes
    for name in options.methods:
        if not train(name, options, deadline):
            return
    print("nothing is left to train")


if __name__ == "__main__":
    main()
