"""Mila's flat FP4 artifacts: one safetensors file that carries its own configuration.

Projections are concatenated by rows (q|k|v, gate|up) under names of their own. They come apart here by row slices, so
that everything behind sees the names of Hugging Face, and ``mila_config`` becomes the config.json it was made from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.files.quantization import assemble, plain
from bytefloor.files.safetensors import RawTensor, SafetensorsFile, parse_json
from bytefloor.files.stored import StoredTensor

CONFIG_KEY = "mila_config"
QUANTIZATION_KEY = "mila_quantization"
_SCHEMES = ("per_group_fp4_128", "per_channel_fp8_e4m3", "none", "")
_LAYER = re.compile(r"tf_layer_(\d+)\.(.+)")
_GROUP = 128
_UNSCALED_CONTEXT = 8192

_TOP = {"temb.wte": "embed_tokens.weight", "rmsn_final.weight": "norm.weight", "lm_head.weight": "lm_head.weight"}
_FEED_FORWARD = {"fc_down.weight": "mlp.down_proj.weight"}
_GEMMA = {
    "input_norm.weight": "input_layernorm.weight",
    "q_norm.weight": "self_attn.q_norm.weight",
    "k_norm.weight": "self_attn.k_norm.weight",
    "o_proj.weight": "self_attn.o_proj.weight",
    "post_attn_norm.weight": "post_attention_layernorm.weight",
    "pre_ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffn_norm.weight": "post_feedforward_layernorm.weight",
    "layer_scalar": "layer_scalar",
    **_FEED_FORWARD,
}
_LLAMA = {
    "rmsn_1.weight": "input_layernorm.weight",
    "rmsn_2.weight": "post_attention_layernorm.weight",
    "fc_out_proj.weight": "self_attn.o_proj.weight",
    **_FEED_FORWARD,
}
_NAMES = {"gemma": _GEMMA, "llama": _LLAMA}
_QKV = ("qkv_proj.weight", "fc_qkv_proj.weight")
_GATE_UP = "fc_gate_up.weight"
# A unit weight written for a norm that has none.
_WITHOUT_MEANING = ("v_norm.weight",)


def is_artifact(file: SafetensorsFile) -> bool:
    """Whether a safetensors file says that Mila wrote it."""
    return CONFIG_KEY in file.metadata


def read_artifact(file: SafetensorsFile) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """The config.json that fits the file, and its tensors under the names of Hugging Face."""
    config = parse_json(file.metadata[CONFIG_KEY].encode("utf-8", "replace"), f"{file.path}: {CONFIG_KEY}")
    _check_scheme(file)
    family = config.get("architecture")
    if not isinstance(family, str) or family not in _NAMES:
        raise UnsupportedError(
            f"{file.path}: Mila artifacts of architecture {family!r} are not supported ({', '.join(_NAMES)})"
        )
    for key, what in (("num_experts", "mixture-of-experts models"), ("use_bias", "projections with a bias")):
        if config.get(key):
            raise UnsupportedError(f"{file.path}: {what} are not supported")
    shape = _Geometry(file, config)
    tensors: dict[str, StoredTensor] = {}
    for name, raw in file.tensors.items():
        if name.endswith("_scale") and name.removesuffix("_scale") in file.tensors:
            continue
        stored = _stored(file, name, raw)
        for part in _split(file, shape, _NAMES[family], stored):
            tensors[part.name] = part
    return shape.hugging_face(), tensors


def _check_scheme(file: SafetensorsFile) -> None:
    """The scheme's name, bare or as a JSON string."""
    found = file.metadata.get(QUANTIZATION_KEY, "")
    if found.startswith('"'):
        try:
            found = str(json.loads(found))
        except ValueError:
            raise FileError(f"{file.path}: {QUANTIZATION_KEY} is not valid JSON") from None
    if found not in _SCHEMES:
        raise UnsupportedError(
            f"{file.path}: Mila's quantization {found!r} is not supported ({', '.join(_SCHEMES[:3])})"
        )


