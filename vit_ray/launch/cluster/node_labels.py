"""Ray's labels of nodes, and which nodes a selector means."""

from __future__ import annotations

from collections.abc import Mapping


def has_labels(labels: Mapping[str, str], selector: Mapping[str, str] | None) -> bool:
    """Whether a node with these labels is one that the selector means; None means any."""
    for key, wanted in (selector or {}).items():
        word = wanted.removeprefix("!")
        values = word[3:-1].replace(" ", "").split(",") if word.startswith("in(") else [word]
        if (labels.get(key) in values) == wanted.startswith("!"):
            return False
    return True
