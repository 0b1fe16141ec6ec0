"""What gets into the image by `cluster/Dockerfile`, and to all nodes by `--working-dir .`."""

import hashlib
import re
import shutil
import subprocess
import tarfile
import zipfile

import pytest
from ray._private.runtime_env.packaging import create_package
from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

from tests.cluster.test_manifests import CLUSTER, ROOT


@pytest.mark.parametrize("given", ["right", "wrong", "none"])
def test_the_efa_installer_runs_only_when_its_checksum_is_the_one_given(given, tmp_path):
    folder, tools = tmp_path / "efa", tmp_path / "tools"
    script = tmp_path / "aws-efa-installer" / "efa_installer.sh"
    for place in (folder, tools, script.parent):
        place.mkdir()
    script.write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/installed\n')
    script.chmod(0o755)
    archive = tmp_path / "served.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(script.parent, "aws-efa-installer")
    served = f"cp {archive} aws-efa-installer-1.51.0.tar.gz"
    for name, line in {"curl": served, "apt-get": "true", "ldconfig": "true"}.items():
        (tools / name).write_text(f"#!/bin/bash\n{line}\n")
        (tools / name).chmod(0o755)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    sums = {"right": digest, "wrong": digest[::-1], "none": ""}
    # As the builder gives it to the shell.
    dockerfile = (CLUSTER / "Dockerfile").read_text()
    (step,) = re.findall(r"^RUN (if \[ -n \"\$EFA_VERSION.*?)\n\n", dockerfile, re.M | re.DOTALL)
    step = (
        step.replace("\\\n", "")
        .replace("/tmp/efa", str(folder))
        .replace("/var/lib/apt/lists/*", "")
    )
    done = subprocess.run(
        ["sh", "-c", step], cwd=folder, capture_output=True, text=True,
        env={
            "PATH": f"{tools}:/usr/bin:/bin", "EFA_SHA256": sums[given], "EFA_VERSION": "1.51.0",
        },
    )  # fmt: skip
    assert (done.returncode == 0) is (given == "right"), done.stderr
    assert (tmp_path / "installed").exists() is (given == "right")
    assert ("give EFA_SHA256" in done.stderr) is (given == "none")


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

    given = {"working_dir": str(folder)}
    upload_working_dir_if_needed(given, include_gitignore=True, upload_fn=upload)
    sent = {name for name in zipfile.ZipFile(package).namelist() if not name.endswith("/")}
    assert sent == {*GOES, ".gitignore", ".rayignore"}
