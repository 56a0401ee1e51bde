"""Write the tables of README.md and RESULTS.md from the data in this folder; nothing is trained.

    python benchmarks/tables.py

A page has `<!-- table: NAME -->` above a table and `<!-- end -->` below it. What is between them is
replaced by what the function NAME of `TABLES` returns: rows of cells, the first is the head. Words
around a table are free. tests/test_benchmarks.py fails if a page and its data disagree.
"""

import re
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import pictures  # noqa: E402
from pictures import METHODS, RESULTS, SEARCH, of_seeds  # noqa: E402
from results import MEANS, PUBLISHED, SUITES, TITLES, read, scores  # noqa: E402

SPEED = HERE / "figures" / "speed.md"
PAGES = HERE.parent / "README.md", HERE / "RESULTS.md"
UNPUBLISHED = {f"{x}_{score}": f"{TITLES[x]}, {word}" for score, word in (
    ("optimistic", "optimistic"), ("oracle", "true regret")) for x in ("plr", "accel")}  # fmt: skip
UNPUBLISHED = {"dr_auto_replay": "DR, levels repeated", **UNPUBLISHED}
OTHER_LEVELS = {"dr_60": "DR, 60 walls", "dr_all": "DR, 60 walls, all levels"}


# --- cells


def show(*values, digits=3):
    """A number, or a value with its interval, if there is one: "0.926 [0.894, 0.953]"."""
    value, *ends = (f"{round(float(x), digits) + 0.0:.{digits}f}" for x in values)
    return f"{value} [{', '.join(ends)}]" if ends and "nan" not in ends else value


def signed(*values):
    """A difference, with a sign, and its interval."""
    return f"+{show(*values)}" if round(float(values[0]), 3) > 0 else show(*values)


def mean(name, suite):
    """A method's mean over seeds of its solve rate on a suite, with an interval."""
    return show(*pictures.interval(scores(RESULTS / name, suite)[0]))


def hardest(name, share="worst 10%"):
    """The mean over seeds on each seed's own hardest random levels."""
    return show(pictures.worst(name, share)[:, 0].mean())


def difference(one, other, suite):
    return signed(*pictures.difference(one, other, suite))


def hardest_difference(one, other):
    """On each seed's own hardest hundredth; its interval is from those of the groups of seeds in
    tables.txt, as if they were normally distributed."""
    one, other = (pictures.worst(x, "worst 1%") for x in (one, other))
    gain = one[:, 0].mean() - other[:, 0].mean()
    spread = np.hypot(*(np.linalg.norm(np.ptp(x[:, 1:], 1)) / 2 / len(x) for x in (one, other)))
    return signed(gain, gain - spread, gain + spread)


# --- the data of searches, of a GPU, and of speed.md


def chosen(change, script="plr.py", cycles="7500", suite="families"):
    """Solve rates of the seeds of a setting in oracle.csv; by the true regret if it names none."""
    which = script, change, cycles
    rows = read(SEARCH / "oracle.csv")
    rows = [x for x in rows if (x["script"], x["changed"], x["num_updates"]) == which]
    return np.array([float(row[suite]) for row in rows])


def hardest_chosen(change, script="plr.py", cycles="7500"):
    """The mean over seeds on each seed's hardest hundredth, of one setting in hardest.csv."""
    rows, which = read(SEARCH / "hardest.csv"), (script, change, cycles)
    rows = [x for x in rows if (x["script"], x["changed"], x["num_updates"]) == which]
    ends = [[int(x) for x in row["seeds"].split(" to ")] for row in rows]
    rates = [float(row["worst 1%"].split()[0]) for row in rows]
    return show(np.average(rates, weights=[last - first + 1 for first, last in ends]))


def on_a_gpu(score, rate):
    """Of eight seeds of PLR at a learning rate, trained on an H200: solve rates [8] on `families`,
    the mean on each one's hardest hundredth."""
    folder = RESULTS / "gpu" / "h200_lr"
    rows = read(folder / f"plr_lr_{score}_families.csv")
    rates = [float(row["solve_rate"]) for row in rows if float(row["lr"]) == rate]
    rates = np.array(rates).reshape(8, -1).mean(1)
    head, *lines = (folder / f"plr_lr_{score}_sampled.txt").read_text().splitlines()[1:]
    [line] = [x for x in lines if f", lr {rate} " in x]
    place = re.split(r"\s{2,}", head).index("worst 1%")
    return rates, float(re.split(r"\s{2,}", line)[place].split()[0])


