"""Converts PyTorch modules and train steps to a :class:`Program`.

torchax computes PyTorch's ops with JAX, which traces and differentiates them.  Parameters and
buffers are arguments, named as in the module; so are the states of the optimizer.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from toast.errors import TargetError
from toast.frontend import jax as jax_frontend
from toast.frontend.torch import TrainStep
from toast.frontend.torch_environment import (
    environment,
    jax_type,
    located_errors,
    optimizer_errors,
    torch_ops,
)
from toast.program import Program

_Tensors = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class TorchCalling(jax_frontend.Calling):
    """The pytrees of the JAX function of a module, and the module's parameters.

    The first arguments of the function are dicts by name: the parameters, the buffers and, for a
    train step, the states of the optimizer.
    """

    #: The type of the module of each parameter and buffer, by name.
    owners: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: The parameter that each further name of a tied parameter stands for.
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: For each state of the optimizer, its path, the parameter.
    states: Mapping[str, str] = dataclasses.field(default_factory=dict)


def from_target(
    target: Any,
    arguments: tuple[Any, ...],
    *,
    donate: int | Sequence[int] | None = (),
    name: str | None = None,
    platform: Any = None,
    **keywords: Any,
) -> Program:
    """The program of a module's forward pass, or of a train step.

    :param target: a ``torch.nn.Module`` or a :class:`TrainStep`.
    :param arguments: the example batch: pytrees of tensors on any device, also ``"meta"``, of
        arrays or ``jax.ShapeDtypeStruct``.  Other leaves are static.
    :param donate: positions of arguments of the batch that results may overwrite.  The arrays that
        a train step updates are donated.
    :raises toast.errors.TargetError: if the module cannot be traced.
    """
    environment()
    model = target.model if isinstance(target, TrainStep) else target
    name = name or type(model).__name__
    _check_shapes(name, model)
    state = _ModuleState(model)
    batch = _ExampleBatch(arguments, keywords)
    step = _Step(name, target, state, batch)
    groups = (state.parameters, state.buffers, step.optimizer_types())
    given = {donate} if isinstance(donate, int) else {*(donate or ())}
    updated = (0, 1, 2) if isinstance(target, TrainStep) and target.optimizer else ()
    with located_errors(name, model):
        program = jax_frontend.from_function(
            step.function, *groups, *batch.types, name=name, platform=platform,
            donate=(*updated, *(3 + leaf for leaf in batch.leaves_of(given, name))),
        )  # fmt: skip
    paths = [*state.parameters, *state.buffers]
    own = target.loss if isinstance(target, TrainStep) else model.forward
    inputs = batch.paths(own, skipped=int(isinstance(target, TrainStep)), used={*paths})
    # JAX orders dicts by key.
    names = [*sorted(state.parameters), *sorted(state.buffers), *sorted(step.states), *inputs]
    calling = {
        "owners": state.owners,
        "tied": state.tied,
        "states": step.states,
    }
    return renamed(program, names, step.results, calling)


def renamed(
    program: Program, arguments: Sequence[str], results: Sequence[str], fields: Mapping[str, Any]
) -> Program:
    """``program`` with the paths of a module, and a :class:`TorchCalling` with further fields."""
    source = program.source
    base = {f.name: getattr(source.calling, f.name) for f in dataclasses.fields(source.calling)}
    here = source.here and renamed(source.here, arguments, results, fields)
    return dataclasses.replace(
        program,
        # Captured arrays come last.
        arguments=(*arguments, *program.arguments[len(arguments) :]),
        results=tuple(results) or program.results,
        source=dataclasses.replace(source, calling=TorchCalling(**base, **fields), here=here),
    )


class _ModuleState:
    """The tensors of a module by name."""

    def __init__(self, model: Any) -> None:
        self._tensors = dict(model.named_parameters())
        #: The parameters that have gradients.
        self.trained = {name for name, p in self._tensors.items() if p.requires_grad}
        first = {id(tensor): name for name, tensor in self._tensors.items()}
        every = model.named_parameters(remove_duplicate=False)
        #: The parameter that each further name of a tied one stands for.
        self.tied = {name: first[id(p)] for name, p in every if first[id(p)] != name}
        self.parameters = {name: jax_type(p) for name, p in self._tensors.items()}
        others = dict(_other_tensors(model))
        #: Types of buffers, and of tensors that are plain attributes.
        self.buffers = {name: jax_type(tensor) for name, tensor in others.items()}
        modules = dict(model.named_modules())
        names = (*self.parameters, *self.tied, *self.buffers)
        self.owners = {n: _kind(modules[n.rpartition(".")[0]]) for n in names}

    def names_by_id(self) -> dict[int, str]:
        """The name of each parameter by identity."""
        return {id(tensor): name for name, tensor in self._tensors.items()}


def _check_shapes(name: str, model: Any) -> None:
    """Refuses parameters and buffers of lazy modules, which have no shape before the first call."""
    is_lazy = importlib.import_module("torch.nn.parameter").is_lazy
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise TargetError(
                f"{name}: {path} has no shape yet (a lazy module); run the module once on a batch "
                "before planning it"
            )


def _kind(module: Any) -> str:
    """The type of a module; for those of linear layers and tables, the one of PyTorch."""
    nn = importlib.import_module("torch.nn")
    kind = next((k for k in (nn.Linear, nn.Embedding) if isinstance(module, k)), type(module))
    return str(kind.__name__)


def _other_tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """The buffers of a module, and tensors that are attributes only."""
    tensor = importlib.import_module("torch").Tensor
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, tensor):
                yield f"{path}.{name}" if path else name, value


class _ExampleBatch:
    """Example arguments: pytrees with tensors and static leaves."""

    def __init__(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        found, self._tree = jax.tree.flatten((arguments, dict(keywords)))
        self._static = dict(enumerate(found))
        self._places = [n for n, leaf in enumerate(found) if hasattr(leaf, "shape")]
        #: The shape and element type of each tensor, in order.
        self.types = [_leaf_type(self._static.pop(n)) for n in self._places]
        self._arguments, self._keywords = arguments, keywords

    def tensors(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments and keywords with ``leaves`` in the places of tensors."""
        every = {**self._static, **dict(zip(self._places, leaves, strict=True))}
        arguments, keywords = jax.tree.unflatten(self._tree, [every[n] for n in sorted(every)])
        return arguments, keywords

    def leaves_of(self, positions: set[int], name: str) -> list[int]:
        """The numbers of the tensors of positional arguments."""
        for position in positions:
            if not isinstance(position, int) or not 0 <= position < len(self._arguments):
                raise TargetError(
                    f"{name}: donate={position!r}: use positions of arguments of the batch; the "
                    "arrays that a train step updates are donated already"
                )
        starts = [0]
        for argument in self._arguments:
            starts.append(starts[-1] + len(jax.tree.leaves(argument)))
        own = {n for p in positions for n in range(starts[p], starts[p + 1])}
        return [number for number, place in enumerate(self._places) if place in own]

    def paths(self, function: Callable[..., Any], *, skipped: int, used: set[str]) -> list[str]:
        """The path of each tensor: the parameter of ``function``, and keys inside it.

        The first ``skipped`` parameters are not of the batch; paths in ``used`` are taken.
        """
        names = [f"args[{n}]" for n in range(len(self._arguments))]
        try:
            kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            parameters = inspect.signature(function).parameters.values()
            positional = [p.name for p in parameters if p.kind in kinds][skipped:]
            names[: len(positional)] = positional[: len(names)]
        except (TypeError, ValueError):  # no signature
            pass
        paths = []
        for keys, _ in jax.tree_util.tree_flatten_with_path(
            (dict(enumerate(self._arguments)), dict(self._keywords))
        )[0]:
            own = names[keys[1].key] if keys[0].idx == 0 else keys[1].key
            paths.append(own + jax.tree_util.keystr(keys[2:]))
        own_paths = [paths[n] for n in self._places]
        return [f"batch.{path}" if path in used else path for path in own_paths]


