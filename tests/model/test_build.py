"""A timm model by name: its options, and the image sizes that it takes."""

import math
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.errors import raises
from trainyard.config import check
from trainyard.course import build_course
from trainyard.model.build import build_model
from trainyard.model.config import ModelConfig
from trainyard.model.flops import forward_flops
from trainyard.model.plain_vit import PlainViT, sine_positions
from trainyard.run.metrics import ideal_seconds
from trainyard.run.model import build_run_model

SMALL_VIT: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2}


def build(
    name: str, size: int = 32, *others: int, **options: bool | int | float | str
) -> nn.Module:
    config = ModelConfig(name=name, options=options)
    torch.manual_seed(0)
    return build_model(config, num_classes=5, image_size=size, other_sizes=others).eval()


def images(size: int) -> Tensor:
    return torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(size))


# --- options ---


def test_options_are_those_of_timm() -> None:
    model = build("test_vit", class_token=False, global_pool="avg", init_values=1e-6)
    timms = timm.create_model(
        "test_vit", num_classes=5, class_token=False, global_pool="avg", init_values=1e-6
    )
    assert model.state_dict().keys() == timms.state_dict().keys()
    assert "cls_token" not in model.state_dict()
    assert float(model.get_parameter("blocks.0.ls1.gamma")[0].detach()) == pytest.approx(1e-6)


def test_a_model_without_options_is_timms_own_bit_for_bit() -> None:
    torch.manual_seed(0)
    timms = timm.create_model("test_resnet", num_classes=5)
    ours = build("test_resnet").state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in timms.state_dict().items())


@pytest.mark.parametrize(
    ("options", "code", "fields"),
    [
        ({"foo": 1}, "model.unknown-option", {"argument": "foo"}),
        ({"num_classes": 7}, "model.option-elsewhere", {"name": "num_classes"}),
        ({"in_chans": 1}, "model.option-elsewhere", {"name": "in_chans"}),
        ({"pretrained": True}, "model.option-elsewhere", {"name": "pretrained"}),
        ({"global_pool": ""}, "model.images-not-accepted", {"hint": "other model.options"}),
        ({"features_only": True}, "model.wrong-scores", {}),
        ({"global_pool": "nonsense"}, "model.not-built", {"name": "test_resnet"}),
    ],
)
def test_wrong_options_are_one_line(
    options: dict[str, Any], code: str, fields: dict[str, str]
) -> None:
    with raises(code, **fields) as refused:
        build("test_resnet", **options)
    assert "\n" not in str(refused.value)


def test_an_odd_type_of_options_survives_a_recipe() -> None:
    config = check({"model": {"name": "test_vit", "options": {"init_values": 1e-6}}})
    assert config.model.options == {"init_values": 1e-6}


def test_a_key_or_a_prefix_needs_a_file() -> None:
    for wrong in ({"checkpoint_key": "model"}, {"checkpoint_prefix": "a.", "checkpoint": "timm"}):
        key = next(iter(wrong))
        with raises("recipe.invalid-value", key=f"model.{key}"):
            check({"model": wrong})


# --- image sizes ---


def test_a_transformer_at_its_own_size_is_timms_even_if_it_takes_others() -> None:
    plain = build("vit_tiny_patch16_224", 32, **SMALL_VIT)
    flexible = build("vit_tiny_patch16_224", 32, 64, **SMALL_VIT)
    flexible.load_state_dict(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(plain(images(32)), flexible(images(32)))


def test_a_transformer_at_another_size_equals_timms_resampled_load() -> None:
    flexible = build("vit_tiny_patch16_224", 32, 64, **SMALL_VIT)
    overlay = {"state_dict": flexible.state_dict(), "num_classes": 5, "custom_load": False}
    timms = timm.create_model(
        "vit_tiny_patch16_224",
        pretrained=True,
        pretrained_cfg_overlay=overlay,
        num_classes=5,
        img_size=64,
        **SMALL_VIT,
    ).eval()
    with torch.no_grad():
        torch.testing.assert_close(flexible(images(64)), timms(images(64)))


@pytest.mark.parametrize(
    "name", ["swin_tiny_patch4_window7_224", "xcit_nano_12_p16_224", "resnet18", "test_convnext"]
)
def test_models_that_take_several_sizes(name: str) -> None:
    model = build(name, 64, 96)
    with torch.no_grad():
        assert [model(images(size)).shape for size in (64, 96)] == [(2, 5), (2, 5)]


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "resnet18"]
)
def test_models_take_rectangles(name: str) -> None:
    """timm's options take height and width, in this order."""
    config = ModelConfig(name=name)
    model = build_model(config, num_classes=5, image_size=(64, 128), other_sizes=[(96, 64)]).eval()
    with torch.no_grad():
        for size in ((64, 128), (96, 64)):
            assert model(torch.zeros(2, 3, *size)).shape == (2, 5)


