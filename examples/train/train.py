"""Train a small network from a checkpoint: an ordinary job whose start can be measured.

It resumes from a checkpoint of weights and Adam moments, checks it, computes steps and prints the
loss. With bootseer importable its phases become events; without it, nothing changes.

    python train.py --checkpoint model.npz --make     # write a checkpoint first
    python train.py --checkpoint model.npz --steps 3
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
from typing import Any

try:
    from bootseer import phase
except ImportError:  # the job does not depend on being measured

    def phase(_name: str, **_attributes: object) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


with phase("imports"):
    import numpy as np
    import pandas as pd
    from scipy.special import log_softmax
    from sklearn.datasets import make_classification
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler

FEATURES, CLASSES, SEED = 512, 10, 7
BETA_1, BETA_2, RATE, EPSILON = 0.9, 0.999, 1e-4, 1e-8


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", required=True, help="the .npz file to resume from")
    parser.add_argument("--make", action="store_true", help="write that file and stop")
    parser.add_argument("--hidden", type=int, default=6400, help="width; 6400 makes 0.53 GB")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    return parser.parse_args()


def new_state(hidden: int) -> dict[str, Any]:
    """Weights of a network with two hidden layers, and both Adam moments of each."""
    random = np.random.default_rng(SEED)
    widths = [FEATURES, hidden, hidden, CLASSES]
    state: dict[str, Any] = {"step": np.int64(0)}
    for layer, (rows, columns) in enumerate(itertools.pairwise(widths)):
        weights = random.standard_normal((rows, columns), dtype=np.float32)
        state[f"weights_{layer}"] = weights * np.float32((2 / rows) ** 0.5)
        state[f"moment_{layer}"] = random.standard_normal((rows, columns), dtype=np.float32) * 1e-4
        state[f"square_{layer}"] = random.random((rows, columns), dtype=np.float32) * 1e-4
    return state


def checksum(state: dict[str, Any]) -> float:
    """A sum that depends on every weight; the zip container checks every byte besides."""
    layers = (value for name, value in sorted(state.items()) if name.startswith("weights_"))
    return float(sum(float(np.add.reduce(layer, axis=None, dtype=np.float64)) for layer in layers))


def save(path: str, state: dict[str, Any]) -> None:
    """Write aside and rename, so that a reader never meets half a checkpoint."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "wb") as file:
        np.savez(file, checksum=np.float64(checksum(state)), **state)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load(path: str) -> dict[str, Any]:
    """Read and check a checkpoint; raises SystemExit when it is not whole."""
    with np.load(path) as archive:  # reading a member to its end checks its CRC
        state = {name: archive[name] for name in archive.files}
    if float(state.pop("checksum")) != checksum(state):
        sys.exit(f"{path}: the weights do not match their checksum")
    return state


def data(batch: int) -> tuple[Any, Any]:
    """A table of samples, scaled as the training set was."""
    samples, labels = make_classification(
        n_samples=batch * 8,
        n_features=FEATURES,
        n_informative=64,
        n_classes=CLASSES,
        random_state=SEED,
    )
    table = pd.DataFrame(samples).assign(label=labels)
    train, _ = train_test_split(table, test_size=0.25, random_state=SEED)
    scaled = StandardScaler().fit_transform(train.drop(columns="label"))
    return scaled.astype(np.float32), train["label"].to_numpy()


def step(state: dict[str, Any], inputs: Any, labels: Any) -> float:
    """One real step: forward, backward, Adam; returns the loss."""
    first = np.maximum(inputs @ state["weights_0"], 0)
    second = np.maximum(first @ state["weights_1"], 0)
    logs = log_softmax(second @ state["weights_2"], axis=1)
    rows = np.arange(len(labels))
    loss = -float(logs[rows, labels].mean())
    back = np.exp(logs)
    back[rows, labels] -= 1
    back /= len(labels)
    gradients = [None, None, second.T @ back]
    back = (back @ state["weights_2"].T) * (second > 0)
    gradients[1] = first.T @ back
    back = (back @ state["weights_1"].T) * (first > 0)
    gradients[0] = inputs.T @ back
    for layer, gradient in enumerate(gradients):
        adam(state, layer, gradient)
    state["step"] += 1
    return loss


def adam(state: dict[str, Any], layer: int, gradient: Any, rows: int = 64) -> None:
    """Update one layer in place, a few rows at a time: they stay in the processor's cache."""
    for begin in range(0, len(gradient), rows):
        part = slice(begin, begin + rows)
        slope, moment = gradient[part], state[f"moment_{layer}"][part]
        square, weights = state[f"square_{layer}"][part], state[f"weights_{layer}"][part]
        moment += (1 - BETA_1) * (slope - moment)
        square += (1 - BETA_2) * (slope * slope - square)
        weights -= RATE * moment / (np.sqrt(square) + EPSILON)


def main() -> int:
    options = parse()
    if options.make:
        save(options.checkpoint, new_state(options.hidden))
        return 0
    with phase("model.init"):
        inputs, labels = data(options.batch)
    size_bytes = os.path.getsize(options.checkpoint)
    with phase("checkpoint.load", **{"bootseer.bytes": size_bytes}):
        state = load(options.checkpoint)
    for number in range(options.steps):
        chosen = slice(number * options.batch, (number + 1) * options.batch)
        if number == 0:
            with phase("first_step"):
                loss = step(state, inputs[chosen], labels[chosen])
        else:
            loss = step(state, inputs[chosen], labels[chosen])
        print(f"step {int(state['step'])} loss {loss:.6f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
