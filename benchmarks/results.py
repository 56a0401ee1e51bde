"""The published experiment: every method with 8 seeds, then the 12 unseen mazes of the dcd suite.

    python benchmarks/results.py --minutes 9     # again and again, until nothing is left to train
    python benchmarks/results.py --evaluate      # what is trained, beside the published figures

Runs are trained one after the other, in order of interest. Each goes on from its checkpoint, so a
piece may end when its minutes are over; the run that is going on then saves and stops. All get
about 30,000 gradient updates, the published length: the scripts' own defaults count the cycles.
"""

import argparse
import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
S5 = "--rnn s5 --lr 1e-4 --ent-coef 1e-3"
S5_PARALLEL = "--parallel --rnn s5 --lr 1e-4 --gae-lambda 0.98 --ent-coef 1e-3"
METHODS = {  # name: script and options (README, "S5 policies")
    "accel": "accel.py",
    "plr": "plr.py",
    "dr": "dr.py",
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
PUBLISHED = {  # solve rates of dcd's own result files, 5 seeds: ACCEL, robust PLR, DR
    "SixteenRooms": (1.00, 0.95, 0.87), "SixteenRooms2": (0.93, 0.49, 0.53),
    "Labyrinth": (0.74, 0.55, 0.45), "Labyrinth2": (0.85, 0.66, 0.54),
    "StandardMaze": (0.78, 0.54, 0.43), "StandardMaze2": (1.00, 0.74, 0.49),
    "StandardMaze3": (0.84, 0.75, 0.69), "SimpleCrossing": (0.79, 0.87, 0.57),
    "FourRooms": (0.68, 0.64, 0.77), "SmallCorridor": (1.00, 0.89, 1.00),
    "LargeCorridor": (0.99, 0.79, 0.64), "PerfectMazeMedium": (0.90, 0.62, 0.45),
}  # fmt: skip


def done(folder):
    """Cycles of a run in its logs, and whether they are all."""
    try:
        with open(folder / "logs.csv", newline="") as file:
            updates = [int(row["update"]) for row in csv.DictReader(file)]
    except FileNotFoundError:
        return 0, False
    wanted = json.loads((folder / "config.json").read_text())["num_updates"]
    return max(updates, default=0), max(updates, default=0) == wanted


def train(name, options, deadline):
    """Train a method until it is done or the time is over -> whether it is done."""
    folder = options.out / name
    if not done(folder)[1]:
        script, *given = METHODS[name].split()
        given += f"--seeds {options.seeds} {options.options}".split()
        given = ["--resume"] if (folder / "config.json").exists() else given
        words = [sys.executable, HERE.parent / script, *given, "--out", folder]
        process = subprocess.Popen(list(map(str, words)))
        try:
            status = process.wait(max(deadline - time.time(), 1))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # it finishes its chunk, saves and ends
            status = process.wait()
        if status not in (0, 128 + signal.SIGTERM):
            sys.exit(f"{name}: {script} ended with status {status}")
    print(f"{name}: {done(folder)[0]} cycles", flush=True)
    return done(folder)[1]


def evaluate(options):
    """results.csv (evaluate.py's, of all finished runs), and a table beside the published one."""
    runs = [options.out / name for name in options.methods if done(options.out / name)[1]]
    if not runs:
        sys.exit(f"{options.out}: no run is finished")
    command = [sys.executable, HERE.parent / "evaluate.py", *runs, "--suite", "dcd"]
    command += ["--episodes", options.episodes, "--out", options.out]
    subprocess.run(list(map(str, command)), check=True)
    with open(options.out / "results.csv", newline="") as file:
        table = list(csv.DictReader(file))
    print("\n| maze |", " | ".join(run.name for run in runs), "| published: accel | plr | dr |")
    print("|" + "---|" * (len(runs) + 4))
    for maze, published in PUBLISHED.items():
        means = []
        for run in runs:
            rates = [float(row["solve_rate"]) for row in table
                     if Path(row["run"]).name == run.name and row["maze"] == maze]
            means.append(sum(rates) / len(rates))
        print(f"| {maze} |", " | ".join(f"{x:.2f}" for x in [*means, *published]), "|")


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so long")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--options", default="", help="further options of the scripts, quoted")
    parser.add_argument("--out", type=Path, default=Path("runs/results"))
    parser.add_argument("--evaluate", action="store_true", help="instead of training")
    parser.add_argument("--episodes", type=int, default=100, help="of each maze")
    options = parser.parse_args()
    if options.evaluate:
        return evaluate(options)
    deadline = time.time() + 60 * options.minutes
    for name in options.methods:
        if not train(name, options, deadline):
            return
    print("nothing is left to train")


if __name__ == "__main__":
    main()
