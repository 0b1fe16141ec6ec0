"""Trials that have diverged, beside the sweep: started again, it does not try them once more."""

from __future__ import annotations

import hashlib
import json
import threading
from typing import Final

from vit_ray.config import Recipe
from vit_ray.config.resume_compatibility import is_trained
from vit_ray.storage import Location

_FILE: Final = "diverged.json"


class DivergedTrials:
    """Reasons by recipe; for several threads of the one driver that holds the sweep's lock."""

    def __init__(self, folder: Location) -> None:
        self._file = folder.child(_FILE)
        self._lock = threading.Lock()

    def reason(self, recipe: Recipe) -> str:
        """Why a trial of exactly this recipe has diverged; empty if it has not."""
        with self._lock:
            return self._read().get(trial_key(recipe), "")

    def note(self, recipe: Recipe, reason: str) -> None:
        """Keep the reason."""
        with self._lock:
            content = {**self._read(), trial_key(recipe): reason}
            self._file.write(json.dumps(content, indent=1).encode())

    def _read(self) -> dict[str, str]:
        return dict(json.loads(self._file.read())) if self._file.exists() else {}


def trial_key(recipe: Recipe) -> str:
    """Of exactly this recipe: its name, and a digest of all that decides what it results in."""
    flat = {key: value for key, value in recipe.flat().items() if is_trained(key)}
    digest = hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()[:16]
    return f"{recipe.name} {digest}"
