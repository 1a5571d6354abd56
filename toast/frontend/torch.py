"""PyTorch modules and train steps as targets of :func:`toast.plan`.

Needs the extra ``torch``; nothing here imports PyTorch before it is used::

    step = TrainStep(model, loss, torch.optim.AdamW(model.parameters()))
    plan = toast.plan(step, tokens, targets, mesh="data=4,model=2", hardware="h100")
    plan.to_torch().placements  # {"layers.0.attention.wq.weight": (Shard(0), Replicate()), ...}

``toast.plan(model, tokens, ...)`` plans the forward pass of a module.  The parameters may be on the
meta device: only shapes are read.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from toast.errors import TargetError


@dataclasses.dataclass(frozen=True, eq=False)
class TrainStep:
    """A train step: forward and backward pass, and the update by an optimizer.

    Called with a batch, it trains the model in PyTorch and returns the loss; :func:`toast.plan`
    reads it at an example batch.  The plan includes the optimizer's state as it is after the first
    step.

    :raises toast.errors.TargetError: if an argument has another type, or the optimizer updates
        parameters that the model does not have.
    """

    #: The ``torch.nn.Module``, in training or evaluation mode.
    model: Any
    #: ``loss(model, *batch)`` calls the model and returns a scalar.
    loss: Callable[..., Any]
    #: The ``torch.optim.Optimizer`` of parameters of the model; without one, the step returns
    #: gradients.
    optimizer: Any = None

    def __post_init__(self) -> None:
        torch = import_torch()
        if not isinstance(self.model, torch.nn.Module):
            raise TargetError(
                f"model: a {type(self.model).__name__} is not a torch.nn.Module; pass the module"
            )
        if not callable(self.loss):
            raise TargetError(
                f"loss: a {type(self.loss).__name__} is not a function; write loss(model, *batch)"
            )
        if self.optimizer is None:
            return
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TargetError(
                f"optimizer: a {type(self.optimizer).__name__} is not a torch.optim.Optimizer; "
                "pass one such as torch.optim.AdamW(model.parameters())"
            )
        own = {id(parameter) for parameter in self.model.parameters()}
        updated = (p for group in self.optimizer.param_groups for p in group["params"])
        if any(id(parameter) not in own for parameter in updated):
            raise TargetError(
                "optimizer: it updates a parameter that the model does not have; make the "
                "optimizer from model.parameters(), after the last change of the model"
            )

    @property
    def __name__(self) -> str:
        return type(self.model).__name__

    def __call__(self, *batch: Any, **keywords: Any) -> Any:
        """Train one step in PyTorch; the result is the loss, detached."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        value = self.loss(self.model, *batch, **keywords)
        value.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        return value.detach()


def import_torch() -> Any:
    """The module ``torch``.

    Raises :class:`toast.errors.TargetError` if PyTorch is not installed.
    """
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise TargetError(
            f"PyTorch cannot be imported ({error}); install it by "
            "pip install 'toast-partitioner[torch]'"
        ) from None


__all__ = ["TrainStep", "import_torch"]
