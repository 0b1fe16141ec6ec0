"""Import this before anything that reads the environment: no setting of the machine or of its user
decides a test.
"""

import os
import re

_FOREIGN = re.compile(
    r"(AWS|MLFLOW|RAY|HF|HUGGINGFACE|XDG|LC)_.*|LANG|LANGUAGE|TMPDIR|TZ|VIT_RAY_(?!CI|HAS|LOGS|NET|SEQ).*|"
    r".*_proxy",
    re.IGNORECASE,
)

for name in list(os.environ):
    if _FOREIGN.fullmatch(name):
        del os.environ[name]
