"""What to change in the model or the data when interventions no longer help."""

from __future__ import annotations

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
        ("nonfinite_activation", "norm_overflow", "activation_limit"),
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
        ("nonfinite_loss", "loss_spike", "empty_batch"),
        "read the named batches: look for empty, masked, repeated or corrupt records",
    ),
)


def advise(relapses: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    """Advice fit for the causes and layers of the relapses, most specific first.

    Args:
      relapses: records with `causes` (names) and `first` (a signal or None).

    Returns:
      Sentences without a full stop; never empty.

    Examples:
      >>> for line in advise([{"causes": ["loss_spike"], "first": "loss"}]):
      ...     print(line)
      read the named batches: look for empty, masked, repeated or corrupt records
      resume from an older step with a lower learning rate
    """
    relapses = list(relapses)
    layers = " ".join(str(r.get("first") or "") for r in relapses).lower()
    causes = {c for r in relapses for c in r.get("causes", ())}
    found = [text for words, text in _BY_WORD if any(w in layers for w in words)]
    found += [text for names, text in _BY_CAUSE if causes & set(names)]
    return (*found, "resume from an older step with a lower learning rate")
