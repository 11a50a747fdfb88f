from dataclasses import replace

import pytest

from sluice.common.settings import make
from sluice.dlrm import options
from tests.product import (
    BY_WAY,
    Config,
    ConfigError,
    Field,
    ModelConfig,
    OptimConfig,
    UsageError,
    tables_of,
)
from tests.raises import MISTAKES, raises


def said(*words: str):
    return options.parse(["--run-dir", "r", *words])


def test_options_that_are_not_given_have_their_defaults():
    assert make(Config, said("--data", "t"), version=3) == Config(data="t", version=3)


def test_every_option_arrives():
    words = (
        "--data t --epochs 3 --batch-size 64 --seed 5 --lr 0.1 --dense-lr 0.2 --dense-optimiser adam --width 32 "
        "--dense-layers 8,4 --over-layers 9 --sharding row --save-every 7 --log-every 2 "
        "--tuning fixed --knobs decode=2 --memory-limit 1GiB --reader arrow --table-decay 0.03 --dense-decay 0.1"
    )
    config = make(Config, said(*words.split()), version=0)
    optim = OptimConfig(
        lr=0.1, dense_lr=0.2, dense_optimiser="adam", table_decay=0.03, dense_decay=0.1
    )
    model = ModelConfig(width=32, dense_layers=(8, 4), over_layers=(9,))
    named = {"epochs": 3, "batch_size": 64, "seed": 5, "sharding": "row", "knobs": "decode=2"}
    named |= {"save_every": 7, "log_every": 2, "tuning": "fixed", "reader": "arrow"}
    assert config == replace(
        make(Config, said("--data", "t"), version=0),
        model=model,
        optim=optim,
        memory_limit=2**30,
        **named,
    )
    assert Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    "names", [("live", "sample"), ("model.bags",), ("optim.tables",), ("conditions.cache",)]
)
def test_settings_of_a_run_of_0_2_are_refused_by_name(names):
    stored = Config(data="t", version=0).to_dict() | {"step_threads": "halves"}
    assert Config.from_dict(stored) == Config(data="t", version=0)  # which 0.3 wrote
    for name in names:
        section, _, key = name.rpartition(".")
        (stored[section] if section else stored)[key] = None
    with raises(ConfigError, ", ".join(repr(name.rpartition(".")[2]) for name in names), BY_WAY):
        Config.from_dict(stored)


@pytest.mark.parametrize(
    ("tuning", "told"),
    [("intune", "benchmarks/rivals"), ("planner", "part of 'auto'"), ("next", "part of 'auto'")],
)
def test_a_run_that_another_policy_tuned_goes_on_with_auto(tuning, told):
    stored = Config(data="t", version=0).to_dict() | {"tuning": tuning, "agent_weights": "w"}
    with pytest.warns(FutureWarning, match=told):
        assert Config.from_dict(stored) == Config(data="t", version=0, tuning="auto")
    with raises(ConfigError, "tuning", "sluice bench --tuning intune"):
        Config(data="t", version=0, tuning="intune")
    with pytest.warns(FutureWarning, match="part of 'auto'"):
        assert make(Config, said("--data", "t", "--tuning", "planner"), version=0).tuning == "auto"


def test_a_resumed_run_keeps_the_settings_that_are_not_given():
    stored = make(
        Config, said(*["--data", "t", "--lr", "0.1", "--width", "32"]), version=0
    ).to_dict()
    now = options.resumed(stored, said(*["--epochs", "9", "--tuning", "fixed"]), ranks=2)
    assert (now.epochs, now.tuning, now.ranks, now.optim.lr, now.model.width) == (
        9,
        "fixed",
        2,
        0.1,
        32,
    )
    assert now.data == "t"


def test_the_same_words_on_a_resumed_run_keep_what_was_chosen_for_the_other_tables():
    words = ["--data", "/t"]
    begun = replace(make(Config, said(*words), version=0), model=ModelConfig(spread=("C2",)))
    assert options.resumed(begun.to_dict(), said(*words)) == begun


@pytest.mark.parametrize(
    ("address", "kept"), [("t", "{here}/t"), ("/a/t", "/a/t"), ("s3://b/t", "s3://b/t")]
)
def test_a_resumed_run_can_be_read_from_any_folder_as_a_fresh_one(
    tmp_path, monkeypatch, address, kept
):
    monkeypatch.chdir(tmp_path)
    begun = make(Config, said("--data", "/elsewhere/t"), version=0)
    assert options.resumed(begun.to_dict(), said("--data", address)).data == kept.format(
        here=tmp_path
    )


def test_the_version_that_a_run_began_with_does_not_take_one_that_follows_back():
    words = ["--data", "t", "--version", "2"]
    for follow, stands in (((), 2), (("--follow",), 5)):
        config = make(Config, said(*words, *follow))
        assert (
            options.resumed(replace(config, version=5).to_dict(), said(*words, *follow)).version
            == stands
        )


@pytest.mark.parametrize(("words", "facts"), MISTAKES["resume"])
def test_an_option_that_would_train_another_model_is_refused_on_resume(words, facts):
    before = make(Config, said("--data", "t"), version=0)
    with raises(ConfigError, *facts):
        options.resumed(before.to_dict(), said(*words))


@pytest.mark.parametrize(
    ("words", "facts"),
    MISTAKES["training"],
)
def test_nonsense_is_named(words, facts):
    with raises(UsageError, *facts):
        make(Config, said("--data", "t", *words), version=0)


LABEL = Field(name="label", role="label", type="int8")
DENSE = Field(name="I1", role="dense", type="float")
SPARSE = Field(name="C1", role="sparse", type="int32", cardinality=5)


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        ((LABEL, DENSE), ["no sparse column"]),
        ((DENSE, SPARSE), ["no label"]),
        ((LABEL, DENSE, Field(name="C2", role="sparse", type="int32")), ["'C2'", "cardinality"]),
    ],
)
def test_a_table_that_a_dlrm_cannot_use_is_refused_by_name(fields, facts):
    with raises(ConfigError, *facts):
        tables_of(fields, ModelConfig())


def test_tables_follow_the_columns_and_their_bags():
    bag = Field(
        name="H", role="id_list", type="binary", layout="bytes", cardinality=9, bag=(0, 3.5, 10)
    )
    tables = tables_of((LABEL, SPARSE, DENSE, bag), ModelConfig(width=8))
    assert [(t.name, t.rows, t.width, t.lookups) for t in tables] == [
        ("C1", 5, 8, 1.0),
        ("H", 9, 8, 3.5),
    ]
