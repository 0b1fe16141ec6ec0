"""Runs as MLflow has them, made of real recipes: what is recorded is what a job would record."""

import contextlib
import hashlib
import itertools
import json
import threading
from types import SimpleNamespace
from wsgiref.simple_server import WSGIRequestHandler, make_server

from mlflow.entities import Dataset, DatasetInput, InputTag

from vit_ray.config.recipe import recipe_from_dict
from vit_ray.config.resume_compatibility import TAGGED
from vit_ray.launch.run_metadata import trained_params
from vit_ray.report.runs import RecordedRun, with_origins, with_tasks

BASE = {
    "name": "made",
    "output": "/runs",
    "model": {"name": "ViT-B/32"},
    "data": {"train": "/data/cifar10/train", "eval": "/data/cifar10/test"},
    "optim": {"epochs": 7.0},
}
CONTEXTS = {"train": "training", "eval": "evaluation"}
_numbers = itertools.count()


def recipe(changes):
    """Of dotted keys."""
    return recipe_from_dict(BASE, "test").with_changes(**_tree({"seed": 0, **changes}))


def _tree(dotted):
    tree = {}
    for key, value in dotted.items():
        section, _, rest = key.partition(".")
        if rest:
            tree.setdefault(section, {})[rest] = value
        else:
            tree[key] = value
    return tree


def made(
    changes=(),
    *,
    kind="study_cell",
    status="FINISHED",
    images=50_000,
    sets=None,
    is_early=False,
    metrics=None,
    name=None,
    start=None,
    **tags,
):
    """A recorded run.

    Args:
        changes: dotted keys of the recipe.
        sets: fingerprints of `train` and `eval`; by default each path has one of its own.
        is_early: as code recorded it that made a parameter of every key, and a tag of none.
        tags: without `vit_ray.`.
    """
    number = next(_numbers)
    whole = recipe(dict(changes)).with_changes(name=name or f"run{number}")
    flat = whole.flat()
    places = {key: flat[key] for key in TAGGED if flat[key] not in ("None", "0.0")}
    digests = {"train": flat["data.train"], "eval": flat["data.eval"]}
    digests = {use: hashlib.sha256(path.encode()).hexdigest()[:32] for use, path in digests.items()}
    digests |= sets or {}
    known = {
        "vit_ray.kind": kind,
        "vit_ray.git_commit": "c0ffee",
        "vit_ray.data_fingerprint": digests["train"] * 2,
        "vit_ray.run_folder": whole.run_folder,
        **({} if is_early else places),
        **{key if "." in key else f"vit_ray.{key}": text for key, text in tags.items()},
    }
    inputs = [
        DatasetInput(
            Dataset("d", digests[use], "vit_ray", "{}", profile=json.dumps({})),
            [InputTag("mlflow.data.context", CONTEXTS[use])],
        )
        for use in ("train", "eval")
        if flat[f"data.{use}"] != "None"
    ]
    held = {"study/train_images": float(images), "study/exaflops": 10.0, **(metrics or {})}
    time_ms = number if start is None else start
    info = SimpleNamespace(
        run_id=f"{number:032x}", run_name=whole.name, status=status, start_time=time_ms,
        end_time=time_ms + 1, experiment_id="0",
    )  # fmt: skip
    data = SimpleNamespace(
        metrics=held, params=flat if is_early else trained_params(whole), tags=known
    )
    run = SimpleNamespace(info=info, data=data, inputs=SimpleNamespace(dataset_inputs=inputs))
    return RecordedRun(run)


def tuned(origin, task, top1, changes=(), **more):
    """A fine-tuning of a run's weights."""
    places = {
        "init_from": f"{origin.tags['vit_ray.run_folder']}/step-00000100",
        "data.train": f"/data/{task}/train",
        "data.eval": f"/data/{task}/test",
    }
    own = {"metrics": {"eval/top1": top1, "study/exaflops": 1.0}, **more}
    return made({**places, **dict(changes)}, kind="finetune", **own)


def archived(runs):
    """As a report reads them."""
    return with_origins(with_tasks(runs))


def texts(table):
    """Rows as the page shows them, by the first column."""
    heads = [column.title for column in table.columns]
    return [dict(zip(heads, (cell.text for cell in row), strict=True)) for row in table.cells()]


class _Silent(WSGIRequestHandler):
    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served(app):
    """Address of a server of a WSGI application, such as MLflow's."""
    server = make_server("127.0.0.1", 0, app, handler_class=_Silent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
