"""Loops of diffusers, timm, ultralytics and MONAI. Models are built from configurations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.framework_loops.loop import Run, loop

Step = Callable[[nn.Module], Tensor]


def steps(run: Run, model: nn.Module, loss_of: Step, num: int = 4) -> None:
    """Make steps of a plain loop."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(num):
        loss = loss_of(model)
        loss.backward()
        run.note(loss)
        optimizer.step()
        optimizer.zero_grad()


# -- diffusers -----------------------------------------------------------------------------------------------------------


def unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
        layers_per_block=1,
    ).train()


def denoising(model: nn.Module) -> Tensor:
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler()
    images, noise, words = torch.randn(4, 4, 16, 16), torch.randn(4, 4, 16, 16), torch.randn(4, 8, 16)
    times = torch.randint(0, 1000, (4,))
    found = model(scheduler.add_noise(images, noise, times), times, encoder_hidden_states=words).sample
    return F.mse_loss(found, noise)


@loop("diffusers", "UNet2DConditionModel, EMAModel")
def text_to_image(run: Run) -> None:
    from diffusers.training_utils import EMAModel

    model = run.optimize(unet())
    average = EMAModel(model.parameters(), model_cls=type(model), model_config=model.config)

    def loss_of(model: nn.Module) -> Tensor:
        average.step(model.parameters())
        return denoising(model)

    steps(run, model, loss_of)
    average.save_pretrained(run.folder / "ema")
    model.save_pretrained(run.folder)


@loop("diffusers", "UNet with LoRA")
def unet_lora(run: Run) -> None:
    from peft import LoraConfig

    base = unet()
    base.requires_grad_(False)
    torch.manual_seed(1)
    base.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights="gaussian"))
    model = run.optimize(base)
    steps(run, model, denoising)
    model.save_lora_adapter(run.folder)


@loop("diffusers", "DiTTransformer2DModel", share=0.8)
def dit(run: Run) -> None:
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 3, "sample_size": 16, "in_channels": 4}
    model = run.optimize(DiTTransformer2DModel(**sizes, out_channels=4, norm_num_groups=4).train())

    def loss_of(model: nn.Module) -> Tensor:
        images, noise = torch.randn(4, 4, 16, 16), torch.randn(4, 4, 16, 16)
        times, labels = torch.randint(0, 1000, (4,)), torch.randint(0, 1000, (4,))
        return F.mse_loss(model(images, timestep=times, class_labels=labels).sample, noise)

    steps(run, model, loss_of)
    model.save_pretrained(run.folder)


def vae() -> nn.Module:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return AutoencoderKL(block_out_channels=(8, 16), latent_channels=4, norm_num_groups=4, **kinds).train()


@loop("diffusers", "AutoencoderKL, forward")
def vae_forward(run: Run) -> None:
    model = run.optimize(vae())
    images = torch.rand(4, 3, 32, 32)
    steps(run, model, lambda model: F.mse_loss(model(images, sample_posterior=True).sample, images))
    model.save_pretrained(run.folder)


@loop("diffusers", 'AutoencoderKL, methods=("encode", "decode")')
def vae_methods(run: Run) -> None:
    model = run.optimize(vae(), methods=("forward", "encode", "decode"))
    images = torch.rand(4, 3, 32, 32)

    def loss_of(model: Any) -> Tensor:
        chances = model.encode(images).latent_dist
        return F.mse_loss(model.decode(chances.sample()).sample, images) + 1e-6 * chances.kl().mean()

    steps(run, model, loss_of)


# -- timm ----------------------------------------------------------------------------------------------------------------


@loop("timm", "ConvNeXt, drop path, mixup, ModelEma", share=0.8)
def timm_convnext(run: Run) -> None:
    import timm
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.utils import ModelEmaV3

    torch.manual_seed(0)
    kind = timm.models.convnext.ConvNeXt
    model = run.optimize(kind(depths=(1, 1, 2, 1), dims=(8, 16, 32, 64), num_classes=10, drop_path_rate=0.1).train())
    average = ModelEmaV3(model)
    mixup = Mixup(mixup_alpha=0.0, cutmix_alpha=0.0, label_smoothing=0.1, num_classes=10)
    mixup.mixup_enabled = False
    criterion = SoftTargetCrossEntropy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        images, labels = torch.rand(8, 3, 64, 64), torch.randint(0, 10, (8,))
        targets = F.one_hot(labels, 10) * 0.9 + 0.01
        loss = criterion(model(images), targets)
        loss.backward()
        run.note(loss)
        optimizer.step()
        optimizer.zero_grad()
        average.update(model)
    torch.save(average.module.state_dict(), run.folder / "ema.pt")
    torch.save(model.state_dict(), run.folder / "model.pt")


