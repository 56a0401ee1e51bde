"""Measure the speed of stepping, training, compiling and evaluating, with or without peers.

    python benchmarks/speed.py                                  # half an hour on two CPU cores
    python benchmarks/speed.py --only train --scripts dr plr --peers
    python benchmarks/speed.py --only env --sizes 2048 --rounds 9
    python benchmarks/speed.py --only dcd --peers --dcd FOLDER  # of checkouts: peers/dcd.py
    python benchmarks/speed.py --only compile --against FOLDER  # in turn with another checkout
    python benchmarks/speed.py --only                           # only writes speed.md and speed.png

figures/speed.json holds every measurement, speed.md the tables, speed.png a picture. A run replaces
the entries that it measures again and keeps all others, also those timed "by-hand". Peers are other
libraries. HOW.md explains the method, RESULTS.md has the targets.

Processes take turns: each compiles its programs, runs each once, then runs a program when asked. A
turn lasts 0.2 s or one run, whichever is longer, and yields the median; in a round every program
has one turn. The sections compile and evaluate time whole processes of the command line instead.
Ratios are taken within a round; their median over rounds is shown.
"""

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
SCRIPTS = ("dr", "plr", "accel")
SECTIONS = ("env", "train", "paired", "dcd", "compile", "evaluate", "rnn")
BY_HAND = "by-hand"  # a section that no run of this script replaces
ONE = "ours, one device"  # of several: with --devices 1; it also times the bare network
PEERS = {  # name: arguments of pip install, for each call; jax is the one that runs here
    "jaxued": ["jax jaxued==0.0.1 six"],
    "minimax": [  # its metadata requires a NumPy that is too old for a current JAX
        "jax flax optax chex pandas wandb GitPython ipython tqdm tfp-nightly",
        "--no-deps minimax-lib==0.2.0",
    ],
    "navix": ["jax navix==0.7.4"],
    "xminigrid": ["jax xminigrid==0.9.3"],
    "minigrid": ["jax minigrid==3.2.0"],
    "dcd": [  # what it runs with on Python 3.11; gym asks for packages that are too old
        "torch torchvision numpy==1.23.5 networkx==2.8.8 pandas matplotlib scikit-learn treelib"
        " tqdm cloudpickle scipy pyglet<1.6 six setuptools<70 wheel cython",
        "--no-build-isolation lempel_ziv_complexity",
        "--no-deps gym==0.15.7 gym-minigrid==1.0.1",
    ],
}
BARE = "bare network: forward + 5 gradients"


# --- a worker: one process, one library


def env_programs(library, driver, sizes):
    """Programs that play random actions, drawn beforehand, on N levels; they keep observations."""
    import jax
    import jax.numpy as jnp

    def roll(begin, step, given, actions):
        def act(carry, action):
            obs, state, total = carry
            obs, state, reward = step(state, action)
            return (obs, state, total + reward), None

        carry = *begin(given), jnp.zeros(actions.shape[1])
        (obs, _, total), _ = jax.lax.scan(act, carry, actions)
        return obs, total

    steps = getattr(driver, "STEPS", 256)
    sizes += [2**14, 2**17] if jax.default_backend() == "gpu" else []
    for mode in ("restart", "new level"):
        for number in sizes:
            if made := driver.environment(mode.split()[0], number):
                actions = jax.random.randint(jax.random.key(1), (steps, number), 0, 7)
                run = made  # a plain loop, or parts of a JAX program
                if not callable(made):
                    run = partial(jax.jit(partial(roll, *made[1:])), made[0])
                yield f"{mode}, N = {number}", partial(run, actions), {"env_steps": steps * number}
    if library == "ours":
        yield from driver.levels()


def train_programs(library, driver, script, core, seeds, parallel=True):
    """Programs for each kind of update (ours: each number of seeds) and for the bare network."""
    if library == ONE:
        import jax

        yield from driver.bare(script, core)
        if script == "dr" and max(seeds) > 1:
            yield from driver.bare(script, core, max(seeds))
        if jax.device_count() == 1:  # "ours" then times the same
            return
    rollouts = {"": 2 if script == "paired" else 1}
    if script in ("plr", "accel"):
        edits = script == "accel"
        rollouts = {"replay cycle": 1 + edits, "fresh cycle": 1}
        rollouts |= {"--parallel": 2 + edits} if parallel else {}
    for number in seeds if library == "ours" else [1]:
        for cycle, many in rollouts.items():
            ours = {"seeds": number, "devices": int(library == ONE)}
            given = ours if library in ("ours", ONE) else {}
            given |= {"track_env_metrics": False} if "no level metrics" in library else {}
            name = " ".join([script, *cycle.split(), f"--rnn {core}, {number} seed(s)"])
            notes = {"seeds": number, "env_steps": many * number * 256 * 32}
            yield name, driver.training(script, cycle, core, **given), notes


