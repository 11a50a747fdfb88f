"""One training run, written down: `Config`, a frozen tree that is checked once, here, and stored as config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sluice.dlrm import tables as use
from sluice.dlrm.liveness.activity import MOST_S
from sluice.etl.common.errors import UsageError
from sluice.etl.schema import Field
from sluice.ingest.options import RunOptions

if TYPE_CHECKING:
    from sluice.etl.table.table import FeatureTable

MODELS = ("dlrm", "dcn", "wide_deep", "deepfm", "dien")
OPTIMISERS = ("adam", "adagrad", "sgd", "lamb")
TABLE_OPTIMISERS = ("rowwise_adagrad", "adagrad", "adam", "sgd")
TUNINGS = ("auto", "planner", "shadow", "fixed")
SHARDINGS = ("auto", "row", "table", "column", "torchrec")
PRECISIONS = ("fp32", "bf16")
WIRES = ("fp32", "fp16")
MISSING = ("refuse", "mask")
FOLLOWS = ("", "epochs", "parts")
"""`epochs`: the newest version, at each epoch's end. `parts`: one version after the other, what each added once."""


class ConfigError(UsageError):
    """A run that cannot be: its message names the setting or column, its value and what would do."""


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ConfigError(f"{name}: {value!r} is not a positive number")


def _whole(owner: object, **least: int) -> None:
    for name, low in least.items():
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(f"{name}: {value!r} is not a whole number of {low} or more")