def _leaf_type(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, importlib.import_module("torch").Tensor):
        return jax_type(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


class _Step:
    """The JAX function of a forward pass or a train step."""

    def __init__(self, name: str, target: Any, state: _ModuleState, batch: _ExampleBatch) -> None:
        self._name, self._target, self._state, self._batch = name, target, state, batch
        self._training = isinstance(target, TrainStep)
        self._optimizer: Any = target.optimizer if self._training else None
        #: The parameter of each state of the optimizer, by path.
        self.states: dict[str, str] = {}
        #: The paths of the results; a trace sets them.  Empty for those of JAX.
        self.results: list[str] = []

    def function(
        self, parameters: _Tensors, buffers: _Tensors, states: _Tensors, *leaves: Any
    ) -> Any:
        """The results of the step, for its tensors by name and the tensors of a batch."""
        model = self._target.model if self._training else self._target
        with located_errors(self._name, model):
            if not self._training:
                return self._called(parameters, buffers, leaves)[0]
            return self._trained(parameters, buffers, states, leaves)

    def _called(
        self, parameters: _Tensors, buffers: _Tensors, leaves: Sequence[Any]
    ) -> tuple[Any, _Tensors]:
        """The results of the module or the loss, and the buffers after it."""
        loaded = environment()
        with torch_ops():
            tensors = loaded.j2t_iso({**parameters, **buffers})
            arguments, keywords = self._batch.tensors([loaded.j2t_iso(leaf) for leaf in leaves])
            if self._training:
                result = _with_loss(self._target, tensors, arguments, keywords)
            else:
                result = _functional_call(self._target, tensors, arguments, keywords)
            result = loaded.t2j_iso(loaded.v2t_iso(result))
        return result, {name: tensors[name].jax() for name in buffers}

    def _trained(
        self, parameters: _Tensors, buffers: _Tensors, states: _Tensors, leaves: Sequence[Any]
    ) -> tuple[Any, ...]:
        trained = {n: p for n, p in parameters.items() if n in self._state.trained}

        def loss(trained: _Tensors) -> tuple[Any, _Tensors]:
            value, after = self._called({**parameters, **trained}, buffers, leaves)
            self._check_scalar(value)
            return value.reshape(()), after

        (value, buffers), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
        if self._optimizer is None:
            paths = [f"{name}.grad" for name in sorted(gradients)]
            self.results = [*paths, *sorted(buffers), "loss"]
            return gradients, buffers, value
        parameters, states = self._updated(parameters, gradients, states)
        # JAX pairs donated arguments with results of their type in order.
        self.results = [*sorted(parameters), *sorted(buffers), *sorted(states), "loss"]
        return parameters, buffers, states, value

    def _check_scalar(self, value: Any) -> None:
        shape = getattr(value, "shape", None)
        if shape is None or getattr(value, "size", 0) != 1:
            what = type(value).__name__ if shape is None else f"a tensor of shape {tuple(shape)}"
            raise TargetError(
                f"{self._name}: the loss is {what}, not a scalar; return one number, such as "
                "loss.mean()"
            )

    # -- the optimizer -------------------------------------------------------------------------

    def optimizer_types(self) -> dict[str, Any]:
        """The types of the states of the optimizer after the first step, by path.

        The step runs on the meta device.
        """
        if self._optimizer is None:
            return {}
        torch = importlib.import_module("torch")
        names = self._state.names_by_id()
        stand_ins = {
            names[id(p)]: torch.nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
            for group in self._optimizer.param_groups for p in group["params"]
        }  # fmt: skip
        for stand_in in stand_ins.values():
            if stand_in.requires_grad:
                stand_in.grad = torch.empty_like(stand_in)
        groups = self._optimizer.param_groups
        clone = self._clone(
            [(group, [stand_ins[names[id(p)]] for p in group["params"]]) for group in groups],
            capturable=False,
        )
        with optimizer_errors(self._name, clone):
            _step_of(clone)
        types = {}
        counted = {names[id(p)] for g in groups if _counts_on_host(g) for p in g["params"]}
        for name, stand_in in stand_ins.items():
            for key, value in clone.state.get(stand_in, {}).items():
                if isinstance(value, torch.Tensor) and not (name in counted and value.ndim == 0):
                    path = f"optimizer.{name}.{key}"
                    types[path], self.states[path] = jax_type(value), name
        return types

    def _updated(
        self, parameters: _Tensors, gradients: _Tensors, states: _Tensors
    ) -> tuple[_Tensors, _Tensors]:
        """The parameters and states after the optimizer's step."""
        own: dict[str, _Tensors] = {name: {} for name in parameters}
        for path, value in states.items():
            own[self.states[path]][path.rpartition(".")[2]] = value
        names = self._state.names_by_id()
        new, new_states = dict(parameters), dict(states)
        for group in self._optimizer.param_groups:
            members = [names[id(p)] for p in group["params"]]
            members = [name for name in members if name in gradients]
            update = jax.jit(functools.partial(self._update, group))
            # Parameters of equal types are traced once, if one's update does not read another's.
            for part in [[name] for name in members] if self._is_separable() else [members]:
                results = update(
                    *([tree[n] for n in part] for tree in (parameters, gradients, own))
                )
                for name, parameter, state in zip(part, *results, strict=True):
                    new[name] = parameter
                    new_states |= {f"optimizer.{name}.{key}": v for key, v in state.items()}
        return new, new_states

    def _is_separable(self) -> bool:
        """Whether the optimizer updates each parameter by itself, as those of PyTorch do."""
        return bool(type(self._optimizer).__module__.startswith("torch.optim."))

    def _update(
        self,
        group: Mapping[str, Any],
        parameters: list[Any],
        gradients: list[Any],
        states: list[_Tensors],
    ) -> tuple[list[Any], list[_Tensors]]:
        """Some parameters of a group and their states after the optimizer's step."""
        loaded = environment()
        with torch_ops():
            tensors = [loaded.j2t_iso(parameter) for parameter in parameters]
            for tensor, gradient in zip(tensors, gradients, strict=True):
                tensor.grad = loaded.j2t_iso(gradient)
            own = [loaded.j2t_iso(dict(state)) for state in states]
            clone = self._clone([(group, tensors)], capturable=True)
            if _counts_on_host(group):
                own = [{"step": importlib.import_module("torch").tensor(1.0), **s} for s in own]
            clone.state.update(zip(tensors, own, strict=True))
            with optimizer_errors(self._name, clone):
                _step_of(clone)
            after = [
                {key: clone.state[tensor][key].jax() for key in state}
                for tensor, state in zip(tensors, states, strict=True)
            ]
            return [tensor.jax() for tensor in tensors], after

    def _clone(
        self, groups: Sequence[tuple[Mapping[str, Any], list[Any]]], *, capturable: bool
    ) -> Any:
        """The optimizer with other tensors in its groups, and without states.

        One that is capturable keeps its counts in tensors.
        """
        clone = copy.copy(self._optimizer)
        clone.param_groups = [
            {
                **group,
                "params": tensors,
                **{key: False for key in ("foreach", "fused") if key in group},
                **({"capturable": capturable} if "capturable" in group else {}),
            }
            for group, tensors in groups
        ]
        clone.state = collections.defaultdict(dict)
        return clone


def _counts_on_host(group: Mapping[str, Any]) -> bool:
    """Whether an optimizer must read its count of steps, so that it is no array of the program."""
    return "capturable" not in group


def _step_of(optimizer: Any) -> None:
    """The step of an optimizer, without its hooks."""
    torch = importlib.import_module("torch")
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)


def _functional_call(
    model: Any, tensors: _Tensors, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Any:
    call = importlib.import_module("torch.func").functional_call
    return call(model, tensors, arguments, dict(keywords))


def _with_loss(
    step: TrainStep, tensors: _Tensors, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Any:
    """The loss of a step whose model has other tensors."""
    torch = importlib.import_module("torch")

    class WithLoss(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = step.model

        def forward(self, *arguments: Any, **keywords: Any) -> Any:
            return step.loss(self.model, *arguments, **keywords)

    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    return _functional_call(WithLoss(), named, arguments, keywords)


__all__ = ["TorchCalling", "from_target", "renamed"]
