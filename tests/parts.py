"""Access to parts of make_train for tests: by name, and in copies of scripts that change some."""

import sys
from itertools import count
from pathlib import Path
from types import ModuleType

MARK = "\n# --- command line\n"
number = count()


def part(train, *names):
    """The object (mostly a function) that make_train has under a name; a list for several names."""
    found = [train.parts[name] for name in names]
    return found if len(names) > 1 else found[0]


def hacked(module, changes, **names):
    """A copy of a script with changes such as a user makes: each key of `changes`, which must occur
    once above the command line, is replaced by its value; `names` become global names, too."""
    upper, mark, lower = Path(module.__file__).read_text().partition(MARK)
    assert mark
    for old, new in changes.items():
        assert upper.count(old) == 1, old
        upper = upper.replace(old, new)
    copy = ModuleType(f"{module.__name__}_hacked_{next(number)}")
    copy.__file__ = module.__file__
    sys.modules[copy.__name__] = copy  # where dataclasses look for it
    exec(compile(upper + mark + lower, copy.__file__, "exec", dont_inherit=True), vars(copy))
    assert not names.keys() & vars(copy).keys()
    vars(copy).update(names)
    return copy
