"""Models that nobody here wrote, probed in their own train steps as they stand.

    git clone --depth 1 https://github.com/google-deepmind/nanodo THERE/nanodo
    git clone --depth 1 https://github.com/google/flax THERE/flax
    git clone --depth 1 https://github.com/AI-Hypercomputer/maxtext THERE/maxtext
    pip install pydantic omegaconf   # for MaxText
    STABIL_CHECKOUTS=THERE python -m pytest -m slow tests/probes/test_external.py

Packages that their files import and that are not installed (data pipelines, loggers)
are replaced by empty stand-ins: the model and the train step are theirs, untouched.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import pathlib
import re
import sys
import types
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from stabil.probes import collect, probe

pytestmark = pytest.mark.slow

STAND_INS = ("absl", "aqt", "clu", "drjax", "grain", "huggingface_hub", "jaxtyping")
STAND_INS += ("jinja2", "ml_collections", "pathwaysutils", "qwix", "sentencepiece")
STAND_INS += ("tensorflow", "tensorflow_datasets", "tensorflow_text", "tokamax")
# What a small decoder of MaxText does not use, and what a newer Python would need.
MAXTEXT = re.compile(
    r"maxtext\.(kernels\.mhc|checkpoint_conversion|common\.checkpointing|multimodal"
    r"|models\.(?!models$|llama2$|simple_layer$))"
)


class AnyClass(type):
    """The type of classes that have whatever is asked of them."""

    def __getitem__(cls, key):
        return cls

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)


class Empty(types.ModuleType):
    """A module that has whatever is asked of it."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = AnyClass(name, (), {}) if name[0].isupper() else Empty(name)
        setattr(self, name, value)
        return value

    def __call__(self, *args, **kwargs):
        return mock.MagicMock()


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives an empty module for some names."""

    def __init__(self, stands_in):
        self.stands_in = stands_in

    def find_spec(self, name, path=None, target=None):
        if self.stands_in(name):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = Empty(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


@pytest.fixture
def checkout(monkeypatch, standard_promotion):
    """Imports modules from a folder of a checkout; forgets them afterwards."""
    root = os.environ.get("STABIL_CHECKOUTS")
    if root is None:
        pytest.skip("needs STABIL_CHECKOUTS: see the docstring of this file")
    before = set(sys.modules)
    absent = StandIns(lambda name: name.split(".")[0] in STAND_INS)
    unused = StandIns(lambda name: MAXTEXT.match(name))
    sys.meta_path[:] = [unused, *sys.meta_path, absent]

    def load(folder, *names):
        at = pathlib.Path(root) / folder
        if not at.is_dir():
            pytest.skip(f"needs {at}: see the docstring of this file")
        monkeypatch.syspath_prepend(str(at))
        return [importlib.import_module(name) for name in names]

    yield load
    sys.meta_path.remove(absent)
    sys.meta_path.remove(unused)
    for name in set(sys.modules) - before:
        if not name.startswith(("jax", "flax", "optax", "stabil", "numpy")):
            del sys.modules[name]


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


def check(readings, count, idle=()):
    """Every row was measured, forward and backward; returns the forward names.

    Those that are `idle` have no gradient.
    """
    forward = [n for n in readings.names if "@grad" not in n]
    backward = [n.replace("@grad", "") for n in readings.names if "@grad" in n]
    print(f"\n{len(forward)} forward and {len(backward)} backward rows:", *forward)
    assert np.isfinite(readings.values).all()
    assert (readings["nan_count"] == 0).all() and (readings["absmax"] > 0).all()
    assert len(forward) == count
    assert set(forward) - set(backward) <= set(idle)
    return set(forward)


class Applied:
    """Stands for a Linen model in a step that calls `apply`."""

    def __init__(self, model, **options):
        self.probed = probe(model, backward=True, **{"where": "**", **options})

    def apply(self, *args, **kwargs):
        return self.probed.apply(*args, **kwargs)[0]  # read by the collect around


@pytest.mark.parametrize("remat", [False, True])
def test_nanodo(checkout, remat):
    train, model, loss, data = checkout(
        "nanodo", "nanodo.train", "nanodo.model", "nanodo.loss", "nanodo.data"
    )
    config = model.DoConfig(D=16, H=2, L=12, N=3, V=31, F=32, remat=remat)
    module = model.TransformerDo(config)
    tokens = jax.random.randint(jax.random.key(1), (4, 12), 1, 31)
    variables = jax.jit(module.init)(jax.random.key(0), tokens)
    tx = optax.MultiSteps(optax.adamw(1e-3), 1)
    c = mock.MagicMock(get=lambda name, default=None: default)

    def step(apply, tokens, params):
        state = TrainState.create(apply_fn=apply, params=params, tx=tx)
        state, metrics = train._train_step(state, tokens, c)
        return state.params, metrics

    params = variables["params"]
    with mock.patch.object(train.metrics_lib, "get_metrics", lambda *a: a[2]):
        want = jax.jit(lambda p: step(module.apply, tokens, p))(params)
        run = collect(lambda p: step(Applied(module).apply, tokens, p), backward=True)
        got, readings = jax.jit(run)(params)
    assert_same(got, want)
    forward = check(readings, 38)
    per = ("LayerNorm_0", "LayerNorm_1", "CausalAttn_0", "CausalAttn_0/query", "Mlp_0")
    assert {f"blocks_{i}/{name}" for i in range(3) for name in per} <= forward
    assert {"embed", "pos_embed", "blocks_2", "out_ln", "embed.attend"} <= forward


def test_lm1b(checkout):
    train, models = checkout("flax/examples/lm1b", "train", "models")
    config = models.TransformerConfig(
        vocab_size=31,
        output_vocab_size=31,
        emb_dim=16,
        num_heads=2,
        num_layers=2,
        qkv_dim=16,
        mlp_dim=32,
        max_len=12,
    )
    module = models.TransformerLM(config)
    tokens = jax.random.randint(jax.random.key(1), (4, 12), 1, 31)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(2)}
    params = jax.jit(module.init)(keys, tokens)["params"]

    def step(params):
        state = TrainState.create(
            apply_fn=module.apply, params=params, tx=optax.adamw(1e-3)
        )
        rng = jax.random.key(3)
        state, metrics = train.train_step(
            state, {"inputs": tokens}, config, lambda step: 1e-3, 0.1, rng
        )
        return state.params, metrics

    want = jax.jit(step)(params)
    # Their step makes the model itself, under this name.
    plain = models.TransformerLM
    with mock.patch.object(models, "TransformerLM", lambda c: Applied(plain(c))):
        got, readings = jax.jit(collect(step, backward=True))(params)
    assert_same(got, want)
    forward = check(readings, 35)
    block = "decoder/encoderdecoderblock_1"
    per = ("LayerNorm_0", "MultiHeadDotProductAttention_0/query", "MlpBlock_0/Dense_1")
    assert {block, *(f"{block}/{name}" for name in per)} <= forward


def test_gemma(checkout):
    train, transformer, configs = checkout(
        "flax/examples/gemma", "train", "transformer", "transformer_cfg"
    )
    config = configs.TransformerConfig(
        num_layers=2,
        num_embed=31,
        embed_dim=16,
        hidden_dim=32,
        num_heads=2,
        head_dim=8,
        num_kv_heads=1,
        final_logit_softcap=30.0,
        attention_types=[configs.AttentionType.GLOBAL] * 2,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        dropout_rate=0.1,
    )
    tokens = jax.random.randint(jax.random.key(1), (4, 12), 1, 31)
    batch = {"inputs": tokens, "targets": tokens}
    batch["inputs_position"] = jnp.broadcast_to(jnp.arange(12), (4, 12))
    cls, plain = transformer.Transformer, transformer.Transformer.__call__

    def told(model, *args, **kwargs):
        # For this call alone the class is theirs again.
        with mock.patch.object(cls, "__call__", plain):
            return probe(model, where="**", backward=True)(*args, **kwargs)[0]

    def run(wrap, call):
        def step(model, optimizer, rngs):
            train.nnx_train_step(model, optimizer, rngs, batch, mock.Mock())

        @nnx.jit
        def whole():
            model = cls(config, rngs=nnx.Rngs(params=0))
            optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
            rngs = nnx.Rngs(dropout=3)
            out = wrap(step)(model, optimizer, rngs)
            return nnx.state((model, optimizer, rngs)), out

        with mock.patch.object(cls, "__call__", call):
            return whole()

    want, _ = run(lambda step: step, plain)
    got, (_, readings) = run(lambda step: collect(step, backward=True), told)
    assert_same(got, want)
    forward = check(readings, 36)
    per = ("attn/q_einsum", "attn", "mlp/down_proj", "mlp", "post_ffw_norm")
    assert {f"layers/{i}/{name}" for i in range(2) for name in per} <= forward


SMALL = {
    "base_num_decoder_layers": 3,
    "base_emb_dim": 32,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "base_mlp_dim": 64,
    "vocab_size": 61,
    "max_target_length": 16,
    "per_device_batch_size": 1,
    "scan_layers": "true",
    "remat_policy": "full",
    "attention": "dot_product",
    "decoder_block": "llama2",
    "dtype": "float32",
    "enable_checkpointing": "false",
    "enable_dropout": "false",
    "dataset_type": "synthetic",
    "skip_jax_distributed_system": "true",
    "log_config": "false",
    "run_name": "probed",
}


MAXTEXT_PARTS = ("self_attention/query", "self_attention/attention_op", "mlp/wo", "mlp")


def assert_close(got, want):
    """Their rotary embedding is compiled differently when its output is read."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.fixture