def _one_of(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}: {value!r} is none of {', '.join(choices)}")


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
    use: use.Runs = ()
    """How the lookups are spread over the rows, if that is known."""
    top: tuple[tuple[int, float], ...] = ()
    """The most frequent ids and their shares of the lookups."""

    @property
    def bytes(self) -> int:
        """The bytes of its float32 weights."""
        return self.rows * self.width * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model is trained, the sizes of its layers, and which tables are made smaller."""

    kind: str = "dlrm"
    width: int = 16
    """The width of every embedding, and of the dense tower's output."""
    table_width: int = 0
    """The width of the tables, if less: vectors travel in this width and are then repeated to `width`. 0: `width`."""
    dense_layers: tuple[int, ...] = (128, 64)
    """The hidden layers for the dense features in `dlrm` and `dcn`; a last one of `width` is added."""
    over_layers: tuple[int, ...] = (256, 128)
    """The hidden layers after the interaction; a last one of 1 is added."""
    cross_layers: int = 3
    """The number of cross layers in `dcn`."""
    cross_rank: int = 0
    """The rank of a cross layer's matrix; 0: full."""
    cross_experts: int = 1
    """The number of low-rank experts in a cross layer; 1: no gates."""
    history: str = ""
    """The column of bags that `dien` reads as a history, the oldest item first."""
    target: str = ""
    """The column of the item in question, for `dien`."""
    precision: str = "fp32"
    """The precision of the dense layers' products. Weights, tables and the loss stay float32."""
    compress: dict[str, str] = field(default_factory=dict)
    """Column → how its table is made smaller, as `sluice.dlrm.model.table_compression.Compression.read` takes it."""
    bags: dict[str, str] = field(default_factory=dict)
    """Column of bags → how its ids are weighted, as `sluice.dlrm.model.bag_weights.Weighing.read` takes it. The ids of
    other columns are summed up."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        object.__setattr__(self, "over_layers", tuple(self.over_layers))
        _one_of("model", self.kind, MODELS)
        _one_of("precision", self.precision, PRECISIONS)
        _whole(self, width=1, table_width=0, cross_layers=1, cross_rank=0, cross_experts=1)
        for name in ("dense_layers", "over_layers"):
            if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in getattr(self, name)):
                raise ConfigError(f"{name}: {getattr(self, name)!r} is not a list of positive layer sizes")
        if self.table_width and (self.width % self.table_width or self.kind == "dien"):
            raise ConfigError(f"table_width: {self.table_width} cannot be repeated to a width of {self.width}"
                              + (" in dien, which reads the tables' own vectors" if self.kind == "dien" else ""))
        if self.cross_experts > 1 and not self.cross_rank:
            raise ConfigError(f"cross_experts: {self.cross_experts} experts need a cross_rank above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """Tables are updated within the backward pass; dense layers by an optimiser of their own."""

    table_optimiser: str = "rowwise_adagrad"
    lr: float = 0.05
    """The learning rate of the tables."""
    schedule: str = "constant"
    """The schedule of the tables' rate, as `sluice.dlrm.optim.schedule.RateSchedule.read` takes it."""
    dense_optimiser: str = "adam"
    dense_lr: float = 0.001
    dense_schedule: str = "constant"
    clip: float = 0.0
    """The largest length that the dense layers' gradients may have together; 0: any length."""
    table_decay: float = 0.0
    """The pull towards 0 on each vector that a batch looks up: decay/2 · its squared length is added to a row's
    loss."""
    dense_decay: float = 0.0
    """The dense optimiser's own weight decay."""

    def __post_init__(self) -> None:
        _positive(self, "lr", "dense_lr")
        _one_of("dense optimiser", self.dense_optimiser, OPTIMISERS)
        _one_of("table optimiser", self.table_optimiser, TABLE_OPTIMISERS)
        for name in ("clip", "table_decay", "dense_decay"):
            value = getattr(self, name)
            if isinstance(value, bool) or not 0 <= value < float("inf"):
                raise ConfigError(f"{name}: {value!r} is not a number of 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that decides what a run does. Settings that cannot change its result come last."""

    data: str
    """Address of the feature table."""
    version: int
    """The version of the table that is read."""
    batch_size: int = 4096
    """Rows of a global batch; each rank takes an equal part."""
    epochs: int = 1
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    follow: str = ""
    """Whether and how the run moves on to newer versions of the table, see FOLLOWS; empty: never."""
    follow_wait: float = 0.0
    """Seconds to wait for another part before the run is over."""
    sharding: str = "auto"
    """One of SHARDINGS, or the path of a JSON file with a kind for each column."""
    ranks: int = 1
    wire: str = "fp32"
    """The number format in which embeddings and their gradients are sent between ranks."""
    missing: str = "refuse"
    """What is done about dense features that are not finite numbers; `mask`: they are counted, and become 0."""
    tuning: str = "auto"
    knobs: str = ""
    """The knobs to start with, as the command line has them."""
    save_knobs: str = ""
    """The file that the best knobs are written to; empty: none."""
    registry: str | None = None
    """The folder or URI where settled knobs are kept; empty: the user's cache; None: nowhere."""
    transforms: tuple[str, ...] = ()
    """Transforms on top of the table's own, as `--transform` has them (`sluice.etl.spec.transforms`)."""
    reader: str = "auto"
    """Who decodes: `petastorm`, `arrow`, or `auto`, which is petastorm where it is installed."""
    conditions: RunOptions = field(default_factory=RunOptions)
    """What is done about rows that fail, where remote files are kept, and which faults are injected."""
    memory_limit: int | None = None
    """Bytes that one rank's loader may use; None: what the machine and its control groups leave."""
    log_every: int = 20
    """Steps between two lines of the log; ranks agree there whether to stop."""
    save_every: int = 0
    """Steps between two checkpoints within an epoch; 0: one at the end of each epoch only."""
    keep: int = 3
    """How many of the newest checkpoints stay, beside the best."""
    evals: int = 1
    """How many evaluations on the validation split an epoch has, evenly spread."""
    stop_auc: float | None = None
    """Training is over once the validation split's AUC reaches this."""
    slices: tuple[str, ...] = ()
    """Sparse columns whose most frequent ids get an AUC of their own."""
    stuck_after: int = 500
    """Steps from which an evaluation near chance is a warning."""
    metrics_port: str = ""
    """[HOST:]PORT of an endpoint for Prometheus on each rank; empty: none."""
    stall_after: float = MOST_S
    """The most seconds that a rank may stand still before the run is ended; where steps are usually quick, it is less.
    """
    profile: int = 0
    """How many steps a trace is made of, from the tenth on; 0: none."""
    mllog: bool = False
    """Whether MLPerf's log lines are written, in the run folder."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "slices", tuple(self.slices))
        object.__setattr__(self, "transforms", tuple(self.transforms))
        _whole(self, batch_size=1, epochs=1, ranks=1, log_every=1, save_every=0, keep=1, evals=1, stuck_after=0,
               profile=0)
        if self.batch_size % self.ranks:
            raise ConfigError(f"batch size {self.batch_size} cannot be cut into equal parts for {self.ranks} ranks")
        if self.stop_auc is not None and not 0.5 < self.stop_auc < 1:
            raise ConfigError(f"stop_auc: {self.stop_auc!r} is not between 0.5 and 1")
        _one_of("tuning", self.tuning, TUNINGS)
        _one_of("wire", self.wire, WIRES)
        _one_of("missing", self.missing, MISSING)
        _one_of("follow", self.follow, FOLLOWS)
        if not 1 <= self.stall_after < float("inf"):
            raise ConfigError(f"stall_after: {self.stall_after!r} is not a number of seconds from 1 on")
        if not 0 <= self.follow_wait < float("inf"):
            raise ConfigError(f"follow_wait: {self.follow_wait!r} is not a number of seconds")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """Reads what `to_dict` gave; ConfigError if it holds a setting that is unknown here."""
        try:
            return cls(**{**values, "model": ModelConfig(**values["model"]), "optim": OptimConfig(**values["optim"]),
                          "conditions": RunOptions(**values.get("conditions", {}))})
        except (TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"the run's settings cannot be understood by this program ({error})") from None


def profile_of(table: FeatureTable) -> Mapping[str, Mapping[str, Any]]:
    """What the ETL counted in the columns of a version's newest part; empty for a table without records."""
    return table.record.profile if table.records else {}


def tables_of(fields: Sequence[Field], model: ModelConfig, profile: Mapping[str, Mapping[str, Any]] | None = None,
              ) -> tuple[Table, ...]:
    """The embedding tables that a feature table's columns need, in its order. `profile` says how ids are used."""
    width = model.table_width or model.width
    if width % 4:
        raise ConfigError(f"width: {width} is not a multiple of 4, which the fused kernels need")
    found = []
    for f in fields:
        if f.role not in ("sparse", "id_list"):
            continue
        if f.cardinality is None:
            raise ConfigError(f"column {f.name!r}: no cardinality in the table, so its embedding has no size")
        # Ids that the loader makes were not counted.
        seen = None if f.online or f.transforms else (profile or {}).get(f.name)
        found.append(Table(name=f.name, rows=f.cardinality, width=width, lookups=f.bag[1] if f.bag else 1.0,
                           longest=f.bag[2] if f.bag else 1, use=use.runs(seen, f.cardinality) if seen else (),
                           top=use.top(seen, f.cardinality) if seen else ()))
    if not found:
        raise ConfigError("the table has no sparse column: a DLRM needs at least one (role \"sparse\" in the spec)")
    if not any(f.role == "dense" for f in fields):
        raise ConfigError("the table has no dense column: a DLRM needs at least one (role \"dense\" in the spec)")
    if not any(f.role == "label" for f in fields):
        raise ConfigError("the table has no label column (role \"label\" in the spec)")
    return tuple(found)
