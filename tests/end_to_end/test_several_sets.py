"""A training that is evaluated on several data sets, against evaluations on each of them alone."""

from pathlib import Path

import pytest

from tests.conftest import Digits
from tests.end_to_end.runs import runs_of
from tests.recipes import small_recipe
from vit_ray.commands.train import evaluate
from vit_ray.launch.run import train


@pytest.mark.slow
@pytest.mark.usefixtures("worker_pool")
def test_each_of_several_sets_has_the_accuracy_that_it_has_alone(
    digits: Digits, tmp_path: Path
) -> None:
    sets = {"one": digits.test, "other": digits.train}
    result = train(small_recipe("several", digits, tmp_path, data={"eval": sets}))
    found = result.metrics
    assert found["eval/top1"] == found["eval/one/top1"]
    for name, path in sets.items():
        alone = small_recipe(
            f"alone-{name}", digits, tmp_path, data={"eval": path},
            init_from=f"{tmp_path}/runs/several", evaluate={"batch_size": 50},
        )  # fmt: skip
        assert evaluate(alone) == 0
        run = runs_of(alone)[0]
        assert run.info.run_name.startswith(alone.name)
        assert run.data.metrics["eval/top1"] == pytest.approx(found[f"eval/{name}/averaged_top1"])
    assert found["eval/one/averaged_top1"] != found["eval/other/averaged_top1"]
