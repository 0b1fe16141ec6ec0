"""No text of a recipe, a folder or a run becomes markup of the page."""

from html.parser import HTMLParser

import pytest
from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from vit_ray.report.page import write_report

PLAIN = "plain"
EVIL = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style></title><svg onload=alert(1)>",
    "{{ 'vit' * 3 }}{% raw %}",
    "]]><!--",
]


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(sorted(name for name, _ in attrs))))


def _page(folder, text):
    """A study with a sweep below it, where every text that a user can choose is `text`."""
    uri = f"sqlite:///{folder}/mlflow.db"
    client = MlflowClient(uri)
    experiment = client.create_experiment(f"e {text}")
    parent = client.create_run(experiment, run_name=text, tags={"vit_ray.kind": "study"})
    for k, stage in enumerate(("sweep_trial", "finetune", text)):
        run_id = client.create_run(experiment, run_name=f"{text} {k}").info.run_id
        tags = ("study_label", "git_commit", "data_fingerprint", "cluster", "ray_version")
        for tag in (*tags, "changed_params"):
            client.set_tag(run_id, f"vit_ray.{tag}", text)
        client.set_tag(run_id, "vit_ray.kind", stage)
        client.set_tag(run_id, "vit_ray.sweep_stage", stage)
        client.set_tag(run_id, "mlflow.parentRunId", parent.info.run_id)
        keys = ("model.name", "data.train", "optim.learning_rate", "seed", "data.fraction", "note")
        metrics = {"eval/top1": 0.5, "study/exaflops": 1.0 + k, "study/train_images": 10.0 + k}
        client.log_batch(
            run_id,
            params=[Param(key, text) for key in keys],
            metrics=[Metric(key, value, 0, s) for key, value in metrics.items() for s in (1, 2)],
        )
    return write_report(uri, parent.info.run_id, folder / "page.html").page


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return Elements(_page(tmp_path_factory.mktemp("plain"), PLAIN).read_text()).found


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("evil", EVIL)
def test_a_text_from_outside_adds_no_element_and_no_attribute(evil, plain, tmp_path):
    page = _page(tmp_path, evil).read_text()
    assert Elements(page).found == plain
    assert "vitvitvit" not in page
