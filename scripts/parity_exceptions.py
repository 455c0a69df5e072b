"""What `parity.py` knows about configurations: rules that shrink a field by its name, and exceptions by model type.

A rule or an exception is data. The first rule whose pattern matches a whole field name gives the field's tiny value;
fields that no rule names keep their default. An exception is a field's value for one model type, wherever a
configuration of that type appears; `vision_config.depth` reaches into a configuration that is nested in it.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CLASSES",
    "EXCEPTIONS",
    "HYBRID_FIELDS",
    "ID_FIELD",
    "KEPT_FIELDS",
    "NO_SUCH_MODEL",
    "OLD_NAMES",
    "ONE_PER_STAGE",
    "RULES",
    "SCALED_LISTS",
    "TOKENS",
]

#: Names of whole fields -> value. The dimensions differ from each other, so that few matrices are square.
RULES: list[tuple[str, int]] = [
    (r"n_groups?|mamba_n_?groups|num_expert_groups?", 2),
    (r"topk_group|first_k_dense_replace|num_dense_layers|num_mtp_layers|num_nextn_predict_layers", 1),
    (r"(num_)?(experts_per_tok(en)?|top_k_experts|experts_top_k)|moe_topk|moe_top_k|moe_k|num_selects|top_k", 2),
    (r"(n|num|moe_num)_(routed_|local_)?experts|num_expert", 4),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r".*(kv_heads|key_value_heads|key_value_attention_heads|num_key_heads)", 2),
    (r".*(num_heads|n_heads?|attention_heads|value_heads|mamba_heads|attn_heads)", 4),
    (r"qk_nope_head_dim|linear_key_head_dim|index_head_dim", 8),
    (r"qk_rope_head_dim", 4),
    (r"v_head_dim|linear_value_head_dim", 12),
    (r"head_dim|d_head|attention_head_dim|swa_head_dim|d_kv|mamba_d_head|mamba_head_dim|.*_head_dim|kv_channels", 16),
    (r"q_lora_rank", 20),
    (r"kv_lora_rank", 28),
    (r"o_lora_rank|.*_rank", 12),
    (r".*shared.*intermediate_size|share_expert_dim", 20),
    (r"moe.*intermediate_size.*|expert_ffn_hidden_size|expert_intermediate_size", 24),
    (r".*(intermediate_size|intermediate_size_mlp|ffn_dim|mlp_dim|d_ff|dff|dim_ff|n_inner|ffn_hidden_size)", 48),
    (r".*(feed_?forward_hidden_size|feed_forward_size|mlp_hidden_size|intermediate_dim)", 48),
    (r"encoder_hash_byte_group_vocab|ngram_vocab_size_base|num_embeddings", 96),
    (r"type_vocab_size", 2),
    (r".*vocab_size.*", 128),
    (r".*max_position_embeddings|n_positions|max_seq_len|n_ctx|max_(source|target)_positions|context_length", 64),
    (r"position_embedding_size|max_pos_emb|max_sequence_length", 64),
    (r".*image_size|crop_size|max_img_size", 32),
    (r"patch_size", 8),
    (r"(hidden_size|d_model|n_embd|d_embed|emb_dim)", 32),
    (r".*(hidden_size|hidden_dim|embed_dim|embedding_size|embedding_dim|embed_size|d_model|decoder_dim)", 32),
    (r".*(projection_dim|project_dim|out_hidden_size|output_dim|proj_size|projection_size|dim_model)", 32),
    (r".*(num_layers|n_layers?|_layers|_layers_per_block|depth|num_blocks|num_res_blocks)", 2),
    (r"(num_|n_)?mel_bins|feature_size|input_feat_size", 16),
    (r"(mamba_)?d_state|(ssm_)?state_size", 8),
    (r"mamba_d_ssm|mamba_intermediate_size|d_inner|lru_width", 64),
    (r".*codebook_size|upsample_groups", 32),
    (r"fpn_feature_size|mask_feature_size", 32),
    (r"codebook_dim|vector_quantization_hidden_dimension|latent_dim", 16),
    (r"num_quantizers|num_codebooks|num_code_groups", 4),
    (r"num_filters|base_channels", 8),
    (r"num_queries|num_denoising|num_detection_tokens|two_stage_num_proposals", 9),
    (r"index_topk", 8),
    (r"rotary_dim", 4),
    (r"sliding_window(_size)?|attention_window_size|local_attention|attention_chunk_size", 16),
]

#: Counts and factors that rules would catch by their names, but that are small already.
KEPT_FIELDS = frozenset(
    {
        "global_attn_every_n_layers",
        "n_layers_per_attn_res_block",
        "no_rope_layers",
        "num_global_layers",
        "num_residual_layers",
        "output_projection_dim",
    }
)

#: A configuration with one of these mixes kinds of layers; four layers hold one of each.
HYBRID_FIELDS = frozenset(
    {
        "attn_layer_period",
        "block_types",
        "decoder_sparse_step",
        "full_attention_interval",
        "global_attn_every_n_layers",
        "interleave_moe_layer_step",
        "layer_types",
        "mlp_layer_types",
        "no_rope_layer_interval",
        "sliding_window_pattern",
    }
)

#: Token ids stay below the vocabulary: these, and a number made of the name for the others.
ID_FIELD = r"_token_(id|index)$|_patch_id$"
TOKENS = {"bos_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

#: Lists of block counts, one for each stage: one block each.
ONE_PER_STAGE = frozenset({"depths", "stage_num_blocks", "stage_numb_of_layers"})

#: Lists of channel counts, one for each stage: an eighth of each.
SCALED_LISTS = frozenset(
    {
        "decoder_in_channels",
        "downsample_channels",
        "encoder_in_channels",
        "hidden_sizes",
        "neck_hidden_sizes",
        "stage_in_channels",
        "stage_mid_channels",
        "stage_out_channels",
        "stem_channels",
        "sscp_conv_channel_size",
    }
)

#: Entry -> the class to make, where it is neither a class of the library's top level nor found by the Auto classes.
CLASSES: dict[str, str] = {
    "legacy": "BertForMaskedLM",
    "shieldgemma2": "ShieldGemma2ForImageClassification",
    "MaskFormerDetrDecoder": "maskformer.MaskFormerDetrDecoder",
    "UnlimitedOcrSamVisionEncoder": "unlimited_ocr.UnlimitedOcrSamVisionEncoder",
    "UnlimitedOcrVisionEncoder": "unlimited_ocr.UnlimitedOcrVisionEncoder",
}

#: Entry -> (pattern, replacement) for stored names, where only an older release wrote the names that the entry maps.
OLD_NAMES: dict[str, tuple[str, str]] = {
    "Qwen2VLModel": (r"^language_model\.", "model."),
    "Qwen2_5_VLModel": (r"^language_model\.", "model."),
}

#: Entries that no model of the library can be made for, and why.
NO_SUCH_MODEL: dict[str, str] = {
    "MtpModel": "MtpModel.from_pretrained takes a loaded main model, not a checkpoint; umem.load has no such call",
    "PPChart2TableModel": "the library has no class of this name (its pp_chart2table is GotOcr2)",
    "mlcd_vision": "the library has no model type of this name (it is called mlcd_vision_model)",
    "xCLIPTextModel": "the library has no class of this name (it is called XCLIPTextModel)",
    "xCLIPVisionModel": "the library has no class of this name (it is called XCLIPVisionModel)",
}


def _mrope(*sections: int) -> dict[str, Any]:
    """RoPE over time, height and width; the sections add up to half of the rotated dimensions."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}


