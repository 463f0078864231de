"""Weights of one model put into another: as timm does it, and nothing left unsaid."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.errors import raises
from trainyard.model.adapt import adapt_weights
from trainyard.model.weights import LoadedWeights, Weights

CLASSES = ["ant", "bee", "cat", "dog", "emu"]
VIT: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2}


def model(name: str, seed: int, num_classes: int = 5, **options: Any) -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    built: nn.Module = timm.create_model(name, num_classes=num_classes, **options)
    with torch.no_grad():  # none of the many zeros and ones of a fresh model
        for parameter in built.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return built


def adapt(
    target: nn.Module,
    weights: Weights,
    classes: list[str] = CLASSES,
    *,
    known: list[str] | None = None,
    name: str = "test_resnet",
) -> list[str]:
    source = LoadedWeights(weights, "old.pth", known)
    return adapt_weights(target, source, classes=classes, name=name).log


def same(ours: nn.Module, theirs: dict[str, Tensor], but: tuple[str, ...] = ()) -> bool:
    own = ours.state_dict()
    return all(torch.equal(own[n], theirs[n]) for n in own if not n.startswith(but or ("?",)))


def snapshot(module: nn.Module) -> Weights:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


# --- what fits ---


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "test_vit", "test_efficientnet"])
def test_weights_of_the_same_model_are_equal_to_the_bit(name: str) -> None:
    there, here = model(name, 1), model(name, 2)
    done = adapt(here, there.state_dict(), name=name)
    count = sum(not name.endswith("num_batches_tracked") for name in there.state_dict())
    assert same(here, there.state_dict())
    assert len(done) == 1 and f"{count} of {count}" in done[0]


def test_half_precision_weights_become_single() -> None:
    there, here = model("test_resnet", 1), model("test_resnet", 2)
    adapt(here, {name: tensor.half() for name, tensor in there.state_dict().items()})
    assert {p.dtype for p in here.parameters()} == {torch.float32}
    halved = there.get_parameter("fc.weight").half().float()
    assert torch.equal(here.get_parameter("fc.weight"), halved)


def test_counts_of_batch_norms_may_be_missing() -> None:
    there, here = model("test_resnet", 1).state_dict(), model("test_resnet", 2)
    done = adapt(here, {n: t for n, t in there.items() if not n.endswith("num_batches_tracked")})
    assert same(here, there)
    assert len(done) == 1


def test_the_source_stays_as_it_is() -> None:
    there = model("test_resnet", 1, num_classes=7).state_dict()
    names = list(there)
    adapt(model("test_resnet", 2), there)
    assert list(there) == names


def test_a_table_of_indices_that_both_work_out_by_themselves_may_differ() -> None:
    there, here = model("test_resnet", 1).state_dict(), model("test_resnet", 2)
    here.register_buffer("relative_position_index", torch.zeros(4, 4))
    done = adapt(here, there | {"relative_position_index": torch.ones(9, 9)})
    assert torch.equal(here.get_buffer("relative_position_index"), torch.zeros(4, 4))
    assert len(done) == 1


# --- what does not ---


def test_missing_unexpected_and_reshaped_weights_are_listed_and_nothing_is_changed() -> None:
    there, here = model("test_resnet", 1).state_dict(), model("test_resnet", 2)
    before = snapshot(here)
    there["extra.weight"] = there.pop("conv1.0.weight")
    there["bn1.weight"] = torch.ones(3)
    reasons = (
        "1 missing: conv1.0.weight; 1 unexpected: extra.weight; "
        "1 of another shape: bn1.weight (3, not 32)"
    )
    with raises("weights.do-not-fit", source="old.pth", reason=reasons):
        adapt(here, there)
    assert same(here, before)


def test_long_lists_are_cut_and_counted() -> None:
    here = model("test_resnet", 2)
    with raises("weights.do-not-fit", name="test_resnet") as refused:
        adapt(here, model("test_convnext", 1).state_dict())
    for what in ("missing", "unexpected"):
        found = re.search(rf"(\d+) {what}: ([^;]+)", str(refused.value))
        assert found is not None
        assert int(found[1]) > 10
        assert len(found[2].split(", ")) == 3
        assert found[2].endswith(", …")


@pytest.mark.parametrize("name", ["test_convnext", "test_vit", "swin_tiny_patch4_window7_224"])
def test_weights_of_another_family_are_a_list_and_no_traceback(name: str) -> None:
    """timm's conversions meet names that they do not know."""
    options: dict[str, Any] = (
        {} if name.startswith("test") else {"embed_dim": 8, "depths": (1, 1, 1, 1)}
    )
    with raises("weights.do-not-fit", name=name):
        adapt(model(name, 2, **options), model("test_resnet", 1).state_dict(), name=name)


