"""Lightning: the network of a LightningModule inside a memory budget, in ``configure_model``. Needs lightning."""

import tempfile

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxmem


class Regression(lightning.LightningModule):
    def __init__(self, *, planned: bool) -> None:
        super().__init__()
        self.planned = planned
        self.net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 8))
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.planned:
            fxmem.optimize_(self.net, budget="1MB", optimizer="adamw", accumulate=True)  # the one line

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(folder: str, *, planned: bool) -> tuple[Regression, dict[str, Tensor]]:
    lightning.seed_everything(0, verbose=False)
    model = Regression(planned=planned)
    data = DataLoader(TensorDataset(torch.randn(64, 64), torch.randn(64, 8)), batch_size=16)
    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    path = f"{folder}/last.ckpt"
    trainer.save_checkpoint(path)
    return model, torch.load(path, weights_only=False)["state_dict"]


def main() -> None:
    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as planned:
        (expected, state), (found, saved) = train(plain, planned=False), train(planned, planned=True)
    assert expected.losses == found.losses
    assert list(state) == list(saved)
    assert all(map(torch.equal, state.values(), saved.values()))
    print(f"losses {found.losses}; peak {found.net.fxmem.report.predicted_peak_bytes} bytes")


if __name__ == "__main__":
    main()
