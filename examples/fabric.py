"""A training loop of your own, with Lightning Fabric: one line more, and the batches are on the device in time.

python examples/fabric.py
"""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fastio import DevicePrefetcher


def main(max_epochs: int = 10) -> float:
    """Train on the digits of scikit-learn; returns the loss of the last batch."""
    fabric = Fabric()
    fabric.launch()
    digits = load_digits()
    samples = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer = fabric.setup(network, torch.optim.Adam(network.parameters(), lr=1e-3))
    # Fabric deals the samples out to the ranks, and leaves moving the batches to the prefetcher.
    loader = fabric.setup_dataloaders(DataLoader(samples, 64, shuffle=True), move_to_device=False)
    batches = DevicePrefetcher(loader, fabric.device, depth=2)
    loss = torch.zeros(())
    for _ in range(max_epochs):
        for x, y in batches:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
    print(f"loss {loss.item():.3f}, waited {batches.waits.data_wait_fraction:.1%} of the time for data")
    return loss.item()


if __name__ == "__main__":
    main()
