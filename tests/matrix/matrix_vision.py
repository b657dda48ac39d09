"""The other families of Transformers that look at pictures."""

from __future__ import annotations

from matrix_rows import Family
from matrix_sizes import Part, labelled_pictures, labelled_text, pictures, video

VISION = [
    Family("vit", "ViTForImageClassification", "ViTLayer: 3 vit.layers.*", labelled_pictures()),
    Family(
        "beit",
        "BeitForImageClassification",
        "BeitLayer: 3 beit.layers.*",
        labelled_pictures(),
        {"use_relative_position_bias": True, "drop_path_rate": 0.2},
    ),
    Family("deit", "DeiTForImageClassification", "DeiTLayer: 3 deit.layers.*", labelled_pictures()),
    Family(
        "dinov2",
        "Dinov2ForImageClassification",
        "Dinov2Layer: 3 dinov*.encoder.layer.*",
        labelled_pictures(),
        {"drop_path_rate": 0.2},
    ),
    Family("dinov3_vit", "DINOv3ViTModel", "DINOv3ViTLayer: 3 model.layer.*", pictures()),
    Family(
        "yolos",
        "YolosModel",
        "YolosLayer: 3 encoder.layer.*",
        pictures(),
        {"image_size": [32, 32], "num_detection_tokens": 4},
    ),
    Family(
        "vit_mae",
        "ViTMAEForPreTraining",
        "ViTMAELayer: 3 vit.layers.*, 2 decoder.decoder_layers.*",
        pictures(),
        {
            "decoder_num_hidden_layers": 2,
            "decoder_hidden_size": 16,
            "decoder_intermediate_size": 24,
            "decoder_num_attention_heads": 2,
        },
    ),
    Family("vitdet", "VitDetModel", "VitDetLayer: 3 encoder.layer.*", pictures()),
    Family(
        "vit_msn",
        "ViTMSNForImageClassification",
        "ViTMSNLayer: 3 vit.layers.*",
        labelled_pictures(),
    ),
    Family(
        "dpt",
        "DPTForDepthEstimation",
        "DPTViTLayer: 4 dpt.encoder.layer.*",
        pictures(),
        {
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 8, 8],
            "fusion_hidden_size": 8,
        },
    ),
    Family(
        "sam_vision_model",
        "SamVisionModel",
        "SamVisionLayer: 3 vision_encoder.layers.*",
        pictures(),
        {
            "output_channels": 8,
            "window_size": 2,
            "global_attn_indexes": [1],
            "image_size": 32,
            "patch_size": 4,
            "mlp_dim": 48,
        },
    ),
    Family(
        "superpoint",
        "SuperPointForKeypointDetection",
        "SuperPointConvBlock: 4 encoder.conv_blocks.*",
        pictures(),
        {
            "encoder_hidden_sizes": [8, 8, 8, 8],
            "decoder_hidden_size": 8,
            "descriptor_decoder_dim": 16,
        },
    ),
    Family(
        "depth_anything",
        "DepthAnythingForDepthEstimation",
        "Dinov2Layer: 4 backbone.encoder.layer.*",
        pictures(56),
        {
            "backbone_config": Part(
                "Dinov2Config",
                {
                    "hidden_size": 32,
                    "num_hidden_layers": 4,
                    "num_attention_heads": 4,
                    "image_size": 28,
                    "patch_size": 14,
                    "out_indices": [1, 2, 3, 4],
                    "apply_layernorm": True,
                    "reshape_hidden_states": False,
                },
            ),
            "reassemble_hidden_size": 32,
            "patch_size": 14,
            "neck_hidden_sizes": [8, 8, 8, 8],
            "fusion_hidden_size": 8,
            "head_hidden_size": 8,
        },
    ),
    Family(
        "upernet",
        "UperNetForSemanticSegmentation",
        "ConvNextLayer: 8 backbone.encoder.stages.*.layers.*",
        pictures(64),
        {
            "backbone_config": Part(
                "ConvNextConfig",
                {
                    "hidden_sizes": [8, 8, 16, 16],
                    "depths": [2, 2, 2, 2],
                    "num_stages": 4,
                    "out_features": ["stage1", "stage2", "stage3", "stage4"],
                },
            ),
            "hidden_size": 8,
            "use_auxiliary_head": False,
            "pool_scales": [1],
        },
    ),
    Family(
        "vivit",
        "VivitForVideoClassification",
        "VivitLayer: 3 vivit.layers.*",
        video,
        {"num_frames": 4, "image_size": 16, "tubelet_size": [2, 8, 8]},
    ),
    Family(
        "videomae",
        "VideoMAEForVideoClassification",
        "VideoMAELayer: 3 videomae.encoder.layer.*",
        video,
        {"num_frames": 4, "image_size": 16, "tubelet_size": 2},
    ),
    Family(
        "timesformer",
        "TimesformerForVideoClassification",
        "TimesformerLayer: 3 timesformer.encoder.layer.*",
        video,
        {"num_frames": 4, "image_size": 16},
    ),
    Family(
        "imagegpt",
        "ImageGPTForCausalImageModeling",
        "ImageGPTBlock: 3 transformer.h.*",
        labelled_text,
        {"vocab_size": 99},
    ),
    Family(
        "segformer-seg",
        "SegformerForSemanticSegmentation",
        "SegformerLayer: 5 segformer.stages.*.blocks.*",
        pictures(64),
        {
            "hidden_sizes": [8, 16, 16, 16],
            "depths": [2, 2, 1, 1],
            "num_attention_heads": [1, 2, 2, 2],
            "decoder_hidden_size": 8,
        },
    ),
]
