"""Start scripts quickly as processes: forks of one process that has imported what they import.

Half of the time of a short run of a script goes to importing JAX and the rest. At the fork no JAX
backend has started, so each fork still chooses its devices by its own XLA_FLAGS."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

SERVER = """
import gc, json, os, runpy, signal, sys
from pathlib import Path
import distrax, flax.linen, flax.struct, jax, jax.experimental.multihost_utils, matplotlib.figure
import numpy, optax, tqdm, tyro

gc.set_threshold(200_000)

def reap(*_):
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        path = Path(sys.argv[1], str(pid))
        path.with_suffix(".part").write_text(str(os.waitstatus_to_exitcode(status)))
        path.with_suffix(".part").rename(path)

signal.signal(signal.SIGCHLD, reap)
for line in sys.stdin:
    folder, cwd, env, command = json.loads(line)
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, name in enumerate((os.devnull, f"{folder}/out", f"{folder}/err")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = command
    sys.path[:1] = [os.path.dirname(command[0]), *env["PYTHONPATH"].split(":")]
    runpy.run_path(command[0], run_name="__main__")
    break
"""


class Server:
    """`start` returns a Fork, which has the used parts of subprocess.Popen's interface."""

    def __init__(self, folder, env):
        self.folder, self.number, self.lock = folder, 0, threading.Lock()
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        command = [sys.executable, "-W", "ignore", "-c", SERVER, str(folder)]
        self.process = subprocess.Popen(command, env=env, **pipes)

    def start(self, command, env, cwd):
        with self.lock:
            self.number += 1
            folder = self.folder / f"fork_{self.number}"
            folder.mkdir()
            request = json.dumps([str(folder), str(cwd), env, command])
            print(request, file=self.process.stdin, flush=True)
            return Fork(int(self.process.stdout.readline()), folder)

    def end(self):
        self.process.stdin.close()
        self.process.wait()


class Fork:
    def __init__(self, pid, folder):
        self.pid, self.folder, self.returncode = pid, folder, None

    def poll(self):
        status = self.folder.parent / str(self.pid)
        if self.returncode is None and status.exists():
            self.returncode = int(status.read_text())
            status.unlink()  # the number may come again
        return self.returncode

    def communicate(self, timeout):
        deadline = time.time() + timeout
        while self.poll() is None:
            if time.time() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return tuple(Path(self.folder, name).read_text() for name in ("out", "err"))

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)
