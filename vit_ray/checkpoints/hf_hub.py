"""Weights on the Hugging Face hub: `hf://google/vit-base-patch16-224`, timm's repositories too.

Files are kept in the hub's own cache (`HF_HOME`), which is also what is read without a network.
"""

from __future__ import annotations

from typing import Final

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from vit_ray.models.weights.files import FOLDER_CONFIG, FOLDER_INDEX, FOLDER_WEIGHTS
from vit_ray.models.weights.input_statistics import FOLDER_PREPROCESSOR

SCHEME: Final = "hf://"
# Nothing that could run code, and only the weights of the model itself.
_WANTED: Final = [
    FOLDER_CONFIG,
    FOLDER_PREPROCESSOR,
    FOLDER_WEIGHTS,
    FOLDER_INDEX,
    "model-*.safetensors",
]


def download(address: str) -> str:
    """The local folder of a repository's weights, from the cache where they are there.

    Args:
        address: `hf://OWNER/NAME`, or `hf://OWNER/NAME@REVISION`.

    Raises:
        ValueError: there is no such repository, or it cannot be reached and is not in the cache.
    """
    name, _, revision = address.removeprefix(SCHEME).strip("/").partition("@")
    try:
        return snapshot_download(name, revision=revision or None, allow_patterns=_WANTED)
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise ValueError(
            f"{address!r}: the Hugging Face hub shows no such repository or revision; "
            "check init_from, and set HF_TOKEN if it is private or gated"
        ) from None
    except HFValidationError as error:
        raise ValueError(
            f"{address!r}: expected hf://OWNER/NAME in init_from, such as "
            f"hf://google/vit-base-patch16-224 ({error})"
        ) from None
    except Exception as error:  # of an HTTP library that changes with the hub's versions
        raise ValueError(
            f"{address!r}: the Hugging Face hub cannot be reached, and the weights are "
            f"not in its cache {constants.HF_HUB_CACHE}. Run `hf download {name}` where there is a "
            f"network and copy the cache, or give a local folder ({type(error).__name__}: {error})"
        ) from error