def dcd_programs(library, driver, scripts):
    """Programs for updates with the published network and with that of --fast: all in a process,
    since one of dcd takes minutes to start."""
    for core in ("lstm", "lstm --hidden-size 64"):
        for script in scripts:
            yield from train_programs(library, driver, script, core, [1], parallel=False)


def work(library, section, settings):
    """Compile and run each program once, report it, then time the programs that stdin names."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints goes to stderr
    sys.path.insert(0, str(HERE.parent))
    driver = importlib.import_module(f"peers.{library.split(',')[0]}")
    jax = importlib.import_module("jax") if library != "dcd" else None
    wait = jax.block_until_ready if jax else lambda result: result
    if section in ("env", "train", "paired", "dcd"):
        make = {"env": env_programs, "dcd": dcd_programs}.get(section, train_programs)
        programs = make(library, driver, **settings)
    else:
        programs = driver.cores(**settings)
    ready, hello = {}, {}
    for name, run, notes in programs:
        ready[name] = run
        wait(run())
        hello[name] = notes
    if jax:
        device = jax.devices()[0].device_kind
        versions = f"jax {jax.__version__} on {jax.device_count()} x {device}"
    else:
        versions = driver.VERSIONS
    print(json.dumps([hello, versions]), file=answers, flush=True)
    for line in sys.stdin:
        seconds = []
        while sum(seconds) < 0.2:
            start = time.perf_counter()
            wait(ready[line.strip()]())
            seconds.append(time.perf_counter() - start)
        print(json.dumps(median(seconds)), file=answers, flush=True)


def uncached():
    return os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}


class Worker:
    """A process that runs `work`, as seen from this one."""

    def __init__(self, library, python, section, settings):
        self.library, self.errors = library, tempfile.TemporaryFile("w+")
        command = [python, __file__, "--worker", library, section, json.dumps(settings)]
        environment = uncached() if section == "rnn" else os.environ  # rnn times compilation
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | environment  # they share a GPU
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)
        self.process = subprocess.Popen(command, text=True, env=environment, **pipes)

    def ask(self, line=None):
        if line:
            print(line, file=self.process.stdin, flush=True)
        if answer := self.process.stdout.readline():
            return json.loads(answer)
        self.errors.seek(0)
        raise RuntimeError(([""] + self.errors.read().split("\n"))[-2][:150] or "no answer")


# --- taking turns


def install(name, folder):
    """The Python of a peer's virtual environment, which is created if it is missing."""
    present = f"jax=={importlib.metadata.version('jax')}"
    calls = [call.replace("jax ", f"{present} ", 1).split() for call in PEERS[name]]
    venv, wanted = Path(folder).expanduser() / name, json.dumps(calls)
    python, done = venv / "bin" / "python", venv / "installed.json"
    if not done.exists() or done.read_text() != wanted:
        print(f"installing {name} in {venv}", file=sys.stderr)
        commands = [[shutil.which("python3.11") or sys.executable, "-m", "venv", "--clear", venv]]
        commands += [[python, "-m", "pip", "install", "--quiet", *call] for call in calls]
        for command in commands:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=1800)
            if ended.returncode:
                errors = [line for line in ended.stderr.splitlines() if "rror" in line]
                raise RuntimeError(f"not installed: {(errors or ['failed'])[-1][:150]}")
        done.write_text(wanted)
    return python


def measure(section, settings, rounds, peers, folder):
    """The rows of all libraries, with the seconds of every round, and their versions."""
    ours = [ONE, "ours"] if section in ("train", "paired") else ["ours"]
    rows, versions = {}, {}
    workers = [Worker(library, sys.executable, section, settings) for library in ours]
    failed = lambda peer, e: {"library": peer, "name": "not measured", "why": str(e)}
    for peer in peers:
        try:
            python = install(peer.split(",")[0], folder)
            workers.append(Worker(peer, python, section, settings))
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            rows[peer] = failed(peer, error)
    for worker in list(workers):
        try:
            hello, versions[worker.library] = worker.ask()
            for name, notes in hello.items():
                rows[name, worker.library] = {"library": worker.library, "name": name} | notes
        except RuntimeError as error:
            if worker.library in ours:
                raise
            rows[worker.library] = failed(worker.library, error)
            workers.remove(worker)
    names = list(dict.fromkeys(row["name"] for row in rows.values()))
    for _ in range(rounds):
        for name in names:
            for worker in workers:
                if row := rows.get((name, worker.library)):
                    row.setdefault("seconds", []).append(worker.ask(name))
    for worker in workers:
        worker.process.stdin.close()
        worker.process.wait()
    return sorted(rows.values(), key=lambda row: names.index(row["name"])), versions


