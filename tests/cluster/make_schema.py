"""Make the schema that the RayJob manifest is checked against, from KubeRay's own definition.

    git -C KUBERAY show v1.7.0:ray-operator/config/crd/bases/ray.io_rayjobs.yaml > rayjobs.yaml
    python tests/cluster/make_schema.py rayjobs.yaml

Takes the `openAPIV3Schema` of version v1, unchanged but for its form: JSON, compressed.
"""

import gzip
import json
import sys
from pathlib import Path

import yaml

SCHEMA = Path(__file__).with_name("rayjob_v1_kuberay_1.7.0.schema.json.gz")

if __name__ == "__main__":
    definition = yaml.safe_load(Path(sys.argv[1]).read_text())
    (version,) = [v for v in definition["spec"]["versions"] if v["name"] == "v1"]
    text = json.dumps(version["schema"]["openAPIV3Schema"], separators=(",", ":"), sort_keys=True)
    SCHEMA.write_bytes(gzip.compress(text.encode(), mtime=0))
