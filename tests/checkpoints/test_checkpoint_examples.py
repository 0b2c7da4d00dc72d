"""The examples of restoring, rolling back and adopting do what they say."""

import importlib.util
import pathlib

import jax
import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def standard_promotion():
    """Examples are what users write, without strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_restore_healthy_passes_over_what_is_ill(tmp_path, capsys):
    restored = load("restore_healthy").main(tmp_path / "run")
    assert restored.step == 40 == int(restored.state["step"])
    said = capsys.readouterr().out
    assert "80: 'suspect'" in said and "note: step 60 was passed over: RUN/60" in said
    assert "as it was saved in steps [1, 20, 40, 80]" in said


def test_rollback_and_skip_leaves_the_broken_data_out(tmp_path):
    losses, keeper = load("rollback_and_skip").main(tmp_path / "run")
    assert len(losses) == 120 and max(losses[60:]) < 2 * losses[60]
    (record,) = keeper.rollbacks()
    assert record["target"] == 60
    first, last = record["extra"]["skip"]
    assert first <= 70 and last >= 74


@pytest.mark.slow
def test_adopt_in_old_run_changes_no_bit(tmp_path, capsys):
    assert load("adopt_in_old_run").main(tmp_path)
    said = capsys.readouterr().out
    assert "started fresh: opt_state/" in said and "moved: opt_state/0/" in said
    assert "plain Orbax reads the new run: True" in said