@loop("timm", "VisionTransformer, gradients clipped")
def timm_vit(run: Run) -> None:
    import timm

    torch.manual_seed(0)
    kind = timm.models.vision_transformer.VisionTransformer
    model = run.optimize(kind(img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=2, num_classes=10).train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        loss = F.cross_entropy(model(torch.rand(16, 3, 32, 32)), torch.randint(0, 10, (16,)))
        loss.backward()
        run.note(loss, torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()


# -- ultralytics ---------------------------------------------------------------------------------------------------------

YOLO = {
    "nc": 4,
    "scales": {"n": [0.33, 0.125, 1024]},
    "scale": "n",
    "backbone": [
        [-1, 1, "Conv", [64, 3, 2]],
        [-1, 1, "Conv", [128, 3, 2]],
        [-1, 1, "C2f", [128, True]],
        [-1, 1, "Conv", [256, 3, 2]],
        [-1, 1, "C2f", [256, True]],
        [-1, 1, "SPPF", [256, 5]],
    ],
    "head": [
        [-1, 1, "nn.Upsample", [None, 2, "nearest"]],
        [[-1, 2], 1, "Concat", [1]],
        [-1, 1, "C2f", [128]],
        [[8, 5], 1, "Detect", ["nc"]],
    ],
}


def yolo() -> nn.Module:
    from ultralytics.nn.tasks import DetectionModel
    from ultralytics.utils import DEFAULT_CFG

    torch.manual_seed(0)
    model = DetectionModel(copy.deepcopy(YOLO), verbose=False).train()
    model.args = DEFAULT_CFG
    return model


def boxes() -> dict[str, Tensor]:
    """Return a batch as ultralytics' trainer passes it."""
    return {
        "img": torch.rand(4, 3, 64, 64),
        "batch_idx": torch.tensor([0.0, 0, 1, 2, 3]),
        "cls": torch.randint(0, 4, (5, 1)).float(),
        "bboxes": torch.rand(5, 4) * 0.3 + 0.3,
    }


def yolo_loss(model: nn.Module) -> Tensor:
    """Return the loss as ultralytics' trainer has it: the model is called with the batch."""
    loss, _ = model(boxes())
    return loss.sum()


@loop("ultralytics", "YOLO, model(batch) as its trainer calls it")
def yolo_batch(run: Run) -> None:
    steps(run, run.optimize(yolo()), yolo_loss)


@loop("ultralytics", "YOLO, model(images), its loss outside")
def yolo_images(run: Run) -> None:
    model = run.optimize(yolo())
    criterion = model.init_criterion()

    def loss_of(model: nn.Module) -> Tensor:
        batch = boxes()
        return criterion(model(batch["img"]), batch)[0].sum()

    steps(run, model, loss_of)


@loop("ultralytics", "DetectionTrainer.train, a callback optimizes")
def yolo_trainer(run: Run) -> None:
    from ultralytics.models.yolo.detect import DetectionTrainer

    images = _images(run)
    overrides = {
        "model": "yolo.yaml",
        "data": str(images / "data.yaml"),
        "epochs": 2,
        "imgsz": 64,
        "batch": 4,
        "workers": 0,
        "device": "cpu",
        "project": str(run.folder.parent / "runs"),
        "exist_ok": True,
        "plots": False,
        "val": False,
        "save": False,
        "verbose": False,
        "nbs": 4,
        "amp": False,
        "seed": 0,
    }

    class Small(DetectionTrainer):
        def get_model(self, cfg: Any = None, weights: Any = None, verbose: bool = True) -> nn.Module:
            return yolo()

        def setup_model(self) -> None:
            self.model = self.get_model()

        def validate(self) -> tuple[dict[str, float], float]:
            return {}, 0.0

    trainer = Small(overrides=overrides)
    trainer.add_callback("on_pretrain_routine_end", lambda trainer: run.optimize_(trainer.model))
    trainer.add_callback("on_train_batch_end", lambda trainer: run.note(trainer.loss))
    trainer.train()


def _images(run: Run) -> Any:
    from PIL import Image

    folder = run.folder.parent / "images"
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True)
    pixels = torch.randint(0, 255, (8, 64, 64, 3), dtype=torch.uint8).numpy()
    for k, each in enumerate(pixels):
        Image.fromarray(each).save(folder / "images" / f"{k}.png")
        (folder / "labels" / f"{k}.txt").write_text(f"{k % 4} 0.5 0.5 0.3 0.3\n")
    names = "\n".join(f"  {k}: class{k}" for k in range(4))
    (folder / "data.yaml").write_text(f"path: {folder}\ntrain: images\nval: images\nnames:\n{names}\n")
    return folder


# -- MONAI ---------------------------------------------------------------------------------------------------------------


def monai_unet() -> nn.Module:
    from monai.networks.nets import UNet

    torch.manual_seed(0)
    sizes = {"channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 1, "dropout": 0.1}
    return UNet(spatial_dims=3, in_channels=1, out_channels=3, **sizes).train()


@loop("MONAI", "UNet, DiceLoss")
def dice(run: Run) -> None:
    from monai.losses import DiceLoss

    criterion = DiceLoss(to_onehot_y=True, softmax=True)

    def loss_of(model: nn.Module) -> Tensor:
        volumes, labels = torch.rand(2, 1, 16, 16, 16), torch.randint(0, 3, (2, 1, 16, 16, 16))
        return criterion(model(volumes), labels)

    steps(run, run.optimize(monai_unet()), loss_of)