def command(*words):
    """Run a script to its end -> what it printed, seconds, peak memory in GiB."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        streams = dict(stdout=output, stderr=subprocess.STDOUT)
        process = subprocess.Popen([sys.executable, *words], env=uncached(), **streams)
        process.returncode, usage = os.wait4(process.pid, 0)[1:]
        seconds = time.perf_counter() - start
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise RuntimeError(f"{words} failed:\n{text}")
    return text, seconds, usage.ru_maxrss / 2**20


def compilation(folder, run, script, core, seeds):
    """Seconds to compile updates with evaluation, as a script prints them; peak memory.

    Since commit 71c16be they exclude tracing, which every run does once before compilation."""
    options = f"--rnn {core} --seeds {seeds} --num-updates 2 --log-interval 2"
    if script == "paired":
        options += f" --teacher-rnn {core}" + " --teacher-filters 32" * (core == "s5")
    text, _, memory = command(folder / f"{script}.py", *options.split(), "--out", run)
    return float(re.search(r"compiled.* in (\S+) s", text)[1]), memory


def evaluation(folder, run, episodes):
    """Seconds of evaluate.py on the suite dcd, for a student trained for one cycle; peak memory."""
    command(folder / "dr.py", *"--num-updates 1 --eval-interval 0 --out".split(), run)
    words = f"--suite dcd --episodes {episodes}".split()
    return command(folder / "evaluate.py", run, *words)[1:]


COMMANDS = {  # section: the function that measures it, its name in the table
    "compile": (compilation, "{script} --rnn {core}, {seeds} seed(s)"),
    "evaluate": (evaluation, "dcd, 12 mazes x {episodes}"),
}


def measure_commands(section, settings, rounds, against):
    """The rows of whole processes: of this checkout and, taking turns, of another one."""
    once, name = COMMANDS[section]
    folders = {"ours": HERE.parent} | ({f"ours, {against.name}": against} if against else {})
    rows = [{"library": x, "name": name.format(**settings), "seconds": []} for x in folders]
    with tempfile.TemporaryDirectory() as scratch:
        for i in range(rounds):
            for row, folder in zip(rows, folders.values()):
                run = f"{scratch}/{i} {row['library']}"
                seconds, row["memory"] = once(folder, run, **settings)
                row["seconds"].append(seconds)
    return rows


def groups(options):
    """Yield what is measured together: (section, title, settings, peers)."""
    cases = [(script, core) for script in options.scripts for core in options.cores]
    paired = [("paired", core) for core in options.cores]
    numbers = lambda core: options.seeds[: None if core == options.cores[0] else 1]
    for section in options.only:
        if section == "env":
            yield section, "", {"sizes": options.sizes}, [x for x in PEERS if x != "dcd"]
        elif section == "dcd":
            scripts = [x for x in options.scripts if x != "accel"]
            if options.dcd and options.peers:
                yield section, "", {"scripts": scripts}, ["dcd"]
        elif section in ("train", "paired"):
            for script, core in cases if section == "train" else paired:
                seeds = numbers(core) if section == "train" else [1]
                settings = {"script": script, "core": core, "seeds": seeds}
                yield section, f"{script} {core}", settings, options.training_peers
        elif section == "compile":
            for script, core in [*cases, *paired]:
                for number in numbers(core) if script != "paired" else [1]:
                    settings = {"script": script, "core": core, "seeds": number}
                    yield section, f"{script} {core} {number}", settings, []
        else:
            episodes = {"episodes": options.episodes}
            yield section, "", episodes if section == "evaluate" else {"sizes": [32, 1024]}, []


# --- tables and picture


def derive(rows):
    """Combine rows: bare network = forward + 5 gradients; half of each = mean of both cycles."""
    find = {(row["name"], row["library"]): row for row in rows}
    combined = []
    for (name, library), row in find.items():
        if name.endswith("bare forward"):
            other = find[name.replace("forward", "gradient"), library]
            name, weights = name.replace("bare forward", BARE), (1, 5)
        elif "replay cycle" in name:
            combined.append(row)
            other = find[name.replace("replay", "fresh"), library]
            name, weights = name.replace("replay cycle", "half of each"), (0.5, 0.5)
        else:
            combined += [] if name.endswith("bare gradient") else [row]
            continue
        mix = lambda x, y: weights[0] * x + weights[1] * y
        new = row | {"name": name, "seconds": list(map(mix, row["seconds"], other["seconds"]))}
        if "env_steps" in row:
            new["env_steps"] = mix(row["env_steps"], other["env_steps"])
        combined.append(new)
    return combined


def ratio(row, other, work):
    """Median over rounds of row's time per work / other's, where row does `work` times as much."""
    return median(x / y / work for x, y in zip(row["seconds"], other["seconds"]))


def summarise(section, rows):
    """Add `shown` to each row: {column: text} of the tables."""
    rows = derive(rows) if section in ("train", "paired", "dcd") else rows
    find = {(row["name"], row["library"]): row for row in rows}
    for row in rows:
        shown, seeds = row.setdefault("shown", {}), row.get("seeds", 1)
        alone = row["name"].replace(f", {seeds} seed", ", 1 seed"), ONE
        ours = find.get((row["name"], "ours"), row)
        if section in COMMANDS:
            shown["s"] = f"{median(row['seconds']):.1f}"
            shown["peak memory, GiB"] = f"{row['memory']:.2f}"
            if ours is not row:
                ours["shown"]["x the other checkout"] = f"{ratio(ours, row, 1):.2f}"
        elif "seconds" in row:
            ms = 1e3 * median(row["seconds"]) / seeds
            shown["ms" + " a seed" * ("seeds" in row)] = f"{ms:.0f}" if ms > 100 else f"{ms:.3g}"
            if "env_steps" in row:
                shown["env steps/s"] = f"{row['env_steps'] / median(row['seconds']):,.0f}"
            if (BARE, ONE) in find:
                row["bare"] = ratio(row, find[BARE, ONE], seeds)
                shown["x bare network"] = f"{row['bare']:.2f}"
            if row["library"] == "ours" and alone in find:
                shown["x one seed, one device"] = f"{ratio(row, find[alone], seeds):.2f}"
            elif row is not ours and row["library"] != ONE:
                row["speedup"] = ratio(row, ours, row["env_steps"] / ours["env_steps"])
                shown["ours is faster by"] = f"{row['speedup']:.2f}"
        if "compile" in row:
            shown["compile, s"] = f"{row['compile']:.1f}"
        if "why" in row:
            shown["note"] = row["why"]
    return rows


def tables(data):
    """The text of speed.md: a table for each section, with all its entries."""
    text = ["# Speed\n\nMade by `python benchmarks/speed.py`. What is what: ../HOW.md."]
    for section in (*SECTIONS, BY_HAND):
        entries = [entry for key, entry in data.items() if key.split()[0] == section]
        rows = [row for entry in entries for row in entry["rows"]]
        if not rows:
            continue
        columns = list(dict.fromkeys(column for row in rows for column in row["shown"]))
        lines = [["library", section, *columns], ["---"] * (len(columns) + 2)]
        for row in rows:
            name = row["library"].replace("ours", "**this project**")
            lines.append([name, row["name"], *(row["shown"].get(c, "") for c in columns)])
        text += [f"\n## {section}\n", *("| " + " | ".join(line) + " |" for line in lines), ""]
        facts = lambda x: f"`{x['command']}`, {x['date']}, {x['machine']}, {x['versions']['ours']}"
        text.append("; ".join(dict.fromkeys(map(facts, entries))))
    return "\n".join(text) + "\n"


def picture(data, path):
    """Draw speed.png: this project beside JaxUED and minimax, which have the same mazes."""
    from matplotlib.figure import Figure

    names = {"ours": "this project", "jaxued": "JaxUED", "minimax": "minimax",
             "minimax, no level metrics": "minimax, level\nmetrics off"}  # fmt: skip
    stepping = lambda row: row["env_steps"] / median(row["seconds"]) / 1e6
    update = lambda row: row.get("speedup", 1.0)  # its time / ours, measured in turn
    faster = "million steps a second in 2,048 mazes\n(longer bar: faster)"
    slower = "time of an update, this project = 1\n(longer bar: slower)"
    panels = [  # section, row, title, axis, value, label
        ("env", "restart, N = 2048", "stepping: an ended maze restarts", faster, stepping, "%.2g"),
        ("env", "new level, N = 2048", "stepping: a new maze follows", faster, stepping, "%.2g"),
        ("train", "dr --rnn lstm, 1 seed(s)", "training: DR", slower, update, "%.2f"),
        ("train", "plr replay cycle --rnn lstm, 1 seed(s)", "training: PLR, a cycle that learns",
         slower, update, "%.2f"),
    ]  # fmt: skip
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    for axis, (section, name, title, label, value, form) in zip(figure.subplots(2, 2).flat, panels):
        found = {}  # library -> its label and value
        for key, entry in data.items():
            how = "\n(timed by hand)" * (key.split()[0] == BY_HAND)
            for row in entry["rows"] if key.split()[0] in (section, BY_HAND) else []:
                if row["name"] == name and row["library"] in names and "seconds" in row:
                    word = names[row["library"]] + how * (row["library"] != "ours")
                    found[row["library"]] = word, value(row)
        present = [library for library in names if library in found][::-1]
        colors = ["C0" if library == "ours" else "0.6" for library in present]
        words, values = zip(*map(found.get, present)) if found else ((), ())
        bars = axis.barh(words, values, 0.65, color=colors)
        axis.bar_label(bars, fmt=form, padding=3, fontsize=10)
        axis.set_title(title, fontsize=11)
        axis.set_xlabel(label, fontsize=10)
        axis.margins(x=0.22)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--only", nargs="*", choices=SECTIONS, default=SECTIONS, help="sections", metavar="SECTION")
    add("--peers", action="store_true", help="also measure other libraries")
    add("--against", type=Path, metavar="FOLDER", help="a checkout to compile and evaluate with")
    add("--dcd", type=Path, metavar="FOLDER", help="with checkouts of dcd and of openai/baselines")
    add("--peer-folder", default="~/.cache/ued-speed-peers", help="for their venvs")
    some = ["minimax", "minimax, no level metrics"]
    add("--training-peers", nargs="+", metavar="PEER", default=some, help="in train and paired")
    add("--scripts", nargs="+", choices=SCRIPTS, default=SCRIPTS)
    add("--cores", nargs="+", default=["lstm", "s5"], help="some of lstm gru s5")
    words = "the first core is timed with all, others only with the first"
    add("--seeds", nargs="+", type=int, default=[1, 8], help=words)
    add("--sizes", nargs="+", type=int, default=[32, 256, 2048], help="N in env")
    add("--episodes", type=int, default=50, help="per maze in evaluate")
    add("--rounds", type=int, default=3)
    add("--out", type=Path, default=HERE / "figures", help="folder of speed.json, .md and .png")
    add("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        library, section, settings = options.worker
        return work(library, section, json.loads(settings))

    options.out.mkdir(parents=True, exist_ok=True)
    store = options.out / "speed.json"
    data = json.loads(store.read_text()) if store.exists() else {}
    words = sys.argv[1:]
    for place in {"--peer-folder", "--out"} & set(words):  # they belong to this machine
        del words[words.index(place) : words.index(place) + 2]
    if "--against" in words:
        words[words.index("--against") + 1] = options.against.name
    if "--dcd" in words:
        words[words.index("--dcd") + 1] = "FOLDER"
        os.environ["DCD"] = str(options.dcd.resolve())
    entry = {
        "command": " ".join(["python benchmarks/speed.py", *words]),
        "date": str(datetime.date.today()),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores",
    }
    for section, title, settings, peers in groups(options):
        if section in COMMANDS:
            rounds = options.rounds if section == "evaluate" or options.against else 1
            rows = measure_commands(section, settings, rounds, options.against)
            versions = {"ours": f"jax {importlib.metadata.version('jax')}"}
        else:
            peers = peers if options.peers else []
            where = peers, options.peer_folder
            rows, versions = measure(section, settings, options.rounds, *where)
        rows = summarise(section, rows)
        data[f"{section} {title}".strip()] = entry | {"versions": versions, "rows": rows}
        for row in rows:
            print(section, row["library"], row["name"], row["shown"], sep=" | ", flush=True)
        store.write_text(json.dumps(data, indent=1) + "\n")
    (options.out / "speed.md").write_text(tables(data))
    import matplotlib.style  # workers do without it

    with matplotlib.style.context("default"):
        picture(data, options.out / "speed.png")


if __name__ == "__main__":
    main()
