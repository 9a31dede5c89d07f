"""`manage.py` for a launch of several processes, in arithmetic whose results can be compared: float32 on the CPU."""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "backend.settings")

# nothing is loaded in 4 bits here, and reading the library for it takes each process of a launch two seconds
sys.modules["bitsandbytes"] = None  # type: ignore[assignment]

if __name__ == "__main__":
    from django.core.management import execute_from_command_line

    from rl.training import hardware

    # on a processor quick with bfloat16 that would be chosen, and its sums depend on what stands in a batch
    hardware._cpu_dtype = lambda measured: ("float32", "a test")
    hardware._cpu_matmul_precision = lambda measured: ("highest", "a test")
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        from accelerate import PartialState
        from accelerate.utils import DistributedType

        begun = PartialState.__init__

        def as_on_gpus(self: Any, *arguments: Any, **knobs: Any) -> None:
            """accelerate shards what several GPUs train; told that these CPUs are such, it shards over gloo."""
            begun(self, *arguments, **knobs)
            if self.distributed_type == DistributedType.MULTI_CPU:
                self.distributed_type = DistributedType.MULTI_GPU

        PartialState.__init__ = as_on_gpus
    execute_from_command_line(sys.argv)