def test_a_buffer_that_matters_may_not_be_missing() -> None:
    there = model("test_resnet", 1).state_dict()
    del there["bn1.running_mean"]
    with raises("weights.do-not-fit", reason="1 missing: bn1.running_mean"):
        adapt(model("test_resnet", 2), there)


# --- the classifier ---


VIT_SMALL: dict[str, Any] = {"img_size": 32, **VIT}


@pytest.mark.parametrize(
    ("name", "options", "classifiers"),
    [
        ("test_resnet", {}, ("fc.",)),
        ("test_convnext", {}, ("head.fc.",)),
        ("test_vit", {}, ("head.",)),
        ("deit_tiny_distilled_patch16_224", VIT_SMALL, ("head.", "head_dist.")),
    ],
)
def test_another_number_of_classes_leaves_the_classifier_out(
    name: str, options: dict[str, Any], classifiers: tuple[str, ...]
) -> None:
    there, here = model(name, 1, 7, **options).state_dict(), model(name, 2, **options)
    before = snapshot(here)
    done = adapt(here, there, name=name)
    assert same(here, there, but=classifiers)
    own = here.state_dict()
    assert all(torch.equal(own[n], before[n]) for n in own if n.startswith(classifiers))
    assert len(done) == 2 and "7 classes" in done[1]


def test_a_source_without_a_classifier() -> None:
    there, here = model("test_resnet", 1).state_dict(), model("test_resnet", 2)
    done = adapt(here, {n: t for n, t in there.items() if not n.startswith("fc.")})
    assert same(here, there, but=("fc.",))
    assert len(done) == 2


@pytest.mark.parametrize(
    ("known", "is_kept"), [(CLASSES, True), (["asp", "boa", "cow", "doe", "elk"], False)]
)
def test_a_classifier_is_kept_for_the_same_classes_alone(known: list[str], is_kept: bool) -> None:
    there, here = model("test_resnet", 1).state_dict(), model("test_resnet", 2)
    before = snapshot(here)
    assert len(adapt(here, there, known=list(known))) == (1 if is_kept else 2)
    assert same(here, there, but=("fc.",))
    kept = there if is_kept else before
    assert torch.equal(here.get_parameter("fc.weight"), kept["fc.weight"])


@pytest.mark.parametrize(
    ("name", "options", "classifiers"),
    [("test_resnet", {}, ("fc.",)), ("deit_tiny_distilled_patch16_224", VIT_SMALL, ("head",))],
)
def test_classes_that_are_in_both_keep_their_rows(
    name: str, options: dict[str, Any], classifiers: tuple[str, ...]
) -> None:
    there, here = model(name, 1, 3, **options).state_dict(), model(name, 2, **options)
    before = snapshot(here)
    done = adapt(here, there, known=["elk", "cat", "ant"], name=name)
    assert same(here, there, but=classifiers)
    for key, tensor in here.state_dict().items():
        for row in range(5) if key.startswith(classifiers) else ():
            expected = {0: there[key][2], 2: there[key][1]}.get(row, before[key][row])
            assert torch.equal(tensor[row], expected)
    assert "2 classes by their names; 3 are new ('bee', 'dog', …), and 1 of" in done[-1]


@pytest.mark.parametrize(
    ("classes", "rows"),
    [
        (["n01443537", "n01440764", "daisy"], {0: 1, 1: 0}),
        (["daisy", "tench", "crane"], {0: 985, 1: 0}),  # two classes are called crane
        (["a", "b", "c"], {}),
    ],
)
def test_published_rows_are_known_by_imagenets_names(
    classes: list[str], rows: dict[int, int]
) -> None:
    there, here = model("test_resnet", 1, 1000).state_dict(), model("test_resnet", 2, 3)
    before = snapshot(here)
    adapt(here, there, classes)
    for row in range(3):
        expected = there["fc.weight"][rows[row]] if row in rows else before["fc.weight"][row]
        assert torch.equal(here.get_parameter("fc.weight")[row], expected)


