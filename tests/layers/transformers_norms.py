"""Every class of transformers 5.24 that is a norm: how to build it, and the spec that computes the same.

Names are ``folder.Class``. ``tests/layers/test_families.py`` walks transformers' source: a class whose name says
norm must be here, among ``NORMS``, ``NOT_EXPRESSIBLE`` or ``BLOCKS``, or a test fails.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from normwise.layers import FAMILIES
from normwise.spec import PROMOTED, Cast, Form, Modulation, NormSpec, Scope, Statistic, Weight

__all__ = ["BLOCKS", "GROUPS", "HEADS", "NORMS", "NOT_EXPRESSIBLE", "WIDTH", "Norm"]

WIDTH, HEADS, GROUPS = 96, 4, 6


@dataclass(frozen=True)
class Norm:
    """A convention, and the classes that follow it."""

    spec: NormSpec
    classes: str
    args: tuple[Any, ...] = (WIDTH,)
    kwargs: tuple[tuple[str, Any], ...] = ()
    call: str = "plain"  # how it is called, a key of ``CALLS`` of the test
    weights: str = "any"  # beside half-precision inputs: "any" dtype, its "own", or "float32"
    ulps: int = 0  # the last bits that may differ, of the dtype of the output

    @property
    def names(self) -> list[str]:
        """Return the classes one by one."""
        return self.classes.split()


def _family(name: str, **changes: Any) -> NormSpec:
    return replace(FAMILIES[name], **changes)


_MODULATED = _family("chameleon-qk", eps=1e-6, weight=Weight.NONE, bias=False, modulation=Modulation.SCALE_SHIFT)
_FROZEN = replace(
    FAMILIES["gpt2"],
    scope=Scope.BATCH,
    axes=(-4, -2, -1),
    form=Form.FOLDED,
    stats_dtype=None,
    out_dtype=PROMOTED,
    running=True,
)
_BATCH = replace(FAMILIES["gpt2"], scope=Scope.BATCH, axes=(-3, -2), running=True)
_GROUP = replace(FAMILIES["gpt2"], scope=Scope.GROUP, axes=(-2, -1), groups=GROUPS)
_MASKED_GROUP = replace(_GROUP, form=Form.DIVISION, stats_dtype=None, out_dtype=PROMOTED)
_GROUP_ON_IMAGE = replace(_GROUP, axes=(-3, -2, -1))
_QK = NormSpec(
    statistic=Statistic.L2,
    eps=None,
    eps_inside=False,
    eps_clamp=True,
    factor=WIDTH**0.5,
    cast=Cast.BEFORE_WEIGHT,
    out_dtype=PROMOTED,
)

NORMS = (
    Norm(
        _family("llama"),
        """
        aimv2.Aimv2RMSNorm apertus.ApertusRMSNorm apertus1p5.Apertus1p5TextRMSNorm arcee.ArceeRMSNorm
        aria.AriaTextRMSNorm axk1.AXK1RMSNorm axk2.AXK2RMSNorm bailing_hybrid.BailingHybridRMSNorm
        bamba.BambaRMSNorm bitnet.BitNetRMSNorm blt.BltRMSNorm chameleon.ChameleonRMSNorm clvp.ClvpRMSNorm
        cohere2_moe.Cohere2MoeRMSNorm cosmos3_edge.Cosmos3EdgeTextRMSNorm csm.CsmRMSNorm cwm.CwmRMSNorm
        deepseek_ocr2.DeepseekOcr2TextRMSNorm deepseek_ocr2.DeepseekOcr2VisionRMSNorm deepseek_v2.DeepseekV2RMSNorm
        deepseek_v3.DeepseekV3RMSNorm deepseek_v32.DeepseekV32RMSNorm deimv2.Deimv2RMSNorm dia.DiaRMSNorm
        diffllama.DiffLlamaRMSNorm doge.DogeRMSNorm dots1.Dots1RMSNorm dots3_note.Dots3NoteRMSNorm emu3.Emu3RMSNorm
        ernie4_5.Ernie4_5RMSNorm ernie4_5_moe.Ernie4_5_MoeRMSNorm ernie4_5_vl_moe.Ernie4_5_VLMoeRMSNorm
        evolla.EvollaRMSNorm exaone4.Exaone4RMSNorm exaone4_5.Exaone4_5_RMSNorm exaone_moe.ExaoneMoeRMSNorm
        falcon_h1.FalconH1RMSNorm falcon_mamba.FalconMambaRMSNorm glm.GlmRMSNorm glm4.Glm4RMSNorm
        glm4_moe.Glm4MoeRMSNorm glm4_moe_lite.Glm4MoeLiteRMSNorm glm4v.Glm4vRMSNorm glm4v_moe.Glm4vMoeRMSNorm
        glm4v_moe.Glm4vMoeTextRMSNorm glm5_next.Glm5NextRMSNorm glm5_next.Glm5NextTextRMSNorm
        glm_image.GlmImageRMSNorm glm_moe_dsa.GlmMoeDsaRMSNorm glm_ocr.GlmOcrRMSNorm granite.GraniteRMSNorm
        granite4_vision.Granite4VisionTextRMSNorm granite_docling.GraniteDoclingTextRMSNorm
        granite_swa.GraniteSWARMSNorm granitemoe.GraniteMoeRMSNorm granitemoe_swa.GraniteMoeSWARMSNorm
        granitemoehybrid.GraniteMoeHybridRMSNorm granitemoeshared.GraniteMoeSharedRMSNorm
        higgs_audio_v2.HiggsAudioV2RMSNorm hunyuan_v1_dense.HunYuanDenseV1RMSNorm hunyuan_v1_moe.HunYuanMoEV1RMSNorm
        hunyuan_vl.HunYuanVLRMSNorm hy_v3.HYV3RMSNorm hy_v4.HYV4RMSNorm hy_v4_vl.HYV4VLRMSNorm
        hyperclovax.HyperCLOVAXRMSNorm idefics2.Idefics2RMSNorm idefics3.Idefics3RMSNorm inkling.InklingRMSNorm
        internvl.InternVLVisionRMSNorm jamba.JambaRMSNorm jetmoe.JetMoeRMSNorm kimi_linear.KimiLinearRMSNorm
        kolibri1.Kolibri1RMSNorm laguna.LagunaRMSNorm lfm2.Lfm2RMSNorm lfm2_moe.Lfm2MoeRMSNorm lfm3.Lfm3RMSNorm
        lfm3_vl.Lfm3VlVisionRMSNorm lighton_ocr.LightOnOcrRMSNorm llama.LlamaRMSNorm
        longcat_flash.LongcatFlashRMSNorm mamba.MambaRMSNorm mamba2.Mamba2RMSNorm mellum.MellumRMSNorm
        mimo_v2_flash.MiMoV2FlashRMSNorm minicpm3.MiniCPM3RMSNorm minimax.MiniMaxRMSNorm minimax_m2.MiniMaxM2RMSNorm
        ministral.MinistralRMSNorm ministral3.Ministral3RMSNorm mistral.MistralRMSNorm mistral3.Mistral3RMSNorm
        mistral4.Mistral4RMSNorm mistral_large4.MistralLarge4RMSNorm mixtral.MixtralRMSNorm mllama.MllamaTextRMSNorm
        molmo2.Molmo2RMSNorm muse_glimmer_assistant.MuseGlimmerAssistantRMSNorm neucodec.NeuCodecRMSNorm
        ovis2.Ovis2RMSNorm paddleocr_vl.PaddleOCRRMSNorm pe_audio.PeAudioEncoderRMSNorm
        pe_audio_video.PeAudioVideoEncoderRMSNorm pe_video.PeVideoEncoderRMSNorm phi3.Phi3RMSNorm
        phi4_multimodal.Phi4MultimodalRMSNorm pixtral.PixtralRMSNorm qianfan_ocr.QianfanOCRVisionRMSNorm
        qwen2.Qwen2RMSNorm qwen2_5_omni.Qwen2_5OmniRMSNorm qwen2_5_vl.Qwen2_5_VLRMSNorm qwen2_moe.Qwen2MoeRMSNorm
        qwen2_vl.Qwen2VLRMSNorm qwen3.Qwen3RMSNorm qwen3_moe.Qwen3MoeRMSNorm
        qwen3_omni_moe.Qwen3OmniMoeCode2WavRMSNorm qwen3_omni_moe.Qwen3OmniMoeRMSNorm
        qwen3_omni_moe.Qwen3OmniMoeTextRMSNorm qwen3_omni_moe.Qwen3OmniMoeThinkerTextRMSNorm
        qwen3_vl.Qwen3VLTextRMSNorm qwen3_vl_moe.Qwen3VLMoeTextRMSNorm sapiens2.Sapiens2RMSNorm
        seed_oss.SeedOssRMSNorm smollm3.SmolLM3RMSNorm solar_open.SolarOpenRMSNorm timesfm.TimesFmRMSNorm
        timesfm2_5.TimesFm2_5RMSNorm ultrabert.UltrabertRMSNorm ultravbert.UltraVBertRMSNorm
        unlimited_ocr.UnlimitedOcrTextRMSNorm vibevoice.VibeVoiceRMSNorm
        vibevoice_acoustic_tokenizer.VibeVoiceAcousticTokenizerRMSNorm vibevoice_asr.VibeVoiceAsrRMSNorm
        voxtral_realtime.VoxtralRealtimeRMSNorm xcodec2.Xcodec2RMSNorm youtu.YoutuRMSNorm zamba.ZambaRMSNorm
        zamba2.Zamba2RMSNorm zaya.ZayaRMSNorm
    """,
    ),
    Norm(_family("llama4"), "eurobert.EuroBertRMSNorm llama4.Llama4TextRMSNorm olmoe.OlmoeRMSNorm"),
    Norm(_family("cpmant"), "cpmant.CpmAntLayerNorm", args=(SimpleNamespace(eps=1e-6, hidden_size=WIDTH),)),
    Norm(_family("xlstm"), "xlstm.xLSTMRMSNorm"),
    Norm(
        _family("olmo2"),
        """
        afmoe.AfmoeRMSNorm beam.BeamRMSNorm deepseek_v4.DeepseekV4RMSNorm diffusion_gemma.DiffusionGemmaRMSNorm
        embedding_gemma2.EmbeddingGemma2RMSNorm flex_olmo.FlexOlmoRMSNorm flint.FlintRMSNorm gemma3n.Gemma3nRMSNorm
        gemma4.Gemma4RMSNorm gemma4_unified.Gemma4UnifiedRMSNorm gpt_oss.GptOssRMSNorm helium.HeliumRMSNorm
        inkling2.Inkling2RMSNorm inkling2_loop.Inkling2LoopRMSNorm kyutai_speech_to_text.KyutaiSpeechToTextRMSNorm
        lara_mini.LaraMiniRMSNorm moshi.MoshiRMSNorm muse_glimmer.MuseGlimmerRMSNorm muse_spark.MuseSparkRMSNorm
        nemotron_h.NemotronHRMSNorm nemotron_h_omni.NemotronH_Omni_RMSNorm neomme.NeoMMERMSNorm olmo2.Olmo2RMSNorm
        olmo3.Olmo3RMSNorm olmo_hybrid.OlmoHybridRMSNorm openai_privacy_filter.OpenAIPrivacyFilterRMSNorm
    """,
    ),
    Norm(
        _family("gemma"),
        """
        gemma.GemmaRMSNorm gemma2.Gemma2RMSNorm gemma3.Gemma3RMSNorm minimax_m3_vl.MiniMaxM3VLRMSNorm
        muse_glimmer.MuseGlimmerTextCenteredRMSNorm qwen3_5.Qwen3_5RMSNorm qwen3_5_moe.Qwen3_5MoeRMSNorm
        qwen3_next.Qwen3NextRMSNorm recurrent_gemma.RecurrentGemmaRMSNorm step3p7.Step3p7RMSNorm
        t5gemma.T5GemmaRMSNorm t5gemma2.T5Gemma2RMSNorm vaultgemma.VaultGemmaRMSNorm
    """,
    ),
    Norm(_family("gemma", groups=GROUPS), "qwen4_exp.Qwen4ExpTextRMSNorm", args=(WIDTH, WIDTH // GROUPS)),
    Norm(_family("muse-spark"), "muse_spark.MuseSparkTextCenteredRMSNorm"),
    Norm(_family("muse-spark-input-scaled"), "muse_spark.MuseSparkTextInputScaledRMSNorm"),
    Norm(
        _family("t5"),
        """
        idefics.IdeficsRMSNorm kosmos2_5.Kosmos2_5LayerNorm longt5.LongT5LayerNorm mt5.MT5LayerNorm
        pix2struct.Pix2StructLayerNorm pop2piano.Pop2PianoLayerNorm switch_transformers.SwitchTransformersLayerNorm
        t5.T5LayerNorm udop.UdopLayerNorm umt5.UMT5LayerNorm
    """,
    ),
    Norm(
        _family("hrm"),
        """
        esmfold2.EsmFold2RMSNorm hrm_text.HrmTextRMSNorm inkling2.Inkling2UnweightedRMSNorm
        inkling2_loop.Inkling2LoopUnweightedRMSNorm llama4.Llama4TextL2Norm nanochat.NanoChatRMSNorm
    """,
        args=(),
    ),
    Norm(_family("falcon-mamba-weightless"), "falcon_mamba.FalconMambaWeightlessRMSNorm"),
    Norm(
        _family("deepseek-v4-unweighted"),
        "deepseek_v4.DeepseekV4UnweightedRMSNorm glm5_next.Glm5NextTextUnweightedRMSNorm",
        args=(),
    ),
    Norm(_family("dory-l2"), "dory.DoryL2Norm", args=()),
    Norm(_family("imagegpt"), "imagegpt.ImageGPTLayerNorm"),
    Norm(_family("gradium-timestep"), "gradium_phonon_tts.GradiumPhononTTSTimestepNorm"),
    Norm(_family("pocket-tts"), "pocket_tts.PocketTTSTimestepNorm"),
    Norm(_family("gpt2"), "esmc.EsmcLayerNorm"),
    Norm(_family("gpt2"), "esm.EsmFoldLayerNorm", weights="own"),
    Norm(
        _family("gpt2"),
        "patchtsmixer.PatchTSMixerNormLayer",
        args=(SimpleNamespace(norm_mlp="LayerNorm", d_model=WIDTH, norm_eps=1e-5),),
        call="wrapped",
    ),
    Norm(_family("gpt2"), "stablelm.StableLmLayerNormPerHead", args=(WIDTH, HEADS), call="head_by_head"),
    Norm(_family("gpt2"), "dinov3_convnext.DINOv3ConvNextLayerNorm", args=(WIDTH,)),
    Norm(
        _family("convnext"),
        """
        convnext.ConvNextLayerNorm convnextv2.ConvNextV2LayerNorm deepseek_ocr2.DeepseekOcr2SamLayerNorm
        deepseek_vl_hybrid.DeepseekVLHybridLayerNorm edgetam.EdgeTamLayerNorm edgetam_video.EdgeTamVideoLayerNorm
        got_ocr2.GotOcr2LayerNorm lw_detr.LwDetrLayerNorm pp_formulanet.PPFormulaNetLayerNorm
        rf_detr.RfDetrLayerNorm sam.SamLayerNorm sam2.Sam2LayerNorm sam2_video.Sam2VideoLayerNorm
        sam3_tracker.Sam3TrackerLayerNorm sam3_tracker_video.Sam3TrackerVideoLayerNorm sam_hq.SamHQLayerNorm
        seggpt.SegGptLayerNorm slanext.SLANeXtLayerNorm unlimited_ocr.UnlimitedOcrSamLayerNorm
    """,
    ),
    Norm(
        _family("convnext"),
        """
        eomt.EomtLayerNorm2d eomt_dinov3.EomtDinov3LayerNorm2d videomt.VideomtLayerNorm2d
    """,
        call="image",
    ),
    Norm(_family("squeezebert"), "squeezebert.SqueezeBertLayerNorm", call="sequence"),
    Norm(_family("nemotron"), "nemotron.NemotronLayerNorm1P videoprism.VideoPrismLayerNorm"),
    Norm(_family("moonshine-streaming"), "moonshine_streaming.MoonshineStreamingLayerNorm"),
    Norm(_family("chameleon-qk"), "chameleon.ChameleonLayerNorm", args=((HEADS, WIDTH),), call="heads"),
    Norm(_family("esmfold2"), "esmfold2.EsmFold2LayerNorm", weights="float32"),
    Norm(_family("olmo"), "olmo.OlmoLayerNorm"),
    Norm(
        _family("cohere"),
        """
        cohere.CohereLayerNorm cohere2.Cohere2LayerNorm cohere2_moe.Cohere2MoeLayerNorm
        cohere_compass.CohereCompassLayerNorm
    """,
    ),
    Norm(_family("deberta"), "deberta.DebertaLayerNorm", args=(WIDTH, 1e-7)),
    Norm(_family("vitdet", axes=(-3,)), "vitdet.VitDetLayerNorm", call="channels"),
    Norm(
        _family("pocket-tts-flow"),
        """
        gradium_phonon_tts.GradiumPhononTTSFlowLayerNorm pocket_tts.PocketTTSFlowLayerNorm
    """,
    ),
    Norm(_family("xlstm-multihead"), "xlstm.xLSTMMultiHeadLayerNorm", args=(HEADS, WIDTH), call="heads_joined"),
    Norm(
        _family("mamba2-gated", groups=GROUPS),
        """
        bamba.BambaRMSNormGated granitemoehybrid.GraniteMoeHybridRMSNormGated mamba2.MambaRMSNormGated
        nemotron_h.NemotronHRMSNormGated zamba2.Zamba2RMSNormGated
    """,
        args=(WIDTH, WIDTH // GROUPS),
        call="gated",
    ),
    Norm(
        _family("qwen3-next-gated"),
        """
        olmo_hybrid.OlmoHybridRMSNormGated qwen3_5.Qwen3_5RMSNormGated qwen3_5_moe.Qwen3_5MoeRMSNormGated
        qwen3_next.Qwen3NextRMSNormGated qwen4_exp.Qwen4ExpTextRMSNormGated
    """,
        call="gated",
    ),
    Norm(_family("lara-mini-gated"), "lara_mini.LaraMiniRMSNormGated", call="gated"),
    Norm(
        _family("kimi-linear-gated"),
        """
        bailing_hybrid.BailingHybridRMSNormGated glm5_next.Glm5NextTextRMSNormGated
        kimi_linear.KimiLinearRMSNormGated
    """,
        call="gated",
    ),
    Norm(
        _family("falcon-h1-gated", groups=GROUPS),
        "falcon_h1.FalconH1RMSNormGated",
        args=(WIDTH, 1e-6, GROUPS, True),
        call="gated",
    ),
    Norm(
        _family("falcon-h1-gated-first", groups=GROUPS),
        "falcon_h1.FalconH1RMSNormGated",
        args=(WIDTH, 1e-6, GROUPS, False),
        call="gated",
    ),
    Norm(
        _family("chameleon-qk"),
        "wavtokenizer.WavTokenizerAdaLayerNorm",
        args=(SimpleNamespace(decoder_hidden_size=WIDTH, norm_eps=1e-5, adanorm_num_embeddings=5),),
        call="embedded",
    ),
    Norm(
        _MODULATED,
        """
        qwen2_5_omni.Qwen2_5_OmniAdaLayerNormZero qwen2_5_omni.Qwen2_5_OmniAdaLayerNormZero_Final
    """,
        call="modulated",
    ),
    Norm(
        _FROZEN,
        """
        conditional_detr.ConditionalDetrFrozenBatchNorm2d d_fine.DFineFrozenBatchNorm2d
        dab_detr.DabDetrFrozenBatchNorm2d deformable_detr.DeformableDetrFrozenBatchNorm2d
        deimv2.Deimv2FrozenBatchNorm2d detr.DetrFrozenBatchNorm2d grounding_dino.GroundingDinoFrozenBatchNorm2d
        mm_grounding_dino.MMGroundingDinoFrozenBatchNorm2d pp_doclayout_v2.PPDocLayoutV2FrozenBatchNorm2d
        pp_doclayout_v3.PPDocLayoutV3FrozenBatchNorm2d pp_doclayout_v4.PPDocLayoutV4FrozenBatchNorm2d
        rt_detr.RTDetrFrozenBatchNorm2d rt_detr_v2.RTDetrV2FrozenBatchNorm2d
        table_transformer.TableTransformerFrozenBatchNorm2d
    """,
        call="frozen",
    ),
    Norm(
        _GROUP_ON_IMAGE,
        "emu3.Emu3VQVAEGroupNorm",
        args=(),
        kwargs=(("num_groups", GROUPS), ("num_channels", WIDTH)),
        call="grouped",
    ),
    Norm(replace(_GROUP_ON_IMAGE, groups=1), "poolformer.PoolFormerGroupNorm", call="grouped"),
    Norm(
        _MASKED_GROUP,
        """
        pe_audio.PeAudioMaskedGroupNorm pe_audio_video.PeAudioVideoMaskedGroupNorm pe_video.PeVideoMaskedGroupNorm
    """,
        args=(GROUPS, WIDTH),
        call="masked",
    ),
    Norm(
        _GROUP,
        """
        pe_audio.PeAudioMaskedGroupNorm pe_audio_video.PeAudioVideoMaskedGroupNorm pe_video.PeVideoMaskedGroupNorm
    """,
        args=(GROUPS, WIDTH),
        call="grouped_sequence",
    ),
    Norm(
        _QK,
        "zaya.ZayaQKNorm",
        args=(SimpleNamespace(head_dim=WIDTH, num_key_value_heads=HEADS),),
        call="qk",
        weights="own",
        ulps=8,  # its root is that of torch.norm, in another order,
    ),
    Norm(
        _BATCH,
        "patchtsmixer.PatchTSMixerBatchNorm patchtst.PatchTSTBatchNorm",
        args=(SimpleNamespace(d_model=WIDTH, norm_eps=1e-5),),
        call="batch",
    ),
)

NOT_EXPRESSIBLE = {
    "hy_v4.HYV4UnweightedRMSNorm hy_v4_vl.HYV4VLUnweightedRMSNorm": "returns 1 / rms alone",
    "gemma3n.Gemma3nAudioCumulativeGroupNorm": "statistics of all frames so far: each position has a window of its own",
    "mobilebert.NoNorm phi4_multimodal.Phi4MultimodalAudioMeanVarianceNormLayer": "an affine map: nothing is measured",
    "autoformer.AutoformerLayernorm": "LayerNorm less the mean of its outputs over the sequence: two statistics",
    "axk2.AXK2GatedRMSNorm": "the gate is a perceptron of the normalized value itself",
    "esmfold2.EsmFold2AdaptiveLayerNorm": "normalizes a second tensor, and projects its gate and shift from that",
}

# Regular expressions of classes that hold a norm among other things, or have it in the name of their model.
BLOCKS = (
    r"RobertaPreLayerNorm\w+",
    r"\w+NormalEstimat\w+",
    r"\w+(Group|Layer|Batch)NormConvLayer",
    r"\w+Conv(Batch)?[Nn]ormLayer",
    r"\w+Encoder(Layer)?StableLayerNorm",
    r"\w+NormedEmbedding",
    r"BitGroupNormActivation",
    r"ConvDropoutLayerNorm",
    r"DbrxNormAttentionNorm",
    r"Emu3VQVAESpatialNorm",  # a gain and a shift for each pixel, by convolution
    r"VibeVoiceDiffusionHeadAdaLayerNorm",  # a feed-forward layer with its norm
    r"VoxtralRealtimeTextAdaRmsNorm",  # the perceptron that makes a scale
    r"ZoeDepthAttractorLayerUnnormed",
)
