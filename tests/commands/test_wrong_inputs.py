"""Mistakes of a first hour: each is answered at once, by one message that tells what to change."""

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import ray
from click.testing import CliRunner

from tests.data.converted_set import converted_set
from tests.data.pictures import jpeg
from tests.data.small_sets import write_set
from tests.models.small import TINY_VIT, small_model
from vit_ray.commands import cli
from vit_ray.commands.job_list import COMMANDS, check_inputs, check_outputs
from vit_ray.config import Recipe, load_recipe
from vit_ray.lock import is_lock_file
from vit_ray.models.weights import save_weights
from vit_ray.storage import Location

RECIPE = "base: digits\nname: mine\ntracking: {uri: sqlite:///mlflow.db, experiment: mine}\n"
FILES = {
    "mine.yaml": RECIPE.encode(),
    "latin.yaml": "name: caf\xe9\n".encode("latin-1"),
    "cut.yaml": b"name: x\noptim: {steps: 5\n",
    "twice.yaml": b"base: digits\noptim: {steps: 5, epochs: null, steps: 6}\n",
    "loop.yaml": b"name: x\ndata: &data {train: *data}\n",
    "day.yaml": b"base: digits\nseed: 2026-13-45\n",
    "based.yaml": b"base: digist\nname: x\n",
    "hollow.yaml": b"base: digits\nname: mine\noptim:\n",
    "itself.yaml": b"base: itself.yaml\nname: run\n",
    "list.yaml": b"- 1\n",
    "none.csv": b"",
    "vit.npz": b"PK",
    "runs/old/step-00000010/meta.json": b"{",
    "recipes/inner.yaml": RECIPE.encode(),
    "note.txt": b"hello\n",
    "tiny.yaml": (
        "name: mine\n"
        f"model: {json.dumps({'name': 'ViT', 'image_size': 32, **TINY_VIT})}\n"
        "data: {train: sets/train, eval: sets/train}\n"
        "optim: {steps: 2}\n"
        "train: {global_batch_size: 4, micro_batch_size: 4}\n"
        "workers: {num_workers: 1}\n"
        "sweep: {learning_rates: [0.1], dev_fraction: 0.4}\n"
        "vtab: {data: sets/vtab, tasks: [{name: pets, group: natural}]}\n"
        "inspect: {images: sets/pictures}\n"
        "tracking: {uri: sqlite:///mlflow.db, experiment: mine}\n"
    ).encode(),
    "damaged/manifest.parquet": b"PAR1",
    "text.db": b"no database, but long enough that it might be one" * 100,
}
CONVERT = "convert mine.yaml convert.source=recipes convert.destination=data"
DEDUPLICATE = (
    "deduplicate mine.yaml deduplicate.source=recipes deduplicate.evaluation_sets=[recipes] "
    "deduplicate.destination=data"
)
MISTAKES = [
    ("export latin.yaml", "latin.yaml.: give YAML in UTF-8: .* position 9"),
    ("export cut.yaml", "cut.yaml: not valid YAML: line 3"),
    ("export twice.yaml", "twice.yaml: not valid YAML: line 2, .*steps"),
    ("export loop.yaml", "loop.yaml: not valid YAML: Circular reference"),
    ("export digits seed=!!int", "seed"),
    ("export day.yaml", "day.yaml: seed='2026-13-45'"),
    ("export based.yaml", "base of '.*based.yaml': recipe 'digist': .*similar: digits"),
    ("export itself.yaml", "base names the recipe itself"),
    ("export list.yaml", "expected a mapping of sections, got .1.; begin it with `base: digits`"),
    ("export hollow.yaml", "optim=None is a section of keys"),
    ("verify digits verify.path=~no-such-user/x", "~no-such-user/x does not exist"),
    ("export digits tracking.uri=sqlite:///", "tracking.uri: sqlite:// is not the address"),
    ("export digits tracking.uri=mlruns tracking.tags.50%=y", "uri: a path .*tags: '50%' is res"),
    ("export digits export.path=x export.push=hf://a/b/c", "export.push=.*: give .*hf://OWNER/"),
    ("pretrain digits tracking.uri=sqlite:///recipes", "tracking.uri=.*is a folder"),
    ("evaluate digits runs/old", "override 'runs/old': expected key=value, such as init_from="),
    ("evaluate runs/old", "'runs/old' has weights; give a recipe and init_from=runs/old"),
    ("export recipes", "recipe 'recipes': this is a folder"),
    ("evaluate vit.npz", "'vit.npz' has weights; give a recipe and init_from=vit.npz"),
    ("pretrain digits workers.num_workers=3", "among 3 workers .* passes of 64 .* is 192"),
    ("export digits optim.learning_rate=.inf", "optim.learning_rate=inf: give number > 0"),
    ("pretrain digits --optim.steps=5", "without dashes: optim.steps=VALUE"),
    ("pretrain digits --lr 0.1", "without dashes: optim.learning_rate=0.1"),
    ("pretrain digits --batch-size 64", "without dashes: train.global_batch_size=64"),
    ("pretrain digits --dryrun", "Did you mean '--dry-run'"),
    ("pretrain tracking.tags.my-tag=x nosuch", "recipe 'nosuch': no such file"),
    ("pretrain", "Missing argument 'RECIPE"),
    ("keys optm", "did you mean optim"),
    ("pretrian digits", "No such command 'pretrian'. Did you mean 'pretrain'"),
    ("convert digits", "convert.source is not set; give "),
    (f"{CONVERT} convert.source=nosuch", "convert.source='nosuch'"),
    (f"{CONVERT} convert.source=gs://a/b", r"pip install 'vit-ray\[gcs\]'"),
    (f"{CONVERT} convert.source=s3://", "'s3://' names no bucket"),
    (f"{CONVERT} convert.destination=recipes", "'recipes' is in convert.source='recipes'"),
    (f"{CONVERT} convert.destination=note.txt", "destination=.*note.txt' must be a folder"),
    (f"{CONVERT} convert.source=done", "convert.source='done' is a converted data set already"),
    (f"{CONVERT} convert.source=s3://BUCKET/a/*.tar", "'s3://BUCKET/a.*' is a placeholder"),
    ("verify digits", "verify.path is not set"),
    ("verify digits verify.path=nosuch", "verify.path='nosuch'"),
    ("verify digits verify.path=x sweep.seeds=2 seed=3", "verify does not read sweep.seeds, seed;"),
    ("pretrain digits convert.destination=x convert.source=y --dry-run", "does not read convert.d"),
    ("pretrain digits --optm.steps 5", "without dashes: optim.steps=5"),
    ("subset digits subset.source=nosuch subset.destination=x", "subset.source='nosuch'"),
    (f"{DEDUPLICATE} deduplicate.source=nosuch", "deduplicate.source='nosuch'"),
    (f"{DEDUPLICATE} deduplicate.evaluation_sets=[]", r"deduplicate.evaluation_sets=\[\]"),
    ("pretrain mine.yaml data.train=nosuch", "'nosuch': .*does not exist.*convert` makes"),
    ("pretrain mine.yaml data.train=s3:// data.eval=note.txt", "'s3://' names no bucket"),
    ("pretrain paper/vit_b16_jft", "'s3://BUCKET/.*' is a placeholder of a shipped recipe"),
    ("finetune mine.yaml", "init_from is not set; give weights"),
    ("sweep mine.yaml", "sweep.learning_rates is not set"),
    ("scaling_study mine.yaml", "study.models is not set"),
    ("scaling_study study_digits init_from=no.npz data.train=no", "from='no.npz': .* not exist"),
    ("keys convert --of verify", "verify reads no key of convert; leave out one"),
    ("plan mine.yaml plan.device=TPU", "plan.device='TPU' is not known; use one of .*H100"),
    ("plan mine.yaml model.name=nope", "model name 'nope' is unknown; similar names: "),
    ("export mine.yaml export.path=x.npz", "init_from is not set"),
    ("export mine.yaml export.path=x.npz init_from=note.txt", "'note.txt': .*; convert it to .npz"),
    ("inspect_model mine.yaml inspect.images=note.txt init_from=x", "'note.txt': .*not a folder"),
    ('sweep mine.yaml sweep.space={"data.train":["a","b"]}', "data.train cannot be varied in one"),
    ('sweep mine.yaml sweep.space={"optim.weight_decay":{"uniform":[0.0,0.2]}}', "is a range, but"),
    ("evaluate digits init_from=x.npz data.eval=null", "data.eval is not set: nothing would be"),
    ("evaluate digits init_from=x.npz train.loss=masked_patch", "=masked_patch has no accuracy"),
    ("evaluate digits init_from=x benchmark.kind=objectnet", "label_file is not set; .*mappings"),
    ("plan digits --gpus 0", "Invalid value for '--gpus'"),
    ("quickstart digits data.eval=null", "data.eval is not set"),
    ("quickstart digits workers.num_workers=3", "among 3 workers"),
    ("quickstart digits train.global_batch_size=7", "=7 .* among 2 workers"),
    ("quickstart digits init_from=nosuch", "init_from='nosuch': .* does not exist"),
    ("quickstart digits evaluate.few_shot_train=a evaluate.few_shot_test=a", "train='a': .*exist"),
    ("vtab vtab_1k init_from=vit.npz", "'s3://BUCKET/.*' is a placeholder"),
    ("predict nosuch note.txt", "'nosuch' is not there; give a run, a checkpoint or"),
    ("predict vit.npz model.depth=1", "no PATH is given"),
    ("predict vit.npz note.txt --out=recipes/a.txt", "--out recipes/a.txt: expected a file that"),
    ("predict vit.npz nosuch", "'nosuch': no such file or folder; check the path"),
    ("predict vit.npz recipes", "'recipes' holds no images among its 1 files"),
    (
        "predict vit.npz sets/pictures --out=done/manifest.parquet",
        "manifest.parquet exists already",
    ),
    ("predict vit.npz sets/pictures --out=a.png --out=a.png", "or is given twice"),
    ("predict vit.npz sets/pictures --out=tpyo/a.png", "a.png: there is no folder .*tpyo"),
    ("predict vit.npz sets/pictures --out=note.txt/a.png", "a.png: there is no folder .*note.txt"),
    ("replay recipes sqlite:///m.db", "log 'recipes': no such file, or it does not begin"),
    ("replay note.txt mlflow.db", "URI 'mlflow.db' is not an address"),
    ("plan digits model.depth=1000000000", "model.depth=1000000000"),
    ("plan digits model.num_heads=7", "not divisible by num_heads=7"),
    ("report mine.yaml", "tracking.uri=sqlite:///.*mlflow.db: no such file"),
    ("report mine.yaml tracking.uri=sqlite:///text.db", "text.db: .*file is not a database"),
    ("report mine.yaml tracking.uri=http://127.0.0.1:9", "cannot be used: .*refused.*give"),
]

