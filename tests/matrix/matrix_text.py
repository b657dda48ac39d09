"""The families of Transformers that read text."""

from __future__ import annotations

from matrix_rows import Family
from matrix_sizes import (
    DEFAULT,
    labelled_text,
    text,
)

DECODERS = [
    Family("llama", "LlamaForCausalLM", "LlamaDecoderLayer: 3 model.layers.*", labelled_text),
    Family("mistral", "MistralForCausalLM", "MistralDecoderLayer: 3 model.layers.*", labelled_text),
    Family("mixtral", "MixtralForCausalLM", "MixtralDecoderLayer: 3 model.layers.*", labelled_text),
    Family("qwen2", "Qwen2ForCausalLM", "Qwen2DecoderLayer: 3 model.layers.*", labelled_text),
    Family(
        "qwen2_moe", "Qwen2MoeForCausalLM", "Qwen2MoeDecoderLayer: 3 model.layers.*", labelled_text
    ),
    Family("qwen3", "Qwen3ForCausalLM", "Qwen3DecoderLayer: 3 model.layers.*", labelled_text),
    Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeDecoderLayer: 3 model.layers.*", labelled_text
    ),
    Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        "Qwen3NextDecoderLayer: 4 model.layers.*",
        labelled_text,
        {
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    Family("gemma", "GemmaForCausalLM", "GemmaDecoderLayer: 3 model.layers.*", labelled_text),
    Family("gemma2", "Gemma2ForCausalLM", "Gemma2DecoderLayer: 3 model.layers.*", labelled_text),
    Family(
        "gemma3_text", "Gemma3ForCausalLM", "Gemma3DecoderLayer: 3 model.layers.*", labelled_text
    ),
    Family("phi", "PhiForCausalLM", "PhiDecoderLayer: 3 model.layers.*", labelled_text),
    Family("phi3", "Phi3ForCausalLM", "Phi3DecoderLayer: 3 model.layers.*", labelled_text),
    Family("phimoe", "PhimoeForCausalLM", "PhimoeDecoderLayer: 3 model.layers.*", labelled_text),
    Family("gpt2", "GPT2LMHeadModel", "GPT2Block: 3 transformer.h.*", labelled_text),
    Family(
        "gpt_neo",
        "GPTNeoForCausalLM",
        "GPTNeoBlock: 4 transformer.h.*",
        labelled_text,
        {
            "num_hidden_layers": DEFAULT,
            "num_layers": 4,
            "attention_types": [[["global", "local"], 2]],
        },
    ),
    Family("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXLayer: 3 gpt_neox.layers.*", labelled_text),
    Family(
        "gpt_bigcode", "GPTBigCodeForCausalLM", "GPTBigCodeBlock: 3 transformer.h.*", labelled_text
    ),
    Family(
        "gptj", "GPTJForCausalLM", "GPTJBlock: 3 transformer.h.*", labelled_text, {"rotary_dim": 4}
    ),
    Family("gpt_oss", "GptOssForCausalLM", "GptOssDecoderLayer: 3 model.layers.*", labelled_text),
    Family(
        "codegen",
        "CodeGenForCausalLM",
        "CodeGenBlock: 3 transformer.h.*",
        labelled_text,
        {"rotary_dim": 4},
    ),
    Family("opt", "OPTForCausalLM", "OPTDecoderLayer: 3 model.decoder.layers.*", labelled_text),
    Family("bloom", "BloomForCausalLM", "BloomBlock: 3 transformer.h.*", labelled_text),
    Family(
        "falcon",
        "FalconForCausalLM",
        "FalconDecoderLayer: 3 transformer.h.*",
        labelled_text,
        {"head_dim": DEFAULT},
    ),
    Family("mpt", "MptForCausalLM", "MptBlock: 3 transformer.blocks.*", labelled_text),
    Family("olmo2", "Olmo2ForCausalLM", "Olmo2DecoderLayer: 3 model.layers.*", labelled_text),
    Family("olmoe", "OlmoeForCausalLM", "OlmoeDecoderLayer: 3 model.layers.*", labelled_text),
    Family("granite", "GraniteForCausalLM", "GraniteDecoderLayer: 3 model.layers.*", labelled_text),
    Family(
        "granitemoe",
        "GraniteMoeForCausalLM",
        "GraniteMoeDecoderLayer: 3 model.layers.*",
        labelled_text,
    ),
    Family("cohere", "CohereForCausalLM", "CohereDecoderLayer: 3 model.layers.*", labelled_text),
    Family(
        "stablelm", "StableLmForCausalLM", "StableLmDecoderLayer: 3 model.layers.*", labelled_text
    ),
    Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        "Starcoder2DecoderLayer: 3 model.layers.*",
        labelled_text,
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        "DeepseekV3DecoderLayer: 3 model.layers.*",
        labelled_text,
        {"num_key_value_heads": 4},
    ),
    Family(
        "minimax",
        "MiniMaxForCausalLM",
        "MiniMaxDecoderLayer: 3 model.layers.*",
        labelled_text,
        {"block_size": 8},
    ),
    Family("openai-gpt", "OpenAIGPTLMHeadModel", "Block: 3 transformer.h.*", labelled_text),
    Family("xglm", "XGLMForCausalLM", "XGLMDecoderLayer: 3 model.layers.*", labelled_text),
    Family("biogpt", "BioGptForCausalLM", "BioGptDecoderLayer: 3 biogpt.layers.*", labelled_text),
    Family(
        "persimmon",
        "PersimmonForCausalLM",
        "PersimmonDecoderLayer: 3 model.layers.*",
        labelled_text,
    ),
    Family("bitnet", "BitNetForCausalLM", "BitNetDecoderLayer: 3 model.layers.*", labelled_text),
    Family("helium", "HeliumForCausalLM", "HeliumDecoderLayer: 3 model.layers.*", labelled_text),
    Family(
        "llama4_text",
        "Llama4ForCausalLM",
        "Llama4TextDecoderLayer: 3 model.layers.*",
        labelled_text,
    ),
    Family(
        "dory",
        "DoryForCausalLM",
        "DoryDecoderLayer: 4 model.layers.*",
        labelled_text,
        {
            "num_hidden_layers": 4,
            "n_input_layers": 1,
            "n_recurrent_layers": 2,
            "n_output_layers": 1,
        },
    ),
    Family(
        "hrm_text",
        "HrmTextForCausalLM",
        "HrmTextDecoderLayer: 3 model.L_module.layers.*, 3 model.H_module.layers.*",
        labelled_text,
        {},
        ratio=None,
        note="its loops run under no_grad but for the last ones",
    ),
]

