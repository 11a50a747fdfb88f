"""`TableTransform`: a change to a table's columns that training, evaluation and server apply.

A spec names it as a [[transform]], a command line as `--transform`. It is recorded as data. Only a `Permission` imports
a function that it names (`sluice.etl.spec.permission`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from sluice.common.suggest import nearest
from sluice.etl.ops.base import POSITIVE, Fitted, Limit, Operator, between
from sluice.etl.ops.chain import follow
from sluice.etl.ops.numeric import OneHot
from sluice.etl.ops.user_function import Python
from sluice.etl.schema import BagSizes, Field
from sluice.etl.spec.columns import MODEL_ROLES, ROLE_KINDS, read_operator
from sluice.etl.spec.toml_keys import SpecError, read_into, read_sections, read_value

Role = Literal["", "dense", "sparse", "id_list"]
KINDS = {role: ROLE_KINDS[role][0] for role in MODEL_ROLES}
"""The roles of a model's inputs, and the kind (see `sluice.etl.ops.base`) of their values."""
_KEYS = ("name", "inputs", "outputs", "limit_s", "pure")
_NAME = Limit(re.compile(r"[\w.-]+").fullmatch, "must be letters, digits, '.', '-' and '_'")
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_SHORT = (
    "write module:function, or module:function:inputs>outputs, for instance "
    "mine:ratio:I1,I2>ratio,C1xC2=1000, and at the end @10s if a batch may take ten seconds, and @pure if a row's "
    "result depends on this row alone"
)
_PROMISE = re.compile(r"@(?:(?P<limit>\d+(?:\.\d+)?)s|pure)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformOutput:
    """One column that a transform returns."""

    name: str
    role: Role = ""
    """Empty for an existing column, or if operators decide it."""
    cardinality: Annotated[int, between(1, 2**31 - 1)] | None = None
    """All ids are below it. None: the cardinality of the existing column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTransform:
    """A function, or a chain of built-in operators, on some columns of a table."""

    name: Annotated[str, _NAME]
    function: Annotated[str, Limit(_FUNCTION.fullmatch, "must be module:function")] = ""
    """The function as "module:function". Empty if `ops` are given."""
    ops: tuple[Operator, ...] = ()
    inputs: tuple[str, ...] = ()
    """The columns that it gets. Empty: all inputs of a model."""
    outputs: tuple[TransformOutput, ...] = ()
    """The columns that it adds or changes. Empty: it may change any of its inputs."""
    limit_s: Annotated[float, POSITIVE] | None = None
    """The seconds that a batch may take. The function then runs in processes, and one that takes longer is killed."""
    pure: bool = False
    """Whether a row's result depends on what the function gets of this row alone, so that a cache may keep it."""

    @property
    def described(self) -> dict[str, Any]:
        """The transform as plain values."""
        return {
            "function": self.function,
            "ops": [op.described for op in self.ops],
            "inputs": list(self.inputs),
            "outputs": [dataclasses.asdict(output) for output in self.outputs],
        }

    def fault(self, text: str) -> SpecError:
        return SpecError(f"transform {self.name!r}: {text}")


def read_transforms(
    raw: Mapping[str, Any], columns: Mapping[str, str]
) -> tuple[TableTransform, ...]:
    """Reads the [[transform]] entries of a spec whose columns have these roles. The columns that they name must
    exist."""
    transforms: list[TableTransform] = []
    there = {name: Field(name=name, role=role, type="") for name, role in columns.items()}
    for path, entry in read_sections(raw, "transform"):
        transform = _read_transform(entry, path)
        if any(other.name == transform.name for other in transforms):
            raise SpecError(f"{path}.name = {transform.name!r}: another transform has this name")
        try:
            there = {
                f.name: f for f in _apply_transform(tuple(there.values()), transform, sized=False)
            }
        except SpecError as error:
            raise SpecError(f"{path}: {error}") from None
        transforms.append(transform)
    return tuple(transforms)


def _read_transform(entry: dict[str, Any], path: str) -> TableTransform:
    ways = [key for key in ("function", "op", "ops") if key in entry]
    if len(ways) != 1:
        raise SpecError(
            f"{path}: give one of function, op and ops{', not ' + ' and '.join(ways) if ways else ''}"
        )
    if ways != ["function"]:
        for key in {"limit_s", "pure"} & entry.keys():
            raise SpecError(
                f"{path}.{key}: only a function can have it, and this transform has {ways[0]}"
            )
    outputs: tuple[TransformOutput, ...] = ()
    for number, raw in enumerate(read_value(entry.pop("outputs", []), list, f"{path}.outputs")):
        about, here = {"name": raw} if isinstance(raw, str) else raw, f"{path}.outputs[{number}]"
        if not isinstance(about, dict):
            raise SpecError(
                f"{here} = {raw!r}: write a column's name, or {{name = …, role = …, cardinality = …}}"
            )
        outputs += (read_into(TransformOutput, about, here),)
    ops: tuple[Operator, ...] = ()
    if ways == ["op"]:
        step = {key: entry.pop(key) for key in [*entry] if key not in _KEYS}
        ops = (_read_operator(step, path),)
    elif ways == ["ops"]:
        steps = read_value(entry.pop("ops"), list, f"{path}.ops")
        ops = tuple(
            _read_operator(operator, f"{path}.ops[{n}]") for n, operator in enumerate(steps)
        )
    made = read_into(TableTransform, entry, path, ops=ops, outputs=outputs)
    if made.function:
        return made
    if not ops or not made.inputs:
        raise SpecError(f"{path}: {'ops' if not ops else 'inputs'} must name at least one")
    default = (TransformOutput(name=made.inputs[0]),) * (len(made.inputs) == 1)
    return replace(made, outputs=outputs or default)


def _read_operator(step: Any, path: str) -> Operator:
    op, online = read_operator(step, path)
    if online:
        raise SpecError(f"{path}.online: a transform is always left to the loader")
    if isinstance(op, Python):
        raise SpecError(
            f'{path}.op = "python": name it as the transform\'s function = {op.function!r}'
        )
    if getattr(op, "indicator", False) or (isinstance(op, OneHot) and len(op.values) > 1):
        raise SpecError(
            f"{path}.op = {op.name!r}: adds columns, which a transform's operators cannot; it belongs into "
            "a [[column]]"
        )
    if isinstance(op, Fitted) or op.needs:
        raise SpecError(
            f"{path}.op = {op.name!r}: learns from the data, which a transform cannot; it belongs into a "
            "[[column]]"
        )
    return op


def short_transforms(texts: Iterable[str]) -> tuple[TableTransform, ...]:
    """Reads transforms of a command line: "module:function:inputs>outputs@10s". An output that is no column of the
    table becomes a dense column, or with =SIZE a column of ids below SIZE. @ names the seconds of a batch at most.
    @pure says that a row's result depends on this row alone."""
    transforms: list[TableTransform] = []
    for text in texts:
        function_text, promises = _split_promises(text)
        module, _, rest = function_text.partition(":")
        attribute, colon, columns = rest.partition(":")
        if not _FUNCTION.fullmatch(function := f"{module}:{attribute}") or (
            colon and ">" not in columns
        ):
            raise SpecError(f"--transform {text!r}: {_SHORT}")
        inputs, _, outputs = columns.partition(">")
        made: list[dict[str, Any]] = []
        for output in filter(None, outputs.split(",")):
            name, equals, size = output.partition("=")
            if not name or (equals and not size.isdecimal()):
                raise SpecError(f"--transform {text!r}: {output!r} is no output; {_SHORT}")
            made.append({"name": name} | ({"cardinality": int(size)} if equals else {}))
        same = sum(other.function.endswith(f":{attribute}") for other in transforms)
        entry = {
            "name": f"{attribute}_{same + 1}" if same else attribute,
            "function": function,
            "inputs": [name for name in inputs.split(",") if name],
            "outputs": made,
            **promises,
        }
        transforms.append(_read_transform(entry, f"--transform {text!r}"))
    return tuple(transforms)


def _split_promises(text: str) -> tuple[str, dict[str, Any]]:
    """Splits a transform of a command line from what stands behind its @."""
    promises: dict[str, Any] = {}
    while found := _PROMISE.search(text):
        limit = found["limit"]
        promises |= {"pure": True} if limit is None else {"limit_s": float(limit)}
        text = text[: found.start()]
    return text, promises


def transformed(fields: Sequence[Field], transforms: Iterable[TableTransform]) -> tuple[Field, ...]:
    """Returns the columns that a model gets: the stored columns, as the transforms change them, and those that they
    add. Raises SpecError if a transform needs a column that does not exist."""
    after = tuple(fields)
    names: set[str] = set()
    for transform in transforms:
        if transform.name in names:
            raise transform.fault(
                "another transform has this name; rename one of the functions, or name them in the spec"
            )
        names.add(transform.name)
        after = _apply_transform(after, transform, sized=True)
    return after


def stored(fields: Iterable[Field]) -> tuple[Field, ...]:
    """Returns the columns of the files, before any transform."""
    return tuple(
        replace(f, cardinality=f.stored_ids or f.cardinality, stored_ids=None, transforms=())
        for f in fields
        if not f.made
    )


def inputs_of(transform: TableTransform, fields: Iterable[Field]) -> tuple[str, ...]:
    """Returns the names of the columns that a transform gets."""
    return transform.inputs or tuple(f.name for f in fields if f.role in KINDS)


def _apply_transform(
    fields: tuple[Field, ...], transform: TableTransform, *, sized: bool
) -> tuple[Field, ...]:
    """Returns the columns after one transform. `sized` is true if cardinalities are known."""
    there = {f.name: f for f in fields}
    taken = [there.get(name) for name in inputs_of(transform, fields)]
    for name, column in zip(inputs_of(transform, fields), taken, strict=True):
        if column is None:
            raise transform.fault(
                f"it needs a column {name!r}, which does not exist{nearest(name, there)}; use a table that has it, "
                "or leave the transform out"
            )
        if column.role not in KINDS:
            raise transform.fault(
                f"its input {name!r} is the {column.role}, which a server does not have; a transform takes dense "
                "and sparse columns"
            )
    inputs = [column for column in taken if column is not None]
    outputs = transform.outputs or tuple(TransformOutput(name=f.name) for f in inputs)
    if transform.ops:
        outputs = _outputs_of_ops(transform, inputs)
    twice = next(
        (o.name for n, o in enumerate(outputs) if any(o.name == p.name for p in outputs[:n])), None
    )
    if twice is not None:
        raise transform.fault(f"its output {twice!r} is there twice")
    bags = [f.bag for f in inputs if f.bag]
    for output in outputs:
        before = there.get(output.name)
        there[output.name] = (
            _change_field(transform, output, before)
            if before is not None
            else _add_field(
                transform,
                output,
                tuple(f.name for f in inputs),
                max(bags, default=None),
                sized=sized,
            )
        )
    return tuple(there.values())


def _change_field(transform: TableTransform, output: TransformOutput, before: Field) -> Field:
    if before.role not in KINDS:
        raise transform.fault(
            f"its output {output.name!r} is the table's {before.role}, which cannot be changed; choose another "
            "name"
        )
    if output.role and output.role != before.role:
        raise transform.fault(
            f"its output {output.name!r} is {output.role}, but the table's column of this name is "
            f"{before.role}; give the output a name of its own"
        )
    if output.cardinality and before.role == "dense":
        raise transform.fault(
            f"its output {output.name!r} is a dense column, which has no cardinality"
        )
    size = output.cardinality or before.cardinality
    stored = before.stored_ids or (
        None if before.made or size == before.cardinality else before.cardinality
    )
    return replace(
        before, cardinality=size, stored_ids=stored, transforms=(*before.transforms, transform.name)
    )


def _add_field(
    transform: TableTransform,
    output: TransformOutput,
    inputs: tuple[str, ...],
    bag: BagSizes | None,
    *,
    sized: bool,
) -> Field:
    role = output.role or ("sparse" if output.cardinality else "dense")
    if role == "dense" and output.cardinality:
        raise transform.fault(
            f"its output {output.name!r} is a dense column, which has no cardinality"
        )
    if role != "dense" and output.cardinality is None and (sized or not transform.ops):
        raise transform.fault(
            f"its output {output.name!r} has no cardinality: write the number below which all its ids are, the "
            "number of rows of its embedding"
        )
    if (
        output.name in ("split", "partition")
        or output.name.startswith("_")
        or output.name.endswith(".lengths")
    ):
        raise transform.fault(f"its output {output.name!r}: this name is the table's own")
    return Field(
        name=output.name,
        role=role,
        type=ROLE_KINDS[role][1],
        layout="bytes" if role == "id_list" else "scalar",
        cardinality=output.cardinality,
        bag=(0, bag[1], bag[2]) if bag and role == "id_list" else None,
        inputs=inputs,
        made=True,
        transforms=(transform.name,),
    )


def _outputs_of_ops(
    transform: TableTransform, inputs: Sequence[Field]
) -> tuple[TransformOutput, ...]:
    """Returns the output of a chain of operators with its role and cardinality."""
    kind, size = "row", None
    if len(inputs) == 1:
        kind, size = KINDS[inputs[0].role], inputs[0].cardinality
    for op in transform.ops:
        given = follow(op, kind)
        if given is None:
            raise transform.fault(f"{op.name} takes {' or '.join(op.takes)}, but has {kind} here")
        kind, size = given, op.cardinality(None) or (size if given in ("id", "ids") else None)
    role: Any = next((role for role, kept_as in KINDS.items() if kept_as == kind), "")
    if not role:
        raise transform.fault(
            f"its operators end in {kind}, which no model takes; add one that gives numbers or ids"
        )
    if len(transform.outputs) != 1:
        raise transform.fault(
            f"its operators give 1 column, and there are {len(transform.outputs)} outputs"
        )
    (output,) = transform.outputs
    if (output.role or role) != role or (size and output.cardinality not in (None, size)):
        raise transform.fault(
            f"its output {output.name!r}: the operators give it the role {role} and the cardinality "
            f"{size}; leave both out"
        )
    return (replace(output, role=role, cardinality=size or output.cardinality),)
