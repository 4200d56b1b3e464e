"""Lightning: a whole LightningModule inside a memory budget, by a callback; what it logs is logged. Needs lightning."""

import tempfile

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fxmem.integrations.lightning import FxMemCallback


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1))
        self.head = nn.Linear(256, 8)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.head(self.encoder(batch[0])), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(callbacks: list[lightning.Callback]) -> tuple[float, Regression]:
    lightning.seed_everything(0, verbose=False)
    model = Regression()
    data = DataLoader(TensorDataset(torch.randn(512, 64), torch.randn(512, 8)), batch_size=128)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            default_root_dir=folder,
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
        )
        trainer.fit(model, data)
    return trainer.callback_metrics["loss_epoch"].item(), model


def main() -> None:
    expected, eager = train([])
    found, planned = train([FxMemCallback(budget="0.7MB")])  # the one line
    assert expected == found
    assert all(map(torch.equal, eager.parameters(), planned.parameters()))
    print(f"loss {found}")
    print(planned.fxmem.methods["training_step"].report)


if __name__ == "__main__":
    main()
