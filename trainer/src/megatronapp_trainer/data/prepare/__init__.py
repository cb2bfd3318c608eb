"""The command `megatronapp data prepare`: from text to Megatron's .bin/.idx pairs."""