def trained_on_a_gpu(name, suite):
    """Solve rates [32] on a suite of the seeds of a method with --fast, trained on an H200."""
    rows = read(RESULTS / "gpu" / "h200_whole" / f"{name}_{suite}.csv")
    return np.array([float(x["solve_rate"]) for x in rows]).reshape(32, -1).mean(1)


def swept(**values):
    """PAIRED's rates on `families` at the end of each training of a sweep with these values."""
    rows = read(RESULTS / "gpu" / "h200_whole" / "paired_sweep.csv.gz")
    has = lambda row: all(float(row[name]) == x for name, x in values.items())
    rows = [row for row in rows if row["update"] == rows[-1]["update"] and has(row)]
    mazes = scores(RESULTS / "paired", "families")[1]
    rates = [[float(row[f"eval_solve_rate/{maze}"]) for maze in mazes] for row in rows]
    return np.array(rates).mean(1)


def logged(name, column, cycle):
    """The mean over seeds of a column of logs.csv in a cycle; blank if it was not logged."""
    rows = [x for x in read(RESULTS / name / "logs.csv") if x["update"] == str(cycle)]
    rates = [float(x[column]) for x in rows if x.get(column)]
    return show(np.nanmean(rates), digits=2) if rates else ""


def row_of(path, *first):
    """The row of a page's tables that begins with these cells."""
    lines = path.read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    [row] = [row for row in rows if row[: len(first)] == [*first]]
    return row


def times(library, program):
    """How many times as long as this project a library takes for an update, by speed.md."""
    row = row_of(SPEED, library, f"{program} --rnn lstm, 1 seed(s)")
    return show(row[-1], digits=2)


def training_minutes(folder, name):
    return show(float(row_of(RESULTS / "gpu" / folder / "table.md", name)[3]) / 60, digits=1)


# --- tables


def readme():
    yield "method", "minutes", "dcd's mazes", "`families`", "hardest tenth of random levels"
    titles = TITLES | {"dr_auto_replay": "DR, `--auto-replay`",
                       "dr_all": OTHER_LEVELS["dr_all"],
                       "plr_optimistic": "robust PLR, `--score optimistic_max_mc`",
                       "plr_quick": "the same score, `plr.py --quick`"}  # fmt: skip
    for name in (*METHODS, "dr_auto_replay", "dr_all", "plr_optimistic", "plr_quick"):
        minutes = "" if name in UNPUBLISHED else f"{pictures.minutes(name):.0f}"
        yield titles[name], minutes, mean(name, "dcd"), mean(name, "families"), hardest(name)
    yield unlearned("left hand")


def unlearned(player):
    """The row of a player that does not learn, without an interval."""
    rows = {(x["suite"], x["maze"]): x for x in read(RESULTS / "baselines.csv")}
    cells = ("dcd", "mean"), ("families", "mean"), ("sampled", "worst 10%")
    return f"a {player} on the wall", "", *(show(rows[cell][player]) for cell in cells)


def methods():
    yield ("method", "seeds", "minutes", "dcd's mazes", "of its seeds", "minimax's paper",
           "dcd's files", "`families`", "hardest tenth", "hardest hundredth")  # fmt: skip
    means = (show(x, digits=2) for x in np.mean([*PUBLISHED.values()], axis=0))
    files = dict(zip(("accel", "plr", "dr"), means))
    for name, title in {**{x: TITLES[x] for x in METHODS}, **OTHER_LEVELS, **UNPUBLISHED}.items():
        rates = of_seeds(name)
        minutes = f"{pictures.minutes(name):.1f}" if name not in UNPUBLISHED else ""
        yield (title, len(rates), minutes, mean(name, "dcd"),
               f"{rates.min():.2f} to {rates.max():.2f}", MEANS.get(name, ""), files.get(name, ""),
               mean(name, "families"), hardest(name), hardest(name, "worst 1%"))  # fmt: skip
    title, _, *cells, tenth = unlearned("left hand")
    yield title, "", "", cells[0], "", "", "", cells[1], tenth, ""


