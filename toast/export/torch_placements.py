"""A plan as a Python module that needs PyTorch alone: DTensor placements and parallel styles."""

from __future__ import annotations

import re
from collections.abc import Mapping

from toast.errors import PlanError
from toast.export.exported_text import comments
from toast.export.python_module import ShardedArrays
from toast.plan import Plan
from toast.plan.torch_shardings import TorchShardings

#: What begins the line on something that PyTorch's words do not express.
_UNSAID = "cannot be said "

_HEAD = """
from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
{imports}
#: The axes of the mesh: neighbours of a rank are along the last one.
AXES = {axes}

#: The axes of the DeviceMesh, in the order of the placements.
ORDER = {order}

"""

_FUNCTIONS = '''
#: Plans for parallelize_module(model, make_mesh()[axis], PARALLELIZE_PLANS[axis]), by axis.
PARALLELIZE_PLANS: dict[str, dict[str, Any]] = {{{plans}}}


def make_mesh(device_type: str = "cuda") -> DeviceMesh:
    """The mesh of the plan, on all processes of the default group; a collective call."""
    sizes = list(AXES.values())
    ranks = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    ranks = ranks.permute([list(AXES).index(axis) for axis in ORDER])
    return DeviceMesh(device_type, ranks, mesh_dim_names=ORDER)


def placements_of(name: str) -> tuple[Any, ...]:
    """The placements of a parameter, a buffer or an input, for ``distribute_tensor``."""
    pattern = re.sub(r"(?<=\\.)\\d+(?=\\.|$)", "*", name)
    if name not in PLACEMENTS and pattern not in PLACEMENTS:
        raise ValueError(f"{{name}} is not in the plan; plan this module again")
    return PLACEMENTS.get(name) or PLACEMENTS[pattern]


def distribute(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Make the parameters and buffers of a model DTensors, in place; make its optimizer then.

    Values are those of rank 0; tensors on the meta device stay there.
    """
    new: dict[int, Any] = {{}}
    for path, module in model.named_modules():
        tensors = {{**module._parameters, **module._buffers}}
        tensors |= {{k: v for k, v in vars(module).items() if isinstance(v, torch.Tensor)}}
        for key, tensor in tensors.items():
            if tensor is None:
                continue
            if id(tensor) not in new:
                placed = placements_of(f"{{path}}.{{key}}" if path else key)
                rank = None if tensor.is_meta else 0
                value = distribute_tensor(tensor.detach(), mesh, placed, src_data_rank=rank)
                if isinstance(tensor, nn.Parameter):
                    value = nn.Parameter(value, tensor.requires_grad)
                new[id(tensor)] = value
            setattr(module, key, new[id(tensor)])
    return model
'''


def torch_module(plan: Plan) -> str:
    """The text of the module; raises :class:`toast.errors.PlanError` for a plan of a JAX function.

    Comments name the states of optimizers, and the parameters, that PyTorch shards otherwise.
    """
    shardings = plan.to_torch()
    if not shardings.owners:
        raise PlanError(
            "export to torch: the plan is not of a PyTorch module; plan a torch.nn.Module or a "
            "TrainStep, or export to python"
        )
    plans = {axis: shardings.parallelize_text(axis) for axis in shardings.axes}
    arrays = ShardedArrays.of(plan)
    placed = {
        name: f"({', '.join(of)}{',' * (len(of) == 1)})"
        for name, of in shardings.folded_text.items()
    }
    styles = [style for own in plans.values() for style in own.values()]
    return (
        _header(shardings, plans, arrays)
        + _HEAD.format(
            imports=_imports(" ".join((*placed.values(), *styles))),
            axes=repr(dict(plan.mesh.axes)), order=repr(shardings.axes),
        )
        + "#: The placements on ORDER, by name; * stands for list positions.\n"
        + f"PLACEMENTS: dict[str, tuple[Any, ...]] = {{{_rows(placed, 4)}}}\n"
        + _FUNCTIONS.format(plans=_rows(
            {axis: f"{{{_rows(own, 8)}    }}" for axis, own in plans.items() if own}, 4
        ))
    )  # fmt: skip


def _header(
    shardings: TorchShardings, plans: Mapping[str, Mapping[str, str]], arrays: ShardedArrays
) -> str:
    """Comments: what the module is, and what it cannot say."""
    unsaid = [f"{_UNSAID}by DTensors: {note}" for note in shardings.notes]
    for axis, own in plans.items():
        if own:
            notes = shardings.parallelize_notes(axis)
            unsaid += [f"{_UNSAID}by styles on {axis}: {note}" for note in notes]
        else:
            unsaid.append(
                f"{_UNSAID}by styles on {axis}: the plan shards no product of a layer on it; use "
                "fully_shard or distribute()"
            )
    return comments([
        f"DTensor placements of {arrays.program} on mesh {arrays.mesh} of {arrays.hardware}, "
        "written by toast export.",
        "They are those of parameters, buffers and inputs. The plan also shards "
        f"{arrays.ops} ops inside of the step, where DTensor chooses by itself.",
        *unsaid,
    ])  # fmt: skip


def _imports(used: str) -> str:
    """The imports of styles and placements in the text ``used``."""
    styles = sorted({*re.findall(r"\b(\w+Parallel|PrepareModule\w+)\(", used)})
    lines = []
    if "_StridedShard(" in used:
        lines.append("from torch.distributed.tensor.placement_types import _StridedShard\n")
    if styles:
        names = "".join(f"    {name},\n" for name in styles)
        lines.insert(0, f"from torch.distributed.tensor.parallel import (\n{names})\n")
    return "".join(lines)


def _rows(rows: Mapping[str, str], indent: int) -> str:
    """The rows of a dictionary, with their values as they are."""
    lines = "".join(f"{' ' * indent}{key!r}: {text},\n" for key, text in rows.items())
    return f"\n{lines}" if lines else ""


__all__ = ["torch_module"]
