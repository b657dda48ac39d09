"""Which modules are blocks: architectures as people write them, and the forms of layers=."""

import re
from collections import OrderedDict
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from lightning_ckpt.core.blocks import Block, find_blocks, select_blocks

D = 8


def names(module, layers=None):
    return [block.name for block in find_blocks(module, layers)]


def classes(module, layers=None):
    return {type(block.module).__name__ for block in find_blocks(module, layers)}


class Holder(nn.Module):
    """A module with the given attributes and a forward that is never called."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        raise NotImplementedError


def kind(name, base=Holder):
    """A class called `name`, so that parts can be told apart."""
    return type(name, (base,), {})


def linear():
    return nn.Linear(D, D)


def conv(kernel=3, groups=1):
    return nn.Conv2d(D, D, kernel, padding=kernel // 2, groups=groups)


def ln():
    return nn.LayerNorm(D)


def bn():
    return nn.BatchNorm2d(D)


# --- language models -----------------------------------------------------------------------------

Attention = kind("CausalSelfAttention")
MLP = kind("MLP")
GPTBlock = kind("GPTBlock")


def attention():
    return Attention(qkv=linear(), proj=linear())


def mlp():
    return MLP(net=nn.Sequential(linear(), nn.GELU(), linear(), nn.Dropout(0.1)))


def gpt_block():
    return GPTBlock(ln_1=ln(), attn=attention(), ln_2=ln(), mlp=mlp())


def gpt(depth=3):
    return Holder(
        transformer=nn.ModuleDict(
            {
                "wte": nn.Embedding(11, D),
                "wpe": nn.Embedding(11, D),
                "h": nn.ModuleList(gpt_block() for _ in range(depth)),
                "ln_f": ln(),
            }
        ),
        lm_head=nn.Linear(D, 11),
    )


def gpt_functional_norm():
    block = kind("Block")
    return Holder(h=nn.ModuleList(block(attn=attention(), mlp=mlp()) for _ in range(2)))


def gpt_head_by_head():
    head, many, block = kind("Head"), kind("MultiHead"), kind("Block")

    def heads():
        return nn.ModuleList(head(k=linear(), q=linear(), v=linear(), norm=ln()) for _ in range(4))

    return Holder(
        blocks=nn.Sequential(
            *(block(sa=many(heads=heads(), proj=linear()), ff=mlp(), n=ln()) for _ in range(2))
        )
    )


def mixture_of_experts():
    moe, block = kind("MoE"), kind("DecoderLayer")

    def experts():
        return nn.ModuleList(mlp() for _ in range(4))

    return Holder(
        layers=nn.ModuleList(
            block(attn=attention(), n1=ln(), moe=moe(gate=linear(), experts=experts()), n2=ln())
            for _ in range(2)
        )
    )


def mixture_of_normed_experts():
    block, expert = kind("DecoderLayer"), kind("Expert")

    def ffns():
        return nn.ModuleList(expert(norm=ln(), up=linear(), down=linear()) for _ in range(4))

    return Holder(
        layers=nn.ModuleList(
            block(attn=attention(), n=ln(), gate=linear(), ffns=ffns()) for _ in range(2)
        )
    )


def state_space_with_one_attention():
    mamba, attn = kind("MambaBlock"), kind("AttentionBlock")
    parts = [mamba(norm=ln(), a=linear(), b=linear()) for _ in range(4)]
    parts[2] = attn(norm=ln(), attn=attention())
    return Holder(embed=nn.Embedding(11, D), layers=nn.ModuleList(parts), norm=ln())


# --- vision --------------------------------------------------------------------------------------


def vit_of_lists():
    """Attention and feed-forward side by side in lists, no class for the layer."""
    attn, ff = kind("Attention"), kind("FeedForward")

    def layer():
        return nn.ModuleList(
            [
                attn(norm=ln(), to_qkv=linear(), to_out=nn.Sequential(linear(), nn.Dropout(0.1))),
                ff(net=nn.Sequential(ln(), linear(), nn.GELU(), linear())),
            ]
        )

    embed = nn.Sequential(nn.Identity(), ln(), linear(), ln())
    tower = Holder(norm=ln(), layers=nn.ModuleList(layer() for _ in range(2)))
    return Holder(to_patch_embedding=embed, transformer=tower, mlp_head=linear())


def vit_of_residuals():
    """A layer that is a Sequential of two residual parts of one class."""
    residual, layer = kind("ResidualAdd"), kind("EncoderBlock", nn.Sequential)

    def block():
        return layer(
            residual(fn=nn.Sequential(ln(), attention(), nn.Dropout(0.1))),
            residual(fn=nn.Sequential(ln(), linear(), nn.GELU(), linear())),
        )

    return Holder(embed=conv(), encoder=nn.Sequential(*(block() for _ in range(2))))


def swin():
    stage, block = kind("BasicLayer"), kind("SwinBlock")

    def blocks(depth):
        return nn.ModuleList(
            block(norm1=ln(), attn=attention(), norm2=ln(), mlp=mlp()) for _ in range(depth)
        )

    def merge():
        return kind("PatchMerging")(reduction=linear(), norm=ln())

    return Holder(
        patch_embed=conv(),
        layers=nn.ModuleList(
            [stage(blocks=blocks(2), downsample=merge()), stage(blocks=blocks(1), downsample=None)]
        ),
    )


def mixer():
    block = kind("MixerBlock")
    return Holder(
        stem=conv(),
        blocks=nn.Sequential(*(block(n1=ln(), t=mlp(), n2=ln(), c=mlp()) for _ in range(3))),
    )


BasicBlock = kind("BasicBlock")


def basic_block(shortcut=False):
    down = nn.Sequential(conv(1), bn()) if shortcut else None
    return BasicBlock(conv1=conv(), bn1=bn(), conv2=conv(), bn2=bn(), downsample=down)


def resnet():
    return Holder(
        conv1=conv(7),
        bn1=bn(),
        layer1=nn.Sequential(basic_block(), basic_block()),
        layer2=nn.Sequential(basic_block(shortcut=True), basic_block()),
        fc=linear(),
    )


def resnet_of_stages():
    stage = kind("Stage")
    return Holder(
        stages=nn.ModuleList(
            stage(layers=nn.Sequential(basic_block(shortcut=True), *[basic_block()] * i))
            for i in range(1, 3)
        )
    )


class ConvNormAct(nn.Sequential):
    def __init__(self, kernel=1):
        super().__init__(conv(kernel), bn(), nn.ReLU6())


def mobilenet():
    inverted = kind("InvertedResidual")

    def block():
        return inverted(conv=nn.Sequential(ConvNormAct(), ConvNormAct(3), conv(1), bn()))

    return Holder(
        features=nn.Sequential(ConvNormAct(3), block(), block(), block(), ConvNormAct()),
        classifier=nn.Sequential(nn.Dropout(0.1), linear()),
    )


def efficientnet():
    mbconv, squeeze = kind("MBConv"), kind("SqueezeExcitation")

    def block():
        se = squeeze(fc1=conv(1), fc2=conv(1))
        return mbconv(block=nn.Sequential(ConvNormAct(), ConvNormAct(3), se, ConvNormAct()))

    return Holder(
        features=nn.Sequential(
            ConvNormAct(3), nn.Sequential(block()), nn.Sequential(block(), block()), ConvNormAct()
        )
    )


def convnext():
    block = kind("CNBlock")

    def one():
        return block(block=nn.Sequential(conv(7, groups=D), ln(), linear(), nn.GELU(), linear()))

    def down():
        return nn.Sequential(ln(), nn.Conv2d(D, D, 2, 2))

    return Holder(
        features=nn.Sequential(
            nn.Sequential(nn.Conv2d(3, D, 4, 4), ln()),
            nn.Sequential(one(), one()),
            down(),
            nn.Sequential(one(), one(), one()),
        )
    )


class DenseBlock(nn.ModuleDict):
    """A dictionary with a forward of its own."""

    def forward(self, x):
        raise NotImplementedError


def densenet():
    layer = kind("DenseLayer")

    def block(depth):
        parts = [layer(norm1=bn(), conv1=conv(1), norm2=bn(), conv2=conv()) for _ in range(depth)]
        return DenseBlock({f"denselayer{i + 1}": part for i, part in enumerate(parts)})

    def transition():
        return kind("Transition", nn.Sequential)(bn(), nn.ReLU(), conv(1), nn.AvgPool2d(2))

    return Holder(
        features=nn.Sequential(
            OrderedDict(
                conv0=conv(7), denseblock1=block(2), transition1=transition(), denseblock2=block(2)
            )
        )
    )


class DoubleConv(nn.Sequential):
    def __init__(self):
        super().__init__(conv(), bn(), nn.ReLU(), conv(), bn(), nn.ReLU())


def unet():
    return Holder(
        downs=nn.ModuleList(DoubleConv() for _ in range(2)),
        ups=nn.ModuleList([nn.ConvTranspose2d(D, D, 2, 2), DoubleConv()]),
        final=conv(1),
    )


def diffusion_unet():
    res, attn, level = kind("ResBlock"), kind("AttnBlock"), kind("DownLevel")

    def one():
        return level(
            resnets=nn.ModuleList(
                res(norm1=bn(), conv1=conv(), norm2=bn(), conv2=conv()) for _ in range(2)
            ),
            attentions=nn.ModuleList(attn(norm=bn(), q=conv(1), k=conv(1)) for _ in range(2)),
            downsamplers=nn.ModuleList([kind("Downsample")(conv=conv())]),
        )

    return Holder(conv_in=conv(), down_blocks=nn.ModuleList([one(), one()]), conv_out=conv())


def yolo():
    csp, bottleneck = kind("C2f"), kind("Bottleneck")

    def stage():
        return csp(
            cv1=ConvNormAct(),
            cv2=ConvNormAct(),
            m=nn.ModuleList(bottleneck(cv1=ConvNormAct(), cv2=ConvNormAct()) for _ in range(2)),
        )

    return Holder(model=nn.Sequential(ConvNormAct(), stage(), ConvNormAct(), stage()))


def plain_conv_net():
    return Holder(net=nn.Sequential(ConvNormAct(), ConvNormAct(), ConvNormAct()))


def norm_free_residuals():
    """Residual blocks with channel attention inside, which has two weights as well."""
    gate, block, group = kind("ChannelGate"), kind("RCAB"), kind("ResidualGroup")

    def one():
        inner = gate(down=conv(1), up=conv(1))
        return block(body=nn.Sequential(conv(), nn.ReLU(), conv(), inner))

    groups = [group(body=nn.Sequential(one(), one(), conv())) for _ in range(2)]
    return Holder(head=conv(), body=nn.Sequential(*groups, conv()))


# --- sound, series -------------------------------------------------------------------------------


def wavenet():
    layer = kind("GatedLayer")

    def one():
        weight_norm = nn.utils.parametrizations.weight_norm
        return layer(
            dilated=weight_norm(nn.Conv1d(D, 2 * D, 3)), skip=weight_norm(nn.Conv1d(D, D, 1))
        )

    return Holder(start=nn.Conv1d(1, D, 1), layers=nn.ModuleList(one() for _ in range(3)))


def lstm_stack():
    return Holder(
        rnns=nn.ModuleList(nn.LSTM(D, D, batch_first=True) for _ in range(3)),
        norms=nn.ModuleList(ln() for _ in range(3)),
    )


class Raw(nn.Module):
    """A block whose weights are its own, with no modules inside."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.zeros(D, D))
        self.down = nn.Parameter(torch.zeros(D, D))

    def forward(self, x):
        return x + x @ self.up @ self.down


