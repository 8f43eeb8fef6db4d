"""Fine-tune a small model from a checkpoint of 1 GB: the larger job of `bench/start`.

It imports what such jobs import, loads the checkpoint into torch, computes steps and prints the
loss.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

try:
    from bootseer import phase
except ImportError:  # the job does not depend on being measured

    def phase(_name: str, **_attributes: object) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


with phase("imports"):
    import accelerate
    import datasets
    import pandas
    import peft
    import scipy.stats
    import sklearn.linear_model
    import torch
    import transformers

WIDTH, LAYERS, SEED = 2048, 64, 7
LIBRARIES = (accelerate, datasets, pandas, peft, scipy, sklearn, torch, transformers)


def make(path: str) -> None:
    """Write a checkpoint: 64 square matrices of 16 MiB each."""
    torch.manual_seed(SEED)
    scale = WIDTH**-0.5
    torch.save({f"layer{n}": torch.randn(WIDTH, WIDTH) * scale for n in range(LAYERS)}, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.make:
        make(arguments.checkpoint)
        return
    with phase("checkpoint.read"):
        state = torch.load(arguments.checkpoint, weights_only=True)
    torch.manual_seed(SEED)
    inputs, target = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    weights = torch.nn.Parameter(state[f"layer{LAYERS - 1}"])
    optimizer = torch.optim.SGD([weights], lr=1e-3)
    for number in range(arguments.steps):
        with phase("first_step") if number == 0 else contextlib.nullcontext():
            hidden = inputs
            for layer in range(LAYERS - 1):
                hidden = torch.tanh(hidden @ state[f"layer{layer}"])
            loss = torch.nn.functional.mse_loss(hidden @ weights, target)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        print(f"step {number + 1}: loss {loss.item():.5f}", flush=True)


if __name__ == "__main__":
    main()
