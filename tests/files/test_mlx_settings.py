"""Which bits, group and mode each module of an MLX directory gets."""

import json

import container_bytes as make
import pytest
import torch

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.files.checkpoint import open_checkpoint

PREFIXES = ["", "model.", "language_model.model.", "model.language_model."]
DEFAULT = {"group_size": 64, "bits": 4}
Q, UP, DOWN = "layers.0.self_attn.q_proj", "layers.0.mlp.up_proj", "layers.0.mlp.down_proj"


def affine(module, n_rows=4, columns=256, bits=4, group=64):
    torch.manual_seed(columns * bits + group)
    return {
        f"{module}.weight": torch.randint(-(2**31), 2**31 - 1, (n_rows, columns * bits // 32))
        .to(torch.int32)
        .view(torch.uint32),
        f"{module}.scales": torch.randn(n_rows, columns // group).bfloat16(),
        f"{module}.biases": torch.randn(n_rows, columns // group).bfloat16(),
    }


def scaled(module, n_rows=4, columns=256, bits=4, group=32, dtype=torch.uint8):
    """A module of a float mode: packed words and one-byte scales, neighbours never alike."""
    torch.manual_seed(columns * bits + group)
    codes = torch.randint(0, 0x7F, (n_rows, columns * bits // 8), dtype=torch.uint8) & 0x77
    scales = (torch.arange(n_rows * columns // group, dtype=torch.uint8) % 19 + 100).reshape(n_rows, -1)
    return {f"{module}.weight": codes.view(torch.uint32), f"{module}.scales": scales.view(dtype)}


def opened(path, tensors, quantization, key="quantization", is_nested=False):
    settings = {key: quantization}
    return open_checkpoint(
        make.model_directory(path / "m", tensors, {"text_config": settings} if is_nested else settings)
    )


def format_of(checkpoint, module):
    return checkpoint.tensors[f"{module}.weight"].format_name


def bit_by_bit(words, scales, biases, bits, group):
    """Every code read bit for bit from the words' little-endian stream."""
    raw = words.contiguous().view(torch.uint8)
    stream = (raw.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    codes = (stream.reshape(len(raw), -1, bits).long() << torch.arange(bits)).sum(-1).float()
    wide = [part.float().repeat_interleave(group, 1) for part in (scales, biases)]
    return codes * wide[0] + wide[1]


@pytest.mark.parametrize("spelling", PREFIXES)
@pytest.mark.parametrize("stored", PREFIXES)
def test_override_is_found_whatever_the_prefixes(tmp_path, spelling, stored):
    """M01, M04: 4-bit default, one 2-bit module of group 32, whose shapes look like a 4-bit one of group 64."""
    tensors = {**affine(f"{stored}{Q}"), **affine(f"{stored}{DOWN}", bits=2, group=32)}
    settings = {**DEFAULT, f"{spelling}{DOWN}": {"bits": 2, "group_size": 32}}
    checkpoint = opened(tmp_path, tensors, settings)
    assert (format_of(checkpoint, Q), format_of(checkpoint, DOWN)) == ("affine-4b-g64", "affine-2b-g32")
    assert checkpoint.tensors[f"{DOWN}.weight"].shape == (4, 256)


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_settings_are_found_at_the_root_and_in_text_config(tmp_path, key, is_nested):
    """M11: under either key."""
    checkpoint = opened(tmp_path, affine(Q, bits=8, group=128), {"group_size": 128, "bits": 8}, key, is_nested)
    assert format_of(checkpoint, Q) == "affine-8b-g128"


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_bits_follow_from_shapes_without_an_override(tmp_path, bits, group):
    """M01, K15: K = words * 32 / bits for every width, and the decoded values prove the packing."""
    tensors = affine(Q, bits=bits, group=group, columns=4096)
    checkpoint = opened(tmp_path, tensors, {"group_size": group, "bits": 4})
    tensor = checkpoint.tensors[f"{Q}.weight"]
    assert (tensor.format_name, tensor.shape) == (f"affine-{bits}b-g{group}", (4, 4096))
    expected = bit_by_bit(*(tensors[f"{Q}.{part}"] for part in ("weight", "scales", "biases")), bits, group)
    assert torch.equal(tensor.decode(), expected)
    assert tensor.n_bytes == 4 * (4096 * bits // 8 + 4 * 4096 // group)


def test_scalars_and_module_entries_are_told_apart(tmp_path):
    """M05: dicts and false among the scalars; a true means the defaults."""
    tensors = {**affine(Q), **affine(UP, bits=8), f"{DOWN}.weight": torch.ones(4, 64, dtype=torch.bfloat16)}
    settings = {**DEFAULT, "mode": "affine", UP: {"bits": 8, "group_size": 64}, DOWN: False, Q: True}
    checkpoint = opened(tmp_path, tensors, settings)
    assert [format_of(checkpoint, module) for module in (Q, UP, DOWN)] == ["affine-4b-g64", "affine-8b-g64", "BF16"]


def test_module_that_should_be_unquantised_but_is_not_is_refused(tmp_path):
    """M05: false contradicts the arrays."""
    with pytest.raises(FileError, match=rf"{Q}: config\.json leaves it unquantised"):
        opened(tmp_path, affine(Q), {**DEFAULT, f"model.{Q}": False})


def test_unquantised_module_without_an_entry_is_plain(tmp_path):
    checkpoint = opened(tmp_path, {**affine(Q), "norm.weight": torch.ones(4), f"{UP}.bias": torch.ones(4)}, DEFAULT)
    assert checkpoint.tensors["norm.weight"].format_name == checkpoint.tensors[f"{UP}.bias"].format_name == "F32"


@pytest.mark.parametrize("entry", [{"bits": 8, "group_size": 64}, {"bits": 8, "group_size": 64, "mode": "affine"}])
def test_affine_modules_in_an_mxfp4_file(tmp_path, entry):
    """M02: mxfp4 by default, 8-bit affine overrides under unwrapped keys; the biases have their place."""
    tensors = {**scaled(f"language_model.model.{Q}"), **affine(f"language_model.model.{DOWN}", bits=8)}
    settings = {"group_size": 32, "bits": 4, "mode": "mxfp4", DOWN: entry}
    checkpoint = opened(tmp_path, tensors, settings)
    assert (format_of(checkpoint, Q), format_of(checkpoint, DOWN)) == ("mlx-mxfp4", "affine-8b-g64")
    assert set(checkpoint.tensors[f"{DOWN}.weight"].read()) == {"weight", "scales", "biases"}


def test_entry_without_a_mode_and_biases_means_the_mode_of_the_file(tmp_path):
    """M02: affine needs biases; without them the file's own mode is meant."""
    settings = {"group_size": 32, "bits": 4, "mode": "mxfp4", Q: {"group_size": 32, "bits": 4}}
    assert format_of(opened(tmp_path, scaled(Q), settings), Q) == "mlx-mxfp4"


def test_all_modes_in_one_file(tmp_path):
    """M02, M09: each module by its own entry; gate and up alike, down different."""
    gate = UP.replace("up", "gate")
    tensors = {**scaled(Q, bits=8, group=32), **scaled(gate, group=16), **scaled(UP, group=16), **affine(DOWN)}
    settings = {**DEFAULT, Q: {"mode": "mxfp8", "bits": 8, "group_size": 32}}
    settings.update({module: {"mode": "nvfp4", "bits": 4, "group_size": 16} for module in (gate, UP)})
    checkpoint = opened(tmp_path, tensors, settings)
    names = [format_of(checkpoint, module) for module in (Q, gate, UP, DOWN)]
    assert names == ["mlx-mxfp8", "mlx-nvfp4", "mlx-nvfp4", "affine-4b-g64"]
    for module in (Q, gate, UP, DOWN):
        tensor = checkpoint.tensors[f"{module}.weight"]
        assert tensor.decode().shape == tensor.shape == (4, 256)


def test_e8m0_scales_mean_the_same_whatever_their_type(tmp_path):
    """K08: typed U8 or F8_E8M0; 127 is 1.0, one more doubles (K07)."""
    settings = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    values = []
    for dtype in (torch.uint8, torch.float8_e8m0fnu):
        values.append(opened(tmp_path, scaled(Q, dtype=dtype), settings).tensors[f"{Q}.weight"].decode())
    assert torch.equal(*values)
    tensors = scaled(Q, n_rows=1, columns=64)
    tensors[f"{Q}.scales"] = torch.tensor([[127, 128]], dtype=torch.uint8)
    tensors[f"{Q}.weight"] = torch.full((1, 32), 0x22, dtype=torch.uint8).view(torch.uint32)
    found = opened(tmp_path, tensors, settings).tensors[f"{Q}.weight"].decode()
    assert found.tolist() == [[1.0] * 32 + [2.0] * 32]


@pytest.mark.parametrize("key", ["embed_tokens", "model.embed_tokens", "language_model.model.embed_tokens"])
def test_override_of_a_tied_embedding_is_honoured(tmp_path, key):
    """M07: for rows and for the whole table, which is the head too."""
    tensors = affine("model.embed_tokens", bits=2, group=32, n_rows=50)
    checkpoint = opened(tmp_path, tensors, {**DEFAULT, key: {"bits": 2, "group_size": 32}})
    table = checkpoint.tensors["embed_tokens.weight"]
    assert table.format_name == "affine-2b-g32"
    ids = torch.tensor([49, 0, 7])
    assert torch.equal(table.rows(ids), table.decode()[ids])


def test_quantised_per_layer_projection_loads(tmp_path):
    """M08: any module with the parts of one, whatever its name."""
    names = ("per_layer_model_projection", "layers.0.per_layer_projection", "embed_tokens_per_layer")
    tensors = {key: value for name in names for key, value in affine(f"model.language_model.{name}").items()}
    checkpoint = opened(tmp_path, tensors, DEFAULT)
    assert [format_of(checkpoint, name) for name in names] == ["affine-4b-g64"] * 3


def test_weights_of_kv_sharing_layers_are_neither_demanded_nor_dropped(tmp_path):
    """M12: the reader hands over what is there; a layer without k and v is as good as one with them."""
    tensors = {**affine("layers.0.self_attn.k_proj"), **affine("layers.1.self_attn.q_proj")}
    assert set(opened(tmp_path, tensors, DEFAULT).tensors) == {
        "layers.0.self_attn.k_proj.weight",
        "layers.1.self_attn.q_proj.weight",
    }


CONTRADICTIONS = {
    "override against shapes": (
        affine(Q), {**DEFAULT, Q: {"bits": 6, "group_size": 64}}, rf"{Q}: weight .* scales .* contradict each other"),
    "group against shapes": (
        affine(Q), {**DEFAULT, Q: {"bits": 4, "group_size": 32}}, "cover 128 in groups of 32"),
    "shapes fit no bits": (
        {**affine(Q), f"{Q}.scales": torch.ones(4, 3).half(), f"{Q}.biases": torch.ones(4, 3).half()}, DEFAULT,
        "fit no bits in groups of 64"),
    "affine without biases": (
        {k: v for k, v in affine(Q).items() if "biases" not in k}, DEFAULT,
        "mode affine by config.json, but it has no biases"),
    "mxfp4 with biases": (affine(Q), {"mode": "mxfp4", "group_size": 32, "bits": 4}, "mode mxfp4 .* it has biases"),
    "rows of scales": (
        {**affine(Q, n_rows=1024, columns=64), f"{Q}.scales": torch.ones(256, 1).half()}, DEFAULT,
        rf"{Q}: scales \[256, 1\]"),
    "weight not packed": (
        {**affine(Q), f"{Q}.weight": torch.ones(4, 256)}, DEFAULT, "weight is F32, expected packed U32"),
    "affine scales as bytes": (
        {**affine(Q), f"{Q}.scales": torch.ones(4, 4, dtype=torch.uint8)}, DEFAULT, "scales are U8"),
    "weight absent": ({f"{Q}.scales": torch.ones(4, 4)}, DEFAULT, "has scales, expected weight and scales"),
    "no settings": (affine(Q), {}, "config.json holds no quantization settings"),
    "group of text": (affine(Q), {"group_size": "64", "bits": 4}, "must be whole numbers"),
}  # fmt: skip


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_evidence_against_the_settings_is_refused_with_names(tmp_path, what):
    """M01, M11: nothing is guessed when arrays and settings disagree."""
    tensors, settings, message = CONTRADICTIONS[what]
    with pytest.raises(FileError, match=message):
        opened(tmp_path, tensors, settings)


@pytest.mark.parametrize("settings", [
    {"group_size": 64, "bits": 7}, {"group_size": 16, "bits": 4}, {"group_size": 64, "bits": 4, "mode": "mxfp4"},
    {"group_size": 64, "bits": 4, "mode": "ternary"}, {"group_size": 64, "bits": 4, "mode": ["affine"]},
])  # fmt: skip
def test_unknown_layout_is_refused_by_name(tmp_path, settings):
    with pytest.raises(UnsupportedError, match="quantization"):
        opened(tmp_path, affine(Q), settings)


def test_entry_that_fits_no_module_is_told(tmp_path):
    """An ignored override is never silent; those of towers that are not loaded are no news."""
    entry = {"group_size": 64, "bits": 8}
    settings = {**DEFAULT, f"decoder.{Q}": entry, "vision_tower.x": entry, f"model.{Q}": {"group_size": 64, "bits": 4}}
    checkpoint = opened(tmp_path, affine(Q), settings)
    assert checkpoint.notices == (f"1 quantization entries of config.json fit no module, such as decoder.{Q}",)
    assert not opened(tmp_path, affine(Q), DEFAULT).notices


def test_config_of_a_real_mixed_file_is_understood(tmp_path):
    """The keys of a public mixed-precision Gemma 4: 8-bit MLPs under language_model.model."""
    settings = json.loads(
        '{"group_size": 64, "bits": 4, "mode": "affine", "vision_tower.x": {"group_size": 64, "bits": 8}}'
    )
    settings[f"language_model.model.{DOWN}"] = {"group_size": 64, "bits": 8}
    tensors = {**affine(f"language_model.model.{Q}"), **affine(f"language_model.model.{DOWN}", bits=8)}
    checkpoint = opened(tmp_path, tensors, settings)
    assert (format_of(checkpoint, Q), format_of(checkpoint, DOWN)) == ("affine-4b-g64", "affine-8b-g64")
