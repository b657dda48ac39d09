"""The families of Transformers for sound, for several kinds of input, and for series."""

from __future__ import annotations

import torch
from matrix_rows import Family
from matrix_sizes import (
    Batch,
    ids,
    labelled_text,
    noise,
    pairs,
    sound,
    text_and_pictures,
)

WAVES = {
    "conv_dim": [16, 16, 16],
    "conv_kernel": [10, 3, 3],
    "conv_stride": [5, 2, 2],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}


def spectra(bands: int, length: int = 48) -> Batch:
    return {"input_features": noise(4, bands, length), "labels": ids()}


def wave_family(name: str, model: str, layers: str, **words: object) -> Family:
    """A stack of convolutions, then one of attention; layer drop and masks are drawn by NumPy."""
    convolutions = (
        f"{layers}GroupNormConvLayer: 1 feature_extractor.conv_layers.*; "
        f"{layers}NoLayerNormConvLayer: 2 feature_extractor.conv_layers.*"
    )
    blocks = f"{convolutions}; {layers}EncoderLayer: 3 encoder.layers.*"
    return Family(name, model, blocks, sound, WAVES | words)


SOUND = [
    wave_family("wav2vec2", "Wav2Vec2Model", "Wav2Vec2"),
    wave_family("hubert", "HubertModel", "Hubert"),
    wave_family("wavlm", "WavLMModel", "WavLM"),
    wave_family("unispeech-sat", "UniSpeechSatModel", "UniSpeechSat"),
    wave_family("sew", "SEWModel", "SEW"),
    wave_family(
        "wav2vec2-conformer",
        "Wav2Vec2ConformerModel",
        "Wav2Vec2Conformer",
        conv_depthwise_kernel_size=5,
    ),
    Family(
        "data2vec-audio",
        "Data2VecAudioModel",
        "Data2VecAudioConvLayer: 3 feature_extractor.conv_layers.*; "
        "Data2VecAudioEncoderLayer: 3 encoder.layers.*",
        sound,
        WAVES | {"num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 3},
    ),
    Family(
        "audio-spectrogram-transformer",
        "ASTForAudioClassification",
        "ASTLayer: 3 audio_spectrogram_transformer.layers.*",
        lambda: {"input_values": noise(4, 32, 16)},
        {
            "max_length": 32,
            "num_mel_bins": 16,
            "patch_size": 4,
            "frequency_stride": 4,
            "time_stride": 4,
        },
    ),
    Family(
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperEncoderLayer: 3 model.encoder.layers.*; "
        "WhisperDecoderLayer: 2 model.decoder.layers.*",
        lambda: spectra(16),
        {"num_mel_bins": 16, "max_source_positions": 24, "max_target_positions": 64},
    ),
    Family(
        "speech_to_text",
        "Speech2TextForConditionalGeneration",
        "Speech2TextEncoderLayer: 3 model.encoder.layers.*; "
        "Speech2TextDecoderLayer: 2 model.decoder.layers.*",
        lambda: {"input_features": noise(4, 48, 8), "labels": ids()},
        {
            "conv_channels": 16,
            "input_feat_per_channel": 8,
            "max_source_positions": 64,
            "max_target_positions": 64,
        },
    ),
    Family(
        "encodec",
        "EncodecModel",
        "EncodecResnetBlock: 2 encoder.layers.*, 2 decoder.layers.*",
        lambda: {"input_values": noise(4, 1, 256)},
        {
            "num_filters": 4,
            "upsampling_ratios": [4, 2],
            "codebook_size": 16,
            "codebook_dim": 16,
            "hidden_size": 16,
            "num_lstm_layers": 1,
        },
        ratio=None,
        note="its quantizer lets no gradient through, so the encoder is not recomputed",
    ),
    Family(
        "seamless_m4t",
        "SeamlessM4TForTextToText",
        "SeamlessM4TEncoderLayer: 3 text_encoder.layers.*; "
        "SeamlessM4TDecoderLayer: 3 text_decoder.layers.*",
        labelled_text,
    ),
]

TEXT_PART = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
PICTURE_PART = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
TWO = {"text_config": TEXT_PART, "vision_config": PICTURE_PART}


def pictures_in_text() -> Batch:
    """Sixteen places of the text are for the patches."""
    tokens = ids()
    tokens[:, 1:17] = 98
    return text_and_pictures() | {"input_ids": tokens, "labels": tokens}


SEVERAL = [
    Family(
        "clip",
        "CLIPModel",
        "CLIPEncoderLayer: 2 text_model.encoder.layers.*, 2 vision_model.encoder.layers.*",
        pairs,
        TWO,
    ),
    Family(
        "siglip",
        "SiglipModel",
        "SiglipEncoderLayer: 2 text_model.encoder.layers.*, 2 vision_model.encoder.layers.*",
        pairs,
        TWO,
    ),
    Family(
        "chinese_clip",
        "ChineseCLIPModel",
        "ChineseCLIPTextLayer: 2 text_model.encoder.layer.*; "
        "ChineseCLIPVisionLayer: 2 vision_model.encoder.layers.*",
        pairs,
        TWO,
    ),
    Family(
        "blip",
        "BlipForImageTextRetrieval",
        "BlipEncoderLayer: 2 vision_model.encoder.layers.*; "
        "BlipTextLayer: 2 text_encoder.encoder.layer.*",
        text_and_pictures,
        TWO,
    ),
    Family("vilt", "ViltModel", "ViltLayer: 3 encoder.layer.*", text_and_pictures),
    Family(
        "owlvit",
        "OwlViTModel",
        "OwlViTEncoderLayer: 2 text_model.encoder.layers.*, 2 vision_model.encoder.layers.*",
        pairs,
        TWO,
    ),
    Family(
        "git",
        "GitForCausalLM",
        "GitVisionEncoderLayer: 2 git.image_encoder.vision_model.encoder.layers.*; "
        "GitLayer: 3 git.encoder.layer.*",
        text_and_pictures,
        {"vision_config": PICTURE_PART},
    ),
    Family(
        "clipseg",
        "CLIPSegForImageSegmentation",
        "CLIPSegEncoderLayer: 2 clip.text_model.encoder.layers.*, "
        "3 clip.vision_model.encoder.layers.*; CLIPSegDecoderLayer: 3 decoder.layers.*",
        text_and_pictures,
        {
            "text_config": TEXT_PART,
            "vision_config": PICTURE_PART | {"num_hidden_layers": 3},
            "extract_layers": [0, 1, 2],
            "projection_dim": 32,
            "reduce_dim": 16,
        },
        ratio=None,
        note="its CLIP runs under no_grad, so only the decoder is recomputed",
    ),
    Family(
        "llava",
        "LlavaForConditionalGeneration",
        "CLIPEncoderLayer: 2 model.vision_tower.encoder.layers.*; "
        "LlamaDecoderLayer: 2 model.language_model.layers.*",
        pictures_in_text,
        {
            "text_config": TEXT_PART | {"num_key_value_heads": 2, "model_type": "llama"},
            "vision_config": PICTURE_PART | {"model_type": "clip_vision_model"},
            "image_token_id": 98,
            "image_token_index": 98,
            "vision_feature_layer": -1,
        },
    ),
    Family(
        "decision_transformer",
        "DecisionTransformerModel",
        "DecisionTransformerGPT2Block: 3 encoder.h.*",
        lambda: {
            "states": noise(4, 8, 5),
            "actions": noise(4, 8, 3),
            "rewards": noise(4, 8, 1),
            "returns_to_go": noise(4, 8, 1),
            "timesteps": torch.arange(8).expand(4, 8),
            "attention_mask": torch.ones(4, 8),
        },
        {"state_dim": 5, "act_dim": 3, "max_ep_len": 30},
    ),
]

SERIES = [
    Family(
        "patchtst",
        "PatchTSTForPrediction",
        "PatchTSTEncoderLayer: 3 model.encoder.layers.*",
        lambda: {"past_values": noise(4, 32, 2), "future_values": noise(4, 4, 2)},
        {
            "num_input_channels": 2,
            "context_length": 32,
            "patch_length": 4,
            "patch_stride": 4,
            "prediction_length": 4,
        },
    ),
    Family(
        "patchtsmixer",
        "PatchTSMixerForPrediction",
        "PatchTSMixerLayer: 3 model.encoder.mlp_mixer_encoder.mixers.*",
        lambda: {"past_values": noise(4, 32, 2), "future_values": noise(4, 4, 2)},
        {
            "num_input_channels": 2,
            "context_length": 32,
            "patch_length": 4,
            "patch_stride": 4,
            "prediction_length": 4,
            "d_model": 8,
        },
    ),
    Family(
        "time_series_transformer",
        "TimeSeriesTransformerForPrediction",
        "TimeSeriesTransformerEncoderLayer: 3 model.encoder.layers.*; "
        "TimeSeriesTransformerDecoderLayer: 2 model.decoder.layers.*",
        lambda: {
            "past_values": noise(4, 10),
            "past_time_features": noise(4, 10, 1),
            "past_observed_mask": torch.ones(4, 10),
            "future_values": noise(4, 4),
            "future_time_features": noise(4, 4, 1),
        },
        {
            "prediction_length": 4,
            "context_length": 8,
            "lags_sequence": [1, 2],
            "num_time_features": 1,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
        },
    ),
]
