"""The scripts are siblings: whatever two of them share has the same text and the same order."""

import ast
import re
import sys
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MARK = "# --- command line"
FILES = ["dr", "plr", "accel", "paired", "sfl"]
PAIRS = list(combinations(FILES, 2))
PACKAGES = "amaze s5 jax flax optax distrax numpy matplotlib tyro tqdm".split()

# What has one name in two files and must differ, because the papers do: the fields and states of
# the method, what fills them, the method itself (cycle), and what show displays of it.
METHOD = "Config RunnerState make_train init cycle show"
# Between PAIRED and the others: an agent may be the teacher, so its network is an argument.
AGENTS = "act rollout loss learn play evaluate"
DIFFER = {pair: f"{METHOD} choose_levels".split() for pair in PAIRS}
DIFFER |= {pair: f"{METHOD} {AGENTS}".split() for pair in PAIRS if "paired" in pair}
PLR_ACCEL = "Config RunnerState make_train init cycle choose_levels buffer_stats"
DIFFER |= {("plr", "accel"): PLR_ACCEL.split()}
# Between SFL and the others: its buffer has other entries, and half of its levels come from there.
DIFFER |= {(name, "sfl"): f"{METHOD} choose_levels Buffer".split() for name in ("plr", "accel")}


@cache
def source(name):
    return (ROOT / f"{name}.py").read_text()


def halves(name):
    upper, mark, lower = source(name).partition(f"\n{MARK}\n")
    assert mark
    return upper, lower


@cache
def definitions(name):
    """Functions and classes above the command line, also those in make_train: name -> text."""
    lines, found = halves(name)[0].splitlines(), {}

    def visit(nodes):
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert node.name not in found
                first = min([node.lineno] + [x.lineno for x in node.decorator_list])
                above = [line.strip() for line in lines[: first - 1]]
                while above[-1].startswith("#"):  # the comment above belongs to it
                    first -= above.pop().startswith("#")
                found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
                if node.name == "make_train":
                    visit(node.body)

    visit(ast.parse(halves(name)[0]).body)
    return found


def statements(name):
    """Other top-level statements above the command line, except imports: name or call -> texts."""
    found = {}
    for node in ast.parse(halves(name)[0]).body[1:]:  # without the docstring
        if isinstance(node, ast.Assign | ast.Expr):
            named = node.targets[0] if isinstance(node, ast.Assign) else node.value.func
            found.setdefault(ast.unparse(named), []).append(ast.unparse(node))
    return found


def shared(first, second):
    return [name for name in first if name in second], [name for name in second if name in first]


@pytest.mark.parametrize("name", FILES[1:])
def test_the_command_line_is_the_same(name):
    assert halves(name)[1] == halves("dr")[1]


@pytest.mark.parametrize("first, second", PAIRS)
def test_shared_definitions_are_the_same(first, second):
    """Except for those in DIFFER, which must differ, since otherwise they need not be listed."""
    one, other = definitions(first), definitions(second)
    names, same_names = shared(one, other)
    assert names == same_names  # the order too
    assert {name for name in names if one[name] != other[name]} == set(DIFFER[first, second])


@pytest.mark.parametrize("first, second", PAIRS)
def test_shared_statements_are_the_same(first, second):
    """Except for a method's presets."""
    one, other = statements(first), statements(second)
    names, same_names = shared(one, other)
    assert names == same_names
    different = {name for name in names if one[name] != other[name]}
    presets = {"FAST", "PRESETS", "PARALLEL"} if "FAST" in different else set()
    assert different <= presets
    assert "FAST" in different


@pytest.mark.parametrize("first, second", PAIRS)
def test_shared_fields_have_the_same_order(first, second):
    for record in ("Config", "RunnerState"):
        fields = []
        for name in (first, second):
            body = ast.parse(definitions(name)[record]).body[0].body
            fields.append([x.target.id for x in body if isinstance(x, ast.AnnAssign)])
        names, same_names = shared(*fields)
        assert names == same_names
        assert len(names) > 1


@pytest.mark.parametrize("name", FILES)
def test_imports(name):
    """Only the two modules beside a script, the allowed packages and the standard library."""
    roots = set()
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            roots.add(node.module.split(".")[0])
    assert roots - sys.stdlib_module_names <= set(PACKAGES)
    assert {"amaze", "s5", "jax"} <= roots


def test_constraints_pin_what_the_requirements_bring():
    """Every package of a first install is pinned, within its bounds, and no other package."""
    number = lambda text: [int(x) for x in text.split(".")]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [re.fullmatch(r"([a-z0-9-]+)==([0-9a-z.]+)", x) for x in lines if x[0] != "#"]
    assert all(pinned)
    versions = {x[1]: x[2] for x in pinned}
    for line in (ROOT / "requirements.txt").read_text().split():
        name, least = line.split(">=")
        assert number(versions[name]) >= number(least)
    assert versions["jax"] == versions["jaxlib"]


def assigned(name):
    """What make_train assigns before its functions, and between them: name -> texts."""
    [train] = [x for x in ast.parse(halves(name)[0]).body if getattr(x, "name", "") == "make_train"]
    found = {}
    for node in train.body:
        if isinstance(node, ast.Assign):
            found.setdefault(ast.unparse(node.targets[0]), []).append(ast.unparse(node))
    return found


@pytest.mark.parametrize("first, second", PAIRS)
def test_shared_statements_of_make_train_are_the_same(first, second):
    """The optimiser, the core, the network and so on; but for `deals` and blocks."""
    one, other = assigned(first), assigned(second)
    names = {*one} & {*other} - {"deals", "blocks", "trajectories"}
    assert {"clip", "optimiser", "core", "network", "horizon", "level_stats"} <= names
    assert {name for name in names if one[name] != other[name]} <= {
        "(train.act, train.initial_carry)"}  # fmt: skip