def length():
    yield "cycles", "minutes", "score", "seeds", "dcd's mazes", "`families`", "hardest tenth"
    for end, score in {"": "`max_mc`", "_optimistic": "optimistic"}.items():
        for name, cycles in pictures.LENGTHS.items():
            quick = name == "plr_1650" and end
            run, title = ("plr_quick", "`--quick`: 3,250") if quick else (name + end, f"{cycles:,}")
            spent = pictures.minutes(run if quick else name)
            yield (title, f"{spent:.1f}", score, len(of_seeds(run)), mean(run, "dcd"),
                   mean(run, "families"), hardest(run))  # fmt: skip


QUICK = {  # a setting in quick.csv: what it changes; with 16 levels a rollout, then with 32
    "envs16": "as it is: 16 levels in a rollout", "envs16_replay8": "`--replay-prob 0.8`",
    "envs8": "8 levels in a rollout", "lr6": "32 levels in a rollout",
    "lr4": "32 levels, `--lr 4e-3`", "ent5": "32 levels, `--ent-coef 5e-3`",
    "replay8": "32 levels, `--replay-prob 0.8`", "plain": "32 levels, `--no-robust`"}  # fmt: skip


def quick():
    yield "`--quick`", "seeds", "`families`", "hardest tenth", "`families`: minus as it is"
    rows = read(SEARCH / "quick.csv")
    rates = lambda name, x: np.array([float(y[x]) for y in rows if y["changed"] == name])
    chosen = rates("envs16", "families")
    for name, title in QUICK.items():
        found = rates(name, "families")
        less = signed(*pictures.gain(found, chosen)) if name != "envs16" else ""
        yield (title, len(found), show(found.mean()), show(rates(name, "hardest_tenth").mean()),
               less)  # fmt: skip
    before = "plr_1650_optimistic"
    found = of_seeds(before, "families")
    yield ("32 levels, other seeds", len(found), show(found.mean()), hardest(before),
           signed(*pictures.gain(found, chosen)))  # fmt: skip


def next_level():
    yield ("training", "after an episode", "seeds", "dcd's mazes", "`families`", "hardest tenth",
           "hardest hundredth")  # fmt: skip
    again, titles = "the same level again", {"dr": "DR, 900 updates", "plr_3300":
        "PLR, 3,300 cycles at a constant rate", "plr_quick": "PLR, `--quick`"}  # fmt: skip
    runs = {}
    for row in read(SEARCH / "next_level.csv"):
        runs.setdefault((row["training"], row["after_an_episode"]), []).append(row)
    for (training, then), rows in runs.items():
        title = titles[training]
        if training != "dr":
            rates = (mean(training, x) for x in SUITES)
            worst = (hardest(training, share) for share in ("worst 10%", "worst 1%"))
            yield title, again, len(of_seeds(training)), *rates, *worst
        column = lambda x, rows=rows: np.array([float(row[x]) for row in rows])
        yield (title, then, len(rows), *(show(*pictures.interval(column(x))) for x in SUITES),
               *(show(column(f"hardest_{x}").mean()) for x in ("tenth", "hundredth")))  # fmt: skip


def regret():
    yield "true regret - own score", "dcd's mazes", "`families`", "hardest hundredth"
    for name in ("plr", "accel", "sfl", "paired"):
        knows = f"{name}_oracle"
        yield (TITLES[name], difference(knows, name, "dcd"), difference(knows, name, "families"),
               hardest_difference(knows, name))  # fmt: skip