def encoder_layer():
    return nn.TransformerEncoderLayer(D, 2, D, batch_first=True)


def torch_transformer():
    return nn.Transformer(D, 2, 2, 2, D, batch_first=True)


def two_towers():
    vision = Holder(stem=conv(), net=nn.Sequential(*[kind_res() for _ in range(2)]))
    return Holder(text=gpt(2), vision=vision, logit_scale=nn.Linear(1, 1))


NormFree = kind("NormFreeBlock")


def kind_res():
    return NormFree(conv1=conv(), conv2=conv())


TABLE = {
    gpt: [f"transformer.h.{i}" for i in range(3)],
    gpt_functional_norm: ["h.0", "h.1"],
    gpt_head_by_head: ["blocks.0", "blocks.1"],
    mixture_of_experts: ["layers.0", "layers.1"],
    mixture_of_normed_experts: ["layers.0", "layers.1"],
    state_space_with_one_attention: [f"layers.{i}" for i in range(4)],
    vit_of_lists: [f"transformer.layers.{i}.{j}" for i in range(2) for j in range(2)],
    vit_of_residuals: ["encoder.0", "encoder.1"],
    swin: ["layers.0.blocks.0", "layers.0.blocks.1", "layers.1.blocks.0"],
    mixer: ["blocks.0", "blocks.1", "blocks.2"],
    resnet: ["layer1.0", "layer1.1", "layer2.0", "layer2.1"],
    resnet_of_stages: [
        "stages.0.layers.0",
        "stages.0.layers.1",
        "stages.1.layers.0",
        "stages.1.layers.1",
    ],
    mobilenet: ["features.1", "features.2", "features.3"],
    efficientnet: ["features.1.0", "features.2.0", "features.2.1"],
    convnext: ["features.1.0", "features.1.1", "features.3.0", "features.3.1", "features.3.2"],
    densenet: [f"features.denseblock{i}.denselayer{j}" for i in (1, 2) for j in (1, 2)],
    unet: ["downs.0", "downs.1", "ups.1"],
    diffusion_unet: [
        f"down_blocks.{i}.{part}.{j}"
        for i in (0, 1)
        for part in ("resnets", "attentions")
        for j in (0, 1)
    ],
    yolo: [f"model.{i}.m.{j}" for i in (1, 3) for j in (0, 1)],
    plain_conv_net: ["net.0", "net.1", "net.2"],
    norm_free_residuals: [f"body.{i}.body.{j}" for i in (0, 1) for j in (0, 1)],
    wavenet: ["layers.0", "layers.1", "layers.2"],
    lstm_stack: ["rnns.0", "rnns.1", "rnns.2"],
    two_towers: ["text.transformer.h.0", "text.transformer.h.1", "vision.net.0", "vision.net.1"],
    torch_transformer: [f"{part}.layers.{i}" for part in ("encoder", "decoder") for i in (0, 1)],
}


