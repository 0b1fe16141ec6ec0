"""Every call that waits has a limit, or `# no limit: REASON` on its line or on the one before."""

import ast
import re
from collections.abc import Iterator

from tests.conftest import ROOT

WAITS = re.compile(
    r"ray\.(get|wait|init)|ray\.train\.collective\.\w+|(torch\.distributed|dist)\.init_process_group"
    r"|(.*\.)?(wait|wait_for|acquire|flock|result|communicate|create_connection)"
    r"|subprocess\.(run|call|check_call|check_output)|\w*thread\w*\.join|self\._thread\.join|\w+ing\.join"
    r"|.*(queue|_ready|_answers)\.get|_(tuner|trainer)\(.*\)\.fit"
)
"""Collectives have the limit of their group, and `time.sleep` its own."""
LIMIT_AT = {"wait": 0, "result": 0, "join": 0, "wait_for": 1, "create_connection": 1}
"""Place of the limit among the positional arguments."""


def has_limit(call: ast.Call) -> bool:
    if any(keyword.arg in ("timeout", "blocking") for keyword in call.keywords):
        return True
    name = ast.unparse(call.func).rpartition(".")[2]
    if name == "flock":
        return "LOCK_NB" in ast.unparse(call)
    is_ray = ast.unparse(call.func).startswith("ray.")
    behind = isinstance(call.func, ast.Name) and name == "wait"  # of futures
    return not is_ray and name in LIMIT_AT and len(call.args) > LIMIT_AT[name] + behind


def endless(code: str) -> Iterator[str]:
    lines = code.splitlines()
    for call in ast.walk(ast.parse(code)):
        if isinstance(call, ast.Call) and WAITS.fullmatch(ast.unparse(call.func)):
            near = "\n".join(lines[max(0, call.lineno - 2) : call.end_lineno])
            if not has_limit(call) and not re.search(r"# no limit: \w", near):
                yield f"{call.lineno}: {ast.unparse(call)}"


def test_every_wait_has_a_limit_or_a_reason():
    for path in sorted((ROOT / "vit_ray").rglob("*.py")):
        assert list(endless(path.read_text())) == [], path


def test_a_wait_without_a_limit_is_found():
    for call in ("ray.get(x)", "future.result()", "subprocess.run(command)", "flock(f, LOCK_EX)"):
        assert list(endless(f"def f():\n  x = [{call} for y in z]\n"))
        assert not list(endless(f"def f():\n  x = {call}  # no limit: it is done\n"))
    for call in ("ray.get(x, timeout=3)", "future.result(3)", "', '.join(x)", "recipe.get(x)"):
        assert not list(endless(f"x = {call}\n"))
