"""Count what a GPU would launch in an update, on a machine without one.

    python benchmarks/kernels.py dr fast 4                  DR's --fast, 4 seeds: its loops, sums
    python benchmarks/kernels.py dr published 8 rnn=s5      with fields of Config
    python benchmarks/kernels.py --table                    the table: results/gpu/kernels.csv

XLA compiles for a mere description of an H100 (TARGET). This needs no GPU and no driver, only Linux
and `pip install "jax[cuda13]"` (5 GB, best in a virtual environment of its own, together with
requirements.txt). A program takes a minute or two. Except for these seconds, no number depends on
the machine or on its load.

Launches dominate the time of small networks: a node (a kernel or a copy, one after the other) takes
a microsecond or more, the launch of a CUDA graph 5 to 10, and a trip of a loop whose end depends on
data ("until") 20, for a transfer to the host. XLA puts as much of a loop's body into graphs as it
can. Counts add up all branches of a conditional (PLR learns or not, SFL chooses a new buffer or
not); the branches are also printed separately. `nodes` counts 0 trips of loops "until", `once` 1,
`sixty` 60 (nested 60 x 60), too many where a trip is 16 steps of a flood fill or 8 drawn levels.
"""

import argparse
import csv
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "gpu"
TABLE = """dr fast 4, plr fast 8, accel fast 32, paired fast 8, sfl fast 4, dr published 1,
    dr published 8 rnn=s5, plr published 32"""
COLUMNS = "program nodes once sixty graphs until temp_MiB state_MiB trace_s compile_s".split()
TARGET = """gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  device_vendor: "NVIDIA Corporation"
  name: "NVIDIA H100 80GB HBM3"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
FREE = ("kAsyncStart", "kAsyncDone", "kDynamicSliceFusion", "kSequential")  # they launch nothing


@dataclass
class Loop:
    """What one trip of a loop launches; a branch and the update (the root) count as loops, too."""

    name: str
    trips: int | None = 1  # None: the end depends on data
    where: str = ""  # place in the source
    kernels: int = 0
    copies: int = 0
    graphs: int = 0
    inner: list = field(default_factory=list)

    def total(self, count, until):
        """Sum of a count over all trips; a loop whose end depends on data has `until` trips."""
        once = count(self) + sum(loop.total(count, until) for loop in self.inner)
        return once * (until if self.trips is None else self.trips)

    def until(self):
        """The number of loops whose end depends on data."""
        return (self.trips is None) + sum(loop.until() for loop in self.inner)


def read_trips(hlo):
    """{loop: (trips or None, its place in the source)}, from a compiled program's text."""
    loops = {}
    for line in hlo.splitlines():
        if found := re.match(r"\s*(?:ROOT )?%(while[\w.\-]*) = ", line):
            trips = re.search(r"known_trip_count[^}]*?n[^}]*?(\d+)", line)
            place = re.search(r'op_name="([^"]*)"', line)
            loops[found[1]] = trips and int(trips[1]), place[1][-70:] if place else ""
    return loops


def read_names(metadata):
    """{number of a thunk: name of what it runs}, from XLA's metadata."""
    names = {}
    for block in metadata.split("thunk_metadata {")[1:]:
        number = re.search(r"thunk_id: (\d+)", block)
        name = re.search(r'profile_annotation: "([^"]*)"', block)
        if number and name:
            names[int(number[1])] = name[1]
    return names


def read_thunks(thunks, names, loops):
    """The update as a Loop, from XLA's list of what it launches (thunks), which indents the bodies
    of loops, branches and graphs. The conditions of loops are not counted."""
    root = Loop("update")
    stack, in_condition = [(-1, root)], False
    for line in thunks.splitlines():
        indent, line = len(line) - len(line.lstrip()), line.strip()
        if line.startswith(("condition:", "body:")):
            in_condition = line.startswith("condition:")
        found = re.match(r"(\d+): (k\w+)", line)
        if found is None or in_condition:
            continue
        while indent <= stack[-1][0]:
            stack.pop()
        loop, kind = stack[-1][1], found[2]
        if kind in ("kWhile", "kConditional"):
            name = names.get(int(found[1]), "?")
            trips, where = loops.get(name, (None, "")) if kind == "kWhile" else (1, "")
            loop.inner.append(Loop(name if kind == "kWhile" else f"branches {name}", trips, where))
            stack.append((indent, loop.inner[-1]))
        elif kind == "kCommandBuffer":
            loop.graphs += 1
        elif kind == "kCopy":
            loop.copies += 1
        elif kind not in FREE:
            loop.kernels += 1
    return root