@pytest.mark.parametrize("make", TABLE, ids=lambda make: make.__name__)
def test_finds_what_a_person_would_choose(make):
    assert names(make()) == TABLE[make]


@pytest.mark.parametrize("make", TABLE, ids=lambda make: make.__name__)
def test_order_is_that_of_modules_and_blocks_never_nest(make):
    model = make()
    found = [block.module for block in find_blocks(model)]
    assert found == [m for m in model.modules() if any(m is block for block in found)]
    for block in found:
        assert not {id(m) for m in block.modules() if m is not block} & set(map(id, found))


@pytest.mark.parametrize("make", TABLE, ids=lambda make: make.__name__)
def test_names_lead_to_the_modules(make):
    model = Holder(lit=make())
    assert all(model.get_submodule(name) is module for name, module in find_blocks(model))


def test_one_layer_is_found():
    assert names(gpt(depth=1)) == ["transformer.h.0"]
    assert names(nn.TransformerEncoder(encoder_layer(), 1)) == ["layers.0"]


def test_a_shallow_tower_beside_a_deep_one_is_found():
    model = nn.Transformer(D, 2, 2, 1, D, batch_first=True)
    assert names(model) == ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0"]


def test_weights_without_submodules_make_a_block():
    assert names(nn.ModuleList(Raw() for _ in range(2))) == ["0", "1"]


