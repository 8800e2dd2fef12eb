"""What depends on the insides of megatron-core."""