def test_classes_in_another_order_keep_their_scores() -> None:
    there, here = model("test_resnet", 1).eval(), model("test_resnet", 2).eval()
    known = ["dog", "ant", "emu", "cat", "bee"]
    done = adapt(here, there.state_dict(), known=known)
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        old, new = there(images), here(images)
    for column, name in enumerate(CLASSES):
        torch.testing.assert_close(new[:, column], old[:, known.index(name)])
    assert len(done) == 2


# --- sizes ---


def timms_own(name: str, weights: Weights, **options: Any) -> Weights:
    """What timm makes of the same file when it loads it as pretrained."""
    loaded: nn.Module = timm.create_model(
        name,
        pretrained=True,
        pretrained_cfg_overlay={"state_dict": weights, "num_classes": 5},
        num_classes=5,
        **options,
    )
    return loaded.state_dict()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of timm's own making, in the reference
@pytest.mark.parametrize(
    ("name", "there", "here", "fitted"),
    [
        (
            "vit_tiny_patch16_224",
            {"img_size": 64, **VIT},
            {"img_size": 32, **VIT},
            "pos_embed from 1x17x32 to 1x5x32",
        ),
        (
            "vit_tiny_patch16_224",
            {"img_size": 64, **VIT},
            {"img_size": 64, "patch_size": 8, **VIT},
            "patch_embed.proj.weight from 32x3x16x16 to 32x3x8x8",
        ),
        (
            "vit_tiny_patch16_224",  # no class token, in neither
            {"img_size": 64, "class_token": False, "global_pool": "avg", **VIT},
            {"img_size": 96, "class_token": False, "global_pool": "avg", **VIT},
            "pos_embed from 1x16x32 to 1x36x32",
        ),
        (
            "swin_tiny_patch4_window7_224",
            {"img_size": 64, "window_size": 4, "embed_dim": 12, "depths": (1, 1, 1, 1)},
            {"img_size": 128, "window_size": 8, "embed_dim": 12, "depths": (1, 1, 1, 1)},
            "layers.0.blocks.0.attn.relative_position_bias_table from 49x3 to 225x3",
        ),
    ],
)
def test_sizes_are_resampled_as_timm_does(
    name: str, there: dict[str, Any], here: dict[str, Any], fitted: str
) -> None:
    weights = model(name, 1, **there).state_dict()
    target = model(name, 2, **here)
    done = adapt(target, weights, name=name)
    assert same(target, timms_own(name, weights, **here))
    assert any(fitted in each for each in done)


@pytest.mark.parametrize("channels", [1, 4])
def test_a_stem_for_rgb_takes_other_channels_as_timm_does(channels: int) -> None:
    weights = model("test_resnet", 1).state_dict()
    target = model("test_resnet", 2, in_chans=channels)
    done = adapt(target, weights)
    assert same(target, timms_own("test_resnet", weights, in_chans=channels))
    assert len(done) == 2 and f"conv1.0.weight from 16x3x3x3 to 16x{channels}x3x3" in done[1]


def test_a_stem_for_other_channels_is_refused() -> None:
    weights = model("test_resnet", 1, in_chans=4).state_dict()
    reason = "1 of another shape: conv1.0.weight (16x4x3x3, not 16x3x3x3)"
    with raises("weights.do-not-fit", reason=reason):
        adapt(model("test_resnet", 2), weights)


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_what_timm_only_logs_is_an_error(change: str) -> None:
    """It loads DLA without strictness, and would leave the stem of other channels as it is."""
    weights = model("dla46_c", 1).state_dict()
    weights["extra"] = weights["level0.0.weight"]
    if change == "missing":
        del weights["extra"], weights["level0.0.weight"]
    name = "extra" if change == "unexpected" else "level0.0.weight"
    with raises("weights.do-not-fit") as refused:
        adapt(model("dla46_c", 2, in_chans=4), weights, name="dla46_c")
    assert f"1 {change}: {name}" in str(refused.value.fields["reason"])


# --- names of the original programs ---