def test_a_module_under_two_names_is_one_block():
    model = gpt(2)
    model.first = model.transformer.h[0]
    model.again = model.transformer.h
    assert names(model) == ["transformer.h.0", "transformer.h.1"]
    assert names(nn.Sequential(shared := encoder_layer(), shared, encoder_layer())) == ["0", "2"]


def test_compiled_blocks_are_found_under_their_wrapper():
    model = nn.Sequential(*(torch.compile(gpt_block(), backend="eager") for _ in range(2)))
    assert names(model) == ["0._orig_mod", "1._orig_mod"]
    assert classes(model) == {"GPTBlock"}
    assert names(torch.compile(gpt(2), backend="eager")) == [
        "_orig_mod.transformer.h.0",
        "_orig_mod.transformer.h.1",
    ]


def test_a_class_laid_over_some_blocks_changes_nothing():
    model = gpt()
    block = model.transformer.h[1]
    block.__class__ = type("FSDPGPTBlock", (GPTBlock,), {})
    assert names(model) == TABLE[gpt]
    block.__class__ = type("GPTBlock", (GPTBlock,), {"__module__": GPTBlock.__module__})
    assert names(model) == TABLE[gpt]


def test_parametrized_layers_are_no_blocks():
    layers = (nn.utils.parametrizations.spectral_norm(linear()) for _ in range(3))
    with pytest.raises(ValueError, match="no repeated blocks found in Sequential"):
        find_blocks(nn.Sequential(*layers))


