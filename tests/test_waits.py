"""Every call that waits has a limit, or says on its line what ends it.

A limit is `timeout=`, a positional one where the function takes one, or a lock that is not waited
for. `# no limit: REASON` on the line of a call, or on the one before, marks the others.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CODE = Path(__file__).parents[1] / "vit_ray"
MARK = re.compile(r"# no limit: \w")

WAITS = re.compile(
    r"ray\.(get|wait|init)|ray\.train\.collective\.\w+|(torch\.distributed|dist)\.init_process_group"
    r"|(.*\.)?(wait|wait_for|acquire|flock|result|communicate|create_connection)"
    r"|subprocess\.(run|call|check_call|check_output)|\w*thread\w*\.join|self\._thread\.join|\w+ing\.join"
    r"|.*(queue|_ready|_answers)\.get|_(tuner|trainer)\(.*\)\.fit"
)
"""Collectives have the limit of their group, and `time.sleep` its own."""
LIMIT_AT: dict[str, int] = {
    "wait": 0, "result": 0, "join": 0, "wait_for": 1, "create_connection": 1,
}  # fmt: skip
"""Place of the limit among the positional arguments."""


def has_limit(call: ast.Call) -> bool:
    """Whether the call ends by itself."""
    if any(keyword.arg in ("timeout", "blocking") for keyword in call.keywords):
        return True
    name = ast.unparse(call.func).rpartition(".")[2]
    if name == "flock":
        return "LOCK_NB" in ast.unparse(call)
    is_ray = ast.unparse(call.func).startswith("ray.")
    behind = isinstance(call.func, ast.Name) and name == "wait"  # of futures
    return not is_ray and name in LIMIT_AT and len(call.args) > LIMIT_AT[name] + behind


def endless(code: str) -> Iterator[tuple[int, str]]:
    """(line, call) of each call that waits without a limit or a reason."""
    lines = code.splitlines()
    for call in ast.walk(ast.parse(code)):
        if not isinstance(call, ast.Call) or not WAITS.fullmatch(ast.unparse(call.func)):
            continue
        near = lines[max(0, call.lineno - 2) : call.end_lineno]
        if not has_limit(call) and not any(map(MARK.search, near)):
            yield call.lineno, ast.unparse(call)


def test_every_wait_has_a_limit_or_a_reason():
    found = [
        f"{path.relative_to(CODE.parent)}:{line}: {call}"
        for path in sorted(CODE.rglob("*.py"))
        for line, call in endless(path.read_text())
    ]
    assert not found, "give each a timeout, or `# no limit: what ends it`: " + "; ".join(found)


@pytest.mark.parametrize(
    ("call", "limited"),
    [
        ("ray.get(x)", "ray.get(x, timeout=3)"), ("future.result()", "future.result(3)"),
        ("done.wait_for(ready)", "done.wait_for(ready, 3)"), ("thread.join()", "', '.join(x)"),
        ("flock(file, LOCK_EX)", "flock(file, LOCK_EX | LOCK_NB)"),
        ("subprocess.run(command)", "recipe.get(x)"),
    ],
)  # fmt: skip
def test_a_wait_without_a_limit_is_found(call, limited):
    assert list(endless(f"def f():\n  x = [{call} for y in z]\n"))
    assert not list(endless(f"def f():\n  x = {call}  # no limit: it is done\n"))
    assert not list(endless(f"x = {limited}\n"))