CLASSES = ["ant", "bee", "cow"]
VALIDATION = [f"n{number:08d}" for number in range(4)]
FITS, WIDE = "init_from=sets/fits.npz", "init_from=sets/wide.npz"
VAL = "evaluate tiny.yaml data.train=null data.eval=sets/val init_from=sets/of4.npz"
REAL = f"{VAL} benchmark.kind=imagenet_real benchmark.label_file"
SHOTS = f"evaluate tiny.yaml {FITS} evaluate.few_shot_train=sets/train"
SHOT = f"{SHOTS} evaluate.few_shot_test=sets/train evaluate.shots"
SUBSET = "subset tiny.yaml subset.destination=x"
SPACE = f"sweep tiny.yaml {FITS} sweep.space="
STARTS = [
    "pretrain tiny.yaml", "sweep tiny.yaml", "vtab tiny.yaml", "evaluate tiny.yaml",
    "inspect_model tiny.yaml", "export tiny.yaml export.path=x.npz",
]  # fmt: skip
DAMAGED = "damaged/manifest.parquet is not a manifest of vit_ray or is damaged"
TRANSFERS = [
    ("pretrain mine.yaml data.train=note.txt data.eval=note.txt", "no data set at .*note.txt'"),
    ("export digits init_from=vit.npz export.path=./vit.npz", "export.path=.* is init_from itself"),
    (f"inspect_model tiny.yaml {FITS} inspect.images=recipes", "'recipes' holds no readable image"),
    ("finetune tiny.yaml init_from=sets/none.npz", "init_from=.*none.npz.* does not exist"),
    ("finetune tiny.yaml init_from=sets/junk.safetensors", "junk.safetensors cannot be read"),
    ("finetune tiny.yaml init_from=sets/bit.npz", "unexpected: .*root_block/.*missing: .*norm"),
    ("finetune tiny.yaml init_from=sets/other.npz", "no known layout .*: words"),
    *((f"{words} init_from=sets/junk.npz", "junk.npz cannot be read") for words in STARTS),
    *((f"{words} {WIDE}", "contract.weight is 32x96, the model has 32x64") for words in STARTS),
    (VAL.replace("data.eval=sets/val", "data.eval=sets/train"), "of other classes: 4, .* has 3"),
    ("quickstart digits optim.epochs=0.01", r"optim\.warmup_steps=40 .* \(1 steps\)"),
    ("sweep tiny.yaml sweep.learning_rates=[0.1,0.1]", "has 0.1 twice"),
    (f'{SPACE}{{"optim.learning_rate":[0.1,0.1]}}', "optim.learning_rate=.*different values"),
    (f'{SPACE}{{"optim.learning_rte":[0.1]}}', "sweep.space: .*unknown key optim.learning_rte"),
    (f'{SPACE}{{"init_from":["sets/fits.npz","sets/wide.npz"]}}', "sweep.space: init_from=.*wide"),
    (f'{SPACE}{{"model.depth":[2,3]}}', "sweep.space: depth=3: init_from: .*encoderblock_2/"),
    (f'{SPACE}{{"train.global_batch_size":[4,64]}}', "train.global_batch_size=64 is more than"),
    (f"sweep tiny.yaml data.train=sets/scarce {FITS}", "of 9 images is 4, .* 3 to 6 images"),
    (f"sweep tiny.yaml sweep.dev_fraction=0.1 {FITS}", "of 12 images is 1, .* 3 to 9 images"),
    (f"vtab tiny.yaml vtab.data=nosuch {FITS}", "vtab.data='nosuch': .*a folder with TASK"),
    (f"vtab tiny.yaml sweep=null vtab.sweep_each=true {FITS}", "sweep is not set"),
    (f"{SHOTS} evaluate.few_shot_test=nosuch", "few_shot_test='nosuch': .*does not exist"),
    (SHOTS, "evaluate: few_shot_train and few_shot_test go together"),
    (f"{SHOT}=[1,5]", r"evaluate\.shots=\[1, 5\]: class 0 \('ant'\) has 4 .*use shots up to 4"),
    (f"{SHOTS} evaluate.few_shot_test=sets/val", "few_shot_test: .*val has 4 classes"),
    (REAL.rpartition(" ")[0], "label_file is not set; give real.json"),
    (f"{REAL}=nosuch.json", "benchmark.label_file='nosuch.json': .*does not exist"),
    (f"{REAL}=sets/short.json", "short.json has labels of 3 images and data.eval has 4"),
    (f"{REAL}=sets/turned.json", "turned.json agrees with data.eval for 0.0%"),
    (f"evaluate tiny.yaml data.eval=sets/val {FITS}", "data.eval: .*4 classes .* the model has 3"),
    (f"evaluate tiny.yaml {FITS} benchmark.model_classes=nosuch.txt", "benchmark.model_classes"),
    ("init none.csv", "none.csv' needs one field for the image"),
    ("init sets/latin1", r"not UTF-8 \(.*caf.*\); rename it"),
    (
        f"{SUBSET} subset.source=sets/train subset.keys=sets",
        "keys='sets': .*not a text file",
    ),
    ("verify tiny.yaml verify.path=damaged", DAMAGED),
    (f"{SUBSET} subset.source=damaged subset.keys=note.txt", DAMAGED),
    (f"{DEDUPLICATE} deduplicate.evaluation_sets=[damaged] deduplicate.source=sets/train", DAMAGED),
    ("ui sqlite:///nosuch.db", "nosuch.db: no such file"),
    ("fork nosuch step=1 name=new", "complete checkpoints in nosuch are: none"),
    (f"fork {'0' * 32} step=1 name=new", "mlflow.db: no such file"),
    (f"inspect_model tiny.yaml {FITS} inspect.path=note.txt", "inspect.path=.*must be a folder"),
    (f"inspect_model tiny.yaml {FITS} inspect.path=/proc/x", "No such file .*'/proc/x'"),
]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets, weights and label files, good ones and bad ones."""
    folder = tmp_path_factory.mktemp("sets")
    rows = [(str(k), [k % 3]) for k in range(12)]
    for name in ("train", "vtab/pets/train", "vtab/pets/test"):
        write_set(folder / name, rows, CLASSES)
    write_set(folder / "scarce", [*rows[:2], *rows[3:6], *rows[:2], *rows[9:11]], CLASSES)
    named = [(f"ILSVRC2012_val_{k + 1:08d}", [k]) for k in range(4)]
    write_set(folder / "val", named, VALIDATION)
    (folder / "short.json").write_text("[[0], [1], [2]]")
    (folder / "turned.json").write_text("[[1], [2], [3], [0]]")
    (folder / "latin1" / os.fsdecode(b"caf\xe9")).mkdir(parents=True)
    (folder / "latin1" / os.fsdecode(b"caf\xe9") / "a.jpg").write_bytes(jpeg(1))
    (folder / "pictures").mkdir()
    (folder / "pictures" / "a.jpg").write_bytes(jpeg(1))
    save_weights(small_model("ViT", 3), folder / "fits.npz")
    save_weights(small_model("ViT", 4), folder / "of4.npz")
    save_weights(small_model("ViT", 3, mlp_dim=96), folder / "wide.npz")
    save_weights(small_model("ResNet", 3), folder / "bit.npz")
    np.savez(folder / "other.npz", words=np.zeros(3))
    (folder / "junk.npz").write_bytes(b"PK no archive")
    (folder / "junk.safetensors").write_bytes(bytes(range(256)) * 9)
    return folder


@pytest.fixture
def newcomers_folder(sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the command, with files of all kinds; Ray does not start."""
    (tmp_path / "sets").symlink_to(sets)
    manifest = (converted_set() / "manifest.parquet").read_bytes()
    for name, content in {**FILES, "done/manifest.parquet": manifest}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VIT_RAY_LOGS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def refuse(**_: object) -> None:
        pytest.fail("Ray was started before the mistake was told")

    monkeypatch.setattr(ray, "init", refuse)
    return tmp_path