@pytest.mark.parametrize("size", [(64, 70), (70, 64)], ids=str)
def test_patches_cover_both_sides(size: tuple[int, int]) -> None:
    with raises("model.patches-leave-pixels", left=6, side=70, sizes="64 or 80"):
        build_model(ModelConfig(name="vit_tiny_patch16_224"), num_classes=5, image_size=size)


@pytest.mark.parametrize(
    ("name", "sizes", "size"), [("mixer_s32_224", (64, 96), 96), ("test_convnext", (8,), 8)]
)
def test_a_size_that_does_not_fit_is_one_line(name: str, sizes: tuple[int, ...], size: int) -> None:
    with raises("model.images-not-accepted", name=name, size=size) as refused:
        build(name, *sizes)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "sizes", "patch", "left", "size", "fits"),
    [
        ("vit_tiny_patch16_224", (70,), 16, 6, 70, "64 or 80"),
        ("vit_tiny_patch16_224", (32, 40), 16, 8, 40, "32 or 48"),
        ("vit_tiny_patch16_224", (12,), 16, 12, 12, "16"),
        ("swin_tiny_patch4_window7_224", (70,), 4, 2, 70, "68 or 72"),
    ],
)
def test_pixels_that_no_patch_would_have_are_refused(
    name: str, sizes: tuple[int, ...], patch: int, left: int, size: int, fits: str
) -> None:
    cut: dict[str, object] = {"patch": patch, "left": left, "side": size, "sizes": fits}
    with raises("model.patches-leave-pixels", name=name, **cut):
        build(name, *sizes)


def test_sizes_that_patches_need_not_divide() -> None:
    padded = build(
        "vit_tiny_patch16_224", 70, dynamic_img_size=True, dynamic_img_pad=True, **SMALL_VIT
    )
    others = [build("test_convnext", 70), build("resnet18", 70)]
    for model in (padded, *others):
        with torch.no_grad():
            assert model(images(70)).shape == (2, 5)
    build("mvitv2_tiny", 224)  # strides in its attention are no patches


