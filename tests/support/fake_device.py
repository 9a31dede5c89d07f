"""A second device made of the CPU, to run what is written for a GPU where there is none.

Its tensors compute on the CPU and say that they are elsewhere. What CUDA refuses is refused here: arithmetic between
two devices, a generator of the other device, numpy; and float64, which Apple's GPUs have not.

`install()` renames PyTorch's spare device for the whole process, so programs that use it have one of their own.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "elsewhere"

BETWEEN = {"_to_copy", "copy_", "_copy_from"}
"""Operations that may see both devices."""

INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
"""Operations whose indices may be on the CPU."""


class Elsewhere(torch.Tensor):
    """A CPU tensor, `inner`, that says it is elsewhere."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Elsewhere:
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device(NAME, 0),
            requires_grad=False,
        )
        made.inner = inner
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Elsewhere({self.inner!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.Tensor.__reduce_ex__(self.inner, protocol)

    def storage(self) -> Any:
        """Asked for when tensors are saved, to find those that share memory."""
        return self.inner.storage()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operation on the CPU, and wrap its results if it belongs elsewhere."""
    name = func.overloadpacket.__name__
    there, here = devices(name, args, kwargs)
    wanted = kwargs.get("device")
    made_there = wanted is not None and torch.device(wanted).type == NAME
    if there and here and name not in BETWEEN:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu! "
            f"(in {func})"
        )
    belongs = bool(made_there or (there and (wanted is None or name not in BETWEEN)))
    if name == "copy_":
        belongs = isinstance(args[0], Elsewhere)
    generator = kwargs.get("generator")
    if generator is not None and (generator._cdata in Generator.known) != belongs:
        raise RuntimeError(f"Expected a '{NAME if belongs else 'cpu'}' device type for generator (in {func})")
    inner_args, inner_kwargs = (
        mapped(Elsewhere, lambda t: t.inner, args),
        mapped(Elsewhere, lambda t: t.inner, kwargs),
    )
    if made_there:
        inner_kwargs["device"] = torch.device("cpu")
    if name == "_to_copy" and (made_there or there):
        inner_kwargs.pop("non_blocking", None)
    out = func(*inner_args, **inner_kwargs)
    if name == "_to_copy" and isinstance(out, torch.Tensor) and out is inner_args[0]:
        out = out.clone()
    if not belongs:
        return out
    if any(tensor.dtype == torch.float64 for tensor in tensors_of(out)):
        raise TypeError(f"{NAME} knows no float64 (in {func})")
    out = mapped(torch.Tensor, Elsewhere, out)
    return return_and_correct_aliasing(func, args, kwargs, out) if there and aliases(func) else out


@functools.cache
def aliases(func: Any) -> bool:
    """Whether an operation returns an input or a view of one."""
    return any(returned.alias_info is not None for returned in func._schema.returns)


def mapped(kind: type, change: Callable[[Any], Any], value: Any) -> Any:
    """`value` with what is of a kind changed, in sequences and dictionaries too: PyTorch's own takes longer than what
    the operations compute."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(kind, change, inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        changed = [mapped(kind, change, inner) for inner in value]
        return changed if isinstance(value, list) else tuple(changed)
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Tensors in sequences and dictionaries."""
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in inner for tensor in tensors_of(part)]


def devices(name: str, args: Any, kwargs: Any) -> tuple[bool, bool]:
    """Whether tensors from elsewhere, and tensors from the CPU that may not stand beside them, are among the inputs."""
    if name in INDEXED:
        args = [args[0], *args[2:]]
    tensors = [*tensors_of(args), *tensors_of(kwargs)]
    there = any(isinstance(tensor, Elsewhere) for tensor in tensors)
    # a single number may come from the CPU
    return there, any(not isinstance(tensor, Elsewhere) and tensor.ndim > 0 for tensor in tensors)


class Creating(TorchDispatchMode):
    """Makes tensors elsewhere where a program asks for that device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


class Generator(torch.Generator):
    """A generator of random numbers that knows which device it is for."""

    there: bool
    known: ClassVar[dict[int, Generator]] = {}
    """Those for elsewhere, by the address that an operation sees them under; kept, so that none is used again."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        made: Generator = super().__new__(cls, "cpu")
        made.there = torch.device(device).type == NAME
        if made.there:
            cls.known[made._cdata] = made
        return made

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0) if self.there else torch.device("cpu")


def install() -> Creating:
    """Make the device known to PyTorch and accelerate; the mode returned must be entered before it is used."""
    import torch._dynamo  # it writes torch.Generator into its annotations

    _setup_privateuseone_for_python_backend(NAME)
    torch.elsewhere.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
    os.environ["ACCELERATE_TORCH_DEVICE"] = NAME
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor() makes its own here, and then moves it
    torch.Generator = Generator  # type: ignore[misc]
    torch.inference_mode = torch.no_grad  # type: ignore[misc,assignment]  # it knows no tensors but PyTorch's own
    return Creating()
