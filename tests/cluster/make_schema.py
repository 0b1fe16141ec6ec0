"""Make the schemas of this folder from others' definitions, as SCHEMA_SOURCE.md names them.

    python tests/cluster/make_schema.py rayjobs.yaml workloads.yaml

Takes the `openAPIV3Schema` of one version, unchanged but for its form: JSON, compressed.
"""

import gzip
import json
import sys
from pathlib import Path

import yaml

FILES = {
    ("RayJob", "v1"): "rayjob_v1_kuberay_1.7.0.schema.json.gz",
    ("Workload", "v1beta2"): "workload_v1beta2_kueue_0.19.2.schema.json.gz",
}

if __name__ == "__main__":
    for path in sys.argv[1:]:
        definition = yaml.safe_load(Path(path).read_text())
        for version in definition["spec"]["versions"]:
            name = FILES.get((definition["spec"]["names"]["kind"], version["name"]))
            if name is not None:
                schema = version["schema"]["openAPIV3Schema"]
                text = json.dumps(schema, separators=(",", ":"), sort_keys=True)
                file = Path(__file__).with_name(name)
                file.write_bytes(gzip.compress(text.encode(), mtime=0))
