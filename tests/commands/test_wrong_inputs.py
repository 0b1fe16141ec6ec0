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
    "tagged.yaml": b"base: digits\nresume: !!bool perhaps\n",
    "day.yaml": b"base: digits\nseed: 2026-13-45\n",
    "day_key.yaml": b"base: digits\n2026-01-01: 5\n",
    "based.yaml": b"base: digist\nname: x\n",
    "based_on_two.yaml": b"base: [digits, cifar10]\nname: x\n",
    "recipes/inner.yaml": RECIPE.encode(),
    "note.txt": b"hello\n",
    "text.db": b"no database, but long enough that it might be one" * 100,
}
CONVERT = "convert mine.yaml convert.source=recipes convert.destination=data"
DEDUPLICATE = (
    "deduplicate mine.yaml deduplicate.source=recipes deduplicate.evaluation_sets=[recipes] "
    "deduplicate.destination=data"
)
MISTAKES = [
    ("export empty.yaml", "recipe 'empty.yaml' is empty; begin it with `base: digits`"),
    ("export comment.yaml", "recipe 'comment.yaml' is empty"),
    ("export latin.yaml", "recipe 'latin.yaml' is not UTF-8 text .*at byte 9.; .*save it as"),
    ("export picture.yaml", "recipe 'picture.yaml' is not UTF-8 text"),
    ("export cut.yaml", 'cut.yaml: not valid YAML: .*in "cut.yaml", line 2'),
    ("export twice.yaml", "the key 'steps' stands twice .*keep one.*line 2, column 33"),
    ("export loop.yaml", "loop.yaml: not valid YAML: Circular reference"),
    ("export bytes.yaml", "bytes.yaml: not valid YAML: .*binary.*line 2"),
    ("export tagged.yaml", "tagged.yaml: not valid YAML: "),
    ("export digits seed=!!int", "not valid YAML: "),
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
    (f"export digits seed={2**64}", f"seed={2**64}: expected less than {2**63}"),
    ("export digits data.train=2026-01-01 optim.steps=-5", "optim.steps=-5: .*greater than 0"),
    ("pretrain digits --optim.steps=5", "without dashes: optim.steps=VALUE"),
    ("pretrain digits --batch-size 64", "without dashes: batch_size=VALUE"),
    ("pretrain digits --dryrun", "Did you mean '--dry-run'"),
    ("pretrain digits --help optm", "recipe 'optm': no such file .*; keys near 'optm': optim"),
    ("pretrian digits", "No such command 'pretrian'. Did you mean 'pretrain'"),
    ("convert digits", "convert is not set; give convert.source and convert.destination"),
    (f"{CONVERT} convert.source=nosuch", "convert.source='nosuch': no such folder or file"),
    (f"{CONVERT} convert.source=note.txt", "note.txt' is a file of no known format; give"),
    (f"{CONVERT} convert.source=gs://a/b", "gs:// address is not served; .*give s3://"),
    (f"{CONVERT} convert.source=s3://", "'s3://' names no bucket; give s3://bucket/folder"),
    (f"{CONVERT} convert.destination=note.txt", "destination=.*note.txt' is to be a folder, but"),
    (
        f"{CONVERT} convert.destination=note.txt/a",
        "a' is to be a folder, but .*note.txt' is a file",
    ),
    ("verify digits", "verify is not set; give verify.path"),
    ("verify digits verify.path=nosuch", "no data set at 'nosuch': the folder does not exist"),
    ("verify digits verify.path=note.txt", "no data set at 'note.txt'"),
    ("verify digits verify.path=recipes", "no data set at 'recipes': .*no manifest.parquet; give"),
    ("subset digits subset.source=nosuch subset.destination=x", "no data set at 'nosuch'"),
    (f"{CONVERT} convert.source=no*such", "no\\*such"),
    (f"{DEDUPLICATE} deduplicate.source=nosuch", "no data set at 'nosuch': the folder does not"),
    (f"{DEDUPLICATE} deduplicate.evaluation_sets=[]", "at least 1 item"),
    ("pretrain mine.yaml data.train=nosuch", "no data set at .*nosuch': the folder does not exist"),
    ("pretrain mine.yaml data.train=note.txt", "no data set at .*note.txt': .*manifest.parquet"),
    ("pretrain mine.yaml data.train=s3://", "'s3://' names no bucket"),
    ("finetune mine.yaml", "init_from is not set; give the run, checkpoint or file to fine-tune"),
    ("evaluate mine.yaml", "init_from is not set; give the run, checkpoint or file to evaluate"),
    ("sweep mine.yaml", "sweep is not set; give sweep.learning_rates, such as"),
    ("sweep mine.yaml sweep.learning_rates=0.1", "sweep.learning_rates=0.1: .*array"),
    ("scaling_study mine.yaml", "study is not set; give study.models"),
    ("plan mine.yaml plan.device=TPU", "plan.device='TPU' is not known; use one of .*H100"),
    ("plan mine.yaml model.name=nope", "model name 'nope' is unknown; near names: "),
    ("export mine.yaml export.path=x.npz", "init_from is not set; give the run"),
    ("export mine.yaml export.path=x.npz init_from=note.txt", "only .npz and .safetensors are"),
    ("inspect_model mine.yaml inspect.images=note.txt", "no readable image .*give a folder"),
    ("quickstart nosuch", "recipe 'nosuch': no such file"),
    ("replay recipes sqlite:///m.db", "log 'recipes' is a folder; give a metrics.jsonl"),
    ("replay note.txt mlflow.db", "URI 'mlflow.db' is no address; give sqlite:///mlflow.db"),
    ("report mine.yaml", "tracking.uri=sqlite:///mlflow.db: no such file; give the MLflow"),
    ("report mine.yaml tracking.uri=runs", "MLflow at runs cannot be used: .*give the file"),
    ("report mine.yaml tracking.uri=sqlite:///text.db", "cannot be used: .*not a database; .*give"),
    ("report mine.yaml tracking.uri=http://127.0.0.1:9", "cannot be used: .*refused.*give"),
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
    before = set(newcomers_folder.rglob("*"))
    done = CliRunner().invoke(cli.vit_ray, words.split(), prog_name="vit-ray")
    assert isinstance(done.exception, SystemExit), repr(done.exception)  # else a traceback
    assert done.exit_code in (1, 2)
    _, message = re.split(r"^(?=[Ee]rror: )", done.stderr, flags=re.M)
    assert re.search(told, message, re.S)
    assert set(newcomers_folder.rglob("*")) - before <= {newcomers_folder / "text.db.lock"}
