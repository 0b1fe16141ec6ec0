"""Mistakes of a first hour: each is answered at once, by one message that tells what to change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import ray
from click.testing import CliRunner

from vit_ray.commands import cli

RECIPE = "base: digits\nname: mine\ntracking: {uri: sqlite:///mlflow.db, experiment: mine}\n"
FILES = {
    "mine.yaml": RECIPE.encode(),
    "empty.yaml": b"",
    "comment.yaml": b"# only this\n",
    "latin.yaml": "name: caf\xe9\n".encode("latin-1"),
    "picture.yaml": bytes([0x89, 0x50, 0x4E, 0x47, 0x0D, 0x0A, 0x1A, 0x0A]),
    "cut.yaml": b"name: x\noptim: {steps: 5\n",
    "twice.yaml": b"base: digits\noptim: {steps: 5, epochs: null, steps: 6}\n",
    "loop.yaml": b"name: x\ndata: &data {train: *data}\n",
    "bytes.yaml": b"base: digits\nname: !!binary aGVsbG8=\n",
    "day.yaml": b"base: digits\nseed: 2026-13-45\n",
    "day_key.yaml": b"base: digits\n2026-01-01: 5\n",
    "based.yaml": b"base: digist\nname: x\n",
    "based_on_two.yaml": b"base: [digits, cifar10]\nname: x\n",
    "recipes/inner.yaml": RECIPE.encode(),
    "note.txt": b"hello\n",
    "text.db": b"no database, but long enough that it might be one" * 100,
}
MISTAKES = [
    ("export empty.yaml", "recipe 'empty.yaml' is empty; begin it with `base: digits`"),
    ("export comment.yaml", "recipe 'comment.yaml' is empty"),
    ("export latin.yaml", "recipe 'latin.yaml' is not UTF-8 text .*at byte 9.; .*save it as"),
    ("export picture.yaml", "recipe 'picture.yaml' is not UTF-8 text"),
    ("export cut.yaml", 'cut.yaml: not valid YAML: .*in "cut.yaml", line 2'),
    ("export twice.yaml", "the key 'steps' stands twice .*keep one.*line 2, column 33"),
    ("export loop.yaml", "loop.yaml: not valid YAML: Circular reference"),
    ("export bytes.yaml", "bytes.yaml: not valid YAML: .*binary.*line 2"),
    ("export day.yaml", "day.yaml: seed='2026-13-45': Input should be a valid integer"),
    ("export day_key.yaml", "day_key.yaml: unknown key 2026-01-01 "),
    ("export based.yaml", "base of '.*based.yaml': recipe 'digist': no such file; near: digits"),
    ("export based_on_two.yaml", r"base=\['digits', 'cifar10'\]: expected the name of one recipe"),
    (
        "export recipes",
        "recipe 'recipes' is a folder; give a YAML file in it, .*recipes/inner.yaml",
    ),
    ("export .", "recipe '.' is a folder"),
    ("export digits optim.learning_rate=.inf", "optim.learning_rate=inf: .*finite number"),
    ("export digits optim.learning_rate=.nan", "optim.learning_rate=nan: .*finite number"),
    (f"export digits seed={2**64}", f"seed={2**64}: Input should be less than {2**63}"),
    ("export digits data.train=2026-01-01 optim.steps=-5", "optim.steps=-5: .*greater than 0"),
    ("pretrain digits --optim.steps=5", "without dashes: optim.steps=VALUE"),
    ("pretrain digits --batch-size 64", "without dashes: batch_size=VALUE"),
    ("pretrain digits --dryrun", "Did you mean '--dry-run'"),
    ("pretrain digits --help optm", "recipe 'optm': no such file .*; keys near 'optm': optim"),
    ("pretrian digits", "No such command 'pretrian'. Did you mean 'pretrain'"),
    ("replay recipes sqlite:///m.db", "log 'recipes' is a folder; give a metrics.jsonl"),
    ("replay note.txt mlflow.db", "URI 'mlflow.db' is no address; give sqlite:///mlflow.db"),
    ("report mine.yaml", "tracking.uri=sqlite:///mlflow.db: no such file; give the MLflow"),
    ("report mine.yaml tracking.uri=runs", "MLflow at runs cannot be used: .*; give the file"),
    ("report mine.yaml tracking.uri=sqlite:///text.db", "cannot be used: .*not a database; give"),
    ("report mine.yaml tracking.uri=http://127.0.0.1:9", "cannot be used: .*refused.*; give"),
    ("report mine.yaml tracking.uri=foo://x", "MLflow at foo://x cannot be used: .*Supported"),
]


@pytest.fixture
def newcomers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the command, with files of all kinds; Ray does not start."""
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VIT_RAY_LOGS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def refuse(**_: object) -> None:
        pytest.fail("Ray was started before the mistake was told")

    monkeypatch.setattr(ray, "init", refuse)
    return tmp_path


@pytest.mark.parametrize(("words", "told"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_told_at_once_and_in_one_message(
    words: str, told: str, newcomers_folder: Path
) -> None:
    before = sorted(newcomers_folder.rglob("*"))
    done = CliRunner().invoke(cli.vit_ray, words.split(), prog_name="vit-ray")
    assert isinstance(done.exception, SystemExit), repr(done.exception)  # else a traceback
    assert done.exit_code in (1, 2)
    _, message = re.split(r"^(?=[Ee]rror: )", done.stderr, flags=re.M)
    assert re.search(told, message, re.S)
    left = {path.name for path in newcomers_folder.rglob("*")} - {path.name for path in before}
    assert left <= {"text.db.lock"}
