"""The command line of every job: how errors end."""

import sys
from pathlib import Path

import pytest

from vit_ray.commands.cli import run_job
from vit_ray.config import Recipe


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("depth=0 must be at least 1"), 2),
        (RuntimeError("a worker died"), 1),
        (OSError("s3://bucket cannot be reached"), 1),
    ],
)
def test_what_a_person_can_mend_is_told_in_one_line(
    error: Exception,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def job(recipe: Recipe) -> None:
        raise error

    (tmp_path / "recipe.yaml").write_text("name: run\n")
    monkeypatch.setattr(sys, "argv", ["job.py", str(tmp_path / "recipe.yaml")])
    monkeypatch.delenv("VIT_RAY_LOGS", raising=False)
    with pytest.raises(SystemExit) as ended:
        run_job("A job.", job)
    assert ended.value.code == code
    assert capsys.readouterr().err == f"error: {error}\n"
    monkeypatch.setenv("VIT_RAY_LOGS", "1")
    with pytest.raises(type(error), match=str(error)):
        run_job("A job.", job)
