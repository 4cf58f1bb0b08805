"""What aten ops do to a dataflow: move, act on single elements, mix, reduce, or attend.

Names are those of ``Op.short``. An op in none of the sets mixes: unknown is never transparent.
"""

from __future__ import annotations

__all__ = [
    "ADD",
    "ATTENTION",
    "CAST",
    "COMPARISON",
    "CONV",
    "DIV",
    "DROPOUT",
    "JOIN",
    "LINEAR",
    "MATMUL",
    "MUL",
    "NOT_ACTIVATION",
    "OVERWRITE",
    "POINTWISE",
    "POOL",
    "RECAST",
    "SOFTMAX",
    "SUB",
    "VIEW",
]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# to another dtype
RECAST = frozenset({"to", "_to_copy", "type_as"})

CAST = RECAST | _words(
    "to _to_copy type_as contiguous clone detach alias lift_fresh lift_fresh_copy lift view_as_complex view_as_real"
)


# the same elements, moved, repeated or selected
VIEW = CAST | _words(
    "view reshape permute transpose t mT mH numpy_T matrix_H adjoint unsqueeze squeeze expand expand_as "
    "flatten unflatten movedim moveaxis swapaxes swapdims view_as reshape_as _unsafe_view _reshape_alias "
    "narrow select slice index_select split chunk unbind split_with_sizes unsafe_split unsafe_chunk "
    "tensor_split hsplit vsplit dsplit roll flip repeat repeat_interleave tile pad constant_pad_nd "
    "reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d gather index "
    "masked_select take_along_dim as_strided unfold pixel_shuffle pixel_unshuffle channel_shuffle "
    "broadcast_to unsafe_split_with_sizes real ravel rot90 atleast_1d atleast_2d atleast_3d squeeze_copy "
    "to_padded_tensor"
)

ADD = frozenset({"add", "_add_relu"})
SUB = frozenset({"sub", "subtract", "rsub"})
MUL = frozenset({"mul", "multiply"})
DIV = frozenset({"div", "divide", "true_divide"})

JOIN = frozenset({"cat", "concat", "stack", "hstack", "vstack"})

DROPOUT = frozenset({"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout"})

# one input element decides one output element
POINTWISE = (
    ADD
    | SUB
    | MUL
    | DIV
    | DROPOUT
    | _words(
        "relu relu6 gelu silu tanh sigmoid hardswish hardsigmoid hardtanh leaky_relu elu selu celu mish "
        "softplus softsign logsigmoid log_sigmoid log_sigmoid_forward erf erfc exp exp2 log log2 log10 log1p "
        "expm1 sin cos tan atan sinh cosh neg negative abs absolute pow float_power square sqrt rsqrt "
        "acos asin acosh asinh atanh "
        "reciprocal clamp clamp_min clamp_max clip sign sgn round floor ceil trunc frac nan_to_num prelu "
        "_prelu_kernel threshold tril triu hardshrink softshrink tanhshrink rrelu logit maximum minimum fmax "
        "fmin lerp addcmul addcdiv where masked_fill masked_scatter atan2 fmod remainder floor_divide polar "
        "complex glu special_expit sinc hypot logaddexp heaviside"
    )
)

COMPARISON = _words(
    "gt lt ge le eq ne greater less greater_equal less_equal not_equal logical_and logical_or logical_not "
    "bitwise_and bitwise_or bitwise_not isfinite isnan isinf"
)

# part of a tensor replaced by another's elements
OVERWRITE = _words(
    "copy index_put _index_put_impl index_copy scatter scatter_add index_add masked_scatter slice_scatter "
    "select_scatter index_fill masked_fill fill zero where diagonal_scatter slice_copy"
)

LINEAR = frozenset({"linear", "addmm", "mm", "addmv", "bilinear", "mkldnn_linear"})
MATMUL = _words("matmul bmm baddbmm einsum mv dot inner tensordot addbmm linalg_multi_dot chain_matmul")
CONV = _words(
    "conv1d conv2d conv3d convolution _convolution conv_transpose1d conv_transpose2d conv_transpose3d "
    "mkldnn_convolution convolution_overrideable"
)
POOL = _words(
    "mean sum amax amin max min avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d "
    "max_pool2d_with_indices adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d _adaptive_avg_pool2d "
    "_adaptive_avg_pool3d upsample_nearest1d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d "
    "upsample_linear1d _upsample_bilinear2d_aa _upsample_bicubic2d_aa interpolate"
)
SOFTMAX = frozenset({"softmax", "_softmax", "_safe_softmax", "sparsemax"})
ATTENTION = frozenset(
    [
        "scaled_dot_product_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_attention_math",
        "_scaled_dot_product_cudnn_attention",
        "flex_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ]
)

# new tensors that only take their shape from an activation, and random masks
NOT_ACTIVATION = _words(
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones "
    "new_empty new_full new_empty_strided bernoulli uniform normal random exponential zero fill isnan "
    "isinf isfinite argmax argmin sort_indices one_hot"
)
