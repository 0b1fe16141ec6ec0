"""How far a run has come: the loop advances it, and a checkpoint holds it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Progress:
    """What one step after another changes of a run, apart from tensors."""

    step: int = 0
    """Steps completed."""
    best_eval_loss: float | None = None
    best_loss_key: str = "eval/loss"
    """Metric that `best_eval_loss` is of."""
    evals_without_best: int = 0
    num_evals: int = 0
    """Evaluations of which the best is chosen."""
    eval_step: int = -1
    """Step of the last evaluation; -1 before the first."""
    ended: str = ""
    """Why the run is over before its last step (early stopping); empty if it is not."""
    evaluation_due: bool = False
    """The last step is done, and the evaluation after it is not."""
    train_seconds: float = 0.0
    """Time spent training, all attempts together."""
    worker_seconds: float = 0.0
    """The same, of each worker, all workers together."""
    nonfinite_steps: int = 0
    """Refused steps in a row."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Last value of every metric."""

    @property
    def loss_key(self) -> str:
        """The validation loss that decides: on held-out images beside a test set, if there are any.

        And of the averaged weights, if there are any.
        """
        images = "dev" if "dev/loss" in self.metrics else "eval"
        averaged = f"{images}/averaged_loss"
        return averaged if averaged in self.metrics else f"{images}/loss"

    def is_over(self, total_steps: int) -> bool:
        """Whether nothing is left to do of a run of so many steps."""
        return bool(self.ended) or (self.step >= total_steps and not self.evaluation_due)
