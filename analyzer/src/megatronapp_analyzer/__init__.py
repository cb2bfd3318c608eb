"""Hub, agent and detector of MegatronApp, and its server of MegaScope."""
