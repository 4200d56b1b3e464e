"""A UNet of diffusers with an average of its weights: both are saved as without fxmem."""

import tempfile
from pathlib import Path

import torch
from diffusers import UNet2DModel
from diffusers.training_utils import EMAModel

import fxmem


def train(folder: str, *, planned: bool) -> list[float]:
    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    if planned:
        unet = fxmem.optimize(unet, budget="12MB", optimizer="adamw")  # the one line
    average = EMAModel(unet.parameters(), model_cls=type(unet), model_config=unet.config)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        noise, steps = torch.randn(4, 3, 16, 16), torch.randint(0, 1000, (4,))
        loss = torch.nn.functional.mse_loss(unet(torch.randn(4, 3, 16, 16), steps).sample, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.step(unet.parameters())
        losses.append(loss.item())
    unet.save_pretrained(f"{folder}/unet")
    average.save_pretrained(f"{folder}/average")
    return losses


def main() -> None:
    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as planned:
        expected, found = train(plain, planned=False), train(planned, planned=True)
        assert expected == found
        files = [
            {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
            for folder in (plain, planned)
        ]
        assert files[0] == files[1]
        loaded = UNet2DModel.from_pretrained(f"{planned}/average")
        print(f"losses {found}; saved {', '.join(sorted(files[1]))}; loaded a {type(loaded).__name__}")


if __name__ == "__main__":
    main()
