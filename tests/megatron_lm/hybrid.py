"""A stack of Mamba, attention and MLP layers of megatron-core's own: ``--spec tests.megatron_lm.hybrid stack``.

Upstream's layers are Transformer Engine's. For tests alone.
"""

import megatron.core.ssm.mamba_block as blocks
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add as added
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

blocks.TENorm = WrappedTorchNorm  # the norm behind all layers has no place in a specification

_mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear))
_attention = ModuleSpec(
    SelfAttention,
    params={"attn_mask_type": AttnMaskType.causal},
    submodules=SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
    ),
)
_mlp = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
stack = ModuleSpec(
    MambaStack,
    submodules=MambaStackSubmodules(
        mamba_layer=ModuleSpec(
            MambaLayer, submodules=MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=_mixer, mamba_bda=added)
        ),
        attention_layer=ModuleSpec(
            TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=WrappedTorchNorm, self_attention=_attention, self_attn_bda=added
            ),
        ),
        mlp_layer=ModuleSpec(
            MLPLayer,
            submodules=TransformerLayerSubmodules(pre_mlp_layernorm=WrappedTorchNorm, mlp=_mlp, mlp_bda=added),
        ),
    ),
)
