"""The options of the trainer: `Config`, the settings that a run keeps as config.json, and `StartOptions`, all others.
`parse` reads a command line, and `resumed` changes the settings of a stored run."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice.agent import policies
from sluice.agent.runtime.loader_options import LoaderOptions
from sluice.common.errors import UsageError
from sluice.common.number_checks import is_whole
from sluice.common.settings import Given, check, read, replaced, setting
from sluice.common.suggest import BY_WAY, nearest
from sluice.dlrm.liveness import MOST_S
from sluice.etl.spec.code_options import CodeOptions, TransformOptions
from sluice.ingest.choices import LAST, History, history_name
from sluice.ingest.options import OrderOptions, RunOptions

if TYPE_CHECKING:
    from sluice.dlrm import lookup_frequencies
    from sluice.etl.schema import Field
    from sluice.etl.table.table import FeatureTable

_TOWERS = "sluice.dlrm.model.towers"
MODELS = {
    "dlrm": f"{_TOWERS}:Dlrm",
    "dcn": f"{_TOWERS}:Dcn",
    "wide_deep": f"{_TOWERS}:WideDeep",
    "deepfm": f"{_TOWERS}:DeepFm",
    "xdeepfm": "sluice.dlrm.model.xdeepfm:XDeepFm",
    "dien": f"{_TOWERS}:Dien",
    "autoint": "sluice.dlrm.model.autoint:AutoInt",
    "pnn": "sluice.dlrm.model.pnn:Pnn",
    "dnn": f"{_TOWERS}:Dnn",
}
"""The name of a model → the class of its tower, which is imported when a model is made."""
OPTIMISERS = ("adam", "adagrad", "sgd")
SHARDING_KINDS = ("row", "table", "column")
"""How a table can lie on the ranks: `auto` chooses one of these for each, and one may be asked for all of them."""
COPIED = "data"
"""The kind of a table that has a copy on each rank. Only a FILE can ask for it."""
SHARDINGS = ("auto", *SHARDING_KINDS)
MOST_ROWS = 2**32 - 1
"""The rows of the largest table: ids are words of 32 bits in the loader."""
TABLE_DTYPES = ("fp32", "fp16", "bf16")
WIRES = ("fp32", "fp16")
SPREAD_ROWS = 10_000
"""Smaller tables are rarely cut."""
_OF_0_3 = {"step_threads", "agent_weights"}
"""Settings of runs of 0.3 that decided neither the rows nor the model."""


class ConfigError(UsageError):
    """Settings that no run can have. The message names the setting or column, its value and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One embedding table: a column's ids are its row numbers."""

    name: str
    rows: int
    width: int
    lookups: float = 1.0
    """How many ids a row of data brings, on average."""
    longest: int = 1
    """How many ids a row brings at most."""
    use: lookup_frequencies.Runs = ()
    """How the lookups are spread over the rows, if that is known."""

    def __post_init__(self) -> None:
        if self.rows > MOST_ROWS:
            raise ConfigError(
                f"table {self.name!r}: {self.rows:,} rows, and a column's ids are numbers of 32 bits, "
                f"for {MOST_ROWS:,} rows; hash them into fewer, or split them over several columns"
            )

    @property
    def bytes(self) -> int:
        """The bytes of its float32 weights."""
        return self.rows * self.width * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model is trained, the sizes of its layers, and which tables are made smaller."""

    title = "model"
    kind: str = setting("dlrm", "which tower", flags=("--model",), choices=tuple(MODELS))
    width: int = setting(16, "width of every embedding, and of the dense tower's output", least=1)
    dense_layers: tuple[int, ...] = setting(
        (128, 64),
        "hidden layers for the dense features in dlrm and dcn; a last one of --width is added",
        metavar="N,N",
        least=1,
    )
    over_layers: tuple[int, ...] = setting(
        (256, 128),
        "hidden layers after the interaction; a last one of 1 is added",
        metavar="N,N",
        least=1,
    )
    table_dtype: str = setting(
        "fp32",
        "number type of the tables' weights; updates are made in float32 and, for 16 "
        "bits, rounded by chance, so that small ones count",
        choices=TABLE_DTYPES,
    )
    cross_layers: int = setting(3, "number of cross layers in dcn", metavar="N", least=1)
    cross_rank: int = setting(
        0, "rank of a cross layer's matrix (default: full)", metavar="N", least=0
    )
    cin_layers: tuple[int, ...] = setting(
        (16, 16), "maps in each layer of xdeepfm's interactions", metavar="N,N", least=1
    )
    attention_layers: int = setting(
        2, "number of attention layers in autoint", metavar="N", least=1
    )
    attention_heads: int = setting(2, "heads of each, as wide as a vector", metavar="N", least=1)
    history: str = setting(
        "",
        "what dien reads as a history: the earlier rows of a user, by=USER,time=TIME,columns=ITEM,last=N (columns "
        "of a table that is sorted by user and time), or a column of bags, the oldest item first",
        metavar="by=…|COLUMN",
    )
    target: str = setting(
        "", "column of the item in question, for dien (default: that of columns=)", metavar="COLUMN"
    )
    history_table: str = setting(
        "auto",
        "where dien looks a history's items up: in the target's table, where the same "
        "id means the same item (auto, by the spec), or in one of their own",
        choices=("auto", "target", "own"),
    )
    precision: str = setting(
        "fp32",
        "precision of the dense layers' products; weights and the loss stay float32",
        choices=("fp32", "bf16"),
    )
    spread: tuple[str, ...] = ()
    """The columns whose tables are stored in another order, so that all ranks are used (`spread_out`)."""

    def __post_init__(self) -> None:
        check(self, ConfigError)
        if (events := self.events) and not self.target:
            object.__setattr__(self, "target", events.columns[0])

    @property
    def events(self) -> History | None:
        """The events that the loader makes a history of. None: the history is a column of the table, or there is
        none."""
        if "=" not in self.history:
            return None
        parts = dict(part.partition("=")[::2] for part in self.history.split(","))
        last = parts.pop("last", "50")
        if parts.keys() != {"by", "time", "columns"} or not last.isdecimal():
            raise ConfigError(
                f"history {self.history!r}: write by=USER,time=TIME,columns=ITEM, and last=N for the most events"
            )
        return History(
            by=parts["by"], time=parts["time"], columns=(parts["columns"],), last=int(last)
        )

    @property
    def history_column(self) -> str:
        """The column of bags that is the history. Empty: there is none."""
        return history_name(self.events.columns[0]) if self.events else self.history


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """Tables are updated within the backward pass; dense layers by an optimiser of their own."""

    title = "optimisers"
    table_optimiser: str = setting(
        "rowwise_adagrad",
        "what updates the tables, within the backward pass",
        choices=("rowwise_adagrad", "adagrad", "adam", "sgd"),
    )
    lr: float = setting(0.05, "learning rate of the embedding tables", above=0)
    schedule: str = setting(
        "constant",
        "how that rate changes: constant, or any of warmup=,decay_start=,decay=,power=,floor=, in steps",
    )
    dense_optimiser: str = setting("adam", "what updates the dense layers", choices=OPTIMISERS)
    dense_lr: float = setting(
        0.001,
        "learning rate of the dense layers (default: 0.001 below 40,000 training rows, else 0.003)",
        above=0,
    )
    dense_schedule: str = setting("constant", "how that rate changes, as in --schedule")
    clip: float = setting(
        0.0,
        "largest length of the dense layers' gradients together; 0: any (default: none)",
        metavar="LENGTH",
        least=0,
    )
    table_decay: float = setting(
        0.0,
        "pull of each vector that is looked up towards 0: D/2 · its squared length is added to a row's loss",
        metavar="D",
        least=0,
    )
    dense_decay: float = setting(
        0.0, "the dense optimiser's own weight decay", metavar="D", least=0
    )

    def __post_init__(self) -> None:
        check(self, ConfigError)


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which table a run trains on, and whether it follows that."""

    title = "what"
    data: str = setting(
        help="feature table, as etl/job.py writes it, or with --spec a table or files of another program (with "
        "--resume: the checkpoint's)",
        metavar="TABLE",
        later=True,
    )
    version: int = setting(
        help="version of it (default: the newest; with --resume: the checkpoint's)", later=True
    )
    spec: str = ""
    """The text of the spec of a table that another program wrote."""
    follow: str = setting(
        "",
        "take up newer versions of the table, with columns that come and go: `epochs` (or "
        "nothing) the newest one at each epoch's end; `parts` one after the other, training once on "
        "what each added, after an evaluation on it",
        bare="epochs",
        choices=("", "epochs", "parts"),
    )


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """How long a run trains, and what it leaves behind on its way."""

    title = "training"
    epochs: int = setting(1, "how often all rows are trained on", least=1)
    batch_size: int = setting(
        4096,
        "rows of a global batch; each rank takes an equal part (default: follows the "
        "rows: at least 200 steps an epoch, at most 8192)",
        least=1,
    )
    last: str = setting(
        "pad",
        "the rows at the end of an epoch that fill no batch: pad theirs with rows of weight 0, or drop them",
        choices=LAST,
    )
    seed: int = setting(0, "decides first weights and row order")
    save_every: int = setting(
        0,
        "checkpoint also within epochs, so many steps apart (default: after each epoch)",
        metavar="STEPS",
        least=0,
    )
    keep: int = setting(
        3, "newest checkpoints to keep, in addition to the best", metavar="N", least=1
    )
    log_every: int = setting(
        20,
        "steps between two lines of the log; ranks agree there whether to stop",
        metavar="STEPS",
        least=1,
    )
    on_nonfinite: str = setting(
        "stop",
        "a batch whose loss is no number: stop, or skip it on all ranks before any weight changes, and count it",
        choices=("stop", "skip"),
    )
    metrics_port: str = setting(
        "",
        "serve figures for Prometheus, on this machine alone unless HOST says otherwise; a "
        "machine's rank n takes PORT + n (default: none)",
        metavar="[HOST:]PORT",
    )
    stall_after: float = setting(
        MOST_S,
        "a rank that makes no progress for so long is named, and all end; less where steps "
        "are quick: 20 times the slowest of late, but at least 10 s",
        metavar="SECONDS",
        least=1,
    )


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """How the work is spread over ranks."""

    title = "ranks"
    ranks: int = 1
    sharding: str = setting(
        "auto",
        "how tables are spread over ranks; FILE: "
        f"JSON, {{table: KIND[:KERNEL]}}, auto for the rest; kinds: {', '.join(SHARDING_KINDS)}, data (a copy on each "
        "rank); kernels on GPUs: fused, uvm (in the host's memory), uvm_caching",
        metavar="|".join([*SHARDINGS, "FILE"]),
    )
    wire: str = setting(
        "fp32", "what embeddings and their gradients travel as between ranks", choices=WIRES
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """When a run is judged on the validation split, and what follows from that."""

    title = "evaluation"
    evals: int = setting(
        1,
        "evaluations an epoch on the validation split, each with a checkpoint",
        metavar="N",
        least=1,
    )
    stop_auc: float | None = setting(
        None, "end once the validation split reaches it", metavar="AUC"
    )
    stuck_after: int = setting(
        500,
        "from there on an AUC near 0.5 is a warning that names likely causes",
        metavar="STEPS",
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class InputSettings(LoaderOptions, TransformOptions):
    """How a rank's loader works, apart from its knobs."""

    title = "input"
    tuning: str = setting(
        "auto",
        "who turns the loader's knobs while it runs",
        choices=policies.MODES,
        parse=policies.renamed,
    )


@dataclass(frozen=True, kw_only=True)
class Config(
    DataSettings,
    LoopSettings,
    OrderOptions,
    RankSettings,
    EvaluationSettings,
    InputSettings,
):
    """Everything that decides what a run does: it is written into the run folder and into each checkpoint."""

    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    conditions: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        from sluice.ingest.row_order import default_streams

        check(self, ConfigError)
        if not is_whole(self.ranks, 1):
            raise ConfigError(f"ranks: {self.ranks!r} is not a whole number of 1 or more")
        if self.streams is None:  # the run keeps its number, whatever a later program would choose
            object.__setattr__(self, "streams", default_streams(self.batch_size))
        if self.batch_size % self.ranks:
            raise ConfigError(
                f"batch size {self.batch_size} cannot be cut into equal parts for {self.ranks} ranks"
            )
        is_column = bool(self.model.history) and not self.model.events
        if self.spec and (self.follow or is_column):
            raise ConfigError(
                "--spec: --follow and a --history that is a column need a feature table; `sluice etl --spec` makes one"
            )
        if self.model.events and self.follow:
            raise ConfigError("--follow: with --history by=… a run stays on its version")
        if self.stop_auc is not None and not 0.5 < self.stop_auc < 1:
            raise ConfigError(f"stop_auc: {self.stop_auc!r} is not between 0.5 and 1")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def changed_table(self, table: FeatureTable) -> FeatureTable:
        """Returns the table with the column that a history adds."""
        if self.model.events is None:
            return table
        name = self.model.events.columns[0]
        last = self.model.events.last
        for item in table.fields:
            if item.name == name and item.role == "sparse":
                past = dataclasses.replace(
                    item,
                    name=self.model.history_column,
                    role="id_list",
                    layout="list",
                    bag=(0, float(last), last),
                    made=True,
                )
                return dataclasses.replace(table, fields=(*table.fields, past))
        names = [item.name for item in table.fields if item.role == "sparse"]
        raise ConfigError(f"history: no sparse column {name!r}{nearest(name, names)}")

    @property
    def why_not_served(self) -> str | None:
        """Why a server refuses a run with these settings, with what to do. None: it does not."""
        if self.model.events:
            return (
                f"was trained with --history {self.model.history}, which reads earlier rows of the table. A server "
                "reads no rows: make the history by [[history]] in the table's spec, and name its column"
            )
        if self.spec:
            return (
                f"was trained on {self.data} by --spec. A server needs a feature table: make one with `sluice etl "
                "--spec`, and train on that"
            )
        return None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """Reads what `to_dict` gave; ConfigError if it holds a setting that is unknown here."""
        try:
            return cls(
                **{
                    **_settings(cls, values),
                    "model": ModelConfig(**_settings(ModelConfig, values["model"])),
                    "optim": OptimConfig(**_settings(OptimConfig, values["optim"])),
                    "conditions": RunOptions(**_settings(RunOptions, values["conditions"])),
                }
            )
        except (TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"the run's settings cannot be understood by this program ({error})"
            ) from None


def _settings(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings of a recorded run for such a dataclass. JSON has lists for tuples."""
    known = {f.name for f in dataclasses.fields(kind)}
    if unknown := values.keys() - known - _OF_0_3:
        raise ConfigError(
            f"the run has settings that this release does not know: {', '.join(map(repr, sorted(unknown)))}. {BY_WAY}"
        )
    if values.get("tuning") == "intune":
        warnings.warn(
            "tuning: intune is in benchmarks/rivals now. The run goes on with auto",
            FutureWarning,
            stacklevel=3,
        )
        values = {**values, "tuning": "auto"}
    elif "tuning" in values:
        values = {**values, "tuning": policies.renamed(values["tuning"])}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if name in known
    }


def spread_out(model: ModelConfig, tables: Sequence[Table]) -> ModelConfig:
    """Returns the model that spreads each large table whose first eighth gets more than a quarter of the lookups. The
    choice is made when a run begins. It stays with the run, because it decides where each row is stored."""
    from sluice.dlrm import lookup_frequencies

    spread = tuple(
        t.name
        for t in tables
        if t.rows >= SPREAD_ROWS
        and t.name != model.history_column
        and lookup_frequencies.share(t.use, t.rows, 0, t.rows // 8) > 0.25
    )
    return dataclasses.replace(model, spread=spread)


def profile_of(table: FeatureTable) -> Mapping[str, Mapping[str, Any]]:
    """What the ETL counted in the columns of a version's newest part; empty for a table without records."""
    return table.record.profile if table.records else {}


def tables_of(
    fields: Sequence[Field],
    model: ModelConfig,
    profile: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[Table, ...]:
    """Returns the embedding tables that a feature table's columns need, in its order. `profile` says how ids are
    used."""
    from sluice.dlrm import lookup_frequencies

    if model.width % 4:
        raise ConfigError(
            f"width: {model.width} is not a multiple of 4, which the fused kernels need"
        )
    tables = []
    for f in fields:
        if f.role not in ("sparse", "id_list"):
            continue
        if f.cardinality is None:
            raise ConfigError(
                f"column {f.name!r}: no cardinality in the table, so its embedding has no size"
            )
        # Ids that the loader makes were not counted.
        seen = None if f.online or f.transforms else (profile or {}).get(f.name)
        tables.append(
            Table(
                name=f.name,
                rows=f.cardinality,
                width=model.width,
                lookups=f.bag[1] if f.bag else 1.0,
                longest=f.bag[2] if f.bag else 1,
                use=lookup_frequencies.runs(seen, f.cardinality) if seen else (),
            )
        )
    if not tables:
        raise ConfigError(
            'the table has no sparse column: a DLRM needs at least one (role "sparse" in the spec)'
        )
    if not any(f.role == "label" for f in fields):
        raise ConfigError('the table has no label column (role "label" in the spec)')
    return tuple(tables)


# A resumed run must keep these settings. Other values would train another model, or on other rows.
_FIXED = (
    "batch_size",
    "last",
    "seed",
    "streams",
    "window_rows",
    "model",
    "transforms",
)


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """How a run starts or continues, and when it pauses. No run records these options."""

    title = "what"
    run: Path = setting(
        help="the run folder to make, with settings, log, checkpoints and report (short: --run, but "
        "torchrun has an option of that name, so write --run-dir there)",
        flags=("--run-dir", "--run"),
        metavar="DIR",
    )
    resume: bool = setting(
        False,
        "continue from the newest checkpoint in DIR, with its settings except those given now. "
        "If there is no checkpoint and --data is given, start a new run. So the same command starts "
        "and continues a run",
    )
    split_moved: str = setting(
        "refuse",
        "what to do if the test split of the resumed run's table has rows that the run was trained on",
        choices=("refuse", "accept"),
    )
    check: bool = setting(False, "check settings and input, print the plan, train nothing")
    ranks: int | None = setting(
        None, "with --check: the number of ranks to check for (default: torchrun's, or 1)", least=1
    )
    ranks_per_host: int | None = setting(
        None,
        "with --check: the number of ranks that share one host's memory and cores (default: all)",
        least=1,
    )
    pause: int | None = setting(
        None,
        "save and exit after N more evaluations; --resume continues the run",
        flags=("--pause-after",),
        metavar="N",
        least=1,
    )
    preempt_s: float = setting(
        20.0,
        "the time that a run has after SIGTERM to save; a run that takes longer ends with the checkpoint before",
        flags=("--preempt-seconds",),
        metavar="SECONDS",
        above=0,
    )

    @property
    def goes_on(self) -> bool:
        """Whether the run continues in its run folder. torchrun restarts all ranks after one of them died, and they
        continue from the newest checkpoint."""
        return self.resume or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def parse(argv: list[str], description: str | None = None) -> Given:
    """Reads a command line. Only options that were given are in the result."""
    return read(
        StartOptions, Config, CodeOptions, argv=argv, prog="sluice train", description=description
    )


def resumed(stored: dict[str, Any], given: Given, **known: Any) -> Config:
    """Returns a stored run's settings with those given now. Raises ConfigError if one of them may not change."""
    before = Config.from_dict(stored)
    # A fault is injected only by a command line that names it.
    given = {"inject": "", **given}
    # A run records an absolute path, because it may be resumed from another folder.
    if "://" not in given.get("data", "://"):
        given["data"] = os.path.abspath(given["data"])
    # A run that follows its table keeps the version that it has reached. `version` is only for a new run.
    if given.get("follow", before.follow):
        given.pop("version", None)
    config = replaced(before, given, **known)
    for name in _FIXED:
        if getattr(before, name) != getattr(config, name):
            raise ConfigError(
                f"--resume: {name} was {getattr(before, name)!r} and cannot become "
                f"{getattr(config, name)!r}; start another run for that"
            )
    for name in ("dense_optimiser", "table_optimiser"):
        old, new = getattr(before.optim, name), getattr(config.optim, name)
        if old != new:
            raise ConfigError(
                f"--resume: the {name.replace('_', ' ')} was {old!r}; its state does not fit {new!r}"
            )
    return config
