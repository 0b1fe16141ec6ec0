"""Every call that waits is in the table of `docs/waits.md`, and what is there waits."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE, TABLE = ROOT / "vit_ray", ROOT / "docs" / "waits.md"

WAITS = re.compile(
    r"ray\.(get|wait|init)|ray\.train\.collective\.\w+"
    r"|(torch\.distributed|dist)\.(all_\w+|broadcast\w*|barrier|init_process_group)"
    r"|(.*\.)?(wait|wait_for|acquire|flock|result|communicate|sleep|create_connection)"
    r"|subprocess\.run|\w*thread\w*\.join|self\._thread\.join|\w+ing\.join|answer|self\._ask"
    r"|.*(queue|_ready|_answers|_requests)\.get|_(tuner|trainer)\(.*\)\.fit"
)


def calls(node: ast.AST, scope: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """(function, call) of everything below a node."""
    for child in ast.iter_child_nodes(node):
        is_scope = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        inner = (*scope, child.name) if is_scope else scope
        if isinstance(child, ast.Call):
            yield ".".join(scope), ast.unparse(child.func)
        yield from calls(child, inner)


def waiting() -> set[str]:
    """`file::function` of each call that waits."""
    found = set()
    for path in CODE.rglob("*.py"):
        for function, call in calls(ast.parse(path.read_text())):
            if WAITS.fullmatch(call):
                found.add(f"{path.relative_to(CODE).as_posix()}::{function}")
    return found


def listed() -> set[str]:
    """Of the table's first column: `file::function`; or `file` or `room/` for all that is there."""
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def places(name: str) -> set[str]:
    """The names under which `file::function` may be listed."""
    file = name.partition("::")[0]
    return {name, file, file.partition("/")[0] + "/"}


def test_every_wait_is_in_the_table() -> None:
    known = listed()
    new = {name for name in waiting() if not places(name) & known}
    assert not new, f"give each a limit, a message and an end, and a row in {TABLE.name}"


def test_every_row_of_the_table_waits() -> None:
    there = {place for name in waiting() for place in places(name)}
    assert listed() <= there


def test_a_wait_is_found_wherever_it_stands() -> None:
    code = "class A:\n  def f(self):\n    def g():\n      x = [ray.get(y) for y in z]\n"
    assert ("A.f.g", "ray.get") in calls(ast.parse(code))
    for call in ("self._written.wait", "dist.all_gather", "time.sleep", "thread.join", "ray.wait"):
        assert WAITS.fullmatch(call), call
    for call in ("', '.join", "recipe.get", "os.path.join", "ray.put"):
        assert not WAITS.fullmatch(call), call
