"""dcd (github.com/facebookresearch/dcd, PyTorch): DR and robust PLR as its own configuration sets
them. $DCD is a folder with checkouts of dcd and of openai/baselines, which pip cannot install.

It starts 32 processes, one for each environment: that takes minutes and 10 GiB. All trainings share
them. Left out are its logs, checkpoints and evaluation. DR runs without `use_plr`, as in dcd's
README. Only for timing, PLR begins with a full buffer, and replays in every cycle or never."""

import json
import os
import sys
import tempfile
from functools import cache
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # PyTorch's threads would hinder the 32 processes
DCD, STUBS = Path(os.environ["DCD"]), tempfile.TemporaryDirectory()
# baselines, and so all 32 processes, import TensorFlow for two names and call nothing of it
Path(STUBS.name, "tensorflow.py").write_text("float32 = int32 = None\n")
sys.path[:0] = [str(DCD / "dcd"), str(DCD / "baselines"), STUBS.name]

import envs.multigrid.adversarial  # noqa: E402, F401 (it registers the mazes)
import numpy as np  # noqa: E402
import torch  # noqa: E402
import util  # noqa: E402
from arguments import parser  # noqa: E402
from envs.runners.adversarial_runner import AdversarialRunner  # noqa: E402

torch.set_num_threads(1)
lstm = torch.nn.LSTM  # newer versions refuse the NumPy integers that dcd gives as sizes
torch.nn.LSTM = lambda *sizes, **options: lstm(*map(int, sizes), **options)
GRIDS = DCD / "dcd/train_scripts/grid_configs/minigrid/60_blocks_uniform"
OFF = ("log_action_complexity", "log_plr_buffer_stats", "log_replay_complexity")
VERSIONS = f"PyTorch {torch.__version__} on {torch.get_num_threads()} thread, 32 processes"


@cache
def environments():
    """Its vector of environments, which is the same for all these trainings."""
    return util.create_parallel_env(settings("dr", 256))


def settings(script, units):
    grid = json.loads((GRIDS / "mg_60b_uni_robust_plr.json").read_text())["grid"]
    values = {name: value for name, [value] in grid.items()} | dict.fromkeys(OFF, False)
    values |= {"use_plr": script == "plr", "recurrent_hidden_size": units, "no_cuda": True}
    return parser.parse_args([f"--{name}={value}" for name, value in values.items()])


def fill(runner, length):
    """Fill the level buffer with random levels, strings of that many cells, and rising scores."""
    sampler, rng = runner.level_samplers["agent"], np.random.default_rng(0)
    for score in np.linspace(0, 1, sampler.seed_buffer_size):
        level = " ".join(map(str, rng.integers(runner.venv.adversary_action_space.n, size=length)))
        seeds = runner.level_store.insert([level])
        sampler.observe_external_unseen_sample(seeds)
        sampler.update_seed_score(0, seeds[0], score, score, 256)
    assert sampler._proportion_filled == 1 and len(runner.level_store) == len(sampler.seeds)


def training(script, cycle, core):
    """A function that runs one update."""
    rnn, _, units = core.partition(" --hidden-size ")
    assert script in ("dr", "plr") and cycle != "--parallel" and rnn == "lstm", "not in dcd"
    args, device = settings(script, int(units or 256)), torch.device("cpu")
    venv, ued_venv = environments()
    agent = util.make_agent(name="agent", env=venv, args=args, device=device)
    options = {"args": args, "venv": venv, "ued_venv": ued_venv, "agent": agent, "device": device}
    if script == "plr":  # new levels are built by a teacher that acts at random
        teacher = util.make_agent(name="adversary_env", env=venv, args=args, device=device)
        teacher.random()
        spaces = venv.observation_space, venv.action_space
        options |= {"adversary_env": teacher, "plr_args": util.make_plr_args(args, *spaces)}
    runner = AdversarialRunner(train=True, **options)
    if script == "plr":
        fill(runner, runner.adversary_env_rollout_steps)
        runner._sample_replay_decision = lambda: cycle == "replay cycle"
    return runner.run
