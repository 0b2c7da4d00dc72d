"""Parts of a model have events, budgets and relapses of their own."""

import json
import re

import pytest

from stabil.policy import BLOCK, Groups, Ladder, Observation, Rung, advise, careful

GROUPS = {"embeddings": ("*embed*", "*wte*"), "experts": "*expert_*"}
EMBED = dict(severity=BLOCK, causes=("nonfinite_gradient",), first="grads/wte/kernel")
EXPERT = EMBED | dict(first="activations/block_1/Expert_3/mlp")
OTHER = EMBED | dict(first="grads/head")
ROLL_BACK = (Rung("rollback", blocked_steps=3, budget=1),)


def acts(ladder, observations, *kinds):
    kinds = kinds or ("rollback", "stop", "reset")
    return [a for o in observations for a in ladder.decide(o) if a.kind in kinds]


def ready(ladder, step=0):
    ladder.decide(Observation(step, loss=2.0))
    return ladder


def test_the_first_pattern_that_matches_takes_the_signal():
    groups = Groups(GROUPS)
    names = ("params/Embed_0/embedding", "grads/expert_3/wte", "loss", None)
    assert [groups.named(n) for n in names] == ["embeddings", "embeddings", "", ""]
    assert groups.of(Observation(1, first="loss", also=("grads/expert_1/w",))) == (
        "experts"
    )
    assert groups.of(Observation(1, **OTHER, damaged="params/wte")) == "embeddings"


def test_each_group_has_its_own_streak_and_its_own_budget():
    ladder = ready(Ladder(ROLL_BACK, groups=GROUPS))
    # Alternating faults are two streaks of three, not one of five.
    stream = [Observation(1 + i, **(EMBED, EXPERT)[i % 2]) for i in range(6)]
    first, second = acts(ladder, stream)
    assert first.numbers["group"] == "embeddings"
    assert second.numbers["group"] == "experts"
    assert (first.kind, second.kind) == ("rollback", "rollback")


def test_a_group_that_spent_its_budget_leaves_the_others_theirs():
    ladder = ready(Ladder(ROLL_BACK, groups=GROUPS))

    def burst(fault, at):
        ready(ladder, at - 1)
        found = acts(ladder, [Observation(at + i, **fault) for i in range(3)])
        if found[-1].kind == "rollback":
            ladder.rolled_back(Observation(at + 2, **fault), at - 5, (at - 5, at))
        return found[-1].kind

    assert burst(EMBED, 100) == "rollback" and burst(EXPERT, 300) == "rollback"
    assert burst(OTHER, 400) == "rollback" and burst(EMBED, 600) == "stop"


def test_a_relapse_in_a_group_ends_in_advice_that_names_it():
    ladder = Ladder((ROLL_BACK[0]._replace(budget=9),), groups=GROUPS, max_relapses=1)
    for n in range(2):
        ready(ladder, 99)
        stream = [Observation(100 + i, data_index=n, **EMBED) for i in range(3)]
        action = acts(ladder, stream)[-1]
        if action.kind == "rollback":
            ladder.rolled_back(stream[-1], 90, (90, 102))
    assert action.kind == "stop"
    assert action.reason == (
        "1 rollbacks near step 100 did not help: 3 blocked steps in a row in embeddings"
    )
    assert action.numbers["advice"][0].startswith(
        "in embeddings: scale the embedding's output"
    )


def test_a_high_loss_belongs_to_the_group_with_the_open_event(rng):
    ladder = Ladder(groups=GROUPS)
    noise = rng.normal(0, 0.02, 100)
    stream = [Observation(i, loss=2.0 + noise[i]) for i in range(100)]
    stream.append(Observation(100, 2, ("gradient_spike",), "grads/wte", loss=2.3))
    stream += [Observation(101 + i, loss=2.3) for i in range(20)]
    (action,) = acts(ladder, stream)
    assert (action.kind, action.numbers["group"]) == ("reset", "embeddings")


def test_a_high_loss_counts_on_while_warnings_name_now_this_now_that(rng):
    """The loss is one for all: no group's share of it may hide how long it lasts."""
    ladder = Ladder(groups=GROUPS)
    noise = rng.normal(0, 0.02, 100)
    stream = [Observation(i, loss=2.0 + noise[i]) for i in range(100)]
    for i in range(6):
        first = ("grads/wte", None, "loss", "grads/expert_1/w")[i % 4]
        seen = Observation(100 + i, loss=9.0)
        if first:
            seen = seen._replace(severity=2, causes=("loss_spike",), first=first)
        stream.append(seen)
    actions = [(o.step, a) for o in stream for a in ladder.decide(o)]
    assert [s for s, a in actions if a.kind == "rollback"][:1] == [104]


