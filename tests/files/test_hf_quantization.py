"""quantization_config as fp8, compressed-tensors and ModelOpt write it; everything else refused by name."""

import json

import container_bytes as make
import pytest
import torch

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.files.checkpoint import open_checkpoint

Q = "model.layers.0.self_attn.q_proj"
NAME = "layers.0.self_attn.q_proj.weight"
FLOAT_GROUP = {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}


def codes(n_rows, columns):
    torch.manual_seed(n_rows + columns)
    return (torch.randint(0, 256, (n_rows, columns), dtype=torch.uint8) & 0xF7).view(torch.float8_e4m3fn)


def packed(n_rows, columns):
    torch.manual_seed(columns)
    return torch.randint(0, 256, (n_rows, columns // 2), dtype=torch.uint8)


def group_scales(n_rows, n_groups, dtype):
    """No two alike: equal scales hide a wrong order (K12)."""
    return (torch.arange(n_rows * n_groups) % 60 + 30).to(torch.uint8).reshape(n_rows, n_groups).view(dtype)


def opened(path, parts, settings, plain=()):
    tensors = {f"{Q}.{part}": value for part, value in parts.items()}
    tensors.update({name: torch.ones(2, 2) for name in plain})
    # A directory of its own: an open checkpoint must not have its file rewritten under it.
    directory = path / f"m{len(list(path.iterdir()))}"
    return open_checkpoint(
        make.model_directory(directory, tensors, {"quantization_config": settings} if settings else {})
    )


FP8 = {"quant_method": "fp8"}
CT_FP8 = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": FLOAT_GROUP}}
MODELOPT_FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}

FP8_LAYOUTS = {
    "fp8 128x128": ({**FP8, "weight_block_size": [128, 128]}, "weight_scale_inv", (2, 3), "FP8-E4M3-128x128"),
    "fp8 tensor": (FP8, "weight_scale", (), "FP8-E4M3-tensor"),
    "fp8 tensor by another name": (FP8, "weight_scale_inv", (1,), "FP8-E4M3-tensor"),
    "compressed-tensors channel": (CT_FP8, "weight_scale", (200, 1), "FP8-E4M3-row"),
    "compressed-tensors tensor": (CT_FP8, "weight_scale", (1,), "FP8-E4M3-tensor"),
    "modelopt tensor": (MODELOPT_FP8, "weight_scale", (), "FP8-E4M3-tensor"),
}


@pytest.mark.parametrize("what", FP8_LAYOUTS)
def test_fp8_layouts(tmp_path, what):
    settings, part, shape, name = FP8_LAYOUTS[what]
    weight, scale = codes(200, 300), torch.rand(shape) + 0.5
    checkpoint = opened(
        tmp_path, {"weight": weight, part: scale, "input_scale": torch.ones(1)}, settings, ["lm_head.weight"]
    )
    tensor = checkpoint.tensors[NAME]
    assert (tensor.format_name, tensor.shape) == (name, (200, 300))
    wide = (
        scale
        if scale.numel() == 1
        else scale.repeat_interleave(128, 0)[:200]
        if scale.dim() == 2 and shape[1] == 3
        else scale
    )
    wide = wide.repeat_interleave(128, 1)[:, :300] if wide.dim() == 2 and wide.shape[1] == 3 else wide
    assert torch.equal(tensor.decode(), weight.float() * wide)
    assert checkpoint.tensors["lm_head.weight"].format_name == "F32"
    assert checkpoint.notices == ("1 activation or cache scales ignored",)


FP4_GROUP = {"weights": {"type": "float", "num_bits": 4, "strategy": "tensor_group"}}
CT_NVFP4 = {**CT_FP8, "format": "nvfp4-pack-quantized", "config_groups": {"group_0": FP4_GROUP}}
MODELOPT_NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


@pytest.mark.parametrize("multiplier", [None, 0.25])
def test_nvfp4_conventions_decode_alike(tmp_path, multiplier):
    """K09, K11: a multiplier in ModelOpt, a divisor in compressed-tensors, 1 when absent."""
    weight, scale = packed(4, 64), group_scales(4, 4, torch.float8_e4m3fn)
    first, second = {"weight": weight, "weight_scale": scale}, {"weight_packed": weight, "weight_scale": scale}
    if multiplier:
        first["weight_scale_2"] = torch.tensor(multiplier)
        second["weight_global_scale"] = torch.tensor([1 / multiplier])
    modelopt = opened(tmp_path, first, MODELOPT_NVFP4).tensors[NAME]
    compressed = opened(tmp_path, second, CT_NVFP4).tensors[NAME]
    assert (modelopt.format_name, compressed.format_name) == ("NVFP4-modelopt", "NVFP4-compressed-tensors")
    assert modelopt.shape == compressed.shape == (4, 64)
    assert torch.equal(modelopt.decode(), compressed.decode())
    plain = opened(tmp_path, {"weight": weight, "weight_scale": scale}, MODELOPT_NVFP4).tensors[NAME].decode()
    assert torch.equal(modelopt.decode(), plain * (multiplier or 1))
    assert plain.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp4_conventions_decode_alike(tmp_path, dtype):
    """K08: U8 and F8_E8M0 scales are the same scales."""
    weight, scale = packed(4, 64), group_scales(4, 2, dtype)
    ct = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    modelopt = opened(
        tmp_path, {"weight": weight, "weight_scale": scale}, {**MODELOPT_FP8, "quant_algo": "MXFP4"}
    ).tensors[NAME]
    compressed = opened(tmp_path, {"weight_packed": weight, "weight_scale": scale}, ct).tensors[NAME]
    assert (modelopt.format_name, compressed.format_name) == ("MXFP4-modelopt", "MXFP4-compressed-tensors")
    assert torch.equal(modelopt.decode(), compressed.decode())
    low = modelopt.decode()[0, 0] / 2.0 ** (scale.view(torch.uint8)[0, 0].item() - 127)
    assert low.abs().item() in (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def test_modelopt_settings_may_lie_in_their_own_file(tmp_path):
    parts = {"weight": packed(4, 64), "weight_scale": group_scales(4, 4, torch.float8_e4m3fn)}
    make.model_directory(tmp_path / "m", {f"{Q}.{part}": value for part, value in parts.items()})
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "m" / "hf_quant_config.json").write_text(json.dumps(own))
    assert open_checkpoint(tmp_path / "m").tensors[NAME].format_name == "NVFP4-modelopt"


REFUSED = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "'gptq'"),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128}, "'awq'"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
    "gpt-oss": ({"quant_method": "mxfp4"}, "'mxfp4'"),
    "method of another type": ({"quant_method": ["fp8"]}, r"\['fp8'\]"),
    "fp8 with other blocks": ({**FP8, "weight_block_size": [64, 64]}, r"\[64, 64\]"),
    "fp8 e5m2": ({**FP8, "fmt": "e5m2"}, "e5m2"),
    "integers": ({**CT_FP8, "format": "int-quantized"}, "'int-quantized'"),
    "packed integers": ({**CT_FP8, "format": "pack-quantized"}, "'pack-quantized'"),
    "mixed with integers": (
        {**CT_FP8, "format": "mixed-precision", "config_groups": {"a": {**FLOAT_GROUP, "format": "pack-quantized"}}},
        "'pack-quantized'"),
    "int4 weights": (
        {**CT_FP8, "config_groups": {"a": {"weights": {"type": "int", "num_bits": 4}}}}, "type int, 4 bits"),
    "fp8 by blocks": (
        {**CT_FP8, "config_groups": {"a": {"weights": {**FLOAT_GROUP["weights"], "strategy": "block"}}}}, "'block'"),
    "rotated": ({**CT_FP8, "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    "sparse": ({**CT_FP8, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    "modelopt awq": ({**MODELOPT_FP8, "quant_algo": "NVFP4_AWQ"}, "'NVFP4_AWQ'"),
    "modelopt int8": ({**MODELOPT_FP8, "quant_algo": "INT8_SQ"}, "'INT8_SQ'"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_method_is_refused_by_name(tmp_path, what):
    settings, message = REFUSED[what]
    with pytest.raises(UnsupportedError, match=rf"{message}.*not supported"):
        opened(tmp_path, {"weight": torch.ones(2, 2)}, settings)


@pytest.mark.parametrize(
    ("part", "name"), [("qweight", "GPTQ or AWQ"), ("absmax", "bitsandbytes"), ("pre_quant_scale", "AWQ")]
)
def test_foreign_parts_are_refused_whatever_the_config_says(tmp_path, part, name):
    with pytest.raises(UnsupportedError, match=rf"q_proj\.{part}: {name}"):
        opened(tmp_path, {part: torch.ones(2, 2)}, None)


NV = {"weight": packed(4, 64), "weight_scale": group_scales(4, 4, torch.float8_e4m3fn)}
BAD_PARTS = {
    "blocks too few": ({"weight": codes(200, 300), "weight_scale_inv": torch.ones(2, 2)},
                       {**FP8, "weight_block_size": [128, 128]}, r"\[2, 2\], expected weight_scale_inv \[2, 3\]"),
    "blocks by another name": ({"weight": codes(8, 8), "weight_scale": torch.ones(1, 1)},
                               {**FP8, "weight_block_size": [128, 128]}, "expected weight_scale_inv"),
    "scales of neither kind": ({"weight": codes(8, 8), "weight_scale": torch.ones(5)}, CT_FP8,
                               r"\[5\], expected one value or 8"),
    "two scales": ({"weight": codes(8, 8), "weight_scale": torch.ones(1), "weight_scale_2": torch.ones(1)}, FP8,
                   "part weight_scale_2 does not belong"),
    "zero points": ({"weight": codes(8, 8), "weight_scale": torch.ones(8, 1), "weight_zero_point": torch.ones(8, 1)},
                    CT_FP8, "part weight_zero_point does not belong"),
    "groups too few": ({**NV, "weight_scale": group_scales(4, 2, torch.float8_e4m3fn)}, MODELOPT_NVFP4,
                       r"\[4, 2\], expected \[4, 4\]"),
    "global scale of two": ({**NV, "weight_scale_2": torch.ones(2)}, MODELOPT_NVFP4, "weight_scale_2 has shape"),
    "nvfp4 scales as floats": ({**NV, "weight_scale": torch.ones(4, 4)}, MODELOPT_NVFP4, "weight_scale is F32"),
    "weight not packed": ({**NV, "weight": torch.ones(4, 64)}, MODELOPT_NVFP4, "weight is F32, expected U8"),
    "weight absent": ({"weight_scale": torch.ones(1)}, FP8, "has weight_scale, expected weight"),
    "unexplained": ({"weight": codes(8, 8), "weight_scale": torch.ones(1)}, None, "holds no quantization settings"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_PARTS)
def test_parts_that_do_not_fit_are_refused_with_the_module(tmp_path, what):
    parts, settings, message = BAD_PARTS[what]
    with pytest.raises(FileError, match=rf"module layers\.0\.self_attn\.q_proj: .*{message}"):
        opened(tmp_path, parts, settings)