_DENSE_THEN_SPARSE = ["dense", "sparse", "dense", "sparse"]
_FOUR_STAGES = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}
_LINEAR_THEN_FULL = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_SEGMENTING_DETR = {
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "backbone_config.out_features": ["stage1", "stage2", "stage3", "stage4"],
}
_WINDOWED_BACKBONE = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 64,
    "num_windows": 4,
}

#: Model type -> field (dotted: of a nested configuration) -> value.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1]},
    "beit": _FOUR_STAGES,
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _mrope(1, 1, 2)}},
    "conditional_detr": _SEGMENTING_DETR,
    "cosmos3_edge_text": {"rope_parameters": _mrope(2, 3, 3)},
    "dbrx": {
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": _DENSE_THEN_SPARSE, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "detr": _SEGMENTING_DETR,
    "dinov2": {"use_swiglu_ffn": True},
    "dinov2_with_registers": {"use_swiglu_ffn": True},
    "dinov3_convnext": {"hidden_sizes": [16, 24, 32, 40], "depths": [1, 1, 1, 1]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "dots3_note_text": {
        "n_group": 1,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 20,
        "swa_kv_lora_rank": 28,
        "swa_head_dim": 12,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 12,
        "sliding_window_size": 16,
    },
    "dots3_note_vision_encoder": {
        "adapter_in_dim": 32,
        "adapter_out_dim": 32,
        "mlp_layer_types": _DENSE_THEN_SPARSE,
    },
    "emu3": {"vocabulary_map": {"<image>": 60, "<|extra_200|>": 61}},
    "emu3_vqgan": {"base_channels": 32},
    "ernie4_5_vl_moe_text": {"rope_parameters": _mrope(1, 1, 2), "moe_intermediate_size": [24, 20]},
    "esm": {"vocab_size": 128, "pad_token_id": 0, "mask_token_id": 3},
    "gemma4_assistant": {
        "text_config.hidden_size_per_layer_input": 0,
        "text_config.num_kv_shared_layers": 4,
        "text_config.vocab_size_per_layer_input": 0,
    },
    "glm4v_moe_text": {"rope_parameters": _mrope(1, 1, 0) | {"partial_rotary_factor": 0.5}},
    "glm5_next_text": {"index_kpool": 4, "linear_num_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "gradium_phonon_tts": {"flow_head_config.condition_dim": 32},
    "granite_speech_encoder": {"context_size": 16},
    "granite_speech_plus_encoder": {"context_size": 16},
    "granitemoehybrid": {"layer_types": _LINEAR_THEN_FULL},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "hunyuan_vl_text": {"head_dim": 16, "rope_parameters": _mrope(2, 2, 2, 2)},
    "hy_v4_vl_text": {"rope_parameters": _mrope(1, 1, 0)},
    "inkling_text": {"mlp_layer_types": _DENSE_THEN_SPARSE, "n_shared_experts": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _LINEAR_THEN_FULL},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lw_detr": {"backbone_config": {"model_type": "lw_detr_vit", "out_indices": [2, 4], **_WINDOWED_BACKBONE}},
    "ministral": {"head_dim": 16},
    "molmo2": {
        "vision_config.image_size": [32, 32],
        "adapter_config.vision_feature_layer": [1, 0],
    },
    "nemotron": {"num_key_value_heads": 2},
    "paddleocr_vl_text": {"rope_parameters": _mrope(2, 3, 3)},
    "parakeet_encoder": {"projection_bias": True, "projection_hidden_size": 48},
    "qwen2_5_omni_text": {"rope_parameters": _mrope(1, 1, 2)},
    "qwen2_5_vl_text": {"rope_parameters": _mrope(1, 1, 2)},
    "qwen2_vl_text": {"rope_parameters": _mrope(1, 1, 2)},
    "qwen3_omni_moe": {"talker_config.spatial_merge_size": 2},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 20},
    "qwen4_exp_text": {
        "eos_token_id": 2,
        "heads_per_ngram": 2,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "indexer_head_dim": 16,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 2,
        "make_ngram_vocab_size_divisible_by": 8,
        "ple_layer_ids": [1],
        "split_ngram_parts": 4,
    },
    "reformer": {"axial_pos_embds_dim": [12, 20], "axial_pos_shape": [8, 8], "is_decoder": True},
    "rf_detr": {"backbone_config": {"model_type": "rf_detr_dinov2", "out_indices": [2, 4], **_WINDOWED_BACKBONE}},
    "sapiens2_head": {
        "conv_out_channels": [24, 16],
        "scale_conv_out_channels": [8],
        "scale_final_hidden_sizes": [16, 1],
        "upsample_out_channels": [24, 16],
    },
    "step3p5": {"sliding_window": 16},
    "swin": {"embed_dim": 24},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "tipsv2_dpt": {
        "backbone_config.num_hidden_layers": 4,
        "backbone_config.out_indices": [1, 2, 3, 4],
        "fusion_hidden_size": 16,
        "neck_hidden_sizes": [8, 16, 24, 32],
    },
    "tipsv2_vision_model": {"use_swiglu_ffn": True},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 0},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
}