WRONG = [*MISTAKES, *TRANSFERS]


@pytest.mark.parametrize(("words", "told"), WRONG, ids=[words for words, _ in WRONG])
def test_a_wrong_line_is_told_at_once_and_in_one_message(words, told, newcomers_folder):
    folder = newcomers_folder
    before = set(folder.rglob("*"))
    done = CliRunner().invoke(cli.vit_ray, words.split(), prog_name="vit-ray")
    assert isinstance(done.exception, SystemExit), repr(done.exception)  # else a traceback
    assert done.exit_code in (1, 2)
    _, message = re.split(r"^(?=[Ee]rror: )", done.stderr, flags=re.M)
    assert re.search(told, message, re.S)
    left = {path.name for path in set(folder.rglob("*")) - before if not path.is_dir()}
    assert {name for name in left if not is_lock_file(name)} <= {"text.db.lock"}
    if words.startswith(("pretrain", "finetune")):
        assert not left


# Only MLflow's client can tell what is wrong with a server.
NEEDS_LIBRARIES = "report mine.yaml tracking.uri=http://127.0.0.1:9"
SECONDS = {"torch", "ray", "mlflow", "deepspeed"}  # to import
HELP = ["--help", "recipes", "keys optim", "export digits --dry-run", "replay --help"]
HELP += [f"{name} digits {word}" for name in COMMANDS for word in ("--help", "optim.lr=1")]
TOLD_ALONE = """
import contextlib, io, sys
from vit_ray.commands.cli import vit_ray
for line in sys.stdin.read().splitlines():
    quiet = contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO())
    with contextlib.suppress(SystemExit), quiet[0], quiet[1]:
        vit_ray.main(line.split(), prog_name="vit-ray")
    loaded = {*sys.argv[1:]} & {*sys.modules}
    if loaded:
        sys.exit(f"{line}: {loaded}")
"""


