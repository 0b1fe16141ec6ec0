"""What `ray job submit --working-dir .` sends to all nodes, by the functions that it calls."""

import shutil
import zipfile

from ray._private.runtime_env.packaging import create_package
from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

from tests.conftest import ROOT

STAYS = (
    ".env", ".env.production", "keys/id.pem", ".aws/credentials", "B_16.npz", "my/model.pt",
    "exported/model.safetensors", "runs/a/step-1/rank-0.safetensors", "mlflow.db",
    "mlruns/1/meta.yaml", ".git/config", ".venv/bin/python",
)  # fmt: skip
GOES = ("jobs/pretrain.py", "mine.yaml", "environment.py", "my/model.py")


def test_secrets_weights_and_results_are_left_behind(tmp_path):
    folder, package = tmp_path / "folder", tmp_path / "package.zip"
    for name in (*STAYS, *GOES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("content")
    for name in (".gitignore", ".rayignore"):
        shutil.copy(ROOT / name, folder)

    def upload(path: str, excludes: list[str], is_file: bool = False) -> None:
        create_package(path, package, include_gitignore=True, excludes=excludes)

    upload_working_dir_if_needed(
        {"working_dir": str(folder)}, include_gitignore=True, upload_fn=upload
    )
    sent = {name for name in zipfile.ZipFile(package).namelist() if not name.endswith("/")}
    assert sent == {*GOES, ".gitignore", ".rayignore"}