def rates():
    yield ("method and score", "seeds", "`families` at 2e-3", "at 6e-3", "6e-3 - 2e-3",
           "hardest hundredth at 2e-3", "at 6e-3")  # fmt: skip
    faster = "lr=0.006 annealed"
    runs = {  # the record at 2e-3, the setting at 6e-3, whether eight seeds more are from a GPU
        "PLR, true regret": ("plr_oracle", faster, "oracle"),
        "ACCEL, true regret": ("accel_oracle", faster, ""),
        "PLR, optimistic": ("plr_optimistic", "score=optimistic_max_mc lr=0.006", ""),
        "PLR, `max_mc`": ("plr", "score=max_mc lr=0.006", "mc"),
        "ACCEL, `max_mc`": ("accel", "score=max_mc lr=0.006", ""),
        OTHER_LEVELS["dr_all"]: ("dr_all", "lr=0.006", ""),
    }
    cycles = {"plr": "7500", "accel": "4800", "dr": "4700"}
    for title, (name, change, more) in runs.items():
        script = name.split("_")[0]
        which = change, f"{script}.py", cycles[script]
        old, new = of_seeds(name, "families"), chosen(*which)
        worst = [float(hardest(name, "worst 1%")), float(hardest_chosen(*which))]
        if more:
            (old_8, worst_8), (new_8, new_worst_8) = (on_a_gpu(more, x) for x in (2e-3, 6e-3))
            worst = np.average([worst, [worst_8, new_worst_8]], axis=0,
                               weights=[[len(old), len(new)], [8, 8]])  # fmt: skip
            old, new = np.append(old, old_8), np.append(new, new_8)
        gain = signed(*pictures.gain(new, old))
        yield (title, f"{len(old)}, {len(new)}", show(old.mean()), show(new.mean()), gain,
               *(show(x) for x in worst))  # fmt: skip


def paired():
    yield "entropy bonus", "weight of the value loss", "`families`", "teacher five times as fast"
    for bonus, weight in ((1e-3, 0.5), (1e-2, 0.5), (1e-3, 2), (1e-2, 2)):
        each = [swept(ent_coef=bonus, vf_coef=weight, teacher_lr=x) for x in (1e-3, 5e-3)]
        yield bonus, weight, *(show(*pictures.interval(x)) for x in each)


def estimates():
    runs = {"TRACED": ("plr_3300_traced", 3300), "the true regret": ("plr_oracle", 7500),
            "the optimistic score": ("plr_optimistic", 7500)}  # fmt: skip
    ends = [(name, cycle) for name, end in runs.values() for cycle in (150, end)]
    heads = [f"by {word}, {cycle:,}" for word, (_, end) in runs.items() for cycle in (150, end)]
    yield "PLR replays levels, cycle", *heads
    for score, title in pictures.SCORES.items():
        yield title, *(logged(name, f"rank_correlation_{score}", x) for name, x in ends)
    share = "never_solved_regret_share"
    yield "share of regret in levels never solved", *(logged(name, share, x) for name, x in ends)


def optimistic():
    yield ("run", "dcd's mazes: optimistic - `max_mc`", "`families`: optimistic - `max_mc`",
           "`families`: optimistic - true regret",
           "hardest hundredth: optimistic - `max_mc`")  # fmt: skip
    titles = {"plr_3300": "PLR, 3,300 cycles", "plr": "PLR, 7,500 cycles", "accel": "ACCEL"}
    for name, title in titles.items():
        hopes = f"{name}_optimistic"
        yield (
            title,
            difference(hopes, name, "dcd"),
            difference(hopes, name, "families"),
            difference(hopes, f"{name}_oracle", "families"),
            hardest_difference(hopes, name),
        )


def lacks():
    yield "PLR by the true regret", "seeds", "dcd's mazes", "`families`", "hardest hundredth"
    large = "lr=0.003 annealed hidden_size=128"
    changes = {
        "7,500 cycles, `--lr 6e-3`": "lr=0.006 annealed",
        "the same, `--ent-coef 15e-3`": "lr=0.006 annealed ent_coef=0.015",
        "`--lr 3e-3 --hidden-size 128`": large,
        "the same, `--bptt-horizon 256`": f"{large} bptt_horizon=256",
    }
    for title, change in changes.items():
        rates = [chosen(change, suite=x) for x in ("dcd", "families")]
        means = (show(x.mean()) for x in rates)
        yield title, len(rates[0]), *means, hardest_chosen(change)
    rows = {(row["divisor"], row["suite"]): row for row in read(SEARCH / "less_decided.csv")}
    for divisor in ("1", "1.5", "2"):
        means = (rows[divisor, x]["mean"] for x in ("dcd", "families"))
        title = f"logits divided by {divisor}" if divisor != "1" else "3,300 cycles"
        yield title, 6, *means, rows[divisor, "sampled"]["worst 1%"]


