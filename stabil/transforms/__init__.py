"""Protect: published stabilisers and the guard, as Optax transformations."""

from stabil.transforms._accumulate import AccumulateState as AccumulateState
from stabil.transforms._accumulate import MicroBatchRecord as MicroBatchRecord
from stabil.transforms._accumulate import accumulate as accumulate
from stabil.transforms._accumulate import (
    skip_bad_micro_batches as skip_bad_micro_batches,
)
from stabil.transforms._adaclip import ScaleByAdaclipState as ScaleByAdaclipState
from stabil.transforms._adaclip import scale_by_adaclip as scale_by_adaclip
from stabil.transforms._adafn import ScaleByAdafnState as ScaleByAdafnState
from stabil.transforms._adafn import gradient_stabilizer as gradient_stabilizer
from stabil.transforms._adafn import scale_by_adafn as scale_by_adafn
from stabil.transforms._adagc import adagc as adagc
from stabil.transforms._adagc_rules import AdaGCState as AdaGCState
from stabil.transforms._agc import (
    AdaptiveGradientClipState as AdaptiveGradientClipState,
)
from stabil.transforms._agc import adaptive_gradient_clip as adaptive_gradient_clip
from stabil.transforms._autoclip import AutoClipState as AutoClipState
from stabil.transforms._autoclip import autoclip as autoclip
from stabil.transforms._backoff import BackoffState as BackoffState
from stabil.transforms._backoff import backoff as backoff
from stabil.transforms._clip_by_global_norm import (
    ClipByGlobalNormState as ClipByGlobalNormState,
)
from stabil.transforms._clip_by_global_norm import (
    clip_by_global_norm as clip_by_global_norm,
)
from stabil.transforms._clip_update_norm import (
    ClipUpdateNormState as ClipUpdateNormState,
)
from stabil.transforms._clip_update_norm import clip_update_norm as clip_update_norm
from stabil.transforms._clip_update_rms import ClipUpdateRmsState as ClipUpdateRmsState
from stabil.transforms._clip_update_rms import clip_update_rms as clip_update_rms
from stabil.transforms._clippy import ClippyState as ClippyState
from stabil.transforms._clippy import clippy as clippy
from stabil.transforms._clippy_adagrad import ClippyAdagradState as ClippyAdagradState
from stabil.transforms._clippy_adagrad import clippy_adagrad as clippy_adagrad
from stabil.transforms._find_moments import MomentArray as MomentArray
from stabil.transforms._find_moments import Moments as Moments
from stabil.transforms._find_moments import find_moments as find_moments
from stabil.transforms._guard import GuardState as GuardState
from stabil.transforms._guard import guard as guard
from stabil.transforms._lost_updates import LostUpdatesState as LostUpdatesState
from stabil.transforms._lost_updates import lost_updates as lost_updates
from stabil.transforms._moments import restart_moments as restart_moments
from stabil.transforms._msign import MSignState as MSignState
from stabil.transforms._msign import msign as msign
from stabil.transforms._prevent import Finding as Finding
from stabil.transforms._prevent import check_parameters as check_parameters
from stabil.transforms._reset_moments import ResetMomentsState as ResetMomentsState
from stabil.transforms._reset_moments import reset_moments as reset_moments
from stabil.transforms._skip import SkipRecord as SkipRecord
from stabil.transforms._skip import leaf_name as leaf_name
from stabil.transforms._skip import was_skipped as was_skipped
from stabil.transforms._skip_nonfinite import SkipNonfiniteState as SkipNonfiniteState
from stabil.transforms._skip_nonfinite import skip_nonfinite as skip_nonfinite
from stabil.transforms._skip_spikes import SkipSpikesState as SkipSpikesState
from stabil.transforms._skip_spikes import skip_spikes as skip_spikes
from stabil.transforms._spam import ScaleBySpamState as ScaleBySpamState
from stabil.transforms._spam import scale_by_spam as scale_by_spam
from stabil.transforms._spam import spam as spam
from stabil.transforms._spike_aware import SpikeAwareState as SpikeAwareState
from stabil.transforms._spike_aware import spike_aware as spike_aware
from stabil.transforms._stable_adamw import StableAdamWState as StableAdamWState
from stabil.transforms._stable_adamw import (
    scale_by_stable_adamw as scale_by_stable_adamw,
)
from stabil.transforms._stable_adamw import stable_adamw as stable_adamw
from stabil.transforms._stable_spam import (
    ScaleByStableSpamState as ScaleByStableSpamState,
)
from stabil.transforms._stable_spam import scale_by_stable_spam as scale_by_stable_spam
from stabil.transforms._stable_spam import stable_spam as stable_spam
from stabil.transforms._vitals import select as select
from stabil.transforms._vitals import vitals as vitals
from stabil.transforms._window import Window as Window
from stabil.transforms._z_loss import z_loss as z_loss
from stabil.transforms._zclip import ZClipState as ZClipState
from stabil.transforms._zclip import zclip as zclip

__all__ = [
    "AccumulateState",
    "AdaGCState",
    "AdaptiveGradientClipState",
    "AutoClipState",
    "BackoffState",
    "ClipByGlobalNormState",
    "ClipUpdateNormState",
    "ClipUpdateRmsState",
    "ClippyAdagradState",
    "ClippyState",
    "Finding",
    "GuardState",
    "LostUpdatesState",
    "MSignState",
    "MicroBatchRecord",
    "MomentArray",
    "Moments",
    "ResetMomentsState",
    "ScaleByAdaclipState",
    "ScaleByAdafnState",
    "ScaleBySpamState",
    "ScaleByStableSpamState",
    "SkipNonfiniteState",
    "SkipRecord",
    "SkipSpikesState",
    "SpikeAwareState",
    "StableAdamWState",
    "Window",
    "ZClipState",
    "accumulate",
    "adagc",
    "adaptive_gradient_clip",
    "autoclip",
    "backoff",
    "check_parameters",
    "clip_by_global_norm",
    "clip_update_norm",
    "clip_update_rms",
    "clippy",
    "clippy_adagrad",
    "find_moments",
    "gradient_stabilizer",
    "guard",
    "leaf_name",
    "lost_updates",
    "msign",
    "reset_moments",
    "restart_moments",
    "scale_by_adaclip",
    "scale_by_adafn",
    "scale_by_spam",
    "scale_by_stable_adamw",
    "scale_by_stable_spam",
    "select",
    "skip_bad_micro_batches",
    "skip_nonfinite",
    "skip_spikes",
    "spam",
    "spike_aware",
    "stable_adamw",
    "stable_spam",
    "vitals",
    "was_skipped",
    "z_loss",
    "zclip",
]
