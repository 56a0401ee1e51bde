"""Train the methods with several seeds each, and evaluate them on mazes that none trained on.

    python benchmarks/results.py --fast          on a CPU: minutes of one core for each training
    python benchmarks/results.py                 the published lengths, about 30,000 PPO updates
    python benchmarks/results.py --minutes 60    stops after an hour; repeat until nothing is left
    python benchmarks/results.py --evaluate      no training, only evaluates what is trained

Methods are trained one after the other, in order of interest; each continues from its checkpoint.
When all are trained, or with --evaluate, --results gets a folder for each finished method:
`dcd.csv` and `families.csv` (every seed on every maze), `tables.txt`, `logs.csv` (the columns that
pages and pictures read), `curve.csv` (solve rate of every seed on dcd's mazes against minutes and
cost). It also gets `mazes.md` and `learning.png` (all methods with a folder there), a row for each
finished method in `records.csv`, and `play.html`, where the first training of each method's last
evaluated run plays.

Costs are in minutes of one core and in published PPO updates. One such update is that of `dr.py`
with its defaults, timed just before each method on as many cores. Pages and pictures show the
latter, as minutes of UPDATE. `--changed` goes to records.csv.
"""

import argparse
import csv
import gzip
import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.style
import numpy as np
from flax import serialization, traverse_util
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import evaluate as evaluation  # noqa: E402
from dr import read_checkpoint  # noqa: E402

S5 = "--rnn s5 --lr 1e-4 --ent-coef 1e-3"
S5_PARALLEL = "--parallel --rnn s5 --lr 1e-4 --gae-lambda 0.98 --ent-coef 1e-3"
RATES = "--eval-interval 150 --log-interval 50 --archive-interval 250"
FAST = {name: f"{name}.py --fast {RATES}" for name in ("accel", "plr", "sfl", "dr", "paired")}
QUICK = f"plr.py --fast --no-anneal-lr {RATES} --num-updates"  # aims at 0.80 and 0.90 of dcd's
FAST |= {f"plr_{n}": f"{QUICK} {n}" for n in (1650, 3300)}
for name in ("plr", "accel"):
    FAST[f"{name}_optimistic"] = f"{FAST[name]} --score optimistic_max_mc"
    FAST[f"{name}_oracle"] = f"{FAST[name]} --score oracle_regret"