def test_lazy_modules_are_found():
    block = kind("LazyBlock")
    model = nn.Sequential(*(block(a=nn.LazyLinear(D), b=nn.LazyLinear(D)) for _ in range(2)))
    assert names(model) == ["0", "1"]


def test_heads_are_no_tower():
    heads = nn.ModuleDict({task: nn.Sequential(linear(), nn.Tanh(), linear()) for task in "ab"})
    assert names(Holder(backbone=gpt(2), heads=heads)) == [
        "backbone.transformer.h.0",
        "backbone.transformer.h.1",
    ]


# --- nothing to find -----------------------------------------------------------------------------


def test_mlp_has_no_blocks():
    with pytest.raises(
        ValueError,
        match=re.escape(
            "no repeated blocks found in Sequential, looked for children of one class in "
            "ModuleList, Sequential and ModuleDict. Classes seen: Linear (2), ReLU (1). Name the "
            "blocks by class, layers='Linear', or by place, layers='encoder.layers.*'"
        ),
    ):
        find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))


def test_numbered_attributes_are_listed():
    model = Holder(layer1=gpt_block(), layer2=gpt_block(), layer3=gpt_block())
    with pytest.raises(ValueError, match=r"Classes seen: GPTBlock \(3\), .*layers='GPTBlock'"):
        find_blocks(model)
    assert names(model, "GPTBlock") == names(model, "layer*") == ["layer1", "layer2", "layer3"]


