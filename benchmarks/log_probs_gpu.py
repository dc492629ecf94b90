"""Log-probabilities and entropies of tokens from hidden states on one GPU: time, memory and accuracy.

    python benchmarks/log_probs_gpu.py [--hidden 896 3584] [--tokens 16384] [--chunks 1024 2048 4096] [--out FILE]

Hidden states and the weight of an output layer are random and in bf16; logits have a standard deviation of 3.

- naive: all logits in bf16, log_softmax in float32, autograd;
- chunked and triton: the kernels of the backend fsdp, with chunks of so many tokens;
- liger: fused linear cross entropy of liger-kernel, losses of tokens, weight gradients summed in float32; it has no
  entropies;
- liger scaled: its fused linear scaled cross entropy, which has.

A time is the median of the repeats; a peak is what a contender takes beyond inputs, results and gradients included.
Gradients are those of hidden states and weight, and every token has a gradient of its own. Errors are the largest
difference from float64 over the largest number, for fewer tokens.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
from torch import Tensor

from drivetrain import DrivetrainError, resolve
from drivetrain.config import PluginConfig
from drivetrain_backend_common.log_probs import Head, token_log_probs
from drivetrain_backend_common.logit_kernels import logit_kernel

Outputs = tuple[Tensor, "Tensor | None"]
Contender = Callable[[Tensor, Tensor, Tensor, bool], Outputs]


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool) -> Outputs:
    logits = hidden @ weight.t()
    log_p = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1) if entropy else None


def ours(hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool, *, kernel: str, chunk: int) -> Outputs:
    return token_log_probs(
        hidden, targets, Head(weight=weight), temperature=1.0, chunk_tokens=chunk, entropy=entropy,
        kernel=logit_kernel(kernel, hidden.device),
    )  # fmt: skip


def liger(hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool) -> Outputs:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss = liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="none", accum_dtype=torch.float32)
    return -loss, None


def liger_scaled(hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool) -> Outputs:
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Function

    made = Function.apply(hidden, weight, targets, 1.0, -100, 1, entropy)
    return (-made[0], made[1]) if entropy else (-made, None)


def contenders(chunks: list[int]) -> dict[str, Contender]:
    made: dict[str, Contender] = {"naive": naive}
    for kernel in ("chunked", "triton"):
        made |= {f"{kernel}, {chunk:,}": functools.partial(ours, kernel=kernel, chunk=chunk) for chunk in chunks}
    if importlib.util.find_spec("liger_kernel") is not None:
        made |= {"liger": liger, "liger scaled": liger_scaled}
    return made


def inputs(tokens: int, hidden: int, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and targets."""
    draw = torch.Generator(device).manual_seed(0)
    states = torch.randn(tokens, hidden, generator=draw, device=device).bfloat16().requires_grad_()
    weight = (3 * hidden**-0.5 * torch.randn(vocabulary, hidden, generator=draw, device=device)).bfloat16()
    targets = torch.randint(vocabulary, (tokens,), generator=draw, device=device)
    return states, weight.requires_grad_(), targets


def forward(contender: Contender, given: tuple[Tensor, Tensor, Tensor], entropy: bool) -> Outputs:
    with torch.no_grad():
        return contender(*given, entropy)


def both(
    contender: Contender, given: tuple[Tensor, Tensor, Tensor], entropy: bool
) -> tuple[Outputs, tuple[Tensor, ...]]:
    """Outputs and the gradients of hidden states and weight."""
    log_probs, entropies = contender(*given, entropy)
    slopes = torch.linspace(-1, 2, len(log_probs), device=log_probs.device)
    loss = (log_probs * slopes).sum()
    if entropies is not None:
        loss = loss + 0.1 * (entropies * slopes.flip(0)).sum()
    return (log_probs, entropies), torch.autograd.grad(loss, given[:2])