STATE_SPACE = [
    Family("mamba", "MambaForCausalLM", "MambaBlock: 3 backbone.layers.*", labelled_text),
    Family(
        "mamba2",
        "Mamba2ForCausalLM",
        "Mamba2Block: 3 backbone.layers.*",
        labelled_text,
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    ),
    Family(
        "falcon_mamba",
        "FalconMambaForCausalLM",
        "FalconMambaBlock: 3 backbone.layers.*",
        labelled_text,
    ),
    Family(
        "bamba",
        "BambaForCausalLM",
        "BambaDecoderLayer: 3 model.layers.*",
        labelled_text,
        {
            "num_hidden_layers": 3,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
        },
    ),
    Family(
        "jamba",
        "JambaForCausalLM",
        "JambaMambaDecoderLayer: 2 model.layers.*; JambaAttentionDecoderLayer: 2 model.layers.*",
        labelled_text,
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    Family(
        "zamba2",
        "Zamba2ForCausalLM",
        "Zamba2MambaDecoderLayer: 2 model.layers.*; Zamba2HybridLayer: 2 model.layers.*",
        labelled_text,
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "mamba_headdim": 8,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "mamba_d_state": 8,
            "chunk_size": 8,
            "num_mem_blocks": 1,
            "use_mem_rope": False,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
        },
    ),
    Family(
        "nemotron_h",
        "NemotronHForCausalLM",
        "NemotronHBlock: 4 model.layers.*",
        labelled_text,
        {
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "chunk_size": 8,
            "n_groups": 1,
        },
    ),
    Family("rwkv", "RwkvForCausalLM", "RwkvBlock: 3 rwkv.blocks.*", labelled_text),
    Family(
        "recurrent_gemma",
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaDecoderLayer: 3 model.layers.*",
        labelled_text,
    ),
    Family("lfm2", "Lfm2ForCausalLM", "Lfm2DecoderLayer: 3 model.layers.*", labelled_text),
]

