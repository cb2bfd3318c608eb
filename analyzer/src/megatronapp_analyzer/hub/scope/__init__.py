"""MegaScope in the hub: merges what ranks publish, keeps some of it, and shows it (docs/scope-protocol.md)."""
