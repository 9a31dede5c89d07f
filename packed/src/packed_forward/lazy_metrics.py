"""Metrics that stay on the device until they are logged: `.item()` queues a read, and one transfer fetches them all.

TRL's losses read some fifteen numbers from the device in every micro-step, and each of these reads waits until the
device has finished. Here the loss runs as it is; what its `gather` returns only remembers what is done with it.
"""

from __future__ import annotations

import contextlib
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import Trainer

Number = int | float


class LazyScalar:
    """Python number that is not known yet. Arithmetic with it is recorded and done in Python later, as TRL does it."""

    def __init__(
        self,
        pending: LazyMetrics,
        tensor: Callable[[], torch.Tensor] | None = None,
        how: Callable[..., Number] | None = None,
        inputs: tuple[Number | LazyScalar, ...] = (),
    ) -> None:
        self.pending, self.tensor, self.how, self.inputs = pending, tensor, how, inputs
        self.value: Number | None = None
        self.assumed_positive = False
        """True if a comparison with 0 was answered with yes; division by it then gives 0.0 where that is
        wrong."""
        self.divides = False
        pending.entries.append(self)

    def resolve(self) -> Number:
        """The value; fetches everything queued so far if need be."""
        if self.value is None:
            self.pending.read()
        assert self.value is not None
        return self.value

    def _combine(self, how: Callable[..., Number], *inputs: Number | LazyScalar) -> LazyScalar:
        return LazyScalar(self.pending, how=how, inputs=inputs)

    def __add__(self, other: Number | LazyScalar) -> LazyScalar:
        return self._combine(operator.add, self, other)

    def __radd__(self, other: Number | LazyScalar) -> LazyScalar:
        return self._combine(operator.add, other, self)

    def __sub__(self, other: Number | LazyScalar) -> LazyScalar:
        return self._combine(operator.sub, self, other)

    def __mul__(self, other: Number | LazyScalar) -> LazyScalar:
        return self._combine(operator.mul, self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Number | LazyScalar) -> LazyScalar:
        if isinstance(other, LazyScalar) and other.assumed_positive:
            other.divides = True
            return self._combine(lambda a, b: a / b if b > 0 else 0.0, self, other)
        return self._combine(operator.truediv, self, other)

    def __floordiv__(self, other: Number | LazyScalar) -> LazyScalar:
        return self._combine(operator.floordiv, self, other)

    def __gt__(self, other: Number) -> bool | _AboveZero:
        return _AboveZero(self) if other == 0 and self.value is None else self.resolve() > other

    def __float__(self) -> float:
        return float(self.resolve())

    def __int__(self) -> int:
        return int(self.resolve())

    def __bool__(self) -> bool:
        return bool(self.resolve())


class LazyTensor:
    """Tensor of which only numbers are needed: operations on it run when the numbers are read.

    Knows what TRL does between gathering and reading (`sum`, `mean`, a quotient, a comparison with 0, slices and
    masks); anything else is given the tensor itself.
    """

    def __init__(self, pending: LazyMetrics, make: Callable[[], torch.Tensor]) -> None:
        self.pending, self.make = pending, make
        self.assumed_positive = False

    def _map(self, what: Callable[[torch.Tensor], torch.Tensor]) -> LazyTensor:
        return LazyTensor(self.pending, lambda: what(self.make()))

    def sum(self) -> LazyTensor:
        return self._map(torch.sum)

    def mean(self) -> LazyTensor:
        return self._map(torch.mean)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[LazyTensor, ...]:
        def part(number: int) -> LazyTensor:
            return self._map(lambda tensor: tensor.chunk(chunks, dim=dim)[number])

        return tuple(part(number) for number in range(chunks))

    def __getitem__(self, index: int | slice | torch.Tensor) -> LazyTensor:
        # a mask of booleans would wait for the device to count what it selects
        return self._map(lambda tensor: tensor[index])

    def __truediv__(self, other: Number | torch.Tensor | LazyTensor) -> LazyTensor:
        if not isinstance(other, LazyTensor):
            return self._map(lambda tensor: tensor / other)
        if not other.assumed_positive:
            return LazyTensor(self.pending, lambda: self.make() / other.make())

        def quotient() -> torch.Tensor:
            below = other.make()
            found = self.make() / below
            return torch.where(below > 0, found, torch.zeros_like(found))

        return LazyTensor(self.pending, quotient)

    def __gt__(self, other: Number) -> torch.Tensor | _AboveZero:
        return _AboveZero(self) if other == 0 else self.make() > other

    def item(self) -> LazyScalar:
        return LazyScalar(self.pending, tensor=self.make)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.make(), name)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        plain = [arg.make() if isinstance(arg, LazyTensor) else arg for arg in args]
        return function(*plain, **(kwargs or {}))