def _stored(file: SafetensorsFile, name: str, raw: RawTensor) -> StoredTensor:
    """Codes and scales of one tensor, checked against each other; or a plain tensor."""
    scale = file.tensors.get(name + "_scale")
    if scale is None:
        return plain(name, raw)
    if len(raw.shape) != 2 or scale.dtype != "F32":
        raise FileError(
            f"{file.path}: tensor {name} is {list(raw.shape)} with {scale.dtype} scales, expected a matrix "
            "with F32 scales"
        )
    n_rows, width = raw.shape
    parts = {"weight": raw, "weight_scale": scale}
    if raw.dtype == "U8":
        if 2 * width % _GROUP or scale.shape != (n_rows, 2 * width // _GROUP):
            raise FileError(
                f"{file.path}: tensor {name}: scales {list(scale.shape)} do not fit {n_rows} rows of "
                f"{2 * width} columns in groups of {_GROUP}"
            )
        return assemble(name, "FP4-E2M1-g128", (n_rows, 2 * width), parts)
    if raw.dtype != "F8_E4M3" or scale.n_elements != n_rows:
        raise FileError(
            f"{file.path}: tensor {name}: {raw.dtype} with scales {list(scale.shape)}, expected U8 codes, "
            f"or F8_E4M3 with {n_rows} scales"
        )
    return assemble(name, "FP8-E4M3-row", raw.shape, parts)


class _Geometry:
    """Sizes from mila_config that are needed to take projections apart."""

    def __init__(self, file: SafetensorsFile, config: Mapping[str, Any]) -> None:
        self._path = file.path
        self._config = config
        self.n_heads = self._size("num_heads")
        self.n_kv_heads = self._size("num_kv_heads")
        self.width = self._size("embedding_dim" if "embedding_dim" in config else "hidden_size")
        # 0 or absent: to be derived.
        self.head_width = self._size("head_dim") if config.get("head_dim") else self.width // self.n_heads
        self.is_gemma = config["architecture"] == "gemma"
        self.pattern = self._size("sliding_window_pattern", 6) if self.is_gemma else 0

    def _size(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
            raise FileError(f"{self._path}: {CONFIG_KEY} has {key} = {value!r}, expected a positive size")
        return value

    def is_global(self, layer: int) -> bool:
        """Every pattern-th layer of Gemma attends globally."""
        return self.is_gemma and (layer + 1) % self.pattern == 0

    def qkv_rows(self, layer: int) -> dict[str, int]:
        """Rows of the projections in the order of their concatenation."""
        head_width, n_kv_heads = self.head_width, self.n_kv_heads
        has_values = True
        if self.is_global(layer):
            head_width = self._size("global_head_dim", 512)
            n_kv_heads = self._size("num_global_kv_heads", 1)
            has_values = not self._config.get("key_equals_value", True)
        rows = {"q_proj": self.n_heads * head_width, "k_proj": n_kv_heads * head_width}
        return {**rows, "v_proj": n_kv_heads * head_width} if has_values else rows

    def hugging_face(self) -> dict[str, Any]:
        """The fields of config.json that mila_config stands for."""
        get = self._config.get
        n_layers = self._size("num_layers")
        if n_layers > 4096:
            raise FileError(f"{self._path}: {CONFIG_KEY} has num_layers = {n_layers}")
        config: dict[str, Any] = {
            "model_type": "gemma4_text" if self.is_gemma else "llama",
            "architectures": ["Gemma4ForCausalLM" if self.is_gemma else "LlamaForCausalLM"],
            "vocab_size": self._size("vocab_size"),
            "hidden_size": self.width,
            "num_hidden_layers": n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_width,
            "intermediate_size": self._size("hidden_dim"),
            "max_position_embeddings": self._size("max_seq_length"),
            "rms_norm_eps": get("norm_epsilon", 1e-6 if self.is_gemma else 1e-5),
            "tie_word_embeddings": bool(get("tie_word_embeddings", self.is_gemma)),
            CONFIG_KEY: dict(self._config),
        }
        return {**config, **(self._gemma_fields(n_layers) if self.is_gemma else self._llama_fields())}

    def _llama_fields(self) -> dict[str, Any]:
        get = self._config.get
        fields: dict[str, Any] = {"hidden_act": "silu", "rope_theta": get("rope_theta", 5e5)}
        scaling = get("rope_scaling")
        if scaling == "llama3":
            fields["rope_scaling"] = {
                "rope_type": "llama3",
                "factor": get("rope_scaling_factor"),
                "low_freq_factor": get("rope_low_frequency_factor"),
                "high_freq_factor": get("rope_high_frequency_factor"),
                "original_max_position_embeddings": get("rope_original_context_length"),
            }
        elif scaling not in (None, "none"):
            raise UnsupportedError(f"{self._path}: RoPE scaling {scaling!r} is not supported")
        elif scaling is None and self._size("max_seq_length") > _UNSCALED_CONTEXT:
            # Early artifacts did not record the scaling of Llama 3.1 and later; guessing it would be silently wrong.
            raise UnsupportedError(
                f"{self._path}: {CONFIG_KEY} does not say whether RoPE is scaled; export the model again"
            )
        return fields

    def _gemma_fields(self, n_layers: int) -> dict[str, Any]:
        get = self._config.get
        global_width = self._size("global_head_dim", 512)
        share = self._size("global_rotary_dim", global_width // 4) / global_width
        kinds = ["full_attention" if self.is_global(layer) else "sliding_attention" for layer in range(n_layers)]
        return {
            "global_head_dim": global_width,
            "num_global_key_value_heads": self._size("num_global_kv_heads", 1),
            "attention_k_eq_v": bool(get("key_equals_value", True)),
            "sliding_window": self._size("window", 1024),
            "layer_types": kinds,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "final_logit_softcapping": get("final_logit_softcapping", 30.0),
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": get("rope_theta_local", 1e4)},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": get("rope_theta_global", 1e6),
                    "partial_rotary_factor": share,
                },
            },
        }


def _split(
    file: SafetensorsFile, shape: _Geometry, names: Mapping[str, str], stored: StoredTensor
) -> list[StoredTensor]:
    """The tensors of Hugging Face that one of Mila's stands for."""
    if stored.name in _TOP:
        return [_renamed(stored, _TOP[stored.name])]
    match = _LAYER.fullmatch(stored.name)
    if match is None:
        return [stored]
    layer, rest = int(match[1]), match[2]
    if rest in _WITHOUT_MEANING:
        return []
    if rest in _QKV:
        rows = {f"self_attn.{name}": count for name, count in shape.qkv_rows(layer).items()}
        return _cut(file, stored, f"layers.{layer}", rows)
    if rest == _GATE_UP:
        half = stored.n_rows // 2
        return _cut(file, stored, f"layers.{layer}", {"mlp.gate_proj": half, "mlp.up_proj": half})
    return [_renamed(stored, f"layers.{layer}.{names.get(rest, rest)}")]


def _cut(file: SafetensorsFile, stored: StoredTensor, layer: str, rows: Mapping[str, int]) -> list[StoredTensor]:
    if sum(rows.values()) != stored.n_rows:
        wanted = " + ".join(f"{count} ({name})" for name, count in rows.items())
        raise FileError(f"{file.path}: tensor {stored.name} has {stored.n_rows} rows, {CONFIG_KEY} expects {wanted}")
    pieces: list[StoredTensor] = []
    start = 0
    for name, count in rows.items():
        pieces.append(stored.row_slice(f"{layer}.{name}.weight", start, start + count))
        start += count
    return pieces


def _renamed(stored: StoredTensor, name: str) -> StoredTensor:
    return StoredTensor(name, stored.shape, stored.format_name, stored.format, stored.n_bytes, stored.read)
