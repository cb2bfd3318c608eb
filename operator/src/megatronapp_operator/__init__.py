"""megatronapp_operator."""