FAST["dr_auto_replay"] = f"{FAST['dr']} --auto-replay"
FAST["dr_60"] = f"{FAST['dr']} --ent-coef 1e-3 --n-walls 60"
FAST["dr_all"] = f"{FAST['dr_60']} --no-solvable-only"
FAST["plr_quick"] = f"plr.py --quick --seed 200 {RATES}"
FAST["plr_1650_optimistic"] = f"{FAST['plr_optimistic']} --lr 6e-3 --num-updates 1650"
METHODS = {  # name: script and options; for S5 the published ones
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
LOGGED = (  # columns of logs.csv that results/ keeps
    "update|grad_updates|env_steps|seed|seconds|(train|eval)_solve_rate|teacher_entropy|"
    r"buffer_(walls|mutations)_weighted|never_solved_regret_share|rank_correlation_\w+"
)
SEEDS = dict.fromkeys(["accel", "plr", "plr_optimistic", "plr_1650_optimistic"], 16)  # others: 8
SUITES = "dcd", "families"
TITLES = {"accel": "ACCEL", "plr": "robust PLR", "sfl": "SFL", "dr": "DR", "paired": "PAIRED",
          "plr_quick": "plr.py --quick"}  # fmt: skip
UPDATE = 1.675 / 60  # minutes of a published update when most methods were timed
MEANS = {"accel": 0.83, "plr": 0.82, "dr": 0.55, "paired": 0.63}  # minimax's paper, 30,000 updates
PUBLISHED = {  # solve rates in dcd's own result files, 5 seeds: ACCEL, robust PLR, DR
    "SixteenRooms": (1.00, 0.95, 0.87), "SixteenRooms2": (0.93, 0.49, 0.53),
    "Labyrinth": (0.74, 0.55, 0.45), "Labyrinth2": (0.85, 0.66, 0.54),
    "StandardMaze": (0.78, 0.54, 0.43), "StandardMaze2": (1.00, 0.74, 0.49),
    "StandardMaze3": (0.84, 0.75, 0.69), "SimpleCrossing": (0.79, 0.87, 0.57),
    "FourRooms": (0.68, 0.64, 0.77), "SmallCorridor": (1.00, 0.89, 1.00),
    "LargeCorridor": (0.99, 0.79, 0.64), "PerfectMazeMedium": (0.90, 0.62, 0.45),
}  # fmt: skip


def read(path):
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", newline="") as file:
        return list(csv.DictReader(file))


def done(folder):
    """The number of cycles in a run's checkpoint, and whether the run is finished."""
    if not (folder / "checkpoint.msgpack").exists():
        return 0, False
    cycles = read_checkpoint(folder / "checkpoint.msgpack")["cycles"]
    return cycles, cycles == json.loads((folder / "config.json").read_text())["num_updates"]


def call(script, *words, **options):
    """Start a script -> its process."""
    words = [sys.executable, HERE.parent / script, *words]
    return subprocess.Popen([str(word) for word in words], **options)


def train(name, options, deadline):
    """Train a method until it is finished or time is up -> whether it is finished."""
    folder, unit = options.out / name, options.out / f"{name}_unit"
    if not done(unit)[1]:  # time published PPO updates, on as many devices as the method
        shutil.rmtree(unit, ignore_errors=True)
        given = "--num-updates 24 --log-interval 4 --eval-interval 0 --plot-interval 0"
        devices = f"--seeds {options.devices} --devices {options.devices}"
        call("dr.py", *f"{given} {devices}".split(), "--out", unit).wait()
    if not done(folder)[1]:
        script, *given = options.methods[name].split()
        seeds = options.seeds or SEEDS.get(name, 8)
        given += f"--eval-suite dcd --seeds {seeds} {options.options}".split()
        given += ["--resume"] if (folder / "config.json").exists() else []
        process = call(script, *given, "--out", folder)
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


def seconds_of_an_update(run):
    """For one seed on one core. Medians over log rows, so that pauses do not count; rows with an
    evaluation or SFL's scoring have their own medians, and the result is the mean of all."""
    config = json.loads((run / "config.json").read_text())
    table = [row for row in read(run / "logs.csv") if row["seed"] == str(config["seed"])]
    update, seconds = (np.array([float(row[x]) for row in table]) for x in ("update", "seconds"))
    intervals = "log_interval", "eval_interval", "score_interval"
    period = np.lcm.reduce([config[name] for name in intervals if config.get(name)])
    phase, cost = update[1:] % period, np.diff(seconds) / np.diff(update)
    cost = np.mean([np.median(cost[phase == i]) for i in np.unique(phase)])
    return cost * max(config["devices"], 1) / config["seeds"]


def curve(run, unit):
    """Yield rows: each seed's solve rate on the run's eval_suite, and the cost up to there."""
    rates, cost = {}, seconds_of_an_update(run)
    for row in read(run / "logs.csv"):
        if row["eval_solve_rate"]:
            x = rates.setdefault(int(row["update"]), {})
            x[f"seed {row['seed']}"] = f"{float(row['eval_solve_rate']):.4f}"
    for update, x in rates.items():
        spent = {"minutes": update * cost / 60, "published_updates": update * cost / unit}
        yield {"update": update} | {k: f"{x:.4g}" for k, x in spent.items()} | x


def scores(folder, suite="dcd"):
    """Solve rates [S, M] from a method's folder, and the names of the mazes."""
    table = read(folder / f"{suite}.csv")
    seeds, mazes = (list(dict.fromkeys(row[k] for row in table)) for k in ("seed", "maze"))
    return np.array([float(x["solve_rate"]) for x in table]).reshape(len(seeds), -1), mazes


def compare(folders):
    """Yield the lines of a Markdown table: for each maze the methods' mean solve rates over seeds,
    then those of the baselines that do not learn (baselines.py), and the published ones."""
    unlearned = {row["maze"]: row for row in read(HERE / "results" / "baselines.csv")}
    players = [name for name in unlearned["mean"] if name not in ("suite", "maze")]
    yield f"| maze | {' | '.join([*folders, *players])} | published: accel | plr | dr |"
    yield "|" + "---|" * (len(folders) + len(players) + 4)
    for suite in SUITES:
        known = {
            name: folder for name, folder in folders.items() if (folder / f"{suite}.csv").exists()
        }
        tables = {name: scores(folder, suite) for name, folder in known.items()}
        for i, maze in enumerate(next(iter(tables.values()))[1]):
            means = {name: f"{table[:, i].mean():.2f}" for name, (table, _) in tables.items()}
            rates = [means.get(name, "") for name in folders]
            rates += [f"{float(unlearned[maze][player]):.2f}" for player in players]
            published = [f"{x:.2f}" for x in PUBLISHED.get(maze, ())] or [""] * 3
            yield f"| {maze} | {' | '.join(rates + published)} |"


@matplotlib.style.context("default")
def plot(folders, path):
    """Draw a panel for each method (seeds, their mean, a published mean) and one of all means."""
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    panels = figure.subplots(2, 4, sharex=True, sharey=True).ravel()
    *panels, together, last = panels
    for i, ((name, folder), axes) in enumerate(zip(folders.items(), panels)):
        table = read(folder / "curve.csv")
        seeds = [key for key in table[0] if key.startswith("seed")]
        column = lambda key: np.array([float(row[key]) for row in table])
        minutes = column("published_updates") * UPDATE
        rates = np.stack([column(key) for key in seeds], 1)
        mean, title = rates.mean(1), f"{TITLES.get(name, name)}, {len(seeds)} seeds"
        axes.plot(minutes, rates, color=f"C{i}", lw=0.6, alpha=0.5)
        for where in (axes, together):
            where.plot(minutes, mean, color=f"C{i}", lw=2, label=TITLES.get(name, name))
        if name in MEANS:
            axes.axhline(MEANS[name], color="0.3", ls="--", lw=1)
            axes.annotate(
                f"minimax's paper {MEANS[name]:.2f}",
                (1, MEANS[name] - 0.01),
                ha="right",
                va="top",
                xycoords=("axes fraction", "data"),
                fontsize=8,
                color="0.3",
            )
        axes.set_title(title, fontsize=10)
    for axes in (*panels[len(folders) :], last):
        axes.set_visible(False)
    together.set_title("their means", fontsize=10)
    table = read(HERE / "results" / "baselines.csv")
    [unlearned] = [row for row in table if (row["suite"], row["maze"]) == ("dcd", "mean")]
    for player, style in {"left hand": ":", "right hand": "--"}.items():
        rate = float(unlearned[player])
        together.axhline(rate, color="0.3", ls=style, lw=1, label=f"{player} on the wall")
    figure.legend(*together.get_legend_handles_labels(), loc=(0.78, 0.15), frameon=False)
    for axes in (*panels, together):
        axes.set(ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    figure.supxlabel("minutes of one CPU core for each training", fontsize=10)
    figure.supylabel("solve rate, mean of 12 unseen mazes (1: all)", fontsize=10)
    figure.savefig(path, dpi=100)


def record(name, options, said):
    """Write a method's row at this commit to records.csv; an older one is replaced."""
    into, path = options.results / name, options.results / "records.csv"
    words = dict(cwd=HERE, text=True, stdout=subprocess.PIPE, shell=True)  # there may be no git
    commit = subprocess.run("git rev-parse --short HEAD", **words).stdout.strip() or "unknown"
    last, dcd, families = read(into / "curve.csv")[-1], *(scores(into, x)[0] for x in SUITES)
    over_seeds = lambda x: evaluation.bootstrap(x, lambda x: np.array([x.mean()]), 0)[0]
    mean = lambda x: evaluation.show(*over_seeds(x))
    head, row = (re.split(r"\s{2,}", line) for line in said.splitlines()[-2:])
    worst = dict(zip(head, row)).get("worst 1%", "")
    row = {"method": name, "seeds": len(dcd), "minutes": last["minutes"],
           "published updates": last["published_updates"], "dcd": mean(dcd),
           "worst seed": f"{dcd.mean(1).min():.3f}", "families": mean(families),
           "worst seed there": f"{families.mean(1).min():.3f}", "worst 1% of random levels": worst,
           "changed": options.changed, "commit": commit}  # fmt: skip
    rows = read(path) if path.exists() else []
    rows = [x for x in rows if (x["method"], x["commit"]) != (name, commit)]
    write(path, [*rows, row])


def keep_log(run, into):
    """Write logs.csv without the columns that no page or picture reads."""
    rows = read(run / "logs.csv")
    kept = [name for name in rows[0] if re.fullmatch(LOGGED, name)]
    write(into / "logs.csv", [{name: row[name] for name in kept} for row in rows])


def keep_agents(page, before):
    """The new play.html, with agents of the earlier one for methods that the new one lacks."""
    held = lambda text: json.loads(text.split('id="data">')[1].split("</script>")[0])
    if not before:
        return page
    method, data = lambda agent: agent["name"].split()[0], held(page)
    new = {method(agent) for agent in data["agents"]}
    data["agents"] += [agent for agent in held(before)["agents"] if method(agent) not in new]
    data["agents"].sort(key=lambda agent: [*METHODS, *FAST].index(method(agent)))
    head, tail = page.split('id="data">')
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f'{head}id="data">\n{text}\n</script>{tail.split("</script>", 1)[1]}'


def keep_first_agent(run, into):
    """Write a run folder with only the parameters of the first training, for evaluate.py."""
    data = read_checkpoint(run / "checkpoint.msgpack")
    if "student" not in data["state"]:  # PAIRED has several
        return
    student = data["state"]["student"]
    params = student.get("average_params") or student["params"]
    params = {name: x[:1] for name, x in traverse_util.flatten_dict(params).items()}
    config = json.loads(data["config"]) | {"seeds": 1, "out": ""}
    data |= {"config": json.dumps(config, indent=2), "rows": data["rows"][:1]}
    data["state"] = {"student": {"params": traverse_util.unflatten_dict(params)}}
    into.mkdir(parents=True, exist_ok=True)
    (into / "config.json").write_text(data["config"])
    body = serialization.msgpack_serialize(data)
    (into / "checkpoint.msgpack").write_bytes(hashlib.sha256(body).digest() + body)


def evaluate(options):
    """Evaluate the finished methods, and write the files named at the top."""
    finished = [name for name in options.methods if done(options.out / name)[1]]
    if not finished:
        sys.exit(f"{options.out}: no run is finished")
    episodes = f"--episodes {options.episodes}"
    suites = dict.fromkeys(SUITES, episodes) | {"sampled": f"--levels {options.levels}"}
    runs = [options.out / name for name in finished]
    for name, run in zip(finished, runs):
        into, said = options.results / name, {}
        into.mkdir(parents=True, exist_ok=True)
        for suite, given in suites.items():
            words = [run, "--suite", suite, *given.split(), "--out", options.out / "evaluated"]
            process = call("evaluate.py", *words, stdout=subprocess.PIPE, text=True)
            lines = process.communicate()[0].splitlines()
            if process.returncode:
                sys.exit(f"evaluate.py ended with status {process.returncode}")
            lines = [line for line in lines if not line.endswith(("written", "replaced"))]
            said[suite] = "\n".join(lines).strip()
            if suite in SUITES:
                shutil.copy(options.out / "evaluated" / "results.csv", into / f"{suite}.csv")
        print(said["dcd"], flush=True)
        (into / "tables.txt").write_text("\n\n".join(said.values()) + "\n")
        keep_log(run, into)
        unit = seconds_of_an_update(options.out / f"{name}_unit")
        write(into / "curve.csv", list(curve(run, unit)))
        record(name, options, said["sampled"])
    folders = {name: options.results / name for name in ("plr_quick", *METHODS)}
    folders = {name: x for name, x in folders.items() if (x / "curve.csv").exists()}
    if folders:
        (options.results / "mazes.md").write_text("\n".join(compare(folders)) + "\n")
        plot(folders, options.results / "learning.png")
    runs = [options.out / name for name in finished]
    words = [sys.executable, HERE.parent / "evaluate.py", *runs, "--play", "--trainings", "1"]
    subprocess.run([*map(str, words), "--out", str(options.out / "evaluated")], check=True)
    page, into = (x / "play.html" for x in (options.out / "evaluated", options.results))
    before = into.read_text() if into.exists() else ""
    into.write_text(keep_agents(page.read_text(), before))
    keep_first_agent(runs[0], options.results / "agent")


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--fast", action="store_true", help="train with --fast, on a CPU")
    parser.add_argument("--methods", nargs="+", default=[], help="default: all")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after this time")
    parser.add_argument("--seeds", type=int, default=0, help="default: 8 or 16")
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        help="devices (cores) for the seeds; 1 uses all threads of a CPU",
    )
    parser.add_argument("--options", default="", help="further options of the scripts, quoted")
    parser.add_argument("--out", type=Path, help="default: runs/fast or runs/published")
    parser.add_argument("--evaluate", action="store_true", help="evaluate, do not train")
    parser.add_argument("--results", type=Path, help="default: results in --out")
    parser.add_argument("--episodes", type=int, default=100, help="per maze")
    parser.add_argument("--levels", type=int, default=2000, help="random levels, 20 episodes each")
    parser.add_argument("--changed", default="", help="what is new, for records.csv")
    options = parser.parse_args()
    methods = FAST if options.fast else METHODS
    if unknown := {*options.methods} - {*methods}:
        parser.error(f"--methods {', '.join(unknown)}: must be some of {', '.join(methods)}")
    if options.devices < 1:
        parser.error(f"--devices {options.devices}: must be at least 1")
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
    print("nothing is left to train", flush=True)
    evaluate(options)


if __name__ == "__main__":
    main()
