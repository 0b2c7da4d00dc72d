"""Which of a log's names is the loss, which the gradient norm, which the step."""

from __future__ import annotations

import re
from collections.abc import Iterable

_STEP = (
    "step global_step trainer_global_step train_step steps iteration iter iterations "
    "num_updates update updates"
).split()
_LOSS = (
    "loss train_loss training_loss lm_loss train_lm_loss ce_loss train_ce_loss "
    "nll_loss train_nll_loss loss_train total_loss"
).split()
_NORM = (
    "grad_norm train_grad_norm grads_global_norm gradient_norm global_grad_norm "
    "grad_global_norm gnorm total_norm total_grad_norm optim_total_grad_norm norm"
).split()
_FOREIGN = {"eval", "val", "valid", "validation", "test", "dev", "min", "max"}


def normal(name: str) -> str:
    """A name in lower case with single underscores, without the run before ` - `.

    Examples:
      >>> normal("run 7 - train/Grad Norm")
      'train_grad_norm'
    """
    return re.sub(r"[^a-z0-9]+", "_", name.rpartition(" - ")[2].lower()).strip("_")


def choose(names: Iterable[str], role: str) -> str | None:
    """The name that most likely plays `role`: `step`, `loss` or `grad_norm`.

    Examples:
      >>> choose(["eval_loss", "epoch", "train/loss"], "loss")
      'train/loss'
      >>> choose(["_step", "loss"], "step"), choose(["loss"], "grad_norm")
      ('_step', None)
    """
    known = {"step": _STEP, "loss": _LOSS, "grad_norm": _NORM}[role]
    ending = {"step": "_step", "loss": "_loss", "grad_norm": "grad_norm"}[role]
    best, rank = None, len(known) + 1
    for name in names:
        word = normal(name)
        if _FOREIGN & set(word.split("_")):
            continue
        place = known.index(word) if word in known else len(known)
        if (place < len(known) or word.endswith(ending)) and place < rank:
            best, rank = name, place
    return best


def number(value: object) -> float | None:
    """A float from a number or its text, NaN and infinities included; None if empty.

    Raises:
      ValueError: the text is no number.
    """
    if value is None or value == "" or isinstance(value, bool):
        return None
    if isinstance(value, (int, float, str)):
        return float(value)
    return None