def original_convnext(name: str) -> str:
    """ConvNeXt's own name (facebookresearch/ConvNeXt, and system A's) of a tensor of timm's."""
    for pattern, replacement in (
        (r"^stem\.", "downsample_layers.0."),
        (r"^stages\.(\d)\.downsample\.", r"downsample_layers.\1."),
        (r"^stages\.(\d)\.blocks\.", r"stages.\1."),
        (r"conv_dw", "dwconv"),
        (r"mlp\.fc", "pwconv"),
        (r"^head\.fc", "head"),
        (r"^head\.norm", "norm"),
    ):
        name = re.sub(pattern, replacement, name)
    return name


def original_deit3(name: str) -> str:
    return re.sub(r"ls(\d)\.gamma", r"gamma_\1", name)


@pytest.mark.parametrize("num_classes", [5, 7])
@pytest.mark.parametrize(
    ("name", "original", "options", "head"),
    [
        (
            *("convnext_atto", original_convnext),
            *({"dims": (8, 8, 8, 8), "depths": (1, 1, 1, 1)}, "head.fc."),
        ),
        ("deit3_small_patch16_224", original_deit3, VIT_SMALL, "head."),
    ],
)
def test_original_names_become_timms(
    name: str,
    original: Callable[[str], str],
    options: dict[str, Any],
    head: str,
    num_classes: int,
) -> None:
    there = model(name, 1, num_classes, **options).state_dict()
    renamed = {original(key): tensor for key, tensor in there.items()}
    assert renamed.keys() != there.keys()
    target = model(name, 2, **options)
    done = adapt(target, renamed, name=name)
    assert same(target, there, but=() if num_classes == 5 else (head,))
    assert len(done) == (3 if num_classes == 7 else 2)


def test_a_masked_autoencoders_encoder_without_head() -> None:
    """MAE: no classifier, and a norm that average pooling keeps with fc_norm = false."""
    options = {"img_size": 32, "global_pool": "avg", "fc_norm": False, **VIT}
    there = model("vit_tiny_patch16_224", 1, num_classes=0, img_size=64, **VIT).state_dict()
    target = model("vit_tiny_patch16_224", 2, **options)
    done = adapt(target, there, name="vit_tiny_patch16_224")
    assert same(target, there, but=("head.", "pos_embed"))
    assert len(done) >= 2


# --- wrapped, as in the checkpoints of the four systems ---


def test_wrapped_names() -> None:
    """All prefixes are in test_weights.py."""
    there, here = model("test_resnet", 1).state_dict(), model("test_resnet", 2)
    adapt(here, {f"module.model.{name}": tensor for name, tensor in there.items()})
    assert same(here, there)


# --- names by order ---


def renamed(module: nn.Module) -> Weights:
    """Weights as another program names them: the layers are numbered."""
    prefixes = list(dict.fromkeys(name.rpartition(".")[0] for name in module.state_dict()))
    return {
        f"layer{prefixes.index(name.rpartition('.')[0])}.{name.rpartition('.')[2]}": tensor
        for name, tensor in snapshot(module).items()
    }


@pytest.mark.parametrize("num_classes", [5, 3])
def test_names_are_given_by_order_where_kinds_and_shapes_are_equal(num_classes: int) -> None:
    name = "test_efficientnet"
    there, here = model(name, 1, num_classes), model(name, 2)
    source = LoadedWeights(renamed(there), "old.pth", is_ordered=True)
    adapt_weights(here, source, classes=CLASSES, name=name)
    but = () if num_classes == 5 else ("classifier",)
    assert same(here, there.state_dict(), but)


@pytest.mark.parametrize("fault", ["another shape", "another kind", "a sorted file"])
def test_names_are_not_guessed(fault: str) -> None:
    name = "test_efficientnet"
    weights, here = renamed(model(name, 1)), model(name, 2)
    before, first = snapshot(here), next(iter(weights))
    if fault == "another shape":
        weights[first] = weights[first][:1]
    elif fault == "another kind":
        weights = {key.replace("running_mean", "mean"): value for key, value in weights.items()}
    source = LoadedWeights(weights, "old.pth", is_ordered=fault != "a sorted file")
    with raises("weights.do-not-fit"):
        adapt_weights(here, source, classes=CLASSES, name=name)
    assert same(here, before)