def memory():
    shown = 7, 31, 255
    yield ("trained by", "core", "seeds", "minutes", *(f"{x} cells" for x in shown),
           "longest corridor that each seed solves")  # fmt: skip
    kinds = {(x["script"], x["equal"], x["rnn"]): x for x in read(SEARCH / "memory.csv")}
    for (script, equal, core), row in kinds.items():
        if equal == "minutes" and (script != "dr.py" or core in ("s5", "none")):
            continue  # S5's updates and minutes are those that the others' are equal to
        lengths, rates = pictures.of_corridors(script, core, equal)
        longest = sorted(pictures.longest_solved(script, core, equal))
        title = pictures.CORES[core] + (", in the minutes of S5" if equal == "minutes" else "")
        yield (pictures.MEMORY[script], title, len(rates),
               f"{float(row['cpu_seconds']) / 60:.1f}",
               *(show(*pictures.interval(rates[:, lengths.index(x)])) for x in shown),
               ", ".join(map(str, longest)))  # fmt: skip


def sharded():
    yield ("buffers", "seeds", "dcd's mazes", "`families`", "hardest hundredth",
           "hardest hundredth: minus one buffer", "entropy at the end")  # fmt: skip
    columns = [pictures.sharded(x) for x in pictures.SHARDED]
    entropy, [one, *_] = pictures.sharded("entropy"), columns[-1].values()
    for kind, found in columns[-1].items():
        less = signed(*pictures.gain(found, one)) if found is not one else ""
        yield (kind.replace("\n", " "), len(found),
               *(show(*pictures.interval(x[kind])) for x in columns), less,
               show(entropy[kind].mean(), digits=2))  # fmt: skip


def batch():
    machines = "one core", "an H100", "an H200, 32 trainings"
    yield ("trained by", "levels a cycle", "learning rate", "seeds", "`families`",
           "minus 32 levels", f"million steps to {pictures.REACHED}",
           *(f"their time, {x}" for x in machines))  # fmt: skip
    for script, title in pictures.BATCHED.items():
        suite, rate = (pictures.of_batches(script, True, x) for x in ("families", "lr"))
        steps, times = pictures.steps_to_reach(script), pictures.time_to_reach(script)
        for n, found in suite.items():
            less = signed(*pictures.gain(found, suite[32])) if n > 32 else ""
            spent = [times.get(x, {}).get(n, np.nan) for x in machines]
            yield (title, n, show(rate[n][0], digits=4), len(found),
                   show(*pictures.interval(found)), less,
                   "never" if np.isnan(steps[n]) else show(steps[n], digits=1),
                   *("" if np.isnan(x) else show(x, digits=2) for x in spent))  # fmt: skip


def ladder():
    yield ("DR", "seeds", "updates", "`families`", "minus the line above", "dcd's mazes",
           "hardest tenth", "the line of `--gamma` without it: `families`",
           "minus that line")  # fmt: skip
    steps = {column: pictures.ladder("step", column) for column in (
        "families", "dcd", "hardest_tenth", "num_updates")}  # fmt: skip
    without, before = pictures.ladder("without", "families"), None
    last = steps["families"]["gamma"]  # of the later changes `without` has nothing
    for change, found in steps["families"].items():
        cells = [f"+ `{pictures.LADDER[change][1]}`" if change else "published settings"]
        cells += [len(found), f"{steps['num_updates'][change][0]:.0f}"]
        cells += [show(*pictures.interval(found))]
        cells += [signed(*pictures.gain(found, before)) if change else ""]
        cells += [show(*pictures.interval(steps["dcd"][change]))]
        cells += [show(steps["hardest_tenth"][change].mean())]
        alone = without.get(change)
        known = alone is not None
        cells += [show(alone.mean()), signed(*pictures.gain(alone, last))] if known else ["", ""]
        yield cells
        before = found


