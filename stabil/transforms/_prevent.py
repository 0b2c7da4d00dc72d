"""What to check before training starts: conditions on the initial parameters."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from stabil.transforms import _check, _leafwise
from stabil.vocabulary import Severity

EMBEDDING = re.compile(r"embed|wte", re.I)
# A table of positions is added to the tokens' embedding and is not the shortcut.
NOT_TOKENS = re.compile(r"pos|wpe|norm|unembed|head|bias", re.I)
NORM = re.compile(r"norm|(^|[/_])ln([/_]|\d|$)", re.I)
MLP = re.compile(r"(^|.*[/_])(mlp|ffn|feed_?forward|ff)[^/]*", re.I)
UP = re.compile(r"(^|[/_])(up|gate|fc1|c_fc|wi|w1|w_in|dense_0|linear1)", re.I)
DOWN = re.compile(r"(^|[/_])(down|fc2|c_proj|wo|w2|w_out|dense_1|linear2)", re.I)
ATTENTION = re.compile(r"(^|.*[/_])([^/]*attn|[^/]*attention|mha)[^/]*", re.I)
OUTPUT = re.compile(r"(^|[/_])(out|o|o_proj|out_proj|c_proj|wo|w_o)([/_]|$)", re.I)
QUERY = re.compile(r"(^|[/_])(q|query|q_proj|wq|w_q|to_q)([/_]|$)", re.I)
KEY = re.compile(r"(^|[/_])(k|key|k_proj|wk|w_k|to_k)([/_]|$)", re.I)

# Below this standard deviation of the embedding output training is at risk.
EMBEDDING_STD = 0.1
# Gains of a sub-layer that are not small. Initialisations in common use give 0.5 to 4.5
# and 0.2 to 2 beside an embedding of unit scale; Megatron's at width 256 and 4 layers
# gives 32 and 11 beside its own embedding, which the paper saw spiking.
FFN_GAIN, ATTENTION_GAIN = 10.0, 5.0
# Standard deviation of attention logits at the start; the largest of many is several
# times that, and runs were damaged from 1000 on.
LOGIT_STD = 20.0


class Finding(NamedTuple):
    """One condition on the parameters that does not hold; plain Python values.

    Attributes:
      path: slash path of the parameter or module.
      rule: name of the condition.
      value: what was measured; the unit stands in `advice`.
      limit: what the value should stay below (above, for `embedding_std`).
      severity: `WARN`, or `WATCH` for what only a long run will show.
      advice: one sentence: what the value is, and what to change.
    """

    path: str
    rule: str
    value: float
    limit: float
    severity: Severity
    advice: str


def check_parameters(
    params: Any, *, embedding_scale: float | None = 1.0, expect_qk_norm: bool = True
) -> tuple[Finding, ...]:
    """Conditions of *Spike No More* on a parameter tree, and advice on QK-norm.

    Rules, with `d` the width and `sigma` the standard deviation of a matrix:
    `embedding_std`: the embedding output (table times `embedding_scale`, or 1 when a
    norm follows) should have a standard deviation near 1, at least 0.1;
    `ffn_gain`: `sigma_1 sigma_2 (sqrt(d) + sqrt(d_ff))^2 / sigma_x` should be small, at
    most 10; `attention_gain`: `2 sqrt(d) sigma_O / sigma_x` likewise, at most 5;
    `qk_norm`: attention without a norm on queries and keys, with the standard deviation
    `d sigma_Q sigma_K` that its logits have for inputs of unit variance.
    `sigma_x` is the standard deviation of the embedding output.

    Reads the parameters on the host; run it once, on initial parameters. Modules are
    found by the usual names (`embed`, `mlp`, `up`, `down`, `attention`, `query`, ...):
    what is named otherwise is not judged. Stacked layers are taken together.

    Args:
      params: parameter tree; arrays of any floating dtype.
      embedding_scale: what the model multiplies the embedding by (`sqrt(d)` in *Scaled
        Embed*); None when a LayerNorm without parameters follows it.
      expect_qk_norm: whether to report attention without QK-norm.

    Returns:
      Findings, the most severe first; empty when every condition holds or nothing was
      recognised.

    Raises:
      ValueError: `embedding_scale` is not positive.

    Examples:
      >>> import numpy as np
      >>> table = np.random.default_rng(0).normal(size=(100, 64)) * 0.02
      >>> found = check_parameters({"embed": {"embedding": table}})
      >>> [(f.path, f.rule, round(f.value, 2)) for f in found]
      [('embed/embedding', 'embedding_std', 0.02)]

    Source: Takase et al., Spike No More, arXiv:2312.16903, sections 3 and 4; the gain
    of attention without its factor C_attn, which parameters do not show; limits ours.
    QK-norm: Dehghani et al., arXiv:2302.05442; Wortsman et al., arXiv:2309.14322.
    """
    if embedding_scale is not None:
        _check.positive("check_parameters", embedding_scale=embedding_scale)
    leaves = _leafwise.by_path(params)
    matrices = {
        path: np.asarray(x, np.float32)
        for path, x in leaves.items()
        if x.ndim >= 2 and x.size and not jnp.iscomplexobj(x)
    }
    tables = [p for p in matrices if EMBEDDING.search(p) and not NOT_TOKENS.search(p)]
    normed = embedding_scale is None or any(
        EMBEDDING.search(p) and NORM.search(p) for p in leaves
    )
    stds = {p: 1.0 if normed else _std(matrices[p]) * embedding_scale for p in tables}
    findings = [_thin_shortcut(p, std) for p, std in stds.items()]
    sigma_x = min(stds.values(), default=1.0)
    for path, members in _modules(matrices, MLP).items():
        findings.append(_ffn(path, members, sigma_x))
    for path, members in _modules(matrices, ATTENTION).items():
        findings.append(_attention(path, members, sigma_x))
        if expect_qk_norm and not any(
            p.startswith(path) and NORM.search(p[len(path) :]) for p in leaves
        ):
            findings.append(_qk_norm(path, members))
    found = [f for f in findings if f is not None]
    return tuple(sorted(found, key=lambda f: -f.severity))


def _std(x: np.ndarray) -> float:
    return float(np.std(x, dtype=np.float64))


def _modules(matrices: dict, name: re.Pattern) -> dict[str, dict[str, np.ndarray]]:
    """Matrices by the path of the module that `name` matches, under their own rest."""
    out: dict[str, dict[str, np.ndarray]] = {}
    for path, x in matrices.items():
        match = name.match(path)
        if match and len(match[0]) < len(path):
            out.setdefault(match[0], {})[path[len(match[0]) :]] = x
    return out


def _first(members: dict[str, np.ndarray], name: re.Pattern) -> np.ndarray | None:
    return next((x for rest, x in members.items() if name.search(rest)), None)


def _thin_shortcut(path: str, std: float) -> Finding | None:
    if std >= EMBEDDING_STD:
        return None
    return Finding(
        path,
        "embedding_std",
        std,
        EMBEDDING_STD,
        Severity.WARN,
        f"the embedding output has a standard deviation of {std:.3g}, too small beside "
        "the sub-layers: multiply it by sqrt(d), or put a LayerNorm after it",
    )


def _ffn(path: str, members: dict[str, np.ndarray], sigma_x: float) -> Finding | None:
    up, down = _first(members, UP), _first(members, DOWN)
    if up is None or down is None:
        return None
    width, hidden = up.shape[-2:]
    gain = _std(up) * _std(down) * (math.sqrt(width) + math.sqrt(hidden)) ** 2
    return _gain(path, "ffn_gain", gain / max(sigma_x, 1e-30), FFN_GAIN)


def _attention(
    path: str, members: dict[str, np.ndarray], sigma_x: float
) -> Finding | None:
    out = _first(members, OUTPUT)
    if out is None:
        return None
    gain = 2 * math.sqrt(out.shape[-1]) * _std(out)
    value = gain / max(sigma_x, 1e-30)
    return _gain(path, "attention_gain", value, ATTENTION_GAIN)


def _gain(path: str, rule: str, value: float, limit: float) -> Finding | None:
    if value <= limit:
        return None
    return Finding(
        path,
        rule,
        value,
        limit,
        Severity.WARN,
        f"the sub-layer adds {value:.3g} times the shortcut's gradient: scale the "
        "embedding up, or initialise its last matrix sqrt(1 / (2 layers)) smaller",
    )


def _qk_norm(path: str, members: dict[str, np.ndarray]) -> Finding | None:
    query, key = _first(members, QUERY), _first(members, KEY)
    if query is None or key is None:
        return None
    width = query.shape[-2] if query.ndim == 2 else query.shape[-3]
    value = width * _std(query) * _std(key)
    return Finding(
        path,
        "qk_norm",
        value,
        LOGIT_STD,
        Severity.WARN if value > LOGIT_STD else Severity.WATCH,
        f"attention logits begin with a standard deviation of {value:.3g} and nothing "
        "bounds them: normalise queries and keys, or watch their largest value",
    )