ENCODERS = [
    Family("bert", "BertForMaskedLM", "BertLayer: 3 bert.encoder.layer.*", labelled_text),
    Family(
        "roberta", "RobertaForMaskedLM", "RobertaLayer: 3 roberta.encoder.layer.*", labelled_text
    ),
    Family(
        "albert",
        "AlbertForMaskedLM",
        "AlbertLayer: 1 albert.encoder.albert_layer_groups.*.albert_layers.*",
        labelled_text,
    ),
    Family(
        "electra", "ElectraForMaskedLM", "ElectraLayer: 3 electra.encoder.layer.*", labelled_text
    ),
    Family(
        "distilbert",
        "DistilBertForMaskedLM",
        "TransformerBlock: 3 distilbert.transformer.layer.*",
        labelled_text,
    ),
    Family(
        "deberta-v2",
        "DebertaV2ForMaskedLM",
        "DebertaV2Layer: 3 deberta.encoder.layer.*",
        labelled_text,
    ),
    Family(
        "mobilebert",
        "MobileBertForMaskedLM",
        "MobileBertLayer: 3 mobilebert.encoder.layer.*",
        labelled_text,
        {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": DEFAULT},
    ),
    Family(
        "squeezebert",
        "SqueezeBertForMaskedLM",
        "SqueezeBertModule: 3 transformer.encoder.layers.*",
        labelled_text,
    ),
    Family(
        "convbert",
        "ConvBertForMaskedLM",
        "ConvBertLayer: 3 convbert.encoder.layer.*",
        labelled_text,
    ),
    Family(
        "funnel",
        "FunnelForMaskedLM",
        "FunnelLayer: 4 funnel.encoder.blocks.*.*, 2 funnel.decoder.layers.*",
        labelled_text,
        {"block_sizes": [2, 2], "num_hidden_layers": DEFAULT},
    ),
    Family("fnet", "FNetForMaskedLM", "FNetLayer: 3 fnet.encoder.layer.*", labelled_text),
    Family(
        "nystromformer",
        "NystromformerForMaskedLM",
        "NystromformerLayer: 3 nystromformer.encoder.layer.*",
        labelled_text,
    ),
    Family("yoso", "YosoForMaskedLM", "YosoLayer: 3 yoso.encoder.layer.*", labelled_text),
    Family("mpnet", "MPNetForMaskedLM", "MPNetLayer: 3 mpnet.encoder.layer.*", labelled_text),
    Family(
        "modernbert",
        "ModernBertForMaskedLM",
        "ModernBertEncoderLayer: 3 model.layers.*",
        labelled_text,
    ),
    Family(
        "xlnet",
        "XLNetLMHeadModel",
        "XLNetLayer: 3 transformer.layer.*",
        labelled_text,
        {"max_position_embeddings": DEFAULT},
    ),
    Family(
        "xlm",
        "XLMWithLMHeadModel",
        "MultiHeadAttention: 3 transformer.attentions.*; TransformerFFN: 3 transformer.ffns.*",
        labelled_text,
    ),
    Family(
        "longformer",
        "LongformerForMaskedLM",
        "LongformerLayer: 3 longformer.encoder.layer.*",
        labelled_text,
        {"attention_window": 8},
    ),
    Family("big_bird", "BigBirdForMaskedLM", "BigBirdLayer: 3 bert.encoder.layer.*", labelled_text),
    Family(
        "reformer",
        "ReformerForMaskedLM",
        "ReformerLayer: 3 reformer.encoder.layers.*",
        labelled_text,
        {
            "axial_pos_embds_dim": [16, 16],
            "axial_pos_shape": [4, 6],
            "is_decoder": False,
            "attn_layers": ["local", "lsh", "local", "lsh"],
            "num_buckets": 4,
            "local_attn_chunk_length": 4,
            "lsh_attn_chunk_length": 4,
            "attention_head_size": 8,
            "feed_forward_size": 48,
            "max_position_embeddings": 64,
        },
        repeats=False,
        note="draws its seeds from the system, so two plain steps differ; "
        "its layers are reversible and compute themselves again, so there is nothing to checkpoint",
    ),
    Family(
        "canine",
        "CanineModel",
        "CanineLayer: 1 initial_char_encoder.layer.*, 3 encoder.layer.*, "
        "1 final_char_encoder.layer.*",
        text,
        {"num_hash_buckets": 64, "downsampling_rate": 4, "local_transformer_stride": 8},
    ),
    Family(
        "roformer",
        "RoFormerForMaskedLM",
        "RoFormerLayer: 3 roformer.encoder.layer.*",
        labelled_text,
    ),
    Family("ibert", "IBertForMaskedLM", "IBertLayer: 3 ibert.encoder.layer.*", labelled_text),
    Family(
        "esm",
        "EsmForMaskedLM",
        "EsmLayer: 3 esm.encoder.layer.*",
        labelled_text,
        {"vocab_size": 99, "mask_token_id": 4, "pad_token_id": 0},
    ),
    Family("splinter", "SplinterModel", "SplinterLayer: 3 encoder.layer.*", labelled_text),
]

ENCODER_DECODERS = [
    Family(
        "bart",
        "BartForConditionalGeneration",
        "BartEncoderLayer: 3 model.encoder.layers.*; BartDecoderLayer: 2 model.decoder.layers.*",
        labelled_text,
    ),
    Family(
        "t5",
        "T5ForConditionalGeneration",
        "T5Block: 3 encoder.block.*, 2 decoder.block.*",
        labelled_text,
        {"decoder_start_token_id": 0},
    ),
    Family(
        "mt5",
        "MT5ForConditionalGeneration",
        "MT5Block: 3 encoder.block.*, 2 decoder.block.*",
        labelled_text,
    ),
    Family(
        "longt5",
        "LongT5ForConditionalGeneration",
        "LongT5Block: 3 encoder.block.*, 2 decoder.block.*",
        labelled_text,
        {"decoder_start_token_id": 0, "local_radius": 4},
    ),
    Family(
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersBlock: 3 encoder.block.*, 2 decoder.block.*",
        labelled_text,
        {"decoder_start_token_id": 0},
    ),
    Family(
        "pegasus",
        "PegasusForConditionalGeneration",
        "PegasusEncoderLayer: 3 model.encoder.layers.*; "
        "PegasusDecoderLayer: 2 model.decoder.layers.*",
        labelled_text,
    ),
    Family(
        "led",
        "LEDForConditionalGeneration",
        "LEDEncoderLayer: 3 led.encoder.layers.*; LEDDecoderLayer: 2 led.decoder.layers.*",
        labelled_text,
        {
            "attention_window": 8,
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
        },
    ),
    Family(
        "marian",
        "MarianMTModel",
        "MarianEncoderLayer: 3 model.encoder.layers.*; "
        "MarianDecoderLayer: 2 model.decoder.layers.*",
        labelled_text,
    ),
    Family(
        "prophetnet",
        "ProphetNetForConditionalGeneration",
        "ProphetNetEncoderLayer: 3 prophetnet.encoder.layers.*; "
        "ProphetNetDecoderLayer: 2 prophetnet.decoder.layers.*",
        labelled_text,
        {"num_hidden_layers": DEFAULT},
    ),
    Family(
        "blenderbot",
        "BlenderbotForConditionalGeneration",
        "BlenderbotEncoderLayer: 3 model.encoder.layers.*; "
        "BlenderbotDecoderLayer: 2 model.decoder.layers.*",
        labelled_text,
    ),
    Family(
        "bigbird_pegasus",
        "BigBirdPegasusForConditionalGeneration",
        "BigBirdPegasusEncoderLayer: 3 model.encoder.layers.*; "
        "BigBirdPegasusDecoderLayer: 2 model.decoder.layers.*",
        labelled_text,
    ),
    Family(
        "m2m_100",
        "M2M100ForConditionalGeneration",
        "M2M100EncoderLayer: 3 model.encoder.layers.*; "
        "M2M100DecoderLayer: 2 model.decoder.layers.*",
        labelled_text,
    ),
    Family(
        "nllb-moe",
        "NllbMoeForConditionalGeneration",
        "NllbMoeEncoderLayer: 3 model.encoder.layers.*; "
        "NllbMoeDecoderLayer: 2 model.decoder.layers.*",
        labelled_text,
    ),
]
