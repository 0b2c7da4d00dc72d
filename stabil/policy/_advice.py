"""What to change in the model or the data when interventions no longer help."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

_BY_WORD = (
    (
        ("attn", "attention", "query", "key", "qk", "softmax"),
        "normalise queries and keys (QK-norm): attention logits that grow without "
        "bound are the commonest structural cause",
    ),
    (
        ("embed", "wte", "wpe", "token"),
        "scale the embedding's output or shrink its gradient, and leave it out of "
        "weight decay",
    ),
    (
        ("logits", "head", "unembed", "lm_head", "output"),
        "add a z-loss to the output logits",
    ),
    (
        ("norm", "ln_", "layernorm"),
        "look at the norm's epsilon and at its input: a vanishing variance divides by "
        "almost nothing",
    ),
)
_BY_CAUSE = (
    (
        ("nonfinite_activation", "norm_overflow", "activation_limit", "dtype_range"),
        "compute the named layer in float32, or bound its logits",
    ),
    (
        ("update_spike", "moment_spike", "gradient_spike"),
        "lower b2 to 0.95 and lengthen the learning-rate warm-up",
    ),
    (
        ("replica_disagreement",),
        "test the hardware: replicas that should agree do not",
    ),
    (
        ("parameter_leap",),
        "test the memory of the machine: parameters changed as no update changes them",
    ),
    (
        ("nonfinite_loss", "loss_spike", "empty_batch"),
        "read the named batches: look for empty, masked, repeated or corrupt records",
    ),
)


def advise(relapses: Iterable[dict[str, Any]], group: str = "") -> tuple[str, ...]:
    """Advice fit for the causes, layers and batches of relapses, most specific first.

    Args:
      relapses: records with `causes` (names), `first` (a signal or None) and, where it
        is known, `batch`.
      group: the part of the model that they were in, to be named.

    Returns:
      Sentences without a full stop; never empty.

    Examples:
      >>> for line in advise([{"causes": ["loss_spike"], "first": "loss"}]):
      ...     print(line)
      read the named batches: look for empty, masked, repeated or corrupt records
      resume from an older step with a lower learning rate
    """
    relapses = list(relapses)
    layers = " ".join([group, *(str(r.get("first") or "") for r in relapses)]).lower()
    causes = {c for r in relapses for c in r.get("causes", ())}
    found = [text for words, text in _BY_WORD if any(w in layers for w in words)]
    found += [text for names, text in _BY_CAUSE if causes & set(names)]
    if group:
        found = [f"in {group}: {text}" for text in found]
    times = collections.Counter(str(r["batch"]) for r in relapses if r.get("batch"))
    batches = [
        f"leave batch {batch} out for good: it was at fault {n} times"
        for batch, n in times.items()
        if n > 1
    ]
    return (*batches, *found, "resume from an older step with a lower learning rate")
