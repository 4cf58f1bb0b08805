"""The rules. Each is one module: its docstring is its page, its file name its name.

To add one, write the module (CONTRIBUTING: "a rule") and import it below.
"""

from __future__ import annotations

from types import ModuleType

from normwise._parts import collect
from normwise.checkup.rules import attribute_without_effect as attribute_without_effect
from normwise.checkup.rules import bad_buffers as bad_buffers
from normwise.checkup.rules import cancelling_variance as cancelling_variance
from normwise.checkup.rules import channel_is_time as channel_is_time
from normwise.checkup.rules import collapsed_to_zero as collapsed_to_zero
from normwise.checkup.rules import collective_in_branch as collective_in_branch
from normwise.checkup.rules import decayed_norm_scale as decayed_norm_scale
from normwise.checkup.rules import deep_post_norm_no_warmup as deep_post_norm_no_warmup
from normwise.checkup.rules import deepnorm_half_applied as deepnorm_half_applied
from normwise.checkup.rules import degenerate_reduction as degenerate_reduction
from normwise.checkup.rules import double_norm as double_norm
from normwise.checkup.rules import double_update_under_checkpoint as double_update_under_checkpoint
from normwise.checkup.rules import dtype_promotion as dtype_promotion
from normwise.checkup.rules import eps_dominates as eps_dominates
from normwise.checkup.rules import eps_lost_in_dtype as eps_lost_in_dtype
from normwise.checkup.rules import eps_or_buffers_not_restored as eps_or_buffers_not_restored
from normwise.checkup.rules import eps_outside_root as eps_outside_root
from normwise.checkup.rules import eval_buffers_differ as eval_buffers_differ
from normwise.checkup.rules import eval_undone_by_train as eval_undone_by_train
from normwise.checkup.rules import first_difference_from_reference as first_difference_from_reference
from normwise.checkup.rules import frozen_weights_live_stats as frozen_weights_live_stats
from normwise.checkup.rules import future_leak_through_norm as future_leak_through_norm
from normwise.checkup.rules import gain_mean_effect as gain_mean_effect
from normwise.checkup.rules import gains_never_moved as gains_never_moved
from normwise.checkup.rules import gradient_imbalance as gradient_imbalance
from normwise.checkup.rules import half_precision_weight_gradient as half_precision_weight_gradient
from normwise.checkup.rules import idle_depth as idle_depth
from normwise.checkup.rules import inference_writes_buffers as inference_writes_buffers
from normwise.checkup.rules import init_hit_the_norm as init_hit_the_norm
from normwise.checkup.rules import layernorm_to_rmsnorm as layernorm_to_rmsnorm
from normwise.checkup.rules import local_batch_bn as local_batch_bn
from normwise.checkup.rules import low_precision_buffers as low_precision_buffers
from normwise.checkup.rules import low_precision_statistics as low_precision_statistics
from normwise.checkup.rules import missing_final_norm as missing_final_norm
from normwise.checkup.rules import momentum_convention as momentum_convention
from normwise.checkup.rules import never_updated_stats as never_updated_stats
from normwise.checkup.rules import nonfinite_origin as nonfinite_origin
from normwise.checkup.rules import norm_adjacent_waste_or_shift as norm_adjacent_waste_or_shift
from normwise.checkup.rules import norm_gradient_not_reduced as norm_gradient_not_reduced
from normwise.checkup.rules import norm_input_collapse as norm_input_collapse
from normwise.checkup.rules import norm_keys_defaulted as norm_keys_defaulted
from normwise.checkup.rules import norm_keys_dropped as norm_keys_dropped
from normwise.checkup.rules import norm_never_used as norm_never_used
from normwise.checkup.rules import norm_over_sequence as norm_over_sequence
from normwise.checkup.rules import odd_block_out as odd_block_out
from normwise.checkup.rules import padding_in_statistics as padding_in_statistics
from normwise.checkup.rules import placement_changed_silently as placement_changed_silently
from normwise.checkup.rules import prefill_decode_mismatch as prefill_decode_mismatch
from normwise.checkup.rules import qk_norm_scale as qk_norm_scale
from normwise.checkup.rules import reciprocal_overflow_saved as reciprocal_overflow_saved
from normwise.checkup.rules import replicated_norm_diverged as replicated_norm_diverged
from normwise.checkup.rules import residual_from_normed as residual_from_normed
from normwise.checkup.rules import residual_profile as residual_profile
from normwise.checkup.rules import sample_mixing_in_eval as sample_mixing_in_eval
from normwise.checkup.rules import scale_blow_up as scale_blow_up
from normwise.checkup.rules import scale_cast_order as scale_cast_order
from normwise.checkup.rules import scale_in_wrong_branch as scale_in_wrong_branch
from normwise.checkup.rules import scale_updates_lost as scale_updates_lost
from normwise.checkup.rules import several_updates_per_step as several_updates_per_step
from normwise.checkup.rules import shared_norm_many_sites as shared_norm_many_sites
from normwise.checkup.rules import singleton_batch as singleton_batch
from normwise.checkup.rules import spike_attribution as spike_attribution
from normwise.checkup.rules import stale_averaged_model as stale_averaged_model
from normwise.checkup.rules import stream_near_dtype_limit as stream_near_dtype_limit
from normwise.checkup.rules import tiny_statistics_batch as tiny_statistics_batch
from normwise.checkup.rules import train_eval_gap as train_eval_gap
from normwise.checkup.rules import train_mode_at_inference as train_mode_at_inference
from normwise.checkup.rules import unbiased_variance as unbiased_variance
from normwise.checkup.rules import unit_offset_mismatch as unit_offset_mismatch
from normwise.checkup.rules import unnormalised_attention_logits as unnormalised_attention_logits
from normwise.checkup.rules import warm_up_of_stats_unfinished as warm_up_of_stats_unfinished
from normwise.checkup.rules import wrong_gradient as wrong_gradient
from normwise.checkup.rules import zero_scale_channels as zero_scale_channels

__all__ = ["all_rules"]

_NEEDS = ("ZH", "CODE", "SEVERITY", "check", "bad", "good")


def all_rules() -> dict[str, ModuleType]:
    """Return every rule by its kebab-case name, in the order of the codes."""
    found = collect(globals(), needs=_NEEDS)
    return dict(sorted(found.items(), key=lambda item: item[1].CODE))
