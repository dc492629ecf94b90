"""How long the parts of a model take to the host and back, against what the bus allows: Qwen2.5-3B's shape on one GPU.

Weights are random, in float32 with two moments each, the layout of training with ``compute_dtype: bfloat16``; no folder
of weights is read. The bus is measured first, with pinned copies of one large block each way.

    python benchmarks/offload_gpu.py [--hardware cuda] [--layers 36] [--dtype float32] [--rounds 5] [--out FILE]

3.1 G parameters take 12 GiB and their moments 23 GiB of the device, and as much of pinned host memory. ``--layers``
makes the model smaller where that is not there. With ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`` the memory of
a part is mapped anew and not allocated. The times of memory that torch's allocator keeps are those of copies alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from drivetrain import Hardware, PluginConfig, resolve
from drivetrain_backend_common.host_memory import Shelf
from drivetrain_backend_fsdp import offload
from drivetrain_backend_fsdp.config import AdamWConfig
from drivetrain_backend_fsdp.optimizer import adamw

SHAPE = {
    "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_key_value_heads": 2,
    "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
BLOCK_BYTES = 2**30
GIB = 2**30


def build(hardware: Hardware, layers: int, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model, drawn on the device, after one step of the optimizer."""
    config = Qwen2Config(**SHAPE, num_hidden_layers=layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.to_empty(device=hardware.device()).tie_weights()
    hardware.seed(1)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    optimizer = adamw(model.named_parameters(), AdamWConfig(lr=1e-6))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def seconds(hardware: Hardware, work: Callable[[], Any]) -> float:
    """Wall time of some work, the device's included."""
    hardware.synchronize()
    start = time.perf_counter()
    work()
    hardware.synchronize()
    return time.perf_counter() - start


def bandwidth(hardware: Hardware, rounds: int) -> dict[str, float]:
    """Bytes a second of pinned copies: the median over the rounds, after one that does not count."""
    device = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=hardware.device())
    host = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=hardware.device_type != "cpu")
    ways = {"to the host": lambda: host.copy_(device, non_blocking=True),
            "to the device": lambda: device.copy_(host, non_blocking=True)}  # fmt: skip
    measured = {}
    for way, copy in ways.items():
        _, *taken = [seconds(hardware, copy) for _ in range(rounds + 1)]
        measured[way] = BLOCK_BYTES / statistics.median(taken)
    return measured


def round_trip(hardware: Hardware, put: Callable[[], Any], take: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Median seconds there and back, after one round that does not count."""
    _, *taken = [(seconds(hardware, put), seconds(hardware, take)) for _ in range(rounds + 1)]
    return statistics.median(there for there, _ in taken), statistics.median(back for _, back in taken)


def checksums(tensors: list[torch.Tensor]) -> list[int]:
    """Of the bits of each tensor."""
    kinds = {2: torch.int16, 4: torch.int32}
    return [int(tensor.view(kinds[tensor.element_size()]).sum()) for tensor in tensors]


def main() -> None:
    """Measure the bus, then each part and both together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="cuda")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="write the numbers there too, as JSON")
    arguments = parser.parse_args()
    hardware: Hardware = resolve("hardware", arguments.hardware)(PluginConfig(name=arguments.hardware))
    print(f"{hardware.device_name()}, torch {torch.__version__}, {arguments.layers} layers, {arguments.dtype}")
    bus = bandwidth(hardware, arguments.rounds)
    hardware.empty_cache()
    for way, rate in bus.items():
        print(f"pinned copies {way:<14} {rate / 1e9:8.2f} GB/s", flush=True)
    model, optimizer = build(hardware, arguments.layers, getattr(torch, arguments.dtype))
    report: dict[str, Any] = {"device": hardware.device_name(), "bus_bytes_per_s": bus, "parts": {}}
    both = ("parameters", "optimizer")
    for chosen in (both[:1], both[1:], both):
        tensors = [tensor for name in chosen for tensor in offload.part(name, model, optimizer)]
        nbytes, before = sum(tensor.nbytes for tensor in tensors), checksums(tensors)
        allowed = nbytes / bus["to the host"] + nbytes / bus["to the device"]
        shelves = offload.Shelves("actor", hardware)
        first = seconds(hardware, functools.partial(shelves.put, chosen, model, optimizer))
        left = hardware.memory().allocated
        shelves.take(chosen)
        freed = hardware.memory().allocated - left
        print(f"{' + '.join(chosen)}: {nbytes / GIB:.2f} GiB, {freed / GIB:.2f} GiB of the device freed; the bus "
              f"allows {allowed:.3f} s; the first time, with host memory to be pinned, {first:.2f} s")  # fmt: skip
        returned = round_trip(
            hardware, functools.partial(shelves.put, chosen, model, optimizer),
            functools.partial(shelves.take, chosen), arguments.rounds,
        )  # fmt: skip
        del shelves
        shelf = Shelf(hardware)
        cached = round_trip(hardware, functools.partial(shelf.put, tensors), shelf.take, arguments.rounds)
        del shelf
        for title, (there, back) in (("returned to the device", returned), ("kept by torch's allocator", cached)):
            print(f"  memory {title:<25}: to the host {there:.3f} s ({nbytes / there / 1e9:.1f} GB/s), back "
                  f"{back:.3f} s ({nbytes / back / 1e9:.1f} GB/s), round trip {there + back:.3f} s, "
                  f"{allowed / (there + back):.0%} of what the bus allows", flush=True)  # fmt: skip
        if checksums(tensors) != before:
            raise SystemExit(f"{chosen}: not every bit came back")
        report["parts"][" + ".join(chosen)] = {
            "bytes": nbytes, "freed_bytes": freed, "allowed_s": allowed, "first_s": first,
            "returned_s": returned, "cached_s": cached,
        }  # fmt: skip
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