def test_groups_survive_json_and_others_are_left_out():
    first = ready(Ladder(ROLL_BACK, groups=GROUPS))
    acts(first, [Observation(1 + i, **EMBED) for i in range(3)])
    state = json.loads(json.dumps(first.get_state()))
    same, bare = Ladder(ROLL_BACK, groups=GROUPS), Ladder(ROLL_BACK)
    same.set_state(state)
    bare.set_state(state)
    stream = [Observation(4 + i, **EMBED) for i in range(30)]
    assert [a.kind for a in acts(ready(same, 3), stream)][:1] == ["stop"]
    assert [a.kind for a in acts(ready(bare, 3), stream)][:1] == ["rollback"]


def test_a_batch_at_fault_again_is_told_and_makes_a_relapse():
    ladder = ready(Ladder(max_relapses=1))
    bad = dict(severity=1, causes=("loss_spike",), first="loss")
    lines = acts(ladder, [Observation(7, batch_id="s3:12", **bad)], "log")
    assert [a.reason for a in lines] == ["a verdict above OK (loss_spike in loss)"]
    lines = acts(ladder, [Observation(9007, batch_id="s3:12", **bad)], "log")
    assert lines[1].reason == "batch s3:12 was at fault before, at step 7"
    assert lines[1].numbers == {"batch": "s3:12", "earlier_step": 7}
    # The same batch 5,000 steps later is the same place.
    for at in (10_000, 15_000):
        ready(ladder, at - 1)
        stream = [Observation(at + i, batch_id="x", **OTHER) for i in range(3)]
        action = acts(ladder, stream, "rollback", "stop")[-1]
        if action.kind == "rollback":
            ladder.rolled_back(stream[-1], at - 9, (1, 2))
    assert action.kind == "stop"
    assert action.numbers["advice"][0] == (
        "leave batch x out for good: it was at fault 2 times"
    )
    assert [e["batch"] for e in action.numbers["evidence"]] == ["x", "x"]


def test_the_memory_of_batches_is_bounded():
    ladder = Ladder()
    bad = dict(severity=1, causes=("loss_spike",))
    for i in range(3000):
        ladder.decide(Observation(i, data_index=i, **bad))
    assert len(ladder.get_state()["batches"]) == 1000


def test_advice_without_a_group_names_none():
    assert not advise([{"causes": [], "first": "wte"}])[0].startswith("in ")


def test_a_shadow_tells_what_it_would_have_done_and_changes_nothing():
    bold = Ladder((Rung("rollback", blocked_steps=1), Rung("cut", severity=3)))
    plain, watched = ready(Ladder()), ready(Ladder(shadow={"bold": bold}))
    stream = [Observation(1 + i, **OTHER) for i in range(3)]
    told = [watched.decide(o) for o in stream]
    own = [tuple(a for a in actions if "shadow" not in a.numbers) for actions in told]
    assert own == [plain.decide(o) for o in stream]
    assert watched.learning_rate_scale == bold.learning_rate_scale == 1.0
    (first, *_), _, _ = [[a for a in t if "shadow" in a.numbers] for t in told]
    assert (first.kind, first.report_only) == ("cut", True)
    assert first.reason == "bold: the verdict (nonfinite_gradient in grads/head)"
    watched.rolled_back(stream[-1], 0, (0, 3))
    assert json.loads(json.dumps(watched.get_state()))["shadow"]["bold"]["relapses"]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Ladder(shadow=[careful()]),
            "Ladder: needed shadow as names with a Ladder each, got [",
        ),
        (
            lambda: Ladder(groups=["*embed*"]),
            "Ladder: needed groups as a mapping, got ['*embed*']; write "
            'groups={"embeddings": ("*embed*", "*wte*")}',
        ),
        (
            lambda: Groups({"a": [3]}),
            "Ladder: needed a name and patterns of text for each group, got 'a': (3,); "
            'write groups={"embeddings": ("*embed*", "*wte*")}',
        ),
    ],
)
def test_errors_say_what_to_write(make, text):
    with pytest.raises(TypeError, match=f"^{re.escape(text)}"):
        make()
