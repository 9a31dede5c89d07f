"""Metrics read when they are logged: a trainer's `.item()` notes down what to read, and one transfer fetches it all.

TRL's losses read some fifteen numbers from the device in every micro-step, and each of these reads waits until the
device has finished. Here the loss runs as it is; what its `gather` returns only remembers what is done with it.
"""

from __future__ import annotations

import contextlib
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

Number = int | float


class Later:
    """A Python number that is not known yet. Arithmetic with it is noted down and done in Python, as TRL does it."""

    def __init__(
        self,
        ledger: Ledger,
        tensor: Callable[[], torch.Tensor] | None = None,
        how: Callable[..., Number] | None = None,
        inputs: tuple[Any, ...] = (),
    ) -> None:
        self.ledger, self.tensor, self.how, self.inputs = ledger, tensor, how, inputs
        self.value: Number | None = None
        self.taken_positive = False
        """TRL asked whether it is above 0 and was told yes; division by it then gives 0.0 where it is not."""
        self.divides = False
        ledger.entries.append(self)

    def known(self) -> Number:
        """Its value; fetches all that is noted so far if need be."""
        if self.value is None:
            self.ledger.read()
        assert self.value is not None
        return self.value

    def _with(self, how: Callable[..., Number], *inputs: Any) -> Later:
        return Later(self.ledger, how=how, inputs=inputs)

    def __add__(self, other: Any) -> Later:
        return self._with(operator.add, self, other)

    def __radd__(self, other: Any) -> Later:
        return self._with(operator.add, other, self)

    def __sub__(self, other: Any) -> Later:
        return self._with(operator.sub, self, other)

    def __mul__(self, other: Any) -> Later:
        return self._with(operator.mul, self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Later:
        if isinstance(other, Later) and other.taken_positive:
            other.divides = True
            return self._with(lambda a, b: a / b if b > 0 else 0.0, self, other)
        return self._with(operator.truediv, self, other)

    def __floordiv__(self, other: Any) -> Later:
        return self._with(operator.floordiv, self, other)

    def __gt__(self, other: Any) -> Any:
        return _AboveZero(self) if other == 0 and self.value is None else self.known() > other

    def __float__(self) -> float:
        return float(self.known())

    def __int__(self) -> int:
        return int(self.known())

    def __bool__(self) -> bool:
        return bool(self.known())


class Kept:
    """A tensor of which only numbers are wanted: what is done with it is done when they are read.

    Knows what TRL does between gathering and reading (`sum`, `mean`, a quotient, a comparison with 0, slices and
    masks); anything else is given the tensor itself.
    """

    def __init__(self, ledger: Ledger, make: Callable[[], torch.Tensor]) -> None:
        self.ledger, self.make = ledger, make
        self.taken_positive = False

    def _then(self, what: Callable[[torch.Tensor], torch.Tensor]) -> Kept:
        return Kept(self.ledger, lambda: what(self.make()))

    def sum(self) -> Kept:
        return self._then(torch.sum)

    def mean(self) -> Kept:
        return self._then(torch.mean)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Kept, ...]:
        def part(number: int) -> Kept:
            return self._then(lambda tensor: tensor.chunk(chunks, dim=dim)[number])

        return tuple(part(number) for number in range(chunks))

    def __getitem__(self, index: Any) -> Kept:
        # a mask of booleans would wait for the device to count what it selects
        return self._then(lambda tensor: tensor[index])

    def __truediv__(self, other: Any) -> Kept:
        if not isinstance(other, Kept):
            return self._then(lambda tensor: tensor / other)
        if not other.taken_positive:
            return Kept(self.ledger, lambda: self.make() / other.make())

        def quotient() -> torch.Tensor:
            below = other.make()
            found = self.make() / below
            return torch.where(below > 0, found, torch.zeros_like(found))

        return Kept(self.ledger, quotient)

    def __gt__(self, other: Any) -> Any:
        return _AboveZero(self) if other == 0 else self.make() > other

    def item(self) -> Later:
        return Later(self.ledger, tensor=self.make)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.make(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain = [arg.make() if isinstance(arg, Kept) else arg for arg in args]
        return function(*plain, **(kwargs or {}))


class _AboveZero:
    """The answer to `count > 0` before the count is known: yes, and a quotient by it will mind that it may be no."""

    def __init__(self, of: Later | Kept) -> None:
        self.of = of

    def __bool__(self) -> bool:
        self.of.taken_positive = True
        return True


class Ledger:
    """What is to be read from the device, in the order in which it was asked for."""

    def __init__(self, processes: int = 1) -> None:
        self.processes = processes
        self.entries: list[Later] = []
        self.transfers = 0
        """Transfers made so far, one for each type of number in each reading."""

    def keep(self, tensor: torch.Tensor) -> Kept:
        tensor = tensor.detach()
        return Kept(self, lambda: tensor)

    @contextlib.contextmanager
    def gathering(self, trainer: Any) -> Iterator[None]:
        """Inside, what the trainer's accelerator gathers (at once, as ever) is kept on the device."""
        accelerator = trainer.accelerator
        trainer.accelerator = Gathering(self, accelerator)
        try:
            yield
        finally:
            trainer.accelerator = accelerator

    def read(self) -> None:
        """Fetch and compute all that is noted, with one transfer for each type of number there is."""
        entries, self.entries = self.entries, []
        by_type: dict[torch.dtype, list[tuple[Later, torch.Tensor]]] = defaultdict(list)
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
            if entry.taken_positive and not entry.divides and _value(entry) <= 0:
                raise RuntimeError(
                    f"a count was taken to be above 0 before it was read, and is {entry.value}; read metrics at once "
                    "instead (later_metrics = False)"
                )


def _value(part: Any) -> Any:
    return part.known() if isinstance(part, Later) else part


class Gathering:
    """An accelerator whose gathered tensors are kept rather than read."""

    def __init__(self, ledger: Ledger, accelerator: Any) -> None:
        self._ledger, self._accelerator = ledger, accelerator

    def gather(self, found: Any) -> Kept:
        return self._kept(self._accelerator.gather, found)

    def gather_for_metrics(self, found: Any) -> Kept:
        return self._kept(self._accelerator.gather_for_metrics, found)

    def _kept(self, gather: Callable[[torch.Tensor], torch.Tensor], found: Any) -> Kept:
        if not isinstance(found, Kept):
            return self._ledger.keep(gather(found.detach()))
        if self._ledger.processes == 1:
            return found
        return self._ledger.keep(gather(found.make()))  # all processes meet here, so it is made now

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)