def test_help_and_mistakes_are_told_without_what_takes_seconds(newcomers_folder):
    mistakes = [words for words, _ in MISTAKES if words != NEEDS_LIBRARIES]
    mistakes += [words for words, _ in TRANSFERS if "=nosuch" in words]
    heavy = {*SECONDS, "pyarrow", "numpy", "scipy", "cv2", "pandas"}
    for lines, absent in ((HELP, heavy), (mistakes, SECONDS)):
        command = [sys.executable, "-c", TOLD_ALONE, *absent]
        subprocess.run(command, input="\n".join(lines), text=True, check=True, cwd=newcomers_folder)


@pytest.mark.parametrize(("words", "code"), [("keys optm", 2), (NEEDS_LIBRARIES, 1)])
def test_where_logs_are_asked_for_a_mistake_has_its_traceback(
    words, code, newcomers_folder, monkeypatch
):
    monkeypatch.setenv("VIT_RAY_LOGS", "1")
    done = CliRunner().invoke(cli.vit_ray, words.split(), prog_name="vit-ray")
    assert (done.exit_code, done.stderr.count("Traceback (most recent") > 0) == (code, True)


def check_places(name: str, recipe: Recipe) -> None:
    check_outputs(COMMANDS[name], recipe)
    check_inputs(COMMANDS[name], recipe)


