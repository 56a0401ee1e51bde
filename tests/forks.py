"""Start scripts quickly as processes: forks of one process that has imported what they import.

Half of the time of a short run of a script goes to importing JAX and the rest. At the fork no JAX
backend has started, so each fork still chooses its devices by its own XLA_FLAGS."""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
from pathlib import Path

IMPORTED = """distrax flax.linen flax.struct jax jax.experimental.multihost_utils
    matplotlib.figure matplotlib.style optax tqdm tyro""".split()
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(IMPORTED)


def become(folder, cwd, env, command):
    """In the fork: run a script with its arguments as if Python had been started with them."""
    import jax

    for number, name in enumerate((os.devnull, f"{folder}/out", f"{folder}/err")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    jax.config.update("jax_platforms", env["JAX_PLATFORMS"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    sys.argv = command
    sys.path[:0] = [os.path.dirname(command[0]), *env["PYTHONPATH"].split(os.pathsep)]
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out; JAX parts from other processes


class Fork:
    """The used parts of subprocess.Popen's interface."""

    def __init__(self, folder, cwd, env, command):
        self.folder = folder
        self.process = context.Process(target=become, args=(folder, cwd, env, command))
        self.process.start()

    def poll(self):
        return self.process.exitcode

    def communicate(self, timeout):
        self.process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.process.name, timeout)
        return tuple(Path(self.folder, name).read_text() for name in ("out", "err"))

    @property
    def returncode(self):
        return self.poll()

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.process.pid, number)

    def kill(self):
        self.process.kill()