def maxtext(checkout, tmp_path, monkeypatch):
    """A small configuration, a mesh of one device, a batch, and their modules."""
    for needed in ("pydantic", "omegaconf"):
        pytest.importorskip(needed)
    monkeypatch.setenv("DECOUPLE_GCLOUD", "TRUE")
    configs, models, train = checkout(
        "maxtext/src",
        "maxtext.configs.pyconfig",
        "maxtext.models.models",
        "maxtext.trainers.pre_train.train",
    )

    def make(nnx):
        options = {n: str(nnx).lower() for n in ("enable_nnx", "pure_nnx")}
        options |= SMALL | {"base_output_directory": tmp_path}
        base = pathlib.Path(configs.__file__).parent / "base.yml"
        return configs.initialize(
            ["", str(base), *(f"{k}={v}" for k, v in options.items())]
        )

    axes = make(True).mesh_axes
    one = np.array(jax.devices()[:1]).reshape((1,) * len(axes))
    tokens = jax.random.randint(jax.random.key(0), (8, 16), 1, 61)
    place, ones = jnp.arange(16)[None].repeat(8, 0), jnp.ones((8, 16), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    batch |= {f"{k}_position": place for k in ("inputs", "targets")}
    batch |= {f"{k}_segmentation": ones for k in ("inputs", "targets")}
    return make, jax.sharding.Mesh(one, axes), batch, models, train


@pytest.mark.filterwarnings("ignore")
def test_maxtext_linen(maxtext):
    make, mesh, batch, models, train = maxtext
    config = make(False)
    model = models.transformer_as_linen(config, mesh, quant=None, model_mode="train")

    def step(variables):
        def loss(variables):
            key = jax.random.key(5)
            return train.loss_fn(model, config, dict(batch), key, variables)

        (value, _), grads = jax.value_and_grad(loss, has_aux=True)(variables)
        return value, grads

    cls, plain = type(model), type(model).apply

    def told(model, *args, **kwargs):
        # For this call alone the class is theirs again.
        with mock.patch.object(cls, "apply", plain):
            return probe(model, where="**", backward=True).apply(*args, **kwargs)[0]

    with mesh, nn.partitioning.axis_rules(config.logical_axis_rules):
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        seen = [batch[f"inputs{n}"] for n in ("", "_position", "_segmentation")]
        start = functools.partial(model.init, keys, *seen)
        variables = jax.jit(functools.partial(start, enable_dropout=False))()
        want = jax.jit(step)(variables)
        with mock.patch.object(cls, "apply", told):
            got, readings = jax.jit(collect(step, backward=True))(variables)
    assert_close(got, want)
    # The layers are NNX modules in a Linen shell.
    forward = check(readings, 60, idle=["decoder:1"])
    assert {
        f"decoder/layers/{n}[{i}]" for i in range(3) for n in MAXTEXT_PARTS
    } <= forward
    assert {f"decoder/layers[{i}]" for i in range(3)} <= forward
    assert {"token_embedder", "decoder/decoder_norm", "decoder/logits_dense"} <= forward


@pytest.mark.filterwarnings("ignore")
def test_maxtext_nnx(maxtext):
    make, mesh, batch, models, train = maxtext
    config = make(True)
    cls, plain = models.Transformer, models.Transformer.__call__

    def told(model, *args, **kwargs):
        with mock.patch.object(cls, "__call__", plain):
            return probe(model, where="**", backward=True)(*args, **kwargs)[0]

    def step(model):
        def loss(model):
            return train.loss_fn(model, config, dict(batch), None, None)[0]

        return nnx.value_and_grad(loss)(model)

    with mesh, nn.partitioning.axis_rules(config.logical_axis_rules):
        model = nnx.jit(
            lambda: cls(config, mesh, quant=None, rngs=nnx.Rngs(params=0, dropout=1))
        )()
        want = nnx.jit(lambda m: step(m))(model)
        with mock.patch.object(cls, "__call__", told):
            got, readings = nnx.jit(lambda m: collect(step, backward=True)(m))(model)
    assert_close(got, want)
    forward = check(readings, 59, idle=["decoder:1"])
    assert {
        f"decoder/layers/{n}[{i}]" for i in range(3) for n in MAXTEXT_PARTS
    } <= forward