@pytest.mark.parametrize("has_begun", [True, False])
@pytest.mark.parametrize("output", ["runs", "s3://a/runs"])
@pytest.mark.parametrize("name", ["finetune", "scaling_study", "quickstart", "evaluate"])
def test_weights_that_a_continued_run_does_not_read_may_be_gone(
    name, output, has_begun, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    begun = ("a/runs/mine", f"{tmp_path}/runs/mine") if has_begun else ()
    monkeypatch.setattr(Location, "exists", lambda place: place.path in begun)
    changes = ["init_from=gone", f"output={output}", "name=mine", "data.train=null"]
    recipe = load_recipe("digits", [*changes, "data.eval=null"])
    refusal = pytest.raises(ValueError, match=r"init_from='gone': .*does not exist, or is not a")
    with nullcontext() if has_begun and name != "evaluate" else refusal:
        check_places(name, recipe)


SHARED = ("output=/shared/runs", "tracking.uri=http://mlflow:5000")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("pretrain", ["output=mine"], r"output=mine would be in this job's copy .* nodes share"),
        ("pretrain", ["output=/shared/runs"], "tracking.uri=sqlite:///mine.db would .* a server"),
        ("pretrain", ["output=file://COPY/mine"], "output=file:.*/mine would be in this job's"),
        ("pretrain", [*SHARED, "data.train=here"], "train='here': .*; this job runs in a copy"),
        ("pretrain", ["output=s3://mine/runs", "tracking.uri=http://mlflow:5000"], None),
        ("pretrain", ["output=/shared/runs", "tracking.uri=sqlite:////shared/m.db"], None),
        ("convert", ["convert.source=COPY", "convert.destination=new"], "destination=new would be"),
        ("convert", ["convert.source=.", "convert.destination=/shared/new"], None),
        ("export", ["init_from=s3://mine/run", "export.path=new"], "export.path=new would be"),
        ("verify", ["verify.path=s3://mine/set"], None),
    ],
)
def test_a_submitted_job_does_not_write_into_its_copy_of_the_folder(
    name, changes, message, tmp_path, monkeypatch
):
    """Its nodes have a copy each, in a cache that Ray empties."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # As Ray 2.60 unpacks it.
    copy = tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    copy.mkdir(parents=True)
    changes = [one.replace("COPY", str(copy)) for one in changes]
    sets = [f"data.{key}=s3://mine/set" for key in ("train", "eval")]
    changes = ["tracking.uri=sqlite:///mine.db", *sets, *changes]
    write_set(tmp_path / "here", [("a.png", [0])], ["ant"])  # the copy does not have it
    monkeypatch.chdir(tmp_path)
    check_places(name, load_recipe("digits", changes))
    monkeypatch.chdir(copy)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check_places(name, load_recipe("digits", changes))


@pytest.mark.parametrize("folder", ["recipe", "working_dir_files/_ray_pkg_1/configs"])
def test_a_relative_path_in_a_submitted_jobs_recipe_is_refused(folder, tmp_path, monkeypatch):
    """The recipe may be a file of its node, as in cluster/rayjob.yaml."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    copy, recipe = tmp_path / "working_dir_files" / "_ray_pkg_1", tmp_path / folder / "recipe.yaml"
    for place in (copy, recipe.parent):
        place.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(copy)
    recipe.write_text("base: digits\noutput: runs\n")
    changes = [SHARED[1], "data.train=s3://a", "data.eval=s3://mine/set"]
    with pytest.raises(ValueError, match=r"output=.*runs would be in this job's copy"):
        check_places("pretrain", load_recipe(recipe, changes))
