"""Access to parts of make_train for tests: by name, and in copies of scripts that change some."""

import sys
from itertools import count
from pathlib import Path
from types import ModuleType

import jax

MARK = "\n# --- command line\n"
number = count()


def closures(function, found):
    """What a function, and those that it uses, have from the functions around them: name -> it."""
    inner = getattr(function, "func", None), *getattr(function, "args", ())  # of a partial
    cells = getattr(function, "__closure__", None) or ()
    held = dict(zip(function.__code__.co_freevars, cells)) if cells else {}
    for name, cell in held.items():
        if name not in found:
            found[name] = cell.cell_contents
            closures(found[name], found)
    for other in inner:
        if callable(other):
            closures(other, found)
    return found


def part(train, *names):
    """The object (mostly a function) that make_train has under a name; a list for several names."""
    known = {}
    for function in (train, train.init, train.update, train.show):
        closures(function, known)
    found = [known[name] for name in names]
    return found if len(names) > 1 else found[0]


def traced(train):
    """A cycle that is traced, and not compiled: its state, which keeps its shapes, its metrics and
    the levels that it would show, as shapes."""
    state = jax.eval_shape(train.init, jax.random.key(0))
    after, metrics = jax.eval_shape(lambda state: train.update(state, 1), state)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert shapes(after) == shapes(state)
    return state, metrics, jax.eval_shape(train.show, state)


def cycle_rngs(state, number):
    """The random keys of the cycle that comes next, as the first lines of `cycle` make them."""
    return jax.random.split(jax.random.fold_in(state.rng, state.cycles), number)


def hacked(module, changes, **names):
    """A copy of a script with changes such as a user makes: each key of `changes`, which must occur
    once above the command line, is replaced by its value; `names` become global names, too."""
    upper, mark, lower = Path(module.__file__).read_text().partition(MARK)
    assert mark
    for old, new in changes.items():
        assert upper.count(old) == 1, old
        upper = upper.replace(old, new)
    copy = from_text(module, upper + mark + lower)
    assert not names.keys() & vars(copy).keys()
    vars(copy).update(names)
    return copy


def from_text(module, text):
    copy = ModuleType(f"{module.__name__}_changed_{next(number)}")
    copy.__file__ = module.__file__
    sys.modules[copy.__name__] = copy  # where dataclasses look for it
    exec(compile(text, copy.__file__, "exec", dont_inherit=True), vars(copy))
    return copy