class Function(nn.Module):
    """Has no parameters: they are in a closure."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        functions = [lambda x: x @ self.weight, torch.tanh, lambda x: x @ self.weight.T]
        self.steps = nn.Sequential(*map(Function, functions))

    def forward(self, x):
        return self.steps(x)


def test_what_is_repeated_inside_of_the_only_composite_is_named():
    """A LightningModule around the model does not hide it."""
    module = nn.ModuleDict({"net": Functional()})
    with pytest.raises(ValueError, match=r"Classes seen: Function \(3\), .*layers='Function'"):
        find_blocks(module)
    assert len(find_blocks(module, "Function")) == 3


def test_branches_of_numbered_blocks_are_not_taken_for_blocks():
    inception = kind("Inception")

    def one():
        branch = nn.Sequential(ConvNormAct(), ConvNormAct(3))
        return inception(branch1=ConvNormAct(), branch2=branch)

    with pytest.raises(ValueError, match=r"Classes seen: Inception \(2\)"):
        find_blocks(Holder(inception3a=one(), inception3b=one()))


# --- layers= -------------------------------------------------------------------------------------

ENCODER = ["encoder.layers.0", "encoder.layers.1"]
DECODER = ["decoder.layers.0", "decoder.layers.1"]


class ListConfig(Sequence):
    """A sequence that is neither list nor tuple, as OmegaConf makes."""

    def __init__(self, *items):
        self.items = items

    def __getitem__(self, index):
        return self.items[index]

    def __len__(self):
        return len(self.items)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (nn.TransformerEncoderLayer, ENCODER),
        ((nn.TransformerEncoderLayer, nn.TransformerDecoderLayer), ENCODER + DECODER),
        ([nn.TransformerDecoderLayer, "encoder.layers.*"], ENCODER + DECODER),
        ("TransformerEncoderLayer", ENCODER),
        ("torch.nn.TransformerDecoderLayer", DECODER),
        ("torch.nn.modules.transformer.TransformerDecoderLayer", DECODER),
        ("encoder.layers.*", ENCODER),
        ("encoder.layers.1", ENCODER[1:]),
        ("*coder.layers.?", ENCODER + DECODER),
        ("encoder.*", [*ENCODER, "encoder.norm"]),
        (ListConfig("encoder.layers.*", "TransformerDecoderLayer"), ENCODER + DECODER),
        (lambda name, module: name.endswith(".0") and "layers" in name, ENCODER[:1] + DECODER[:1]),
        (lambda name, module: isinstance(module, nn.TransformerEncoderLayer), ENCODER),
    ],
)
def test_layers_forms(layers, expected):
    assert names(torch_transformer(), layers) == expected


def test_a_base_class_means_its_subclasses():
    model = nn.Sequential(kind("Child", BasicBlock)(a=conv()), nn.ReLU())
    assert names(model, BasicBlock) == names(model, "BasicBlock") == names(model, "Child") == ["0"]


def test_compiled_blocks_by_layers():
    model = nn.Sequential(*(torch.compile(gpt_block(), backend="eager") for _ in range(2)))
    expected = ["0._orig_mod", "1._orig_mod"]
    assert names(model, "GPTBlock") == names(model, "?") == names(model, "*") == expected


def test_the_model_is_no_block_of_its_own():
    model = nn.TransformerEncoder(encoder_layer(), 2)
    assert names(model, lambda name, module: True) == ["layers.0", "layers.1"]


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        (
            "no_such_layer",
            ValueError,
            "layers='no_such_layer' matches nothing in Transformer; near",
        ),
        (
            "TransformerEncoderLayr",
            ValueError,
            "layers='TransformerEncoderLayr' matches nothing in Transformer; nearest: "
            "'TransformerEncoderLayer'",
        ),
        (
            "encoder.layer.*",
            ValueError,
            "layers='encoder.layer.*' matches nothing in Transformer; nearest: 'encoder.layers.*'",
        ),
        (nn.Conv2d, ValueError, "layers=Conv2d matches nothing in Transformer; nearest: "),
        ([nn.TransformerEncoderLayer, "Conv2d"], ValueError, "layers='Conv2d' matches nothing"),
        (lambda name, module: False, ValueError, "matches nothing in Transformer"),
        (
            "encoder.layers",
            ValueError,
            "layers='encoder.layers' matches 'encoder.layers', a ModuleList, which has no forward "
            "of its own; did you mean 'encoder.layers.*'?",
        ),
        (nn.ModuleList, ValueError, "a ModuleList, which has no forward of its own; did you mean"),
        ("", ValueError, "layers holds an empty string ('')"),
        (["encoder.layers.*", " "], ValueError, "layers holds an empty string (' ')"),
        ([], ValueError, "layers=[] is empty; pass None to let blocks be found, or a module class"),
        (3, TypeError, "layers must be a module class, a class name or qualified name pattern"),
        (True, TypeError, "layers must be a module class"),
        ({"encoder": 1}, TypeError, "layers must be a module class"),
        ([None], TypeError, "layers holds None; it must be a module class"),
        ([1.5], TypeError, "layers holds 1.5; it must be"),
        (int, TypeError, "layers holds <class 'int'>, which is no subclass of torch.nn.Module"),
        (nn.ReLU(), TypeError, "layers holds a module, ReLU; pass its class, its name"),
        ([nn.ReLU()], TypeError, "layers holds a module, ReLU; pass its class, its name"),
    ],
)
def test_layers_errors(layers, error, message):
    with pytest.raises(error, match=re.escape(message)):
        find_blocks(torch_transformer(), layers)


# --- notes ---------------------------------------------------------------------------------------


def test_nothing_to_note():
    for layers in (None, "encoder.layers.*", nn.TransformerEncoderLayer, "encoder.layers.0"):
        assert select_blocks(torch_transformer(), layers).notes == ()


def test_nested_matches_are_noted():
    selection = select_blocks(nn.TransformerEncoder(encoder_layer(), 2), ["layers.*", nn.LayerNorm])
    assert [block.name for block in selection.blocks] == ["layers.0", "layers.1"]
    assert selection.notes == (
        "4 LayerNorm matched by layers= inside TransformerEncoderLayer passed over: "
        "the outermost counts",
    )


def test_a_class_within_itself_is_noted():
    inner = [BasicBlock(a=conv()) for _ in range(2)]
    selection = select_blocks(nn.Sequential(BasicBlock(blocks=nn.Sequential(*inner))), BasicBlock)
    assert [block.name for block in selection.blocks] == ["0"]
    assert selection.notes[0].startswith("2 BasicBlock matched by layers= inside BasicBlock")


def test_blocks_are_plain_pairs():
    block = find_blocks(gpt(1))[0]
    assert block == Block("transformer.h.0", block.module)
    name, module = block
    assert (name, type(module)) == ("transformer.h.0", GPTBlock)