def peers():
    minus = "minus the peer's", "mean of six tests, minus the peer's"
    yield ("1,000 PPO updates", "seeds", "return on random levels", *minus, "dcd's mazes", *minus,
           "minutes")  # fmt: skip
    for (peer, method), curves in pictures.peers().items():
        for curve, columns in curves.items():
            titles = {"theirs": f"{TITLES[method]} of {pictures.PEERS[peer]}",
                      "ours, heads": "ours, with its heads"}  # fmt: skip
            cells = [titles.get(curve, curve), len(columns["updates"])]
            for name in pictures.LEARNED:
                ours, theirs = columns[name], curves["theirs"][name]
                cells.append(show(*pictures.interval(ours[:, -1])))
                for x, y in ((ours[:, -1], theirs[:, -1]), (ours.mean(1), theirs.mean(1))):
                    cells.append("" if curve == "theirs" else signed(*pictures.gain(x, y)))
            yield *cells, show(columns["seconds"][:, -1].mean() / 60, digits=1)


def published():
    shown = 1000, 2000, 4000, 8000, 12_000, 16_000, 20_000, 24_000
    yield "cycles", *(f"{x:,}" for x in shown)
    for core in pictures.EXPERIMENTS:
        cycles, rates = pictures.published(core)
        near = [rates[abs(cycles - x) <= cycles[1] - cycles[0]] for x in shown]  # three evaluations
        found = [x.mean(0) for x in near if len(x) == 3]
        later = [""] * (len(shown) - len(found))
        means = [show(*pictures.interval(x)) for x in found]
        several = rates.shape[1] > 1
        yield core + f", mean of {rates.shape[1]}" * several, *means, *later
        if several:
            yield "of the seeds", *(f"{x.min():.2f} to {x.max():.2f}" for x in found), *later


def speed():
    yield "time of an update, this project = 1", "DR", "PLR, a replay cycle", "PAIRED"
    programs = "dr", "plr replay cycle"
    yield "JaxUED", *(times("jaxued", x) for x in programs), ""
    light = "minimax, no level metrics"
    yield "minimax, without statistics of levels", *(times(light, x) for x in programs), ""
    yield "minimax", *(times("minimax", x) for x in (*programs, "paired"))


def dcd():
    yield "time of dcd's update, this project = 1", "DR", "robust PLR", "its cycles that replay"
    networks = {"256 units, as published": "lstm", "64, as in `--fast`": "lstm --hidden-size 64"}
    for title, core in networks.items():
        programs = "dr", "plr half of each", "plr replay cycle"
        rows = [row_of(SPEED, "dcd", f"{x} --rnn {core}, 1 seed(s)") for x in programs]
        yield title, *(show(row[-1], digits=1) for row in rows)


def gpu():
    yield "`--fast` on an H200", "trainings", "minutes", "dcd's mazes", "of them on a CPU"
    for name, title in {"plr": TITLES["plr"], "dr_all": OTHER_LEVELS["dr_all"]}.items():
        script = name.split("_")[0]
        found = trained_on_a_gpu(script, "dcd")
        spent = training_minutes("h200_whole", f"{script} fast")
        yield title, 32, spent, show(*pictures.interval(found)), mean(name, "dcd")
    yield "ACCEL", 32, training_minutes("h200_lr", "accel fast, sweep"), "", ""


TABLES = {f.__name__: f for f in (
    readme, methods, next_level, length, quick, regret, rates, paired, estimates, optimistic,
    lacks, memory, sharded, batch, ladder, peers, published, speed, dcd, gpu)}  # fmt: skip


def markdown(rows):
    head, *rows = ([str(cell) for cell in row] for row in rows)
    line = lambda cells: f"| {' | '.join(cells)} |\n"
    return line(head) + "|" + "---|" * len(head) + "\n" + "".join(map(line, rows))


def fill(text):
    """A page with its tables as the data have them."""
    marks = r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)"
    return re.sub(marks, lambda x: x[1] + markdown(TABLES[x[2]]()) + x[3], text, flags=re.S)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill(page.read_text()))