class _AboveZero:
    """Result of `count > 0` before the count is known: true, and a division by the count gives 0.0 where it was
    wrong."""

    def __init__(self, of: LazyScalar | LazyTensor) -> None:
        self.of = of

    def __bool__(self) -> bool:
        self.of.assumed_positive = True
        return True


class LazyMetrics:
    """Queue of numbers to read from the device, in the order of the requests."""

    def __init__(self, processes: int = 1) -> None:
        self.processes = processes
        self.entries: list[LazyScalar] = []
        self.transfers = 0
        """Transfers made so far, one for each type of number in each reading."""

    def wrap(self, tensor: torch.Tensor) -> LazyTensor:
        tensor = tensor.detach()
        return LazyTensor(self, lambda: tensor)

    @contextlib.contextmanager
    def gather_on_device(self, trainer: Trainer) -> Iterator[None]:
        """Inside, what the trainer's accelerator gathers (at once, as ever) is kept on the device."""
        accelerator = trainer.accelerator
        trainer.accelerator = LazyAccelerator(self, accelerator)
        try:
            yield
        finally:
            trainer.accelerator = accelerator

    def read(self) -> None:
        """Fetch and compute everything queued, with one transfer for each type of number there is."""
        entries, self.entries = self.entries, []
        by_type: dict[torch.dtype, list[tuple[LazyScalar, torch.Tensor]]] = defaultdict(list)
        for entry in entries:
            if entry.tensor is not None:
                made = entry.tensor().reshape(())
                by_type[made.dtype].append((entry, made))
        for group in by_type.values():
            self.transfers += 1
            values = torch.stack([made for _, made in group]).tolist()
            for (entry, _), value in zip(group, values, strict=True):
                entry.value = value
        for entry in entries:
            if entry.how is not None:
                entry.value = entry.how(*(_value(part) for part in entry.inputs))
            entry.tensor, entry.how, entry.inputs = None, None, ()
        for entry in entries:
            if entry.assumed_positive and not entry.divides and _value(entry) <= 0:
                raise RuntimeError(
                    f"a count was taken to be above 0 before it was read, and is {entry.value}; read metrics at once "
                    "instead (defer_metrics = False)"
                )


def _value(part: Number | LazyScalar) -> Number:
    return part.resolve() if isinstance(part, LazyScalar) else part


class LazyAccelerator:
    """Accelerator whose gathered tensors stay on the device."""

    def __init__(self, pending: LazyMetrics, accelerator: Accelerator) -> None:
        self._pending, self._accelerator = pending, accelerator

    def gather(self, tensor: torch.Tensor) -> LazyTensor:
        return self._wrap(self._accelerator.gather, tensor)

    def gather_for_metrics(self, tensor: torch.Tensor) -> LazyTensor:
        return self._wrap(self._accelerator.gather_for_metrics, tensor)

    def _wrap(self, gather: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> LazyTensor:
        if not isinstance(tensor, LazyTensor):
            return self._pending.wrap(gather(tensor.detach()))
        if self._pending.processes == 1:
            return tensor
        return self._pending.wrap(gather(tensor.make()))  # all processes meet here, so it is made now

    def __getattr__(self, name: str) -> object:
        return getattr(self._accelerator, name)