def show(loop, depth=0):
    trips = {1: "", None: " x until"}.get(loop.trips, f" x {loop.trips}")
    counts = f"{loop.kernels} kernels, {loop.copies} copies, {loop.graphs} graphs"
    print(f"{'  ' * depth}{loop.name}{trips}: {counts}  {loop.where}")
    for inner in loop.inner:
        show(inner, depth + 1)


def read_fields(config, items):
    """The config with NAME=VALUE for each item, converted to the field's type."""
    changes = {}
    for item in items:
        name, _, value = item.partition("=")
        old = getattr(config, name)
        changes[name] = value == "True" if isinstance(old, bool) else type(old)(value)
    return replace(config, **changes)


def compile_for_gpu(script, preset, seeds, items):
    """Compile an update -> its program, seconds to trace it, seconds to compile it."""
    import jax
    import numpy as np
    from jax.experimental import topologies

    module = importlib.import_module(script)
    config = module.FAST if preset == "fast" else module.Config()
    config = replace(read_fields(config, items), seeds=seeds, eval_interval=0)
    jax.default_backend = lambda: "gpu"  # the scripts ask for it
    describe = topologies.get_topology_desc
    described = describe("", "cuda", target_config=TARGET, topology="1x1x1")
    device = np.array(described.devices[:1])
    init, update, _, _ = module.make_programs(config, seeds, device, "seeds")
    rows = {"seed": np.arange(seeds)}
    states = jax.eval_shape(init, 0, rows, None)[0]
    started = time.time()
    lowered = update(1).lower(0, rows, states)
    traced = time.time()
    return lowered.compile(), traced - started, time.time() - traced


def count(words):
    """Compile a program, print its loops and, in the last line, its row of the table as JSON."""
    script, preset, seeds, *items = words
    dump = Path(tempfile.mkdtemp())
    flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"  # before JAX is imported
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, str(HERE.parent))
    name = script.removesuffix(".py")
    program, traced, compiled = compile_for_gpu(name, preset, int(seeds), items)
    last = lambda pattern: max(dump.glob(pattern)).read_text()
    names = read_names(last("*thunk_metadata.txt"))
    thunks = last("*thunk_sequence_after_thunk_passes.txt")
    update = read_thunks(thunks, names, read_trips(program.as_text()))
    show(update)
    nodes = [update.total(lambda x: x.kernels + x.copies, until) for until in (0, 1, 60)]
    memory = program.memory_analysis()
    row = [" ".join(words), *nodes, update.total(lambda x: x.graphs, 0), update.until()]
    row += [memory.temp_size_in_bytes >> 20, memory.argument_size_in_bytes >> 20]
    print(json.dumps(dict(zip(COLUMNS, [*row, round(traced), round(compiled)]))))


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("program", nargs="*", help="script, fast or published, seeds, FIELD=VALUE")
    parser.add_argument("--table", action="store_true", help="count and write the whole table")
    options = parser.parse_args()
    if not options.table:
        if len(options.program) < 3 or options.program[1] not in ("fast", "published"):
            parser.error("must be: a script, fast or published, a number of seeds")
        count(options.program)
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    with open(RESULTS / "kernels.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for program in TABLE.split(","):
            words = [sys.executable, __file__, *program.split()]
            said = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
            row = json.loads(said.splitlines()[-1])
            writer.writerow(row)
            print(row, flush=True)


if __name__ == "__main__":
    main()