def measure(hardware: Any, work: Callable[[], Any], repeats: int) -> tuple[float, int]:
    """Median seconds and peak bytes, after one call that does not count."""
    work()
    hardware.synchronize()
    before, spent = hardware.memory().allocated, []
    hardware.reset_peak()
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        hardware.synchronize()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent), hardware.memory().peak - before


def error(got: Tensor | None, want: Tensor | None) -> str:
    if got is None or want is None:
        return ""
    got, want = got.detach().double(), want.detach()
    return f"{float((got - want).abs().max() / want.abs().max()):.1e}"


def row(name: str, cells: int, work: Callable[[], list[str]], hardware: Any) -> list[str]:
    """The cells of a contender, or why it has none."""
    try:
        return [name, *work()]
    except (RuntimeError, ImportError, DrivetrainError) as failure:
        return [name, str(failure).splitlines()[0], *[""] * (cells - 1)]
    finally:
        gc.collect()
        hardware.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", nargs="+", type=int, default=[896, 3584])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--chunks", nargs="+", type=int, default=[1024, 2048, 4096])
    parser.add_argument("--error-tokens", type=int, default=512, help="tokens of the comparison with float64")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hardware", default="cuda")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    hardware = resolve("hardware", given.hardware)(PluginConfig(name=given.hardware))
    device, entrants = hardware.device(), contenders(given.chunks)
    packages = [name for name in ("torch", "triton", "liger_kernel") if importlib.util.find_spec(name)]
    command = ["--hidden", *map(str, given.hidden), "--tokens", str(given.tokens), "--vocabulary",
               str(given.vocabulary), "--chunks", *map(str, given.chunks)]  # fmt: skip
    lines = machine.head("Log-probabilities and entropies on one GPU", {
        "device": hardware.device_name(), "versions": machine.versions(*packages),
        "work": f"{given.tokens:,} tokens, a vocabulary of {given.vocabulary:,}, bf16",
    }, command)  # fmt: skip
    print("\n".join(lines), flush=True)

    def emit(part: list[str]) -> None:
        print("\n" + "\n".join(part), flush=True)
        lines.extend(["", *part])

    for hidden in given.hidden:
        for entropy in (False, True):
            data = inputs(given.tokens, hidden, given.vocabulary, device)
            rows = []
            for name, contender in entrants.items():
                if name == "liger" and entropy:
                    continue

                def timed(contender: Contender = contender, data: Any = data, entropy: bool = entropy) -> list[str]:
                    cells = []
                    for work in (forward, both):
                        call = functools.partial(work, contender, data, entropy)
                        seconds, peak = measure(hardware, call, given.repeats)
                        cells += [f"{seconds * 1e3:.1f}", f"{peak / 2**30:.2f}"]
                    return cells

                rows.append(row(name, 4, timed, hardware))
            title = f"hidden {hidden:,}, {'with' if entropy else 'without'} entropies"
            emit(machine.table([title, "forward ms", "peak GiB", "and backward ms", "peak GiB"], rows))

    data = inputs(given.error_tokens, given.hidden[0], given.vocabulary, device)
    hidden_exact, weight_exact = (part.detach().double().requires_grad_() for part in data[:2])
    (log_probs, entropies), gradients = both(naive, (hidden_exact, weight_exact, data[2]), True)
    rows = []
    for name, contender in entrants.items():

        def compared(contender: Contender = contender, entropy: bool = name != "liger") -> list[str]:
            # Without entropies the gradients are another loss's.
            outputs, got = both(contender, data, entropy)
            cells = [error(outputs[0], log_probs), error(outputs[1], entropies)]
            return cells + ([error(*pair) for pair in zip(got, gradients, strict=True)] if entropy else ["", ""])

        rows.append(row(name, 4, compared, hardware))
    title = f"error, hidden {given.hidden[0]:,}, {given.error_tokens:,} tokens"
    emit(machine.table([title, "log-probs", "entropies", "gradient of hidden states", "of the weight"], rows))
    if given.out is not None:
        given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
