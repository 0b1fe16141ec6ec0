"""Names of metrics stand in one module, so that what is recorded is what is looked for."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.modules import MODULES, PACKAGE
from vit_ray import metric_names

NAMES = [
    value
    for key, value in vars(metric_names).items()
    if key.isupper() and isinstance(value, str) and value[0] != "/"
]
GROUPS = sorted({name.partition("/")[0] for name in NAMES})
LITERAL = re.compile(rf"({'|'.join(GROUPS)})/\w*")


def literals(code: str) -> Iterator[tuple[int, str]]:
    """(line, text) of strings, and of beginnings of formatted ones, that name a metric."""
    tree = ast.parse(code)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    texts |= {id(part) for node in formatted for part in node.values[1:]}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and id(node) not in texts
        if is_text and LITERAL.fullmatch(str(node.value)):
            yield node.lineno, node.value


def test_names_of_metrics_are_spelled_in_one_module() -> None:
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{line}: {text}"
        for path in MODULES
        if path.name != "metric_names.py"
        for line, text in literals(path.read_text())
    ]
    assert not found, "take each from vit_ray/metric_names.py: " + "; ".join(found)


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ('log({"train/loss": 1.0})', 1),
        ('key = f"eval/{prefix}{name}"', 1),
        ('path = f"{folder}/eval/top1"', 0),
        ('"""`train/loss` at each step."""', 0),
        ('name = "paper/row.csv"', 0),
    ],
)
def test_a_literal_is_told_from_a_path_and_a_sentence(code: str, count: int) -> None:
    assert len(list(literals(code))) == count


def test_names_are_a_group_and_a_name_and_none_stands_twice() -> None:
    assert len(NAMES) == len(set(NAMES))
    assert all(re.fullmatch(r"[a-z_]+/[a-z0-9_]*", name) for name in NAMES)
