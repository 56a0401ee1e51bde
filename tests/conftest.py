"""XLA compiles as fast as it can for the tests, unless XLA_FLAGS is set: most programs here run for
less time than compilation takes. A program that runs longer asks for level 3. All processes share
one compilation cache, a new one unless one is set."""

import gc
import os
import tempfile
from importlib.metadata import version

gc.set_threshold(200_000)  # tracing makes many objects that stay

FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if version("jaxlib") < "0.11":  # later ones have one kind of emitters, and not this flag
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
CACHE = tempfile.TemporaryDirectory()
DEFAULTS = {"XLA_FLAGS": FLAGS, "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
            "JAX_COMPILATION_CACHE_DIR": CACHE.name}  # fmt: skip
os.environ.update(DEFAULTS | os.environ)  # before JAX is imported

from runs import call, launch, main, pool, tmp, toys, train  # noqa: E402, F401


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: left out of a quick look after a change")