class NeedsData(nn.Module):
    """A model that cannot run without data, as it looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 5)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        mean_BC = images_BCHW.mean((2, 3))
        return self.head(mean_BC) if float(mean_BC.sum()) >= 0 else mean_BC


def test_a_model_that_cannot_run_without_data_is_tried_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timm, "create_model", lambda *args, **options: NeedsData())
    assert isinstance(build("test_resnet"), NeedsData)


def test_looking_at_the_sizes_leaves_no_trace() -> None:
    torch.manual_seed(0)
    config = ModelConfig(name="test_resnet", drop_path=0.1)
    model = build_model(config, num_classes=5, image_size=32, other_sizes={64})
    after = torch.rand(1)
    assert model.training
    assert int(model.get_buffer("bn1.num_batches_tracked")) == 0
    torch.manual_seed(0)
    timm.create_model("test_resnet", num_classes=5, drop_path_rate=0.1)
    assert torch.equal(after, torch.rand(1))


def test_position_embeddings_are_for_the_largest_size_that_is_trained() -> None:
    tree = {
        "model": {"name": "vit_tiny_patch16_224", "options": SMALL_VIT},
        "data": {"image_size": 32, "eval_size": 96},
        "schedule": {"image_size": ["50%: 64"]},
    }
    model = build_run_model(check(tree), 5).eval()
    assert model.get_parameter("pos_embed").shape == (1, 1 + 4 * 4, 32)
    with torch.no_grad():
        assert [model(images(size)).shape for size in (32, 64, 96)] == [(2, 5)] * 3


# --- the plain vision transformer is timm's, but for positions, pooling and first weights ---


SMALL: dict[str, Any] = {"depth": 2, "embed_dim": 32, "num_heads": 2}


def small(image_size: int = 48) -> PlainViT:
    torch.manual_seed(0)
    config = ModelConfig(name="plain_vit_small_patch16_224", options=SMALL)
    model = build_model(config, num_classes=10, image_size=image_size)
    assert isinstance(model, PlainViT)
    return model


def test_positions_are_the_written_out_formula() -> None:
    found = sine_positions(3, 5, 16)
    assert found.shape == (15, 16)
    for row in range(3):
        for column in range(5):
            for number in range(4):
                angles = [place / 10_000 ** (number / 3) for place in (column, row)]
                expected = [f(angle) for angle in angles for f in (math.sin, math.cos)]
                own = found[row * 5 + column, number::4].tolist()
                assert own == pytest.approx(expected, abs=1e-6)


def test_the_model_is_timms_with_these_positions() -> None:
    model = small().eval()
    assert "pos_embed" not in model.state_dict()  # a constant: not trained, averaged or saved
    assert isinstance(model.head, torch.nn.Linear)
    torch.nn.init.normal_(model.head.weight)
    options: dict[str, Any] = {"class_token": False, "global_pool": "avg", "fc_norm": False}
    timms = timm.create_model(
        "vit_small_patch16_224", num_classes=10, img_size=48, **SMALL, **options
    ).eval()
    timms.load_state_dict(model.state_dict() | {"pos_embed": sine_positions(3, 3, 32)[None]})
    images = torch.randn(2, 3, 48, 48)
    torch.testing.assert_close(model(images), timms(images), rtol=1e-5, atol=1e-6)


def test_first_weights_are_those_of_big_vision() -> None:
    """Variances that flax gives to its layers: xavier, and lecun for the patches."""
    model: Any = timm.create_model("plain_vit_small_patch16_224", depth=2)
    attention, mlp = model.blocks[0].attn, model.blocks[0].mlp
    for layer, bound in (
        (attention.qkv, math.sqrt(6 / 768)),
        (attention.proj, math.sqrt(6 / 768)),
        (mlp.fc1, math.sqrt(6 / 1920)),
    ):
        assert layer.weight.abs().max().item() == pytest.approx(bound, rel=1e-3)
        assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=2e-2)
    assert model.patch_embed.proj.weight.std().item() == pytest.approx(768**-0.5, rel=2e-2)
    assert not model.head.weight.any()


# --- floating-point operations, beside what papers say of their models ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "giga_macs"),
    [
        ("resnet50", 4.1),
        ("vit_base_patch16_224", 17.6),
        ("convnext_tiny", 4.5),
        ("convnext_base", 15.4),
        ("swin_tiny_patch4_window7_224", 4.5),
        ("efficientnet_b0", 0.39),
    ],
)
def test_published_figures(name: str, giga_macs: float) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    assert forward_flops(model, 224) == pytest.approx(2e9 * giga_macs, rel=0.02)


def test_by_hand() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 16, 10))
    assert forward_flops(model, 4) == 2 * (16 * 8 * 3 * 9 + 8 * 16 * 10)


@pytest.mark.slow
def test_a_model_is_left_as_it_is() -> None:
    model = timm.create_model("resnet18", num_classes=7)
    model.compile()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert forward_flops(model, 64) == forward_flops(model.eval(), 64) > 2e8
    for name, tensor in model.state_dict().items():
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, before[name]), name


# --- how long an image would take a device at its peak ---


COURSE = build_course(
    "10 steps", epoch_samples=64, batch=8, image_size=32, size_stages=["5 steps: 64"]
)


def test_forward_and_twice_as_much_backward() -> None:
    """A convolution by hand: 3 x 16 x 5 x 5 multiply-adds for each pixel."""
    model = nn.Conv2d(3, 16, 5, padding=2, bias=False)
    seconds = ideal_seconds(COURSE, model, peak=1e6)
    for step, size in ((0, 32), (4, 32), (5, 64), (9, 64)):
        assert seconds(step) == pytest.approx(3 * 2 * 3 * 16 * 25 * size**2 / 1e6)


def test_the_model_stays_as_it_is() -> None:
    model = timm.create_model("test_resnet", num_classes=10).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert (ideal_seconds(COURSE, model, peak=1e12)(0) or 0) > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Impatient(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images * float(images.sum())  # which tensors without values do not have


def test_without_a_peak_or_a_count_there_is_none() -> None:
    assert ideal_seconds(COURSE, nn.Conv2d(3, 3, 1), peak=None)(3) is None
    assert ideal_seconds(COURSE, Impatient(), peak=1e12)(3) is None
